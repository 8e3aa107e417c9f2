"""Recipes of a training step: what stays, is computed again or leaves, within a budget of memory."""

from fsdp_wrap.tools.tuning.recipe import Recipe, UnitRecipe
from fsdp_wrap.tools.tuning.tune import tune

__all__ = ["Recipe", "UnitRecipe", "tune"]
