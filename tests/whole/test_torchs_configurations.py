"""Torch's enums and configurations are ours, or ours are subclasses of them; both are taken everywhere."""

import copy
import itertools
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed._composable import replicate_with_fsdp as replicating
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import wrap as torch_wrap
from torch.distributed.tensor import distribute_module

import fsdp_wrap
from bed import ranks
from bed.accelerator import run_simulated
from fsdp_wrap import FSDPModule, ReplicateModule, api, fully_shard, fully_sharded_data_parallel, replicate
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap._runtime import units_in
from nets import WIDTH, Block, Net, net
from state_nets import assert_tensors

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64

EXTENDED = {"CPUOffload", "CPUOffloadPolicy", "MixedPrecisionPolicy"}
"""Classes to which we add fields."""

OF_BOTH = [
    *torch_fsdp.api.__all__,
    "OptimStateKeyType",
    "OffloadPolicy",
    "CPUOffloadPolicy",
    "MixedPrecisionPolicy",
]

Dims = getattr(torch_fsdp, "DataParallelMeshDims", fsdp_wrap.DataParallelMeshDims)  # torch 2.11 has none


def test_names_are_torchs_own_or_subclasses_of_them():
    for name in OF_BOTH:
        ours, theirs = getattr(fsdp_wrap, name), getattr(torch_fsdp, name)
        assert ours is getattr(api, name) and issubclass(ours, theirs)
        assert (ours is theirs) == (name not in EXTENDED), name
        assert ours.__module__.startswith("fsdp_wrap.api" if name in EXTENDED else "torch.distributed.fsdp")
        assert getattr(fully_sharded_data_parallel, name, ours) is ours
    assert fsdp_wrap.DataParallelMeshDims is Dims


ARGUMENTS: list[tuple[str, tuple[Any, ...], tuple[Any, ...], dict[str, Any]]] = [
    ("MixedPrecisionPolicy", (), (BF16,), {"param_dtype_override_fn": len}),
    ("MixedPrecisionPolicy", (BF16, FP32, FP64, False), (BF16, FP32, FP64), {"param_dtype_override_fn": len}),
    ("CPUOffload", (), (True,), {"offload_optimizer_state": True}),
    ("CPUOffload", (True,), (False,), {"offload_optimizer_state": True}),
    ("CPUOffloadPolicy", (), (False,), {"offload_optimizer_state": True}),
    ("CPUOffloadPolicy", (False,), (True,), {"offload_params": False, "offload_optimizer_state": True}),
]
"""The name of a class, arguments, other arguments, and fields of ours."""


@pytest.mark.parametrize(("name", "given", "others", "added"), ARGUMENTS)
def test_ours_and_torchs_are_equal_where_their_fields_are(name, given, others, added):
    kind, theirs = getattr(fsdp_wrap, name), getattr(torch_fsdp, name)(*given)
    ours = kind(*given)
    for twin in (ours, theirs):
        for made in (twin, copy.copy(twin), copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
            assert type(made) is type(twin)
            assert made == ours and ours == made and made == theirs and theirs == made
            assert not (made != ours or ours != made or made != theirs or theirs != made)
            assert [ours].index(made) == [theirs].index(made) == 0
    different = [kind(*others), getattr(torch_fsdp, name)(*others), kind(*given, **added), object()]
    for one, other in itertools.product((ours, theirs), different):
        assert one != other and other != one
    assert ours == mock.ANY and kind(*given, **added) == kind(*given, **added)
    if name == "MixedPrecisionPolicy":  # the others have no hash
        assert {ours: 1}[theirs] == {theirs: 1}[ours] == 1 and len({ours, theirs, kind(*others)}) == 2
    else:
        assert kind.__hash__ is None
    assert fsdp_wrap.CPUOffloadPolicy() != torch_fsdp.OffloadPolicy() != fsdp_wrap.CPUOffloadPolicy()


def of_our_class(name: str, state: str) -> bytes:
    """A configuration's pickle as earlier versions of this package wrote it, with classes of their own."""
    made = f"ccopy_reg\n_reconstructor\n(cfsdp_wrap.api\n{name}\nc__builtin__\nobject\nNtR(d{state}b."
    return made.encode()


BEFORE: dict[bytes, Any] = {
    b"cfsdp_wrap.api\nShardingStrategy\n(I3\ntR.": torch_fsdp.ShardingStrategy.NO_SHARD,
    b"cfsdp_wrap.api\nBackwardPrefetch\n(I2\ntR.": torch_fsdp.BackwardPrefetch.BACKWARD_POST,
    b"cfsdp_wrap.api\nStateDictType\n(I3\ntR.": torch_fsdp.StateDictType.SHARDED_STATE_DICT,
    b"cfsdp_wrap.api\nOptimStateKeyType\n(I2\ntR.": torch_fsdp.OptimStateKeyType.PARAM_ID,
    of_our_class("CPUOffload", "Voffload_params\nI01\nsVoffload_optimizer_state\nNs"): torch_fsdp.CPUOffload(
        True
    ),
    of_our_class("FullStateDictConfig", "Voffload_to_cpu\nI00\nsVrank0_only\nI01\ns"): (
        torch_fsdp.FullStateDictConfig(rank0_only=True)
    ),
}


def test_pickles_of_earlier_versions_load():
    for data, expected in BEFORE.items():
        loaded = pickle.loads(data)
        assert loaded == expected and expected == loaded and isinstance(loaded, type(expected))


# programs that change one import


def batches(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, WIDTH, generator=generator, dtype=FP64) for _ in range(2)]


