"""Checkpoints of each kind made into each other kind by the command, and looked at; no model is needed."""

import json
import os
import shutil
import sys
import weakref
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from bed import ranks
from bed.scripts import called
from composable import shard_blocks
from fsdp_wrap import checkpoint
from fsdp_wrap._core import format_bytes
from fsdp_wrap.checkpoint import _convert, _sources
from fsdp_wrap.checkpoint.__main__ import main
from optim_states import assert_same, by_name
from resuming import net, other, per_block_of, train, trained
from state_nets import adamw, assert_close, assert_equal

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
run = partial(called, main)


def done(capsys: Any, *arguments: object) -> str:
    code, out, err = run(capsys, *arguments)
    assert code == 0, err
    return out


@ranks(2)
def save_by_each_front_end(rank, world_size, path):
    wrapped, composed, torchs = (
        per_block_of(net()),
        shard_blocks(net()),
        shard_blocks(net(), torch_fully_shard),
    )
    for name, model in {"wrapper": wrapped, "composed": composed, "torchs": torchs}.items():
        optimizer = adamw(model)
        train(model, optimizer, rank, world_size, range(2))
        if name != "torchs":
            checkpoint.save(path / name, model, optimizer, {"epoch": 1})
    state = torchs.state_dict()
    dcp.save({"model": state}, checkpoint_id=path / "torchs")
    dcp.save(state, checkpoint_id=path / "torchs_flat")
    dcp.save({"app": {"model": state, "step": 3}}, checkpoint_id=path / "torchs_app")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    save_by_each_front_end(path=path, world_size=2)
    return path


KINDS = ["wrapper", "composed", "torchs", "torchs_flat", "torchs_app"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_goes_round_through_the_others(saved, tmp_path, capsys, kind):
    """Folder to file, to safetensors, to a step, to a file: all with the values of a plain model."""
    plain, reference = trained(2)
    expected = plain.state_dict()
    assert "read it back" in done(capsys, "convert", saved / kind, tmp_path / "full.pt")
    full = torch.load(tmp_path / "full.pt", weights_only=True)
    assert_close(full["model"], expected)
    assert ("optim" in full) == (not kind.startswith("torchs"))
    done(capsys, "convert", "--to", "safetensors", tmp_path / "full.pt", tmp_path / "tensors")
    tensors = load_file(tmp_path / "tensors" / "model.safetensors")
    assert_equal({name: tensors[name] for name in full["model"]}, full["model"])
    done(capsys, "convert", tmp_path / "tensors", tmp_path / "run")
    again = other(net())
    checkpoint.load(tmp_path / "run", again)
    assert_equal(again.state_dict(), full["model"])
    done(capsys, "convert", tmp_path / "tensors", tmp_path / "back.pt", "--to", "torch")
    back = torch.load(tmp_path / "back.pt", weights_only=True)["model"]
    assert set(back) == set(full["model"])  # files keep an order of their own
    assert_equal({name: back[name] for name in full["model"]}, full["model"])

    source = tmp_path / "full.pt" if "optim" in full else saved / kind
    out = done(capsys, "convert", "--to", "step", source, tmp_path / "resumed", "--step", 5)
    assert str(tmp_path / "resumed" / "step_00000005") in out
    again = other(net())
    optimizer = adamw(again)
    checkpoint.load(tmp_path / "resumed", again, optimizer if "optim" in full else None)
    assert_close(again.state_dict(), expected)
    if "optim" in full:
        assert_same(full["optim"], by_name(reference, plain))
        assert_same(by_name(optimizer, again), by_name(reference, plain))


def test_an_export_casts_what_is_floating_and_in_parts_has_an_index(tmp_path, capsys):
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 40), nn.Linear(40, 3))
    checkpoint.save(tmp_path / "run", model)
    for dtype, wanted in (("bf16", torch.bfloat16), ("float16", torch.float16)):
        done(
            capsys, "export", tmp_path / "run", tmp_path / dtype, "--dtype", dtype, "--max-shard-size", "300B"
        )
        index = json.loads((tmp_path / dtype / "model.safetensors.index.json").read_text())
        files = {file: load_file(tmp_path / dtype / file) for file in set(index["weight_map"].values())}
        assert len(files) > 2
        exported = {name: files[file][name] for name, file in index["weight_map"].items()}
        assert exported["0.running_var"].dtype == exported["1.weight"].dtype == wanted
        assert exported["0.num_batches_tracked"].dtype == torch.int64
        cast = {name: value.to(exported[name].dtype) for name, value in model.state_dict().items()}
        assert_equal({name: exported[name] for name in cast}, cast)


