"""What shows a training step before it runs and after."""

from fsdp_wrap.tools.planning import HostMemory, Machine, Moment, Place, Plan, PlanningError, UnitPlan, plan

__all__ = ["HostMemory", "Machine", "Moment", "Place", "Plan", "PlanningError", "UnitPlan", "plan"]
