"""`keep_unsharded_bytes`: full parameters that stay after their use are not gathered until they change."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bed import ranks
from bed.memory import live_bytes
from bed.references import count_collectives
from fronts import FRONTS, FULL, KEPT, ONE, each_front, either_front, full_state, inner, shard, squares
from fsdp_wrap import CPUOffload, Event, EventKind, MixedPrecision, fully_shard, record_events
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import ModuleWrapPolicy

WIDTH, ALL = 6, 1 << 30
UNITS = ["", "0", "1", "2"]


class Adapted(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.base.requires_grad_(False)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._compute, x, use_reentrant=False) if self.checkpointed else self._compute(x)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x) + self.adapter(x))


class Net(nn.Sequential):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__(*(Adapted(checkpointed) for _ in range(3)), nn.Linear(WIDTH, 3))


def models(front: str, make: Callable[[], nn.Module] = Net, **options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = make().double()
    return plain, keeping(front, copy.deepcopy(plain), **options)


def keeping(front: str, module: nn.Module, budget: int = ALL, **options: Any) -> nn.Module:
    options = options or {"sharding_strategy": FULL}
    policy = ModuleWrapPolicy({Adapted})
    if front != "composable":
        return shard(front, module, policy, keep_unsharded_bytes=budget, **options)
    model = shard(front, module, policy, **options)
    model.set_keep_unsharded_bytes(budget)
    return model


def batch_of(step: int = 0) -> torch.Tensor:
    """The same on all ranks, so that a plain model has the mean gradients."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, WIDTH, dtype=torch.float64, generator=generator)


def evaluate(model: nn.Module, step: int = 0) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        result: torch.Tensor = model(batch_of(step))
    model.train()
    return result


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch_of(step)).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


@contextmanager
def gathers() -> Iterator[Counter[str]]:
    found: Counter[str] = Counter()
    with record_events() as events:
        yield found
    found.update(event.unit for event in events if event.kind is EventKind.UNSHARD)


def sizes(model: nn.Module) -> list[torch.Size]:
    params: Any = model.parameters()
    return [param.shape if isinstance(model, FSDP) else param.to_local().shape for param in params]


def stayed(events: list[Event]) -> set[str]:
    return {event.unit for event in events if event.kind is EventKind.REUSE}


def assert_trains_alike(plain: nn.Module, model: nn.Module, steps: int = 2) -> None:
    optimizers = [sgd(each) for each in (plain, model)]
    for step in range(steps):
        losses = [train(each, optimizer, step) for each, optimizer in zip((plain, model), optimizers)]
        torch.testing.assert_close(*losses)
    torch.testing.assert_close(evaluate(model), evaluate(plain))


@each_front
@ranks(2)
def test_evaluation_in_a_loop_gathers_once(rank, world_size, front):
    plain, model = models(front, sharding_strategy=FULL, shared_memory=False)
    before, objects = sizes(model), [*model.parameters()]
    for step in range(3):
        with gathers() as gathered, count_collectives() as traffic:
            torch.testing.assert_close(evaluate(model, step), evaluate(plain, step))
        assert gathered == (Counter(UNITS) if step == 0 else Counter())
        assert bool(traffic) == (step == 0)
        assert sizes(model) == before
        assert all(map(lambda one, other: one is other, model.parameters(), objects))
        weight = inner(inner(model)[0]).base.weight
        assert weight is None or weight.numel() < WIDTH * WIDTH or front == "composable"
    assert "bytes stay unsharded" in repr(model)
    other: Any = copy.deepcopy(model)
    torch.testing.assert_close(evaluate(other), evaluate(plain))
    with gathers() as gathered:
        evaluate(other), evaluate(model)
    assert not gathered, "a copy has its own"
    model.set_keep_unsharded_bytes(0)
    with count_collectives() as traffic:
        evaluate(model)
    assert sum(calls for calls, _ in traffic.values()) >= 1


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept": {"sharding_strategy": KEPT},
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
    "mixed": {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
}


@pytest.mark.parametrize(
    ("front", "options", "checkpointed"),
    [
        *((front, "plain", checkpointed) for front in FRONTS[1:] for checkpointed in (False, True)),
        *((front, options, options == "kept") for front in FRONTS[1:] for options in ("kept", "offload")),
        ("orig", "mixed", False),
    ],
)
@ranks(2)
def test_frozen_parameters_stay_between_steps(rank, world_size, front, options, checkpointed):
    make = partial(Net, checkpointed)
    plain, model = models(front, make, **OPTIONS[options])
    _, without = models(front, make, budget=0, **OPTIONS[options])
    every = (plain, model, without)
    optimizers = [*map(sgd, every)]
    for step in range(3):
        expected, loss, same = (train(each, optimizer, step) for each, optimizer in zip(every, optimizers))
        if options != "mixed":
            torch.testing.assert_close(loss, expected)
        assert torch.equal(loss, same) and torch.equal(evaluate(model), evaluate(without))
    for name, value in full_state(without).items():
        assert torch.equal(full_state(model)[name], value)
    if options == "mixed":
        return
    train(model, optimizers[1], 4)
    with record_events() as events:
        train(model, optimizers[1], 5)
    gathered = [event for event in events if event.kind is EventKind.UNSHARD]
    # The adapters alone are gathered, once: they stay from forward to backward.
    assert Counter(event.unit for event in gathered) == Counter(UNITS)
    assert all(event.nbytes <= WIDTH * WIDTH * 8 + 64 for event in gathered)
    frozen = (WIDTH * WIDTH + WIDTH) * 8
    reused = [event for event in events if event.kind is EventKind.REUSE and event.nbytes >= frozen]
    assert Counter(event.unit for event in reused) >= Counter(UNITS[1:])


