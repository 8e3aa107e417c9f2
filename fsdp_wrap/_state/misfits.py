"""Messages about values of a state dict that do not fit a model, short enough to be read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from fsdp_wrap._core import listed

_MOST = 10
"""Names of a list, and lines of a message, that are shown."""
_WRAPPERS = {
    "module.": "DistributedDataParallel",
    "_orig_mod.": "torch.compile",
    "_fsdp_wrapped_module.": "FullyShardedDataParallel",
    "_checkpoint_wrapped_module.": "checkpoint_wrapper",
}
"""Parts of names that modules around a module add, with those who add them."""
_NAMES = re.compile(r"(Missing|Unexpected) key\(s\) in state_dict: (.*?)\.?\s*$")


def quoted(keys: Iterable[str]) -> str:
    """Returns names for a message: the first ten, and the number of others."""
    return listed((f'"{key}"' for key in keys), _MOST)


def shown(problems: Iterable[str]) -> list[str]:
    """Returns the first ten lines on values that do not fit, and one with the number of others."""
    every = [*problems]
    more = len(every) - _MOST
    return [*every[:_MOST], f"and {more} more of this kind"] if more > 0 else every


def tell_prefix(missing: Iterable[str], unexpected: Iterable[str]) -> Iterator[str]:
    """Yields a cure where names differ only by what a wrapper has added, such as `module.`."""
    lacking = set(missing)
    for key in unexpected:
        added = [part for part in _WRAPPERS if part in f".{key}" and _without(key, [part]) != key]
        if added and _without(key, added) in lacking:
            yield f"The names have {_cure(key, added)}"
            return


def _without(key: str, parts: Iterable[str]) -> str:
    for part in parts:
        key = key.removeprefix(part) if part == "module." else key.replace(part, "")
    return key


def _cure(key: str, added: list[str]) -> str:
    whose = " and ".join(f"'{part}' of {_WRAPPERS[part]}" for part in added)
    if all(_without(key.removeprefix(part), added) == key.removeprefix(part) for part in added):
        function = "torch.nn.modules.utils.consume_prefix_in_state_dict_if_present"
        return f"{whose}, in which the saved model was wrapped: call {function}(state_dict, '{added[0]}')"
    chain = "".join(
        f".removeprefix('{part}')" if part == "module." else f".replace('{part}', '')" for part in added
    )
    return (
        f"{whose}, in which the saved model was wrapped: load "
        f"{{name{chain}: value for name, value in state_dict.items()}}"
    )


def shortened(error: str) -> str:
    """Returns the error of `torch.nn.Module.load_state_dict` with short lists, and a cure for prefixes."""
    head, *lines = error.split("\n")
    kept: list[str] = []
    names: dict[str, list[str]] = {"Missing": [], "Unexpected": []}
    for line in filter(None, map(str.strip, lines)):
        match = _NAMES.match(line)
        if match is None:
            kept.append(line)
            continue
        names[match[1]] = re.findall(r'"([^"]*)"', match[2])
        kept.append(f"{match[1]} key(s) in state_dict: {quoted(names[match[1]])}.")
    lists = [line for line in kept if _NAMES.match(line)]
    others = shown(line for line in kept if line not in lists)
    cure = tell_prefix(names["Missing"], names["Unexpected"])
    return "\n\t".join([head, *cure, *lists, *others])
