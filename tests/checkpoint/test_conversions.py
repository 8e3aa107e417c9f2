"""Checkpoints of each kind made into each other kind by the command, and looked at; no model is needed."""

from __future__ import annotations

import json
import sys
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from bed import ranks
from fsdp_wrap import checkpoint, fully_shard
from fsdp_wrap.checkpoint import _convert, _sources
from fsdp_wrap.checkpoint._command import main
from fsdp_wrap.checkpoint._safetensors import write_safetensors
from optim_states import assert_same, by_name
from resuming import Block, net, other, per_block_of, train, trained
from state_nets import adamw, assert_close, assert_equal

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def run(capsys: Any, *arguments: object) -> tuple[int, str, str]:
    try:
        status = main([str(each) for each in arguments])
    except SystemExit as ended:
        status = int(ended.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


@ranks(2)
def save_by_each_front_end(rank, world_size, path):
    wrapped, composed, torchs = per_block_of(net()), net(), net()
    flat = per_block_of(net(), use_orig_params=False)
    for model, shard in ((composed, fully_shard), (torchs, torch_fully_shard)):
        for module in model.modules():
            if isinstance(module, Block):
                shard(module)
        shard(model)
    saved = {"wrapper": wrapped, "flat": flat, "composed": composed}
    for name, model in {**saved, "torchs": torchs}.items():
        optimizer = adamw(model)
        train(model, optimizer, rank, world_size, range(2))
        if name != "torchs":
            checkpoint.save(path / name, model, optimizer)
    state = torchs.state_dict()
    dcp.save({"model": state}, checkpoint_id=path / "torchs")
    dcp.save(state, checkpoint_id=path / "torchs_flat")
    dcp.save({"app": {"model": state, "step": 3}}, checkpoint_id=path / "torchs_app")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    save_by_each_front_end(path=path, world_size=2)
    return path


KINDS = ["wrapper", "flat", "composed", "torchs", "torchs_flat", "torchs_app"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_goes_round_through_the_others(saved, tmp_path, capsys, kind):
    """Folder to file, to safetensors, to a step, to a file: all with the values of a plain model."""
    expected = trained(2)[0].state_dict()
    code, out, _ = run(capsys, "convert", saved / kind, tmp_path / "full.pt")
    assert code == 0 and "read it back" in out
    full = torch.load(tmp_path / "full.pt", weights_only=True)
    assert_close(full["model"], expected)
    assert ("optim" in full) == (not kind.startswith("torchs"))
    assert run(capsys, "convert", "--to", "safetensors", tmp_path / "full.pt", tmp_path / "tensors")[0] == 0
    tensors = load_file(tmp_path / "tensors" / "model.safetensors")
    assert_equal({name: tensors[name] for name in full["model"]}, full["model"])
    assert run(capsys, "convert", tmp_path / "tensors", tmp_path / "run")[0] == 0
    again = other(net())
    checkpoint.load(tmp_path / "run", again)
    assert_equal(again.state_dict(), full["model"])
    assert run(capsys, "convert", tmp_path / "tensors", tmp_path / "back.pt", "--to", "torch")[0] == 0
    back = torch.load(tmp_path / "back.pt", weights_only=True)["model"]
    assert set(back) == set(full["model"])  # files keep an order of their own
    assert_equal({name: back[name] for name in full["model"]}, full["model"])


def test_a_folder_of_torchs_becomes_a_step(saved, tmp_path, capsys):
    code, out, _ = run(capsys, "convert", "--to", "step", saved / "torchs", tmp_path / "run", "--step", 4)
    assert code == 0 and str(tmp_path / "run" / "step_00000004") in out
    again = other(net())
    checkpoint.load(tmp_path / "run", again)
    assert_close(again.state_dict(), trained(2)[0].state_dict())


def test_a_file_with_an_optimizer_becomes_a_step_that_resumes(saved, tmp_path, capsys):
    assert run(capsys, "convert", saved / "composed", tmp_path / "full.pt")[0] == 0
    assert run(capsys, "convert", tmp_path / "full.pt", tmp_path / "run")[0] == 0
    plain, reference = trained(2)
    again = other(net())
    optimizer = adamw(again)
    checkpoint.load(tmp_path / "run", again, optimizer)
    assert_close(again.state_dict(), plain.state_dict())
    assert_same(by_name(optimizer, again), by_name(reference, plain))


@pytest.mark.parametrize("dtype", ["bf16", "float16"])
def test_an_export_casts_what_is_floating(tmp_path, capsys, dtype):
    model = nn.BatchNorm1d(3)
    checkpoint.save(tmp_path / "run", model)
    assert run(capsys, "export", tmp_path / "run", tmp_path / "out", "--dtype", dtype)[0] == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    wanted = {"bf16": torch.bfloat16, "float16": torch.float16}[dtype]
    assert found["weight"].dtype == found["running_var"].dtype == wanted
    assert found["num_batches_tracked"].dtype == torch.int64
    cast = {name: value.to(found[name].dtype) for name, value in model.state_dict().items()}
    assert_equal({name: found[name] for name in cast}, cast)


def test_an_export_holds_one_tensor_at_a_time(tmp_path):
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12)))
    checkpoint.save(tmp_path / "run", model)
    held: list[int] = []
    real = _convert.open_source

    def counting(*arguments: Any) -> Any:
        source = real(*arguments)
        alive: list[int] = []

        def read(name: str) -> torch.Tensor:
            value = source.read(name)
            storage = value.untyped_storage()
            alive.append(1)
            held.append(len(alive))
            weakref.finalize(storage, alive.pop)
            return value

        return type(source)(source.kind, source.place, source.described, read)

    with mock.patch.object(_convert, "open_source", counting):
        _convert.export(tmp_path / "run", tmp_path / "out")
    assert len(held) == 24 and max(held) <= 2  # written, then compared


