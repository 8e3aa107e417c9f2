"""Export and import of full weights as safetensors files, checked with the safetensors library."""

import contextlib
import copy
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from bed import ranks
from bed.memory import Peak, only_new_objects, settled_bytes
from bed.references import count_collectives
from composable import shard_blocks
from fronts import ONE, squares
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy, fully_shard
from fsdp_wrap.checkpoint import export_safetensors
from fsdp_wrap.checkpoint._safetensors import (
    import_safetensors,
    read_safetensors,
    write_files,
    write_safetensors,
)
from fsdp_wrap.wrap import ModuleWrapPolicy
from resuming import net, per_block_of
from state_nets import (
    WIDTH,
    Buffered,
    Mixed,
    Net,
    Shared,
    Tied,
    assert_equal,
    below_plain,
    by_hand,
    changed,
    per_block,
    whole,
    wrapped_and_plain,
)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of an export, found as Hugging Face's libraries do."""
    names = [SINGLE]
    if (folder / INDEX).exists():
        assert not (folder / SINGLE).exists()
        index = json.loads((folder / INDEX).read_text())
        names = sorted(set(index["weight_map"].values()))
    assert sorted(path.name for path in folder.iterdir() if path.name not in (INDEX, "config.json")) == names
    parts = {name: load_file(folder / name) for name in names}
    if len(names) > 1:
        assert names == [f"model-{n:05}-of-{len(names):05}.safetensors" for n in range(1, len(names) + 1)]
        assert index["weight_map"] == {key: name for name, part in parts.items() for key in part}
        total = sum(value.nbytes for part in parts.values() for value in part.values())
        assert index["metadata"] == {"total_size": total}
    for name in names:
        with safe_open(folder / name, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
    return {key: value for part in parts.values() for key, value in part.items()}


def untied(plain: nn.Module) -> dict[str, torch.Tensor]:
    """A plain module's state dict with tied parameters and shared buffers once."""
    firsts = {name for name, _ in (*plain.named_parameters(), *plain.named_buffers())}
    return {name: value for name, value in plain.state_dict().items() if name in firsts}


def same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert_equal(dict(sorted(actual.items())), dict(sorted(expected.items())))


@pytest.mark.parametrize("cls", [Net, Tied, Shared, Buffered, Mixed])
@ranks(3)
def test_export_and_import(rank, world_size, cls, tmp_path):
    wrappings = [whole, per_block, by_hand, *([] if cls in (Tied, Shared) else [below_plain])]
    for number, wrap in enumerate(wrappings):
        most = ("5GB", "0.3KB", 1)[number % 3]
        model, plain = wrapped_and_plain(cls, wrap, use_orig_params=number % 2 == 1)
        files = export_safetensors(model, tmp_path, max_shard_size=most, budget=1 if most == 1 else None)
        same(stored(tmp_path), untied(plain))
        assert files == [SINGLE] if most == "5GB" else len(files) > 1
        assert (most == 1) == (len(files) == len(untied(plain)))
        expected = plain.state_dict()
        others = [
            wrappings[number - 1](cls() if cls is Mixed else cls().double(), use_orig_params=number % 2 == 0)
        ]
        others.append(cls() if cls is Mixed else cls().double())
        for other in others:
            other.load_state_dict(changed(other.state_dict()))
            with count_collectives() as traffic:  # a file goes into a compiled module, too
                compiled: Any = torch.compile(other, backend="eager")
                assert import_safetensors(compiled if number else other, tmp_path) == ([], [])
            assert traffic == {}
            assert_equal(other.state_dict(), expected)
        dist.barrier()


@ranks(2)
def test_dtypes_and_sizes(rank, world_size, tmp_path):
    model, plain = wrapped_and_plain(Mixed, per_block, True)
    export_safetensors(model, tmp_path, dtype=torch.bfloat16)
    dist.barrier()
    values = stored(tmp_path)
    assert values.pop("blocks.0.table").dtype == torch.int64
    same(values, {name: p.detach().bfloat16() for name, p in plain.named_parameters() if name in values})
    for size, error in (("5 apples", ValueError), (0, ValueError), ("0GB", ValueError), (5.0, TypeError)):
        with pytest.raises(error, match="max_shard_size must"):
            export_safetensors(model, tmp_path, max_shard_size=size)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="budget must be a positive number of bytes, not 0"):
        export_safetensors(model, tmp_path / "new", budget=0)
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="cannot hold 0.weight, which is of torch.complex128"):
        export_safetensors(nn.Sequential(nn.Linear(2, 2, dtype=torch.complex128)), tmp_path)
    same(stored(tmp_path) | {}, {**values, "blocks.0.table": plain.blocks[0].table.detach()})


