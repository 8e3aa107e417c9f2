"""Which configurations of a step fit, found from a few plans of each."""

from fsdp_wrap.tools.fitting.fit import Choice, Fit, fit
from fsdp_wrap.tools.fitting.variants import shard_as, step_of

__all__ = ["Choice", "Fit", "fit", "shard_as", "step_of"]
