"""Communication that users bring along for `fully_shard`: collectives, memory of buffers, and hooks.

Lives here: their transport, the plug-in that calls hooks, and what may go together.
May import: `_core`, `_comm`, `_params`, `_runtime`.
Must never know: state dicts, and which front-end made a unit.
"""

from fsdp_wrap._custom_comms.hooks import hook_of, hook_reductions
from fsdp_wrap._custom_comms.memory import allocate_by_group, allocate_symmetric
from fsdp_wrap._custom_comms.transport import use_comms

__all__ = ["allocate_by_group", "allocate_symmetric", "hook_of", "hook_reductions", "use_comms"]
