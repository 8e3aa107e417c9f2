"""The plan of a step: what it will hold in memory, send and take, found without running it."""

from fsdp_wrap.tools.planning.machine import Machine
from fsdp_wrap.tools.planning.plan import KINDS, HostMemory, Moment, Place, Plan, UnitPlan

__all__ = ["KINDS", "HostMemory", "Machine", "Moment", "Place", "Plan", "UnitPlan"]
