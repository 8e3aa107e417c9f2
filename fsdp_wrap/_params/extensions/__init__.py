"""Parameters of tensor subclasses, which may define their own inputs and outputs of all-gathers.

Lives here: the calls of the subclass's methods, such parameters when they are sharded, and their segment;
and the wrapper's frozen ones as bytes.
May import: `_core`, `_comm`, and of `_params` the sharded parameters and segments.
Must never know: handles.
"""

from fsdp_wrap._params.extensions.gathered import Use
from fsdp_wrap._params.extensions.inner import like_made_of_tensors
from fsdp_wrap._params.extensions.methods import check_extension, check_parts, is_extension, is_packable
from fsdp_wrap._params.extensions.packed import PackedParams
from fsdp_wrap._params.extensions.packing import check_packable, inner_tensors
from fsdp_wrap._params.extensions.segment import ExtensionSegment
from fsdp_wrap._params.extensions.sharded_params import ExtensionParams
