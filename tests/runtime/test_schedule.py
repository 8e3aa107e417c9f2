"""Which unit runs when: order of events, prefetch, checkpointing, counts of collectives, failures."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from bed import ranks
from bed.references import count_collectives
from fronts import assert_same_grads, assert_same_values, each_form
from fsdp_wrap import (
    BackwardPrefetch,
    Event,
    EventKind,
    MixedPrecision,
    Phase,
    ShardingStrategy,
    observe_events,
    record_events,
)
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import CustomPolicy, ModuleWrapPolicy
from models import (
    WIDTH,
    WRAPPINGS,
    Block,
    Transformer,
    full_grads,
    loss_of,
    named_state,
    tokens,
    train,
    twins,
)

each_checkpoint = pytest.mark.parametrize("kind", ["none", "reentrant", "early_stop", "no_early_stop"])


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


def _trace(events, *kinds):
    return [(event.kind.value, event.unit.removesuffix(".inner")) for event in events if event.kind in kinds]


def _run(model, rank, step=0):
    loss_of(model, tokens(rank, step)).backward()


@pytest.mark.parametrize("unit", [Block, _Checkpointed], ids=["around", "inside"])
@each_checkpoint
@each_form
@ranks(2)
def test_forward_order_and_backward_pre(rank, world_size, use_orig_params, kind, unit):
    _, model = twins(
        lambda: _checkpointed_transformer(kind),
        auto_wrap_policy=ModuleWrapPolicy({unit}),
        use_orig_params=use_orig_params,
        travel_together_bytes=0,
    )
    for step in range(2):
        with record_events() as events:
            loss = loss_of(model, tokens(rank, step))
        b0, b1, b2 = (f"blocks.{index}" for index in range(3))
        assert _trace(events, EventKind.UNSHARD) == [("unshard", name) for name in ("", b0, b1, b2)]
        with record_events() as events:
            loss.backward()
        assert _trace(events, EventKind.UNSHARD, EventKind.POST_BACKWARD) == [
            ("unshard", b2),
            ("unshard", b1),
            ("post_backward", b2),
            ("unshard", b0),
            ("post_backward", b1),
            ("post_backward", b0),
            ("post_backward", ""),
        ]
        assert all(event.phase is Phase.BACKWARD for event in events)


@pytest.mark.parametrize("prefetch", ["BACKWARD_POST", None])
@ranks(2)
def test_backward_post_and_no_prefetch(rank, world_size, prefetch):
    chosen = BackwardPrefetch[prefetch] if prefetch else None
    _, model = twins(Transformer, auto_wrap_policy=WRAPPINGS["block"](), backward_prefetch=chosen)
    with record_events() as events:
        _run(model, rank)
    backward = [event for event in events if event.phase is Phase.BACKWARD]
    held = peak = 1  # the root
    for event in backward:
        held += {EventKind.UNSHARD: 1, EventKind.RESHARD: -1}.get(event.kind, 0)
        peak = max(peak, held)
    assert held == 0
    assert peak == 2  # never a unit ahead of the running one


@each_form
@ranks(2)
def test_forward_prefetch(rank, world_size, use_orig_params):
    _, model = twins(
        Transformer,
        auto_wrap_policy=WRAPPINGS["block"](),
        use_orig_params=use_orig_params,
        forward_prefetch=True,
        travel_together_bytes=0,
    )
    b0, b1, b2 = (f"blocks.{index}" for index in range(3))
    _run(model, rank)
    with record_events() as events, torch.no_grad():
        model(tokens(rank, 1))
    assert _trace(events, EventKind.UNSHARD, EventKind.RESHARD) == [
        ("unshard", ""),
        ("unshard", b0),
        ("unshard", b1),
        ("reshard", b0),
        ("unshard", b2),
        ("reshard", b1),
        ("reshard", b2),
        ("reshard", ""),
    ]


class _Order(nn.Module):
    """Runs its layers in the order that it is told, any of them several times or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, order):
        for index in order:
            x = self.layers[index](x).tanh()
        return x


