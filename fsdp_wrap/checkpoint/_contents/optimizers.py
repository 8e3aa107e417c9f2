"""Which entries of a checkpoint are an optimizer's, decided by their structure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

import torch

Keys = tuple[str | int, ...]
"""The keys of dicts and the places in lists by which an entry of a nested state is reached."""
Kind = tuple[Sequence[int], torch.dtype] | None
"""Shape and dtype of a tensor, None for what is no tensor."""

_FLAT = re.compile(r"(state|param_groups)\.(.+)", re.DOTALL)
_PER_PARAM = re.compile(r"((?:.*?\.)?state)\.(.+)\.[^.]+", re.DOTALL)


def dotted(keys: Iterable[object]) -> str:
    """Returns keys as one name."""
    return ".".join(map(str, keys))


def nested(keys: Keys) -> Keys:
    """Returns the keys of an optimizer's entry; splits a name such as `state.weight.exp_avg`."""
    for at, key in enumerate(keys):
        if match := _FLAT.fullmatch(str(key)):
            return (*keys[:at], *match.groups(), *keys[at + 1 :])
    return keys


def of_optimizers(entries: Mapping[Keys, Kind]) -> set[Keys]:
    """Returns the entries that belong to optimizers.

    Beside `param_groups` lies `state`, both as dicts or both in flat names. Without `param_groups`, as in
    formats that hold tensors alone, each entry of `state` has the name and shape of another tensor.
    """
    groups = {keys[: keys.index("param_groups")] for keys in entries if "param_groups" in keys}
    flat: dict[Keys, set[str]] = {}
    for keys in entries:
        for at, key in enumerate(keys):
            if isinstance(key, str) and key.startswith("param_groups."):
                flat.setdefault(keys[:at], set()).add(key.removeprefix("param_groups.").rpartition(".")[0])
    owned = set()
    for keys in entries:
        for at, key in enumerate(keys):
            if keys[:at] in groups and key in ("state", "param_groups"):
                owned.add(keys)
            elif keys[:at] in flat and (match := _FLAT.fullmatch(str(key))):
                names = (match[2][: dot.start()] for dot in re.finditer(r"\.", match[2]))
                if match[1] == "param_groups" or any(name in flat[keys[:at]] for name in names):
                    owned.add(keys)
    return owned | _like_parameters({keys: kind for keys, kind in entries.items() if keys not in owned})


def _like_parameters(entries: Mapping[Keys, Kind]) -> set[Keys]:
    """Returns the entries of each `state` in which all have the name and the shape of another tensor."""
    states: dict[str, dict[Keys, str]] = {}
    for keys, kind in entries.items():
        if kind and (match := _PER_PARAM.fullmatch(dotted(keys))):
            states.setdefault(match[1], {})[keys] = match[2]
    if not states:
        return set()
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for keys, kind in entries.items():
        if kind is not None:
            parts = dotted(keys).split(".")
            for start in range(len(parts)):
                shapes.setdefault(dotted(parts[start:]), set()).add(tuple(kind[0]))

    def is_state(keys: Keys, param: str) -> bool:
        kind = entries[keys]
        shape = tuple(kind[0]) if kind else ()
        return param in shapes and (shape in shapes[param] or math.prod(shape) == 1)

    return {
        keys for state in states.values() if all(is_state(*item) for item in state.items()) for keys in state
    }
