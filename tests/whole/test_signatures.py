"""The public names, signatures and defaults are torch's."""

from __future__ import annotations

import dataclasses
import inspect
from enum import Enum

import pytest
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


OURS_ALONE = "shared_memory"
"""The one argument that torch does not have; by keyword only."""


@pytest.mark.parametrize(
    "name",
    [
        "__init__",
        "clip_grad_norm_",
        "flatten_sharded_optim_state_dict",
        "fsdp_modules",
        "full_optim_state_dict",
        "get_state_dict_type",
        "no_sync",
        "register_comm_hook",
        "optim_state_dict",
        "optim_state_dict_to_load",
        "rekey_optim_state_dict",
        "scatter_full_optim_state_dict",
        "set_state_dict_type",
        "shard_full_optim_state_dict",
        "sharded_optim_state_dict",
        "state_dict_type",
        "summon_full_params",
    ],
)
def test_signatures_equal_those_of_torch(name):
    ours = getattr(FullyShardedDataParallel, name)
    shared = [each for each in parameters(ours) if each[0] != OURS_ALONE]
    assert shared == parameters(getattr(torch_fsdp.FullyShardedDataParallel, name))


def test_the_scaler_is_made_like_that_of_torch():
    assert parameters(ShardedGradScaler) == parameters(TorchShardedGradScaler)


@pytest.mark.parametrize("name", [name for name in api.__all__ if issubclass(getattr(api, name), Enum)])
def test_enums_equal_those_of_torch(name):
    def members(enum: type[Enum]) -> list[tuple[str, object]]:
        return [(member.name, member.value) for member in enum]

    assert members(getattr(api, name)) == members(getattr(torch_fsdp, name))


OF_LATER_TORCH = {("MixedPrecisionPolicy", "param_dtype_override_fn")}
"""What the oldest supported torch has not got, and is offered on it all the same."""


@pytest.mark.parametrize(
    "name", [name for name in api.__all__ if dataclasses.is_dataclass(getattr(api, name))]
)
def test_configurations_equal_those_of_torch(name):
    def fields(cls: type) -> list[tuple[str, object]]:
        return [(field.name, field.default) for field in dataclasses.fields(cls)]

    theirs, ours = fields(getattr(torch_fsdp, name)), fields(getattr(api, name))
    assert [each for each in ours if each in theirs or (name, each[0]) not in OF_LATER_TORCH] == theirs


def test_both_kinds_of_api_objects_are_compared():
    kinds = {issubclass(getattr(api, name), Enum) for name in api.__all__}
    assert kinds == {True, False}


def test_public_names_of_torch_have_the_same_paths():
    assert fsdp_wrap.fully_sharded_data_parallel.FullyShardedDataParallel is FullyShardedDataParallel
    assert fsdp_wrap.api.ShardingStrategy is fsdp_wrap.ShardingStrategy
    assert set(torch_wrap.__all__) <= set(wrap.__all__)
    for name in (*api.__all__, "FullyShardedDataParallel"):
        if hasattr(torch_fsdp.fully_sharded_data_parallel, name):
            assert hasattr(fsdp_wrap.fully_sharded_data_parallel, name), name
