"""The models that tools take, and the names of their units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from fsdp_wrap._runtime import Unit, units_in

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
"""One model, or several by name or number."""


def modules_of(models: Models) -> dict[str, nn.Module]:
    """Returns models by name; the name of a single one is empty."""
    if isinstance(models, nn.Module):
        return {"": models}
    return dict(models) if isinstance(models, Mapping) else {str(n): model for n, model in enumerate(models)}


def named_units(models: Models, asking: str) -> dict[Unit, str]:
    """Returns the units of the models with their qualified names; `asking` is the caller, for messages.

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
