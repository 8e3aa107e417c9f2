"""The models that tools are given, and how to call their units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from fsdp_wrap._runtime import Unit, units_in

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
"""One, or several, by name or number."""


def modules_of(models: Models) -> dict[str, nn.Module]:
    """Returns some models by their names; that of a single one is empty."""
    if isinstance(models, nn.Module):
        return {"": models}
    return dict(models) if isinstance(models, Mapping) else {str(n): each for n, each in enumerate(models)}


def named_units(models: Models, asking: str) -> dict[Unit, str]:
    """Returns the units of some models, and how to call them: by their qualified names.

    Args:
        models: Wrapped or sharded, or with such modules inside.
        asking: The function that was given them, for messages.

    Raises:
        ValueError: If there is no unit.
    """
    names: dict[Unit, str] = {}
    modules = modules_of(models)
    for prefix, model in modules.items():
        for fqn, unit in units_in(model).items():
            whole = ".".join(filter(None, (prefix, fqn)))
            names[unit] = f"{names[unit]}, {whole}" if unit in names else whole
    if not names:
        kinds = ", ".join(type(model).__name__ for model in modules.values())
        raise ValueError(
            f"nothing in {kinds or 'no model'} is wrapped or sharded: pass {asking}() the model that "
            "FullyShardedDataParallel or fully_shard returned, or one around it"
        )
    return names