@pytest.mark.parametrize("prefetch", ["BACKWARD_PRE", "BACKWARD_POST"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@each_form
@ranks(2)
def test_prefetch_when_the_order_changes(rank, world_size, use_orig_params, strategy, prefetch):
    """A mistaken prefetch costs time, never correctness, and no memory for good."""
    plain, model = twins(
        _Order,
        torch.float64,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=use_orig_params,
        forward_prefetch=True,
        sharding_strategy=ShardingStrategy[strategy],
        backward_prefetch=BackwardPrefetch[prefetch],
    )
    x = torch.randn(3, 8, dtype=torch.float64)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 1, 0, 1], [2], [0, 3, 0, 2], [0, 1, 2, 3]):
        with torch.no_grad():
            model(x, order[::-1])
        assert all(unit._unit.handle.state.value == "sharded" for unit in model.layers)
        for module in (plain, model):
            module(x, order).square().sum().backward()
        assert all(unit._unit.handle.state.value == "sharded" for unit in model.layers)
    assert_same_grads(model, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("unit", [Block, _Checkpointed], ids=["around", "inside"])
@each_checkpoint
@each_form
@ranks(2)
def test_collectives_per_step(rank, world_size, use_orig_params, kind, unit):
    """One gather per unit in forward, one per resharded unit in backward, one reduction per unit."""
    plain, model = twins(
        lambda: _checkpointed_transformer(kind),
        auto_wrap_policy=ModuleWrapPolicy({unit}),
        use_orig_params=use_orig_params,
    )
    ddp = DDP(plain)
    _run(ddp, rank)
    with count_collectives() as traffic:
        _run(model, rank)
    assert {name: calls for name, (calls, _) in traffic.items()} == {
        "all_gather_into_tensor": 4 + 3,
        "reduce_scatter_tensor": 4,
    }
    assert_same_grads(model, ddp)


@each_form
@ranks(2)
def test_exception_in_forward_or_backward_leaves_a_usable_model(rank, world_size, use_orig_params):
    plain, model = twins(Transformer, auto_wrap_policy=WRAPPINGS["block"](), use_orig_params=use_orig_params)
    ddp = DDP(plain)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ddp, model)]
    train(ddp, optimizers[0], rank, range(2))
    train(model, optimizers[1], rank, range(1))

    def fail(*_):
        raise ArithmeticError("on purpose")

    inner = model.blocks[1].module
    for register in (
        inner.mlp.register_forward_hook,
        inner.mlp[0].register_full_backward_hook,
        inner.norm1.register_full_backward_hook,
    ):
        hook = register(fail)
        with pytest.raises(ArithmeticError):
            _run(model, rank, step=5)
        hook.remove()
        model.zero_grad()
    train(model, optimizers[1], rank, range(1, 2))
    assert_same_values(model, ddp)


@dataclasses.dataclass
class _Pair:
    hidden: torch.Tensor
    note: str


_Named = namedtuple("_Named", ["hidden", "rest"])


class _Registered:
    """A container that only torch's registry knows how to take apart."""

    def __init__(self, hidden: torch.Tensor, note: str) -> None:
        self.hidden, self.note = hidden, note


def _registered(hidden: torch.Tensor, note: str) -> _Registered:
    if _Registered not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            _Registered,
            lambda it: ([it.hidden], it.note),
            lambda held, note: _Registered(next(iter(held)), note),
        )
    return _Registered(hidden, note)


class _Structured(nn.Module):
    """Takes and returns the hidden state in the containers that users have."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.form = form

    def forward(self, value, *, scale):
        for container in (list, tuple):
            if isinstance(value, container) and not isinstance(value, _Named):
                value = value[0]
        if isinstance(value, dict):
            value = value["hidden"]
        x = value if isinstance(value, torch.Tensor) else value.hidden
        y = self.linear(x) * scale["by"]
        return {
            "tensor": y,
            "tuple": (y, None),
            "list": [y, {"again": y}],
            "dict": {"hidden": y, "n": 3},
            "dataclass": _Pair(y, "text"),
            "registered": _registered(y, "text"),
            "namedtuple": _Named(y, [y]),
        }[self.form]


@pytest.mark.parametrize("form", ["tensor", "tuple", "list", "dict", "dataclass", "namedtuple", "registered"])
@each_form
@ranks(2)
def test_structured_inputs_and_outputs(rank, world_size, use_orig_params, form):
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.units = nn.ModuleList(_Structured(form) for _ in range(3))

        def forward(self, x):
            for unit in self.units:
                x = unit(x, scale={"by": 0.5})
            return x

    def hidden(value):
        while not isinstance(value, torch.Tensor):
            if isinstance(value, dict):
                value = value["hidden"]
            else:
                value = value.hidden if hasattr(value, "hidden") else value[0]
        return value

    plain, model = twins(
        Stack,
        torch.float64,
        auto_wrap_policy=ModuleWrapPolicy({_Structured}),
        use_orig_params=use_orig_params,
    )
    x = torch.ones(2, 8, dtype=torch.float64, requires_grad=True)
    hidden(plain(x)).square().sum().backward()
    with record_events() as events:
        hidden(model(x)).square().sum().backward()
    assert [e.unit for e in events if e.kind is EventKind.POST_BACKWARD and e.phase is Phase.BACKWARD] == [
        "units.2",
        "units.1",
        "units.0",
    ]
    assert_same_grads(model, plain, rtol=1e-12, atol=1e-12)


@each_form
@ranks(2)
def test_what_a_registered_container_holds_is_cast(rank, world_size, use_orig_params):
    casts = MixedPrecision(torch.bfloat16)
    model = FSDP(_Structured("registered"), mixed_precision=casts, use_orig_params=use_orig_params)
    found = model(_registered(torch.ones(2, 8), "text"), scale={"by": 0.5})
    assert (found.hidden.dtype, found.note) == (torch.bfloat16, "text")
    found.hidden.sum().backward()


class _Twice(nn.Module):
    """Uses one unit twice, and repeats what it computes in a loop of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.shared(self.first(x)).tanh()
        with torch.no_grad():
            extra = self.shared(x)
        x = x + extra
        return self.last(self.shared(x).tanh())


