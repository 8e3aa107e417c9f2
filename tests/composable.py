"""Helpers for tests of `fully_shard`."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fronts import full
from fsdp_wrap import Event, fully_shard


def shard_blocks(model: nn.Module, way: Any = fully_shard, **kwargs: Any) -> Any:
    for block in model.blocks:
        way(block, **kwargs)
    return way(model, **kwargs)


def assert_same(model: nn.Module, reference: nn.Module, exact: bool = True, atol: float = 1e-10) -> None:
    """Asserts that parameters and gradients, gathered by DTensor, equal those of another model, or of DDP."""
    wanted_of = {name.removeprefix("module."): param for name, param in reference.named_parameters()}
    for name, param in model.named_parameters():
        expected = wanted_of.pop(name.replace("_checkpoint_wrapped_module.", ""))
        pairs = [(full(param.detach()), full(expected.detach()))]
        assert (param.grad is None) == (expected.grad is None), name
        if param.grad is not None:
            pairs.append((full(param.grad), full(expected.grad)))
        for tensor, wanted in pairs:
            if exact:
                assert torch.equal(tensor, wanted), name
            else:
                torch.testing.assert_close(tensor, wanted, rtol=0, atol=atol, msg=name)
    assert not wanted_of


def trace(events: Iterable[Event]) -> list[str]:
    """Shortens events: u(nshard), r(eshard) or p(ost-backward), and the last part of the unit's name."""
    known = [event for event in events if event.kind.value != "reduce"]
    return [f"{event.kind.value[0]} {event.unit.rpartition('.')[2] or 'root'}" for event in known]