def test_results_lie_beside_their_source(tmp_path, capsys):
    model, again = nn.Linear(3, 2), nn.Linear(3, 2)
    checkpoint.save(tmp_path / "run", model)
    for name in ("convert", "export"):
        done(capsys, name, tmp_path / "run")
    checkpoint.import_safetensors(again, tmp_path / "run_safetensors")
    assert_equal(again.state_dict(), model.state_dict())
    (tmp_path / "run").rename(tmp_path / "before")
    done(capsys, "convert", tmp_path / "run.pt")
    checkpoint.load(tmp_path / "run", other(again))
    assert_equal(again.state_dict(), model.state_dict())


def test_an_export_holds_one_tensor_at_a_time(tmp_path):
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12)))
    checkpoint.save(tmp_path / "run", model)
    held: list[int] = []
    alive: list[int] = []
    source = _sources.open_source(tmp_path / "run")

    def read(keys: Any) -> torch.Tensor:
        value: torch.Tensor = source.held.read(keys)
        alive.append(1)
        held.append(len(alive))
        weakref.finalize(value.untyped_storage(), alive.pop)
        return value

    _convert.export(replace(source, held=replace(source.held, read=read)), tmp_path / "out")
    assert len(held) == 12 and max(held) <= 2  # read once, and compared by sums


def test_what_is_inspected_tells_every_tensor(saved, tmp_path, capsys):
    state = net().state_dict()
    size = format_bytes(sum(value.nbytes for value in state.values()))
    out = done(capsys, "inspect", saved / "wrapper", "--verify")
    for text in (
        "step_00000001  intact, by 2 ranks, ",
        f"model: {len(state)} entries, {size}",
        "head.weight           float64 [3, 6]  144 B",
        "optimizer: 1 parameter groups, ",
        f"exp_avg: of {len(state)} parameters, {size}",
        "epoch: of 2 ranks, ",
        "total: ",
    ):
        assert text in out
    out = done(capsys, "inspect", saved / "torchs_flat")
    assert "by torch.distributed.checkpoint, all its files are there" in out
    assert "head.weight" in out and "float64 [3, 6]  144 B" in out
    told = json.loads(done(capsys, "inspect", "--json", saved / "composed"))
    assert (told["kind"], told["step"], told["world_size"], told["complete"]) == ("step", 1, 2, True)
    assert told["model"]["head.weight"] == {"shape": [3, 6], "dtype": "float64", "bytes": 144}
    assert set(told["model"]) == set(state)
    torch.save({"w": torch.ones(2, 3), "step": 3}, tmp_path / "m.pt")
    save_file({"w": torch.ones(2, 3)}, tmp_path / "m.safetensors")
    for name in ("m.pt", "m.safetensors"):
        out = done(capsys, "inspect", tmp_path / name)
        assert "float32 [2, 3]  24 B" in out and ("no tensor" in out) == (name == "m.pt")


