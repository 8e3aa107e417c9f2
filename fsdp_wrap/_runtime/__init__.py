"""The runtime: units, and the path of a step, on which they are gathered and reduced.

Lives here: units, and what happens to them from a forward to the end of its backward.
May import: `_core`, `_comm`, `_params`.
Must never know: state dicts, and which front-end made a unit.
"""

from fsdp_wrap._runtime.doing import Doing
from fsdp_wrap._runtime.finalization import BackwardEnd
from fsdp_wrap._runtime.forward import inside_transforms, run_forward, step_of
from fsdp_wrap._runtime.order import ExecOrder
from fsdp_wrap._runtime.queue import Queue, Reducing
from fsdp_wrap._runtime.stays import after_backward, kept_for_backward
from fsdp_wrap._runtime.step import Step
from fsdp_wrap._runtime.unit import (
    ForwardCall,
    Unit,
    UnitOptions,
    buffers_of,
    communicators_of,
    units_in,
)
