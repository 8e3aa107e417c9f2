"""Which capabilities meet: draws in which every two meet that can, seeded."""

from __future__ import annotations

import importlib.util
import itertools
import random
from collections.abc import Iterable
from typing import NamedTuple

from capabilities import CAPABILITIES, Optimizer
from fronts import FRONTS
from programs import Capability
from ways import WAYS as WAYS_OF_SAVING

OTHERS = 3
"""Capabilities of a draw beside its optimizer and its way of saving."""
ONE_IN = 3
"""Of the pairs that need 4 ranks one in so many is drawn; another seed has others."""
TRIES = 20

# A `FlatParameter`, here of the blocks' tied weight, is frozen as a whole, as torch's is.
APART = [{"flat", "TiedBlocks", "Toggled"}]


KINDS = {
    name: kind
    for name, kind in {**CAPABILITIES, **WAYS_OF_SAVING}.items()
    if kind.needs is None or importlib.util.find_spec(kind.needs)
}
for _name, _kind in KINDS.items():
    _kind.name = _name
OPTIMIZERS = [name for name, kind in KINDS.items() if isinstance(kind, Optimizer)]
WAYS = [name for name in KINDS if name in WAYS_OF_SAVING]
_ORDER = [*KINDS]
REST = [name for name in KINDS if name not in OPTIMIZERS + WAYS]


class Draw(NamedTuple):
    """A program: its ranks, its front-end, and the names of its capabilities."""

    size: int
    front: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.size}-{self.front}-{'+'.join(self.names)}"

    @classmethod
    def of(cls, text: str) -> Draw:
        """Reads what `str` writes."""
        size, front, names = text.split("-")
        return cls(int(size), front, tuple(names.split("+")))

    @property
    def can_run(self) -> bool:
        """Whether all of its parts can be combined."""
        return not any(pair <= {self.front, *self.names} for pair in APART)

    def capabilities(self) -> list[Capability]:
        return [KINDS[name] for name in sorted(self.names, key=_ORDER.index)]


def _can_meet(one: Capability, other: Capability) -> bool:
    return not {*one.slots} & {*other.slots} and bool({*one.fronts} & {*other.fronts}) and one is not other


MEETS = {
    name: frozenset(other for other, its in KINDS.items() if _can_meet(kind, its))
    for name, kind in KINDS.items()
}


def draws(seed: int) -> list[Draw]:
    """Few draws in which every two capabilities meet that can; only some of those that need 4 ranks."""
    generator = random.Random(seed)
    pairs = [pair for pair in itertools.combinations(KINDS, 2) if pair[1] in MEETS[pair[0]]]
    left = {frozenset(pair) for pair in pairs if _size(pair) == 2 or not generator.randrange(ONE_IN)}
    left |= {frozenset([front, name]) for name, kind in KINDS.items() for front in kind.fronts}
    chosen = []
    while left:
        waiting = sorted(map(sorted, left))
        candidates = [_draw(generator, generator.choice(waiting), left) for _ in range(TRIES)]
        best = max(
            (draw for draw in candidates if draw.can_run), key=lambda draw: len(left & _meetings(draw))
        )
        left -= _meetings(best)
        chosen.append(best)
    return chosen


def _draw(generator: random.Random, pair: list[str], left: set[frozenset[str]]) -> Draw:
    """A draw in which a pair meets, and then as many as possible of those that are left."""
    names = [name for name in pair if name in KINDS]
    fronts = [name for name in pair if name in FRONTS]
    fronts = fronts or [front for front in FRONTS if all(front in KINDS[name].fronts for name in names)]
    front = generator.choice(fronts)
    fitting = {name for name in KINDS if front in KINDS[name].fronts}.intersection(
        *(MEETS[name] for name in names)
    )

    def gain(name: str) -> int:
        return sum(frozenset([name, other]) in left for other in (front, *names))

    for group in (OPTIMIZERS, WAYS, *[REST] * OTHERS):
        choices = [name for name in group if name in fitting]
        if choices and (group is REST or not {*group} & {*names}):
            generator.shuffle(choices)
            names.append(max(choices, key=gain))
            fitting &= MEETS[names[-1]]
    return Draw(_size(names), front, tuple(sorted(names, key=_ORDER.index)))


def _size(names: Iterable[str]) -> int:
    return max(min(KINDS[name].sizes) for name in names)


def _meetings(draw: Draw) -> set[frozenset[str]]:
    pairs = itertools.combinations(draw.names, 2)
    return {frozenset(pair) for pair in pairs} | {frozenset([draw.front, name]) for name in draw.names}