def test_wrong_input_is_told_in_one_line(saved, tmp_path, capsys):
    plain, run_, nothing = nn.Linear(3, 2), tmp_path / "run", tmp_path / "nothing"
    checkpoint.save(run_, plain)
    torch.save(plain.state_dict(), tmp_path / "m.pt")
    (tmp_path / "full.pt").write_text("no checkpoint")
    torch.save([1], tmp_path / "list.pt")
    torch.save("a text", tmp_path / "text.pt")
    torch.save({"epoch": 3}, tmp_path / "counts.pt")
    torch.save({"model": plain.state_dict(), "optim": adamw(plain).state_dict()}, tmp_path / "ids.pt")
    codes = {"up.weight": torch.ones(8, 1, dtype=torch.bfloat16), "up.weight.absmax": torch.ones(1)}
    codes["up.weight.quant_state.bitsandbytes__nf4"] = torch.ones(9, dtype=torch.uint8)
    torch.save({"model": codes}, tmp_path / "codes.pt")
    dcp.save({"random": {"cpu": torch.get_rng_state()}}, checkpoint_id=tmp_path / "other")
    shutil.copytree(saved / "torchs", tmp_path / "several" / "a")
    before = {path.name for path in tmp_path.iterdir()}
    places = {"run_": run_ / "step_00000001", "codes": tmp_path / "codes.pt"}
    for arguments, text in [
        (("inspect", nothing), "there is no folder"),
        (("inspect", run_, "--step", 4), "there is no step 4 in"),
        (("convert", nothing), "there is no file or folder"),
        (("export", nothing), "there is no file or folder"),
        (("convert", run_, nothing / "file"), "there is no folder"),
        (("convert", "--to", "step", run_), "is a step folder already"),
        (("convert", "--to", "torch", tmp_path / "m.pt"), "is a file for torch.load already"),
        (("convert", run_, tmp_path / "full.pt"), "full.pt exists already: name another"),
        (("convert", tmp_path / "m.pt", tmp_path / "full.pt"), "is a file; a step lies in a folder"),
        (("convert", tmp_path / "full.pt", tmp_path / "back"), "is no file that torch.load"),
        (("convert", tmp_path / "list.pt", tmp_path / "back"), "holds no model, only 0"),
        (("convert", tmp_path / "text.pt", tmp_path / "back"), "holds no state dict, but an object of str"),
        (("export", run_, tmp_path / "full.pt"), "full.pt cannot be written to"),
        (("export", run_, tmp_path / "out", "--max-shard-size", "big"), "max_shard_size must"),
        (
            ("export", tmp_path / "codes.pt", tmp_path / "out", "--dtype", "bfloat16"),
            "'up.weight' in {codes}",
        ),
        (("export", tmp_path / "m.pt", "--step", 3), "--step 3 is for folders of steps"),
        (("inspect", tmp_path / "several"), "name one of the folders in it: a"),
        (("inspect", tmp_path / "counts.pt"), "counts.pt holds no model, only epoch\n"),
        (("convert", "--to", "step", tmp_path / "ids.pt"), "goes by parameter ids; it must go by names"),
        (
            ("export", tmp_path / "other"),
            "other holds no model, only random (uint8 [5056]): name --model random",
        ),
        (("export", run_, "--model", "actor"), "nothing in {run_} is called 'actor'; it holds model, random"),
    ]:
        code, _, err = run(capsys, *arguments)
        assert code == 2 and text.format(**places) in err and err.count("\n") == 1, err
    for wrong in (("export", run_, "--dtype", "int4"), ("mend", tmp_path)):
        code, _, err = run(capsys, *wrong)
        assert code == 2 and "invalid choice" in err
    assert {path.name for path in tmp_path.iterdir()} == before


