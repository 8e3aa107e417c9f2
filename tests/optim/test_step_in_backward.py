"""Units that are updated while the backward goes on: the numbers of steps after it, with fewer gradients."""

import copy
import gc
import time
import warnings
import weakref
from collections.abc import Callable
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import fronts
import mesh_nets
from bed import ranks
from fronts import assert_tensors, chosen, each_front, full, full_state, no_sync, shard
from fsdp_wrap import clip_grad_norm_, record_events
from fsdp_wrap._comm import HostLane
from fsdp_wrap.optim import HostAdamW, backward_steps, on_shards, step_in_backward
from fsdp_wrap.sharded_grad_scaler import ShardedGradScaler
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import gather_objects

SIZE = 6
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def groups(params: Any) -> torch.optim.Optimizer:
    """Makes AdamW without decay for what has one dimension, or lies in a `FlatParameter`."""
    params = [*params]
    flat = [param for param in params if param.dim() < 2]
    others = [param for param in params if param.dim() > 1]
    both: list[dict[str, Any]] = [{"params": others}, {"params": flat, "weight_decay": 0.0}]
    return torch.optim.AdamW(both, lr=0.01)


class Layer(nn.Module):
    def __init__(self, checkpoints: bool | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, SIZE + 1), nn.Linear(SIZE + 1, SIZE)
        self._reentrant = checkpoints

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._reentrant is None:
            return x + self._inner(x)
        return x + checkpoint(self._inner, x, use_reentrant=self._reentrant)