def test_tensors_of_all_kinds_without_ranks(tmp_path):
    folder = tmp_path / "new" / "folder"
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.float16, torch.float8_e4m3fn, torch.complex64):
        values = {
            "matrix": torch.arange(12).view(3, 4).t().to(dtype),
            "bytes": torch.ones(3, dtype=torch.int8),
            "scalar": torch.tensor(1).to(dtype),
            "none": torch.empty(0, 4).to(dtype),
            "after": torch.arange(2.0).double(),
        }
        described = {name: (tuple(value.shape), value.dtype) for name, value in values.items()}
        assert write_safetensors(folder, described, values.items()) == [SINGLE]
        bits = {name: value.contiguous().view(-1).view(torch.uint8) for name, value in values.items()}
        for tensors in (stored(folder), read_safetensors(folder)):
            assert {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()} == described
            whole = {name: torch.clone(value) for name, value in tensors.items()}  # type: ignore[arg-type]
            same({name: value.view(-1).view(torch.uint8) for name, value in whole.items()}, bits)
    with pytest.raises(ValueError, match="expected bytes of"):
        write_safetensors(folder, described, [("matrix", values["matrix"])])
    assert torch.equal(stored(folder)["after"], values["after"])  # as it was


@ranks(2)
def test_neither_export_nor_import_holds_much(rank, world_size, tmp_path):
    with only_new_objects():
        model = squares("orig")
        for budget, most in ((3 * ONE + 1, 3), (1, 2)):
            before = settled_bytes()
            with Peak(before + 1.02 * most * ONE) as peak:
                export_safetensors(model, tmp_path, budget=budget, max_shard_size=2 * ONE)
            assert peak.value - before <= 1.02 * most * ONE
        dist.barrier()
        assert len(stored(tmp_path)) == 8
        before = settled_bytes()
        with Peak(before + 1.02 * ONE) as peak:
            import_safetensors(model, tmp_path)
        assert peak.value - before <= 1.02 * ONE  # a matrix at a time


@ranks(2)
def test_a_new_export_replaces_the_old_one_or_fails_as_a_whole(rank, world_size, tmp_path):
    model, plain = wrapped_and_plain(Net, per_block, True)
    for most in (100, 300, "5GB", 200):
        (tmp_path / "config.json").unlink(missing_ok=True)
        dist.barrier()
        export_safetensors(model, tmp_path, max_shard_size=most)
        dist.barrier()
        same(stored(tmp_path), untied(plain))
        model.load_state_dict(changed(model.state_dict()))
        for error in (OSError("no space left"), MemoryError("no memory left")):
            fails = mock.patch("os.fsync", side_effect=error)
            with fails, pytest.raises(RuntimeError, match="failed on the first rank: .*Error: no .* left"):
                export_safetensors(model, tmp_path, max_shard_size=150)
        dist.barrier()
        same(stored(tmp_path), untied(plain))  # nor is anything left beside it
        dist.barrier()
        plain.load_state_dict(changed(plain.state_dict()))
    (tmp_path / "file").write_text("no directory") if rank == 0 else None
    dist.barrier()
    for place in ("file", "file/below"):
        with pytest.raises(ValueError, match="file is a file, and what is written needs a folder there"):
            export_safetensors(model, tmp_path / place)
    with pytest.raises(ValueError, match="/proc/run cannot be written to"):
        export_safetensors(model, "/proc/run")
    with pytest.warns(DeprecationWarning, match="max_shard_bytes is called max_shard_size now"):
        assert len(export_safetensors(model, tmp_path / "former", max_shard_bytes=100)) > 1
    dist.barrier()
    same(model.state_dict(), plain.state_dict())


