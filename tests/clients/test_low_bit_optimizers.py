"""Optimizers with state in few bits, of torchao and bitsandbytes, over sharded parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh

from bed import ranks
from fronts import FRONTS, assert_same_values
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import StateDictType, checkpoint, fully_shard
from fsdp_wrap.optim import on_shards
from launch import needs

BLOCKS = 4096
"""Of so many elements parts are multiples: neither library keeps state of smaller tensors in few bits."""

pytestmark = needs("torchao")


def net() -> nn.Sequential:
    """Makes a net of two matrices, one twice as large as the other."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256, bias=False), nn.Tanh(), nn.Linear(256, 32, bias=False), nn.Tanh())


def sharded(front: str, group: dist.ProcessGroup, **options: Any) -> Any:
    model = net()
    if front == "composable":
        return fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"), **options)
    return FSDP(model, process_group=group, use_orig_params=front == "orig", **options)


def made(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "bitsandbytes":
        import bitsandbytes

        return on_shards(bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-2))
    import torchao.optim

    return getattr(torchao.optim, kind)(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """All ranks see the same batch: with 1, 2 and 4 of them, means of gradients have the bits of each."""
    for step in steps:
        batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()


@pytest.mark.left_over(4)
@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("AdamW8bit", "flat", "orig"),
        ("AdamW4bit", "orig", "composable"),
        ("AdamWFp8", "composable", "flat"),
        *(pytest.param("bitsandbytes", front, front, marks=needs("bitsandbytes")) for front in FRONTS[1:]),
    ],
)
@ranks(4)
def test_bits_do_not_depend_on_the_ranks(rank, world_size, tmp_path, kind, before, after):
    """At 1, 2 and 4 ranks they are a plain model's; what 4 saved is loaded by 1, 2 and 3, which go on."""
    plain = net()
    reference = made(kind, plain)
    train(plain, reference, range(3))
    groups: dict[int, Any] = {size: dist.new_group(range(size)) for size in (1, 2, 3, 4)}
    for size in (1, 2, 4):
        if rank < size:
            model = sharded(before, groups[size], shard_alignment=BLOCKS)
            optimizer = made(kind, model)
            train(model, optimizer, range(3))
            assert_same_values(model, plain)
    checkpoint.save(tmp_path, model, optimizer, step=3, process_group=groups[4])
    later = copy.deepcopy(plain)
    goes_on = made(kind, later)
    goes_on.load_state_dict(reference.state_dict())
    train(later, goes_on, range(3, 5))
    for size in (1, 2, 3):
        if rank < size:
            aligned = None if (after, size) == ("composable", 3) else BLOCKS  # of which 3 rows are none
            model = sharded(after, groups[size], shard_alignment=aligned)
            optimizer = made(kind, model)
            checkpoint.load(tmp_path, model, optimizer, process_group=groups[size])
            train(model, optimizer, range(3, 5))
            if size < 3:
                assert_same_values(model, later)
    dist.barrier()


def nbytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the elementwise state that this rank has."""
    values = [value for entry in optimizer.state.values() for value in entry.values() if value.dim()]
    return sum(getattr(value, "codes", value).nbytes for value in values)


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit"])
@ranks(3)
def test_state_dicts_fit_any_cut_and_optimizer(rank, world_size, tmp_path, kind):
    """Pieces are not aligned and have any length: some optimizers' state has few bits, others' all."""
    group = dist.group.WORLD
    models = {front: sharded(front, group) for front in ("flat", "orig")}
    optimizers = {front: made(kind, model) for front, model in models.items()}
    for front, model in models.items():
        train(model, optimizers[front], range(2))
    saved = FSDP.optim_state_dict(models["flat"], optimizers["flat"])
    values = saved["state"]["0.weight"]["exp_avg"]
    assert values.shape == (256, 64) and values.dtype == torch.float32
    own = next(iter(optimizers["flat"].state.values()))["exp_avg"]
    known = torch.cat([saved["state"][name]["exp_avg"].view(-1) for name in ("0.weight", "2.weight")])
    mine = known[rank * own.numel() : (rank + 1) * own.numel()]
    few = own.dequantize() if hasattr(own, "dequantize") else own
    assert torch.equal(few[: mine.numel()], mine)
    for before, after in (("flat", "orig"), ("orig", "flat")):
        for layout, save in ((before, True), (after, False)):
            model = models[layout]
            optimizer = optimizers[layout] if save else made(kind, model)
            with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                state = FSDP.optim_state_dict(model, optimizer)
                if save:
                    dcp.save(state, checkpoint_id=tmp_path / before)
                    continue
                dcp.load(state, checkpoint_id=tmp_path / before)
                optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))
            assert nbytes(optimizer) == nbytes(optimizers[layout])
            loaded = FSDP.optim_state_dict(model, optimizer)["state"]
            given = FSDP.optim_state_dict(models[before], optimizers[before])["state"]
            for name, entry in given.items():
                most = entry["exp_avg"].abs().max()
                close = (loaded[name]["exp_avg"] - entry["exp_avg"]).abs().max() / most
                assert close < (0.02 if kind == "AdamW8bit" else 0.2)
                assert loaded[name]["step"] == entry["step"]
    plain = torch.optim.AdamW(models["orig"].parameters())
    plain.load_state_dict(FSDP.optim_state_dict_to_load(models["orig"], plain, saved))
    assert {*next(iter(plain.state.values()))} == {"step", "exp_avg", "exp_avg_sq"}


@ranks(2)
def test_a_full_state_dict_is_that_of_a_plain_optimizer(rank, world_size):
    plain, model = net(), sharded("orig", dist.group.WORLD, shard_alignment=BLOCKS)
    reference, optimizer = made("AdamW8bit", plain), made("AdamW8bit", model)
    train(plain, reference, range(2))
    train(model, optimizer, range(2))
    full_state = FSDP.optim_state_dict(model, optimizer)
    again = made("AdamW8bit", plain)
    again.load_state_dict(FSDP.optim_state_dict_to_load(plain, again, full_state))
    for param, entry in reference.state.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(again.state[param][key].codes, entry[key].codes)
            assert torch.equal(again.state[param][key].scale, entry[key].scale)
    native = {"state": dict(zip(("0.weight", "2.weight"), reference.state.values())), "param_groups": []}
    native["param_groups"] = full_state["param_groups"]
    back = made("AdamW8bit", model)
    back.load_state_dict(FSDP.optim_state_dict_to_load(model, back, native))
    for param, entry in optimizer.state.items():
        assert torch.equal(back.state[param]["exp_avg"].codes, entry["exp_avg"].codes)


@pytest.mark.parametrize("full", [False, True])
@ranks(2)
def test_torchs_functions_load_what_they_have_saved(rank, world_size, tmp_path, full):
    """Sharded states have the optimizer's own tensors as their parts, full ones as a whole."""
    plain = net()
    reference = made("AdamW8bit", plain)
    train(plain, reference, range(5))
    options = StateDictOptions(full_state_dict=full)
    model = sharded("composable", dist.group.WORLD, shard_alignment=BLOCKS)
    optimizer = made("AdamW8bit", model)
    train(model, optimizer, range(3))
    saved: dict[str, Any] = dict(zip(("model", "optim"), get_state_dict(model, optimizer, options=options)))
    model = sharded("composable", dist.group.WORLD, shard_alignment=BLOCKS)
    optimizer = made("AdamW8bit", model)
    if not full:
        dcp.save(saved, checkpoint_id=tmp_path)
        saved = dict(zip(("model", "optim"), get_state_dict(model, optimizer, options=options)))
        dcp.load(saved, checkpoint_id=tmp_path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optim"],
        options=options,
    )
    train(model, optimizer, range(3, 5))
    assert_same_values(model, plain)
