"""What any kind of model saved, `fully_shard`'s among them, goes to any other kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torchs_fully_shard

from bed import ranks
from bed.references import count_collectives
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy, checkpoint, fully_shard, iter_full_optim_state, iter_full_params
from optim_states import assert_same, by_name
from resuming import net, other, per_block_of, train, trained
from state_nets import adamw, assert_close, assert_equal


def by(fully_shard: Any) -> nn.Module:
    model: Any = net()
    for module in (*model.blocks, model):
        fully_shard(module)
    return model


@ranks(3)
def test_any_kind_of_model_loads_what_any_other_saved(rank, world_size, tmp_path):
    pair = dist.new_group([0, 1])

    def flat() -> nn.Module:
        return FSDP(net(), process_group=pair)

    def pieces() -> nn.Module:
        return per_block_of(net(), use_orig_params=True)

    def replicated() -> nn.Module:
        return per_block_of(net(), sharding_strategy=ShardingStrategy.NO_SHARD)

    theirs, ours = (partial(by, each) for each in (torchs_fully_shard, fully_shard))
    kinds: list[Callable[[], nn.Module]] = [pieces, flat, net, theirs, replicated, ours, pieces]
    for index, make in enumerate(kinds):
        group = pair if make is flat else None
        if group is not None and rank > 1:
            continue
        size = 2 if group is not None else world_size
        share = (rank, size) if make is not net else (0, 1)  # a plain model sees whole batches
        model = make()
        optimizer = adamw(model)
        if index:
            other(model)
            checkpoint.load(tmp_path / str(index - 1), model, optimizer, process_group=group)
        train(model, optimizer, *share, range(index, index + 1))  # type: ignore[call-arg]
        checkpoint.save(tmp_path / str(index), model, optimizer, process_group=group)
    plain, reference = trained(len(kinds))
    assert_close(model.state_dict(), plain.state_dict())
    assert_same(FSDP.optim_state_dict(model, optimizer), by_name(reference, plain))


@ranks(3)
def test_full_parameters_stream_and_go_to_files(rank, world_size, tmp_path):
    model, again = by(fully_shard), other(by(fully_shard))
    full = {name: param.detach() for name, param in net().named_parameters()}
    assert_equal({name: value.clone() for name, value in iter_full_params(model, budget=1)}, full)
    with pytest.raises(ValueError, match=r"'stem\.weight' was sharded by fully_shard"):
        iter_full_optim_state(model, adamw(model))
    checkpoint.export_safetensors(model, tmp_path)
    with count_collectives() as counts:
        checkpoint.import_safetensors(again, tmp_path)
    assert not counts
    assert_equal({name: value.clone() for name, value in iter_full_params(again)}, full)
