"""Fuses tensors that an engine has in one: q, k and v, gate and up, the experts of a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdp_wrap.weights._recipes import Formula, Joined

Rules = Mapping[str, Sequence[str] | str]
"""For the name of what is joined those of its parts, or a pattern of them; see `weight_source`."""

_ANY = "*"


def check_rules(fuse: Rules | None) -> Rules:
    """Returns checked rules; none for None."""
    rules = {} if fuse is None else fuse
    if not isinstance(rules, Mapping):
        raise TypeError(f"fuse must be a table or None, not a {type(fuse).__name__}")
    for joined, parts in rules.items():
        if isinstance(parts, str):
            if parts.split(".").count(_ANY) != 1:
                raise ValueError(
                    f"fuse[{joined!r}] must have one `*` for the number, as 'experts.*.w1', not {parts!r}"
                )
        elif len(parts) < 2 or not all(isinstance(part, str) for part in parts):
            raise ValueError(f"fuse[{joined!r}] must name two or more parts, not {parts!r}")
    return rules


def fused(made: dict[str, Formula], rules: Rules) -> dict[str, Formula]:
    """Joins tensors by rules, one after the other; a joined tensor takes the place of its first part."""
    for joined, parts in rules.items():
        joins = _stacks(made, joined, parts) if isinstance(parts, str) else _rows(made, joined, parts)
        if not joins:
            first = next(iter(made), "none")
            raise ValueError(f"fuse[{joined!r}] = {parts!r} fits no parameter; they are named as '{first}'")
        made = _replaced(made, joins, stacked=isinstance(parts, str))
    return made


def _rows(made: dict[str, Formula], joined: str, parts: Sequence[str]) -> dict[str, list[str]]:
    """Returns the names of the parts by the fused tensor's name."""
    joins: dict[str, list[str]] = {}
    for name in made:
        path = name.split(".")
        for place, component in enumerate(path):
            if component in parts:
                wanted = [".".join([*path[:place], part, *path[place + 1 :]]) for part in parts]
                lacking = [part for part in wanted if part not in made]
                if lacking:
                    raise ValueError(
                        f"fuse[{joined!r}] joins {', '.join(parts)}: there is '{name}', and no '{lacking[0]}'"
                    )
                joins[".".join([*path[:place], joined, *path[place + 1 :]])] = wanted
    return joins


def _stacks(made: dict[str, Formula], joined: str, pattern: str) -> dict[str, list[str]]:
    """Returns the names of the parts, in order of their numbers, by the stacked tensor's name."""
    numbered: dict[str, dict[int, str]] = {}
    wanted = pattern.split(".")
    for name in made:
        path = name.split(".")
        for begin in range(len(path) - len(wanted) + 1):
            piece = path[begin : begin + len(wanted)]
            if all(
                component == want or (want == _ANY and component.isdecimal())
                for component, want in zip(piece, wanted)
            ):
                stack = ".".join([*path[:begin], joined, *path[begin + len(wanted) :]])
                numbered.setdefault(stack, {})[int(piece[wanted.index(_ANY)])] = name
    for stack, names in numbered.items():
        if sorted(names) != [*range(len(names))]:
            raise ValueError(
                f"fuse[{joined!r}] stacks {pattern!r} into '{stack}': the numbers must be 0 to "
                f"{len(names) - 1}, and are {', '.join(map(str, sorted(names)))}"
            )
    return {stack: [names[number] for number in sorted(names)] for stack, names in numbered.items()}


def _replaced(made: dict[str, Formula], joins: dict[str, list[str]], stacked: bool) -> dict[str, Formula]:
    joined = {
        stack: _joined(stack, {name: made[name] for name in names}, stacked) for stack, names in joins.items()
    }
    firsts = {min(names, key=[*made].index): stack for stack, names in joins.items()}
    parts = {name for names in joins.values() for name in names}
    result: dict[str, Formula] = {}
    for name, formula in made.items():
        if name in firsts:
            result[firsts[name]] = joined[firsts[name]]
        elif name not in parts:
            result[name] = formula
    return result


def _joined(stack: str, parts: Mapping[str, Formula], stacked: bool) -> Joined:
    first_name, first = next(iter(parts.items()))
    skipped = 0 if stacked else 1
    if not stacked and not first.shape:
        raise ValueError(f"'{first_name}' has no dimensions, and so cannot be joined into '{stack}'")
    for name, formula in parts.items():
        if formula.dtype != first.dtype or formula.shape[skipped:] != first.shape[skipped:]:
            raise ValueError(
                f"'{name}' ({formula.dtype}, {tuple(formula.shape)}) does not fit '{first_name}' "
                f"({first.dtype}, {tuple(first.shape)}), with which fuse joins it into '{stack}'"
            )
    return Joined([*parts.values()], stacked)
