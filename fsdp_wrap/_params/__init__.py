"""Parameters in buffers, their gradients, and the communication of both.

Lives here: layouts, sharded parameters (flat parameters, slices, DTensors), their gradients, and the
buffers of a unit, which unshard and reshard them.
May import: `_core`, `_comm`.
Must never know: when that happens, and in which order units run.
"""

from fsdp_wrap._params.buffers import Buffers, NoBuffers
from fsdp_wrap._params.chunks import Cut, chunk_numel
from fsdp_wrap._params.collectives import BatchedGather, BatchedGradients, Reduction
from fsdp_wrap._params.dtensor import DTensorParams
from fsdp_wrap._params.extensions import (
    ExtensionParams,
    PackedParams,
    Use,
    check_extension,
    check_packable,
    check_parts,
    inner_tensors,
    is_extension,
    is_packable,
    like_made_of_tensors,
    tell_use,
)
from fsdp_wrap._params.flat import (
    FlatParameter,
    FlatParams,
    FlatPiece,
    HiddenFlatParameter,
    JointParams,
    SliceParams,
    held_params,
)
from fsdp_wrap._params.interval_tensor import (
    PASSES_FOR_DTENSOR,
    IntervalTensor,
    Spread,
    assemble,
    boxes_of,
    by_rows,
)
from fsdp_wrap._params.layout import Layout
from fsdp_wrap._params.parallel import (
    DataMesh,
    HeldBy,
    LocalPart,
    check_beside,
    copyable,
    holding,
    make_copyable,
    to_local,
    typed_part,
)
from fsdp_wrap._params.segment import FREED_VERSION, Segment
from fsdp_wrap._params.segments import trains
from fsdp_wrap._params.sharded_params import (
    Interval,
    ShardedParams,
    Written,
    distributed_names,
    memory_around,
    same_sample,
)
from fsdp_wrap._params.showing import Showing
from fsdp_wrap._params.side_data import (
    SideData,
    holds_codes,
    refuse_other_codes,
    seams_of_side_data,
    side_data_kind,
    side_data_of,
    tensors_beside,
)
from fsdp_wrap._params.state import Until, Where
from fsdp_wrap._params.summoned import LentParams, Summoning
from fsdp_wrap._params.unit_gradients import UnitGradients
