"""The path of `IntervalTensor` that older pickles name."""

from fsdp_wrap._params import IntervalTensor, rebuild_interval_tensor

__all__ = ["IntervalTensor"]

_rebuild = rebuild_interval_tensor
