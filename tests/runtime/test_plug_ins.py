"""What plug-ins are told, and when: of a step, of all steps, and of one unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bed import ranks
from fronts import FRONTS, shard
from fsdp_wrap import set_travel_together_bytes
from fsdp_wrap._core import Phase, PlugIn, everywhere
from fsdp_wrap._runtime import units_in
from fsdp_wrap.wrap import ModuleWrapPolicy

WIDTH, BLOCKS = 8, 3


class Told(PlugIn):
    """Notes what it is told of collectives: the moment, and the units."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, tuple[str, ...]]] = []

    def names_at(self, moment: str) -> list[tuple[str, ...]]:
        return [names for noted, names in self.notes if noted == moment]

    def needs(self, unit: Any, phase: Phase) -> None:
        self.notes.append(("needs", (unit.fqn,)))

    def to_gather(self, units: tuple[Any, ...], phase: Phase) -> None:
        self.notes.append(("to_gather", tuple(unit.fqn for unit in units)))

    def gathers(self, unit: Any, phase: Phase, nbytes: int, together: tuple[str, ...]) -> None:
        self.notes.append(("gathers", (unit.fqn,)))

    def full(self, unit: Any) -> None:
        self.notes.append(("full", (unit.fqn,)))

    def to_reduce(self, units: tuple[Any, ...], phase: Phase, in_copy: bool) -> None:
        assert not in_copy
        self.notes.append(("to_reduce", tuple(unit.fqn for unit in units)))

    def reduces(self, unit: Any, phase: Phase, nbytes: int, together: tuple[str, ...]) -> None:
        self.notes.append(("reduces", (unit.fqn,)))

    def reduced(self, unit: Any) -> None:
        self.notes.append(("reduced", (unit.fqn,)))


def trained(front: str, together: int) -> Any:
    """Returns a model that has trained for two steps: batches are planned from what has happened."""
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    model = shard(front, model, ModuleWrapPolicy({nn.Linear}))
    set_travel_together_bytes(model, together)
    for _ in range(2):
        step(model)
    return model


def step(model: nn.Module) -> None:
    model(torch.ones(2, WIDTH)).sum().backward()
    model.zero_grad()


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("together", [0, 1 << 20])
def test_moments_of_collectives_come_before_the_issue_and_after_the_wait(rank, world_size, front, together):
    model, told = trained(front, together), Told()
    units = [unit.fqn for unit in units_in(model).values() if unit.params]
    with everywhere.having(told):
        step(model)
    announced, gathered, needed = set[str](), set[str](), set[str]()
    for moment, names in told.notes:
        if moment == "needs":
            needed.update(names)
        elif moment == "to_gather":
            assert gathered.isdisjoint(names)
            announced.update(names)
        elif moment == "gathers":
            assert announced.issuperset(names)
            announced.difference_update(names)
            gathered.update(names)
        elif moment == "full":
            assert gathered.issuperset(names) and needed.issuperset(names)
            gathered.difference_update(names)
    assert not announced and not gathered
    announced_together = told.names_at("to_reduce")
    alone = [(name,) for names in announced_together for name in names]
    assert alone == told.names_at("reduces") == told.names_at("reduced") and len(alone) == len(units)
    longest = max(map(len, told.names_at("to_gather"))), max(map(len, announced_together))
    assert longest == ((len(units), len(units)) if together else (1, 1))
    order = [moment for moment, _ in told.notes if moment in ("to_reduce", "reduces", "reduced")]
    assert order[:2] == ["to_reduce", "reduces"] and order[-1] == "reduced"


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_what_is_attached_to_a_unit_is_told_of_that_unit_alone(rank, world_size, front):
    model, told, other = trained(front, 0), Told(), Told()
    unit = units_in(model)["1"]
    unit.plug_ins.attach(told)
    model = shard(front, nn.Sequential(model, nn.Linear(WIDTH, WIDTH)))  # it runs in another step now
    assert unit.fqn == "0.1"
    with everywhere.having(other):
        step(model)
    assert {names for _, names in told.notes} == {("0.1",)}
    assert told.notes == [note for note in other.notes if note[1] == ("0.1",)]
    unit.plug_ins.detach(told)
    told.notes.clear()
    step(model)
    assert not told.notes
