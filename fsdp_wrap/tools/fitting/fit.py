"""`fit`: whether a training step fits into memory, with which recipe and batch, and how fast."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fsdp_wrap._core import format_bytes, memory_of, tells_keywords
from fsdp_wrap.tools.fitting.answer import Choice, Fit, Values, format_case
from fsdp_wrap.tools.fitting.recipe import OFFLOADS, OFFLOADS_ACTIVATIONS, Recipe
from fsdp_wrap.tools.fitting.search import Search
from fsdp_wrap.tools.planning import Machine, Plan, plan
from fsdp_wrap.tools.planning.planner import many_plans
from fsdp_wrap.tools.progress import progress_bar
from fsdp_wrap.tools.setups import Setup, keywords_of

_BATCH, _RECIPE = "batch", "recipe"


@tells_keywords({"memory": "pass it as device_memory"})
def fit(
    setup: Setup,
    ranks: int | Sequence[int] = 8,
    *,
    device_memory: int | str | None = None,
    vary: Mapping[str, Sequence[Any]] | None = None,
    device: str = "cpu",
    machine: Machine | None = None,
    progress: bool = False,
) -> Fit:
    """Answers whether a step fits, with which recipe and batch, and how fast; it plans, and runs nothing.

    Every combination of the values in `vary` is a configuration: `setup` gets them by keyword, and its own
    code gives them a meaning. `fit` itself knows three names. If `setup` takes them, and they are not varied:

    - `recipe`: it gets each `Recipe` that is tried, and calls `model = recipe.apply(model)`, instead of
      `fully_shard` or after it. The recipe decides for each unit whether its full parameters stay after
      forward and backward, and whether its activations stay, are computed again, or leave for the host; and
      for the run the borders of units, how far gathers look ahead, replicas, and what is offloaded. The
      fastest is found; results stay as they are. This needs a machine.
    - `batch`: the number of samples in one forward of one rank. The largest that fits is found, with all
      kept and with all computed again.
    - `accumulation`: the number of forwards in a step; speed counts all of their samples.

    The memory is that of all tensors while the model is built, in the first step and in later ones. It leaves
    out the context of a device, fragments of its allocator, and buffers of NCCL: leave room for them.

    Args:
        setup: The `setup` of `plan`, with keyword arguments that may vary.
        ranks: Number of ranks, or several numbers to try.
        device_memory: Bytes that a rank may use, such as `"80GB"`; None for the machine's.
        vary: Values to try by the name of the argument.
        device: The `device` of `plan`.
        machine: The `machine` of `plan`; None for no prediction of time: then the largest batch comes first.
        progress: Show a progress bar after two seconds, and each answer when it is found, on standard error.
            An interrupt (Ctrl-C) then ends the search, and what was found is returned.

    Returns:
        The answers, the fastest that fits first; `print` shows a table, the best recipe, or what is missing.

    Raises:
        TypeError: If `setup` lacks an argument that varies, or an argument has the wrong type.
        ValueError: If an argument makes no sense, or no configuration can be planned; the first error is its
            cause.

    Example:
        ```python
        def setup(recipe=Recipe()):
            model = recipe.apply(Transformer(), Block)
            optimizer = torch.optim.AdamW(model.parameters())
            return model, optimizer, partial(train_step, model, optimizer)

        fitted = fit(setup, 64, device="cuda", device_memory="75GB", machine=preset("h100", attained=0.5))
        recipe = fitted.best.recipe
        ```
    """
    if device_memory is None:
        device_memory = None if machine is None else machine.device_memory
        if device_memory is None:
            raise ValueError("fit() needs device_memory, such as '80GB', or a machine with device_memory")
    limit = memory_of(device_memory, "device_memory")
    taken = keywords_of(setup)
    varied = _checked(vary or {}, taken)
    counts = [ranks] if isinstance(ranks, int) else ranks
    groups = [dict(zip(varied, values)) for values in itertools.product(*varied.values())]
    finds = {name for name in (_BATCH, _RECIPE) if name not in varied and (taken is None or name in taken)}
    if _RECIPE in finds and machine is None:
        raise ValueError(
            "fit() chooses the recipe that setup() takes by the time of a step: pass a machine, such as "
            "fsdp_wrap.preset('h100'), or vary={'recipe': [Recipe()]}"
        )
    searches = [
        Search(
            plan_with=partial(_plan_of, setup, count, values, device, machine),
            ranks=count,
            values={name: value for name, value in values.items() if name not in (_BATCH, _RECIPE)},
            limit=limit,
            batch=values.get(_BATCH),
            recipe=values.get(_RECIPE),
            finds_batch=_BATCH in finds,
            runs=_runs(count, device, machine) if _RECIPE in finds and machine is not None else (),
            offloads=device != "cpu" and OFFLOADS_ACTIVATIONS,
        )
        for count, values in itertools.product(counts, groups)
    ]
    choices, complete = _search(searches, limit, progress)
    if all(choice.refused for choice in choices):
        raise ValueError(f"no configuration can be planned: {choices[0].refused}") from searches[0].error
    plans = sum(len(search.known) for search in searches)
    ordered = tuple(sorted(choices, key=lambda choice: choice.order))
    return Fit(device_memory=limit, choices=ordered, plans=plans, machine=machine, complete=complete)


def _plan_of(
    setup: Setup, ranks: int, values: Values, device: str, machine: Machine | None, **more: Any
) -> Plan:
    """Plans a setup with some values and with more, which count."""
    return plan(partial(setup, **{**values, **more}), ranks, device=device, machine=machine)


def _checked(vary: Mapping[str, Sequence[Any]], taken: set[str] | None) -> dict[str, list[Any]]:
    """Returns the values that vary, by name."""
    for name, values in vary.items():
        if taken is not None and name not in taken:
            raise TypeError(f"setup() takes no argument {name!r}: add it, or do not vary it")
        if isinstance(values, str) or not isinstance(values, Sequence) or not len(values):
            raise TypeError(f"vary[{name!r}] must be a sequence of values, not {values!r}")
    if not all(isinstance(batch, int) and batch > 0 for batch in vary.get(_BATCH, ())):
        raise ValueError(f"vary['batch'] must be whole numbers from 1 on, not {vary[_BATCH]}")
    return {name: [*values] for name, values in vary.items()}


def _runs(ranks: int, device: str, machine: Machine) -> list[Recipe]:
    """Returns what may be decided for all units at once; the usually faster ones come first."""
    host = machine.ranks_per_host
    replicas = [None, host] if 1 < host < ranks and ranks % host == 0 else [None]
    return [
        Recipe(prefetch=1, offload=offload, ranks_per_replica=size)
        for offload in (("none",) if device == "cpu" else OFFLOADS)
        for size in replicas
    ]


def _search(searches: Sequence[Search], limit: int, progress: bool) -> tuple[list[Choice], bool]:
    """Returns the answers, and whether the searches came to their end."""
    choices: list[Choice] = []
    with many_plans(), progress_bar(len(searches), disable=not progress) as bar:
        bar.report(
            f"searching {len(searches)} configurations for what fits into {format_bytes(limit)}; Ctrl-C ends "
            "the search, and keeps what was found"
        )
        try:
            for search in searches:
                bar.describe(format_case(search.ranks, search.values))
                for choice in search.choices():
                    bar.report(str(choice))
                    choices.append(choice)
                bar.advance()
        except KeyboardInterrupt:
            so_far = [search.best for search in searches if search.runs and search.best is not None]
            choices += [choice for choice in so_far if choice not in choices]
            if not progress or all(choice.refused for choice in choices):
                raise
            return choices, False
    return choices, True
