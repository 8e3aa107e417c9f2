"""Plans: memory, communication and time of a step, found without running it."""

from fsdp_wrap.tools.planning.figures import KINDS, HostMemory, Moment, Place, UnitPlan
from fsdp_wrap.tools.planning.machine import Machine
from fsdp_wrap.tools.planning.plan import Plan
from fsdp_wrap.tools.planning.planner import PlanningError, plan

__all__ = ["KINDS", "HostMemory", "Machine", "Moment", "Place", "Plan", "PlanningError", "UnitPlan", "plan"]
