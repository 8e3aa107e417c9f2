"""Which unit runs when: order of events, prefetch, checkpointing, counts of collectives, failures."""

import dataclasses
from collections import deque, namedtuple
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import fronts
import models
from bed import ranks
from bed.references import count_collectives
from beside import assert_close_grads
from fronts import FULL, KEPT, assert_same_grads, each_front, either_front
from fsdp_wrap import BackwardPrefetch, EventKind, MixedPrecision, Phase, ShardingStrategy, record_events
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap._core import NotIdleError, everywhere
from fsdp_wrap._runtime.arrivals import Arrivals
from fsdp_wrap.wrap import CustomPolicy, ModuleWrapPolicy
from models import WIDTH, WRAPPINGS, Block, Transformer, loss_of, tokens

CHECKPOINTS = ["reentrant", "early_stop", "no_early_stop"]
B0, B1, B2 = "blocks.0", "blocks.1", "blocks.2"


class _Checkpointed(nn.Module):
    """Runs a module under activation checkpointing: outside of it, or the module is a unit's inside."""

    def __init__(self, inner: nn.Module, kind: str) -> None:
        super().__init__()
        self.inner = inner
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "none":
            return self.inner(x)
        if self.kind == "reentrant":
            return checkpoint(self.inner, x, use_reentrant=True)
        return checkpoint(self.inner, x, use_reentrant=False, early_stop=self.kind == "early_stop")


def _checkpointed_transformer(kind: str) -> nn.Module:
    model = Transformer()
    model.blocks = nn.ModuleList(_Checkpointed(block, kind) for block in model.blocks)
    return model


def twins(make: Any, dtype: torch.dtype = torch.float32, policy: Any = None, **options: Any) -> Any:
    return models.twins(make, dtype, auto_wrap_policy=policy, use_orig_params=True, **options)


def transformers(**options: Any) -> tuple[DDP, FSDP]:
    """A transformer under DDP, and one with the same parameters and a unit for each block."""
    plain, model = twins(Transformer, policy=WRAPPINGS["block"](), **options)
    return DDP(plain), model


def _trace(events, *kinds):
    return [(event.kind.value, event.unit.removesuffix(".inner")) for event in events if event.kind in kinds]


def _run(model, rank, step=0):
    loss_of(model, tokens(rank, step)).backward()


def _calls(traffic):
    return {name: count.calls for name, count in traffic.items()}


@pytest.mark.parametrize("kind", ["none", *CHECKPOINTS])
@ranks(2)
def test_order_and_collectives_of_a_step(rank, world_size, kind):
    """One gather per unit in forward, one per resharded unit in backward, one reduction per unit."""
    for unit in (Block, _Checkpointed):  # around checkpoints, and inside of them
        plain, model = twins(
            lambda: _checkpointed_transformer(kind), policy=ModuleWrapPolicy({unit}), travel_together_bytes=0
        )
        ddp = DDP(plain)
        for step in range(2):
            with count_collectives() as traffic:
                with record_events() as events:
                    loss = loss_of(model, tokens(rank, step))
                assert _trace(events, EventKind.UNSHARD) == [("unshard", name) for name in ("", B0, B1, B2)]
                with record_events() as events:
                    loss.backward()
            kinds = ["unshard", "unshard", "post_backward", "unshard", *["post_backward"] * 3]
            order = list(zip(kinds, [B2, B1, B2, B0, B1, B0, ""]))
            assert _trace(events, EventKind.UNSHARD, EventKind.POST_BACKWARD) == order
            assert all(event.phase is Phase.BACKWARD for event in events)
            assert _calls(traffic) == {"all_gather_into_tensor": 4 + 3, "reduce_scatter_tensor": 4}
            _run(ddp, rank, step)
            assert_same_grads(model, ddp)
            model.zero_grad()
            ddp.zero_grad()