class Unseen(torch.optim.SGD):
    """Steps behind the version counters, as kernels of other packages do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.data.sub_(param.grad.data, alpha=0.1)


def step_unseen(model: nn.Module) -> None:
    model(batch_of(9)).square().sum().backward()
    Unseen([each for each in model.parameters() if each.requires_grad], lr=0.1).step()
    model.zero_grad()


def write(model: nn.Module, first: int = 0) -> None:
    with torch.no_grad():
        for param in [*model.parameters()][first:]:
            param.mul_(1.5)


def replace_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data * 1.5


def load(model: nn.Module) -> None:
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})


def summon(model: nn.Module) -> None:
    with FSDP.summon_full_params(model) if isinstance(model, FSDP) else nullcontext():
        write(model)


def convert(model: nn.Module) -> None:
    write(model.float())
    model.double()


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "thaw": lambda model: model.requires_grad_(True),
    "step": lambda model: train(model, sgd(model), 9),
    "step unseen": step_unseen,
    "write": write,
    "write one shard": lambda model: write(model, first=-1),
    "replace data": replace_data,
    "load": load,
    "summon": summon,
    "convert": convert,
}


@each_front
@ranks(2)
def test_what_changes_is_gathered_again(rank, world_size, front):
    # In a FlatParameter several are in one; the data of a DTensor are not what is computed with.
    none = {"flat": "write one shard", "composable": "replace data"}.get(front)
    for name in [name for name in CHANGES if name != none]:
        plain, model = models(front)
        for each in (plain, model):
            each.requires_grad_("step" in name)
        for _ in range(2):
            evaluate(model)
        for each in (plain, model):
            CHANGES[name](each)
        with gathers() as gathered:
            torch.testing.assert_close(evaluate(model), evaluate(plain))
        assert gathered == Counter(UNITS) or ("one" in name and gathered[""]), name
        for each in (plain, model):
            each.requires_grad_(True)
        assert_trains_alike(plain, model)


@either_front
@ranks(2)
def test_a_write_that_moves_no_counter_is_named(rank, world_size, front):
    plain, model = models(front)
    evaluate(model)
    for param in model.parameters():
        param.data.mul_(1.5)
    with pytest.raises(AssertionError, match=rf"through `.data`.* on rank {rank}.*torch.no_grad"):
        evaluate(model)
    for param in plain.parameters():
        param.data.mul_(1.5)
    model.set_keep_unsharded_bytes(ALL)  # which frees the others as well
    torch.testing.assert_close(evaluate(model), evaluate(plain))


@either_front
@ranks(2)
def test_no_more_stays_than_the_budget(rank, world_size, front):
    model: Any = squares(front)
    x = torch.randn(2, 150)

    def run(budget: int) -> tuple[Counter[EventKind], int]:
        model.set_keep_unsharded_bytes(budget)
        with torch.no_grad():
            model(x)
            held = live_bytes(lambda tensor: tensor.numel() > 1)  # scalars of earlier collectives go late
            with record_events() as events:
                model(x)
        return Counter(event.kind for event in events), held

    for stay in (0, 1, 3, 5):
        _, without = run(0)
        kinds, held = run(stay * ONE + ONE // 2)
        units = stay // 2  # of two matrices, in one segment
        assert kinds[EventKind.REUSE] == kinds[EventKind.STAY] == units
        assert kinds[EventKind.UNSHARD] == kinds[EventKind.RESHARD] == 4 - units
        assert units * 2 * ONE <= held - without <= stay * ONE + ONE // 2


@ranks(2)
def test_frozen_and_small_units_stay_before_others(rank, world_size):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 32), nn.Linear(32, 8), nn.Linear(8, 8))
    net[1].requires_grad_(False)
    own = {*net.children()}
    model: Any = shard("orig", net, lambda module, recurse, nonwrapped_numel: recurse or module in own)
    x = torch.randn(2, 8)

    def stays(budget: int) -> set[str]:
        model.set_keep_unsharded_bytes(budget)
        with torch.no_grad():
            model(x)
            with record_events() as events:
                model(x)
        return stayed(events)

    large, small = (16 + 1) * 32 * 4, (8 + 1) * 8 * 4
    assert stays(small + 100) == {"3"}
    assert stays(large + 100) == {"1"}
    assert stays(large + small + 100) == {"1", "3"}
    assert stays(ALL) == {"0", "1", "2", "3"}


@ranks(1)
def test_what_is_no_number_of_bytes_is_refused(rank, world_size):
    model: Any = FSDP(nn.Linear(2, 2))
    for given, error in ((-1, ValueError), (1.5, TypeError), (True, TypeError)):
        for make in (FSDP, fully_shard):
            with pytest.raises(error, match="keep_unsharded_bytes must"):
                make(nn.Linear(2, 2), keep_unsharded_bytes=given)  # type: ignore[arg-type]
        with pytest.raises(error, match="keep_unsharded_bytes must"):
            model.set_keep_unsharded_bytes(given)
