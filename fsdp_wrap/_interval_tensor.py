"""The path of `IntervalTensor` that older pickles name."""

from fsdp_wrap._params import rebuild_interval_tensor

_rebuild = rebuild_interval_tensor
