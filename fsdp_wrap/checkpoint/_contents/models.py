"""Which tensors of a checkpoint are a model's.

Structure decides, never a name such as `model`. A model is a dict that has tensors of its own and is no
optimizer's state. One of the tensors at least has dimensions and floating-point numbers, as counters and
random states have not. Where there are several, the user names one.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_wrap._core import format_dtype, listed
from fsdp_wrap.checkpoint._contents.optimizers import Keys, Kind, dotted, nested, of_optimizers
from fsdp_wrap.checkpoint._hub import Described

_listed = partial(listed, most=40)


@dataclass(frozen=True)
class Contents:
    """All that a checkpoint holds, by its keys: shape and dtype of tensors, None for what is no tensor."""

    kind: str
    place: Path
    entries: Mapping[Keys, Kind]
    read: Callable[[Keys], Any]
    state: Any = None
    """The whole nested state, where it is in memory or mapped."""


@dataclass(frozen=True)
class Source:
    """A model as a checkpoint holds it.

    Attributes:
        where: Where its names begin; `.` is the top level.
        names: The names of its tensors, and of its modules' extra states, by their keys in the checkpoint.
        option: What tells a user's command to take this model.
    """

    held: Contents
    where: str
    names: Mapping[Keys, str]
    option: str = ""

    @property
    def described(self) -> Described:
        """Shape and dtype of the tensors by their names."""
        return {name: kind for keys, name in self.names.items() if (kind := self.held.entries[keys])}

    @property
    def others(self) -> dict[Keys, str]:
        """Entries beside the model's tensors that are no tensors, by keys: extra states and numbers."""
        within = {keys[:-1] for keys in self.names}
        beside = (keys for keys, kind in self.held.entries.items() if kind is None and keys[:-1] in within)
        owned = of_optimizers(self.held.entries)
        return {keys: str(keys[-1]) for keys in beside if keys not in owned}

    def bare(self) -> Source:
        """Returns the model without extra states of modules."""
        return replace(
            self, names={keys: name for keys, name in self.names.items() if self.held.entries[keys]}
        )

    def left_out(self, *carried: str) -> list[str]:
        """Describes entries that are neither in the model nor below the top-level keys `carried`."""
        owned = of_optimizers(self.held.entries)
        above = {keys[:depth] for keys in self.names for depth in range(len(keys))}
        parts: dict[Keys, list[Keys]] = {}
        for keys in self.held.entries:
            if keys not in self.names and keys[0] not in carried:
                shown = nested(keys) if keys in owned else keys
                depth = next((at for at in range(1, len(shown)) if shown[:at] not in above), len(shown))
                parts.setdefault(shown[:depth], []).append(keys)
        return [_told(dotted(part), members, self.held, owned) for part, members in parts.items()]


def _told(part: str, members: Sequence[Keys], held: Contents, owned: Collection[Keys]) -> str:
    """Describes a part of a checkpoint in a few words."""
    kinds = [kind for keys in members if (kind := held.entries[keys])]
    tensors = f", {counted(len(kinds), 'tensor')}" if kinds else ""
    if members[0] in owned:
        return f"{part} (an optimizer's{tensors})"
    if len(members) == len(kinds) == 1:
        return f"{part} ({format_dtype(kinds[0][1])} {list(kinds[0][0])})"
    return f"{part} ({tensors.removeprefix(', ')})" if kinds else part


def counted(number: int, of: str) -> str:
    """Returns a number of things in words."""
    return f"{number} {of}{'' if number == 1 else 's'}"


def model_in(held: Contents, wanted: str | None = None) -> Source:
    """Returns the model of a checkpoint, or the one in the part that is wanted.

    Raises:
        ValueError: If there is none, or are several: with all that are there.
    """
    sources = models_in(held, wanted)
    if len(sources) == 1:
        return sources[0]
    models = _listed(f"{source.option} ({counted(len(source.described), 'tensor')})" for source in sources)
    raise ValueError(
        f"{held.place} holds {len(sources)} models: {models}. Name one of them, or all below a name as one: "
        "--model 'NAME.*'"
    )


