"""Fully sharded data parallel training from first principles, to be read in one sitting.

    torchrun --nproc-per-node 2 examples/fsdp_in_250_lines.py

It needs torch alone. Ten numbered steps take a parameter from the model to the optimizer and back.
`fsdp_wrap` takes the same steps; docs/architecture.md says in which files. Optional parts are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

# Torch 2.13 gave both a new name.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Owned = dict[nn.Parameter, list[tuple[nn.Module, str]]]  # parameters, and where modules show each


class Unit:
    """A module with the parameters that no nested unit owns, of which each rank keeps one shard."""

    def __init__(self, module: nn.Module, owned: Owned, compute: torch.dtype, reduce: torch.dtype):
        self.module, self.reduce_dtype = module, reduce
        self.slots = list(owned.values())

        # Step 2, flatten: the parameters lie one after the other in one 1-D tensor. Zeros at its end make its
        # length a multiple of the number of ranks, so that all shards have the same length.
        sizes = [param.numel() for param in owned]
        self.cuts = list(zip(accumulate([0, *sizes]), sizes, [param.shape for param in owned]))
        flat = torch.cat([param.detach().flatten() for param in owned])
        flat = F.pad(flat, (0, -len(flat) % dist.get_world_size()))

        # Step 3, shard: this rank keeps its slice, in full precision. The optimizer sees nothing else.
        self.shard = nn.Parameter(flat.chunk(dist.get_world_size())[dist.get_rank()].clone())

        # Modules compute with leaves: one for each parameter, a view into the unsharded buffer. Autograd puts
        # gradients on them. Leaves live as long as the unit. Only the memory of the buffer comes and goes.
        self.full = torch.empty_like(flat, dtype=compute)
        self.nbytes = self.full.untyped_storage().nbytes()
        self.leaves = [nn.Parameter(view) for view in self.views(self.full)]
        self.gathering: dist.Work | None = None
        self.reducing: tuple[dist.Work, torch.Tensor, torch.Tensor] | None = None
        self.arrived = 0  # how many leaves have got their gradients
        self.reshard()

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[start : start + size].view(shape) for start, size, shape in self.cuts]

    def show(self, tensors: list[nn.Parameter] | list[None]) -> None:
        for slots, tensor in zip(self.slots, tensors):
            for module, name in slots:  # several where modules share a parameter
                module._parameters[name] = tensor

    @property
    def is_sharded(self) -> bool:
        return self.full.untyped_storage().nbytes() == 0

    # Step 4, unshard: the ranks gather all shards into the buffer. A shard is cast before it travels, so that
    # training in 16 bits sends 16 bits. `.data` hides the write from autograd, to which leaves never change.
    def gather(self) -> None:
        if self.is_sharded:
            self.full.untyped_storage().resize_(self.nbytes)
            self.sent = self.shard.detach().to(self.full.dtype)  # kept while it travels
            self.gathering = all_gather(self.full.data, self.sent, async_op=True)

    def unshard(self) -> None:
        self.gather()  # unless it was prefetched
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
            self.show(self.leaves)

    # Step 5, reshard: the memory goes, the leaves stay. Graphs keep the leaves, and in backward their values
    # are there again. Modules show nothing meanwhile, since reading freed memory would end the process.
    def reshard(self) -> None:
        if self.gathering is not None:
            self.gathering.wait()  # it still writes
            self.gathering = None
        self.show([None] * len(self.slots))
        self.full.untyped_storage().resize_(0)

    # Step 8, reduce-scatter: gradients move from the leaves into one flat buffer, in the dtype in which they
    # are summed. Each rank gets the sum for its slice. Division comes first, so that fp16 does not overflow.
    def reduce(self) -> None:
        flat = torch.zeros_like(self.full, dtype=self.reduce_dtype)
        for leaf, view in zip(self.leaves, self.views(flat)):
            if leaf.grad is not None:  # what was not used has a gradient of zeros
                view.copy_(leaf.grad).div_(dist.get_world_size())
                leaf.grad = None
        mean = torch.empty_like(self.shard, dtype=self.reduce_dtype)
        self.reducing = reduce_scatter(mean, flat, async_op=True), mean, flat  # kept while it travels

    def finish_reduction(self) -> None:
        if self.reducing is not None:
            work, mean, _ = self.reducing
            work.wait()
            before, self.reducing = self.shard.grad, None
            self.shard.grad = mean.to(self.shard.dtype) if before is None else before + mean

    def full_values(self) -> list[torch.Tensor]:
        """Gathers the parameters in full precision."""
        flat = torch.empty_like(self.full, dtype=self.shard.dtype)
        all_gather(flat, self.shard.detach())
        return self.views(flat)


class FSDP(nn.Module):
    """Runs a model whose parameters are sharded over all ranks.

    The model has the same parameters on all ranks. Its modules of `unit_classes` become units, and the model
    itself becomes one with what is left. Modules compute in one dtype, gradients are summed in the other.
    """

    def __init__(
        self,
        model: nn.Module,
        unit_classes: tuple[type[nn.Module], ...],
        compute_dtype: torch.dtype = torch.float32,
        reduce_dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.module, self.compute_dtype = model, compute_dtype
        # Step 1, wrap: a parameter belongs to the lowest unit above it. A unit is gathered and freed as one.
        units = {name: m for name, m in model.named_modules() if isinstance(m, unit_classes) or m is model}
        owned: dict[str, Owned] = {name: {} for name in units}
        owner: dict[nn.Parameter, str] = {}
        for path, module in model.named_modules():
            above = max((name for name in units if not name or f"{path}.".startswith(f"{name}.")), key=len)
            for name, param in module.named_parameters(recurse=False):
                if owner.setdefault(param, above) != above:
                    raise ValueError(f"the units '{owner[param]}' and '{above}' share {name}: make them one")
                owned[above].setdefault(param, []).append((module, name))
        dtypes = compute_dtype, reduce_dtype
        self.units = [Unit(module, owned[name], *dtypes) for name, module in units.items() if owned[name]]
        for unit in self.units:
            self.register_hooks(unit)
        self.order, self.in_backward = list[Unit](), False

    def register_hooks(self, unit: Unit) -> None:
        unit.module.register_forward_pre_hook(lambda _, inputs: self.before_forward(unit, inputs))
        unit.module.register_forward_hook(lambda _, inputs, output: self.after_forward(unit, output))
        for leaf in unit.leaves:
            leaf.register_post_accumulate_grad_hook(lambda _: self.gradient_arrived(unit))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        for unit in self.units:
            unit.reshard()  # what was prefetched and not used has old values
        self.order, self.last_order = [], self.order
        return self.module(*inputs)

    def before_forward(self, unit: Unit, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        unit.unshard()
        self.order.append(unit)
        # Step 6, prefetch: while a unit computes, the parameters of the next one travel. So at most two units
        # are in memory. Forward goes by the order of the last forward, backward by the reverse of this one.
        self.prefetch(unit, self.last_order)
        return tuple(x.to(self.compute_dtype) if x.is_floating_point() else x for x in inputs)

    def prefetch(self, unit: Unit, order: list[Unit]) -> None:
        for following in order[order.index(unit) + 1 :][:1] if unit in order else []:
            following.gather()

    def after_forward(self, unit: Unit, output: torch.Tensor) -> None:
        unit.reshard()
        # Step 7, backward: the gradient of a unit's output is the first that the unit meets in backward.
        if output.requires_grad:
            output.register_hook(lambda _: self.before_backward(unit))

    def before_backward(self, unit: Unit) -> None:
        if not self.in_backward:
            self.in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        unit.unshard()
        self.prefetch(unit, self.order[::-1])

    def gradient_arrived(self, unit: Unit) -> None:
        unit.arrived += 1
        if unit.arrived == len(unit.leaves):
            self.end_backward_of(unit)

    def end_backward_of(self, unit: Unit) -> None:
        """Reduces and reshards a unit whose gradients are all there: nothing needs its values any more."""
        self.finish_reductions()  # one at a time bounds the memory
        unit.arrived = 0
        unit.reduce()
        unit.reshard()

    def end_backward(self) -> None:
        """Ends what is left when autograd is done: units of which some parameter has got no gradient."""
        for unit in [unit for unit in self.units if unit.arrived or not unit.is_sharded]:
            self.end_backward_of(unit)
        self.finish_reductions()
        self.in_backward = False

    def finish_reductions(self) -> None:
        for unit in self.units:
            unit.finish_reduction()

    # Step 9, optimizer: this rank's shards are updated, and have optimizer state. An elementwise
    # optimizer does to shards what it does to whole parameters.
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return (unit.shard for unit in self.units)

    # Step 10, full state dict: every rank takes part. One unit at a time is gathered, and copied to the host.
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        prefixes = {module: f"{name}." if name else "" for name, module in self.module.named_modules()}
        state = {name: buffer.cpu() for name, buffer in self.module.named_buffers()}
        for unit in self.units:
            for slots, value in zip(unit.slots, unit.full_values()):
                for module, name in slots:
                    state[prefixes[module] + name] = value.to("cpu", copy=True)
        return state


def main() -> None:
    """Teaches a small model which byte of this file comes next."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.set_default_device(f"cuda:{dist.get_node_local_rank()}")
    torch.manual_seed(0)  # the same weights on every rank
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256)) for _ in range(4)]
    plain = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), *blocks)
    model = FSDP(deepcopy(plain), (nn.Sequential,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    windows = torch.tensor(list(open(__file__, "rb").read())).unfold(0, 9, 1)
    torch.manual_seed(dist.get_rank())  # other data on every rank
    for step in range(1, 101):
        batch = windows[torch.randint(len(windows), (64,))]
        loss = F.cross_entropy(model(batch[:, :8]), batch[:, 8])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.2f}")
    plain.load_state_dict(model.full_state_dict())
    loss = F.cross_entropy(plain(windows[:, :8]), windows[:, 8])
    print(f"rank {dist.get_rank()}: a plain model with these values has loss {loss.item():.2f}\n", end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
