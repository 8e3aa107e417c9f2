"""The capabilities of the package that `test_seams.py` brings together.

To add one, write an entry of `CAPABILITIES`; or of `WAYS` in `ways.py`. Every program has one of those, and
an `Optimizer`. What an entry takes, and what its functions are called with, `programs.Capability` says.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.lr_scheduler import LambdaLR
from torch.testing._internal.two_tensor import TwoTensor

import moe_nets
from fronts import KEPT, clip
from fsdp_wrap import (
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    allow_skipping,
    audit,
    clip_grad_norm_,
    comm_hooks,
    find_nonfinite,
    replicate,
    set_gradients_in_place,
)
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.optim import HostAdamW, Muon, on_shards, step_in_backward, stochastic_rounding
from fsdp_wrap.replica_groups import join_replica_groups
from fsdp_wrap.sharded_grad_scaler import ShardedGradScaler
from programs import Capability, Net, Side, World, adamw
from scenario import WIDTH

COMPOSABLE, WRAPPER, BY_NAME = ["composable"], ["flat", "orig"], ["orig", "composable"]

# What becomes a unit, and which parameters a forward reads.


def layers(net: Net, units: list[Any]) -> list[Any]:
    modules = [module for module in net.modules() if isinstance(module, nn.Linear | nn.Embedding)]
    return [layer for layer in modules if layer is not net.head] + units


class BorrowedHead(Capability):
    """The model reads the embedding's weight, a unit of its own, once more; the wrapper shows no matrix."""

    def build(self, net: Net) -> None:
        net.reads, net.head = "embed", nn.Identity()  # type: ignore[assignment]

    def units(self, net: Net, units: list[Any]) -> list[Any]:
        return [*units, net.embed]


class SkippedPart(Capability):
    """The last block has a branch for some rows, which a rank leaves out that has none of them."""

    def build(self, net: Net) -> None:
        net.blocks[2].branch = nn.Linear(WIDTH, WIDTH).double()
        net.blocks[2].register_forward_hook(_some_rows)

    def units(self, net: Net, units: list[Any]) -> list[Any]:
        return [net.blocks[2].branch, *units]

    def sharded(self, side: Side) -> None:
        allow_skipping(side.net.blocks[2].branch)


