"""What a user's program does on an accelerator, one thing in each: for the simulation, and to be mutated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from bed.accelerator import Simulation
from fronts import FRONTS, inner, no_sync, shard
from fsdp_wrap import CPUOffload, CPUOffloadPolicy, MixedPrecision, ShardingStrategy, fully_shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.comm_hooks import LowPrecisionState, bf16_compress_hook, compress
from fsdp_wrap.in_place_gradients import set_gradients_in_place
from fsdp_wrap.sharded_grad_scaler import ShardedGradScaler
from fsdp_wrap.wrap import ModuleWrapPolicy

Program = Callable[[int, Simulation], None]
WIDTH, BATCH, STEPS = 16, 4, 3


class Layer(nn.Module):
    """A unit."""

    def __init__(self, number: int, checkpoints: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        for param in self.parameters():
            param.data = torch.rand(param.shape, generator=generator) - 0.5
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpoints:
            return x + checkpoint(self._compute, x, use_reentrant=False)
        return x + self._compute(x)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())


def net(checkpoints: bool = False) -> nn.Module:
    """Three units and a root that has parameters of its own; ranks that are threads make the same."""
    return nn.Sequential(*(Layer(number, checkpoints) for number in range(3)), Layer(7, False).up)


def wrapped(front: str = "orig", checkpoints: bool = False, **options: Any) -> nn.Module:
    return shard(front, net(checkpoints), ModuleWrapPolicy({Layer}), **options)


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank))


def train(model: nn.Module, rank: int, device: Simulation, steps: int = STEPS, **options: Any) -> None:
    """Trains without a look at any number."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    for step in range(steps):
        one_step(model, optimizer, rank, step, **options)
        device.end_step()


def one_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int, accumulates: bool = False
) -> None:
    optimizer.zero_grad()
    if accumulates:
        with no_sync(model):
            model(batch(rank, step + 50)).square().sum().backward()
    model(batch(rank, step)).square().sum().backward()
    optimizer.step()


def _trains(rank: int, device: Simulation, front: str, accumulates: bool = False, **options: Any) -> None:
    train(wrapped(front, **options), rank, device, accumulates=accumulates)


def _hybrid(rank: int, device: Simulation, front: str, offload: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "copy"))
    if front == "composable":
        model = net()
        policy = {"offload_policy": CPUOffloadPolicy()} if offload else {}
        for part in (*model, model):
            fully_shard(part, mesh=mesh, **policy)
    else:
        strategy = ShardingStrategy.HYBRID_SHARD
        model = wrapped(front, sharding_strategy=strategy, device_mesh=mesh, cpu_offload=CPUOffload(offload))
    train(model, rank, device, accumulates=True)


def _frozen(rank: int, device: Simulation, front: str) -> None:
    model = wrapped(front)
    inner(model)[1].requires_grad_(False)
    train(model, rank, device)


def _fails(rank: int, device: Simulation, front: str, where: str, **options: Any) -> None:
    """Every rank raises at the same place, and trains on."""
    model = wrapped(front, **options)

    def fail(*_: Any) -> None:
        raise ArithmeticError("on purpose")

    def fail_in_backward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    hook = inner(model)[1].register_forward_hook(fail if where == "forward" else fail_in_backward)
    with suppress(ArithmeticError):
        model(batch(rank, 9)).sum().backward()
    hook.remove()
    train(model, rank, device, steps=1)


def _dropped(rank: int, device: Simulation) -> None:
    """A gather that nobody waits for: its memory must not be given to others while it writes."""
    model = wrapped("composable")
    model[0].unshard(async_op=True)
    del model
    torch.ones(4096).sum()


def _by_hand(rank: int, device: Simulation) -> None:
    """Handles, lists of prefetched units, an optimizer on another stream, backwards ended by hand."""
    model = wrapped("composable")
    model[0].set_modules_to_forward_prefetch([model[1], model[2]])
    model[2].set_modules_to_backward_prefetch([model[1], model[0]])
    model.set_manual_backward_finalization(True)
    optimizer, side = torch.optim.SGD(model.parameters(), lr=0.1), device.stream("optimizer")
    for step in range(STEPS):
        handles = [model[number].unshard(async_op=True) for number in (0, 1)]
        handles[0].wait()
        model(batch(rank, step)).square().sum().backward()
        model.finalize_backward(async_op=True).wait()
        side.wait_stream(device.compute)
        with side:
            optimizer.step()
            model.set_post_optim_event(side.record_event())
    model(batch(rank, 0))  # waits for the last step, as an unshard by hand does


def _kept_within_a_host(rank: int, device: Simulation) -> None:
    model = net()
    for part in (*model, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (4,)), reshard_after_forward=2)
    train(model, rank, device)


