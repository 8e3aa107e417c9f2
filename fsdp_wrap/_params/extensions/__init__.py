"""Parameters whose tensor is a subclass that says what travels of it, and what is made of what has come.

Lives here: the calls of the subclass's methods, the layout of such parameters and their segment; and the
layout of frozen ones as bytes, of the wrapper.
May import: `_core`, `_comm`, and of `_params` the layouts and segments.
Must never know: handles.
"""

from fsdp_wrap._params.extensions.inner import like_made_of_tensors
from fsdp_wrap._params.extensions.layout import ExtensionLayout
from fsdp_wrap._params.extensions.methods import check_extension, is_extension
from fsdp_wrap._params.extensions.packed import PackedLayout
from fsdp_wrap._params.extensions.packing import check_packable, inner_tensors, is_packable
from fsdp_wrap._params.extensions.segment import ExtensionSegment