def train(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for batch in batches(rank):
        optimizer.zero_grad()
        model(batch).double().square().sum().backward()
        optimizer.step()
    return optimizer


def wrapper_program(wrapper: Any, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A program for torch's wrapper: all but the wrapper is torch's."""
    precision = torch_fsdp.MixedPrecision(FP32, FP64, cast_forward_inputs=True)
    chosen = {"mixed_precision": precision, "backward_prefetch": torch_fsdp.BackwardPrefetch.BACKWARD_POST}
    model = wrapper(
        net(),
        sharding_strategy=torch_fsdp.ShardingStrategy.SHARD_GRAD_OP,
        cpu_offload=torch_fsdp.CPUOffload(offload_params=False),
        auto_wrap_policy=torch_wrap.CustomPolicy(lambda module: isinstance(module, Block) and chosen),
        backward_prefetch=torch_fsdp.BackwardPrefetch.BACKWARD_PRE,
        mixed_precision=precision,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    assert model.sharding_strategy is torch_fsdp.ShardingStrategy.SHARD_GRAD_OP
    assert model.cpu_offload == torch_fsdp.CPUOffload() and model.blocks[0].mixed_precision is precision
    optimizer = train(model, rank)
    # With offload_to_cpu, torch's gives wrong values on a CPU.
    configs: list[Any] = [torch_fsdp.FullStateDictConfig(), torch_fsdp.FullOptimStateDictConfig(False)]
    with wrapper.state_dict_type(model, torch_fsdp.StateDictType.FULL_STATE_DICT, *configs):
        settings = wrapper.get_state_dict_type(model)
        assert settings == torch_fsdp.StateDictSettings(torch_fsdp.StateDictType.FULL_STATE_DICT, *configs)
        state, of_optimizer = model.state_dict(), wrapper.optim_state_dict(model, optimizer)
    kind = torch_fsdp.StateDictType.SHARDED_STATE_DICT
    configs = [torch_fsdp.ShardedStateDictConfig(), torch_fsdp.ShardedOptimStateDictConfig()]
    wrapper.set_state_dict_type(model, kind, *configs)
    assert isinstance(wrapper.get_state_dict_type(model).state_dict_config, torch_fsdp.ShardedStateDictConfig)
    kind = torch_fsdp.StateDictType.LOCAL_STATE_DICT
    configs = [torch_fsdp.LocalStateDictConfig(), torch_fsdp.LocalOptimStateDictConfig()]
    assert wrapper.set_state_dict_type(model, kind, *configs).state_dict_type is not kind
    numbers = wrapper.rekey_optim_state_dict(of_optimizer, torch_fsdp.OptimStateKeyType.PARAM_ID, model)
    return state, numbers["state"]


@ranks(2)
def test_a_program_for_torchs_wrapper_changes_one_import(rank, world_size):
    ours, theirs = (wrapper_program(wrapper, rank) for wrapper in (FSDP, torch_fsdp.FullyShardedDataParallel))
    for one, other in zip(ours, theirs, strict=True):
        assert_tensors(one, other, rtol=1e-5, atol=1e-6)


def composable_program(shard: Any, kind: Any, rank: int) -> dict[str, torch.Tensor]:
    """A program for `fully_shard` or `replicate` of torch: all but the function is torch's."""
    model: Any = net()
    precision = torch_fsdp.MixedPrecisionPolicy(FP32, FP64, output_dtype=FP64)
    for block in model.blocks:
        shard(block, mp_policy=precision, offload_policy=torch_fsdp.OffloadPolicy())
    shard(model)
    assert isinstance(model, kind)
    train(model, rank)
    return {name: param.full_tensor() for name, param in model.named_parameters()}


@ranks(2)
def test_a_program_for_fully_shard_changes_one_import(rank, world_size):
    for ours, theirs, kinds in (
        (fully_shard, torch_fsdp.fully_shard, (FSDPModule, torch_fsdp.FSDPModule)),
        (replicate, replicating.replicate, (ReplicateModule, replicating.ReplicateModule)),
    ):
        results, expected = (
            composable_program(shard, kind, rank) for shard, kind in zip((ours, theirs), kinds, strict=True)
        )
        assert_tensors(results, expected, rtol=1e-5, atol=1e-6)


# what torch's tell


COMPOSABLE: tuple[Any, ...] = (fully_shard, replicate)


def offloaded(model: nn.Module) -> bool:
    (sharded,) = (sharded for unit in units_in(model).values() for sharded in unit.params)
    return sharded.offloaded


class Told(torch_fsdp.CPUOffloadPolicy):
    """A program's subclass, with an attribute of its own."""

    def __init__(self) -> None:
        super().__init__(pin_memory=False)
        self.reason = "the host has room"


def test_torchs_policies_offload_as_ours():
    """On a simulated accelerator, since on a CPU nothing is elsewhere."""
    rows: list[list[bool]] = []

    def program(rank: int, device: Any) -> None:
        for library in (fsdp_wrap, torch_fsdp):
            for offloads in (True, False):
                wrapped = FSDP(Net(), cpu_offload=library.CPUOffload(offload_params=offloads))
                assert wrapped.cpu_offload == torch_fsdp.CPUOffload(offloads)
                policies = (
                    (library.CPUOffloadPolicy(), Told()) if offloads else (library.OffloadPolicy(), None)
                )
                composed = [
                    shard(Net(), offload_policy=policy) for shard in COMPOSABLE for policy in policies
                ]
                rows.append([offloads, *(offloaded(model) for model in (wrapped, *composed))])

    run_simulated(2, program)
    assert len(rows) == 8 and all(told == 5 * [offloads] for offloads, *told in rows)


@ranks(2)
def test_torchs_policies_cast_as_ours(rank, world_size):
    for library, shard in itertools.product((fsdp_wrap, torch_fsdp), COMPOSABLE):
        model: Any = shard(Net(), mp_policy=library.MixedPrecisionPolicy(BF16, output_dtype=FP32))
        assert model(torch.ones(1, WIDTH)).dtype == FP32
        model.unshard()
        assert model.head.weight.dtype == BF16


@ranks(2)
def test_dimensions_of_torchs(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model: Any = distribute_module(nn.Linear(4, 4), mesh)
    fully_shard(model, mesh=mesh, dp_mesh_dims=Dims(shard="dp"))
    assert model.weight.to_local().shape == (2, 4)


# what is still refused


class MixedPrecision:
    """Of another library."""


class CPUOffloadPolicy:
    """Of another library."""


Refusals = list[tuple[dict[str, Any], type[Exception], str]]

INT8: Any = torch.int8

OF_THE_WRAPPER: Refusals = [
    ({"sharding_strategy": "FULL_SHARD"}, TypeError, "a ShardingStrategy or None, not 'FULL_SHARD'"),
    ({"backward_prefetch": 1}, TypeError, "a BackwardPrefetch or None, not 1"),
    ({"cpu_offload": torch_fsdp.CPUOffloadPolicy()}, TypeError, "a CPUOffload or None, not CPUOffloadPolicy"),
    ({"mixed_precision": MixedPrecision()}, TypeError, "a MixedPrecision or None, not <.*MixedPrecision"),
    ({"mixed_precision": torch_fsdp.MixedPrecision(INT8)}, ValueError, r"\(param_dtype=...\) takes .*int8"),
]
COMPOSED: Refusals = [
    ({"mp_policy": torch_fsdp.MixedPrecision()}, TypeError, "a MixedPrecisionPolicy, not MixedPrecision"),
    ({"mp_policy": None}, TypeError, "a MixedPrecisionPolicy, not None"),
    ({"mp_policy": torch_fsdp.MixedPrecisionPolicy(INT8)}, ValueError, r"\(param_dtype=...\) takes .*int8"),
    ({"offload_policy": CPUOffloadPolicy()}, TypeError, "an OffloadPolicy or None, not <"),
    ({"offload_policy": torch_fsdp.CPUOffload()}, TypeError, "an OffloadPolicy or None, not CPUOffload"),
]
FULL = torch_fsdp.StateDictType.FULL_STATE_DICT
OF_STATE_DICTS: list[tuple[tuple[Any, ...], str]] = [
    (("FULL_STATE_DICT",), "state_dict_type must be a StateDictType, not 'FULL_STATE_DICT'"),
    ((FULL, torch_fsdp.ShardedStateDictConfig()), "FULL_STATE_DICT takes a FullStateDictConfig as state"),
    ((FULL, None, torch_fsdp.FullStateDictConfig()), "takes a FullOptimStateDictConfig as optim_state"),
]


@ranks(2)
def test_what_is_neither_ours_nor_torchs_is_refused_before_anything_changes(rank, world_size):
    model = Net()
    before = list(model.parameters())
    for options, error, told in OF_THE_WRAPPER:
        policy = torch_wrap.CustomPolicy(lambda module: isinstance(module, Block) and options)  # noqa: B023
        for given in (options, {"auto_wrap_policy": policy}):
            with pytest.raises(error, match=told):
                FSDP(model, **given)
    for shard, (options, error, told) in itertools.product(COMPOSABLE, COMPOSED):
        with pytest.raises(error, match=told):
            shard(model, **options)
    assert type(model) is Net
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))

    wrapped = FSDP(model)
    for setting, (arguments, told) in itertools.product(
        (FSDP.set_state_dict_type, FSDP.state_dict_type), OF_STATE_DICTS
    ):
        with pytest.raises(TypeError, match=told):
            setting(wrapped, *arguments)
    assert FSDP.get_state_dict_type(wrapped).state_dict_config == torch_fsdp.FullStateDictConfig()
