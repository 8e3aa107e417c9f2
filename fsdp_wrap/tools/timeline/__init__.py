"""A step after it ran: what each unit computed, gathered, reduced and waited for, on each rank."""

from fsdp_wrap.tools.timeline.recording import Timeline, load, merge, timeline

__all__ = ["Timeline", "load", "merge", "timeline"]
