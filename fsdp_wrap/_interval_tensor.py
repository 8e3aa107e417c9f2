"""The path that older pickles of `IntervalTensor`s name."""

from fsdp_wrap._params import rebuild_interval_tensor

_rebuild = rebuild_interval_tensor
