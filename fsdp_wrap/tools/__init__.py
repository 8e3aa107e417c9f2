"""What shows a training step before it runs and after."""

from fsdp_wrap.tools.planning import (
    PRESETS,
    Choice,
    Fit,
    HostMemory,
    Machine,
    Moment,
    Place,
    Plan,
    PlanningError,
    UnitPlan,
    fit,
    measure_machine,
    plan,
    preset,
    shard_as,
    step_of,
)

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
    "UnitPlan",
    "fit",
    "measure_machine",
    "plan",
    "preset",
    "shard_as",
    "step_of",
]
