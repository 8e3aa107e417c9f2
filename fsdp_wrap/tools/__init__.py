"""What shows a training step before it runs and after."""

from fsdp_wrap.tools.memory import explain_memory_errors
from fsdp_wrap.tools.timeline import Timeline, timeline

__all__ = ["Timeline", "explain_memory_errors", "timeline"]