class Wide(nn.Module):
    """Of about 4 MiB in 16 matrices, and one that is outside of all units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(16))
        self.scale = nn.Parameter(torch.ones(256))


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD])
@ranks(4)
def test_every_rank_writes_what_it_alone_receives(rank, world_size, tmp_path, strategy):
    torch.manual_seed(0)
    plain = Wide()
    mesh = init_device_mesh("cpu", (2, 2)) if strategy is ShardingStrategy.HYBRID_SHARD else None
    options: dict[str, Any] = {
        "sharding_strategy": strategy,
        "device_mesh": mesh,
        "ignored_states": [plain.scale],
    }
    values = {name: value.clone() for name, value in plain.state_dict().items()}
    model = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **options)
    about = tmp_path / "config.json"
    if rank == 0:
        about.write_text("{}")
        (killed := tmp_path / "out" / ".export_safetensors.killed").mkdir(parents=True)
        os.utime(killed, (0, 0))
    dist.barrier()
    with mock.patch("fsdp_wrap.checkpoint._exports.export.write_files", wraps=write_files) as writes:
        with count_collectives() as traffic:
            files = export_safetensors(model, tmp_path / "out", files=[about])
    (call,) = writes.call_args_list
    own = call.args[1]
    written: list[Any] = [None] * world_size
    dist.all_gather_object(written, [*own])
    assert sorted(name for names in written for name in names) == sorted(files) and all(written)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        [*files, INDEX, "config.json"]
    )
    same(stored(tmp_path / "out"), values)
    assert "all_gather" not in " ".join(map(str, traffic)), "what others write does not come here"
    with pytest.raises(ValueError, match="more.json in `files` is no file"):
        export_safetensors(model, tmp_path / "out", files=[about, tmp_path / "more.json"])
    fails = mock.patch(
        "fsdp_wrap.checkpoint._exports.export.write_files", side_effect=OSError("no space left")
    )
    before = stored(tmp_path / "out")
    dist.barrier()  # or others would see the folder in which this export writes
    with contextlib.nullcontext() if rank != 2 else fails:
        with pytest.raises(RuntimeError, match="failed on rank 2: OSError: no space left"):
            export_safetensors(model, tmp_path / "out")
    dist.barrier()
    same(stored(tmp_path / "out"), before)
    dist.barrier()
    damaged = mock.patch("fsdp_wrap.checkpoint._safetensors.crc_of", return_value=0)
    with damaged, pytest.raises(RuntimeError, match="does not hold what was written of .*: check the disk"):
        export_safetensors(model, tmp_path / "out")


@ranks(2)
def test_models_on_the_meta_device_get_memory_and_values(rank, world_size, tmp_path):
    torch.manual_seed(0)
    plain = Wide()
    if rank == 0:
        save_file(plain.state_dict(), tmp_path / SINGLE)
    dist.barrier()
    with torch.device("meta"):
        model, other = Wide(), Wide()
    for layer in model.layers:
        fully_shard(layer)
    assert import_safetensors(model, tmp_path, budget="1KB") == ([], [])
    same(
        {name: getattr(v, "full_tensor", lambda v=v: v)() for name, v in model.state_dict().items()},
        plain.state_dict(),
    )
    other.register_buffer("table", torch.empty(3, device="meta"), persistent=False)
    for layer in other.layers:
        fully_shard(layer)
    with pytest.raises(RuntimeError, match="table' is on the meta device, and no file holds its values"):
        import_safetensors(other, tmp_path)
    assert all(param.is_meta for param in other.parameters())
    with pytest.raises(ValueError, match="budget must"):
        import_safetensors(model, tmp_path, budget=0)


@ranks(2)
def test_what_does_not_fit_is_named_and_nothing_is_loaded(rank, world_size, tmp_path):
    model, plain = wrapped_and_plain(Buffered, per_block, True)
    good, folder = untied(plain), tmp_path / str(rank)
    folder.mkdir()

    def refused(match: str, changes: dict[str, Any], **options: Any) -> None:
        values = {name: value for name, value in {**good, **changes}.items() if value is not None}
        save_file(values, folder / SINGLE)
        for module in (model, plain):
            before = module.state_dict()
            before = {name: value.clone() for name, value in before.items()}
            with pytest.raises(RuntimeError, match=match):
                import_safetensors(module, folder, **options)
            assert_equal(module.state_dict(), before)

    both_biases = {"head.bias": None, "norm.bias": None}
    refused(r"size mismatch for stem.weight", {"stem.weight": torch.zeros(2, 3)})
    refused(r"Missing key\(s\) in state_dict: \"head.bias\", \"norm.bias\"", both_biases)
    refused(r"Unexpected key\(s\) in state_dict: \"more\"", {"more": torch.zeros(1)})
    refused("dtype mismatch for head.bias: .*int64", {"head.bias": torch.zeros(WIDTH, dtype=torch.int64)})
    refused("dtype mismatch for norm.num_batches", {"norm.num_batches_tracked": torch.tensor(1.0)})
    save_file({**good, "blocks.0.gain": good["blocks.0.gain"].view(1)}, folder / SINGLE)  # as torch 0.3 did
    assert import_safetensors(model, folder) == ([], [])
    refused("size mismatch", {"more": torch.zeros(1), "stem.bias": torch.zeros(2)}, strict=False)

    save_file({"head.bias": torch.ones(WIDTH), "more": torch.zeros(1)}, folder / SINGLE)  # cast to float64
    for module in (model, plain):
        missing, unexpected = import_safetensors(module, folder, strict=False)
        assert sorted(missing) == sorted(set(good) - {"head.bias"}) and unexpected == ["more"]
    assert_equal(model.state_dict(), plain.state_dict())
    assert plain.head.bias.eq(1).all()
    with pytest.raises(RuntimeError, match="'shift' is on the meta device"):
        import_safetensors(Buffered().to("meta"), folder, strict=False)
    with FSDP.summon_full_params(model), pytest.raises(RuntimeError, match="leave its context before"):
        import_safetensors(model, folder)


@ranks(2)
def test_damaged_files_are_named(rank, world_size, tmp_path):
    model, plain = wrapped_and_plain(Net, per_block, True)
    export_safetensors(model, tmp_path, max_shard_size=300)
    dist.barrier()
    files = sorted(path for path in tmp_path.iterdir() if path.name != INDEX)
    before = model.state_dict()

    def refused(path: Path, error: type[Exception], content: bytes | None, why: str = "") -> None:
        kept = path.read_bytes()
        dist.barrier()
        if rank == 0:
            path.unlink() if content is None else path.write_bytes(content)
        dist.barrier()
        with pytest.raises(error, match=f"{path.name}.*{why}"):
            import_safetensors(model, tmp_path)
        dist.barrier()
        path.write_bytes(kept) if rank == 0 else None
        dist.barrier()

    for path in (files[0], files[-1]):
        whole = path.read_bytes()
        refused(path, FileNotFoundError, None)
        for length in (0, 7, 20, len(whole) // 2, len(whole) - 1):
            refused(path, RuntimeError, whole[:length])
        refused(path, RuntimeError, whole + b"more")
    refused(tmp_path / INDEX, FileNotFoundError, None)
    refused(tmp_path / INDEX, RuntimeError, b"{")
    refused(tmp_path / INDEX, RuntimeError, b"{}")
    index = json.loads((tmp_path / INDEX).read_text())
    for file in (files[0].name, f"../{tmp_path.name}/{files[0].name}", str(files[0]), 5, None, ["x"]):
        index["weight_map"]["of.another.model"] = file
        refused(tmp_path / INDEX, RuntimeError, json.dumps(index).encode())
    del index["weight_map"]["of.another.model"]
    for file in (f"../{tmp_path.name}/{files[0].name}", str(files[0])):  # it is there, and has what is needed
        moved = {key: file if name == files[0].name else name for key, name in index["weight_map"].items()}
        content = json.dumps({**index, "weight_map": moved}).encode()
        refused(tmp_path / INDEX, RuntimeError, content, "which is not in its folder")
    assert_equal(model.state_dict(), before)
    assert import_safetensors(model, tmp_path) == ([], [])


@ranks(3)
def test_files_of_each_rank_by_dcp_are_read_as_one_model(rank, world_size, tmp_path):
    """As `HuggingFaceStorageWriter(save_distributed=True)` leaves them: no index, and columns cut too."""
    plain = net()
    state = shard_blocks(copy.deepcopy(plain), torch_fully_shard).state_dict()
    mesh = init_device_mesh("cpu", (3,))
    state["head.weight"] = distribute_tensor(plain.head.weight.detach(), mesh, [Shard(1)])
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(tmp_path / "parts"), save_distributed=True))
    for wrap in (per_block_of, whole, lambda model: model):
        again = net()
        again.load_state_dict(changed(plain.state_dict()))
        again = wrap(again)
        assert import_safetensors(again, tmp_path / "parts") == ([], [])
        assert_equal(again.state_dict(), plain.state_dict())
    dist.barrier()
    if rank == 0:
        parts = sorted((tmp_path / "parts").iterdir())
        assert [path.name[:12] for path in parts] == ["shard-00001-", "shard-00002-", "shard-00003-"]
        with pytest.raises(ValueError, match="holds one rank's part of a model: name its folder"):
            read_safetensors(parts[0])
        parts[1].rename(tmp_path / parts[1].name)
        with pytest.raises(RuntimeError, match="leave out parts of .*head.weight.*: copy the files of all"):
            read_safetensors(tmp_path / "parts")


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_names_that_a_file_cannot_have_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="cannot hold a tensor with the name .*: rename it before"):
        write_safetensors(tmp_path, {name: ((1,), torch.float32)}, [(name, torch.ones(1))])
    model = nn.Module()
    model.register_parameter(name, nn.Parameter(torch.ones(2)))
    with pytest.raises(ValueError, match="cannot hold a tensor with the name"):
        export_safetensors(model, tmp_path)
    assert not any(tmp_path.iterdir())


def test_without_the_library_it_is_named(tmp_path):
    plain = Net()
    export_safetensors(plain, tmp_path)  # writing does not need it
    with mock.patch.dict(sys.modules, {"safetensors": None}):
        with pytest.raises(ImportError, match="pip install safetensors"):
            import_safetensors(plain, tmp_path)
    assert os.listdir(tmp_path) == [SINGLE]
    same(stored(tmp_path), untied(plain))
