"""What shows a training step before it runs and after."""

from fsdp_wrap.tools.memory import explain_memory_errors
from fsdp_wrap.tools.planning import HostMemory, Machine, Moment, Place, Plan, PlanningError, UnitPlan, plan
from fsdp_wrap.tools.timeline import Timeline, timeline

__all__ = [
    "HostMemory",
    "Machine",
    "Moment",
    "Place",
    "Plan",
    "PlanningError",
    "Timeline",
    "UnitPlan",
    "explain_memory_errors",
    "plan",
    "timeline",
]
