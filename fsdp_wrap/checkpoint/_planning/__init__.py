"""Planning a save: each rank finds its own part from what all ranks hold, which is told once."""

from fsdp_wrap.checkpoint._planning.agreement import agree
from fsdp_wrap.checkpoint._planning.collector import uncollected

__all__ = ["agree", "uncollected"]