class _Nested(nn.Module):
    """Checkpoints a run of units as a whole, each of which checkpoints its inside."""

    def __init__(self, outer: str, inner: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        blocks = nn.Sequential(*[_Checkpointed(Block(), inner) for _ in range(2)])
        self.middle = _Checkpointed(blocks, outer)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


def _is_around_checkpoint(module: nn.Module) -> bool:
    return isinstance(module, _Checkpointed) and isinstance(module.inner, Block)


@pytest.mark.parametrize("outer", CHECKPOINTS)
@ranks(2)
def test_nested_checkpoints(rank, world_size, outer):
    for inner in CHECKPOINTS:
        for policy in (ModuleWrapPolicy({Block}), CustomPolicy(_is_around_checkpoint)):
            plain, model = twins(lambda: _Nested(outer, inner), policy=policy)  # noqa: B023
            ddp = DDP(plain)
            x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(rank))
            ddp(x).square().sum().backward()
            with count_collectives() as traffic:
                model(x).square().sum().backward()
            calls = _calls(traffic)
            assert calls == {"all_gather_into_tensor": 3 + 2, "reduce_scatter_tensor": 3}, (inner, policy)
            assert_same_grads(model, ddp)


@ranks(2)
def test_prefetching_as_asked(rank, world_size):
    _, model = transformers(forward_prefetch=True, travel_together_bytes=0)
    _run(model, rank)
    with record_events() as events, torch.no_grad():
        model(tokens(rank, 1))
    order = [("unshard", ""), ("unshard", B0), ("unshard", B1), ("reshard", B0)]
    order += [("unshard", B2), *(("reshard", name) for name in (B1, B2, ""))]
    assert _trace(events, EventKind.UNSHARD, EventKind.RESHARD) == order
    for prefetch in (BackwardPrefetch.BACKWARD_POST, None):
        _, model = transformers(backward_prefetch=prefetch)
        with record_events() as events:
            _run(model, rank)
        held = peak = 1  # the root
        for event in events:
            if event.phase is Phase.BACKWARD:
                held += {EventKind.UNSHARD: 1, EventKind.RESHARD: -1}.get(event.kind, 0)
                peak = max(peak, held)
        assert held == 0, prefetch
        assert peak == 2, "never a unit ahead of the running one"


class _Order(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, order):
        for index in order:
            x = self.layers[index](x).tanh()
        return x


@ranks(2)
def test_prefetch_when_the_order_changes(rank, world_size):
    """A wrong prefetch costs time, but neither correctness nor lasting memory."""
    pre, post = BackwardPrefetch
    for strategy, prefetch in ((FULL, pre), (FULL, post), (KEPT, pre)):
        options = {"sharding_strategy": strategy, "backward_prefetch": prefetch, "forward_prefetch": True}
        plain, model = twins(_Order, torch.float64, ModuleWrapPolicy({nn.Linear}), **options)
        x = torch.randn(3, 8, dtype=torch.float64)
        for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 1, 0, 1], [2], [0, 3, 0, 2], [0, 1, 2, 3]):
            with torch.no_grad():
                model(x, order[::-1])
            assert all(unit._unit.buffers.where.value == "sharded" for unit in model.layers)
            for module in (plain, model):
                module(x, order).square().sum().backward()
            assert all(unit._unit.buffers.where.value == "sharded" for unit in model.layers)
        assert_close_grads(model, plain)


@dataclasses.dataclass
class _Pair:
    hidden: Any
    note: str


_Named = namedtuple("_Named", ["hidden", "rest"])


class _Registered:
    """A container that only torch's registry knows how to take apart."""

    def __init__(self, hidden: Any, note: str) -> None:
        self.hidden, self.note = hidden, note


def _packed(y: torch.Tensor) -> _Registered:
    """Packs a tensor into the containers that users have, each within another."""
    if _Registered not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            _Registered,
            lambda it: ([it.hidden], it.note),
            lambda held, note: _Registered(next(iter(held)), note),
        )
    pair = _Pair((MappingProxyType({"y": frozenset({y})}), None), "text")
    return _Registered(_Named([{"hidden": pair, "n": 3}], 5), "text")


def _unpacked(value: _Registered) -> torch.Tensor:
    assert (value.note, value.hidden.rest, value.hidden.hidden[0]["n"]) == ("text", 5, 3)
    pair = value.hidden.hidden[0]["hidden"]
    assert pair.note == "text" and pair.hidden[1] is None and type(pair.hidden[0]) is MappingProxyType
    assert type(pair.hidden[0]["y"]) is frozenset
    return next(iter(pair.hidden[0]["y"]))


class _Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, value, *, scale=0.5):
        return _packed(self.linear(_unpacked(value)) * scale)


