"""Units whose outputs are views, which the caller edits in place: as in a plain model, in each form of it."""

import copy
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bed import ranks
from beside import check_each, train_beside
from fronts import FULL, KEPT, assert_same_grads, each_front, either_front, shard
from fsdp_wrap import EventKind, ShardingStrategy, record_events
from fsdp_wrap.wrap import ModuleWrapPolicy

WIDTH = 6
Form = tuple[Callable[[Any, torch.Tensor], Any], Callable[[Any, torch.Tensor], torch.Tensor]]


class _Scaled(torch.autograd.Function):
    """Returns a view of its input, whose gradient needs a parameter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.clone(), scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, scale = ctx.saved_tensors
        return grad * scale, (grad * x).sum((0, 1))


def _with(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns `x`, into whose first column the unit has written."""
    x[:, 0] = value
    return x


def _filled(unit: nn.Module, x: torch.Tensor) -> torch.Tensor:
    memory = x.new_zeros(x.shape)
    memory[:, :] = unit.lin(x)
    return memory


def _in_parts(unit: nn.Module, x: torch.Tensor) -> Any:
    hidden = unit.lin(x)
    return {"first": hidden[:, :2], "rest": [hidden[:, 2:], hidden.sum()]}


def _edit_parts(out: Any, edit: torch.Tensor) -> torch.Tensor:
    out["rest"][0].mul_(2)
    out["first"].add_(edit)
    return torch.cat([out["first"], out["rest"][0]], 1) * out["rest"][1]


def _beside_base(unit: nn.Module, x: torch.Tensor) -> Any:
    hidden = unit.lin(x)
    return hidden, hidden.view(-1), hidden.chunk(2, -1)[0]


def _edit_base(out: Any, edit: torch.Tensor) -> torch.Tensor:
    used = out[2].sum()
    out[0].mul_(edit)
    return out[0] + out[1].sum() * used


def _beside_input(unit: nn.Module, x: torch.Tensor) -> Any:
    return unit.lin(x * 1), x[:, 1:]


def _edit_input(out: Any, edit: torch.Tensor) -> torch.Tensor:
    out[1].mul_(2).add_(edit)
    return out[0] + out[1].sum((0, 1))


def _edit_used(out: torch.Tensor, edit: torch.Tensor) -> torch.Tensor:
    used = out * 2
    out += edit
    return used + out


