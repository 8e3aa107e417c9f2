"""When a unit's backward is over: the rows of the table in docs/architecture/runtime.md, one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from bed import ranks
from bed.paths import ROOT
from fsdp_wrap import (
    Event,
    EventKind,
    Phase,
    allow_skipping,
    fully_shard,
    observe_events,
    set_gradients_in_place,
    set_travel_together_bytes,
)

WIDTH = 4
BACKWARD, CALLBACK, NOT = "its backward", "the final callback", "not reduced"
ENDED = {Phase.BACKWARD: BACKWARD, Phase.FINAL_CALLBACK: CALLBACK}


class _Model(nn.Module):
    """A unit between two layers; `fed` says whether the first layer feeds it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.unit, self.after = nn.Linear(WIDTH, WIDTH), _Unit(), nn.Linear(WIDTH, WIDTH)
        self.calls, self.fed = 1, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inputs = self.before(x) if self.fed else x
        return self.after(torch.stack([self.unit(inputs) for _ in range(self.calls)]).sum(0))


class _Unit(nn.Module):
    """Two layers, of which one may be left out, and an expert, which may be a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.other, self.expert = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.leaves_out = self.skips_expert = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.used(x).tanh()
        output = output if self.skips_expert else self.expert(output)
        return output if self.leaves_out else self.other(output)


def _train(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()


def _penalize(model: nn.Module, x: torch.Tensor) -> None:
    (grad,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
    grad.pow(2).sum().backward()


@dataclass(frozen=True)
class Row:
    """A case of the table: where the gradients of a unit are reduced, and its parameters freed."""

    case: str
    reduced: str = BACKWARD
    freed: str = BACKWARD
    fed: bool = True
    calls: int = 1
    frozen: tuple[str, ...] = ()
    leaves_out: bool = False
    skips: bool = False
    in_place: bool = False
    run: Callable[[nn.Module, torch.Tensor], None] = _train

    def sharded(self) -> nn.Module:
        """Returns the sharded model."""
        model = _Model()
        model.fed, model.calls, model.unit.leaves_out = self.fed, self.calls, self.leaves_out
        for name in self.frozen:
            model.unit.get_submodule(name).requires_grad_(False)
        units = [model.before, *([model.unit.expert] if self.skips else []), model.unit, model.after, model]
        for unit in units:
            fully_shard(unit)
        set_travel_together_bytes(model, 0)
        if self.skips:
            allow_skipping(model.unit.expert)
        set_gradients_in_place(model, self.in_place)
        return model


ALONE = "no input needs a gradient"
ROWS = [
    Row("an input needs a gradient"),
    Row(ALONE, fed=False),
    Row("some parameters are frozen", frozen=("used",)),
    Row(f"some parameters are frozen, and {ALONE}", freed=CALLBACK, frozen=("used",), fed=False),
    Row("all parameters are frozen", reduced=NOT, frozen=("",)),
    Row("a parameter is not used", leaves_out=True),
    Row(f"a parameter is not used, and {ALONE}", CALLBACK, CALLBACK, leaves_out=True, fed=False),
    Row("two forwards come before the backward", calls=2),
    Row("other ranks may skip it", skips=True),
    Row(f"other ranks may skip it, and {ALONE}", CALLBACK, CALLBACK, skips=True, fed=False),
    Row("other ranks may skip it, and two forwards come before", CALLBACK, CALLBACK, skips=True, calls=2),
    Row("gradients take the place of parameters", in_place=True),
    Row("a double backward", freed=CALLBACK, run=_penalize),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.case)
@ranks(2)
def test_a_backward_is_over_as_the_table_says(rank: int, world_size: int, row: Row) -> None:
    model = row.sharded()
    model.unit.skips_expert = row.skips and rank == 1
    copied = copy.deepcopy(model)
    for either in (model, copied):
        _assert_ends(either, row)


def _assert_ends(model: nn.Module, row: Row) -> None:
    name = "unit.expert" if row.skips else "unit"
    seen: dict[EventKind, str] = {EventKind.REDUCE: NOT}

    def observe(event: Event) -> None:
        if event.unit == name:
            seen[event.kind] = ENDED.get(event.phase, "")

    with observe_events(observe):
        row.run(model, torch.ones(2, WIDTH, requires_grad=row.run is _penalize))
    assert (seen[EventKind.REDUCE], seen[EventKind.RESHARD]) == (row.reduced, row.freed)


def test_the_table_has_these_rows() -> None:
    text = (ROOT / "docs/architecture/runtime.md").read_text()
    rows = [f"| {row.case} | {row.reduced} | {row.freed} |" for row in ROWS]
    assert "\n".join(rows) in text