def assert_holds(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == expected.keys()  # files keep an order of their own
    assert_equal({name: stored[name] for name in expected}, expected)


def plain_net(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with a buffer of integers, and an optimizer that has stepped."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def flattened_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state as torchtitan saves it: `state.0.weight.exp_avg`, `param_groups.0.weight.lr`."""
    return get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )


def layouts() -> dict[str, tuple[dict[str, Any], str, str]]:
    """What trainers write, where the model lies in it, and what a conversion says that it leaves out."""
    model, optimizer = plain_net()
    state, ids, names = model.state_dict(), optimizer.state_dict(), by_name(optimizer, model)
    flat, rng = flattened_state(model, optimizer), torch.get_rng_state()
    of_optimizer = "(an optimizer's, 18 tensors)"
    return {
        "rng": (
            {"model": state, "optimizer": ids, "rng": rng},
            "model",
            f"optimizer {of_optimizer}, rng (uint8 [5056])",
        ),
        "lightning": (
            {"state_dict": state, "optimizer_states": [ids], "callbacks": {"best": torch.tensor(0.5)}},
            "state_dict",
            f"optimizer_states {of_optimizer}, callbacks (float32 [])",
        ),
        "of names": (
            {"model_state": state, "optim_state": names},
            "model_state",
            f"optim_state {of_optimizer}",
        ),
        "no groups": (
            {"net": state, "opt": {"state": names["state"]}},
            "net",
            f"opt {of_optimizer}",
        ),
        "torchtitan": (
            {**state, "optimizer": flat, "train_state": {"step": torch.tensor(3)}},
            "the top level",
            f"optimizer {of_optimizer}, train_state (int64 [])",
        ),
        "flat": (
            {**state, **flat},
            "the top level",
            f"state {of_optimizer}, param_groups (an optimizer's)",
        ),
        "epoch": ({"state_dict": state, "epoch": 3}, "state_dict", "epoch"),
        "deep": ({"a": {"b": {"state": state}}, "step": 1}, "a.b.state", "step"),
        "in a list": ({"models": [state], "lr": 0.1}, "models.0", "lr"),
    }


@pytest.mark.parametrize("by", ["torch.save", "dcp"])
def test_what_is_a_models_is_decided_by_structure(tmp_path, capsys, by):
    expected = plain_net()[0].state_dict()
    for name, (state, where, left_out) in layouts().items():
        source = tmp_path / (name if by == "dcp" else f"{name}.pt")
        if by == "dcp":
            dcp.save(dict(state), checkpoint_id=source)
        else:
            torch.save(state, source)
        out = done(capsys, "export", source, tmp_path / f"{name} out")
        assert_holds(tmp_path / f"{name} out", expected)
        told, told_left_out, written = out.splitlines()
        assert told.startswith(f"model: {where}, 9 of ") and written.startswith("wrote ")
        assert sorted(told_left_out.removeprefix("left out: ").split(", ")) == sorted(left_out.split(", "))
        assert "model: 9 entries, " in done(capsys, "inspect", source)


def test_of_several_models_none_is_taken_until_one_is_named(tmp_path, capsys):
    (actor, optimizer), (critic, _) = plain_net(), plain_net(1)
    both = {"actor": {"model": actor.state_dict(), "optim": by_name(optimizer, actor)}}
    both["critic"] = {"model": critic.state_dict()}
    dcp.save(both, checkpoint_id=tmp_path / "dcp")
    torch.save(both, tmp_path / "file.pt")
    torch.save({"model": actor.state_dict(), "ema": critic.state_dict()}, tmp_path / "ema.pt")
    torch.save({**actor.state_dict(), "ema": critic.state_dict()}, tmp_path / "beside.pt")
    torch.save([actor.state_dict(), critic.state_dict()], tmp_path / "list.pt")
    for source, first, second in [
        ("dcp", "actor", "critic"),
        ("file.pt", "actor", "critic"),
        ("ema.pt", "model", "ema"),
        ("beside.pt", ".", "ema"),
        ("list.pt", "0", "1"),
    ]:
        for to in ("step", "torch", "safetensors"):
            if to == "torch" and source != "dcp":
                continue
            code, out, err = run(capsys, "convert", "--to", to, tmp_path / source, tmp_path / "none")
            assert code == 2 and not out and not (tmp_path / "none").exists()
            assert f"holds 2 models: --model {first} (9 tensors), --model {second} (9 tensors)" in err
        assert f"2 models: --model {first}, --model {second}" in done(capsys, "inspect", tmp_path / source)
        for name, model in ((first, actor), (second, critic)):
            out_folder = tmp_path / f"{source} {name}"
            done(capsys, "export", "--model", name, tmp_path / source, out_folder)
            assert_holds(out_folder, model.state_dict())
    done(capsys, "export", "--model", "*", tmp_path / "ema.pt", tmp_path / "all")
    given = {"model": actor.state_dict(), "ema": critic.state_dict()}
    joined = {f"{top}.{name}": value for top, state in given.items() for name, value in state.items()}
    assert_holds(tmp_path / "all", joined)


def test_a_prefix_of_all_names_is_told_and_taken_off_on_demand(tmp_path, capsys):
    model, _ = plain_net()
    torch.save({"model": nn.Sequential(model).state_dict(), "epoch": 1}, tmp_path / "m.pt")
    out = done(capsys, "convert", tmp_path / "m.pt", tmp_path / "run")
    assert "all names begin with 0.: --model model.0 takes it off" in out
    done(capsys, "convert", "--model", "model.0", tmp_path / "m.pt", tmp_path / "run")
    again = other(plain_net()[0])
    checkpoint.load(tmp_path / "run", again)
    assert_equal(again.state_dict(), model.state_dict())


def test_two_tensors_of_one_name_are_never_taken_for_one(tmp_path):
    (tmp_path / "tensors").mkdir()
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "tensors" / "model.safetensors")
    source = _sources.open_source(tmp_path / "tensors")
    both = replace(source, names=dict.fromkeys(source.names, "w"))
    for write in (_convert.export, _convert.to_step, _convert.to_torch_file):
        with pytest.raises(RuntimeError, match="holds other values of w: do not use it"):
            write(both, tmp_path / write.__name__)
    torch.save({"a": {"b.c": torch.ones(2)}, "a.b": {"c": torch.zeros(2)}}, tmp_path / "m.pt")
    with pytest.raises(ValueError, match="two tensors that would be called a.b.c: name a smaller part"):
        _sources.open_source(tmp_path / "m.pt", model="*")