class _Gather:
    """A user's collective, with memory of its own."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        return dist.all_gather_into_tensor(output_tensor, input_tensor.clone(), group, async_op)


class _Reduce(_Gather):
    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def _users_collectives(rank: int, device: Simulation) -> None:
    model = wrapped("composable")
    for part in (*list(model)[:3], model):
        part.set_custom_all_gather(_Gather())
        part.set_custom_reduce_scatter(_Reduce())
    train(model, rank, device)


def _hooked_on_a_stream(rank: int, device: Simulation) -> None:
    model = wrapped("composable")
    for part in (*list(model)[:3], model):
        part.set_all_reduce_hook(lambda reduced: reduced.mul_(0.5), stream=device.stream("user"))
    train(model, rank, device)


def _comm_hook(rank: int, device: Simulation, **options: Any) -> None:
    model = wrapped("orig", **options)
    model.register_comm_hook(LowPrecisionState(dist.group.WORLD), bf16_compress_hook)
    train(model, rank, device)


def _compressed(rank: int, device: Simulation) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    for number, layer in enumerate(model):
        generator = torch.Generator().manual_seed(number)
        layer.weight.data = torch.rand(64, 64, generator=generator) - 0.5
        fully_shard(layer)
    fully_shard(model)
    compress(model, gathers="int8", reductions="int8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        numbers = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(BATCH, 64, generator=numbers)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _states(rank: int, device: Simulation, front: str, offload: bool) -> None:
    """State dicts and summoned parameters between steps."""
    model = wrapped(front, cpu_offload=CPUOffload(offload))
    train(model, rank, device, steps=1)
    states = [model.state_dict()]
    if front != "composable":
        with FSDP.summon_full_params(model, writeback=True):
            for param in model.parameters():
                param.data.mul_(0.5)
    train(model, rank, device, steps=1)
    states.append(model.state_dict())
    model.load_state_dict(states[0])
    train(model, rank, device, steps=1)


def _evaluates(rank: int, device: Simulation, front: str) -> None:
    """An offloaded model is changed right after a forward that needs no gradient."""
    model = wrapped(front, cpu_offload=CPUOffload(offload_params=True))
    with torch.no_grad():
        for number in range(2):
            model(batch(rank, number))
            for param in model.parameters():
                local = param.to_local() if hasattr(param, "to_local") else param.data
                local.mul_(0.5)


def _in_place(rank: int, device: Simulation) -> None:
    model = wrapped("orig")
    set_gradients_in_place(model)
    train(model, rank, device)


def _clips(rank: int, device: Simulation, norm_type: float) -> None:
    model = wrapped("orig")
    for step in range(2):
        model(batch(rank, step)).square().sum().backward()
        model.clip_grad_norm_(0.1, norm_type)


def _scales(rank: int, device: Simulation) -> None:
    model, scaler = wrapped("orig"), ShardedGradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(model(batch(rank, step)).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()


def _summons(rank: int, device: Simulation, offload: bool, rank0_only: bool) -> None:
    """The full parameters and gradients, which are edited."""
    model = wrapped("orig", cpu_offload=CPUOffload(offload))
    model(batch(rank, 0)).square().sum().backward()
    with FSDP.summon_full_params(model, True, True, rank0_only, with_grads=True):
        for param in model.parameters() if rank == 0 or not rank0_only else ():
            param.data.mul_(0.5)
            param.grad.mul_(2)
    train(model, rank, device, steps=1)


def _group_with_a_stream(rank: int, device: Simulation) -> None:
    """As where a process group runs collectives on a stream of its own, and its works order them."""
    device.group_has_stream = True
    _states(rank, device, "orig", offload=False)


OFFLOAD, BF16 = CPUOffload(offload_params=True), MixedPrecision(torch.bfloat16, torch.float32)
NO_SHARD = ShardingStrategy.NO_SHARD

PROGRAMS: dict[str, tuple[int, Program]] = {
    **{f"trains-{front}": (2, partial(_trains, front=front)) for front in FRONTS},
    **{f"accumulates-{front}": (2, partial(_trains, front=front, accumulates=True)) for front in FRONTS},
    **{f"offloads-{front}": (2, partial(_trains, front=front, cpu_offload=OFFLOAD)) for front in FRONTS},
    **{f"checkpoints-{front}": (2, partial(_trains, front=front, checkpoints=True)) for front in FRONTS},
    **{f"frozen-{front}": (2, partial(_frozen, front=front)) for front in FRONTS},
    **{f"hybrid-{front}": (4, partial(_hybrid, front=front, offload=False)) for front in FRONTS},
    **{f"hybrid-offload-{front}": (4, partial(_hybrid, front=front, offload=True)) for front in FRONTS},
    **{f"evaluates-{front}": (2, partial(_evaluates, front=front)) for front in FRONTS},
    **{f"states-{front}": (2, partial(_states, front=front, offload=False)) for front in FRONTS},
    "states-offload": (2, partial(_states, front="orig", offload=True)),
    "fails-forward": (2, partial(_fails, front="orig", where="forward", forward_prefetch=True)),
    "fails-backward": (2, partial(_fails, front="composable", where="backward")),
    "fails-no_shard": (2, partial(_fails, front="orig", where="backward", sharding_strategy=NO_SHARD)),
    "prefetches": (2, partial(_trains, front="orig", forward_prefetch=True)),
    "no_shard": (2, partial(_trains, front="orig", sharding_strategy=NO_SHARD)),
    "no_shard-offload": (2, partial(_trains, front="orig", sharding_strategy=NO_SHARD, cpu_offload=OFFLOAD)),
    "mixed": (2, partial(_trains, front="orig", mixed_precision=BF16)),
    "mixed-offload": (2, partial(_trains, front="orig", mixed_precision=BF16, cpu_offload=OFFLOAD)),
    "dropped": (2, _dropped),
    "by_hand": (2, _by_hand),
    "kept_within_a_host": (4, _kept_within_a_host),
    "users_collectives": (2, _users_collectives),
    "hooked_on_a_stream": (2, _hooked_on_a_stream),
    "comm_hook": (2, _comm_hook),
    "comm_hook-no_shard": (2, partial(_comm_hook, sharding_strategy=NO_SHARD)),
    "compressed": (2, _compressed),
    "in_place": (2, _in_place),
    "clips": (2, partial(_clips, norm_type=2.0)),
    "clips-inf": (2, partial(_clips, norm_type=float("inf"))),
    "scales": (2, _scales),
    "summons": (2, partial(_summons, offload=False, rank0_only=False)),
    "summons-first": (2, partial(_summons, offload=False, rank0_only=True)),
    "summons-offload": (2, partial(_summons, offload=True, rank0_only=False)),
    "group_with_a_stream": (2, _group_with_a_stream),
}
"""By name: on how many ranks, and what each does."""
