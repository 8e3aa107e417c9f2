"""What `torch.compile` must know of the runtime: that its frames are not to be traced.

Dynamo leaves them to Python, which breaks the graph at every unit, and compiles the modules inside.
"""

from __future__ import annotations

import functools

from fsdp_wrap._torch_private import trace_rules

__all__ = ["skip_runtime_frames"]


@functools.cache
def skip_runtime_frames() -> None:
    """Tells dynamo to leave this package's frames alone, but not what they call."""
    trace_rules().add(__name__.partition(".")[0])
