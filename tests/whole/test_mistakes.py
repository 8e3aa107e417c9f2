"""What newcomers are told of their mistakes: an error at once, on the ranks that can know, with a cure."""

import contextlib
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh

from bed import ranks, run_ranks
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy, StateDictType, fully_shard
from fsdp_wrap._comm.calls import calling, tell_call
from fsdp_wrap._state.misfits import shown, tell_prefix
from mistakes import MISTAKES, observe
from nets import WIDTH, Net


@pytest.mark.parametrize("code", MISTAKES)
def test_a_mistake_is_told(code):
    row = MISTAKES[code]
    by_rank = dict(enumerate(run_ranks(2, observe, code)))
    told = {rank: report for rank, report in by_rank.items() if report is not None}
    assert told and (not row.ranks or tuple(told) == row.ranks), by_rank
    for report in told.values():
        assert row.kind in report.kinds, report
        assert re.search(row.says, report.line), report


class Accumulating(nn.Linear):
    """Has attributes of the names of the front-ends' methods, its own `__getattr__` among them."""

    def no_sync(self):
        return "its own"

    def __getattr__(self, name):
        return "made" if name == "clip_grad_norm_" else super().__getattr__(name)


@ranks(1)
def test_methods_of_the_other_front_end_are_not_there(rank, world_size):
    """Clients ask by `hasattr` which front-end a model is of."""
    sharded, wrapped = fully_shard(nn.Linear(2, 2)), FSDP(nn.Linear(2, 2))
    for name in ("no_sync", "clip_grad_norm_", "module", "nothing"):
        assert not hasattr(sharded, name) and getattr(sharded, name, 3) == 3
    for name in ("set_requires_gradient_sync", "set_is_last_backward", "nothing"):
        assert not hasattr(wrapped, name)
    with pytest.raises(AttributeError, match="^'FSDPLinear' object has no attribute 'nothing'$"):
        sharded.nothing  # noqa: B018
    own = fully_shard(Accumulating(2, 2))
    assert (own.no_sync(), own.clip_grad_norm_, own.weight.shape) == ("its own", "made", (2, 2))


@ranks(4)
def test_what_one_copy_alone_may_call_is_no_mistake(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2))
    hybrid = FSDP(Net(), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    whole = FSDP(Net(), sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True)
    for model, caller in ((hybrid, rank // 2 == 0), (whole, rank == 0)):
        for _ in range(2):
            model(torch.ones(2, WIDTH)).sum().backward()
            if caller:
                assert len(model.state_dict()) == 12


@ranks(2)
def test_a_state_dict_inside_summon_is_of_one_rank(rank, world_size):
    model = FSDP(Net(), use_orig_params=True)
    for _ in range(2):
        model(torch.ones(2, WIDTH)).sum().backward()
        with FSDP.summon_full_params(model, rank0_only=True, writeback=False):
            if rank == 0:
                assert len(model.state_dict()) == 12


@ranks(2)
def test_a_call_keeps_its_name_inside_of_others(rank, world_size):
    """The user's call is named, and none is once it has ended, also by an error."""
    model = FSDP(Net(), use_orig_params=True)
    positions: Any = model._unit.buffers.communicator.positions
    for error in (None, RuntimeError):
        with contextlib.suppress(RuntimeError), calling("get_model_state_dict()"):
            model.state_dict()
            assert "calls get_model_state_dict()" in str(positions.latest())
            assert tell_call(positions) == "in get_model_state_dict(), which all ranks must call: "
            if error is not None:
                raise error
        assert tell_call(positions) == ""
    model.state_dict()
    assert str(positions.latest()) == "calls state_dict() (before the first iteration)"


@ranks(2)
def test_torchs_sharded_tensors_load_without_its_warning(rank, world_size):
    model = FSDP(nn.Linear(4, 4, bias=False), use_orig_params=True)
    piece = torch.arange(8.0).view(2, 4) + 8 * rank
    shard = Shard.from_tensor_and_offsets(piece, [2 * rank, 0], rank)
    state = {"weight": init_from_local_shards([shard], 4, 4)}
    with warnings.catch_warnings(), FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        warnings.simplefilter("error")
        model.load_state_dict(state)
    assert torch.equal(model.state_dict()["weight"], torch.arange(16.0).view(4, 4))


def test_many_misfits_are_cut_and_prefixes_are_told():
    assert shown(map(str, range(10))) == [*map(str, range(10))]
    assert shown(map(str, range(13)))[-2:] == ["9", "and 3 more of this kind"]
    own = ["a.weight", "blocks.0.b"]
    for key, cure in (
        ("module.a.weight", r"consume_prefix_in_state_dict_if_present\(state_dict, 'module.'\)"),
        ("_orig_mod.a.weight", r"consume_prefix_in_state_dict_if_present\(state_dict, '_orig_mod.'\)"),
        ("blocks.0._orig_mod.b", r"name.replace\('_orig_mod.', ''\): value"),
        ("module._orig_mod.a.weight", r"name.removeprefix\('module.'\).replace\('_orig_mod.', ''\): value"),
        ("_fsdp_wrapped_module.a.weight", "'_fsdp_wrapped_module.' of FullyShardedDataParallel"),
    ):
        (told,) = tell_prefix(own, ["other", key])
        assert re.search(cure, told), told
    assert [*tell_prefix(own, ["a.submodule.weight", "module.c", "a.weight"])] == []
