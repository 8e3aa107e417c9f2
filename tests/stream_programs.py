"""A user's programs on an accelerator, each about one thing: for the simulation, and to be mutated."""

import gc
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdp_wrap
from bed.accelerator import Simulation
from fronts import FRONTS, HYBRID, full_state, inner, no_sync, shard
from fsdp_wrap import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    clip_grad_norm_,
    fully_shard,
    replicate,
    set_gradients_in_place,
)
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.comm_hooks import LowPrecisionState, bf16_compress_hook, compress
from fsdp_wrap.sharded_grad_scaler import ShardedGradScaler
from fsdp_wrap.wrap import ModuleWrapPolicy

Program = Callable[[int, Simulation], object]
"""Gets a rank and its device; returns what is to be compared in the end."""
WIDTH, BATCH, STEPS = 16, 4, 3


class Layer(nn.Module):
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


def net(checkpoints: bool = False) -> nn.Sequential:
    """Makes three units and a root with parameters of its own; ranks that are threads make the same."""
    return nn.Sequential(*(Layer(number, checkpoints) for number in range(3)), Layer(7, False).up)


TOGETHER = 16 << 20
"""Bytes for batches of collectives, which are off by default on accelerators."""


def wrapped(
    front: str = "orig",
    checkpoints: bool = False,
    module: nn.Module | None = None,
    kinds: Set[type[nn.Module]] = frozenset({Layer}),
    **options: Any,
) -> Any:
    """Shards `net`, or another module, with a unit for each module of some kinds; units share collectives."""
    options = {"travel_together_bytes": TOGETHER, **options}
    return shard(front, module or net(checkpoints), ModuleWrapPolicy(set(kinds)), **options)


def by_calls(**options: Any) -> Any:
    """Shards `net` by calls of `fully_shard`, which takes what `wrapped` does not translate."""
    model = net()
    for part in (*model, model):
        fully_shard(part, **{"travel_together_bytes": TOGETHER, **options})
    return model


def products_beside(actions: Sequence[Any], chosen: Iterable[Any]) -> list[int]:
    """Counts, for each of some actions of a device, the matrix products that may run beside it."""
    products = [action for action in actions if action.what in ("aten::mm", "aten::addmm")]
    return [
        sum(product.tick > one.clock.get("compute", 0) and not product.follows(one) for product in products)
        for one in chosen
    ]


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank))