@ranks(2)
def test_structured_inputs_and_outputs(rank, world_size):
    """Each unit's end of backward is seen by its inputs, and what containers hold is cast."""
    policy = ModuleWrapPolicy({_Structured})
    plain, model = twins(lambda: nn.Sequential(*(_Structured() for _ in range(3))), torch.float64, policy)
    x = torch.ones(2, 8, dtype=torch.float64, requires_grad=True)
    _unpacked(plain(_packed(x))).square().sum().backward()
    with record_events() as events:
        _unpacked(model(_packed(x))).square().sum().backward()
    over = [(event.unit, event.phase) for event in events if event.kind is EventKind.POST_BACKWARD]
    assert over == [(unit, Phase.BACKWARD) for unit in "210"]
    assert_close_grads(model, plain)
    cast = FSDP(_Structured(), mixed_precision=MixedPrecision(torch.bfloat16))
    unpacked = _unpacked(cast(_packed(torch.ones(2, 8)), scale=0.25))
    assert unpacked.dtype is torch.bfloat16
    unpacked.sum().backward()


class _Noting(nn.Module):
    """Writes to containers of its inputs, as layers do that keep a state or add up losses; may raise then."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.raises = nn.Linear(8, 8), False

    def forward(self, x, state, pair, *, notes):
        y = self.linear(x).tanh()
        notes.append(y.mean())
        state["sum"], state["n"] = state["sum"] * state.pop("factor") + y, state["n"] + 1
        pair.hidden = [*pair.hidden, y]
        if self.raises:
            raise KeyError("after writing")
        return y


class _Notes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Noting() for _ in range(3))

    def forward(self, x):
        state, pair, notes, start = {"sum": x, "n": 0, "first": x}, _Pair([x], "text"), deque([x.sum()]), x
        for layer in self.layers:
            state["factor"] = torch.ones(8, dtype=x.dtype) / 2
            x = layer(x, state, pair, notes=notes)
        assert state["first"] is start and pair.hidden[0] is start and [*state] == ["sum", "n", "first"]
        assert (state["n"], len(pair.hidden), len(notes)) == (3, 4, 4)
        return x.sum() + (state["sum"] * sum(pair.hidden)).sum() + sum(notes)


@either_front
@ranks(2)
def test_what_a_forward_writes_to_containers_of_its_inputs(rank, world_size, front):
    """The caller has it, and else its own tensors, uncast; also after an error."""
    policy = ModuleWrapPolicy({_Noting})
    plain, model = fronts.twins(front, _Notes, torch.float64, auto_wrap_policy=policy)
    replicated = DDP(plain)
    for step in range(2):
        x = torch.full((2, 8), 0.1 * (rank + step), dtype=torch.float64, requires_grad=True)
        losses = [net(x) for net in (replicated, model)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
    assert_close_grads(model, plain)
    half = fronts.shard(front, _Noting(), mixed_precision=MixedPrecision(torch.bfloat16))
    x, fronts.inner(half).raises = torch.ones(2, 8, requires_grad=True), True
    state, notes = {"sum": x, "n": 0, "factor": 1.0}, list[torch.Tensor]()
    with pytest.raises(KeyError, match="after writing"):
        half(x, state, pair := _Pair([x, (x, 3)], "text"), notes=notes)
    assert state["sum"].dtype is torch.bfloat16 and state["n"] == 1 and len(notes) == 1
    assert pair.hidden[0] is x and pair.hidden[1][0] is x and len(pair.hidden) == 3


def _trains_in_part():
    model = Transformer()
    for name, param in model.named_parameters():
        param.requires_grad_("norm" in name or "head" in name)
    return model


@either_front
@ranks(2)
def test_frozen_parameters_of_a_unit(rank, world_size, front):
    """Of a unit that trains in part, only that is reduced, inside of autograd; what trains may change."""
    plain, model = fronts.twins(front, _trains_in_part, auto_wrap_policy=WRAPPINGS["block"]())
    trainable = sum(param.nbytes for param in plain.parameters() if param.requires_grad)
    with count_collectives() as traffic, record_events() as events:
        _run(model, rank)
    reduced = [event for event in events if event.kind is EventKind.REDUCE]
    assert [event.phase for event in reduced] == [Phase.BACKWARD] * 4
    assert trainable <= sum(event.nbytes for event in reduced) < 1.04 * trainable
    padding = 4 * 64 if front == "orig" else 0.04 * trainable
    assert traffic["reduce_scatter_tensor"].bytes <= trainable + padding
    for step, frozen in enumerate(["blocks.1", "mlp", "none", "embed"]):
        for name, param in [*plain.named_parameters(), *model.named_parameters()]:
            param.requires_grad_(frozen not in name.replace("_fsdp_wrapped_module.", ""))
            param.grad = None
        _run(DDP(plain), rank, step)
        _run(model, rank, step)
        assert_close_grads(model, plain, rtol=0, atol=0)


class _Manifold(nn.Module):
    """Two heads, a parameter that is not used, a unit that runs three times (once without gradients), and
    layers that write in place first, have sparse gradients, or list their parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.spare = nn.Linear(8, 8), nn.Parameter(torch.ones(5))
        self.embed = nn.Embedding(11, 8, sparse=True)
        self.lstm = nn.LSTM(8, 8, batch_first=True, num_layers=2)
        self.act = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))
        self.left, self.right = nn.Linear(8, 2), nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))

    def forward(self, x):
        x = self.shared(x).tanh() + self.embed(torch.tensor([[1, 2, 3], [3, 3, 10]]))
        with torch.no_grad():
            extra = self.shared(x)
        x = self.act(self.lstm(self.shared(x + extra))[0] * 1.0)
        return self.left(x).square().sum(), self.right(x).square().sum()


