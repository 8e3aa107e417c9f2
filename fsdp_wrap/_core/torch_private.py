"""The private names of torch that this package uses, and the purpose of each.

Names that can be imported are imported here, and from here by the other files. Attributes of torch's objects
are read in place; `PURPOSES` lists them too. A new torch may drop any of them:
tests/core/test_torch_private.py looks for each by itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass, DispatchKey, DispatchKeySet
from torch._C import _dispatch_get_registrations_for_dispatch_key as operators_with_kernel
from torch._C import _dispatch_tls_set_dispatch_key_excluded as exclude_dispatch_key
from torch._C import _dispatch_tls_set_dispatch_key_included as include_dispatch_key
from torch._C import _ExcludeDispatchKeyGuard as ExcludeDispatchKeys
from torch._C import _len_torch_dispatch_stack as number_of_dispatch_modes
from torch._C._autograd import CreationMeta
from torch._C._distributed_c10d import AllgatherOptions, FakeProcessGroup, HashStore, ReduceScatterOptions
from torch._C._distributed_c10d import _register_handler as answer_debug_page
from torch._C._functorch import peek_interpreter_stack as current_transform
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as outside_transforms
from torch.autograd import profiler as torch_profiler
from torch.autograd.graph import Node
from torch.distributed import _state_dict_utils as torch_gathers
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed._composable import replicate_with_fsdp as torch_replicate
from torch.distributed._composable.contract import REGISTRY_KEY as composable_registry
from torch.distributed._composable_state import _module_state_mapping as module_states
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard as ShardOfTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import _common_utils as torch_common_utils
from torch.distributed.fsdp import _flat_param as torch_flat_param
from torch.distributed.fsdp import _fully_shard as torch_fully_shard
from torch.distributed.fsdp import _runtime_utils as torch_runtime_utils
from torch.distributed.fsdp import _traversal_utils as torch_traversal_utils
from torch.distributed.fsdp import _unshard_param_utils as torch_unshard_utils
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState as UseOfUnit
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ParamModuleInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, FSDPStateContext
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

try:
    from torch._C._distributed_c10d import _dump_nccl_trace_json as dump_flight_records  # type: ignore[attr-defined]
except ImportError:  # a build without NCCL
    from torch._C._distributed_c10d import _dump_fr_trace_json as dump_flight_records  # type: ignore[attr-defined]

PURPOSES = {
    "torch.autograd.Variable._execution_engine": "to be called at the end of a backward",
    "torch.autograd._engine_run_backward": "names units in errors that reach only who calls a backward",
    "torch.autograd.profiler._is_profiler_enabled": "whether ranges of units would be recorded",
    "torch._C._autograd._top_saved_tensors_default_hooks": "whose hooks see what autograd saves",
    "torch._C._storage_Use_Count": "whether anything but autograd holds an activation",
    "torch._C._current_graph_task_id": "which backward runs in this thread, if any",
    "torch._C._will_engine_execute_node": "which leaves and inputs the running backward will reach",
    "torch.autograd.graph.Node._sequence_nr": "which of two outputs was made first",
    "torch.autograd.graph._allow_mutation_on_saved_tensors_enabled": "whether it copies what is written to",
    "torch._C._autograd._unsafe_set_version_counter": "lets autograd refuse leaves whose memory is freed",
    "torch._C._autograd._get_creation_meta": "whether autograd lets anyone edit a view in place",
    "torch._C._autograd.CreationMeta": "whether autograd lets anyone edit a view in place",
    "torch.optim.Optimizer._optimizer_step_pre_hooks": "steps that an audit cannot repeat",
    "torch.optim.Optimizer._optimizer_step_post_hooks": "steps that an audit cannot repeat",
    "torch.nn.Module._forward_hooks": "modules whose forward an audit cannot repeat",
    "torch.nn.Module._forward_pre_hooks": "modules whose forward an audit cannot repeat",
    "torch.nn.Module._backward_hooks": "modules whose forward an audit cannot repeat",
    "torch.nn.Module._backward_pre_hooks": "modules whose forward an audit cannot repeat",
    "torch._C._swap_tensor_impl": "gives a parameter on the meta device its values and keeps its identity",
    "torch.Tensor._make_subclass": "makes `FlatParameter`s",
    "torch.Tensor._make_wrapper_subclass": "makes `IntervalTensor`s, which have no memory of their own",
    "torch._C._disabled_torch_function_impl": "keeps what operators return for `IntervalTensor`s as it is",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": "which tensors are made of others",
    "torch.Tensor._version": "whether a gradient, parameter or leaf was written since we last saw it",
    "torch.Tensor._has_grad_dtype_override": "whether a user has set `grad_dtype`; from 2.15 on",
    "torch.Tensor._base": "whether a parameter or an output is a view of another tensor",
    "torch.Tensor._backward_hooks": "refuses parameters with hooks that would never be called; hooks outputs",
    "torch.autograd.Function._register_hook_dict": "hooks outputs without the cost of `register_hook`",
    "torch.autograd.Function._sequence_nr": "whether a node is older than a forward call",
    "torch.Tensor._post_accumulate_grad_hooks": "refuses such hooks of parameters, calls those of shards",
    "torch.UntypedStorage._cdata": "whether two tensors share memory",
    "torch.UntypedStorage._swap_data_ptr_": "lends a buffer memory that other ranks see; without, over gloo",
    "torch.optim.AdamW._init_group": "whether a subclass makes state of its own",
    "torch._foreach_copy_": "many small copies in one call",
    "torch._foreach_zero_": "many small fills in one call",
    "torch._foreach_mul_": "scales many gradients in one call",
    "torch._foreach_lerp": "means of many tensors in one call",
    "torch._foreach_lerp_": "likewise, in place",
    "torch._foreach_add_": "adds many tensors in one call",
    "torch._foreach_norm": "norms of many gradients in one call",
    "torch._chunk_cat": "writes gradients into the reduce buffer, cut by ranks, in one call",
    "torch.ops.aten._to_copy": "the operator of `to()`, for `IntervalTensor`s",
    "torch.ops.aten._pin_memory": "the operator of `pin_memory()`, for `IntervalTensor`s",
    "torch.utils._pytree": "walks the arguments and results of modules, and state",
    "torch._C._len_torch_dispatch_stack": "whether something like CommDebugMode counts",
    "torch._C._functorch.peek_interpreter_stack": "whether a transform of `torch.func` runs",
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack": "lets us write buffers in one",
    "torch.nn.Parameter._is_param": "lets copies of parameters pass for such, in transforms",
    "torch._dynamo.trace_rules": "keeps torch.compile out of the runtime's frames",
    "torch.nn.Module._parameters": "shows leaves or sharded parameters without the cost of setattr",
    "torch.nn.Module._buffers": "casts buffers in place, and saves and loads them",
    "torch.nn.Module._modules": "walks and rewrites trees of modules",
    "torch.nn.Module._non_persistent_buffers_set": "which buffers are not part of a state dict",
    "torch.nn.Module._state_dict_hooks": "calls users' hooks where we save a state dict ourselves",
    "torch.nn.Module._state_dict_pre_hooks": "calls users' hooks where we save a state dict ourselves",
    "torch.nn.Module._load_state_dict_pre_hooks": "whether a module changes what it loads",
    "torch.nn.Module._load_state_dict_post_hooks": "whether a module changes what it has loaded",
    "torch.nn.Module._load_from_state_dict": "whether a module loads in a way of its own",
    "torch.nn.Module._apply": "moves and casts of wrapped modules go to the shards",
    "torch.nn.MultiheadAttention._reset_parameters": "initialises it from the meta device",
    "torch.nn.modules.module._IncompatibleKeys": "the result of `load_state_dict`",
    "torch.nn.modules.batchnorm._NormBase": "its way of loading needs no full parameters",
    "torch._C._distributed_c10d.AllgatherOptions": "gathers without the cost of torch's function",
    "torch._C._distributed_c10d.ReduceScatterOptions": "reductions without the cost of torch's function",
    "torch._C._distributed_c10d.FakeProcessGroup": "shows counting modes the collectives in shared memory",
    "torch._C._distributed_c10d.HashStore": "shows counting modes the collectives in shared memory",
    "torch._C._distributed_c10d.FakeProcessGroup._create_internal": "makes one",
    "torch._C._distributed_c10d.Backend.Options._timeout": "how long a group's collectives may take",
    "torch._C._distributed_c10d._register_handler": "answers torch's debug page",
    "torch.distributed.debug._frontend": "a page of torch's debug server",
    "torch._C._distributed_c10d._dump_fr_trace_json": "the records of torch's flight recorder",
    "torch._C._distributed_c10d._dump_nccl_trace_json": "the records of NCCL's, where torch has NCCL",
    "torch.distributed._symmetric_memory": "NCCL's symmetric memory, for buffers that travel",
    "torch.distributed.ProcessGroup._allgather_base": "gathers, up to torch 2.12",
    "torch.distributed.ProcessGroup._reduce_scatter_base": "reductions, up to torch 2.12",
    "torch.distributed.ProcessGroup._device_types": "on which devices a group can communicate",
    "torch.distributed.ProcessGroup._get_backend": "how long a group's collectives may take",
    "torch.distributed.ProcessGroup._register_backend": "makes the group that counting modes see",
    "torch.distributed.ProcessGroup._set_default_backend": "makes the group that counting modes see",
    "torch.distributed.distributed_c10d._world": "whether a group was destroyed",
    "torch.distributed.device_mesh.DeviceMesh._pg_registry": "kept meshes must not keep groups alive",
    "torch.distributed.distributed_c10d._get_default_store": "settings and addresses that ranks exchange",
    "torch.distributed.distributed_c10d._get_object_coll_device": "where pickled objects travel from",
    "torch.distributed.tensor._dtensor_spec.DTensorSpec": "makes `DTensor`s of shards without communication",
    "torch.distributed.tensor._dtensor_spec.TensorMeta": "makes `DTensor`s of shards without communication",
    "torch.distributed._functional_collectives.AsyncCollectiveTensor": "gradients that are on their way",
    "torch.distributed.device_mesh.DeviceMesh._concatenate": "the mesh of shards of distributed parameters",
    "torch.distributed.device_mesh.DeviceMesh._flatten": "one dimension of several over which is sharded",
    "torch.distributed.tensor.placement_types._StridedShard": "how shards of distributed parameters lie",
    "torch.distributed.tensor.debug._clear_sharding_prop_cache": "ends what a plan's meshes have left",
    "torch._C._TorchDispatchModeKey": "whether a `DTensor` asks for shapes, by fake tensors, in a plan",
    "torch.ops.aten._scaled_dot_product_flash_attention": "attention in parts, in a plan",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "attention in parts, in a plan",
    "torch.ops.aten._scaled_dot_product_efficient_attention": "attention in parts, in a plan",
    "torch.ops.aten._foreach_copy_": "what fills a buffer, in a plan",
    "torch.ops.aten._chunk_cat": "what fills a buffer, in a plan",
    "torch._ops.OpOverload._schema": "which operator it is and what it writes to, in a plan",
    "torch._C.ScriptObject._type": "which argument of a collective is its group, in a plan",
    "torch.utils._python_dispatch.TorchDispatchMode": "sees every operator, in a plan",
    "torch._C._get_dispatch_mode": "whether a `DTensor` asks for shapes, by fake tensors, in a plan",
    "torch._C._autograd._push_saved_tensors_default_hooks": "hooks of saved tensors, in a plan",
    "torch._C.DispatchKey": "where torch keeps the rules of autocast, in a plan",
    "torch._C.DispatchKeySet": "which kernels an operator goes through, in a plan",
    "torch._C._ExcludeDispatchKeyGuard": "runs operators as autocast has changed them, in a plan",
    "torch._C._dispatch_get_registrations_for_dispatch_key": "operators with a rule of autocast, in a plan",
    "torch._C._dispatch_tls_set_dispatch_key_excluded": "shows a plan the operators under autocast",
    "torch._C._dispatch_tls_set_dispatch_key_included": "shows a plan the operators under autocast",
    "torch._C.DisableTorchFunction": "lets a plan look at tensors as they are",
    "torch._C.DisableTorchFunctionSubclass": "reads gradients of many `DTensor`s in a third of the time",
    "torch._C._has_storage": "which tensors have memory",
    "torch.distributed.algorithms.join.Joinable._join_config": "whether the `Join` around is enabled",
    "torch.distributed.tensor.DTensor._local_tensor": "the shard without `to_local`'s cost",
    "torch.distributed.tensor.DTensor._spec": "makes a `DTensor` that lies as another one",
    "torch.distributed._composable.contract.REGISTRY_KEY": "marks what is sharded, finds `replicate()`",
    "torch.distributed._composable.replicate_with_fsdp": "the names of `replicate`, which `compat` rebinds",
    "torch.distributed._shard.sharded_tensor.api.ShardedTensor": "reads state dicts of torch's wrapper",
    "torch.distributed._shard.sharded_tensor.api.ShardedTensor._process_group": "gathers one",
    "torch.distributed._shard.sharded_tensor.shard.Shard": "tells of pieces as a `ShardedTensor` would",
    "torch.distributed.checkpoint._nested_dict.unflatten_state_dict": "undoes what DCP does to state dicts",
    "torch.distributed.checkpoint.utils._DistWrapper": "saves by our plans, with DCP's errors",
    "torch.distributed.checkpoint.state_dict_loader._load_state_dict": "loads in a group of our choice",
    "torch.distributed.checkpoint.filesystem._StoragePrefix": "names the files of a rank in its plan",
    "torch.distributed.checkpoint.filesystem._StorageInfo": "is admitted when metadata are unpickled",
    "torch.serialization._get_layout": "is admitted when metadata are unpickled",
    "torch.distributed.checkpoint.filesystem._StorageWriterTransforms": "sums up bytes on their way",
    "torch.distributed.fsdp.MixedPrecision._module_classes_to_ignore": "a field of what we take",
    "torch.distributed.fsdp.ShardedStateDictConfig._use_dtensor": "a field of what we take",
    "torch.distributed.fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2": "a strategy that programs name",
    "torch.distributed.fsdp._common_utils": "where programs find helpers of the wrapper",
    "torch.distributed.fsdp._common_utils._FSDPDeviceHandle": "the type of a wrapper's `_device_handle`",
    "torch.distributed.fsdp._common_utils._get_module_fsdp_state": "answers for our wrappers",
    "torch.distributed.fsdp._flat_param": "the named tuples and enums of flat parameters and handles",
    "torch.distributed.fsdp._flat_param._ShardParamInfo": "the part of a parameter in this rank's shard",
    "torch.distributed.fsdp._runtime_utils": "where programs find helpers of the wrapper",
    "torch.distributed.fsdp._runtime_utils._lazy_init": "answers for our wrappers",
    "torch.distributed.fsdp._runtime_utils._post_backward_final_callback": "answers for our wrappers",
    "torch.distributed.fsdp._runtime_utils._reshard": "answers for our wrappers",
    "torch.distributed.fsdp._runtime_utils._root_pre_forward": "answers for our wrappers",
    "torch.distributed.fsdp._traversal_utils": "where programs find helpers of the wrapper",
    "torch.distributed.fsdp._traversal_utils._get_fsdp_handles": "answers for our wrappers",
    "torch.distributed.fsdp._traversal_utils._get_fsdp_states": "finds the wrappers of both libraries",
    "torch.distributed.fsdp._unshard_param_utils": "where programs find helpers of the wrapper",
    "torch.distributed.fsdp._unshard_param_utils._unshard_params": "answers for our wrappers",
    "torch.distributed.fsdp._unshard_param_utils._unshard_params_for_summon": "answers for our wrappers",
    "torch.distributed.fsdp._fully_shard": "the names of FSDP2, which `compat` leaves alone or rebinds",
    "torch.distributed.fsdp._fully_shard._fsdp_common.DDPMeshInfo": "tells programs of a unit's mesh",
    "torch.distributed.fsdp._fully_shard._fsdp_common.FSDPMeshInfo": "tells programs of a unit's mesh",
    "torch.distributed.fsdp._fully_shard._fsdp_common.HSDPMeshInfo": "tells programs of a unit's mesh",
    "torch.distributed.fsdp._fully_shard._fsdp_common.TrainingState": "tells programs what a unit does",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam": "as what programs read parameters",
    "torch.distributed.fsdp._fully_shard._fsdp_param.ParamModuleInfo": "tells programs who shows a parameter",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup": "as what programs read units",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState": "as what programs read units",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPStateContext": "as what programs read trees",
    "torch.distributed.checkpoint.state_dict._state_dict_fn": "a method below torch's patch, which calls us",
    "torch.distributed.checkpoint.state_dict._verify_options": "finds our modules by their clean names",
    "torch.distributed.checkpoint.state_dict._get_model_state_dict": "asks our wrapper, where there is one",
    "torch.distributed.checkpoint.state_dict._get_optim_state_dict": "asks our wrapper, where there is one",
    "torch.distributed.checkpoint.state_dict._load_model_state_dict": "asks our wrapper, where there is one",
    "torch.distributed.checkpoint.state_dict._load_optim_state_dict": "asks our wrapper, where there is one",
    "torch.distributed.checkpoint.state_dict._distribute_state_dict": "cuts what torch cannot scatter",
    "torch.distributed._state_dict_utils": "torch's gathers of whole state dicts",
    "torch.distributed._state_dict_utils._iterate_state_dict": "gathers pieces, with torch 2.11",
    "torch.distributed._composable_state._module_state_mapping": "has our units, in `compat`",
    "torch.distributed.pipelining.stage._PipelineStageBase": "lets stages split the backward of our units",
}
"""The purpose of each name, by its path."""

execution_engine = torch.autograd.Variable._execution_engine
graph_task = torch._C._current_graph_task_id
"""Returns the id of the backward that runs in this thread, or -1."""
has_storage = torch._C._has_storage
"""Returns whether a tensor has memory of its own, and is not made of others."""
storage_use_count = torch._C._storage_Use_Count
top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
will_execute = torch._C._will_engine_execute_node
made_by = torch._C._autograd._get_creation_meta
"""Returns what kind of code has made a view."""
EDITABLE = CreationMeta.DEFAULT
"""The only kind whose views autograd lets anyone edit in place."""
set_version_counters = torch._C._autograd._unsafe_set_version_counter
swap_tensor_impl = torch._C._swap_tensor_impl
no_torch_function = torch._C._disabled_torch_function_impl
make_subclass = torch.Tensor._make_subclass
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_lerp = torch._foreach_lerp
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_zero_ = torch._foreach_zero_
chunk_cat = torch._chunk_cat
to_copy_operator = torch.ops.aten._to_copy.default
pin_memory_operator = torch.ops.aten._pin_memory.default
object_device_of = dist.distributed_c10d._get_object_coll_device
default_store = dist.distributed_c10d._get_default_store
get_layout = torch.serialization._get_layout
concatenated_mesh = DeviceMesh._concatenate
flattened_mesh = DeviceMesh._flatten


# Functions of C: every step asks these.
groups_alive: Callable[[], Any] = partial(getattr, dist.distributed_c10d, "_world")
"""Returns an object whose `pg_map` has the process groups that were not destroyed, of this thread's ranks."""

