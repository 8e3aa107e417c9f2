"""Writes docs/interchange.md: who writes checkpoints, who reads them, and at which numbers of ranks.

    python docs/interchange.py

Runs all of it over gloo, on a few processes of this host: each form of a model trains one step and
saves in each way, and each form loads what each other one has saved. The page is replaced.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import fsdp_wrap
from fsdp_wrap import checkpoint
from fsdp_wrap.wrap import ModuleWrapPolicy

TARGET = Path(__file__).with_name("interchange.md")
PAIRS = [(2, 3), (4, 1)]
"""Numbers of ranks that write, and that read. Only of 1, 2 or 4 ranks is the average by DDP exact."""

HEAD = """# Interchange

Which checkpoints load where, with all values intact. Each form of a model trains one step with AdamW in
float64 and saves. Each form loads what every other one has saved, on another number of ranks:
{pairs}.

**exact** means that after the load the model and the optimizer's state have the bits of a plain model that
trained alone, for all of these numbers of ranks. A number refers to the note below the table.

All ran over gloo on torch {torch} with fsdp_wrap {version}. No other version of
torch, and no GPU, was run for this page.

```console
$ python docs/interchange.py
```

FSDP1 is `FullyShardedDataParallel`, FSDP2 is `fully_shard`, of fsdp_wrap or of torch. "orig" means
`use_orig_params=True`. A plain model is the same on all ranks. The page on checkpoints has
[meshes of more dimensions](checkpoints.md#from-mesh-to-mesh) and
[files of other programs](checkpoints.md#files-of-other-programs).
"""


class Block(nn.Module):
    """Odd sizes, so that ranks hold different parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds to its input."""
        return x + self.down(self.up(x))


class Net(nn.Module):
    """Two blocks between layers of the root, and a buffer; all values are small whole numbers."""

    def __init__(self, start: int = 0) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = (
            nn.Linear(5, 6),
            nn.ModuleList([Block(), Block()]),
            nn.Linear(6, 3),
        )
        self.register_buffer("scale", torch.arange(3.0))
        self.double()
        with torch.no_grad():
            for number, value in enumerate(self.state_dict().values()):
                value.copy_((torch.arange(value.numel()).view(value.shape) * 7 + number + start) % 5 - 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes whole numbers from whole numbers, so that no order of sums matters."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def _by_block(way: Callable[..., Any], model: nn.Module) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        way(block)
    return way(model) or model


def _fsdp1(model: nn.Module, orig: bool) -> nn.Module:
    policy, cpu = TorchModuleWrapPolicy({Block}), torch.device("cpu")
    return TorchFSDP(model, auto_wrap_policy=policy, device_id=cpu, use_orig_params=orig)


def _fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return _by_block(partial(torch_fully_shard, mesh=mesh), model)


def _wrapper(model: nn.Module, orig: bool) -> nn.Module:
    policy = ModuleWrapPolicy({Block})
    return fsdp_wrap.FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=orig)


FORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fsdp_wrap FSDP1": partial(_wrapper, orig=False),
    "fsdp_wrap FSDP1, orig": partial(_wrapper, orig=True),
    "fsdp_wrap FSDP2": partial(_by_block, fsdp_wrap.fully_shard),
    "torch FSDP1": partial(_fsdp1, orig=False),
    "torch FSDP1, orig": partial(_fsdp1, orig=True),
    "torch FSDP2": _fsdp2,
    "torch DDP": DistributedDataParallel,
    "plain": lambda model: model,
}


class Side:
    """A model in one form, with its optimizer."""

    def __init__(self, form: str, start: int = 0) -> None:
        self.model = FORMS[form](Net(start))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        """Trains a step, on the same batch on all ranks."""
        self.model(torch.arange(10.0, dtype=torch.float64).view(2, 5) % 3).sum().backward()
        self.optimizer.step()

    def state(self, **options: Any) -> dict[str, Any]:
        """Returns the state by torch's functions."""
        model, optim = get_state_dict(self.model, self.optimizer, options=StateDictOptions(**options))
        return {"model": model, "optim": optim}

    def take(self, state: dict[str, Any], **options: Any) -> None:
        """Loads a state by torch's functions."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=StateDictOptions(**options),
        )

    def full(self, optim: bool) -> dict[str, torch.Tensor]:
        """Returns all values in full, of the optimizer's too."""
        state = self.state(full_state_dict=True, flatten_optimizer_state_dict=True)
        optim_state = {name: value for name, value in state["optim"].items() if name.startswith("state.")}
        return {**state["model"], **(optim_state if optim else {})}


# the ways


def _save_dcp(side: Side, path: Path) -> None:
    dcp.save(side.state(), checkpoint_id=path)


def _load_dcp(side: Side, path: Path) -> None:
    state = side.state()
    dcp.load(state, checkpoint_id=path, planner=DefaultLoadPlanner(flatten_sharded_tensors=False))
    side.take(state)


WRAPPERS: dict[type, Any] = {fsdp_wrap.FullyShardedDataParallel: fsdp_wrap, TorchFSDP: torch.distributed.fsdp}


def _in_full(side: Side, first_only: bool) -> AbstractContextManager[Any]:
    """Sets a wrapper to full states; on a CPU torch's own returns wrong values where it offloads them."""
    lib, how = WRAPPERS[type(side.model)], {"offload_to_cpu": False, "rank0_only": first_only}
    configs = lib.FullStateDictConfig(**how), lib.FullOptimStateDictConfig(**how)
    return lib.FullyShardedDataParallel.state_dict_type(
        side.model, lib.StateDictType.FULL_STATE_DICT, *configs
    )


def _save_file(side: Side, path: Path) -> None:
    wrapper: Any = type(side.model)
    if wrapper in WRAPPERS:
        with _in_full(side, first_only=True):
            optim = wrapper.optim_state_dict(side.model, side.optimizer)
            state = {"model": side.model.state_dict(), "optim": optim}
    else:
        state = side.state(full_state_dict=True, cpu_offload=True)
    if dist.get_rank() == 0:
        torch.save(state, path)


def _load_file(side: Side, path: Path) -> None:
    state = torch.load(path, weights_only=True)
    wrapper: Any = type(side.model)
    if wrapper in WRAPPERS:
        with _in_full(side, first_only=False):
            side.model.load_state_dict(state["model"])
            own = wrapper.optim_state_dict_to_load(side.model, side.optimizer, state["optim"])
        side.optimizer.load_state_dict(own)
    else:
        side.take(state, full_state_dict=True)


def _bare(side: Side) -> nn.Module:
    """Returns the model without DDP, whose names have a prefix."""
    return side.model.module if isinstance(side.model, DistributedDataParallel) else side.model


class Way(NamedTuple):
    """How a state is saved and loaded."""

    title: str
    text: str
    save: Callable[[Side, Path], Any]
    load: Callable[[Side, Path], Any]
    optim: bool = True


WAYS = {
    "folder": Way(
        "Step folders",
        "`fsdp_wrap.checkpoint.save(path, model, optimizer)`, `load`.",
        lambda side, path: checkpoint.save(path, side.model, side.optimizer),
        lambda side, path: checkpoint.load(path, side.model, side.optimizer),
    ),
    "dcp": Way(
        "DCP",
        "`get_state_dict`, `torch.distributed.checkpoint.save`; `load`, `set_state_dict`.",
        _save_dcp,
        _load_dcp,
    ),
    "file": Way(
        "Full state in one file",
        "`torch.save` on the first rank, of what each form's own functions give in full: of a wrapper "
        "`FULL_STATE_DICT` with `rank0_only`, and without `offload_to_cpu`, by which torch's own writes "
        "wrong values on a CPU; of others `get_state_dict` with `full_state_dict`, "
        "`cpu_offload`. All ranks read the file.",
        _save_file,
        _load_file,
    ),
    "safetensors": Way(
        "Safetensors",
        "The model alone, by `fsdp_wrap.checkpoint.export_safetensors` and `import_safetensors`.",
        lambda side, path: checkpoint.export_safetensors(_bare(side), path),
        lambda side, path: checkpoint.import_safetensors(_bare(side), path),
        optim=False,
    ),
}


# running them


class Outcome(NamedTuple):
    """What came of one writer, one way and one reader (of the save alone: no reader), at numbers of ranks."""

    way: str
    writer: str
    reader: str
    ranks: tuple[int, int]
    told: str


Case = tuple[str, str, str, tuple[int, int]]
"""An outcome before it is known."""


def _told(store: dist.Store, rank: int, size: int, act: Callable[[], str]) -> str:
    """Returns what an act tells in a group of its own, or which error refuses it, the same on all ranks."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    store.set(f"ready {rank}", "")  # no rank may fail and leave while others still connect
    store.wait([f"ready {other}" for other in range(size)])
    try:
        result = act()
    except (Exception, dcp.CheckpointException) as error:  # whatever refuses is the outcome
        own = getattr(error, "failures", None)  # of ranks, in DCP's words
        result = str(error).strip()
        result = result.splitlines()[-1] if own else f"{type(error).__name__}: {result}"
    store.set(f"told {rank}", result)
    dist.destroy_process_group()  # without a barrier: frees ranks that wait for one that failed
    every = [store.get(f"told {other}").decode() for other in range(size)]
    failed = [told for told in every if told != EXACT]
    return min(failed, key=lambda told: "gloo" in told, default=EXACT)  # a lost peer is a consequence


EXACT = "exact"


def _saved(way: Way, form: str, path: Path) -> str:
    side = Side(form)
    side.step()
    way.save(side, path)
    return EXACT


def _loaded(way: Way, form: str, path: Path) -> str:
    side, plain = Side(form, start=3), Side("plain")
    way.load(side, path)
    plain.step()
    loaded, expected = side.full(way.optim), plain.full(way.optim)
    if loaded.keys() != expected.keys():
        return f"other names: {sorted(loaded.keys() ^ expected.keys())}"
    other = [
        name for name, value in expected.items() if not torch.equal(torch.as_tensor(loaded[name]), value)
    ]
    return f"other values of {other}" if other else EXACT


def _process(rank: int, size: int, job: str, folder: Path, port: int) -> None:
    """One rank of those that write, or that read."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", port)
    rows = []
    for case, act in _writes(size, folder) if job == "write" else _reads(size, folder):
        told = _told(dist.PrefixStore(f"{job} {case}", store), rank, size, act)
        rows.append((*case, told))
    if rank == 0:
        (folder / f"{job} {size}.json").write_text(json.dumps(rows))


def _writes(size: int, folder: Path) -> Iterator[tuple[Case, Callable[[], str]]]:
    for key, way in WAYS.items():
        for form in FORMS:
            yield (key, form, "", (size, size)), partial(_saved, way, form, folder / f"{key}, {form}, {size}")


def _reads(size: int, folder: Path) -> Iterator[tuple[Case, Callable[[], str]]]:
    for (key, way), writer, (wrote, reads) in product(WAYS.items(), FORMS, PAIRS):
        path = folder / f"{key}, {writer}, {wrote}"
        for reader in FORMS if reads == size and path.exists() else ():
            yield (key, writer, reader, (wrote, reads)), partial(_loaded, way, reader, path)


def outcomes() -> list[Outcome]:
    """Runs everything."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for job in ("write", "read"):
            for size in sorted({pair[job == "read"] for pair in PAIRS}):
                store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
                torch.multiprocessing.spawn(_process, (size, job, Path(name), store.port), nprocs=size)
                rows += json.loads(Path(name, f"{job} {size}.json").read_text())
    return [Outcome(way, writer, reader, tuple(ranks), told) for way, writer, reader, ranks, told in rows]


# the page


def table_of(way: str, outcomes: list[Outcome]) -> list[str]:
    """Returns the table of a way, and its notes."""
    notes: dict[str, int] = {}
    lines = [f"| writer | {' | '.join(FORMS)} |", f"|---|{'---|' * len(FORMS)}"]
    for writer in FORMS:
        cells = [_cell(way, writer, reader, outcomes, notes) for reader in FORMS]
        lines.append(f"| {writer} | {' | '.join(cells)} |")
    return [*lines, "", *(f"{number}. {note}" for note, number in notes.items())]


def _cell(way: str, writer: str, reader: str, outcomes: list[Outcome], notes: dict[str, int]) -> str:
    """Returns what came of one pair of forms, at all numbers of ranks; errors are notes by number."""
    known = {outcome[:4]: outcome for outcome in outcomes}
    parts: dict[str, list[str]] = {}
    for wrote, reads in PAIRS:
        save, load = (
            known.get((way, writer, "", (wrote, wrote))),
            known.get((way, writer, reader, (wrote, reads))),
        )
        outcome = save if save and save.told != EXACT else load
        told = outcome.told if outcome else "not run"
        if outcome and told != EXACT:
            told = f"({notes.setdefault(_note(outcome), len(notes) + 1)})"
        parts.setdefault(told, []).append(f"{wrote} → {reads}")
    everywhere, *others = parts
    return "; ".join(f"{', '.join(pairs)}: {told}" for told, pairs in parts.items()) if others else everywhere


def _note(outcome: Outcome) -> str:
    text = re.sub(r"\s+", " ", outcome.told)
    text = re.sub(r"/tmp/\S*", "PATH", text).replace("|", "/").replace("<", "&lt;")
    return f"{'Saving' if not outcome.reader else 'Loading'} fails: `{text[:300]}`"


def head(torch_version: str) -> str:
    """Returns what the page begins with."""
    pairs = ", ".join(f"{wrote} → {read}" for wrote, read in PAIRS)
    return HEAD.format(pairs=pairs, torch=torch_version, version=fsdp_wrap.__version__)


def page(outcomes: list[Outcome]) -> str:
    """Returns the page."""
    parts = [
        "\n".join([f"## {way.title}", "", way.text, "", *table_of(key, outcomes)]).strip() + "\n"
        for key, way in WAYS.items()
    ]
    return "\n".join([head(torch.__version__), *parts])


def main() -> int:
    """Writes the page."""
    TARGET.write_text(page(outcomes()), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
