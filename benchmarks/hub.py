"""Loads of a model as it lies on the Hub into shards, beside torch's ways; and exports.

    pip install -e '.[clients]' && torchrun --nproc-per-node 2 -m benchmarks.hub

It makes models of 0.5 to 1 GB of random weights (DeepSeek V3 in fp8 with scales of blocks), and prints
tables in Markdown: seconds (median of the rounds, the ways in turns), what all ranks together read from the
disk beside the size of the files (the files are dropped from the page cache before), and how much memory a
rank takes at most beside its shard: its own, and with the pages of files that it has mapped.
`from_pretrained` maps the whole model on each rank, and torch's `fully_shard` cuts it. DCP's reader of
safetensors takes exact names, so it has no row where names differ. `--kinds` and `--layers` try less.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from fsdp_wrap import checkpoint, fully_shard

SIZES: dict[str, Any] = {
    "vocab_size": 16384,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 30, "intermediate_size": 4096},
    "qwen3_moe": {"num_hidden_layers": 12, "num_experts": 24, "moe_intermediate_size": 512},
    "mixtral": {"num_hidden_layers": 9, "num_local_experts": 8, "intermediate_size": 2048},
    "deepseek_v3": {
        "num_hidden_layers": 12,
        "num_key_value_heads": 8,
        "first_k_dense_replace": 1,
        "intermediate_size": 2048,
        "n_routed_experts": 24,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 512,
        "q_lora_rank": 256,
        "kv_lora_rank": 192,
        "head_dim": 64,
    },
    "gpt_oss": {"num_hidden_layers": 18, "num_local_experts": 8, "intermediate_size": 1024},
}
IN_FP8 = ("deepseek_v3",)
FP8 = torch.float8_e4m3fn


def config_of(kind: str) -> Any:
    return transformers.AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind]})


def model_of(kind: str) -> Any:
    return transformers.AutoModelForCausalLM.from_config(config_of(kind), dtype=torch.bfloat16)


def write(kind: str, folder: Path) -> None:
    """Writes a model of random weights as it lies on the Hub."""
    torch.manual_seed(0)
    model = model_of(kind)
    if kind not in IN_FP8:
        model.save_pretrained(folder, max_shard_size="500MB")
        return
    folder.mkdir()
    model.config.save_pretrained(folder)
    config = folder / "config.json"
    checkpoint.export_safetensors(model, folder, dtype=FP8, max_shard_size="500MB", files=[config])


def sharded(model: Any, function: Callable[..., Any]) -> Any:
    for layer in model.model.layers:
        function(layer)
    function(model)
    return model


def by_us(kind: str, folder: Path) -> Any:
    with torch.device("meta"):
        model = model_of(kind)
    sharded(model, fully_shard)
    checkpoint.import_safetensors(model, folder)
    return model


def by_from_pretrained(kind: str, folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return sharded(model, torch_fsdp.fully_shard)


def by_dcp(kind: str, folder: Path) -> Any:
    with torch.device("meta"):
        model = model_of(kind)
    sharded(model, torch_fsdp.fully_shard)
    model.to_empty(device="cpu")
    dcp.load(model.state_dict(), storage_reader=HuggingFaceStorageReader(str(folder)))
    return model


@contextmanager
def measured() -> Iterator[dict[str, float]]:
    """Measures seconds, bytes read and written, and the most anonymous memory above that before."""
    figures: dict[str, float] = {}
    over = threading.Event()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    before, io = _memory(), _io()
    peak = before

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.002):
            peak = [*map(max, peak, _memory())]

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.perf_counter()
    yield figures
    dist.barrier()
    figures["seconds"] = time.perf_counter() - begin
    over.set()
    watcher.join()
    figures |= dict(zip(("own", "mapped"), (most - first for most, first in zip(peak, before))))
    figures |= {name: value - io[name] for name, value in _io().items()}


def _memory() -> list[int]:
    """Returns this process's own memory, and that with the pages of files."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    sizes = {words[0]: int(words[1]) for words in lines if words[0] in ("RssAnon:", "VmRSS:")}
    return [1024 * sizes["RssAnon:"], 1024 * sizes["VmRSS:"]]