def train(model: nn.Module, rank: int, device: Simulation, steps: int = STEPS, **options: Any) -> object:
    """Trains without a look at any number; returns the model and the optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    for step in range(steps):
        one_step(model, optimizer, rank, step, **options)
        device.end_step()
    return model, optimizer


def one_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int, accumulates: bool = False
) -> None:
    optimizer.zero_grad()
    if accumulates:
        with no_sync(model):
            model(batch(rank, step + 50)).square().sum().backward()
    model(batch(rank, step)).square().sum().backward()
    optimizer.step()


def _trains(
    rank: int,
    device: Simulation,
    front: str,
    accumulates: bool = False,
    prepare: Callable[[Any], object] = lambda model: None,
    **options: Any,
) -> object:
    return train(prepared(prepare, front, **options), rank, device, accumulates=accumulates)


def prepared(prepare: Callable[[Any], object], front: str, **options: Any) -> Any:
    model = wrapped(front, **options)
    prepare(model)
    return model


def _freeze(model: nn.Module) -> None:
    inner(model)[1].requires_grad_(False)


def hook(model: Any) -> None:
    model.register_comm_hook(LowPrecisionState(dist.group.WORLD), bf16_compress_hook)


def _hybrid(rank: int, device: Simulation, front: str, offload: bool, over: bool = False) -> object:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "copy"))
    options: dict[str, Any] = {
        "device_mesh": mesh,
        "cpu_offload": CPUOffload(offload),
        "state_over_replicas": over,
    }
    model = wrapped(front, sharding_strategy=HYBRID, **options)
    return train(model, rank, device, accumulates=True)


def _fails(rank: int, device: Simulation, front: str, where: str, after: int = 0, **options: Any) -> object:
    """Every rank raises at the same place, after some steps, and trains on."""
    model = wrapped(front, **options)
    train(model, rank, device, steps=after)
    return _fails_in(model, rank, device, where, after)


def _fails_in(model: Any, rank: int, device: Simulation, where: str, after: int = 0) -> object:
    def fail(*_: Any) -> None:
        raise ArithmeticError("on purpose")

    def fail_in_backward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    hook = inner(model)[1].register_forward_hook(fail if where == "forward" else fail_in_backward)
    with suppress(ArithmeticError):
        model(batch(rank, 9)).sum().backward()
    hook.remove()
    return train(model, rank, device, steps=1 + after)


def _together(rank: int, device: Simulation, front: str, nbytes: int | None, **options: Any) -> object:
    """Small units travel together: all of them, or two at a time, evaluated and in another order as well."""
    model = wrapped(front, travel_together_bytes=nbytes, **options)
    train(model, rank, device, steps=2)
    with torch.no_grad():
        model(batch(rank, 7))
    layers = inner(model)
    for before in ((2,), (2,), (1, 1)):  # these units run before the others as well
        hook = layers[0].register_forward_pre_hook(partial(_run_before, [layers[index] for index in before]))
        model(batch(rank, 8)).square().sum().backward()
        hook.remove()
    return train(model, rank, device, steps=2, accumulates=True)


def sends_activations(rank: int, device: Simulation, front: str, doing: str, **options: Any) -> object:
    """What autograd saves goes to the host, also that of several forwards, of checkpoints and of failures."""
    model = wrapped(front, doing == "checkpoints inside", **options)
    fsdp_wrap.offload_activations(model, min_bytes=1, keep=0 if doing == "waits at once" else 1)
    if doing == "checkpoints around":
        for layer in inner(model)[:-1]:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    if doing == "fails":
        return _fails_in(model, rank, device, "forward")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [model(batch(rank, step + add)).square().sum() for add in (50, 0)[doing != "twice" :]]
        for loss in losses if step else losses[::-1]:
            loss.backward(retain_graph=doing == "retains")
        if doing == "retains":
            losses[0].backward()
        model(batch(rank, step + 90))  # a graph without a backward
        optimizer.step()
        device.end_step()
    return model, optimizer


def _replicates(rank: int, device: Simulation, dtype: torch.dtype | None = None, **options: Any) -> object:
    """Every second layer is whole on each rank, and so is what lies outside of them."""
    model = net()
    policy = MixedPrecisionPolicy(dtype, torch.float32 if dtype is not None else None)
    for number, layer in enumerate(model[:-1]):
        way = fully_shard if number % 2 else replicate
        way(layer, mp_policy=policy, **options)
    return train(replicate(model, mp_policy=policy, **options), rank, device, accumulates=True)


def _run_before(units: list[nn.Module], layer: nn.Module, args: Any) -> Any:
    hidden = args[0]
    for unit in units:
        hidden = unit(hidden)
    return (hidden,)


def _dropped(rank: int, device: Simulation) -> object:
    """A gather that nobody waits for: its memory must not be given to others while it writes."""
    model = wrapped("composable")
    model[0].unshard(async_op=True)
    del model
    gc.collect()
    return torch.ones(4096).sum()


def list_prefetches(model: Any) -> None:
    model[0].set_modules_to_forward_prefetch([model[1], model[2]])
    model[2].set_modules_to_backward_prefetch([model[1], model[0]])


def _by_hand(rank: int, device: Simulation) -> object:
    """Handles, lists of prefetched units, an optimizer on another stream, backwards ended by hand."""
    model = prepared(list_prefetches, "composable")
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
    return model, model(batch(rank, 0))  # which waits for the last step, as an unshard by hand does


def _kept_within_a_host(rank: int, device: Simulation) -> object:
    return train(by_calls(mesh=init_device_mesh("cpu", (4,)), reshard_after_forward=2), rank, device)


class _Gather:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        return dist.all_gather_into_tensor(output_tensor, input_tensor.clone(), group, async_op)


class _Reduce(_Gather):
    def __call__(  # type: ignore[override]
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def _replace_collectives(model: Any) -> None:
    for part in (*list(model)[:3], model):
        part.set_custom_all_gather(_Gather())
        part.set_custom_reduce_scatter(_Reduce())


class _FailingGather(_Gather):
    """Raises once after it has issued what it does."""

    fails = True

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        works = super().__call__(output_tensor, input_tensor, group, async_op)
        if self.fails:
            self.fails = False
            raise ArithmeticError("on purpose")
        return works


def _collective_raises(rank: int, device: Simulation) -> object:
    """Its collective still writes when its buffers go."""
    model = wrapped("composable")
    model[1].set_custom_all_gather(_FailingGather())
    with suppress(ArithmeticError):
        model(batch(rank, 9))
    return train(model, rank, device, steps=1)


def _looks_after_unshard(rank: int, device: Simulation) -> object:
    """Full parameters that the user reads, and others that go while they are gathered."""
    model = wrapped("composable")
    model[0].unshard()
    weight = model[0].up.weight
    assert not isinstance(weight, DTensor), "the full parameters are not shown"
    total = weight.sum()
    model[0].reshard()
    before = device.live_bytes
    model[1].unshard(async_op=True)
    model[1].reshard()
    assert device.live_bytes == before, "what was being gathered is still there"
    return total, train(model, rank, device, steps=1)


def _hooked_on_a_stream(rank: int, device: Simulation) -> object:
    model = wrapped("composable")

    def hook(reduced: torch.Tensor) -> None:
        assert device.current_stream() is device.stream("user"), "the hook runs on another stream"
        reduced.mul_(0.5)

    for part in (*list(model)[:3], model):
        part.set_all_reduce_hook(hook, stream=device.stream("user"))
    return train(model, rank, device)


def _compressed(rank: int, device: Simulation) -> object:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    for number, layer in enumerate(model):
        generator = torch.Generator().manual_seed(number)
        layer.weight.data = torch.rand(64, 64, generator=generator) - 0.5
        fully_shard(layer)
    fully_shard(model)
    compress(model, gathers="int8", reductions="int8")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    for step in range(STEPS):
        numbers = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(BATCH, 64, generator=numbers)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with device.aside():
        assert all(param.to_local().isfinite().all() for param in model.parameters()), "not decoded"
    return model


def _sums_by_a_tree(rank: int, device: Simulation, clips: bool = True, **options: Any) -> object:
    """Each rank adds what the others have exchanged, in one backward and the next."""
    model = wrapped(**options)
    work = fsdp_wrap.reproducible(model, micro_batches=2 * dist.get_world_size())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    for step in range(STEPS):
        for index in work.indices:
            model(batch(index, step)).square().sum().backward()
        if clips:
            clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        device.end_step()
    return model, optimizer


def _sums_fail(rank: int, device: Simulation) -> object:
    """The last backward of a step raises while gradients are exchanged; the step begins anew."""
    model = wrapped(travel_together_bytes=0)
    work = fsdp_wrap.reproducible(model, micro_batches=2 * dist.get_world_size())

    def fail(grad: torch.Tensor) -> None:
        raise ArithmeticError("on purpose")

    hook = None
    for attempt in range(2):
        for index in work.indices:
            if index == work.indices[-1] and not attempt:
                hook = inner(model)[0].register_forward_hook(
                    lambda *args: args[-1].register_hook(fail) and None
                )
            with suppress(ArithmeticError):
                model(batch(index, attempt)).square().sum().backward()
        if hook is not None:
            hook.remove()
    return model


def _sums_replicas_by_a_tree(rank: int, device: Simulation) -> object:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "copy"))
    return _sums_by_a_tree(rank, device, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def _states(rank: int, device: Simulation, front: str, offload: bool) -> object:
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
    return train(model, rank, device, steps=1)


def _evaluates(rank: int, device: Simulation, front: str) -> object:
    """An offloaded model is changed right after a forward that needs no gradient."""
    model = wrapped(front, cpu_offload=CPUOffload(offload_params=True))
    with torch.no_grad():
        for number in range(2):
            model(batch(rank, number))
            for param in model.parameters():
                local = param.to_local() if hasattr(param, "to_local") else param.data
                local.mul_(0.5)
    return model


def _clips(rank: int, device: Simulation, norm_type: float) -> object:
    model = wrapped("orig")
    for step in range(2):
        model(batch(rank, step)).square().sum().backward()
        model.clip_grad_norm_(0.1, norm_type)
    return model


def _scales(rank: int, device: Simulation) -> object:
    model, scaler = wrapped("orig"), ShardedGradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(model(batch(rank, step)).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return model, optimizer


def _summons(rank: int, device: Simulation, offload: bool, rank0_only: bool) -> object:
    model = wrapped("orig", cpu_offload=CPUOffload(offload))
    model(batch(rank, 0)).square().sum().backward()
    with FSDP.summon_full_params(model, True, True, rank0_only, with_grads=True):
        for param in model.parameters() if rank == 0 or not rank0_only else ():
            param.data.mul_(0.5)
            param.grad.mul_(2)
    return train(model, rank, device, steps=1)


def _group_with_a_stream(rank: int, device: Simulation) -> object:
    """Process groups that run collectives on a stream of their own, ordered by works."""
    device.group_has_stream = True
    return _states(rank, device, "orig", offload=False)


class _Skipping(nn.Sequential):
    """Units that run in another order in every second forward, one of them not at all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards = getattr(self, "forwards", -1) + 1
        for number in (1, 2, 3) if self.forwards % 2 else (0, 2, 1, 3):
            x = self[number](x)
        return x


