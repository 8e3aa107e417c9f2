"""Timelines: computation, transfers and waits of each unit on each rank, recorded while steps run."""

from fsdp_wrap.tools.timeline.recording import Timeline, load, merge, timeline

__all__ = ["Timeline", "load", "merge", "timeline"]