def _io() -> dict[str, float]:
    lines = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(value) for name, value in lines if name in ("read_bytes", "write_bytes")}


def drop(folder: Path) -> None:
    """Drops files from the page cache."""
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def from_all(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def loads(kind: str, folder: Path, rounds: int) -> None:
    ways = {"ours": by_us, "from_pretrained, `fully_shard`": by_from_pretrained}
    if kind == "llama":
        ways["DCP's reader"] = by_dcp
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    runs: dict[str, list[list[dict[str, float]]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, load in ways.items():
            if dist.get_rank() == 0:
                drop(folder)
            with measured() as figures:
                model = load(kind, folder)
            shard = sum(param.to_local().nbytes for param in model.parameters())
            figures |= {name: figures[name] - shard for name in ("own", "mapped")}
            runs[way].append(from_all(figures))
            del model
    if dist.get_rank() == 0:
        print(f"\n{kind}, {size / 2**20:.0f} MiB, {dist.get_world_size()} ranks\n")
        print("| | s | disk bytes read / file bytes | beside the shard, MiB | with mapped files |")
        print("|---|---:|---:|---:|---:|")
        for way, rows in runs.items():
            seconds = statistics.median(row[0]["seconds"] for row in rows)
            read = statistics.median(sum(rank["read_bytes"] for rank in row) for row in rows) / size
            own, mapped = (max(r[name] for row in rows for r in row) / 2**20 for name in ("own", "mapped"))
            print(f"| {way} | {seconds:.2f} | {read:.2f} | {own:.0f} | {mapped:.0f} |", flush=True)


def exports(kind: str, folder: Path, rounds: int) -> None:
    model = by_us(kind, folder)

    def ours(out: Path) -> None:
        checkpoint.export_safetensors(model, out, budget=2**28)

    def in_fp8(out: Path) -> None:
        checkpoint.export_safetensors(model, out, budget=2**28, dtype=FP8)

    def theirs(out: Path) -> None:
        state = model.state_dict()
        index = dict.fromkeys(state, 1)
        writer = HuggingFaceStorageWriter(
            str(out), fqn_to_index_mapping=index, save_distributed=True, enable_consolidation=True
        )
        dcp.save(state, storage_writer=writer)

    ways = {"ours": ours, "DCP's writer, consolidated": theirs, "ours, fp8": in_fp8}
    runs: dict[str, list[list[dict[str, float]]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, save in ways.items():
            out = folder.with_name("out")
            if dist.get_rank() == 0:
                shutil.rmtree(out, ignore_errors=True)
            with measured() as figures:
                save(out)
            runs[way].append(from_all(figures))
    if dist.get_rank() == 0:
        print("\n| export | s | MiB written by rank | peak, MiB |\n|---|---:|---|---:|")
        for way, rows in runs.items():
            seconds = statistics.median(row[0]["seconds"] for row in rows)
            written = ", ".join(f"{rank['write_bytes'] / 2**20:.0f}" for rank in rows[-1])
            peak = max(rank["own"] for row in rows for rank in row) / 2**20
            print(f"| {way} | {seconds:.2f} | {written} | {peak:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--layers", type=int, help="of each model, to try it at a smaller size")
    parser.add_argument("--folder", help="where the files are made; a temporary folder by default")
    options = parser.parse_args()
    for sizes in KINDS.values():
        sizes["num_hidden_layers"] = options.layers or sizes["num_hidden_layers"]
    transformers.utils.logging.disable_progress_bar()
    dist.init_process_group("gloo")
    made = [tempfile.mkdtemp(dir=options.folder) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made)
    try:
        for kind in options.kinds:
            folder = Path(made[0], kind)
            if dist.get_rank() == 0:
                write(kind, folder)
            dist.barrier()
            loads(kind, folder, options.rounds)
            if kind == "llama":
                exports(kind, folder, options.rounds)
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(made[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