def test_files_of_old_forms_and_with_random_states_of_numpy_are_read(tmp_path, capsys):
    numpy = pytest.importorskip("numpy")
    state = plain_net()[0].state_dict()
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    rng = {"numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    torch.save({"net": state, "rng": rng}, tmp_path / "rng.pt")
    for source in ("old.pth", "rng.pt"):
        done(capsys, "export", tmp_path / source, tmp_path / "out")
        assert_holds(tmp_path / "out", state)
    torch.save({"model": state, "args": Namespace(lr=1)}, tmp_path / "args.pt")
    code, _, err = run(capsys, "export", tmp_path / "args.pt")
    assert code == 2 and "holds objects of argparse.Namespace, and nothing of them was run" in err


def test_extra_states_of_modules_go_along_where_they_can(tmp_path, capsys):
    state = {"weight": torch.ones(2), "norm._extra_state": {"scale": torch.ones(3), "steps": 4}}
    torch.save({"net": state, "epoch": 1}, tmp_path / "m.pt")
    assert "left out: epoch\n" in done(capsys, "convert", tmp_path / "m.pt", tmp_path / "run")
    done(capsys, "convert", tmp_path / "run", tmp_path / "full.pt")
    full = torch.load(tmp_path / "full.pt", weights_only=True)
    assert full["model"]["norm._extra_state"]["steps"] == 4
    out = done(capsys, "export", tmp_path / "m.pt", tmp_path / "out")
    assert "left out: net.norm._extra_state, epoch" in out


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_damage_is_told_by_its_file(saved, tmp_path, capsys):
    for number in range(2):
        steps = [checkpoint.save(tmp_path / f"run{number}", nn.Linear(3, 2)) for _ in range(2)]
    flip(tmp_path / "run0" / "step_00000002" / "__0_0.distcp", 40)
    code, out, _ = run(capsys, "inspect", tmp_path / "run0", "--verify")
    assert code == 1 and "step_00000002  incomplete: __0_0.distcp bytes 0 to" in out
    for name in ("convert", "export"):
        code, _, err = run(capsys, name, tmp_path / "run0", tmp_path / "out")
        assert code == 1 and "is damaged" in err and not (tmp_path / "out").exists()

    flip(steps[1] / ".metadata", -1)
    code, out, err = run(capsys, "inspect", tmp_path / "run1")
    told = [line.split(",")[0] for line in out.splitlines()]
    assert code == 1 and told == ["step_00000001  complete", "step_00000002  complete"]
    assert f".metadata bytes 0 to {(steps[1] / '.metadata').stat().st_size} are not as written" in err
    assert f"the step before is complete: load {steps[0]}" in err
    (steps[1] / ".metadata").unlink()
    with pytest.warns(UserWarning, match="passing over .*step_00000002: .metadata is missing"):
        out = done(capsys, "inspect", tmp_path / "run1")
    assert (
        "step_00000002  incomplete: .metadata is missing" in out and f"{steps[0]} (written by torch " in out
    )

    folder = shutil.copytree(saved / "torchs", tmp_path / "copy")
    os.truncate(folder / "__1_0.distcp", (folder / "__1_0.distcp").stat().st_size - 400)
    code, _, err = run(capsys, "convert", folder, tmp_path / "file.pt")
    assert code == 1 and "__1_0.distcp has" in err and not (tmp_path / "file.pt").exists()
    (folder / "__1_0.distcp").unlink()
    code, out, _ = run(capsys, "inspect", "--verify", folder)
    assert code == 1 and "__1_0.distcp is missing" in out


@pytest.mark.parametrize("to", ["safetensors", "torch", "step"])
def test_what_was_written_wrongly_is_not_trusted(tmp_path, capsys, to):
    model = nn.Linear(3, 2)
    checkpoint.save(tmp_path / "run", model)
    torch.save(model.state_dict(), tmp_path / "m.pt")
    names = {"safetensors": "write_safetensors", "torch": "write_file", "step": "SharedSave"}
    real = getattr(_convert, names[to])

    def spoiled(*arguments: Any, **more: Any) -> Any:
        if to == "safetensors":
            directory, described, values = arguments
            return real(directory, described, ((name, value + 1) for name, value in values), **more)
        state = dict(more["state"] if to == "step" else arguments[0])
        state["model"] = {name: value + 1 for name, value in state["model"].items()}
        return real(**{**more, "state": state}) if to == "step" else real(state, *arguments[1:], **more)

    source = tmp_path / ("m.pt" if to == "step" else "run")
    with mock.patch.object(_convert, names[to], spoiled):
        code, _, err = run(capsys, "convert", "--to", to, source, tmp_path / "out")
    assert code == 1 and "holds other values of" in err and "weight" in err and "do not use it" in err


def test_bars_appear_for_what_takes_long(capsys):
    things = iter(range(3))
    with mock.patch.object(_sources, "PATIENCE", 0.0), mock.patch.object(sys.stderr, "isatty", lambda: True):
        assert [*_sources.watched(things, "reading x", lambda _: 10, 30)] == [0, 1, 2]
    assert "reading x" in capsys.readouterr().err
    with mock.patch.object(_sources, "PATIENCE", 0.0):  # standard error is no terminal
        assert [*_sources.watched(iter(range(3)), "reading y", lambda _: 10, 30)] == [0, 1, 2]
    with mock.patch.object(sys.stderr, "isatty", lambda: True):  # it takes no time
        assert [*_sources.watched(iter(range(3)), "reading z", lambda _: 10, 30)] == [0, 1, 2]
    assert capsys.readouterr().err == ""
