"""What a checkpoint holds, and which of it is a model's or an optimizer's."""

from fsdp_wrap.checkpoint._contents.models import Contents, Source, counted, model_in, models_in
from fsdp_wrap.checkpoint._contents.optimizers import Keys, Kind, dotted

__all__ = ["Contents", "Keys", "Kind", "Source", "counted", "dotted", "model_in", "models_in"]