@pytest.mark.parametrize("needs_grad", [False, True])
@each_form
@ranks(2)
def test_module_used_several_times(rank, world_size, use_orig_params, needs_grad):
    plain, model = twins(
        _Twice, torch.float64, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=use_orig_params
    )
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=needs_grad)
    for module in (plain, model):
        x.grad = None
        module(x).square().sum().backward()
        (module(x).sum() + module(x * 2).square().sum()).backward()  # two forwards, one backward
    assert_same_grads(model, plain, rtol=1e-12, atol=1e-12)


@each_form
@ranks(2)
def test_two_forwards_then_two_backwards_and_retain_graph(rank, world_size, use_orig_params):
    plain, model = twins(
        Transformer, torch.float64, auto_wrap_policy=WRAPPINGS["block"](), use_orig_params=use_orig_params
    )
    ddp = DDP(plain)
    references = [loss_of(plain, tokens(rank, step)) for step in range(2)]
    losses = [loss_of(model, tokens(rank, step)) for step in range(2)]
    for first, second in (references, losses):
        second.backward(retain_graph=True)
        first.backward()
        second.backward()
    del ddp
    for param in plain.parameters():
        torch.distributed.all_reduce(param.grad)
        param.grad /= world_size
    assert_same_grads(model, plain, rtol=1e-12, atol=1e-12)


@each_form
@ranks(2)
def test_gradient_penalty(rank, world_size, use_orig_params):
    def make():
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    plain, model = twins(
        make, torch.float64, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=use_orig_params
    )
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        for module in (plain, model):
            out = module(x).sum()
            (slope,) = torch.autograd.grad(out, x, create_graph=True)
            (out + slope.square().sum()).backward()
    assert_same_grads(model, plain, rtol=1e-12, atol=1e-12)


@each_form
@ranks(2)
def test_frozen_parameters_of_a_unit(rank, world_size, use_orig_params):
    """Frozen and trainable in one unit: only what trains is reduced, and the numbers are DDP's."""

    def make():
        model = Transformer()
        for name, param in model.named_parameters():
            param.requires_grad_("norm" in name or "head" in name)
        return model

    plain, model = twins(make, auto_wrap_policy=WRAPPINGS["block"](), use_orig_params=use_orig_params)
    ddp = DDP(plain)
    _run(ddp, rank)
    with count_collectives() as traffic:
        _run(model, rank)
    trainable = sum(p.numel() * 4 for p in plain.parameters() if p.requires_grad)
    assert traffic["reduce_scatter_tensor"].bytes <= trainable + 4 * 64
    found = full_grads(model)
    for name, param in named_state(ddp):
        if param.requires_grad:
            assert torch.equal(found[name], param.grad), name


@ranks(2)
def test_unfreezing_and_freezing_between_steps(rank, world_size):
    plain, model = twins(Transformer, auto_wrap_policy=WRAPPINGS["block"](), use_orig_params=True)
    ours = {name.replace("_fsdp_wrapped_module.", ""): param for name, param in model.named_parameters()}
    for step, frozen in enumerate(["blocks.1", "mlp", "none", "embed"]):
        for named in (plain.named_parameters(), ours.items()):
            for name, param in named:
                param.requires_grad_(frozen not in name)
                param.grad = None
        ddp = DDP(plain)
        for module in (ddp, model):
            _run(module, rank, step)
        found = full_grads(model)
        for name, param in plain.named_parameters():
            expected = torch.zeros_like(param) if param.grad is None else param.grad
            assert torch.equal(found[name], expected), (frozen, name)