def _edit_without_graph(out: torch.Tensor, edit: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out.clamp_(-0.5, 0.5)
    return out * edit


def _edit(out: torch.Tensor, edit: torch.Tensor) -> torch.Tensor:
    return out.mul_(3).add_(edit)


FORMS: dict[str, Form] = {
    "of a matrix product": (lambda unit, x: unit.lin(x), _edit),
    "transposed": (lambda unit, x: unit.lin(x).transpose(0, 1), _edit),
    "reshaped": (lambda unit, x: unit.lin(x).view(-1, WIDTH), lambda out, _: out.relu_()),
    "slice": (lambda unit, x: unit.lin(x)[:, 1:], _edit_used),
    "structure": (_in_parts, _edit_parts),
    "chunks": (lambda unit, x: unit.lin(x).chunk(2, -1), lambda out, edit: torch.cat([*out], -1) * edit),
    "beside what it is of": (_beside_base, _edit_base),
    "of an input": (_beside_input, _edit_input),
    "of an input that the unit edits": (lambda unit, x: _with(x, unit.lin(x.clone())[:, 1])[:, :3], _edit),
    "input that the unit edits": (
        lambda unit, x: x.mul_(unit.scale),
        lambda out, edit: out[:, 1:].add_(edit),
    ),
    "of own memory": (lambda unit, x: _filled(unit, x)[:, 1:], _edit),
    "made by a function": (
        lambda unit, x: _Scaled.apply(unit.lin(x), unit.scale),
        lambda out, edit: out * edit,
    ),
    "edited without a graph": (lambda unit, x: unit.lin(x).view(-1, WIDTH), _edit_without_graph),
}
"""What a unit computes, and what its caller does with that."""

RECOMPUTED = ["transposed", "slice", "structure", "of own memory"]
"""Forms of which a plain model under checkpoints can recompute the unit."""


class _Unit(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.lin, self.scale, self.compute = (
            nn.Linear(WIDTH, WIDTH),
            nn.Parameter(torch.ones(WIDTH)),
            FORMS[form][0],
        )

    def forward(self, x: torch.Tensor) -> Any:
        return self.compute(self, x)


class _Around(nn.Module):
    """A unit that returns what the unit in it does; a single tensor as a view."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.extra, self.inner = nn.Linear(WIDTH, WIDTH), _Unit(form)

    def forward(self, x: torch.Tensor) -> Any:
        out = self.inner(self.extra(x) * 1)
        return out.view_as(out) if isinstance(out, torch.Tensor) else out


class _Net(nn.Module):
    def __init__(self, form: str, nested: bool = False, kind: str = "none") -> None:
        super().__init__()
        self.embed, self.pos, self.kind = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(1)), kind
        self.unit, self.edit = (_Around if nested else _Unit)(form), FORMS[form][1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x) * 1
        if self.kind == "unit":
            return self.edit(checkpoint(self.unit, hidden, use_reentrant=False), self.pos)
        if self.kind == "none":
            return self._part(hidden)
        return checkpoint(self._part, hidden, use_reentrant=self.kind == "reentrant")

    def _part(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.edit(self.unit(hidden), self.pos)


def _batches(number: int) -> list[torch.Tensor]:
    torch.manual_seed(number)
    return [*torch.randn(2, 4, 5, WIDTH, dtype=torch.float64)]


def _usual(loss: torch.Tensor, x: torch.Tensor) -> None:
    loss.backward()


def _in_another_thread(loss: torch.Tensor, x: torch.Tensor) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loss.backward).result()


def _twice(loss: torch.Tensor, x: torch.Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def _through_a_gradient(loss: torch.Tensor, x: torch.Tensor) -> None:
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    grad.square().sum().backward()


def _train(rank: int, front: str, net: nn.Module, backward: Any = _usual, **options: Any) -> None:
    """Trains beside a plain model: losses and gradients, also of inputs, are the same."""

    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        x = batch.clone().requires_grad_()
        loss = model(x).square().mean()
        backward(loss, x)
        return torch.cat([loss.detach().view(1), x.grad.flatten()])

    plain = net.double()
    policy = ModuleWrapPolicy({_Unit, _Around})
    train_beside(shard(front, copy.deepcopy(plain), policy, **options), plain, loss_of, _batches, rank)


@each_front
@ranks(2)
def test_a_caller_edits_views_in_place(rank, world_size, front):
    def check(scenario: tuple[str, bool]) -> None:
        torch.manual_seed(0)
        _train(rank, front, _Net(*scenario), sharding_strategy=FULL)

    check_each(check, [(form, nested) for form in FORMS for nested in (False, True)])


@pytest.mark.parametrize("kind", ["unit", "part", "reentrant"])
@either_front
@ranks(2)
def test_a_caller_edits_views_of_recomputed_units(rank, world_size, front, kind):
    for backward in (_usual, _in_another_thread):  # a thread numbers its nodes by itself
        check_each(lambda form: _train(rank, front, _Net(form, kind=kind), backward), RECOMPUTED)  # noqa: B023


@pytest.mark.parametrize(
    "strategy", [FULL, KEPT, ShardingStrategy.NO_SHARD], ids=lambda strategy: strategy.name
)
@ranks(2)
def test_backwards_through_views_that_were_edited(rank, world_size, strategy):
    for backward in (_twice, _through_a_gradient):
        _train(rank, "orig", _Net("slice", nested=True), backward, sharding_strategy=strategy)


class _Returns(nn.Module):
    """Returns a view of memory that is older than its forward, beside an output of its own."""

    def __init__(self, captured: bool) -> None:
        super().__init__()
        self.lin, self.captured = nn.Linear(WIDTH, WIDTH), captured

    def forward(self, x: torch.Tensor, older: weakref.ref[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.lin(x * 1), older()[1:] if self.captured else x[1:]


class _Older(nn.Module):
    def __init__(self, captured: bool, checkpointed: bool) -> None:
        super().__init__()
        self.embed, self.unit, self.checkpointed = nn.Linear(WIDTH, WIDTH), _Returns(captured), checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x) * 1
        inputs = hidden, weakref.ref(hidden)
        if self.checkpointed:
            own, view = checkpoint(self.unit, *inputs, use_reentrant=False, early_stop=False)
        else:
            own, view = self.unit(*inputs)
        return own.sum() + view.sum()


@pytest.mark.parametrize("checkpointed", [False, True], ids=["once", "recomputed"])
@either_front
@ranks(2)
def test_memory_from_before_a_forward_is_not_hooked(rank, world_size, front, checkpointed):
    """A hook there would gather the unit once more, and hold nodes that lead to it: the model would stay."""

    def check(captured: bool) -> None:
        policy = ModuleWrapPolicy({_Returns})
        model = shard(front, _Older(captured, checkpointed), policy, sharding_strategy=FULL)
        loss = model(torch.ones(4, WIDTH))
        with record_events() as events:
            _in_another_thread(loss, loss)
        assert [(event.kind, event.unit) for event in events].count((EventKind.UNSHARD, "unit")) == 1
        alive = weakref.ref(model)
        del model, loss
        gc.collect()
        assert alive() is None

    check_each(check, [False, True])


class _Edited(nn.Module):
    """Edits in place what autograd has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.lins = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for lin in self.lins:
            x = lin(x).exp()
            x.mul_(0.5)
        return x


@ranks(2)
@each_front
def test_saved_tensors_may_be_edited_where_parameters_stay(rank, world_size, front):
    plain = _Edited()
    freed, kept = (
        shard(front, copy.deepcopy(plain), ModuleWrapPolicy({nn.Linear}), sharding_strategy=strategy)
        for strategy in (FULL, KEPT)
    )
    x = torch.ones(3, WIDTH)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        for _ in range(2):  # the second gather writes to what the first backward has read
            for model in (plain, kept):
                model(x).sum().backward()
        with pytest.raises(ValueError, match=r"unit 'lins\.0' frees its parameters .*reshard_after_forward"):
            freed(x)
        with torch.no_grad():
            torch.testing.assert_close(freed(x), plain(x))
        root = shard(front, nn.Linear(WIDTH, WIDTH)).eval()
        with pytest.raises(ValueError, match="the root unit .* frees its parameters"):
            root(x)
    assert_same_grads(kept, plain)