class Chain(nn.Module):
    """Layers one after the other, as often as a list says, in checkpoints or not."""

    def __init__(self, order: tuple[int, ...] = (0, 1, 2), outside: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.scale = nn.Parameter(torch.rand(SIZE))
        self._order, self._reentrant = order, outside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for number in self._order:
            layer = self.layers[number]
            x = layer(x) if self._reentrant is None else checkpoint(layer, x, use_reentrant=self._reentrant)
        return x


def tied() -> nn.Module:
    chain = Chain()
    chain.layers[2].up = chain.layers[0].up
    return chain


def frozen() -> nn.Module:
    chain = Chain()
    chain.layers[1].requires_grad_(False)
    chain.layers[2].down.weight.requires_grad_(False)
    return chain


def checkpointing(reentrant: bool) -> nn.Module:
    chain = Chain()
    chain.layers = nn.ModuleList(Layer(reentrant) for _ in range(3))
    return chain


KINDS: dict[str, Callable[[], nn.Module]] = {
    "plain": Chain,
    "twice": lambda: Chain((0, 1, 0, 2, 1)),
    "tied": tied,
    "frozen": frozen,
    "checkpoints inside": lambda: checkpointing(False),
    "reentrant inside": lambda: checkpointing(True),
    "checkpoints around": lambda: Chain((0, 1, 0, 2), False),
    "reentrant around": lambda: Chain((0, 1, 0, 2), True),
}
POLICY = ModuleWrapPolicy({Layer})


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.rand(3, SIZE, generator=generator, dtype=torch.float64)


def pair(front: str, make: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    module = make().double()
    return tuple(shard(front, copy.deepcopy(module), POLICY, **options) for _ in range(2))  # type: ignore[return-value]


def assert_same_bits(model: nn.Module, usual: nn.Module) -> None:
    assert_tensors(full_state(model), full_state(usual))


def assert_same_state(optimizer: torch.optim.Optimizer, usual: torch.optim.Optimizer) -> None:
    state, expected = optimizer.state_dict(), usual.state_dict()
    assert (
        state["param_groups"] == expected["param_groups"]
        and state["state"].keys() == expected["state"].keys()
    )
    for number, entry in sorted(expected["state"].items()):  # which ranks may have in other orders
        assert state["state"][number].keys() == entry.keys()
        for key, value in entry.items():
            assert torch.equal(full(state["state"][number][key]), full(value)), (number, key)


Program = Callable[[nn.Module, int], torch.Tensor]
"""Runs the backwards of a step, and returns a loss."""


def backward(model: nn.Module, step: int) -> torch.Tensor:
    loss = model(batch(dist.get_rank(), step)).square().sum()
    loss.backward()
    return loss.detach()


def compare(
    models: tuple[nn.Module, nn.Module],
    make: Make = adamw,
    told: str = "",
    program: Program = backward,
    before: Callable[[nn.Module], Any] = lambda usual: None,
    steps: int = 3,
    **options: Any,
) -> None:
    """Trains both, one in backward with some options; losses, parameters and state have the same bits.

    `program` runs in each step; `before` is called with the other one before each of its steps.
    """
    model, usual = models
    optimizer = step_in_backward(model, make, **options)
    other = make([param for param in usual.parameters() if param.requires_grad])
    for step in range(steps):
        other.zero_grad()
        assert torch.equal(*(program(net, step) for net in models)), told
        before(usual)
        other.step()
        assert all(param.grad is None for param in model.parameters()), told
        optimizer.step()  # changes nothing
    assert_same_bits(model, usual)
    assert_same_state(optimizer, other)


FEW = ("plain", "tied", "frozen", "reentrant around")


@each_front
@pytest.mark.parametrize("seldom", [False, pytest.param(True, marks=pytest.mark.slow)])
@ranks(2)
def test_the_bits_of_steps_after_the_backward(rank, world_size, front, seldom):
    """`tests/seams` combines these updates with the options of units."""
    for kind, make in KINDS.items():
        if (kind in FEW) != seldom:
            compare(pair(front, make), groups if kind == "plain" else adamw, kind)
        if kind == "twice":
            compare(pair(front, make), told="in a thread", in_thread=True)


def time_thread(patch: pytest.MonkeyPatch, late: bool) -> None:
    """Lets work in the thread be done at once, or as late as anything waits for it."""
    asked: list[Event] = []
    issue = HostLane.issue

    def issue_then(lane: HostLane, work: Callable[[], None]) -> None:
        asked.append(released := Event())

        def begin() -> None:
            released.wait()
            work()

        issue(lane, begin)
        if not late:
            released.set()
            lane.settle()

    def releasing(wait: Callable[[HostLane], None]) -> Callable[[HostLane], None]:
        def release(lane: HostLane) -> None:
            for event in asked:
                event.set()
            wait(lane)

        return release

    patch.setattr(HostLane, "issue", issue_then)
    for name in ("finish", "settle", "abandon"):
        patch.setattr(HostLane, name, releasing(getattr(HostLane, name)))


def one_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


def both_losses(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) + model(-x).tanh()).square().sum()


@each_front
@ranks(2)
def test_ranks_communicate_alike_whenever_a_thread_updates(rank, world_size, front):
    """The thread of one rank is late, that of the other is not; against a plain model in float64."""
    with pytest.MonkeyPatch.context() as patch:
        time_thread(patch, late=rank == 1)
        for make, loss in ((tied, one_loss), (KINDS["twice"], one_loss), (Chain, both_losses)):
            torch.manual_seed(0)
            plain = make().double()
            model = shard(front, copy.deepcopy(plain), POLICY)
            step_in_backward(model, lambda params: HostAdamW(params, lr=0.01), in_thread=True)
            reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
            for step in range(3):
                reference.zero_grad()
                sum(loss(plain, batch(other, step)) for other in range(world_size)).div(world_size).backward()
                reference.step()
                with record_events() as events:
                    loss(model, batch(rank, step)).backward()
                orders = gather_objects([(event.kind, event.unit, event.together) for event in events])
                assert orders[0] == orders[1]
            fronts.assert_same_values(model, plain, rtol=1e-9, atol=1e-9)


class Watching(torch.optim.SGD):
    def __init__(self, params: Any) -> None:
        self.all = [*params]
        self.seen: list[int] = []
        super().__init__(self.all, lr=0.01)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen.append(sum(param.grad is not None for param in self.all))
        super().step(closure)


@ranks(2)
def test_gradients_of_no_more_than_two_units_exist(rank, world_size):
    net = nn.Sequential(*(Layer() for _ in range(6)))
    model = shard("composable", net, POLICY, travel_together_bytes=0)
    optimizer = step_in_backward(model, Watching)
    for step in range(3):
        model(batch(rank, step).float()).sum().backward()
    assert len(optimizer.seen) == 3 * 6 and max(optimizer.seen) <= 2 * len(optimizer.all) // 6
    assert backward_steps(optimizer).updated == [f"unit '{number}'" for number in range(5, -1, -1)]


class Two(nn.Module):
    """A parameter beside a nested unit, which may get its gradient before one of two outputs does."""

    def __init__(self, detached: bool = True) -> None:
        super().__init__()
        self.layer, self.scale = Layer(), nn.Parameter(torch.rand(SIZE))
        self._detached = detached

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.layer(x)
        return hidden, (hidden.detach() if self._detached else hidden) * self.scale


class TwoInRoot(nn.Module):
    def __init__(self, detached: bool = True) -> None:
        super().__init__()
        self.first, self.two, self.last = Layer(), Two(detached), Layer()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, scaled = self.two(self.first(x))
        return self.last(hidden), scaled


def one_after_the_other(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hidden, scaled = model(x)
    return hidden.exp().square().sum() + scaled.square().sum()  # the gradient of the last one comes first


@each_front
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@ranks(2)
def test_outputs_whose_gradients_come_one_after_the_other(rank, world_size, front, strategy):
    """Against a plain model in float64."""
    policy = ModuleWrapPolicy({Layer, Two})
    for make in (Two, TwoInRoot, lambda: TwoInRoot(detached=False)):
        torch.manual_seed(0)
        plain = make().double()
        model = shard(front, copy.deepcopy(plain), policy, **chosen(front, strategy, world_size))
        step_in_backward(model, recorded)
        reference = recorded(plain.parameters())
        for step in range(2):
            reference.zero_grad()
            losses = (one_after_the_other(plain, batch(other, step)) for other in range(world_size))
            sum(losses).div(100 * world_size).backward()
            reference.step()
            one_after_the_other(model, batch(rank, step)).div(100).backward()
        fronts.assert_same_values(model, plain, rtol=1e-9, atol=1e-9)


class Aside(Layer):
    """Has an output beside the usual one, which losses leave out."""

    def forward(self, x: torch.Tensor | tuple[torch.Tensor, ...]) -> Any:
        x = x[0] if isinstance(x, tuple) else x
        hidden = torch.tanh(self.up(x))
        aside = hidden.softmax(-1)
        return x + self.down(hidden), aside


@ranks(2)
def test_an_output_without_a_gradient_delays_no_update(rank, world_size):
    net = nn.Sequential(*(Aside() for _ in range(6)))
    model = shard("composable", net, ModuleWrapPolicy({Aside}), travel_together_bytes=0)
    optimizer = step_in_backward(model, Watching)
    for step in range(3):
        model(batch(rank, step).float())[0].sum().backward()
    assert len(optimizer.seen) == 3 * 6 and max(optimizer.seen) <= 2 * len(optimizer.all) // 6


@ranks(2)
def test_a_dropped_graph_of_several_outputs_goes_with_its_model(rank, world_size):
    model = shard("composable", Two(detached=False), POLICY)
    optimizer = step_in_backward(model, recorded)
    loss = one_after_the_other(model, batch(rank, 0).float())
    gone = weakref.ref(loss), weakref.ref(model)
    del loss, model, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


class Some(Chain):
    def forward(self, x: torch.Tensor, seldom: bool = True) -> torch.Tensor:
        x = self.layers[0](x * self.scale)
        return self.layers[1](self.layers[2](x) if seldom else x)


def accumulates(model: nn.Module, step: int) -> torch.Tensor:
    """A backward under `no_sync` is no step; what it left counts in the next, also of units not used then."""
    before = {name: value.clone() for name, value in full_state(model).items()}
    with no_sync(model):
        backward(model, step)
    assert all(torch.equal(value, before[name]) for name, value in full_state(model).items())
    loss = model(batch(dist.get_rank(), step + 10), seldom=step == 1).square().sum()
    loss.backward()
    return loss.detach()


def differentiates(model: nn.Module, step: int) -> torch.Tensor:
    """A gradient of inputs is no step; what `no_sync` left waits for a backward that reaches parameters."""
    with no_sync(model):
        backward(model, step)
    inputs = batch(dist.get_rank(), step + 10).requires_grad_()
    loss = model(inputs).square().sum()
    (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    (loss + slope.square().sum()).backward()
    return loss.detach()


def ends_later(model: Any, step: int) -> torch.Tensor:
    """Of two backwards the second is the last one, or the user ends both."""
    model.set_manual_backward_finalization(step > 1)
    losses = [model(batch(dist.get_rank(), step + 10 * number)).square().sum() for number in range(2)]
    model.set_is_last_backward(False)
    losses[0].backward()
    model.set_is_last_backward(True)
    losses[1].backward()
    if step > 1:
        model.finalize_backward()
    return losses[1].detach()


@pytest.mark.parametrize(
    ("front", "kind", "program"),
    [
        ("flat", Some, accumulates),
        ("composable", Some, accumulates),
        ("orig", Chain, differentiates),
        ("composable", Chain, ends_later),
    ],
)
@ranks(2)
def test_several_backwards(rank, world_size, front, kind, program):
    compare(pair(front, kind), program=program, steps=4)


@each_front
@ranks(2)
def test_units_are_updated_in_the_trees_that_they_join_later(rank, world_size, front):
    """First each layer is a tree; then one module encloses both, of which a deep copy has gradients."""
    torch.manual_seed(0)
    layers = nn.Sequential(Layer(), Layer()).double()
    models: list[nn.Module] = [
        nn.Sequential(*(shard(front, copy.deepcopy(layer)) for layer in layers)) for _ in range(2)
    ]
    optimizer, other = step_in_backward(models[0], adamw), adamw(models[1].parameters())
    steps = backward_steps(optimizer)
    for step in range(4):
        if step == 2:
            models = [shard(front, nn.Sequential(model)) for model in models]
        for model in models:
            backward(model, step)
        assert all(param.grad is None for param in models[0].parameters()) and len(steps.updated) == 2
        other.step()
        other.zero_grad()
        assert_same_bits(*models)
    copied = copy.deepcopy(models[0])
    backward(copied, 4)
    steps.remove()
    backward(models[0], 4)
    for model in (copied, models[0]):
        assert all(param.grad is not None for param in model.parameters() if param.numel())


@ranks(2)
def test_what_would_compute_with_what_was_updated_is_refused_by_name(rank, world_size):
    """A second backward of one forward, and a recomputation that no forward told of.

    There both forwards ran as evaluations do; the second would compute with what the first has updated.
    """
    model, other = pair("orig", Chain)
    step_in_backward(model, adamw)
    loss = model(batch(rank, 0)).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"layers\.2.* between forward and backward on rank .*\(by a step"):
        loss.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing was updated in the one that raised
        backward(model, 1)
    step_in_backward(other, adamw)
    x = batch(rank, 0).requires_grad_()
    loss = checkpoint(other, checkpoint(other, x, use_reentrant=True), use_reentrant=True).square().sum()
    with pytest.raises(RuntimeError, match="comes to .* again on rank .* use_reentrant=False"):
        loss.backward()
    before = full_state(other)["layers.0.up.weight"].clone()
    backward(other, 1)
    assert not torch.equal(full_state(other)["layers.0.up.weight"], before)


class Slow(torch.optim.SGD):
    """Takes longer for an update than a state dict needs to begin, once it updates the model."""

    seconds = 0.0

    def step(self, closure: Any = None) -> Any:
        time.sleep(self.seconds)
        return super().step(closure)


@pytest.mark.parametrize(("front", "in_thread"), [("flat", False), ("orig", True), ("composable", True)])
@ranks(2)
def test_a_backward_that_raises(rank, world_size, front, in_thread):
    """The units that were updated are named; the model goes on as one that has their values.

    A thread still updates when the error arrives, and what is saved then holds its updates.
    """

    class Once(Chain):
        fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x * self.scale)
            if self.fails:
                x.register_hook(fail)
            return self.layers[2](self.layers[1](x))

    def fail(grad: torch.Tensor) -> None:
        raise ArithmeticError("on purpose")

    model, usual = pair(front, Once, travel_together_bytes=0)
    kind = Slow if in_thread else torch.optim.SGD
    optimizer = step_in_backward(model, lambda params: kind(params, lr=0.1), in_thread=in_thread)
    optimizer.seconds = 0.2  # from now on: it was tried before, which takes many steps
    for net in (model, usual):
        for module in net.modules():
            module.fails = True
        with pytest.raises(ArithmeticError):
            backward(net, 0)
        for module in net.modules():
            module.fails = False
    with pytest.warns(UserWarning, match=r"after 1 of 4 units .*layers\.2'; the others have kept") as caught:
        after = full_state(model)
    assert [warning.filename for warning in caught] == [fronts.__file__]  # the line that asks for the state
    assert len(backward_steps(optimizer).updated) == 1 and "layers.2" in backward_steps(optimizer).updated[0]
    expected = full_state(usual)
    same = {name for name in after if torch.equal(after[name], expected[name])}
    assert same == {name for name in expected if "layers.2" not in name}
    backward(model, 1)


def recorded(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


@pytest.mark.parametrize(("front", "in_thread"), [("flat", True), ("orig", False), ("composable", False)])
@ranks(2)
def test_clipping_by_the_norm_of_the_last_backward(rank, world_size, front, in_thread):
    """The first backward clips by its own, as `clip_grad_norm_` would; against a plain model in float64."""
    torch.manual_seed(0)
    plain = Chain().double()
    model = shard(front, copy.deepcopy(plain), POLICY, travel_together_bytes=0)
    optimizer = step_in_backward(model, recorded, max_norm=0.5, in_thread=in_thread)
    steps, reference = backward_steps(optimizer), recorded(plain.parameters())
    known = None
    for step in range(4):
        reference.zero_grad()
        sum(plain(batch(other, step)).square().sum() for other in range(world_size)).div(
            world_size
        ).backward()
        own = nn.utils.get_total_norm([param.grad for param in plain.parameters()])
        factor = min(1.0, 0.5 / ((own if known is None else known).item() + 1e-6))
        for param in plain.parameters():
            param.grad *= factor
        reference.step()
        with no_sync(model):
            (0 * model(batch(rank, step))).sum().backward()  # which is no step, and tells no norm
        backward(model, step)
        torch.testing.assert_close(steps.total_norm, own, rtol=1e-9, atol=0)
        known = own
    fronts.assert_same_values(model, plain, rtol=1e-9, atol=1e-9)


@ranks(2)
def test_clipping_by_value_and_by_the_first_norm_as_functions_do(rank, world_size):
    compare(
        pair("orig", Chain),
        recorded,
        before=lambda usual: nn.utils.clip_grad_value_(usual.parameters(), 0.01),
        clip_value=0.01,
    )
    model, usual = pair("orig", KINDS["tied"])  # whose root has several parameters
    optimizer = step_in_backward(model, recorded, max_norm=0.1)
    for net in (model, usual):
        backward(net, 0)
    norm = clip_grad_norm_(usual, 0.1)
    torch.testing.assert_close(backward_steps(optimizer).total_norm, norm.double(), rtol=1e-12, atol=0)
    recorded(usual.parameters()).step()
    after, expected = full_state(model), full_state(usual)
    for name, value in expected.items():  # the sums of the norms have another order
        torch.testing.assert_close(after[name], value, rtol=1e-12, atol=1e-12)


@ranks(2)
def test_scaled_losses_without_overflow(rank, world_size):
    model, usual = pair("composable", Chain)
    scalers = [ShardedGradScaler("cpu", init_scale=4.0, growth_interval=2) for _ in range(2)]
    step_in_backward(model, adamw, scaler=scalers[0], max_norm=1e9)
    other = adamw(usual.parameters())
    for step in range(4):
        other.zero_grad()
        for scaler, net in zip(scalers, (model, usual)):
            scaler.scale(net(batch(rank, step)).square().sum()).backward()
        scalers[1].step(other)
        for scaler in scalers:
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale() == 4.0 * 2 ** ((step + 1) // 2)
    assert_same_bits(model, usual)


@pytest.mark.parametrize(("front", "max_norm"), [("orig", None), ("flat", 1.0), ("composable", 1.0)])
@ranks(2)
def test_a_unit_that_overflows_is_skipped_on_all_ranks_alike(rank, world_size, front, max_norm):
    """And all that come after it; where the norm is awaited, all units are. The scale goes down."""

    class Sometimes(Chain):
        overflows = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[1](self.layers[0](x * self.scale))
            if self.overflows and rank == 1:
                x.register_hook(lambda grad: grad.index_fill(1, torch.tensor(0), torch.inf))
            return self.layers[2](x)

    model, _ = pair(front, Sometimes, travel_together_bytes=0)
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    optimizer = step_in_backward(model, adamw, scaler=scaler, max_norm=max_norm)
    for overflows, scale in ((True, 2.0), (False, 2.0), (True, 1.0)):
        first = overflows and scale == 2.0
        before = {name: value.clone() for name, value in full_state(model).items()}
        for module in model.modules():
            module.overflows = overflows
        scaler.scale(model(batch(rank, 0)).square().sum()).backward()
        scaler.update()
        assert scaler.get_scale() == scale
        changed = {name for name, value in full_state(model).items() if not torch.equal(value, before[name])}
        expected = {name for name in before if not overflows or "layers.2" in name}
        assert changed == (set() if max_norm and first else expected)
        assert all(param.grad is None for param in model.parameters())
        norm = backward_steps(optimizer).total_norm
        assert norm is None if max_norm is None or first else norm.isfinite()


class Counting(torch.optim.AdamW):
    """Leaves something in its groups at each step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = 0.5 * group["lr"]
            group["count"] = group.get("count", 0) + 1
        super().step(closure)


@ranks(2)
def test_schedulers_and_groups(rank, world_size):
    """A scheduler changes what counts in the next backward; so does what a step leaves in a group."""
    model, usual = pair("orig", Chain)
    optimizer, other = step_in_backward(model, Counting), Counting(usual.parameters())
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(stepped, 0.5) for stepped in (optimizer, other)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            other.zero_grad()
            for net in (model, usual):
                backward(net, step)
            other.step()
            for scheduler in schedulers:
                scheduler.step()
    assert_same_bits(model, usual)
    assert_same_state(optimizer, other)


class Noting(torch.optim.AdamW):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01, weight_decay=0.1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.norm = nn.utils.get_total_norm([param.grad for param in self.param_groups[0]["params"]])
        super().step(closure)


@pytest.mark.slow
@pytest.mark.parametrize("front", ["ours", "orig", "flat"])
@ranks(4)
def test_tensor_parallelism_and_hybrid_meshes(rank, world_size, front):
    for kind in ("tp", "hybrid", "hybrid_tp"):
        plain, model = mesh_nets.net(0), mesh_nets.on_mesh(front, kind, seed=0)
        optimizer = step_in_backward(model, adamw, max_norm=None if kind == "hybrid" else 1e9)
        reference = Noting(plain.parameters())
        for step in range(3):
            mesh_nets.train(plain, reference, step)
            mesh_nets.train(model, optimizer, step)
            if kind != "hybrid":
                norm = backward_steps(optimizer).total_norm
                torch.testing.assert_close(norm, reference.norm, rtol=1e-9, atol=0)
        fronts.assert_same_values(model, plain, rtol=0, atol=1e-9)


@ranks(2)
def test_on_shards(rank, world_size):
    for in_thread in (False, True):
        compare(pair("composable", Chain), lambda params: on_shards(adamw(params)), in_thread=in_thread)


@ranks(2)
def test_mistakes_are_named_before_anything_changes(rank, world_size):
    model = shard("orig", Chain(), POLICY)
    params = [*model.parameters()]
    alien = nn.Parameter(torch.ones(1))
    for options, make, error, rule in (
        ({}, lambda given: given, TypeError, "must return a torch.optim.Optimizer, not a list"),
        ({}, lambda given: torch.optim.LBFGS(given), ValueError, "LBFGS computes with all gradients"),
        ({}, lambda given: torch.optim.Adafactor(given), ValueError, "Adafactor computes with whole"),
        ({}, lambda given: adamw([*given, alien]), ValueError, "AdamW of make_optimizer has .* not given"),
        ({"max_norm": 0.0}, adamw, ValueError, "max_norm must be positive"),
        ({"clip_value": -1.0}, adamw, ValueError, "clip_value must be positive"),
        ({"scaler": torch.amp.GradScaler("cpu")}, adamw, ValueError, "pass a fsdp_wrap.*ShardedGradScaler"),
        ({}, lambda g: torch.optim.SGD(g, lr=0.1, differentiable=True), ValueError, "is differentiable"),
    ):
        with pytest.raises(error, match=rule):
            step_in_backward(model, make, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Linear has no wrapped or sharded module"):
        step_in_backward(nn.Linear(2, 2), adamw)
    with pytest.raises(ValueError, match="was not made by step_in_backward"):
        backward_steps(adamw(params))
    optimizer = step_in_backward(model, adamw)
    with pytest.raises(ValueError, match=r"is updated in backward already: call backward_steps"):
        step_in_backward(model, adamw)
    backward_steps(optimizer).remove()
    model(batch(0, 0).float()).sum().backward()
    assert all(param.grad is not None for param in params if param.numel() > 0)


@ranks(1)
def test_a_dropped_model_is_freed(rank, world_size):
    model = shard("orig", Chain(), POLICY)
    optimizer = step_in_backward(model, adamw, max_norm=1.0, in_thread=True)
    for step in range(2):
        model(batch(0, step).float()).sum().backward()
    references = [weakref.ref(target) for target in (*model.parameters(), model, optimizer)]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