@ranks(2)
def test_several_uses_heads_forwards_and_backwards(rank, world_size):
    of_layers = ModuleWrapPolicy({nn.Linear, nn.Embedding, nn.LSTM, nn.Sequential})
    for policy, needs_grad in ((None, True), (of_layers, False), (of_layers, True)):
        plain, model = twins(_Manifold, torch.float64, policy)
        x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=needs_grad)
        for module in (plain, model):
            for head in module(x):
                head.backward(retain_graph=True)
            module(x)[1].backward()
            (module(x)[0] + module(x * 2)[1]).backward()  # two forwards, one backward
            first, second = sum(module(x)), sum(module(x * 2))
            second.backward(retain_graph=True)
            first.backward()
            second.backward()
        assert_close_grads(model, plain)


@each_front
@ranks(2)
def test_another_thread_during_a_backward(rank, world_size, front):
    """It may walk the parameters, as for a log. What would free them, or read them half full, is refused."""
    plain, model = fronts.twins(front, Transformer, auto_wrap_policy=WRAPPINGS["block"]())

    def look_on(*_):
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: len([*model.parameters()])).result()
            for refused in (model.state_dict, getattr(model, "reshard", model.state_dict)):
                with pytest.raises(NotIdleError, match="backward"):
                    pool.submit(refused).result()

    for block in fronts.inner(model).blocks:
        fronts.inner(block).register_full_backward_pre_hook(look_on)
    for module in (DDP(plain), model):
        _run(module, rank)
    assert_same_grads(model, plain)
    assert model.state_dict()


class _InTwoThreads(nn.Module):
    """Part of it runs in a thread whose autograd nodes count as early ones: their backward runs last."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(lambda: self.far * 2).result()
        return x * self.near + late


@ranks(2)
def test_a_leaf_whose_gradient_comes_after_those_of_the_inputs(rank, world_size):
    policy = ModuleWrapPolicy({nn.Linear, _InTwoThreads})
    plain, model = twins(lambda: nn.Sequential(nn.Linear(8, 8), _InTwoThreads()), policy=policy)
    plain(torch.ones(2, 8)).square().sum().backward()  # which this thread counts as well
    with record_events() as events:
        model(torch.ones(2, 8)).square().sum().backward()
    over = [(event.unit, event.phase) for event in events if event.kind is EventKind.POST_BACKWARD]
    assert over == [("0", Phase.BACKWARD), ("1", Phase.BACKWARD)]
    assert_close_grads(model, plain, rtol=1.3e-6, atol=1e-5)


@ranks(2)
def test_a_step_after_a_forward_without_backward(rank, world_size):
    """What a forward kept for its backward is not used after the optimizer has stepped."""
    for strategy in (FULL, KEPT, ShardingStrategy.NO_SHARD):
        losses = []
        for module in transformers(sharding_strategy=strategy):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
            _run(module, rank)
            loss_of(module, tokens(rank, 1))
            optimizer.step()
            losses.append(loss_of(module, tokens(rank, 2)).item())
        assert losses[0] == losses[1], strategy


@ranks(2)
def test_the_root_keeps_its_parameters_unless_asked_otherwise_and_gives_its_units_their_names(
    rank, world_size
):
    ddp, model = transformers()
    part = model.blocks[1]
    part(torch.ones(1, 2, WIDTH)).sum().backward()  # its own root for now
    part.zero_grad()
    assert part.check_is_root()
    model.set_reshard_after_forward(True)
    part.set_reshard_after_forward(False)
    _run(ddp, rank)
    with record_events() as events:
        loss = loss_of(model, tokens(rank, 0))
    assert not part.check_is_root()
    assert _trace(events, EventKind.RESHARD) == [("reshard", name) for name in (B0, B2, "")]
    with record_events() as of_backward:
        loss.backward()
    assert _trace(of_backward, EventKind.UNSHARD) == [("unshard", name) for name in ("", B2, B0)]
    assert_same_grads(model, ddp)
    seen = len(events), len(of_backward)
    _run(model, rank)
    assert (len(events), len(of_backward)) == seen and not everywhere.gathers, "nobody listens"


@ranks(2)
def test_another_graph_runs_backward_after_one_that_raised(rank, world_size):
    """The model learns of the first one's end when it is asked for parameters, or in the next backward."""
    plain, model = transformers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, tokens(rank, 0)).backward()
    model.zero_grad()

    def fail(grad: torch.Tensor) -> None:
        raise KeyError("in the backward")

    for clears in (model, optimizer):
        block = model.module.blocks[1]
        hook = block.register_forward_hook(lambda *given: given[-1].register_hook(fail) and None)
        failing = loss_of(model, tokens(rank, 0))
        hook.remove()
        losses = [loss_of(net, tokens(rank, 1)) for net in (model, plain)]
        with pytest.raises(KeyError, match="in the backward"):
            failing.backward()
        clears.zero_grad()
        plain.zero_grad()
        for loss in losses:
            loss.backward()
        assert_same_grads(model, plain.module)


