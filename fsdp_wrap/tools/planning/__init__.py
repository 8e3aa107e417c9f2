"""The plan of a step: what it will hold in memory, send and take, found without running it."""

from fsdp_wrap.tools.planning.fit import Choice, Fit, fit, parse_bytes
from fsdp_wrap.tools.planning.machine import Machine
from fsdp_wrap.tools.planning.machines import measure_machine
from fsdp_wrap.tools.planning.plan import KINDS, HostMemory, Moment, Place, Plan, UnitPlan
from fsdp_wrap.tools.planning.planner import PlanningError, plan
from fsdp_wrap.tools.planning.presets import PRESETS, preset
from fsdp_wrap.tools.planning.variants import shard_as, step_of

__all__ = [
    "KINDS",
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
    "parse_bytes",
    "plan",
    "preset",
    "shard_as",
    "step_of",
]
