"""Whether a step fits into memory, with which recipe and batch, and how fast; found by plans."""

from fsdp_wrap.tools.fitting.answer import Choice, Fit
from fsdp_wrap.tools.fitting.fit import fit
from fsdp_wrap.tools.fitting.former import shard_as, tune
from fsdp_wrap.tools.fitting.recipe import Recipe, UnitRecipe
from fsdp_wrap.tools.fitting.step import step_of

__all__ = ["Choice", "Fit", "Recipe", "UnitRecipe", "fit", "shard_as", "step_of", "tune"]
