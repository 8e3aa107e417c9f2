"""Batches of collectives: one gather or one reduction for several small units.

Lives here: the queue that puts units in batches, and the memory that it may take for them.
May import: `_core`, `_comm`, `_params`, `_runtime`.
Must never know: when units run, and which front-end made them.
"""

from fsdp_wrap._batching.memory import Batching, follow_setting, set_travel_together_bytes

__all__ = ["Batching", "follow_setting", "set_travel_together_bytes"]