@each_form
@ranks(2)
def test_unused_parameters_and_heads(rank, world_size, use_orig_params):
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Linear(8, 8)
            self.left, self.right = nn.Linear(8, 2), nn.Linear(8, 2)
            self.spare = nn.Parameter(torch.ones(5))

        def forward(self, x):
            x = self.trunk(x).tanh()
            return self.left(x), self.right(x)

    for policy in (None, ModuleWrapPolicy({nn.Linear})):
        plain, model = twins(Heads, torch.float64, auto_wrap_policy=policy, use_orig_params=use_orig_params)
        x = torch.randn(3, 8, dtype=torch.float64)
        for module in (plain, model):
            left, right = module(x)
            left.sum().backward(retain_graph=True)
            right.square().sum().backward()
            module(x)[1].sum().backward()
        found = full_grads(model)
        for name, param in plain.named_parameters():
            expected = torch.zeros_like(param) if param.grad is None else param.grad
            torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=1e-12)


class _Telling(nn.Module):
    """Notes when its backward begins to compute."""

    def __init__(self, layers: int, told: list[str]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(layers)))
        self.told = told

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        x.register_hook(lambda _: self.told.append("begins"))
        return x * 1


@pytest.mark.parametrize(
    "layers, frozen, expected",
    [
        # What the running unit needs comes first where gradients still travel while its own come.
        (4, False, "unshard 2 begins begins unshard 1 begins unshard 0 begins"),
        (1, False, "unshard 2 begins unshard 1 begins unshard 0 begins begins"),
        (4, True, "unshard 2 begins begins unshard 1 unshard 0 begins begins"),
    ],
    ids=["many gradients", "one gradient", "one unit frozen"],
)
@ranks(2)
def test_prefetch_waits_for_memory_of_gradients(rank, world_size, layers, frozen, expected):
    told: list[str] = []
    net = nn.Sequential(*(_Telling(layers, told) for _ in range(4)))
    net[1].requires_grad_(not frozen)
    model = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({_Telling}))
    loss = model(torch.ones(2, 8, requires_grad=True)).square().sum()

    def note(event: Event) -> None:
        if event.kind is EventKind.UNSHARD and event.unit != "3":
            told.append(f"unshard {event.unit}")

    with observe_events(note):
        loss.backward()
    assert " ".join(told) == expected


class _InTwoThreads(nn.Module):
    """Part of it runs in a thread whose autograd nodes count as early ones: their backward runs last."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(lambda: self.far * 2).result()
        return x * self.near + late


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_a_leaf_whose_gradient_comes_after_those_of_the_inputs(rank, world_size, use_orig_params):
    plain, model = twins(
        lambda: nn.Sequential(nn.Linear(8, 8), _InTwoThreads()),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear, _InTwoThreads}),
        use_orig_params=use_orig_params,
    )
    plain(torch.ones(2, 8)).square().sum().backward()  # which this thread counts as well
    with record_events() as events:
        model(torch.ones(2, 8)).square().sum().backward()
    over = [(each.unit, each.phase) for each in events if each.kind is EventKind.POST_BACKWARD]
    assert over == [("0", Phase.BACKWARD), ("1", Phase.BACKWARD)]
    found = full_grads(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(found[name], param.grad)


class _Switch(nn.Module):
    """Uses one of two layers; a third is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, which):
        return self.layers[which](x)


@pytest.mark.parametrize("accumulate", [False, True])
@ranks(2)
def test_ranks_use_different_parameters(rank, world_size, accumulate):
    """What any rank used is updated everywhere; what none used is passed over by the optimizer."""
    plain, model = twins(_Switch, torch.float64, use_orig_params=True)
    x = torch.randn(3, 8, dtype=torch.float64)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.5) for m in (plain, model)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        if accumulate:
            with model.no_sync():
                model(x, rank).sum().backward()
            sum(plain(x, which).sum() / world_size for which in range(world_size)).backward()
        model(x, rank).square().sum().backward()
        sum(plain(x, which).square().sum() / world_size for which in range(world_size)).backward()
        for optimizer in optimizers:
            optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-12, atol=1e-12)
    assert all(param.grad is None for param in model.layers[2].parameters())


@each_form
@ranks(2)
def test_inplace_first_and_sparse_and_recurrent_layers(rank, world_size, use_orig_params):
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8, sparse=True)
            self.lstm = nn.LSTM(8, 8, batch_first=True, num_layers=2)
            self.act = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))
            self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))

        def forward(self, x):
            x = self.lstm(self.embed(x))[0] * 1.0
            return self.norm(self.act(x))

    for policy in (None, ModuleWrapPolicy({nn.Embedding, nn.LSTM, nn.Sequential})):
        plain, model = twins(Odd, torch.float64, auto_wrap_policy=policy, use_orig_params=use_orig_params)
        x = torch.tensor([[1, 2, 3], [3, 3, 10]])
        for module in (plain, model):
            module(x).square().sum().backward()
        found = full_grads(model)
        for name, param in plain.named_parameters():
            torch.testing.assert_close(found[name], param.grad.to_dense(), rtol=1e-12, atol=1e-12)


