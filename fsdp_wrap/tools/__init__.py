"""Plans of a training step before it runs, and timelines of it afterwards."""

from fsdp_wrap.tools.fitting import Choice, Fit, Recipe, UnitRecipe, fit, shard_as, step_of, tune
from fsdp_wrap.tools.machines import PRESETS, correct_machine, measure_machine, preset
from fsdp_wrap.tools.memory import explain_memory_errors
from fsdp_wrap.tools.planning import HostMemory, Machine, Moment, Place, Plan, PlanningError, UnitPlan, plan
from fsdp_wrap.tools.timeline import Timeline, timeline

__all__ = [
    "PRESETS",
    "Choice",
    "Fit",
    "HostMemory",
    "Machine",
    "Moment",
    "Place",
    "Plan",
    "PlanningError",
    "Recipe",
    "Timeline",
    "UnitPlan",
    "UnitRecipe",
    "correct_machine",
    "explain_memory_errors",
    "fit",
    "measure_machine",
    "plan",
    "preset",
    "shard_as",
    "step_of",
    "timeline",
    "tune",
]
