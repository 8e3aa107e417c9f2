"""Small units that travel together: numbers, collectives, memory, and what goes otherwise than expected."""

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from bed import ranks
from bed.memory import live_bytes, only_new_objects
from bed.references import Traffic, count_collectives
from fronts import (
    FRONTS,
    ONE,
    SIDE,
    assert_same_grads,
    assert_same_values,
    assert_tensors,
    full_grads,
    full_state,
    inner,
    no_sync,
    shard,
    squares,
    within_copy,
)
from fsdp_wrap import (
    BackwardPrefetch,
    EventKind,
    MixedPrecision,
    Phase,
    ShardingStrategy,
    fully_shard,
    record_events,
    set_gradients_in_place,
    set_travel_together_bytes,
)
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap._core import UNIT_ATTR
from fsdp_wrap._runtime import Unit, units_in
from fsdp_wrap.wrap import ModuleWrapPolicy

WIDTH, UNITS = 8, 6
WEIGHT = (WIDTH + 2) * WIDTH * 4
"""More than the bytes of one unit, and less than those of two."""


class Layer(nn.Module):
    def __init__(self, kind: str = "none") -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "none" or not torch.is_grad_enabled():
            return x + self.linear(x.to(self.linear.weight.dtype)).tanh().to(x.dtype)
        return x + checkpoint(self.linear, x, use_reentrant=self.kind == "reentrant").tanh()


class Net(nn.Module):
    """Runs its layers in the order that it is told, any of them several times or not at all."""

    def __init__(self, kind: str = "none", units: int = UNITS) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(Layer("none" if kind == "around" else kind) for _ in range(units))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, order: Any = None) -> torch.Tensor:
        order = range(len(self.layers)) if order is None else order
        if self.kind != "around" or not torch.is_grad_enabled():
            return self.head(self._run(x, order).to(self.head.weight.dtype))
        half = len(order) // 2
        for part in (order[:half], order[half:]):  # each checkpoint holds several units
            x = checkpoint(self._run, x, part, use_reentrant=False)
        return self.head(x)

    def _run(self, x: torch.Tensor, order: Any) -> torch.Tensor:
        for index in order:
            x = self.layers[index](x)
        return x


def build(front: str, dtype: torch.dtype = torch.float64, kind: str = "none", **options: Any) -> Any:
    torch.manual_seed(0)
    return shard(front, Net(kind).to(dtype), ModuleWrapPolicy({Layer}), **options)


def pair(front: str, nbytes: int | None = None, kind: str = "none", **options: Any) -> tuple[Any, nn.Module]:
    """A model whose units travel together, and a plain one that starts with the same parameters."""
    torch.manual_seed(0)
    plain = Net(kind).double()
    return build(front, kind=kind, travel_together_bytes=nbytes, **options), plain


def batch(rank: int, step: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def units_of(model: nn.Module) -> list[Unit]:
    return [*dict.fromkeys(units_in(model).values())]


def assert_idle(model: nn.Module) -> None:
    for unit in units_of(model):
        assert unit.buffers.where.value == "sharded", unit.fqn
        assert unit.buffers.gradients.reduction is None, unit.fqn
        for segment in unit.buffers.segments:
            assert not segment.full.allocated and not segment.gradients.collected, unit.fqn


def shared(events: Any, kind: EventKind) -> list[tuple[str, ...]]:
    """The units of each collective of a kind, in the order of their issue."""
    return list(dict.fromkeys(event.together or (event.unit,) for event in events if event.kind is kind))


def calls(traffic: dict[str, Traffic]) -> dict[str, int]:
    return {name: count.calls for name, count in traffic.items()}


def steps(model: Any, rank: int, number: range, **optimizer: Any) -> None:
    chosen = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **optimizer)
    for step in number:
        chosen.zero_grad()
        model(batch(rank, step)).square().sum().backward()
        chosen.step()


LAYERS = tuple(f"layers.{index}" for index in range(UNITS))


def assert_equal_grads(models: list[nn.Module]) -> None:
    grads, expected = map(full_grads, models)
    assert_tensors(grads, expected)


def fail(*_: Any) -> None:
    raise ArithmeticError("on purpose")


