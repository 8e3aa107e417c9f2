"""Fully sharded data parallel training with the wrapper API that people know."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fsdp_wrap import _each_tree as _each_tree
from fsdp_wrap._batching import set_travel_together_bytes
from fsdp_wrap._core import Event, EventKind, Phase, observe_events, record_events
from fsdp_wrap._core import __version__ as __version__
from fsdp_wrap._core import found_when_asked_for as _found_when_asked_for
from fsdp_wrap._fsdp_module import FSDPModule, GradientReductionHandle, UnshardHandle, share_comm_ctx
from fsdp_wrap._params import IntervalTensor
from fsdp_wrap._state import iter_full_optim_state, iter_full_params, param_aliases, set_gradients_in_place
from fsdp_wrap.api import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
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
from fsdp_wrap.clip_grad import clip_grad_norm_, grad_norms
from fsdp_wrap.flat_param import FlatParameter
from fsdp_wrap.forward_methods import register_fsdp_forward_method
from fsdp_wrap.fully_shard import fully_shard
from fsdp_wrap.fully_sharded_data_parallel import FullyShardedDataParallel
from fsdp_wrap.replicate import ReplicateModule, replicate

__all__ = [
    "ActivationOffload",
    "Audit",
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "Choice",
    "Corruption",
    "CorruptionError",
    "DataParallelMeshDims",
    "Event",
    "EventKind",
    "FSDPModule",
    "Fit",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "GradientReductionHandle",
    "HostMemory",
    "IntervalTensor",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "Machine",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "Moment",
    "NonFinite",
    "NonFiniteError",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "Phase",
    "Place",
    "Plan",
    "PlanningError",
    "Recipe",
    "ReplicateModule",
    "Reproducible",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "Timeline",
    "Uneven",
    "UnitPlan",
    "UnshardHandle",
    "allow_skipping",
    "ValueRecord",
    "Verification",
    "audit",
    "clip_grad_norm_",
    "explain_memory_errors",
    "find_nonfinite",
    "fit",
    "fully_shard",
    "grad_norms",
    "iter_full_optim_state",
    "iter_full_params",
    "measure_machine",
    "observe_events",
    "offload_activations",
    "param_aliases",
    "plan",
    "preset",
    "record_events",
    "record_values",
    "register_fsdp_forward_method",
    "replicate",
    "reproducible",
    "set_gradients_in_place",
    "set_travel_together_bytes",
    "share_comm_ctx",
    "timeline",
    "tune",
    "uneven",
    "verify",
    "weight_changes",
    "weight_source",
]

# Importing these would take as long as all of the above, so they are imported on first use.
if TYPE_CHECKING:
    from fsdp_wrap import checkpoint as checkpoint
    from fsdp_wrap import comm_hooks as comm_hooks
    from fsdp_wrap import optim as optim
    from fsdp_wrap import replica_groups as replica_groups
    from fsdp_wrap import tools as tools
    from fsdp_wrap import weights as weights
    from fsdp_wrap import wrap as wrap
    from fsdp_wrap._activations import ActivationOffload, offload_activations
    from fsdp_wrap._reproducible import Reproducible, reproducible
    from fsdp_wrap._uneven import Uneven, allow_skipping, uneven
    from fsdp_wrap._values import (
        Audit,
        Corruption,
        CorruptionError,
        NonFinite,
        NonFiniteError,
        ValueRecord,
        Verification,
        audit,
        find_nonfinite,
        record_values,
        verify,
    )
    from fsdp_wrap.tools import explain_memory_errors, measure_machine, preset
    from fsdp_wrap.tools.fitting import Choice, Fit, Recipe, fit, tune
    from fsdp_wrap.tools.planning import (
        HostMemory,
        Machine,
        Moment,
        Place,
        Plan,
        PlanningError,
        UnitPlan,
        plan,
    )
    from fsdp_wrap.tools.timeline import Timeline, timeline
    from fsdp_wrap.weights import weight_changes, weight_source
else:
    __getattr__, __dir__ = _found_when_asked_for(
        __name__,
        ("checkpoint", "comm_hooks", "compat", "optim", "replica_groups", "tools", "weights", "wrap"),
        exporting=("tools", "weights", "_uneven", "_reproducible", "_values", "_activations"),
    )

# It gives the front-ends what programs for torch's read of them. It may be left out.
if find_spec("fsdp_wrap.compat"):
    import_module("fsdp_wrap.compat")
