"""`fsdp-wrap checkpoint` on steps and folders that a URL names; what it writes lies on disk."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
import torch
import torch.distributed.checkpoint as dcp

from buckets import bucket_in, impatient
from fsdp_wrap import checkpoint
from fsdp_wrap.checkpoint import _command
from fsdp_wrap.checkpoint._places.remote import RemotePath
from resuming import Counter, net, trained
from state_nets import assert_equal

pytest.importorskip("safetensors")
KINDS = ["memory", "bucket", "file", "local"]


@pytest.fixture(autouse=True)
def fast(tmp_path, monkeypatch) -> Iterator[None]:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with impatient():
        yield
    fsspec.filesystem("memory").store.clear()


def place_of_kind(kind: str, folder: Path) -> str:
    return "memory://runs/lm" if kind == "memory" else f"{kind}://{folder}/lm"


def told(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    """Runs a command, which must end with a status; returns what it prints."""
    ended = _command.main([*arguments])
    output = capsys.readouterr()
    assert ended == status, output
    return output.out if status == 0 else output.out + output.err


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_inspected_and_converted_by_url(kind, tmp_path, capsys):
    place = place_of_kind(kind, tmp_path)
    model, optimizer = trained(1)
    for step in (3, 4):
        folder = checkpoint.save(place, model, optimizer, {"data": Counter(step)}, step=step)
    names = [*model.state_dict()]

    every = told(capsys, "inspect", place, "--verify")
    assert every.count(" intact, by 1 rank, ") == 2 and all(name in every for name in names)
    assert f"{folder} (written by torch" in every and "  data: of 1 ranks" in every
    one = told(capsys, "inspect", place, "--step", "3", "--json")
    assert json.loads(one)["step"] == 3 and [*json.loads(one)["model"]] == names
    at_step = f"{place}/{folder.name}"
    assert json.loads(told(capsys, "inspect", at_step, "--json"))["step"] == 4
    assert told(capsys, "inspect", at_step).splitlines()[0].startswith(f"{folder.name}  complete, by 1 rank")

    assert "read it back" in told(capsys, "convert", place, "full.pt", "--step", "3")
    full = torch.load("full.pt", weights_only=True)
    assert_equal(full["model"], model.state_dict())
    assert len(full["optim"]["state"]) == len([*model.parameters()])
    assert "read them back" in told(capsys, "export", place, "out", "--dtype", "bf16")
    told(capsys, "convert", place, "tensors", "--to", "safetensors")
    fresh = net()
    checkpoint.import_safetensors(fresh, "tensors")
    assert_equal(fresh.state_dict(), model.state_dict())
    told(capsys, "convert", "full.pt", "steps")
    fresh = net()
    checkpoint.load("steps", fresh)
    assert_equal(fresh.state_dict(), model.state_dict())


@pytest.mark.parametrize("arguments", [["convert"], ["export"], ["convert", "--to", "safetensors"]])
def test_each_byte_is_read_once(arguments, tmp_path, capsys, monkeypatch):
    """A large tensor takes several requests; many small ones take few."""
    place = bucket_in(tmp_path / "lm")
    model = torch.nn.Sequential(torch.nn.Linear(2048, 1500), *(torch.nn.Linear(64, 64) for _ in range(80)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    folder = checkpoint.save(place, model, optimizer)
    fetched: dict[str, int] = {}
    read_range = RemotePath.read_range

    def counted(path: RemotePath, start: int, stop: int) -> bytes:
        data = read_range(path, start, stop)
        fetched[path.name] = fetched.get(path.name, 0) + len(data)
        return data

    monkeypatch.setattr(RemotePath, "read_range", counted)
    told(capsys, arguments[0], place, "out", *arguments[1:])
    sizes = {name: (folder / name).stat().st_size for name in ("__0_0.distcp", ".metadata")}
    assert fetched.keys() == sizes.keys()
    assert all(0.9 * sizes[name] <= fetched[name] <= sizes[name] for name in sizes), (fetched, sizes)
    values = torch.load("out", weights_only=True)["model"] if arguments == ["convert"] else loaded("out")
    assert_equal(values, model.state_dict())


def loaded(folder: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(Path(folder) / "model.safetensors")


@pytest.mark.parametrize("kind", ["memory", "bucket"])
def test_what_is_made_of_a_store_lies_in_the_current_folder_if_no_place_is_named(kind, tmp_path, capsys):
    place = place_of_kind(kind, tmp_path)
    checkpoint.save(place, net())
    told(capsys, "convert", place), told(capsys, "export", place)
    assert sorted(os.listdir()) == ["lm.pt", "lm_safetensors"]


@pytest.mark.parametrize("kind", ["memory", "bucket"])
def test_damage_in_a_store_is_told_and_nothing_is_made_of_it(kind, tmp_path, capsys):
    place = place_of_kind(kind, tmp_path)
    checkpoint.save(place, net(), step=1)
    checkpoint.save(place, net(), step=2)
    folder: Any = checkpoint.latest(place)
    data = (folder / "__0_0.distcp").read_bytes()
    weight = net().state_dict()[[*net().state_dict()][0]]
    at = data.index(bytes(weight.view(-1).view(torch.uint8).tolist()))
    (folder / "__0_0.distcp").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    output = told(capsys, "inspect", place, "--verify", status=1)
    assert output.count("intact") == 1 and f"{folder.name}  incomplete: __0_0.distcp bytes" in output
    output = told(capsys, "convert", place, "full.pt", status=1)
    assert f"error: {folder} is damaged" in output and "the step before is complete: load" in output
    assert f"error: {folder} is damaged" in told(capsys, "export", place, "out", status=1)
    assert "error: " in told(capsys, "convert", place, "tensors", "--to", "safetensors", status=1)
    assert [path for path in Path().rglob("*") if path.is_file()] == []
    (folder / "__0_0.distcp").write_bytes(data[:-1])
    output = told(capsys, "inspect", str(folder), status=0)
    assert f"{folder.name}  incomplete: __0_0.distcp has" in output
    with pytest.warns(UserWarning, match="passing over"):
        told(capsys, "export", place, "out")
    assert sorted(os.listdir("out")) == ["model.safetensors"]


def test_folders_of_torch_are_read_in_a_store(tmp_path, capsys):
    (tmp_path / "lm" / "by_torch").mkdir(parents=True)
    model = net()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "lm" / "by_torch", no_dist=True)
    place = bucket_in(tmp_path / "lm" / "by_torch")
    assert "by torch.distributed.checkpoint, all its files are there" in told(capsys, "inspect", place)
    told(capsys, "convert", place, "steps", "--to", "step")
    fresh = net()
    checkpoint.load("steps", fresh)
    assert_equal(fresh.state_dict(), model.state_dict())
    output = told(capsys, "inspect", bucket_in(tmp_path / "lm"), status=2)
    assert "holds no step folder: name one of the folders in it: by_torch" in output
    (tmp_path / "lm" / "by_torch" / "__0_0.distcp").unlink()
    assert "__0_0.distcp is missing" in told(capsys, "export", place, "out", status=1)


def test_what_is_read_or_written_on_disks_alone_is_refused_by_url(tmp_path, capsys, monkeypatch):
    files = fsspec.filesystem("memory")
    files.pipe({"/store/model.pt": b"1", "/store/tensors/model.safetensors": b"1"})
    for place in ("memory://store/model.pt", "memory://store/tensors"):
        for command in ("inspect", "convert", "export"):
            output = told(capsys, command, place, status=2)
            assert f"error: {place} is in a store, of which steps and folders" in output
    assert "name one of the folders in it: tensors" in told(capsys, "inspect", "memory://store", status=2)
    for command in ("inspect", "convert", "export"):
        output = told(capsys, command, "memory://nothing", status=2)
        assert "error: there is no f" in output and "memory://nothing" in output
    checkpoint.save("steps", net())
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "gs", raising=False)
    for arguments, error in (
        (
            ["export", "steps", "memory://out"],
            "writing takes folders on disk, and memory://out is in a store",
        ),
        (["inspect", "nothing://bucket/run"], "nothing://bucket/run cannot be opened"),
        (["inspect", "gs://bucket/run"], "pip install 'gcsfs'"),
    ):
        with pytest.raises(SystemExit, match="2"):
            _command.main(arguments)
        assert error in capsys.readouterr().err
    assert os.listdir() == ["steps"]