def _some_rows(block: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    chosen = args[0].detach()[:, :1, :1] > 0
    return output + chosen * block.branch(args[0]) if chosen.any() else output


def toggle(side: Side, at: int) -> None:
    side.net.blocks[0].requires_grad_(at != 1)


def turn_adapters_off(side: Side, loss: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Runs a forward of reference, with adapters frozen, before the backward, as DPO with peft has it."""
    adapters = [block.adapter for block in side.net.blocks]
    for adapter in adapters:
        adapter.requires_grad_(False)
    with torch.no_grad():
        side.model(*inputs)
    for adapter in adapters:
        adapter.requires_grad_(True)
    return loss


def have_odd_shapes(net: Net) -> None:
    """Adds parameters of one row, of three, and of none."""
    ones, norm = partial(torch.ones, dtype=torch.float64), net.norm
    norm.one, norm.three = nn.Parameter(ones(1, 8)), nn.Parameter(ones(3, 1))
    norm.none = nn.Parameter(ones(0, 2))
    norm.register_forward_hook(
        lambda norm, args, output: output * norm.one * norm.three.mean() + norm.none.sum()
    )


def buffer(net: Net) -> None:
    """Adds statistics that forwards update."""
    net.blocks[1].norm.register_buffer("calls", torch.zeros(1, dtype=torch.float64))
    net.blocks[1].norm.register_forward_hook(_count)


def _count(norm: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    norm.calls += norm.training and torch.is_grad_enabled()
    return output * (1 + norm.calls / 100).to(output)


def freeze_a_subclass(net: Net) -> None:
    """Makes of a frozen weight a tensor subclass, which has a dtype of its own and is not loaded in full."""
    torch.serialization.add_safe_globals([TwoTensor])
    weight = net.blocks[1].adapter.weight.detach()
    net.blocks[1].adapter.weight = nn.Parameter(TwoTensor(weight, weight.clone()), requires_grad=False)
    net.blocks[1].adapter.register_forward_hook(_first_of_two)


def _first_of_two(module: Any, args: Any, output: Any) -> Any:
    return output.a if isinstance(output, TwoTensor) else output


# How a forward and a backward compute.


def need_input_grad(side: Side) -> None:
    side.notes["input_grad"] = True


class Compiled(Capability):
    """A block is compiled, of both sharded models once."""

    def before_sharding(self, net: Net, world: World) -> None:
        net.blocks[0].compile(backend="aot_eager")

    def begin(self, side: Side) -> None:
        if side.world is None:  # which comes first
            torch._dynamo.reset()


def forward_twice(side: Side, loss: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return loss + side.model(inputs[0], 2 * inputs[1]).square().mean()


def penalise(side: Side, loss: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    (slope,) = torch.autograd.grad(loss, inputs[1], create_graph=True)
    return loss + (slope * len(slope)).square().sum() / len(slope)


def infer(side: Side, loss: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    side.model.eval()
    with torch.inference_mode():
        side.model(*inputs)
    side.model.train()
    return loss


def fail_in_forward(side: Side, at: int) -> None:
    if at == 1:
        hook = side.net.blocks[1].norm.register_forward_hook(_fail)
        try:
            side.model(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, 8, dtype=torch.float64))
        except ArithmeticError:
            pass
        hook.remove()


def _fail(*_: Any) -> None:
    raise ArithmeticError("on purpose")


def hook_modules(net: Net) -> None:
    """Puts hooks before and after forwards, and in backwards."""
    net.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    net.blocks[0].register_forward_hook(lambda module, args, output: output * 0.5)
    net.blocks[2].fc1.register_full_backward_hook(lambda module, given, got: (given[0] * 0.5,))


def hook_parameters(side: Side) -> None:
    for param in side.model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(_halve)


def _halve(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def hook_communication(side: Side) -> None:
    """Puts a hook that reduces by itself, or that sees what was reduced."""
    if side.front == "composable":
        for module in side.model.modules():
            if hasattr(module, "set_all_reduce_hook"):
                module.set_all_reduce_hook(lambda reduced: reduced.mul_(1.0))
        return
    state = comm_hooks.DefaultState(side.model.process_group)
    whole = side.model.sharding_strategy is ShardingStrategy.NO_SHARD
    side.model.register_comm_hook(
        state, comm_hooks.allreduce_hook if whole else comm_hooks.reduce_scatter_hook
    )


class InPlace(Capability):
    """Gradients lie where the optimizer has them already."""

    def refusal(self, names: Collection[str]) -> str | None:
        return "got a second gradient in one backward" if {"TiedBlocks", "Reentrant"} <= {*names} else None

    def sharded(self, side: Side) -> None:
        set_gradients_in_place(side.model)


# Where parameters lie, and how they travel.


class Replicated(Capability):
    """One unit is replicated beside those that are sharded."""

    def units(self, net: Net, units: list[Any]) -> list[Any]:
        self._block = net.blocks[0]
        return [unit for unit in units if unit not in [*self._block.modules()][1:]]

    def makes_unit(self, unit: Any, options: dict[str, Any]) -> bool:
        if unit is self._block:
            known = ("mesh", "mp_policy", "offload_policy", "shared_memory", "travel_together_bytes")
            replicate(unit, **{name: options[name] for name in known if name in options})
        return unit is self._block


def over_replicas(front: str, world: World) -> dict[str, Any]:
    strategy = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": world.data}
    return {} if front == "composable" else strategy


def one_state(front: str, world: World) -> dict[str, Any]:
    """Lets all copies hold one state."""
    return {**over_mesh(front, world), **over_replicas(front, world), "state_over_replicas": True}


def over_mesh(front: str, world: World) -> dict[str, Any]:
    return {"device_mesh": world.data}


class ReplicaGroups(Capability):
    """Two replicas that a manager keeps alike, each with a first rank."""

    def refusal(self, names: Collection[str]) -> str | None:
        return "have a hook already" if {"composable", "CommunicationHook"} <= {*names} else None

    def options(self, front: str, world: World) -> dict[str, Any]:
        return {"process_group": world.mesh["shard"].get_group()}

    def begin(self, side: Side) -> None:
        if side.world is not None:
            manager = _Manager(side.world.mesh["replicate"].get_group())
            join_replica_groups(manager, side.model, side.optimizer)


class _Manager:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def allreduce(self, tensor: torch.Tensor) -> Any:
        return dist.all_reduce(tensor.div_(2), group=self._group, async_op=True)

    def register_state_dict_fn(self, *_: Any) -> None:
        pass


def cut_blocks(net: Net, world: World) -> None:
    """Cuts blocks by tensor parallelism; torch unties what it cuts."""
    for block in net.blocks:
        parallelize_module(block, world.mesh["tensor"], {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})


class Experts(Capability):
    """A mixture of experts, whose parameters have a mesh of their own."""

    def build(self, net: Net) -> None:
        net.blocks[1].experts = moe_nets.MoE().double()
        net.blocks[1].register_forward_hook(_to_experts)

    def before_sharding(self, net: Net, world: World) -> None:
        _, own, self._spread = moe_nets.meshes()
        self._info = moe_nets.info_of(own)
        moe_nets.distribute_in(net.blocks[1].experts, self._spread)  # type: ignore[arg-type]

    def options(self, front: str, world: World) -> dict[str, Any]:
        return {"shard_placement_fn": moe_nets.placing(self._info)}

    def sharded(self, side: Side) -> None:
        side.net.blocks[1].set_gradient_divide_factor(4)


def _to_experts(block: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    width = moe_nets.WIDTH
    return torch.cat([block.experts(output[..., :width]), output[..., width:]], -1)


def by_columns(front: str, world: World) -> dict[str, Any]:
    """Cuts matrices along their second dimension."""

    def place(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.ndim == 2 and param.shape[1] % world.copies == 0 else None

    return {"shard_placement_fn": place}


# Optimizers.


class Optimizer(Capability):
    """Makes the optimizer, of the same kind on both sides unless a subclass must differ."""

    slots: Any = ("optimizer",)

    def optimizer(self, side: Side) -> torch.optim.Optimizer:
        return self.of(side.model.parameters())

    def of(self, params: Any) -> torch.optim.Optimizer:
        return adamw(params)


class Counting(torch.optim.Optimizer):
    """Descends ever more slowly along a sum of gradients; with Python numbers for each parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state.setdefault("sum", torch.zeros_like(param)).add_(param.grad)
                    state["count"] = state.get("count", 0) + 1
                    state["rate"] = group["lr"] / math.sqrt(state["count"])
                    # A bounded step, since a penalty's gradients would make others ever larger.
                    param.sub_(nn.functional.softsign(state["sum"]) * state["rate"])


def in_groups(params: Any) -> torch.optim.Optimizer:
    """Makes an optimizer without decay for what has one dimension."""
    params = [*params]
    decayed, rest = ([param for param in params if (param.ndim > 1) is wide] for wide in (True, False))
    return adamw([{"params": rest, "weight_decay": 0.0}, {"params": decayed}])


def on_shards_of(side: Side, make: Any) -> torch.optim.Optimizer:
    made = make(side.model.parameters())
    return on_shards(made) if side.world else made


def in_backward(side: Side) -> torch.optim.Optimizer:
    if side.world is None:
        return adamw(param for param in side.model.parameters() if param.requires_grad)
    return step_in_backward(side.model, adamw)


# What a training loop does besides.


class Scaled(Capability):
    def begin(self, side: Side) -> None:
        kind = ShardedGradScaler if side.world else torch.amp.GradScaler
        side.notes["scaler"] = kind("cpu", init_scale=1024.0, growth_interval=2)

    def loss(self, side: Side, loss: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return side.notes["scaler"].scale(loss)

    def after_backward(self, side: Side) -> None:
        side.notes["scaler"].unscale_(side.optimizer)

    def update(self, side: Side) -> bool:
        side.notes["scaler"].step(side.optimizer)
        side.notes["scaler"].update()
        return True

    def goes_on(self, first: Side, second: Side) -> None:
        second.notes["scaler"].load_state_dict(first.notes["scaler"].state_dict())


def clip_gradients(side: Side) -> None:
    if side.front == "composable":  # torch's own takes parameters of one mesh
        clip_grad_norm_(side.model, 0.3)
    else:
        clip(side.model, 0.3)


class Scheduled(Capability):
    """A learning rate that falls."""

    def begin(self, side: Side) -> None:
        side.notes["scheduler"] = LambdaLR(side.optimizer, lambda step: 1 / (1 + step))

    def after_step(self, side: Side, at: int) -> None:
        side.notes["scheduler"].step()

    def goes_on(self, first: Side, second: Side) -> None:
        second.notes["scheduler"].load_state_dict(first.notes["scheduler"].state_dict())


def summon(side: Side, at: int) -> None:
    if at == 1:
        with FSDP.summon_full_params(side.model), torch.no_grad():
            for param in side.model.parameters():
                param.mul_(0.9)


def go_on_with_a_copy(side: Side, at: int) -> None:
    if at == 1:
        state = side.optimizer.state_dict()
        side.model = copy.deepcopy(side.model)
        side.optimizer = side.make_optimizer(side)
        side.optimizer.load_state_dict(state)


class Watched(Capability):
    """Steps inside `find_nonfinite` and `audit`, in which all is right."""

    def before_step(self, side: Side, at: int) -> None:
        if side.world is not None:
            side.notes["watched"] = watched = ExitStack()
            watched.enter_context(find_nonfinite(side.model))
            watched.enter_context(audit(side.model, every=1, on_fault="raise", seed=at))

    def after_step(self, side: Side, at: int) -> None:
        if side.world is not None:
            side.notes.pop("watched").close()


CAPABILITIES: dict[str, Capability] = {
    "Grouped": Capability(
        slots=("units",), fronts=COMPOSABLE, units=lambda net, units: [*units, [net.norm, net.head]]
    ),
    "Layers": Capability(slots=("units",), units=layers),
    "Tied": Capability(slots=("tied", "aliases"), spec={"tied": "embed_head"}),
    "TiedBlocks": Capability(
        slots=("tied", "aliases", "ties below tensor parallelism"), spec={"tied": "blocks"}
    ),
    "FusedHead": Capability(slots=("head",), build=lambda net: setattr(net, "reads", "head")),
    "BorrowedHead": BorrowedHead(slots=("head", "tied", "units"), fronts=COMPOSABLE),
    "BorrowedKeptHead": BorrowedHead(
        slots=("head", "tied", "units", "strategy"), given={"sharding_strategy": KEPT}
    ),
    "SkippedPart": SkippedPart(slots=("units",)),
    "Frozen": Capability(slots=("frozen",), spec={"frozen": "second_blocks"}),
    "MostlyFrozen": Capability(slots=("frozen",), spec={"frozen": "all_but_norms"}),
    "Toggled": Capability(slots=("frozen",), before_step=toggle, after_step=lambda side, at: toggle(side, 0)),
    "AdaptersOff": Capability(slots=("frozen",), loss=turn_adapters_off),
    # A `FlatParameter` would have zero gradients.
    "Skipped": Capability(fronts=BY_NAME, before_step=lambda side, at: setattr(side.net, "skips", at == 1)),
    "OddShapes": Capability(build=have_odd_shapes),
    "Buffered": Capability(build=buffer),
    "Subclass": Capability(
        slots=("placement", "dtype", "full values"),
        fronts=COMPOSABLE,
        refused=dict.fromkeys(("Summoned", "Rounded"), "weight' is a TwoTensor"),
        build=freeze_a_subclass,
    ),
    "Checkpointed": Capability(slots=("checkpointing",), spec={"checkpointing": "early_stop"}),
    "Reentrant": Capability(
        slots=("checkpointing", "reentrant"), spec={"checkpointing": "reentrant"}, begin=need_input_grad
    ),
    "CheckpointedAround": Capability(
        slots=("checkpointing",), build=lambda net: setattr(net, "checkpoints_blocks", True)
    ),
    "Compiled": Compiled(slots=("compiled",)),
    "Precision": Capability(
        slots=("dtype",),
        tolerance=1e-4,
        given={"mixed_precision": MixedPrecision(torch.float32, torch.float64)},
    ),
    "Accumulated": Capability(slots=("backwards",), letters="TF"),
    "TwoForwards": Capability(loss=forward_twice),
    # Second order, which torch has not with any of these.
    "Penalty": Capability(
        slots=("reentrant", "compiled", "tensor parallel"), begin=need_input_grad, loss=penalise
    ),
    "Inferring": Capability(loss=infer),
    "Failing": Capability(before_step=fail_in_forward),
    "ForwardHooks": Capability(build=hook_modules),
    "ParameterHooks": Capability(slots=("backwards", "hooks", "parameter objects"), begin=hook_parameters),
    "CommunicationHook": Capability(sharded=hook_communication),
    "InPlace": InPlace(),
    "Stays": Capability(slots=("strategy",), given={"sharding_strategy": KEPT}),
    "NotSharded": Capability(
        slots=("strategy",), fronts=WRAPPER, given={"sharding_strategy": ShardingStrategy.NO_SHARD}
    ),
    "Replicated": Replicated(slots=("strategy",), fronts=COMPOSABLE),
    "ReshardedToTwo": Capability(
        slots=("strategy",),
        fronts=COMPOSABLE,
        sizes=[4],
        given={"reshard_after_forward": 2},
        elsewhere=False,
    ),
    "Hybrid": Capability(slots=("strategy", "mesh"), sizes=[4], mesh={"replicas": 2}, options=over_replicas),
    "OneState": Capability(slots=("strategy", "mesh"), sizes=[4], mesh={"replicas": 2}, options=one_state),
    # With a first backward that reduces within each copy alone.
    "WithinCopies": Capability(
        slots=("strategy", "mesh", "backwards"),
        sizes=[4],
        mesh={"replicas": 2},
        options=over_replicas,
        letters="CF",
    ),
    "ReplicaGroups": ReplicaGroups(
        slots=("strategy", "mesh", "process group"), sizes=[4], mesh={"replicas": 2}, elsewhere=False
    ),
    "ByMesh": Capability(slots=("mesh",), fronts=WRAPPER, options=over_mesh),
    "TensorParallel": Capability(
        slots=("mesh", "placement", "tensor parallel", "ties below tensor parallelism"),
        sizes=[4],
        mesh={"tensor": 2},
        elsewhere=False,
        before_sharding=cut_blocks,
        options=over_mesh,
    ),
    "Experts": Experts(slots=("mesh", "placement"), fronts=COMPOSABLE, sizes=[4], elsewhere=False),
    "Columns": Capability(
        slots=("placement",),
        fronts=COMPOSABLE,
        refused=dict.fromkeys(
            ("Exported", "Source", "WeightFiles", "WeightChanges", "Rounded"), "is cut along dimension 1"
        ),
        options=by_columns,
    ),
    "Aligned": Capability(slots=("placement",), given={"shard_alignment": "rows"}),
    "Offloaded": Capability(
        slots=("offload",),
        given={"cpu_offload": CPUOffload(True)},
    ),
    "StateOffloaded": Capability(
        slots=("offload",),
        given={"cpu_offload": CPUOffload(False, offload_optimizer_state=True)},
    ),
    # Small units share collectives else, from the second step on.
    "Alone": Capability(given={"travel_together_bytes": 0}),
    "OverGloo": Capability(given={"shared_memory": False}),
    "AdamW": Optimizer(),
    "Momentum": Optimizer(of=partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)),
    # With a float32 number for each parameter, which torch loads in the dtype of that.
    "NAdam": Optimizer(tolerance=1e-7, of=partial(torch.optim.NAdam, lr=0.02, eps=1e-2)),
    "Numbers": Optimizer(of=Counting),
    "OnShardsNumbers": Optimizer(optimizer=partial(on_shards_of, make=Counting)),
    "Groups": Optimizer(fronts=COMPOSABLE, of=in_groups),
    "Fused": Optimizer(of=partial(adamw, fused=True)),
    "OnShards": Optimizer(optimizer=partial(on_shards_of, make=adamw)),
    "Matrices": Optimizer(
        tolerance=1e-6,
        optimizer=lambda side: Muon(side.model, lr=0.02, ns_dtype=torch.float64, other=adamw),
    ),
    "OnHost": Optimizer(of=partial(HostAdamW, lr=0.02, eps=1e-2)),
    # Of which parameters in float64 need none.
    "Rounded": Optimizer(optimizer=lambda side: stochastic_rounding(adamw(side.model), side.model, seed=3)),
    "InBackward": Optimizer(
        slots=("optimizer", "update", "clipping", "hooks"),
        optimizer=in_backward,
        update=lambda side: side.world is not None,
    ),
    "Scaled": Scaled(slots=("update",)),
    "Clipped": Capability(slots=("clipping",), after_backward=clip_gradients),
    "Scheduled": Scheduled(slots=("optimizer object",)),
    "Watched": Watched(),
    "Summoned": Capability(after_step=summon),
    "Copied": Capability(slots=("optimizer object", "parameter objects"), after_step=go_on_with_a_copy),
}
"""By their names, in the order of their points."""
