"""The runtime: units, and the schedule of their gathers and reductions.

Lives here: units, the schedule of forwards and backwards, the checks around them, and the construction
of units.
May import: `_core`, `_comm`, `_params`.
Must never know: state dicts, and which front-end made a unit.
"""

from fsdp_wrap._runtime.arrivals import Progress
from fsdp_wrap._runtime.build import (
    REGISTRY,
    UnitSpec,
    assemble_unit,
    build_unit,
    check_contents,
    move,
    over_replicas,
)
from fsdp_wrap._runtime.forward import prepared_inputs, run_forward
from fsdp_wrap._runtime.materialize import MaterializationError, Values
from fsdp_wrap._runtime.order import ExecOrder
from fsdp_wrap._runtime.queue import Queue, Reducing
from fsdp_wrap._runtime.refusals import (
    check_tensors,
    converted,
    drop_gradients,
    is_container,
    refuse_pieces,
    refuse_replaced,
    refuse_sharing,
    refuse_steps_between_sums,
    refuse_unsharded,
    require_root,
    warn_of_container,
)
from fsdp_wrap._runtime.same_model import ranks_of
from fsdp_wrap._runtime.schedule import (
    Schedule,
    joins,
    note_change,
    require_idle,
    schedule_of,
)
from fsdp_wrap._runtime.tree import out_of_memory
from fsdp_wrap._runtime.unit import (
    Doing,
    ForwardCall,
    Unit,
    UnitOptions,
    buffers_of,
    communicators_of,
    units_in,
    will_run,
)
