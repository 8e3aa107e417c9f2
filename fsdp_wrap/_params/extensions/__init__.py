"""Parameters of tensor subclasses, which may define their own inputs and outputs of all-gathers.

Lives here: the calls of the subclass's methods, such parameters when they are sharded, and their segment;
the plug-in that says what a gather is for; and the wrapper's frozen ones as bytes.
May import: `_core`, `_comm`, and of `_params` the sharded parameters and segments.
Must never know: what else a unit has, but that its plug-in tells of new leaves.
"""

from fsdp_wrap._params.extensions.gather_uses import GatherUses, tell_use
from fsdp_wrap._params.extensions.gathered import Use
from fsdp_wrap._params.extensions.inner import like_made_of_tensors
from fsdp_wrap._params.extensions.methods import check_extension, check_parts, is_extension, is_packable
from fsdp_wrap._params.extensions.packed import PackedParams
from fsdp_wrap._params.extensions.packing import check_packable, inner_tensors
from fsdp_wrap._params.extensions.segment import ExtensionSegment
from fsdp_wrap._params.extensions.sharded_params import ExtensionParams