def test_what_is_inspected_tells_every_tensor(saved, tmp_path, capsys):
    code, out, _ = run(capsys, "inspect", saved / "torchs_flat")
    assert code == 0 and "by torch.distributed.checkpoint, all its files are there" in out
    assert "head.weight" in out and "float64 [3, 6]  144 B" in out
    code, out, _ = run(capsys, "inspect", "--json", saved / "composed")
    told = json.loads(out)
    assert (told["kind"], told["step"], told["world_size"], told["complete"]) == ("step", 1, 2, True)
    assert told["model"]["head.weight"] == {"shape": [3, 6], "dtype": "float64", "bytes": 144}
    assert set(told["model"]) == set(net().state_dict())
    for path in (tmp_path / "m.pt", tmp_path / "m.safetensors"):
        if path.suffix == ".pt":
            torch.save({"w": torch.ones(2, 3), "step": 3}, path)
        else:
            write_safetensors(tmp_path / "st", {"w": ((2, 3), torch.float32)}, [("w", torch.ones(2, 3))])
            (tmp_path / "st" / "model.safetensors").rename(path)
        code, out, _ = run(capsys, "inspect", path)
        assert code == 0 and "float32 [2, 3]  24 B" in out and ("no tensor" in out) == (path.suffix == ".pt")


def test_wrong_input_is_told_in_one_line(saved, tmp_path, capsys):
    checkpoint.save(tmp_path / "run", nn.Linear(3, 2))
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "m.pt")
    (tmp_path / "full.pt").write_text("")
    torch.save({"epoch": 3}, tmp_path / "counts.pt")
    plain = nn.Linear(3, 2)
    torch.save({"model": plain.state_dict(), "optim": adamw(plain).state_dict()}, tmp_path / "ids.pt")
    dcp.save({"random": {"cpu": torch.get_rng_state()}}, checkpoint_id=tmp_path / "other")
    (tmp_path / "several" / "a").mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        (tmp_path / "several" / "a" / name).write_bytes((saved / "torchs" / name).read_bytes())
    for arguments, text in [
        (("inspect", tmp_path / "nothing"), "there is no folder"),
        (("convert", tmp_path / "nothing"), "there is no file or folder"),
        (("export", tmp_path / "nothing"), "there is no file or folder"),
        (("convert", "--to", "step", tmp_path / "run"), "is a step folder already"),
        (("convert", "--to", "torch", tmp_path / "m.pt"), "is a file for torch.load already"),
        (("convert", tmp_path / "run", tmp_path / "full.pt"), "full.pt exists already: name another"),
        (("convert", tmp_path / "m.pt", tmp_path / "full.pt"), "is a file; a step lies in a folder"),
        (("export", tmp_path / "run", tmp_path / "full.pt"), "full.pt cannot be written to"),
        (("export", tmp_path / "m.pt", "--step", 3), "--step 3 is for folders of steps"),
        (("inspect", tmp_path / "several"), "name one of the folders in it: a"),
        (("inspect", tmp_path / "counts.pt"), "holds neither 'model' (and 'optim') nor a model's state dict"),
        (
            ("convert", "--to", "step", tmp_path / "ids.pt"),
            "state goes by parameter ids; it must go by names",
        ),
        (("export", tmp_path / "other"), "no tensors of a model are there, only random"),
    ]:
        code, _, err = run(capsys, *arguments)
        assert code == 2 and text in err and err.count("\n") == 1, err
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "run"), "--dtype", "int4"])


def test_a_damaged_folder_of_torchs_is_told_by_its_file(saved, tmp_path, capsys):
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in (saved / "torchs").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    data = (folder / "__1_0.distcp").read_bytes()
    (folder / "__1_0.distcp").write_bytes(data[:-400])
    code, _, err = run(capsys, "convert", folder, tmp_path / "file.pt")
    assert code == 1 and "__1_0.distcp has" in err and not (tmp_path / "file.pt").exists()
    (folder / "__1_0.distcp").unlink()
    code, out, _ = run(capsys, "inspect", "--verify", folder)
    assert code == 1 and "__1_0.distcp is missing" in out


@pytest.mark.parametrize("to", ["safetensors", "torch", "step"])
def test_what_was_written_wrongly_is_not_trusted(tmp_path, capsys, to):
    """The values are changed on their way to the disk."""
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
