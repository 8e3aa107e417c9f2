"""Configuration and small tools that all folders share.

Lives here: configuration, errors, events, walks over modules, precision, and every private name of torch
that the package uses.
May import: torch, and nothing else of the package.
Must never know: units, and communication.
"""

from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OffloadPolicy,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from fsdp_wrap._core.add_ons import Seam, found_when_asked_for
from fsdp_wrap._core.alignment import ShardAlignment, ceil_div, round_up
from fsdp_wrap._core.api import (
    CPUOffload,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    check_dtypes,
    check_flag,
    check_kind,
    check_nbytes,
    check_own,
    memory_of,
    nbytes_of,
    with_our_fields,
)
from fsdp_wrap._core.errors import (
    AlreadyShardedError,
    ChangedBetweenError,
    NoDimensionError,
    NotIdleError,
    NotRootError,
    NoValuesError,
    OtherCommsError,
    ReplacedError,
    UnevenCutError,
    UnfitBackendError,
    WrongConfigError,
    WrongKindError,
    not_picklable,
    tells_keywords,
    warn_caller,
)
from fsdp_wrap._core.formatting import format_bytes, format_count, format_dtype, format_seconds, listed
from fsdp_wrap._core.gradient_hooks import (
    HOOKS_OF,
    REFUSED_HOOKS_OF,
    run_gradient_hooks,
    step_in_backward,
    with_optimizers,
)
from fsdp_wrap._core.mesh_info import (
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
)
from fsdp_wrap._core.modules import (
    UNIT_ATTR,
    WRAPPED_ATTR,
    Ignored,
    ModuleWriter,
    ParamPlaces,
    ParamSlot,
    Place,
    UnitContents,
    added_names,
    added_params,
    announce_sharded,
    children_first,
    clean_fqn,
    find_replicated,
    is_ignored,
    is_owned,
    joined,
    mark_managed,
    mark_owned,
    named,
    note_ignored,
    original_class,
    own_modules,
    params,
    persistent,
    replace_tensor,
    saved_tensors,
    set_weakly,
    sets_itself,
    show_extra,
    walk,
)
from fsdp_wrap._core.optimizers.optimizer_steps import (
    OptimizerPiece,
    before_steps,
    count_step,
    counted_before,
    load_watchers,
    note_piece,
    reason_against_pieces,
    refuse_as,
    refuse_in_steps,
    sees_wholes,
    shard_steps,
    steps_taken,
    warn_of_lost_decay,
    watch_distributed_steps,
    watch_loads,
    watch_steps,
)
from fsdp_wrap._core.own_files import (
    open_own,
    own_folder,
    own_output,
    refuse_others,
    refuse_unusable,
    sync_folder,
)
from fsdp_wrap._core.plug_ins.events import Event, EventKind, observe_events, record_events
from fsdp_wrap._core.plug_ins.kinds import Computing, Phase, SpanKind, ValueSeam
from fsdp_wrap._core.plug_ins.plug_in import NO_SPAN, PlugIn, PlugIns, Precedence, Span, everywhere
from fsdp_wrap._core.plug_ins.profiler import encloses
from fsdp_wrap._core.precision import (
    NO_CASTS,
    BufferCasts,
    FullPrecision,
    InputCasts,
    SegmentDtypes,
    SegmentPolicy,
    cast_floating,
    is_castable,
    segment_dtypes,
)
from fsdp_wrap._core.pytree import Replaced, iter_tensors, map_tensors, put_back
from fsdp_wrap._core.version import NEWEST_TORCH, OLDEST_TORCH, __version__
