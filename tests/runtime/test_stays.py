"""How long full parameters stay: the rows of the table in docs/architecture/runtime.md, one by one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from bed import ranks
from bed.paths import ROOT
from fsdp_wrap import Event, EventKind, Phase, ShardingStrategy, fully_shard, observe_events
from fsdp_wrap import FullyShardedDataParallel as FSDP

WIDTH = 8
FREED = {
    (Phase.FORWARD, False): "its forward",
    (Phase.FORWARD, True): "the outermost forward",
    (Phase.BACKWARD, True): "its backward",
    (Phase.FINAL_CALLBACK, True): "the final callback",
}
"""What frees a unit, by the phase of the event, and by whether the model's forward has gone on since."""


class _Block(nn.Module):
    """A layer that tells when it runs; `cuts` detaches its output."""

    def __init__(self, tell: Callable[[], None], cuts: bool) -> None:
        super().__init__()
        self.linear, self.tell, self.cuts = nn.Linear(WIDTH, WIDTH), tell, cuts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tell()
        output = self.linear(x)
        return output.detach() if self.cuts else output


class _Model(nn.Module):
    """Two blocks, and a parameter of the root; notes that a forward has begun, and gone on to the second."""

    def __init__(self, cuts: bool) -> None:
        super().__init__()
        self.begun = self.gone_on = False
        self.first: nn.Module
        self.second: nn.Module
        self.first, self.second = _Block(lambda: None, cuts), _Block(self._go_on, cuts=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def _go_on(self) -> None:
        self.gone_on = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.begun = True
        return self.second(self.first(x)) * self.scale


@dataclass(frozen=True)
class Row:
    """A case of the table, and what frees a unit in it, in their order."""

    case: str
    freed_by: tuple[str, ...]
    unit: str = "first"
    reshards: bool = True
    parts: bool = False
    cuts: bool = False
    grad: bool = True
    syncs: bool = True
    call: tuple[str, bool] | None = None
    outermost: str = ""
    forwards: int = 1
    create_graph: bool = False

    def sharded(self) -> nn.Module:
        """Returns the sharded model, or for `no_sync` the wrapped one."""
        model = _Model(self.cuts)
        if not self.syncs:
            strategy = ShardingStrategy.FULL_SHARD if self.reshards else ShardingStrategy.SHARD_GRAD_OP
            model.first, model.second = FSDP(model.first, sharding_strategy=strategy), FSDP(model.second)
            return FSDP(model, sharding_strategy=strategy)
        if self.parts:
            fully_shard([model.first, model.second], reshard_after_forward=self.reshards)
        else:
            fully_shard(model.first, reshard_after_forward=self.reshards)
            fully_shard(model.second)
        return fully_shard(model)


KEEPS = "`reshard_after_forward=False`"
AFTER, IN_BACKWARD, AT_END, NEXT = "its forward", "its backward", "the outermost forward", "the next forward"
ROWS = [
    Row("a unit below the root", (AFTER, IN_BACKWARD)),
    Row(KEEPS, (IN_BACKWARD,), reshards=False),
    Row("the root", (IN_BACKWARD,), unit=""),
    Row("the root in eval mode", (AT_END, IN_BACKWARD), unit="", call=("train", False)),
    Row("a unit of several modules", (AT_END, IN_BACKWARD), unit="first, second", parts=True),
    Row("one of several modules alone", ("the final callback",), unit="0, 1", parts=True, outermost="first"),
    Row("without gradients", (AFTER,), grad=False),
    Row(f"without gradients, and {KEEPS}", (AT_END,), grad=False, reshards=False),
    Row("no output needs a gradient, and parameters train", ("the final callback",), cuts=True),
    Row("`no_sync`", (AFTER, IN_BACKWARD), syncs=False),
    Row(f"`no_sync`, and {KEEPS}", (), syncs=False, reshards=False),
    Row("`set_reshard_after_backward(False)`", (AFTER,), call=("set_reshard_after_backward", False)),
    Row(f"another forward before the backward, and {KEEPS}", (NEXT, IN_BACKWARD), reshards=False, forwards=2),
    Row(
        "a backward with `create_graph`, then a forward", (AFTER, NEXT, AFTER), forwards=2, create_graph=True
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.case)
@ranks(2)
def test_a_unit_is_freed_as_the_table_says(rank: int, world_size: int, row: Row) -> None:
    model = row.sharded()
    if row.call is not None:
        method, value = row.call
        getattr(model, method)(value)
    inner = getattr(model, "module", model)
    freed: list[str] = []

    def observe(event: Event) -> None:
        if event.kind is EventKind.RESHARD and event.unit == row.unit:
            gone_on = inner.gone_on or event.phase is not Phase.FORWARD
            freed.append(FREED[event.phase, gone_on] if inner.begun or row.outermost else NEXT)

    with observe_events(observe), nullcontext() if row.syncs else model.no_sync():
        x, loss = torch.ones(2, WIDTH, requires_grad=row.create_graph), torch.zeros(())
        for _ in range(row.forwards):
            inner.begun = inner.gone_on = False
            with torch.set_grad_enabled(row.grad):
                loss = loss + model.get_submodule(row.outermost)(x).square().sum()
            if row.create_graph and x.requires_grad:
                torch.autograd.grad(loss, x, create_graph=True)
                x = x.detach()
        if row.grad and not row.create_graph:
            loss.backward()
    assert (*freed,) == row.freed_by


def test_the_table_has_these_rows() -> None:
    text = (ROOT / "docs/architecture/runtime.md").read_text()
    rows = [f"| {row.case} | {', then '.join(row.freed_by) or 'nothing'} |" for row in ROWS]
    assert "\n".join(rows) in text
