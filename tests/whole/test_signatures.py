"""The public names, signatures and defaults are torch's."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from enum import Enum

from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import wrap as torch_wrap
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler

import fsdp_wrap
from fsdp_wrap import FullyShardedDataParallel, api, wrap
from fsdp_wrap.sharded_grad_scaler import ShardedGradScaler


def parameters(function: object) -> list[tuple[str, object, object]]:
    """Name, kind and default of each parameter; enum members of the two libraries compare by name."""
    signature = inspect.signature(function)  # type: ignore[arg-type]
    return [(one.name, one.kind, comparable(one.default)) for one in signature.parameters.values()]


def comparable(default: object) -> object:
    return (type(default).__name__, default.name) if isinstance(default, Enum) else default


OURS_ALONE = (
    "shared_memory",
    "travel_together_bytes",
    "keep_unsharded_bytes",
    "shard_alignment",
    "reduce_within_copy",
)
"""The arguments that torch does not have; by keyword only."""


METHODS = (
    *("__init__", "clip_grad_norm_", "flatten_sharded_optim_state_dict", "fsdp_modules"),
    *("full_optim_state_dict", "get_state_dict_type", "no_sync", "register_comm_hook", "optim_state_dict"),
    *("optim_state_dict_to_load", "rekey_optim_state_dict", "scatter_full_optim_state_dict"),
    *("set_state_dict_type", "shard_full_optim_state_dict", "sharded_optim_state_dict", "state_dict_type"),
    "summon_full_params",
)


def test_signatures_equal_those_of_torch():
    for name in METHODS:
        ours = getattr(FullyShardedDataParallel, name)
        shared = [each for each in parameters(ours) if each[0] not in OURS_ALONE]
        assert shared == parameters(getattr(torch_fsdp.FullyShardedDataParallel, name)), name
    assert parameters(ShardedGradScaler) == parameters(TorchShardedGradScaler)


def test_enums_equal_those_of_torch():
    enums = [name for name in api.__all__ if issubclass(getattr(api, name), Enum)]
    assert enums
    for name in enums:
        ours, theirs = ([(one.name, one.value) for one in getattr(each, name)] for each in (api, torch_fsdp))
        assert ours == theirs, name


OF_LATER_TORCH = {("MixedPrecisionPolicy", "param_dtype_override_fn")}
"""What the oldest supported torch has not got, and is offered on it all the same."""

FIELDS_OURS_ALONE = {
    ("CPUOffload", "offload_optimizer_state"),
    ("CPUOffloadPolicy", "offload_params"),
    ("CPUOffloadPolicy", "offload_optimizer_state"),
}
"""The fields that torch does not have; by keyword only."""


OF_MESHES = ("DataParallelMeshInfo", "DDPMeshInfo", "FSDPMeshInfo", "HSDPMeshInfo", "ShardPlacementResult")
"""What torch has, but does not export."""

NOT_IN_OLDEST = () if hasattr(torch_fsdp, "DataParallelMeshDims") else ("DataParallelMeshDims",)
CONFIGURATIONS = [
    name
    for name in api.__all__
    if dataclasses.is_dataclass(getattr(api, name)) and name not in (*OF_MESHES, *NOT_IN_OLDEST)
]


def fields(cls: type) -> list[tuple[str, object]]:
    """Returns the arguments of a configuration, and their defaults."""
    return [(field.name, field.default) for field in dataclasses.fields(cls) if field.init]


def test_configurations_equal_those_of_torch():
    more = OF_LATER_TORCH | FIELDS_OURS_ALONE
    assert CONFIGURATIONS
    for name in CONFIGURATIONS:
        theirs, ours = fields(getattr(torch_fsdp, name)), fields(getattr(api, name))
        assert [each for each in ours if each in theirs or (name, each[0]) not in more] == theirs, name
        by_keyword = {(name, each.name) for each in dataclasses.fields(getattr(api, name)) if each.kw_only}
        assert by_keyword - OF_LATER_TORCH == {each for each in FIELDS_OURS_ALONE if each[0] == name}, name


def test_infos_of_meshes_equal_those_of_torch():
    theirs = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_common")
    for name in OF_MESHES:
        if hasattr(theirs, name):  # torch 2.11 lacks one, and the last fields of the others
            expected = fields(getattr(theirs, name))
            assert fields(getattr(api, name))[: len(expected)] == expected
            assert len(expected) == 2 if name == "ShardPlacementResult" else len(expected) in (3, 5)


def test_public_names_of_torch_have_the_same_paths():
    assert fsdp_wrap.fully_sharded_data_parallel.FullyShardedDataParallel is FullyShardedDataParallel
    assert fsdp_wrap.api.ShardingStrategy is fsdp_wrap.ShardingStrategy
    assert set(torch_wrap.__all__) <= set(wrap.__all__)
    for name in (*api.__all__, "FullyShardedDataParallel"):
        if hasattr(torch_fsdp.fully_sharded_data_parallel, name):
            assert hasattr(fsdp_wrap.fully_sharded_data_parallel, name), name
