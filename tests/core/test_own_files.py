"""What another user of the host has put under a name is not written to, wherever the package writes."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_wrap import checkpoint
from fsdp_wrap._comm.positions import log_files
from fsdp_wrap._core import own_files
from fsdp_wrap._values import files as values
from fsdp_wrap.checkpoint import _convert
from fsdp_wrap.checkpoint._storage import CheckedWriter
from fsdp_wrap.tools.timeline import trace
from fsdp_wrap.tools.timeline.records import RankRecord
from fsdp_wrap.weights import WeightFolder

HEADER = values.Header(0, 1, 1.0, {}, "2")
EMPTY: list[Any] = [*[0] * 4, *[()] * 6, {}]
RECORD = partial(RankRecord, 0, "host", "cpu")(*EMPTY)


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file that must stay as it is."""
    file = tmp_path / "precious"
    file.write_bytes(b"precious")
    return file


def made(folder: Path, mode: int = 0o700) -> Path:
    folder.mkdir()
    folder.chmod(mode)
    return folder


def give_away(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a folder belong to another user than the one who saves."""
    if os.geteuid() == 0:
        os.chown(folder, 1001, -1)
    else:
        own = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
        monkeypatch.setattr(own_files, "_tells_users", lambda _: True)


def save(place: Any) -> Path:
    return checkpoint.save(place, nn.Linear(2, 2), step=1)


PLANTED: dict[str, Callable[[Path, Path], None]] = {
    "link": lambda path, precious: path.symlink_to(precious),
    "second name": lambda path, precious: os.link(precious, path),
    "pipe": lambda path, _: os.mkfifo(path),
    "folder": lambda path, _: path.mkdir(),
}
SAVES: dict[str, Callable[[Path], object]] = {
    "disk": save,
    "memory": lambda folder: save(checkpoint.InMemory(folder)),
    "clear": lambda folder: checkpoint.InMemory(folder).clear(),
}


@pytest.mark.filterwarnings("ignore:all ranks keep their checkpoint")
@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize("how", SAVES)
def test_what_lies_in_the_place_of_a_lock_is_refused_by_name(tmp_path, precious, planted, how):
    folder = made(tmp_path / "run")
    PLANTED[planted](folder / ".saving", precious)
    with pytest.raises(ValueError, match=r"run/\.saving is a link, no file, or another user's"):
        SAVES[how](folder)
    assert precious.read_bytes() == b"precious"


@pytest.mark.filterwarnings("ignore:all ranks keep their checkpoint")
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata.tmp", ".manifest.json.draft"])
@pytest.mark.parametrize("memory", [False, True])
def test_no_file_of_a_save_is_there_before(tmp_path, precious, name, memory, monkeypatch):
    """Whoever may write to a folder can put links in the place of what a save has just made."""
    write = CheckedWriter.write_data

    def exchanged(self: CheckedWriter, *args: Any) -> Any:
        folder = Path(self.path)
        folder.rename(folder.with_name("away"))
        (made(folder) / name).symlink_to(precious)
        return write(self, *args)

    monkeypatch.setattr(CheckedWriter, "write_data", exchanged)
    place = tmp_path / "run"
    with pytest.raises(RuntimeError, match=rf"File exists: .*partial/{name}"):
        save(checkpoint.InMemory(place) if memory else place)
    assert precious.read_bytes() == b"precious"


@pytest.mark.filterwarnings("ignore:all ranks keep their checkpoint")
def test_folders_that_others_may_change_are_refused_by_name(tmp_path, monkeypatch):
    open_to_all = made(tmp_path / "shm", 0o1777)
    memory, disk = (lambda path: checkpoint.InMemory(path)), (lambda path: path)
    by_all = made(open_to_all / "by_all", 0o777)
    by_group = made(open_to_all / "by_group", 0o770)
    of_group = made(open_to_all / "of_group", 0o700)
    link = open_to_all / "link"
    link.symlink_to(of_group)
    for place, folder, message in (
        (memory, by_all, r"other users may write to .*/by_all \(mode 777\)"),
        (disk, by_all, r"other users may write to .*/by_all \(mode 777\)"),
        (memory, by_group, r"other users may write to .*/by_group \(mode 770\)"),
        (memory, link, ".*/link is a link, which others may have laid"),
    ):
        for act in (save, lambda place: checkpoint.load(place, nn.Linear(2, 2))):
            if place is memory or act is save:
                with pytest.raises(ValueError, match=message + ".*Nothing was written: name a folder"):
                    act(place(folder))
        assert not os.listdir(folder)
    for folder in (
        by_group,
        link,
        open_to_all,
    ):  # a group is trusted, and nobody can exchange entries of /tmp
        save(folder)
    assert os.listdir(of_group) == ["step_00000001"]

    given = made(open_to_all / "given", 0o755)
    give_away(given, monkeypatch)
    places: list[Any] = [given, checkpoint.InMemory(given), checkpoint.InMemory(given / "run")]
    for where in places:
        with pytest.raises(ValueError, match=r"/given(/run)? belongs to another user \(id \d+\): they could"):
            save(where)


@pytest.mark.filterwarnings("ignore:all ranks keep their checkpoint")
def test_what_is_made_where_everybody_may_write_is_for_this_user_alone(tmp_path):
    open_to_all = made(tmp_path / "shm", 0o1777)
    save(checkpoint.InMemory(open_to_all / "memory" / "run"))
    save(open_to_all / "disk")
    WeightFolder(open_to_all / "weights")
    save(checkpoint.InMemory(tmp_path / "elsewhere"))
    before = os.umask(0)
    try:
        save(tmp_path / "on_disk")
    finally:
        os.umask(before)
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in (*tmp_path.iterdir(), *open_to_all.iterdir())
    }
    assert modes == {
        "shm": 0o1777,
        "memory": 0o700,
        "disk": 0o700,
        "weights": 0o700,
        "elsewhere": 0o700,
        "on_disk": 0o775,
    }


def test_file_systems_that_tell_no_users_are_not_judged(tmp_path, monkeypatch):
    """Some of networks and of other systems show every file as one user's, and open to all."""
    folder = made(tmp_path / "run")

    def shown(look: Callable[[Any], os.stat_result]) -> Callable[[Any], os.stat_result]:
        def all_alike(path: Any) -> os.stat_result:
            mode, *rest = look(path)
            return os.stat_result((mode | 0o777, *rest[:3], 1001, *rest[4:]))

        return all_alike

    alike = {"stat": shown(os.stat), "lstat": shown(os.lstat)}
    monkeypatch.setattr(own_files, "os", SimpleNamespace(**{**vars(os), **alike}))
    own_files.refuse_others(folder)
    own_files.refuse_others(folder, alone=True)
    assert not os.listdir(folder)


def test_other_files_do_not_follow_links_that_others_have_laid(tmp_path, precious, monkeypatch):
    folder, run = made(tmp_path / "folder"), tmp_path / "run"
    save(run)
    (folder / ".model.pt.partial").symlink_to(precious)
    _convert.step_to_torch_file(run, folder / "model.pt")
    assert torch.load(folder / "model.pt")["model"]["bias"].shape == (2,)

    weights = WeightFolder(folder)
    (folder / "closed").symlink_to(tmp_path / "new")
    with pytest.raises(ValueError, match="folder/closed is a link"):
        weights.close()
    assert not (tmp_path / "new").exists()

    (folder / "rank-00000.jsonl").symlink_to(tmp_path / "new")
    with pytest.raises(OSError, match="File exists: .*/rank-00000.jsonl"):
        values.Writer(folder, HEADER)
    assert not (tmp_path / "new").exists()

    open_to_all = made(tmp_path / "shm", 0o1777)
    given = open_to_all / "trace.json"
    given.write_text("")
    assert own_files.own_output(given) == given
    give_away(given, monkeypatch)
    with pytest.raises(ValueError, match=r"trace.json is another user's"):
        trace.write([RECORD], given)
    assert precious.read_bytes() == b"precious" and given.read_text() == ""


@pytest.mark.parametrize("planted", PLANTED)
def test_positions_lie_in_files_of_this_user(tmp_path, precious, planted):
    path = tmp_path / "fsdp_wrap-0.0"
    PLANTED[planted](path, precious)
    with pytest.raises(OSError, match=r"fsdp_wrap-0\.0 is a link, no file"):
        log_files.open_log(path, 0, 2)
    os.utime(path, (0, 0), follow_symlinks=False)
    log_files._remove_left_overs(tmp_path)
    assert os.path.lexists(path) and precious.read_bytes() == b"precious"


def test_positions_in_a_file_of_another_user_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "fsdp_wrap-0.0"
    path.touch()
    os.utime(path, (0, 0))
    give_away(path, monkeypatch)
    with pytest.raises(OSError, match=r"fsdp_wrap-0\.0 is a link, no file, or another user's"):
        log_files.open_log(path, 0, 2)
    log_files._remove_left_overs(tmp_path)
    assert path.exists()