def models_in(held: Contents, wanted: str | None = None) -> list[Source]:
    """Returns the models in a checkpoint, or in the part of it that is wanted, one at least."""
    base = "" if wanted in (None, ".", "*") else str(wanted).removesuffix(".*")
    below = {keys: rest for keys in held.entries if (rest := _below(keys, base))}
    if not below:
        tops = _listed(dict.fromkeys(str(keys[0]) for keys in held.entries))
        raise ValueError(f"nothing in {held.place} is called {base!r}; it holds {tops or 'nothing'}")
    if wanted is not None and wanted.endswith("*"):  # all
        return [Source(held, wanted, _as_one(held, below))]
    owned = of_optimizers(held.entries)
    parts: dict[Keys, dict[Keys, str]] = {}
    for keys, rest in below.items():
        *above, last = rest
        fits = held.entries[keys] or _is_extra_state(last)
        if isinstance(last, str) and fits and keys not in owned and not any(map(_is_extra_state, above)):
            parts.setdefault(rest[:-1], {})[keys] = last
    parts = {at: names for at, names in parts.items() if any(held.entries[keys] for keys in names)}
    models = {
        at: names for at, names in parts.items() if any(_is_weight(held.entries[keys]) for keys in names)
    }
    if wanted is not None:  # someone who names it knows what it is
        models = models or parts
        models = {(): models[()]} if () in models else models
    if not models:
        raise ValueError(_none(held, base, [_name(base, at) for at in parts]))
    options = {at: f"--model {shlex.quote(_name(base, _shortest(at, models)))}" for at in models}
    return [Source(held, _name(base, at), names, options[at]) for at, names in models.items()]


def _name(base: str, at: Keys) -> str:
    """Returns what a user calls a part of a checkpoint."""
    return dotted([*filter(None, [base]), *at]) or "."


def _none(held: Contents, base: str, parts: Sequence[str]) -> str:
    """Returns the message where there is no model: what is there, and how its tensors are taken even so."""
    there = _listed(told for told in Source(held, "", {}).left_out() if told.startswith(base))
    cure = (
        f": name {_listed(f'--model {shlex.quote(part)}' for part in parts)} to take its tensors"
        if parts
        else ""
    )
    within = f" in {base!r}" if base else ""
    return f"{held.place} holds no model{within}, only {there or 'nothing'}{cure}"


def _shortest(at: Keys, models: Collection[Keys]) -> Keys:
    """Returns the fewest keys that lead to one model and to no other."""
    others = [other for other in models if other != at]
    return next(
        (at[:depth] for depth in range(1, len(at)) if all(other[:depth] != at[:depth] for other in others)),
        at,
    )


def _as_one(held: Contents, below: Mapping[Keys, Keys]) -> dict[Keys, str]:
    """Returns all tensors below a place as one model, whose names are all their keys joined."""
    names = {keys: dotted(rest) for keys, rest in below.items() if held.entries[keys]}
    if twice := [name for name, count in Counter(names.values()).items() if count > 1]:
        raise ValueError(
            f"{held.place} has two tensors that would be called {listed(twice)}: name a smaller part"
        )
    return names


def _below(keys: Keys, base: str) -> Keys | None:
    """Returns the keys below a place: ("model", "net.weight") is ("weight",) below "model.net"."""
    for at, key in enumerate(map(str, keys)):
        if not base:
            return keys[at:]
        if key.startswith(f"{base}."):
            return (key.removeprefix(f"{base}."), *keys[at + 1 :])
        if key != base and not base.startswith(f"{key}."):
            return None
        base = base[len(key) + 1 :]
    return None


def _is_extra_state(key: str | int) -> bool:
    return str(key).endswith("_extra_state")


def _is_weight(kind: Kind) -> bool:
    """Whether it can be a parameter: a tensor of floating-point numbers with dimensions."""
    return kind is not None and len(kind[0]) > 0 and (kind[1].is_floating_point or kind[1].is_complex)