profiler_runs: Callable[[], bool] = partial(getattr, torch_profiler, "_is_profiler_enabled")
"""Returns whether `torch.profiler` is active."""


def hook_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Does what `register_hook` does in a fifth of the time; nothing can remove the hook."""
    if tensor._backward_hooks is None:
        tensor._backward_hooks = OrderedDict()
        if tensor.grad_fn is not None:
            tensor.grad_fn._register_hook_dict(tensor)
    tensor._backward_hooks[id(hook)] = hook


def copies_before_writes() -> bool:
    """Whether `torch.autograd.graph.allow_mutation_on_saved_tensors` copies tensors that are written to."""
    return torch.autograd.graph._allow_mutation_on_saved_tensors_enabled


def will_run(nodes: Iterable[Node]) -> int:
    """Counts the nodes that the running backward will execute."""
    try:
        return sum(map(will_execute, nodes))
    except RuntimeError:  # leaves captured by torch.autograd.grad are not executed
        return 0


def optimizers_in_backward(param: torch.Tensor) -> list[torch.optim.Optimizer]:
    """Returns the optimizers that `_apply_optimizer_in_backward` has noted on a parameter."""
    return getattr(param, "_in_backward_optimizers", [])


def trace_rules() -> Any:
    """Returns dynamo's rules for tracing. Late, since the import is slow."""
    from torch._dynamo import trace_rules as rules

    return rules


