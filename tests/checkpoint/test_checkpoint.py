"""`fsdp_wrap.checkpoint`: what is saved, what appears, what is refused, and what a load leaves alone."""

from __future__ import annotations

import copy
import gc
import json
import random
import time
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from bed import ranks
from fronts import each_front, shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy, checkpoint
from fsdp_wrap.checkpoint import DamagedCheckpoint, _team
from fsdp_wrap.checkpoint._manifest import Manifest
from nets import WIDTH
from optim_states import assert_same, by_name
from resuming import Counter, full_disk, net, other, per_block_of, train, trained
from state_nets import Tied, adamw, assert_close, assert_equal


def stepped(model: nn.Module, rank: int, world_size: int, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    train(model, optimizer, rank, world_size, range(steps))
    return optimizer


def draws() -> tuple[Any, ...]:
    return torch.rand(2).tolist(), random.random(), numpy.random.rand()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# resuming


@ranks(3)
def test_resuming_in_the_same_way_is_exact_down_to_random_states(rank, world_size, tmp_path):
    model = per_block_of(net(), use_orig_params=rank >= 0)
    optimizer = stepped(model, rank, world_size)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    torch.manual_seed(rank), random.seed(rank), numpy.random.seed(rank)
    extra = {"schedule": scheduler, "data": Counter(10 * rank), "epoch": 3, "mask": torch.arange(4)[1:3]}
    folder = checkpoint.save(str(tmp_path), model, optimizer, extra, step=7)
    assert folder == tmp_path / "step_00000007" == checkpoint.latest(tmp_path)
    expected = draws()
    scheduler.step()
    train(model, optimizer, rank, world_size, range(2, 4))

    again = per_block_of(other(net()), use_orig_params=True)
    fresh = adamw(again)
    resumed = {"schedule": torch.optim.lr_scheduler.StepLR(fresh, 5), "data": Counter(0)}
    found = checkpoint.load(tmp_path, again, fresh, resumed)
    assert draws() == expected
    assert (found.step, found.folder) == (7, folder)
    assert found["epoch"] == 3 and found["mask"].tolist() == [1, 2]
    assert found["data"] is resumed["data"] and found["data"].at == 10 * rank
    resumed["schedule"].step()
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    train(again, fresh, rank, world_size, range(2, 4))
    assert_equal(again.state_dict(), model.state_dict())


@ranks(3)
def test_any_kind_of_model_loads_what_any_other_saved(rank, world_size, tmp_path):
    pair = dist.new_group([0, 1])

    def flat() -> nn.Module:
        return FSDP(net(), process_group=pair)

    def pieces() -> nn.Module:
        return per_block_of(net(), use_orig_params=True)

    def replicated() -> nn.Module:
        return per_block_of(net(), sharding_strategy=ShardingStrategy.NO_SHARD)

    def theirs() -> nn.Module:
        model: Any = net()
        for module in (*model.blocks, model):
            fully_shard(module)
        return model

    kinds = [(pieces, None), (flat, pair), (net, None), (theirs, None), (replicated, None), (pieces, None)]
    for index, (make, group) in enumerate(kinds):
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


f32, f64, i64 = torch.float32, torch.float64, torch.int64


class Odd(torch.optim.Optimizer):
    """Keeps state of dtypes and kinds that torch's `load_state_dict` changes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are left out
        for param in (each for group in self.param_groups for each in group["params"]):
            state = self.state[param]
            if not state and param.numel():
                like = {
                    kind: torch.zeros_like(param, dtype=kind) for kind in (f32, f64, torch.int64, torch.bool)
                }
                _own(like[f32]).copy_(_own(param).float() / 3)
                _own(like[f64]).copy_(_own(param).double() / 3)
                _own(like[i64]).copy_(_own(param).double() * 2**40)
                _own(like[torch.bool]).copy_(_own(param) > 0)
                state |= {str(kind): value for kind, value in like.items()}
                state |= {"scalar": torch.tensor(1 / 3, dtype=f64), "mode": "cosine", "count": 3}


@each_front
@ranks(2)
def test_optimizer_state_comes_back_in_its_dtypes(rank, world_size, front, tmp_path):
    makes = (Odd, torch.optim.NAdam, torch.optim.ASGD, partial(torch.optim.SGD, momentum=0.9))
    for number, make in enumerate(makes):
        runs = []
        for steps in (2, 0):
            model = shard(front, net().bfloat16())
            runs.append((model, make(model.parameters())))
            for _ in range(steps):
                model(torch.ones(2, WIDTH, dtype=torch.bfloat16)).square().mean().backward()
                runs[-1][1].step()
        (model, optimizer), (again, fresh) = runs
        checkpoint.save(tmp_path, model, optimizer, step=number)
        checkpoint.load(tmp_path, again, fresh)
        assert optimizer.state
        for param, twin in zip(model.parameters(), again.parameters()):
            assert optimizer.state[param].keys() == fresh.state[twin].keys()
            for key, value in optimizer.state[param].items():
                found = fresh.state[twin][key]
                assert type(found) is type(value) and getattr(found, "dtype", 0) == getattr(value, "dtype", 0)
                assert torch.equal(_own(found), _own(value)) if torch.is_tensor(value) else found == value
    wrong = torch.optim.AdamW(again.parameters())
    before = copy.deepcopy(again.state_dict())
    with pytest.raises(ValueError, match=r"momentum_buffer, and AdamW needs step, .*another optimizer"):
        checkpoint.load(tmp_path, again, wrong)
    assert not wrong.state and wrong.defaults["betas"] == wrong.param_groups[0]["betas"]
    assert_equal(again.state_dict(), before)


def _own(value: Any) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


@ranks(2)
def test_with_another_number_of_ranks_extras_are_the_first_ranks(rank, world_size, tmp_path):
    model = net()
    checkpoint.save(tmp_path, model, extra={"epoch": 3, "data": rank, **({"first": 1} if rank == 0 else {})})
    alone = [dist.new_group([each]) for each in range(world_size)][rank]
    before = draws()
    with pytest.warns(UserWarning, match="saved by 2 ranks, and data, first of extra differed") as warned:
        state = torch.get_rng_state()
        found = checkpoint.load(tmp_path, model, process_group=alone)
    assert len(warned) == 1
    assert dict(found) == {"epoch": 3, "data": 0, "first": 1}
    assert torch.equal(torch.get_rng_state(), state) and before != draws()


@ranks(2)
def test_plain_readers_need_nothing_of_ours(rank, world_size, tmp_path):
    model = per_block_of(net())
    optimizer = stepped(model, rank, world_size)
    folder = checkpoint.save(tmp_path, model, optimizer, {"epoch": 1})
    plain, reference = trained(2)
    state = {"model": {name: torch.zeros_like(value) for name, value in plain.state_dict().items()}}
    dcp.load(state, checkpoint_id=folder)
    assert_close(state["model"], plain.state_dict())
    if rank == 0:
        dcp_to_torch_save(folder, tmp_path / "merged")
        merged = torch.load(tmp_path / "merged", weights_only=False)
        expected = by_name(reference, plain)
        assert merged["optim"]["param_groups"] == expected["param_groups"]
        for name, entry in expected["state"].items():
            assert_close({key: merged["optim"]["state"][name][key] for key in entry}, entry)
        assert str(tmp_path) not in (folder / ".metadata").read_bytes().decode(errors="replace")


# what appears


@ranks(2)
def test_a_rank_that_fails_fails_all_and_nothing_appears(rank, world_size, tmp_path):
    model = per_block_of(net())
    kept = checkpoint.save(tmp_path, model, step=1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TypeError, match=r"^rank 1: extra\['bad'\] \(function\) cannot be pickled"):
        checkpoint.save(tmp_path, model, extra={"bad": (lambda: 0) if rank else 1})
    with pytest.raises(ValueError, match="the same step; step is 0 on rank 0, 1 on rank 1"):
        checkpoint.save(tmp_path, model, step=rank)
    with pytest.raises(ValueError, match="keep_last must be at least 1, not 0"):
        checkpoint.save(tmp_path, model, keep_last=0)
    with pytest.raises(TypeError, match="model must be a module, not int"):
        checkpoint.save(tmp_path, 3)  # type: ignore[arg-type]
    with full_disk() if rank == 1 else nullcontext():
        with pytest.raises(RuntimeError, match="saving step 2 in .* failed: rank 1: OSError: .*No space"):
            checkpoint.save(tmp_path, model)
        gc.collect()  # nothing that a failure leaves behind may harm
        dist.barrier()
        assert names(tmp_path) == [kept.name]
        pending = checkpoint.async_save(tmp_path, model)
        with pytest.raises(RuntimeError, match="rank 1: OSError"):
            pending.result()
        untold = checkpoint.async_save(tmp_path, model)
        while not untold.done():
            time.sleep(0.01)
    dist.barrier()
    with pytest.raises(RuntimeError, match="rank 1: OSError"):
        checkpoint.save(tmp_path, model)
    dist.barrier()
    assert names(tmp_path) == [kept.name]
    checkpoint.load(tmp_path, model)
    assert_equal(model.state_dict(), before)
    checkpoint.save(tmp_path, model)
    assert names(tmp_path) == ["step_00000001", "step_00000002"]


def test_one_process_keeps_steps_and_clears_up(tmp_path, capfd):
    model = nn.Linear(3, 2)
    (tmp_path / "notes.txt").write_text("mine")
    checkpoint.save(tmp_path, model, step=0)
    for keep_last in (None, None, 2):  # also what saves have left that crashed before they removed the oldest
        checkpoint.save(tmp_path, model, keep_last=keep_last)
    assert names(tmp_path) == ["notes.txt", "step_00000002", "step_00000003"]

    incomplete = tmp_path / "step_00000009"
    incomplete.mkdir()
    with pytest.raises(ValueError, match="step_00000009 is in the way and no checkpoint of ours"):
        checkpoint.save(tmp_path, model, step=9)
    with pytest.warns(UserWarning, match="passing over .*step_00000009: manifest.json is missing"):
        assert checkpoint.load(tmp_path, model).step == 3
    incomplete.rmdir()

    # left by saves that crashed: while writing, while deleting, and between the two renames of a replacement
    (tmp_path / ".step_00000005.partial").mkdir()
    (tmp_path / "step_00000002").rename(tmp_path / ".step_00000002.deleted")
    (tmp_path / "step_00000003").rename(tmp_path / ".step_00000003.replaced")
    assert checkpoint.load(tmp_path, model).step == 3
    checkpoint.save(tmp_path, model, step=1, keep_last=1)  # no newer step goes
    assert names(tmp_path) == ["notes.txt", "step_00000001", "step_00000003"]
    nn.init.zeros_(model.weight)
    checkpoint.save(tmp_path, model, step=3, progress=True)  # replaces
    assert "checkpoint: 100%" in capfd.readouterr().err
    nn.init.ones_(model.weight)
    checkpoint.load(tmp_path, model, step=3)
    assert model.weight.eq(0).all()
    assert names(tmp_path) == ["notes.txt", "step_00000001", "step_00000003"]


@ranks(2)
def test_a_save_in_the_background_keeps_what_was(rank, world_size, tmp_path):
    model = per_block_of(net())
    optimizer = stepped(model, rank, world_size)
    expected, expected_optim = copy.deepcopy((model.state_dict(), FSDP.optim_state_dict(model, optimizer)))
    extra = {"position": torch.zeros(3), "list": [1]}
    pending = checkpoint.async_save(tmp_path, model, optimizer, extra)
    extra["position"].add_(1), extra["list"].append(2)
    train(model, optimizer, rank, world_size, range(2, 8))  # with collectives of its own meanwhile
    assert pending.result() == tmp_path / "step_00000001" and pending.done()
    group = next(iter(_team._background_groups.values()))()
    second = checkpoint.async_save(tmp_path, model, optimizer)
    third = checkpoint.async_save(tmp_path, model, optimizer)  # waits for the second
    assert second.done()
    fourth = checkpoint.save(tmp_path, model, optimizer)
    assert third.done() and fourth.name == "step_00000004"
    assert next(iter(_team._background_groups.values()))() is group

    found = checkpoint.load(tmp_path, model, optimizer, step=1)
    assert_equal(model.state_dict(), expected)
    assert_same(FSDP.optim_state_dict(model, optimizer), expected_optim)
    assert found["position"].eq(0).all() and found["list"] == [1]


# what is refused


@ranks(2)
def test_what_does_not_fit_is_refused_by_name_and_nothing_changes(rank, world_size, tmp_path):
    model = per_block_of(net())
    checkpoint.save(tmp_path, model)
    bigger = net()
    bigger.head = nn.Linear(6, 5).double()
    bigger.tail = nn.Linear(2, 2).double()
    del bigger.stem
    wrapped = FSDP(bigger)
    before, state = copy.deepcopy(wrapped.state_dict()), torch.get_rng_state()
    with pytest.raises(ValueError) as refused:
        checkpoint.load(tmp_path, wrapped, adamw(wrapped), {"data": Counter(0)})
    for text in (
        "head.weight has shape (3, 6) there and (5, 6) here",
        "the checkpoint lacks tail.weight, tail.bias of the model",
        "the model lacks stem.weight, stem.bias of the checkpoint",
        "the checkpoint has no optimizer state",
        "the checkpoint lacks data of extra",
    ):
        assert text in str(refused.value)
    assert_equal(wrapped.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), state)
    alike = net()
    alike.tail = nn.Linear(2, 2).double()
    del alike.stem
    alike = FSDP(other(alike))
    before = copy.deepcopy(alike.state_dict())
    optimizer = torch.optim.SGD(alike.parameters(), lr=0.25)
    checkpoint.load(tmp_path, alike, optimizer, strict=False)
    assert optimizer.param_groups[0]["lr"] == 0.25  # there was none to load
    found, saved = alike.state_dict(), model.state_dict()
    assert_equal(found, {name: saved.get(name, before[name]) for name in found})
    for path, step, text in [
        (tmp_path / "none", None, "no complete checkpoint in .*none: there is no such folder"),
        (tmp_path, 5, "there is no step 5 in .*; it holds steps 1"),
        (tmp_path / "step_00000001", 2, "step=2 does not fit"),
    ]:
        with pytest.raises(ValueError, match=text):
            checkpoint.load(path, model, step=step)


@ranks(3)
def test_damage_is_told_alike_on_all_ranks_before_anything_changes(rank, world_size, tmp_path):
    model = per_block_of(net())
    optimizer = stepped(model, rank, world_size)
    for _ in range(2):
        folder = checkpoint.save(tmp_path, model, optimizer)
    parts = json.loads((folder / "manifest.json").read_text())["files"]
    dist.barrier()
    if rank == 0:
        (folder / "__0_0.distcp").unlink()
        data = bytearray((folder / "__1_0.distcp").read_bytes())
        data[parts["__1_0.distcp"][-1][0] + 300] ^= 4
        (folder / "__1_0.distcp").write_bytes(data)
    dist.barrier()
    other(model.module)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(DamagedCheckpoint) as refused:
        checkpoint.load(folder, model, optimizer)
    told: list[Any] = [None] * world_size
    dist.all_gather_object(told, str(refused.value))
    assert told == [told[0]] * world_size
    lines = told[0].splitlines()
    assert lines[0] == f"{folder} is damaged, and nothing was loaded:"
    assert lines[1].startswith("  __0_0.distcp is missing (") and "model." in lines[1]
    assert lines[2].startswith("  __1_0.distcp bytes") and lines[2].count("model.") <= 1 and "(" in lines[2]
    assert lines[3] == f"  the step before is complete: load {tmp_path / 'step_00000001'}"
    manifest = tmp_path / "step_00000001" / "manifest.json"
    text = manifest.read_text()
    dist.barrier()
    if rank == 0:
        manifest.write_text(text.replace('"world_size":3', '"world_size":4'))
    dist.barrier()
    with pytest.raises(ValueError, match="no complete .*step_00000001: manifest.json is not as it was"):
        checkpoint.load(tmp_path, model, optimizer)
    dist.barrier()
    if rank == 0:
        manifest.write_text(text)
    dist.barrier()
    assert_equal(model.state_dict(), before)
    with pytest.warns(UserWarning, match="passing over") if rank == 0 else warnings.catch_warnings():
        assert checkpoint.load(tmp_path, model, optimizer).step == 1


def test_each_byte_is_verified_by_one_rank():
    sizes = random.Random(0).choices(range(1, 50), k=100)
    files = {
        str(part): [[offset, size, 0] for offset, size in enumerate(sizes[part::7])] for part in range(7)
    }
    manifest = Manifest(1, 7, files)
    for count in (1, 2, 3, 5, 64):
        shares = [list(manifest.share(rank, count)) for rank in range(count)]
        pieces = [(piece.file, piece.offset) for share in shares for piece in share]
        assert len(set(pieces)) == len(pieces) == 100
        bytes_each = [sum(piece.length for piece in share) for share in shares]
        assert max(bytes_each) <= manifest.size / count + 50


def test_modules_without_tensors_and_renamed_steps(tmp_path):
    folder = checkpoint.save(tmp_path, nn.Tanh(), extra={"epoch": 4}, step=3)
    found = checkpoint.load(folder.rename(tmp_path / "step_00000009"), nn.Tanh())
    assert found == {"epoch": 4} and found.step == 9


def test_a_fraction_is_not_loaded_into_an_integer(tmp_path):
    model = nn.Module()
    model.count = nn.Parameter(torch.tensor([1.5]))
    checkpoint.save(tmp_path, model)
    model = nn.Module()
    model.register_buffer("count", torch.tensor([7]))
    with pytest.raises(ValueError, match=r"count is torch\.float32 there and torch\.int64 here"):
        checkpoint.load(tmp_path, model)
    assert model.count.tolist() == [7]


@ranks(2)
def test_parameters_without_elements_have_no_count(rank, world_size, tmp_path):
    def made(use_orig_params: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = nn.Linear(4, 4)
        module.nothing = nn.Parameter(torch.empty(0))
        model = FSDP(module, use_orig_params=use_orig_params)
        return model, adamw(model)

    model, optimizer = made(True)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path, model, optimizer)
    again, fresh = made(False)
    checkpoint.load(tmp_path, again, fresh)
    assert all(int(state["step"]) == 1 for state in fresh.state.values())


def test_ties_buffers_and_extra_state_of_plain_models(tmp_path):
    class Odd(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.arange(3))
            self.told: Any = {"nested": [1, torch.ones(2)]}

        def get_extra_state(self) -> Any:
            return self.told

        def set_extra_state(self, state: Any) -> None:
            self.told = state

    source, target = Odd(), other(Odd())
    target.told = None
    sgd = torch.optim.SGD(source.parameters(), lr=0.5)
    checkpoint.save(tmp_path, source, sgd)
    fresh = torch.optim.SGD(target.parameters(), lr=1.0)
    checkpoint.load(tmp_path, target, [fresh])
    assert fresh.param_groups[0]["lr"] == 0.5
    assert target.told["nested"][0] == 1 and target.told["nested"][1].eq(1).all()
    for name, value in source.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, target.state_dict()[name]), name


# the command


def command(capsys: Any, *arguments: object) -> tuple[int, str, str]:
    from fsdp_wrap.checkpoint.__main__ import main

    try:
        status = main([str(each) for each in arguments])
    except SystemExit as ended:
        status = int(ended.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


@ranks(2)
def save_pieces(rank, world_size, path):
    model = per_block_of(net())
    optimizer = stepped(model, rank, world_size)
    for _ in range(2):
        checkpoint.save(path, model, optimizer, {"epoch": 1})


def test_the_command_inspects_converts_and_exports(tmp_path, capsys):
    from safetensors.torch import load_file

    save_pieces(path=tmp_path / "run", world_size=2)
    plain, reference = trained(2)
    count = len(plain.state_dict())
    size = f"{sum(value.nbytes for value in plain.state_dict().values()) / 1000:.3g} KB"
    code, out, _ = command(capsys, "inspect", tmp_path / "run", "--verify")
    assert code == 0
    for text in (
        "step_00000001  intact, by 2 ranks, ",
        f"model: {count} entries, {size}",
        "head.weight           float64 [3, 6]  144 B",
        "optimizer: 1 parameter groups, ",
        f"exp_avg: of {count} parameters, {size}",
        "epoch: of 2 ranks, ",
        "total: ",
    ):
        assert text in out

    assert command(capsys, "convert", tmp_path / "run", tmp_path / "full.pt")[0] == 0
    full = torch.load(tmp_path / "full.pt", weights_only=True)
    assert_close(full["model"], plain.state_dict())
    assert_same(full["optim"], by_name(reference, plain))
    for source in ("full.pt", "weights.pt"):
        torch.save(full["model"], tmp_path / "weights.pt")
        code, out, _ = command(capsys, "convert", tmp_path / source, tmp_path / "back", "--step", 5)
        assert code == 0 and str(tmp_path / "back" / "step_00000005") in out
        again = other(net())
        optimizer = adamw(again)
        checkpoint.load(tmp_path / "back", again, optimizer if source == "full.pt" else None)
        assert_close(again.state_dict(), plain.state_dict())
        if source == "full.pt":
            assert_same(by_name(optimizer, again), by_name(reference, plain))

    assert command(capsys, "export", tmp_path / "run", tmp_path / "out", "--max-shard-size", "400B")[0] == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = {file: load_file(tmp_path / "out" / file) for file in set(index["weight_map"].values())}
    assert len(files) > 2
    found = {name: files[file][name] for name, file in index["weight_map"].items()}
    expected = plain.state_dict()
    assert_close({name: found[name] for name in expected}, expected)


def test_results_of_the_command_lie_beside_their_source(tmp_path, capsys):
    model = nn.Linear(3, 2)
    checkpoint.save(tmp_path / "run", model)
    for arguments in (("convert", tmp_path / "run"), ("export", tmp_path / "run")):
        assert command(capsys, *arguments)[0] == 0
    assert_close(torch.load(tmp_path / "run.pt", weights_only=True)["model"], model.state_dict())
    again = nn.Linear(3, 2)
    checkpoint.import_safetensors(again, tmp_path / "run_safetensors")
    assert_close(again.state_dict(), model.state_dict())
    (tmp_path / "run").rename(tmp_path / "before")
    assert command(capsys, "convert", tmp_path / "run.pt")[0] == 0
    checkpoint.load(tmp_path / "run", nn.Linear(3, 2))


def test_the_command_tells_wrong_input_from_damage(tmp_path, capsys):
    model = nn.Linear(3, 2)
    folder = checkpoint.save(tmp_path / "run", model)
    (tmp_path / "text").write_text("no checkpoint")
    torch.save([1], tmp_path / "list.pt")
    for arguments, text in [
        (("inspect", tmp_path / "none"), "there is no folder"),
        (("inspect", tmp_path / "run", "--step", 4), "there is no step 4 in"),
        (("convert", tmp_path / "run", tmp_path / "text"), "text exists already"),
        (("convert", tmp_path / "run", tmp_path / "no" / "file"), "there is no folder"),
        (("convert", tmp_path / "text", tmp_path / "back"), "is no file that torch.load"),
        (("convert", tmp_path / "list.pt", tmp_path / "back"), "holds no state dict"),
        (("export", tmp_path / "run", tmp_path / "out", "--max-shard-size", "big"), "max_shard_bytes must"),
        (("mend", tmp_path), "invalid choice"),
    ]:
        code, _, err = command(capsys, *arguments)
        assert code == 2 and text in err, err
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    data[40] ^= 1
    (folder / "__0_0.distcp").write_bytes(data)
    code, out, _ = command(capsys, "inspect", tmp_path / "run", "--verify")
    assert code == 1 and "step_00000001  incomplete: __0_0.distcp bytes 0 to" in out
    for arguments in (("convert", tmp_path / "run", tmp_path / "f"), ("export", folder, tmp_path / "e")):
        code, _, err = command(capsys, *arguments)
        assert code == 1 and "is damaged" in err
    assert names(tmp_path) == ["list.pt", "run", "text"]


def test_the_command_lists_steps_before_it_refuses_one(tmp_path, capsys):
    model = nn.Linear(3, 2)
    for _ in range(2):
        folder = checkpoint.save(tmp_path / "run", model)
    data = bytearray((folder / ".metadata").read_bytes())
    data[-1] ^= 1
    (folder / ".metadata").write_bytes(data)
    code, out, err = command(capsys, "inspect", tmp_path / "run")
    assert code == 1
    assert [line.split(",")[0] for line in out.splitlines()] == [
        "step_00000001  complete",
        "step_00000002  complete",
    ]
    assert f".metadata bytes 0 to {len(data)} are not as written" in err
    assert f"the step before is complete: load {tmp_path / 'run' / 'step_00000001'}" in err
    (folder / ".metadata").unlink()
    with pytest.warns(UserWarning, match="passing over .*step_00000002: .metadata is missing"):
        code, out, _ = command(capsys, "inspect", tmp_path / "run")
    assert code == 0 and "step_00000002  incomplete: .metadata is missing" in out
    assert f"{tmp_path / 'run' / 'step_00000001'} (written by torch " in out


def test_of_many_steps_the_newest_are_told(tmp_path):
    model = nn.Linear(3, 2)
    for _ in range(12):
        checkpoint.save(tmp_path, model)
    with pytest.raises(ValueError, match=r"no step 40 in .*; it holds steps 12, 11, 10, .*, 3 and 2 more$"):
        checkpoint.load(tmp_path, model, step=40)


@ranks(2)
def test_what_needs_numpy_says_so_and_nothing_else_needs_it(rank, world_size, tmp_path):
    missing = RuntimeError("Numpy is not available")
    with mock.patch.object(torch.Tensor, "numpy", side_effect=missing):
        model = FSDP(net(), sync_module_states=True)
        optimizer = stepped(model, rank, world_size)
        assert FSDP.optim_state_dict(model, optimizer)["state"]
        assert list(model.state_dict()) == list(net().state_dict())
    with mock.patch("fsdp_wrap.checkpoint._team.find_spec", return_value=None):
        with pytest.raises(ImportError, match=r'numpy package.*"fsdp-wrap\[checkpoint\]"'):
            checkpoint.save(tmp_path, model, optimizer)
    assert not list(tmp_path.iterdir())