@ranks(2)
def test_whole_copies_are_summed_by_one_collective(rank, world_size):
    plain, model = twins(_Towers, sharding_strategy=ShardingStrategy.NO_SHARD, shared_memory=False)
    ddp, x = DDP(plain), torch.full((2, 4), rank + 1.0)
    ddp(x, True).sum().backward()
    with count_collectives() as traffic:
        model(x, True).sum().backward()
    assert _calls(traffic) == {"all_reduce": 1}
    assert_same_grads(model, ddp)


@either_front
@ranks(1)
def test_a_gradient_that_opens_the_backward_counts_as_come(rank, world_size, front):
    """The gradient is of a leaf read after its module's forward, whose output is in no graph."""
    linear = nn.Linear(4, 4, bias=False)
    model: Any = fronts.shard(front, linear, sharding_strategy=KEPT)
    x = model(torch.ones(2, 4)).detach()
    with record_events() as events:
        (x @ linear.weight).sum().backward()
    kinds = EventKind.POST_BACKWARD, EventKind.REDUCE
    assert [event.phase for event in events if event.kind in kinds] == [Phase.BACKWARD] * 2


class _Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, uses_all: bool) -> torch.Tensor:
        return self.one(x) + self.other(x) if uses_all else self.one(x)


@ranks(1)
def test_the_end_of_a_backward_without_all_gradients_is_told_once(rank, world_size):
    model = FSDP(_Towers())
    for uses_all in (False, True):
        with record_events() as events:
            model(torch.ones(2, 4), uses_all).sum().backward()
        ends = [event.phase for event in events if event.kind is EventKind.POST_BACKWARD]
        assert ends == [Phase.BACKWARD if uses_all else Phase.FINAL_CALLBACK]


def _go_on(arrivals: Arrivals) -> bool:
    arrivals.go_on()
    return not arrivals.missing


def test_a_schedule_acts_after_the_first_gradient_a_quarter_and_the_last():
    leaves = [nn.Parameter(torch.zeros(10)) for _ in range(8)]
    arrivals, acted = Arrivals(), []
    hooks = [arrivals.hook(leaf, lambda leaf: acted.append(_go_on(arrivals))) for leaf in leaves]
    arrivals.expect(leaves)
    for _ in range(2):
        arrivals.begin(every=False)
        assert not arrivals.some_came()
        came = []
        for hook, leaf in zip(hooks, leaves):
            hook(leaf)
            came.append((len(acted), arrivals.quarter_came))
        assert acted == [False, False, True] and arrivals.some_came()
        assert came == [(1, False), *[(2, True)] * 6, (3, True)]
        acted.clear()
    arrivals.expect_all_but(leaves[0])  # a backward that another graph's gradient opened
    for hook, leaf in zip(hooks[1:], leaves[1:]):
        hook(leaf)
    assert acted[-1] and not arrivals.missing