def own_method(owner: Any, name: str) -> Callable[..., Any]:
    """Returns a method below the one with which torch may have patched it. Late, since the import is slow."""
    from torch.distributed.checkpoint.state_dict import _state_dict_fn

    return _state_dict_fn(owner, name)


def clear_sharding_caches() -> None:
    """Clears the results and meshes that `DTensor` caches. Late, since the import is slow."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def shapes_are_asked() -> bool:
    """Whether operators run on fake tensors, by which `DTensor`s ask for shapes."""
    return get_dispatch_mode(dispatch_mode_keys.FAKE) is not None


get_dispatch_mode, dispatch_mode_keys = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
flash_attention_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention
aten = torch.ops.aten
copying_operators = frozenset((aten.copy_, aten.add_, aten._to_copy, aten._foreach_copy_, aten._chunk_cat))
"""Operators that fill buffers, or copy from one device to another."""


push_saved_tensor_hooks = torch._C._autograd._push_saved_tensors_default_hooks


@contextmanager
def replaced_saved_tensor_hooks(push: Callable[..., None]) -> Iterator[None]:
    """Lets `saved_tensors_hooks` call something else to begin while the context is open."""
    before = torch._C._autograd._push_saved_tensors_default_hooks
    torch._C._autograd._push_saved_tensors_default_hooks = push
    try:
        yield
    finally:
        torch._C._autograd._push_saved_tensors_default_hooks = before


def debug_page() -> Any:
    """Returns what pages of torch's debug server are made of. Late, since it needs packages of its own."""
    from torch.distributed.debug import _frontend

    return _frontend


def pipeline_stage() -> Any:
    """Returns the base class of torch's pipeline stages. Late, since the import is slow."""
    from torch.distributed.pipelining.stage import _PipelineStageBase

    return _PipelineStageBase
