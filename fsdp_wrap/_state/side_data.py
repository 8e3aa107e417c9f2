"""Side data of frozen parameters in state dicts: modules save it beside the codes, and do not load it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from fsdp_wrap._params import SideData


def _beside(key: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries whose names begin with that of a parameter and a dot, without that."""
    return {name[len(key) + 1 :]: value for name, value in given.items() if name.startswith(f"{key}.")}


def misfits(key: str, side: SideData, given: Mapping[str, Any]) -> Iterator[str]:
    """Yields a message if codes of this name in a state dict would mean other values here."""
    beside = _beside(key, given)
    why = side.misfit(beside) if beside else None
    if why is not None:
        yield (
            f"kind mismatch for {key}: {why}. Codes of one kind cannot be loaded as those of another: "
            "quantise the model as the checkpoint was"
        )


@torch.no_grad()
def load_side_data(
    sides: Iterable[tuple[str, SideData]],
    state_dict: MutableMapping[str, Any],
    strict: bool,
    missing: list[str],
    errors: list[str],
) -> None:
    """Loads the side data of parameters, by their names in a state dict, and takes it out there.

    Codes that would mean other values are taken out as well, with a message.
    """
    for key, side in sides:
        beside = _beside(key, state_dict)
        problems = [*misfits(key, side, state_dict)]
        for name in beside:
            del state_dict[f"{key}.{name}"]
        if problems:
            errors += problems
            state_dict.pop(key, None)
            continue
        lacking = [f"{key}.{name}" for name in side.saved() if name not in beside]
        if not lacking:
            side.load(beside)
        elif strict and key in state_dict:
            missing += lacking
