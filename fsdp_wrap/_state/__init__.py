"""Full values, and state dicts of models and optimizers.

Lives here: `summon_full_params`, streams of full tensors, state dicts and their loading; in
`gradients/` norms, clipping and scaling.
May import: all below: `_core`, `_comm`, `_params`, `_runtime`.
Must never know: which front-end made a unit, and where a checkpoint lies.
"""

from fsdp_wrap._state.copies import deepcopy_wrapper
from fsdp_wrap._state.full_params import full_units, is_summoned, sharded_buffers, summon_full_params
from fsdp_wrap._state.full_values import (
    FirstRank,
    FullParams,
    Keepers,
    check_budget,
    check_dtype,
    is_sharded,
    iter_full_params,
    param_aliases,
    persistent_buffers,
    settled_units,
    unsharded,
    used,
)
from fsdp_wrap._state.gradients.clip_grad import GradientNorms, clip_parameters, norms_of
from fsdp_wrap._state.gradients.hooks import (
    DefaultState,
    LowPrecisionState,
    allreduce_hook,
    bf16_compress_hook,
    compress,
    compression,
    fp16_compress_hook,
    reduce_scatter_hook,
    register_comm_hook,
    set_gradients_in_place,
)
from fsdp_wrap._state.gradients.in_parts import NormInParts, scale_to
from fsdp_wrap._state.gradients.norms import AllReduce, Summand, exact_powers, reduced
from fsdp_wrap._state.gradients.scaler import ShardedGradScaler
from fsdp_wrap._state.load_targets import ReadsOnAccess, Targets, note_load, sides_in
from fsdp_wrap._state.misfits import shortened
from fsdp_wrap._state.optim_initial import innermost
from fsdp_wrap._state.optim_load import as_saved, load_optim_state_dict
from fsdp_wrap._state.optim_offload import is_state_offloaded, offload_optimizer_state
from fsdp_wrap._state.optim_params import placed_like, refuse_shared
from fsdp_wrap._state.optim_pieces import refitted
from fsdp_wrap._state.optim_state_dict import (
    full_optim_state_dict,
    iter_full_optim_state,
    rekey_optim_state_dict,
    sharded_optim_state_dict,
)
from fsdp_wrap._state.originals import Original, Originals, owned_places, uncompiled_fqn, uncut
from fsdp_wrap._state.side_data import load_side_data
from fsdp_wrap._state.state_dict import (
    begin_load,
    by_mesh,
    gathers,
    only_rank,
    take_state_dict,
    taking,
    to_load,
    wants_dtensors,
)
