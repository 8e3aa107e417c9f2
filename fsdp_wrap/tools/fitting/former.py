"""Former names, for one release: `tune`, which is `fit` now, and `shard_as`, in whose place are recipes."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

from fsdp_wrap._core import tells_keywords, warn_caller
from fsdp_wrap.tools.fitting.fit import fit
from fsdp_wrap.tools.fitting.recipe import Recipe
from fsdp_wrap.tools.planning import Machine
from fsdp_wrap.tools.setups import Setup, keywords_of


@tells_keywords({"device_memory": "pass it as memory, or call fit(), which takes it"})
def tune(
    setup: Setup,
    ranks: int = 8,
    *,
    device: str = "cpu",
    memory: int | str | None = None,
    machine: Machine,
    timeline: Any = None,
    ran: Any = None,
    progress: bool = False,
) -> Recipe:
    """The former name of `fit`, which answers with all that it found: call that.

    Args:
        setup: The `setup` of `fit`; without an argument `recipe`, the recipe is applied to the model that it
            returns.
        ranks: Number of ranks.
        device: The `device` of `fit`.
        memory: The `device_memory` of `fit`.
        machine: The `machine` of `fit`.
        timeline: Gone: correct the machine by it.
        ran: Gone, as `timeline`.
        progress: The `progress` of `fit`.

    Returns:
        The recipe of the fastest choice that fits.

    Raises:
        TypeError: If an argument is gone, or has the wrong type.
        ValueError: If nothing fits.
    """
    warn_caller("tune() is fit() now: call fit(setup, ranks, device_memory=...).best.recipe", FutureWarning)
    if timeline is not None or ran is not None:
        raise TypeError(
            "tune() takes no timeline and no ran any more: pass machine=correct_machine(plan(setup, ...), "
            "timeline), from fsdp_wrap.tools.machines"
        )
    taken = keywords_of(setup)
    given = setup if taken is None or "recipe" in taken else partial(_applied, setup)
    answer = fit(
        lambda recipe: given(recipe=recipe),
        ranks,
        device_memory=memory,
        device=device,
        machine=machine,
        progress=progress,
    )
    if answer.best is None or answer.best.recipe is None:
        raise ValueError(answer.missing())
    return answer.best.recipe


def _applied(setup: Setup, recipe: Recipe) -> tuple[Any, Any, Any]:
    """Runs a setup that shards its model itself, and applies a recipe to it."""
    made = setup()
    recipe.apply(made[0])
    return made


def shard_as(*_: object, **__: object) -> NoReturn:
    """Gone: let `setup` take a `Recipe`, which `fit` varies.

    Raises:
        TypeError: Always.
    """
    raise TypeError(
        "shard_as() is gone: let setup() take recipe=Recipe(), and call recipe.apply(model, blocks, "
        "mp_policy=...), or shard the model by fully_shard or FullyShardedDataParallel"
    )
