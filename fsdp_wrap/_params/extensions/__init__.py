"""Parameters whose tensor is a subclass that says what travels of it, and what is made of what has come.

Lives here: the calls of the subclass's methods, the layout of one such parameter, and its segment.
May import: `_core`, `_comm`, and of `_params` the layout of `DTensor`s and segments.
Must never know: handles.
"""

from fsdp_wrap._params.extensions.inner import like_made_of_tensors
from fsdp_wrap._params.extensions.layout import ExtensionLayout
from fsdp_wrap._params.extensions.methods import check_extension, is_extension
from fsdp_wrap._params.extensions.segment import ExtensionSegment