def offloads(
    rank: int,
    device: Simulation,
    front: str,
    doing: str = "",
    offload: bool = True,
    states: dict[int, Any] | None = None,
    **options: Any,
) -> object:
    """Trains with shards on the host or not, and does something else; `states` gets the states by rank."""
    units = net(checkpoints=doing == "checkpoints")
    module = _Skipping(*units) if doing == "skips" else units
    model = shard(front, module, ModuleWrapPolicy({Layer}), cpu_offload=CPUOffload(offload), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, foreach=True)
    if doing == "steps in backward":
        in_backward = {param: torch.optim.SGD([param], lr=0.001) for param in model.parameters()}

        def step_now(param: nn.Parameter) -> None:
            in_backward[param].step()
            param.grad = None

        hooks = [param.register_post_accumulate_grad_hook(step_now) for param in in_backward]
    for step in range(STEPS):
        if doing == "evaluates":
            with torch.no_grad():
                model(batch(rank, step + 20))
            _halve(model)
        one_step(model, optimizer, rank, step, accumulates=doing == "accumulates")
        if doing == "sums in host memory":
            model(batch(rank, step + 70)).square().sum().backward()
            optimizer.step()
        if doing == "changes":
            _halve(model)
        device.end_step()
    for hook in hooks if doing == "steps in backward" else ():
        hook.remove()
    if states is not None:
        with device.aside():
            states[rank] = {name: value.clone() for name, value in full_state(model).items()}
    return model, optimizer


