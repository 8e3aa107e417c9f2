"""What a unit does: the moves of its one state, in usual steps and in unusual ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bed import ranks
from fronts import FRONTS, shard
from fsdp_wrap._params import NoBuffers
from fsdp_wrap._runtime import Doing, Unit, UnitOptions, units_in
from fsdp_wrap.wrap import ModuleWrapPolicy

WIDTH = 4
STEP = "forward, rest, backward, backward over"


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


class Block(nn.Module):
    """A unit that may compute gradients in its forward, or raise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.within: Callable[[torch.Tensor], torch.Tensor] = as_it_is

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.within(self.linear(x).tanh())


class Model(nn.Module):
    """Two units, of which the second may be recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.recomputes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return checkpoint(self.second, x, use_reentrant=False) if self.recomputes else self.second(x)


def forces(x: torch.Tensor) -> torch.Tensor:
    """Returns gradients as an energy model does: a backward inside the forward."""
    (grad,) = torch.autograd.grad(x.square().sum(), x, retain_graph=True)
    return x + grad


def failing(x: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError("on purpose")


def first_block(model: nn.Module) -> Block:
    return next(module for module in model.modules() if isinstance(module, Block))


def failing_in_backward(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(failing)
    return x.clone()


def step(model: nn.Module) -> None:
    model(torch.ones(2, WIDTH)).sum().backward()


def two_forwards(model: nn.Module) -> None:
    (model(torch.ones(2, WIDTH)) + model(torch.zeros(2, WIDTH))).sum().backward()


def after_a_failure(model: nn.Module, within: Callable[[torch.Tensor], torch.Tensor]) -> None:
    block = first_block(model)
    block.within = within
    with pytest.raises(ArithmeticError):
        step(model)
    block.within = as_it_is
    step(model)


def after_a_failed_forward(model: nn.Module) -> None:
    after_a_failure(model, failing)


def after_a_failed_backward(model: nn.Module) -> None:
    after_a_failure(model, failing_in_backward)


def evaluated(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(2, WIDTH))


def recomputed(model: nn.Module) -> None:
    getattr(model, "module", model).recomputes = True
    step(model)


def with_forces(model: nn.Module) -> None:
    first_block(model).within = forces
    step(model)


PROGRAMS: dict[Callable[[nn.Module], None], str] = {
    step: STEP,
    two_forwards: "forward, rest, forward, rest, backward, backward over",
    evaluated: "forward, rest",
    recomputed: STEP,
    with_forces: STEP,
    after_a_failed_forward: f"forward, rest, {STEP}",
    after_a_failed_backward: f"{STEP}, {STEP}",
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("front", FRONTS)
@ranks(2)
def test_a_unit_moves_as_its_table_allows(rank, world_size, front, program):
    turns: list[str] = []
    turn = Unit._turn

    def noted(unit: Unit, doing: Doing) -> None:
        turn(unit, doing)
        if unit.fqn == "first":
            turns.append(doing.value)

    model = shard(front, Model(), ModuleWrapPolicy({Block}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unit, "_turn", noted)
        program(model)
    assert ", ".join(turns) == PROGRAMS[program]
    units = [unit for unit in units_in(model).values() if unit.params]
    assert {unit.doing for unit in units} == {Doing.REST if program is evaluated else Doing.OVER}
    assert not any(unit.running for unit in units)


def test_a_forward_is_over_with_its_last_call():
    unit = Unit(nn.Linear(1, 1), NoBuffers(), UnitOptions())
    unit.begin_call(recompute=False)
    unit.begin_call(recompute=False)  # the module calls itself
    unit.end_call()
    assert unit.doing is Doing.FORWARD
    unit.end_call()
    assert unit.doing is Doing.REST


def test_other_moves_raise():
    unit = Unit(nn.Linear(1, 1), NoBuffers(), UnitOptions())
    unit.end_backward()  # none runs
    assert unit.doing is Doing.REST
    with pytest.raises(AssertionError):
        unit._turn(Doing.OVER)
