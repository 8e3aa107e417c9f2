"""`fsdp_wrap.checkpoint`: what is saved, what appears, what is refused, and what a load leaves alone."""

import copy
import gc
import itertools
import json
import random
import re
import time
import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from bed import ranks
from fronts import assert_tensors, either_front, full_state, shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import checkpoint
from fsdp_wrap._params import to_local
from fsdp_wrap.checkpoint import DamagedCheckpoint, _loading, _team
from fsdp_wrap.checkpoint._manifest import Manifest
from fsdp_wrap.checkpoint._state import may_refuse
from nets import WIDTH
from optim_states import assert_same, by_name
from resuming import Counter, full_disk, names_in, net, other, per_block_of, told_alike, train, trained
from state_nets import Tied, adamw, assert_close, assert_equal


def stepped(model: nn.Module, rank: int, world_size: int, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    train(model, optimizer, rank, world_size, range(steps))
    return optimizer


def draws() -> tuple[Any, ...]:
    return torch.rand(2).tolist(), random.random(), numpy.random.rand()


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
    state = torch.get_rng_state()
    checkpoint.load(tmp_path, again, restore_random_state=False)
    assert torch.equal(torch.get_rng_state(), state)
    resumed = {"schedule": torch.optim.lr_scheduler.StepLR(fresh, 5), "data": Counter(0)}
    loaded = checkpoint.load(tmp_path, again, fresh, resumed)
    assert draws() == expected
    assert (loaded.step, loaded.folder) == (7, folder)
    assert loaded["epoch"] == 3 and loaded["mask"].tolist() == [1, 2]
    assert loaded["data"] is resumed["data"] and loaded["data"].at == 10 * rank
    resumed["schedule"].step()
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    train(again, fresh, rank, world_size, range(2, 4))
    assert_equal(again.state_dict(), model.state_dict())


f32, f64, i64 = torch.float32, torch.float64, torch.int64


class Odd(torch.optim.Optimizer):
    """Keeps state of dtypes and kinds that torch's `load_state_dict` changes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are left out
        for param in (weight for group in self.param_groups for weight in group["params"]):
            state = self.state[param]
            if not state and param.numel():
                like = {kind: torch.zeros_like(param, dtype=kind) for kind in (f32, f64, i64, torch.bool)}
                to_local(like[f32]).copy_(to_local(param).float() / 3)
                to_local(like[f64]).copy_(to_local(param).double() / 3)
                to_local(like[i64]).copy_(to_local(param).double() * 2**40)
                to_local(like[torch.bool]).copy_(to_local(param) > 0)
                state |= {str(kind): value for kind, value in like.items()}
                state |= {"scalar": torch.tensor(1 / 3, dtype=f64), "mode": "cosine", "count": 3}


@either_front
@ranks(2)
def test_an_optimizer_that_was_never_stepped_has_no_state(rank, world_size, front, tmp_path):
    model = shard(front, net().double())
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.save(tmp_path, model, optimizer)
    assert not optimizer.state and all(param.grad is None for param in model.parameters())
    checkpoint.load(tmp_path, model, optimizer)
    assert not optimizer.state


@either_front
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
                loaded = fresh.state[twin][key]
                assert type(loaded) is type(value) and getattr(loaded, "dtype", 0) == getattr(
                    value, "dtype", 0
                )
                assert (
                    torch.equal(to_local(loaded), to_local(value))
                    if torch.is_tensor(value)
                    else loaded == value
                )
    wrong = torch.optim.AdamW(again.parameters())
    before = copy.deepcopy(again.state_dict())
    with pytest.raises(ValueError, match=r"momentum_buffer, and AdamW needs step, .*another optimizer"):
        checkpoint.load(tmp_path, again, wrong)
    assert not wrong.state and wrong.defaults["betas"] == wrong.param_groups[0]["betas"]
    assert_equal(again.state_dict(), before)


@ranks(2)
def test_with_another_number_of_ranks_extras_are_the_first_ranks(rank, world_size, tmp_path):
    model = net()
    checkpoint.save(tmp_path, model, extra={"epoch": 3, "data": rank, **({"first": 1} if rank == 0 else {})})
    alone = [dist.new_group([member]) for member in range(world_size)][rank]
    before = draws()
    with pytest.warns(UserWarning, match="saved by 2 ranks, and data, first of extra differed") as warned:
        state = torch.get_rng_state()
        loaded = checkpoint.load(tmp_path, model, process_group=alone)
    assert len(warned) == 1
    assert dict(loaded) == {"epoch": 3, "data": 0, "first": 1}
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


@ranks(2)
def test_a_rank_that_fails_fails_all_and_nothing_appears(rank, world_size, tmp_path):
    model = per_block_of(net())
    kept = checkpoint.save(tmp_path, model, step=1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TypeError, match=r"^rank 1: extra\['bad'\] \(function\) cannot be pickled"):
        checkpoint.save(tmp_path, model, extra={"bad": (lambda: 0) if rank else 1})
    with pytest.raises(ValueError, match="the same step; step is 0 on rank 0, 1 on rank 1"):
        checkpoint.save(tmp_path, model, step=rank)
    with full_disk() if rank == 1 else nullcontext():
        with pytest.raises(RuntimeError, match="saving step 2 in .* failed: rank 1: OSError: .*No space"):
            checkpoint.save(tmp_path, model)
        gc.collect()  # nothing that a failure leaves behind may harm
        dist.barrier()
        assert names_in(tmp_path) == [kept.name]
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
    assert names_in(tmp_path) == [kept.name]
    checkpoint.load(tmp_path, model)
    assert_equal(model.state_dict(), before)
    checkpoint.save(tmp_path, model)
    assert names_in(tmp_path) == ["step_00000001", "step_00000002"]


def test_one_process_keeps_steps_and_clears_up(tmp_path, capfd):
    model = nn.Linear(3, 2)
    (tmp_path / "notes.txt").write_text("mine")
    checkpoint.save(tmp_path, model, step=0)
    for keep_last in (None, None, 2):  # also what saves have left that crashed before they removed the oldest
        checkpoint.save(tmp_path, model, keep_last=keep_last)
    assert names_in(tmp_path) == ["notes.txt", "step_00000002", "step_00000003"]

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
    assert names_in(tmp_path) == ["notes.txt", "step_00000001", "step_00000003"]
    nn.init.zeros_(model.weight)
    checkpoint.save(tmp_path, model, step=3, progress=True)  # replaces
    assert "checkpoint: 100%" in capfd.readouterr().err
    nn.init.ones_(model.weight)
    checkpoint.load(tmp_path, model, step=3)
    assert model.weight.eq(0).all()
    assert names_in(tmp_path) == ["notes.txt", "step_00000001", "step_00000003"]


def test_progress_in_a_file_is_about_ten_lines_however_long_it_takes(tmp_path, capfd):
    """By a fake clock, by which everything takes a second."""
    model = nn.ParameterList(torch.ones(50) for _ in range(300))
    checkpoint.save(tmp_path, model, step=1)
    assert not capfd.readouterr().err
    with mock.patch("tqdm.std.time", partial(next, itertools.count())):
        checkpoint.save(tmp_path, model, step=2, progress=True)
    lines = re.split(r"[\r\n]+", capfd.readouterr().err.strip())
    assert 5 <= len(lines) <= 20 and "checkpoint: 100%" in lines[-1]


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

    loaded = checkpoint.load(tmp_path, model, optimizer, step=1)
    assert_equal(model.state_dict(), expected)
    assert_same(FSDP.optim_state_dict(model, optimizer), expected_optim)
    assert loaded["position"].eq(0).all() and loaded["list"] == [1]


@ranks(2)
def test_what_does_not_fit_is_refused_by_name_and_nothing_changes(rank, world_size, tmp_path):
    model = per_block_of(net())
    checkpoint.save(tmp_path, model)
    bigger, alike = net(), other(net())
    bigger.head = nn.Linear(6, 5).double()
    for changed in (bigger, alike):
        changed.tail = nn.Linear(2, 2).double()
        del changed.stem
    bigger, alike = FSDP(bigger), FSDP(alike)
    before, state = copy.deepcopy(bigger.state_dict()), torch.get_rng_state()
    with pytest.raises(ValueError) as refused:
        checkpoint.load(tmp_path, bigger, adamw(bigger), {"data": Counter(0)})
    for text in (
        "head.weight has shape (3, 6) there and (5, 6) here",
        "the checkpoint lacks tail.weight, tail.bias of the model",
        "the model lacks stem.weight, stem.bias of the checkpoint",
        "the checkpoint has no optimizer state",
        "the checkpoint lacks data of extra",
    ):
        assert text in str(refused.value)
    assert_equal(bigger.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), state)
    before = copy.deepcopy(alike.state_dict())
    optimizer = torch.optim.SGD(alike.parameters(), lr=0.25)
    checkpoint.load(tmp_path, alike, optimizer, strict=False)
    assert optimizer.param_groups[0]["lr"] == 0.25  # there was none to load
    after, saved = alike.state_dict(), model.state_dict()
    assert_equal(after, {name: saved.get(name, before[name]) for name in after})


def test_what_a_model_lacks_is_not_read(tmp_path):
    whole = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    optimizer = adamw(whole)
    whole(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path, whole, optimizer)
    part = nn.Sequential(nn.Linear(4, 4)).double()
    again = adamw(part)
    with mock.patch.object(_loading, "read", wraps=_loading.read) as reads:
        checkpoint.load(tmp_path, part, again, strict=False)
    asked = [*reads.call_args.args[1]]
    assert {"model.0.weight", "optim.state.0.weight.exp_avg"} <= {*asked}
    assert not [key for key in asked if key.startswith(("model.2.", "optim.state.2."))]
    for name, param in part[0].named_parameters():
        assert torch.equal(param, whole[0].get_parameter(name))
        assert_tensors(again.state[param], optimizer.state[whole[0].get_parameter(name)])


def test_steps_and_dtypes_that_are_not_there_are_named(tmp_path):
    counting, fraction = nn.Module(), nn.Module()
    counting.register_buffer("count", torch.tensor([7]))
    fraction.count = nn.Parameter(torch.tensor([1.5]))
    checkpoint.save(tmp_path / "fraction", fraction)
    step = checkpoint.save(tmp_path / "runs", nn.Tanh(), extra={"epoch": 4}, step=3)
    loaded = checkpoint.load(step.rename(tmp_path / "runs" / "step_00000039"), nn.Tanh())
    assert loaded == {"epoch": 4} and loaded.step == 39
    for count, told in ((10, "39, 8, 7, .*, 0$"), (12, "39, 10, 9, .*, 2 and 2 more$")):
        while len(names_in(tmp_path / "runs")) < count:
            checkpoint.save(tmp_path / "runs", nn.Tanh(), step=len(names_in(tmp_path / "runs")) - 1)
        with pytest.raises(ValueError, match=f"no step 40 in .*; it holds steps {told}"):
            checkpoint.load(tmp_path / "runs", nn.Tanh(), step=40)
    for name, number, text in [
        ("fraction", None, r"count is torch\.float32 there and torch\.int64 here"),
        ("none", None, "no complete checkpoint in .*none: there is no such folder"),
        ("fraction/step_00000001", 2, "step=2 does not fit"),
    ]:
        with pytest.raises(ValueError, match=text):
            checkpoint.load(tmp_path / name, counting, step=number)
    assert counting.count.tolist() == [7]


def test_ties_and_extra_state_of_plain_models(tmp_path):
    class Odd(Tied):
        told: Any = None

        def get_extra_state(self) -> Any:
            return self.told

        def set_extra_state(self, state: Any) -> None:
            self.told = state

    source, target = Odd(), other(Odd())
    source.told = {"nested": [1, torch.ones(2)]}
    sgd, fresh = (torch.optim.SGD(net.parameters(), lr=lr) for net, lr in ((source, 0.5), (target, 1.0)))
    checkpoint.save(tmp_path, source, sgd)
    checkpoint.load(tmp_path, target, [fresh])
    assert fresh.param_groups[0]["lr"] == 0.5
    nested = target.told["nested"]
    assert nested[0] == 1 and nested[1].eq(1).all()
    assert_equal(dict(target.named_parameters()), dict(source.named_parameters()))


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
    lines = told_alike(refused).splitlines()
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


@ranks(2)
def test_training_and_states_do_not_need_numpy(rank, world_size):
    with mock.patch.object(torch.Tensor, "numpy", side_effect=RuntimeError("Numpy is not available")):
        model = FSDP(net(), sync_module_states=True)
        optimizer = stepped(model, rank, world_size)
        assert FSDP.optim_state_dict(model, optimizer)["state"]
        assert list(model.state_dict()) == list(net().state_dict())


class Refusing(torch.optim.AdamW):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if dist.get_rank() == 1:
            raise RuntimeError("not this one")


class Particular(nn.Linear):
    """Raises on one rank when it is given its extra state."""

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("not that one")


@ranks(2)
@either_front
def test_what_fails_on_one_rank_changes_nothing_on_any(rank, world_size, front, tmp_path):
    particular = nn.Sequential(net(), Particular(3, 3).double())
    for whole, optim in ((net(), Refusing), (particular, torch.optim.AdamW)):
        model = shard(front, whole)
        optimizer = optim(model.parameters())
        train(model, optimizer, rank, world_size, range(1))
        checkpoint.save(tmp_path, model, optimizer)
        train(model, optimizer, rank, world_size, range(1))
        optimizer.param_groups[0]["lr"] = 0.5
        before, entries = copy.deepcopy(full_state(model)), {p: dict(e) for p, e in optimizer.state.items()}
        with pytest.raises(RuntimeError, match="rank 1: .*not th"):
            checkpoint.load(tmp_path, model, optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert optimizer.state.keys() == entries.keys()
        for param, entry in entries.items():
            assert all(optimizer.state[param][key] is value for key, value in entry.items())
        assert_equal(full_state(model), before)
        assert may_refuse(model) == (whole is particular)