def _halve(model: nn.Module) -> None:
    for param in model.parameters():
        local = param.to_local() if hasattr(param, "to_local") else param
        local.data.mul_(0.5)


def _offloads_by_hand(rank: int, device: Simulation) -> None:
    """An unshard between steps, gradients that wait for a later backward's end, backwards ended by hand."""
    model = wrapped("composable", cpu_offload=OFFLOAD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        _halve(model)
        handle = model[0].unshard(async_op=True)
        if step == 1:
            handle.wait()
        model.set_is_last_backward(False)
        model(batch(rank, step)).square().sum().backward()
        model.set_is_last_backward(True)
        model(batch(rank, step + 30)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.set_manual_backward_finalization(True)
    model(batch(rank, 0)).square().sum().backward()
    model.finalize_backward(async_op=True).wait()
    optimizer.step()


OFFLOAD, BF16 = CPUOffload(offload_params=True), MixedPrecision(torch.bfloat16, torch.float32)
NO_SHARD, STATE = ShardingStrategy.NO_SHARD, CPUOffload(offload_optimizer_state=True)

PROGRAMS: dict[str, tuple[int, Program]] = {
    **{f"trains-{front}": (2, partial(_trains, front=front)) for front in FRONTS},
    **{f"accumulates-{front}": (2, partial(_trains, front=front, accumulates=True)) for front in FRONTS},
    **{f"offloads-{front}": (2, partial(_trains, front=front, cpu_offload=OFFLOAD)) for front in FRONTS},
    **{f"checkpoints-{front}": (2, partial(_trains, front=front, checkpoints=True)) for front in FRONTS},
    **{f"frozen-{front}": (2, partial(_trains, front=front, prepare=_freeze)) for front in FRONTS},
    **{f"hybrid-{front}": (4, partial(_hybrid, front=front, offload=False)) for front in FRONTS},
    **{f"hybrid-offload-{front}": (4, partial(_hybrid, front=front, offload=True)) for front in FRONTS},
    **{
        f"over_replicas-{front}": (4, partial(_hybrid, front=front, offload=False, over=True))
        for front in FRONTS
    },
    **{
        f"over_replicas-offload-{front}": (4, partial(_hybrid, front=front, offload=True, over=True))
        for front in FRONTS
    },
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
    **{f"together-{front}": (2, partial(_together, front=front, nbytes=None)) for front in FRONTS},
    "replicates": (2, _replicates),
    "replicates-mixed": (2, partial(_replicates, dtype=torch.bfloat16)),
    "replicates-offload": (2, partial(_replicates, offload_policy=CPUOffloadPolicy())),
    "together-two": (2, partial(_together, front="orig", nbytes=2 * 9000, forward_prefetch=True)),
    "fails-together-forward": (2, partial(_fails, front="composable", where="forward", after=2)),
    "fails-together-backward": (2, partial(_fails, front="orig", where="backward", after=2)),
    "dropped": (2, _dropped),
    "by_hand": (2, _by_hand),
    "kept_within_a_host": (4, _kept_within_a_host),
    "users_collectives": (2, partial(_trains, front="composable", prepare=_replace_collectives)),
    "collective_raises": (2, _collective_raises),
    "looks_after_unshard": (2, _looks_after_unshard),
    "hooked_on_a_stream": (2, _hooked_on_a_stream),
    "comm_hook": (2, partial(_trains, front="orig", prepare=hook)),
    "comm_hook-no_shard": (2, partial(_trains, front="orig", prepare=hook, sharding_strategy=NO_SHARD)),
    "compressed": (2, _compressed),
    "reproducible": (2, _sums_by_a_tree),
    "reproducible-offload": (2, partial(_sums_by_a_tree, clips=False, cpu_offload=OFFLOAD)),
    "reproducible-fails": (2, _sums_fail),
    "reproducible-replicas": (4, _sums_replicas_by_a_tree),
    "in_place": (2, partial(_trains, front="orig", prepare=set_gradients_in_place)),
    "clips": (2, partial(_clips, norm_type=2.0)),
    "clips-inf": (2, partial(_clips, norm_type=float("inf"))),
    "scales": (2, _scales),
    "summons": (2, partial(_summons, offload=False, rank0_only=False)),
    "summons-first": (2, partial(_summons, offload=False, rank0_only=True)),
    "summons-offload": (2, partial(_summons, offload=True, rank0_only=False)),
    "offloads-by_hand": (2, _offloads_by_hand),
    "offloads-fails": (2, partial(_fails, front="orig", where="backward", cpu_offload=OFFLOAD)),
    "optimizer_state": (2, partial(_trains, front="orig", cpu_offload=STATE)),
    "offloads-skips": (2, partial(offloads, front="orig", doing="skips")),
    "offloads-steps_in_backward": (2, partial(offloads, front="orig", doing="steps in backward")),
    "offloads-evaluates-mixed": (2, partial(offloads, front="flat", doing="evaluates", mixed_precision=BF16)),
    "group_with_a_stream": (2, _group_with_a_stream),
    **{
        f"activations-{front}": (2, partial(sends_activations, front=front, doing="twice"))
        for front in FRONTS
    },
    "activations-inside": (2, partial(sends_activations, front="orig", doing="checkpoints inside")),
    "activations-around": (2, partial(sends_activations, front="composable", doing="checkpoints around")),
    "activations-fails": (2, partial(sends_activations, front="orig", doing="fails")),
    "activations-retains": (2, partial(sends_activations, front="composable", doing="retains")),
    "activations-at_once": (2, partial(sends_activations, front="orig", doing="waits at once")),
    "activations-offload": (
        2,
        partial(sends_activations, front="orig", doing="twice", cpu_offload=OFFLOAD, mixed_precision=BF16),
    ),
}
"""By name: on how many ranks, and what each does."""