@pytest.mark.parametrize(
    ("front", "shared_memory"), [("orig", False), ("composable", True)], ids=["gloo", "memory"]
)
@ranks(2)
def test_the_second_step_has_one_collective_for_all_units(rank, world_size, front, shared_memory):
    model, plain = pair(front, shared_memory=shared_memory)
    ddp = DDP(plain)
    with count_collectives() as first:
        steps(model, rank, range(1))
    assert calls(first) == {"all_gather_into_tensor": 2 * UNITS + 1, "reduce_scatter_tensor": UNITS + 1}
    assert "gathered with" not in repr(model)
    for step in (1, 2):
        with count_collectives() as traffic, record_events() as events:
            steps(model, rank, range(step, step + 1))
        assert calls(traffic) == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 1}
        assert shared(events, EventKind.UNSHARD) == [("", *LAYERS), LAYERS[::-1]]
        assert [sorted(units) for units in shared(events, EventKind.REDUCE)] == [["", *LAYERS]]
        sent = [event.phase for event in events if event.kind is EventKind.REDUCE]
        assert {*sent} == {Phase.BACKWARD}  # as soon as all have come
        assert_idle(model)
    if front == "orig":
        assert "gathered with '', 'layers.1', 'layers.2' and 3 more" in repr(model.layers[0])
    for step in range(3):
        steps(ddp, rank, range(step, step + 1))
    assert_same_values(model, plain, rtol=1e-12, atol=1e-12)


@ranks(2)
def test_a_batch_is_planned_anew_when_other_units_run(rank, world_size):
    model, _ = pair("orig")
    steps(model, rank, range(3))
    for _ in range(3):
        with record_events() as events:
            model(batch(rank, 3), [4, 1]).square().sum().backward()
    assert shared(events, EventKind.UNSHARD) == [("", "layers.4", "layers.1"), ("layers.1", "layers.4")]


OPTIONS: dict[str, list[Any]] = {
    "front": FRONTS,
    "kept": [False, True],
    "kind": ["none", "reentrant", "unit", "around"],
    "shared_memory": [False, True],
    "nbytes": [2 * 3 * 2 * WEIGHT, None],
    "accumulates": [False, True],
    "forward_prefetch": [False, True],
    "backward_prefetch": ["BACKWARD_PRE", "BACKWARD_POST", None],
    "frozen": [False, True],
    "evaluates": [False, True],
    "again": [False, True],
}


def drawn(number: int) -> dict[str, Any]:
    generator = random.Random(number)
    return {name: generator.choice(values) for name, values in OPTIONS.items()}


def _walk(model: Any, rank: int, chosen: dict[str, Any]) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    outputs = []
    orders = [None, None, None, [3, 2, 1, 0], [1, 1, 4], None, [0, 2, 4, 5], [0, 2, 4, 5], None]
    for step, order in enumerate(orders):
        if chosen["frozen"] and step in (2, 5):
            inner(inner(model).layers[1]).requires_grad_(step == 5)
        if chosen["evaluates"]:
            with torch.no_grad():
                outputs.append(model(batch(rank, 40 + step), order))
        optimizer.zero_grad()
        if chosen["accumulates"]:
            with no_sync(model):
                model(batch(rank, 50 + step), order).square().sum().backward()
        output = model(batch(rank, step), order)
        if chosen["again"]:  # from two graphs, of which one reaches some units only, and from two losses
            half = model(batch(rank, step), [0, 1, 2])
            output.sum().backward(retain_graph=True)
            half.sum().backward()
        output.square().sum().backward()
        optimizer.step()
        outputs.append(output.detach())
        if step == 3:
            outputs += [value for _, value in sorted(full_state(model).items())]
    return outputs


@pytest.mark.parametrize("number", range(5))
@ranks(2)
def test_numbers_are_those_of_units_alone(rank, world_size, number):
    """To the bit: with two ranks there is one order of a sum."""
    for chosen in (drawn(number), drawn(5 + number)):
        options: dict[str, Any] = {"shared_memory": chosen["shared_memory"]}
        if chosen["front"] != "composable":
            name = chosen["backward_prefetch"]
            options["backward_prefetch"] = BackwardPrefetch[name] if name else None
            options["forward_prefetch"] = chosen["forward_prefetch"]
        if chosen["kept"]:
            options["sharding_strategy"] = ShardingStrategy.SHARD_GRAD_OP
        alone = build(chosen["front"], kind=chosen["kind"], travel_together_bytes=0, **options)
        together, _ = pair(chosen["front"], chosen["nbytes"], chosen["kind"], **options)
        with record_events() as events:
            outputs = _walk(together, rank, chosen)
        for kind in (EventKind.UNSHARD, EventKind.REDUCE):
            assert any(len(units) > 2 for units in shared(events, kind)), chosen
        expected = _walk(alone, rank, chosen)
        for index, (one, other) in enumerate(zip(outputs, expected, strict=True)):
            assert torch.equal(one, other), (index, chosen)


