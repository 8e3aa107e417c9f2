"""Models of transformers as they lie on the Hub.

Lives here: a model's parameters as files of that library's layout hold them, both ways. May import: `_core`,
`_runtime`, `_state`. Must never know: front-ends, checkpoints of steps.
"""

from fsdp_wrap.checkpoint._hub.block_scales import FP8, dequantised, has_scales, in_blocks, weights_in
from fsdp_wrap.checkpoint._hub.buffers import fill_buffers, give_memory, refuse_meta_buffers
from fsdp_wrap.checkpoint._hub.hub_layout import HubLayout, block_in
from fsdp_wrap.checkpoint._hub.stored import Described, StoredParams

__all__ = [
    "FP8",
    "Described",
    "HubLayout",
    "StoredParams",
    "block_in",
    "dequantised",
    "fill_buffers",
    "give_memory",
    "has_scales",
    "in_blocks",
    "refuse_meta_buffers",
    "weights_in",
]