@ranks(2)
def test_clip_grad_norm_equals_plain(rank, world_size):
    for norm_type in (1.0, 2.0, 3.5, float("inf")):
        for form in (False, True):
            plain, model = twins(
                Transformer, torch.float64, auto_wrap_policy=WRAPPINGS["block"](), use_orig_params=form
            )
            ddp = DDP(plain)
            for module in (ddp, model):
                _run(module, rank)
            expected = nn.utils.clip_grad_norm_(ddp.parameters(), 0.1, norm_type)
            found = model.clip_grad_norm_(0.1, norm_type)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            assert_same_grads(model, ddp, rtol=1e-10, atol=1e-12)


@ranks(2)
def test_events_cost_nothing_when_nobody_listens(rank, world_size):
    from fsdp_wrap._core import events as _events

    _, model = twins(Transformer, auto_wrap_policy=WRAPPINGS["block"]())
    with record_events() as events:
        _run(model, rank)
    seen = len(events)
    assert seen > 0
    _run(model, rank)
    assert len(events) == seen
    assert _events.observers == []


@ranks(2)
def test_unit_names_follow_the_outermost_root(rank, world_size):
    inner = FSDP(nn.Linear(8, 8))
    inner(torch.ones(2, 8)).sum().backward()  # its own root for now
    outer = FSDP(nn.Sequential(inner, nn.Linear(8, 8)))
    with record_events() as events:
        outer(torch.ones(2, 8)).sum().backward()
    assert {event.unit for event in events} == {"", "0"}
    assert outer.check_is_root() and not inner.check_is_root()


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


@pytest.mark.parametrize("inner", ["reentrant", "early_stop", "no_early_stop"])
@pytest.mark.parametrize("outer", ["reentrant", "early_stop", "no_early_stop"])
@pytest.mark.parametrize("unit", ["around", "inside"])
@each_form
@ranks(2)
def test_nested_checkpoints(rank, world_size, use_orig_params, unit, outer, inner):
    def is_unit(module: nn.Module) -> bool:
        within = isinstance(module, _Checkpointed) and isinstance(module.inner, Block)
        return within if unit == "inside" else isinstance(module, Block)

    plain, model = twins(
        lambda: _Nested(outer, inner), auto_wrap_policy=CustomPolicy(is_unit), use_orig_params=use_orig_params
    )
    ddp = DDP(plain)
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(rank))
    ddp(x).square().sum().backward()
    with count_collectives() as traffic:
        model(x).square().sum().backward()
    assert {name: calls for name, (calls, _) in traffic.items()} == {
        "all_gather_into_tensor": 3 + 2,
        "reduce_scatter_tensor": 3,
    }
    assert_same_grads(model, ddp)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@each_form
@ranks(2)
def test_a_step_after_a_forward_without_backward(rank, world_size, use_orig_params, strategy):
    """What a forward kept for its backward is not used after the optimizer has stepped."""
    plain, model = twins(
        Transformer,
        auto_wrap_policy=WRAPPINGS["block"](),
        use_orig_params=use_orig_params,
        sharding_strategy=ShardingStrategy[strategy],
    )
    ddp = DDP(plain)
    losses = []
    for module in (ddp, model):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        _run(module, rank)
        loss_of(module, tokens(rank, 1))
        optimizer.step()
        losses.append(loss_of(module, tokens(rank, 2)).item())
    assert losses[0] == losses[1]


@each_form
@ranks(2)
def test_the_root_keeps_its_parameters_unless_asked_otherwise(rank, world_size, use_orig_params):
    plain, model = twins(Transformer, auto_wrap_policy=WRAPPINGS["block"](), use_orig_params=use_orig_params)
    ddp = DDP(plain)
    model.set_reshard_after_forward(True)
    model.blocks[1].set_reshard_after_forward(False)
    _run(ddp, rank)
    with record_events() as events:
        loss = loss_of(model, tokens(rank, 0))
    resharded = [name for _, name in _trace(events, EventKind.RESHARD)]
    assert resharded == ["blocks.0", "blocks.2", ""]
    with record_events() as events:
        loss.backward()
    gathered = [name for _, name in _trace(events, EventKind.UNSHARD)]
    assert gathered == ["", "blocks.2", "blocks.0"]
    assert_same_grads(model, ddp)