@ranks(2)
def test_units_of_several_dtypes_are_gathered_as_bytes(rank, world_size):
    models = []
    for nbytes in (None, 0):
        torch.manual_seed(0)
        net = Net()
        for number, layer in enumerate(net.layers):
            casts = MixedPrecision((torch.bfloat16, torch.float16, None)[number % 3], torch.float32)
            net.layers[number] = FSDP(layer, use_orig_params=True, mixed_precision=casts)
        models.append(shard("orig", net, travel_together_bytes=nbytes))
    for step in range(4):
        with record_events() as events:
            losses = [model(batch(rank, step, torch.float32)).square().sum() for model in models]
            for loss in losses:
                loss.backward()
        assert torch.equal(*losses)
    assert max(len(units) for units in shared(events, EventKind.UNSHARD)) == UNITS + 1
    assert_equal_grads(models)


@ranks(4)
def test_hybrid(rank, world_size):
    """Sums over the replicas travel together as well, also of what was summed in part."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "copy"))
    torch.manual_seed(0)
    ddp = DDP(Net().double())
    model: Any = copy.deepcopy(ddp.module)
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh)
    for step in range(3):
        with within_copy(model):
            model(batch(rank, 70 + step)).square().sum().backward()
        with count_collectives() as traffic:
            model(batch(rank, step)).square().sum().backward()
        with ddp.no_sync():
            ddp(batch(rank, 70 + step)).square().sum().backward()
        ddp(batch(rank, step)).square().sum().backward()
    assert calls(traffic) == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 1, "all_reduce": 1}
    assert_same_grads(model, ddp, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("where", ["forward", "backward", "hook"])
@ranks(2)
def test_exception_in_forward_or_backward_leaves_a_usable_model(rank, world_size, where):
    """Also where a hook of a gradient raises: others of the same reduction have theirs nowhere then."""
    for front, nbytes in (("orig", None), ("orig", 0), ("composable", None)):
        model = build(front, travel_together_bytes=nbytes)
        steps(model, rank, range(2))
        model.zero_grad()
        with no_sync(model):
            model(batch(rank, 2)).square().sum().backward()
        layer = inner(inner(model).layers[2])
        if where == "hook":
            param = units_of(model)[3].buffers.params[0].sharded_params[0]
            hook = param.register_post_accumulate_grad_hook(fail)
        elif where == "forward":
            hook = layer.register_forward_hook(fail)
        else:
            hook = layer.register_forward_hook(lambda _, args, output: output.register_hook(fail) and None)
        with pytest.raises(ArithmeticError, match="on purpose"):
            model(batch(rank, 3)).square().sum().backward()
        hook.remove()
        early = units_of(model)[4:]  # the root comes first, and the third layer has failed
        assert where == "backward" or all(unit.buffers.where.value == "sharded" for unit in early)
        alone = build(front, travel_together_bytes=0)
        alone.load_state_dict(model.state_dict())
        for trained in (model, alone):
            trained.zero_grad()
            steps(trained, rank, range(4, 6))
            trained(batch(rank, 6)).square().sum().backward()
        assert_equal_grads([model, alone])
        assert_idle(model)


@ranks(2)
def test_a_unit_that_is_gathered_early_is_as_one_that_travels_alone(rank, world_size):
    """Until its forward it shows its shards, and writes to these count."""
    for front in FRONTS:
        outputs = []
        for nbytes in (None, 0):
            model = build(front, travel_together_bytes=nbytes)
            steps(model, rank, range(2))
            last = inner(inner(model).layers[-1]).linear
            before, shown = last.weight, list[Any]()
            params = list(units_of(model)[-1].buffers.params[0].sharded_params)

            def write(*_: Any, params: Any = params, last: Any = last, shown: Any = shown) -> None:
                shown.append(last.weight)
                with torch.no_grad():
                    for param in params:
                        param.mul_(0.5)

            hook = inner(inner(model).layers[0]).register_forward_hook(write)
            outputs.append(model(batch(rank, 2)).detach())
            hook.remove()
            outputs.append(model(batch(rank, 2)).detach())
            assert len(shown) == 1 and shown[0] is before, front
        assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[3]), front
        assert not torch.equal(outputs[0], model(batch(rank, 3)).detach()), front


@ranks(2)
def test_memory_grows_by_the_budget_at_most(rank, world_size):
    budget, peaks, counts = 7 * ONE, {}, {}  # half of it holds three units
    with only_new_objects():
        for nbytes in (0, budget):
            model = squares("orig", per_unit=1, units=12)
            set_travel_together_bytes(model, nbytes)
            seen: list[int] = []
            for layer in model.modules():
                if isinstance(layer, nn.Linear):
                    layer.register_forward_hook(lambda *_: seen.append(live_bytes()))  # noqa: B023
                    layer.register_full_backward_hook(lambda *_: seen.append(live_bytes()))  # noqa: B023
            for _ in range(4):
                with record_events() as events:
                    before = live_bytes()
                    seen.clear()
                    model(torch.ones(1, SIDE, requires_grad=True)).sum().backward()
                model.zero_grad()
            peaks[nbytes], counts[nbytes] = max(seen) - before, len(shared(events, EventKind.UNSHARD))
            del model, layer
    assert counts == {0: 12, budget: 12 // 3 + 12 // 3}  # alone, the same in forward and backward
    assert 0 < peaks[budget] - peaks[0] <= budget


@ranks(2)
def test_units_that_have_ways_of_their_own_travel_alone(rank, world_size):
    in_place, hooked = build("orig"), build("orig")
    set_gradients_in_place(in_place.layers[2])
    hook = lambda state, full, shard: torch.distributed.reduce_scatter_tensor(shard, full)  # noqa: E731
    hooked.register_comm_hook(None, hook)
    for step in range(3):
        with record_events() as events:
            in_place(batch(rank, step)).sum().backward()
        with record_events() as of_hooked:
            hooked(batch(rank, step)).sum().backward()
    for kind in (EventKind.UNSHARD, EventKind.REDUCE):
        alone = [units for units in shared(events, kind) if "layers.2" in units]
        assert set(alone) == {("layers.2",)} and max(map(len, shared(events, kind))) == UNITS
    assert not any(event.together for event in of_hooked if event.kind is EventKind.REDUCE)


@pytest.mark.parametrize(
    ("front", "shared_memory"), [("orig", False), ("composable", True)], ids=["gloo", "memory"]
)
@ranks(2)
def test_a_rank_that_runs_another_order_is_told(rank, world_size, front, shared_memory):
    """What has come for all may be used in any order; the backward's order is compared."""
    model, _ = pair(front, shared_memory=shared_memory)
    steps(model, rank, range(2))
    with pytest.raises(RuntimeError, match="^ranks communicate for different units") as caught:
        for _ in range(2):
            model(batch(rank, 2), [0, 1, 2, 3, 4, 5][:: 1 - 2 * rank]).sum().backward()
    assert "rank 0 gathers unit 'layers.5' and unit 'layers.4'" in str(caught.value)
    assert "rank 1 gathers unit 'layers.0' and unit 'layers.1'" in str(caught.value)


@ranks(2)
def test_what_it_takes(rank, world_size):
    for make in (FSDP, fully_shard):
        for wrong in (True, 1.5, "1"):
            with pytest.raises(TypeError, match="travel_together_bytes must be an int"):
                make(nn.Linear(2, 2), travel_together_bytes=wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="travel_together_bytes must not be negative"):
            make(nn.Linear(2, 2), travel_together_bytes=-1)
    model = fully_shard(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="must not be negative"):
        set_travel_together_bytes(model, -1)
    with pytest.raises(ValueError, match="Linear is neither wrapped nor sharded"):
        set_travel_together_bytes(nn.Linear(2, 2), 0)
    assert model.__dict__[UNIT_ATTR].options.travel_together_bytes is None
    model = build("orig", travel_together_bytes=0 if rank else 1 << 20)
    with pytest.raises(RuntimeError, match=r"travel_together_bytes"):
        model(batch(rank, 0))
