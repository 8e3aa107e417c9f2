"""Mistakes that newcomers make: each a short program of two ranks, with what it is told.

`tests/whole/test_mistakes.py` runs them all. `python tests/mistakes.py` prints them as a table. Arguments of
wrong types, and what is refused in the middle of training, are in `tests/whole/test_errors.py`; those of the
command `fsdp-wrap` in `tests/tools/test_command.py`.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store as store

import fsdp_wrap
import told
from bed import run_ranks
from bed.patience import NEVER
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import (
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    checkpoint,
    fully_shard,
    iter_full_params,
)
from fsdp_wrap._comm.watching import watch as _watch
from fsdp_wrap.distributed_state_dict import StateDictOptions, get_model_state_dict
from fsdp_wrap.wrap import (
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from nets import WIDTH, Block, Net

TIME_LIMIT = 3.0
"""Seconds after which a rank that does not come is given up, by this package."""

TABLE = r"""
# wrapping
FSDP(model)  # before init_process_group
    > dist.destroy_process_group(); FSDP(model)
    ValueError: needs a process group.*init_process_group
fully_shard(model)  # before init_process_group
    > dist.destroy_process_group(); fully_shard(model)
    ValueError: needs a process group.*init_process_group
fully_shard(model); fully_shard(model)
    ValueError: already wrapped.*each once
fully_shard(model); fully_shard(model.blocks[0])  # before its blocks
    ValueError: wrap parts before the whole
FSDP(model on the meta device), without values
    > with torch.device("meta"): model = nn.Sequential(nn.Linear(4, 4), Scale())
    > FSDP(model)
    ValueError: meta.*param_init_fn
FSDP(model, device_id=0)  # no accelerator here
    ValueError: device_id=0.*accelerator
FSDP(model, device_id="cuda")  # no CUDA here
    ValueError: device_id.*cuda

# policies
FSDP(model, auto_wrap_policy=ModuleWrapPolicy(Block))
    TypeError: a set of module classes, not the class Block: write ModuleWrapPolicy\(\{Block\}\)
FSDP(model, auto_wrap_policy=ModuleWrapPolicy("Block"))
    TypeError: NameWrapPolicy\('Block'\)
FSDP(model, auto_wrap_policy=ModuleWrapPolicy)
    TypeError: not the class ModuleWrapPolicy: write ModuleWrapPolicy\(\{Block\}\)
FSDP(model, auto_wrap_policy=Block)
    TypeError: ModuleWrapPolicy\(\{Block\}\)
FSDP(model, auto_wrap_policy=size_based_auto_wrap_policy(min_num_params=10))
    TypeError: functools.partial
FSDP(model, auto_wrap_policy=transformer_auto_wrap_policy)
    TypeError: functools.partial.*transformer_layer_cls
FSDP(model, auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls=Block))
    TypeError: \{Block\}

# keywords
FSDP(model, mesh=mesh)
    > FSDP(model, mesh=init_device_mesh("cpu", (2,)))
    TypeError: 'mesh'.*device_mesh
fully_shard(model, device_mesh=mesh)
    > fully_shard(model, device_mesh=init_device_mesh("cpu", (2,)))
    TypeError: 'device_mesh'.*mesh
FSDP(model, mp_policy=MixedPrecisionPolicy())
    TypeError: 'mp_policy'.*mixed_precision
fully_shard(model, mixed_precision=MixedPrecision())
    TypeError: 'mixed_precision'.*mp_policy
FSDP(model, reshard_after_forward=False)
    TypeError: 'reshard_after_forward'.*sharding_strategy
fully_shard(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
    TypeError: 'auto_wrap_policy'.*apply fully_shard to
FSDP(model, sharding_stratgy=ShardingStrategy.FULL_SHARD)
    TypeError: did you mean.*sharding_strategy
fully_shard(model, reshard_after_foward=True)
    TypeError: did you mean.*reshard_after_forward
checkpoint.save(dir, model, optimizer=optimizer)
    > model = wrapped(); checkpoint.save("/tmp/nowhere", model, optimizer=sgd(model))
    TypeError: save\(\) has no argument 'optimizer': pass it as optim
fsdp_wrap.plan(lambda: None, 2, machin=None)
    TypeError: did you mean.*machine

# training
SGD(model.parameters()) before FSDP(model)
    > optimizer = sgd(model); step(FSDP(model), optimizer)
    RuntimeError: this SGD was made before the model was sharded.*after sharding
SGD(model.parameters()) before fully_shard(model)
    > optimizer = sgd(model); step(fully_shard(model), optimizer)
    RuntimeError: this SGD was made before the model was sharded.*after sharding
torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)  # of FSDP
    > clip_by_the_norm_of_each_part(rank)
    RuntimeError: ranks have scaled parts of one gradient differently.*model\.clip_grad_norm_\(max_norm\)
for block in model.blocks: fully_shard(block)  # and not the model
    > forget_the_root(rank)
    RuntimeError: a gradient differs between ranks 0 and 1: that of 'stem\.weight'.*fully_shard\(model\)
torch.amp.GradScaler  # with FSDP
    > scale_by_torchs_scaler(rank)
    RuntimeError: ranks have taken different numbers of optimizer steps.*ShardedGradScaler
layer.weight = nn.Parameter(...)  # after fully_shard
    > model = sharded(); model.head.weight = nn.Parameter(torch.ones(3, WIDTH)); step(model)
    ValueError: weight.*replaced|replaced.*weight
the ranks run different blocks
    > model = wrapped(); model(batch())
    > if rank == 0: del model.module.blocks[0]
    > step(model)
    RuntimeError: ranks communicate for different units: rank 0
a rank has fewer batches
    > have_fewer_batches(rank)
    RuntimeError on rank 0: has not completed: rank 1 did not come
ranks begin with other values
    > torch.manual_seed(rank); step(FSDP(Net()))
    UserWarning on some rank: began with other values.*same seed

# names of the last release
FSDP(model, keep_unsharded_bytes=2**30)
    TypeError: is gone since 0.2.*SHARD_GRAD_OP
fully_shard(model, keep_unsharded_bytes=2**30)
    TypeError: gone.*set_reshard_after_backward
model.set_keep_unsharded_bytes(0)  # of FSDP
    > wrapped().set_keep_unsharded_bytes(0)
    AttributeError: is gone since 0.2.*SHARD_GRAD_OP
model.set_keep_unsharded_bytes(0)  # of fully_shard
    > sharded().set_keep_unsharded_bytes(0)
    AttributeError: set_reshard_after_backward

# methods of the other front-end
model.no_sync()  # of fully_shard
    > sharded().no_sync()
    AttributeError: no_sync.*set_requires_gradient_sync
model.clip_grad_norm_(1.0)  # of fully_shard
    > sharded().clip_grad_norm_(1.0)
    AttributeError: fsdp_wrap.clip_grad_norm_
model.summon_full_params()  # of fully_shard
    > sharded().summon_full_params()
    AttributeError: summon_full_params
model.set_requires_gradient_sync(False)  # of FSDP
    > wrapped().set_requires_gradient_sync(False)
    AttributeError: no_sync\(\)
model.unshard()  # of FSDP
    > wrapped().unshard()
    AttributeError: summon_full_params

# state dicts
load_state_dict of a DDP checkpoint ("module." names)
    > wrapped().load_state_dict(state_of(model, "module."))
    RuntimeError: 'module.' of DistributedDataParallel.*consume_prefix
load_state_dict of a DDP checkpoint ("module." names), with fully_shard
    > sharded().load_state_dict(state_of(model, "module."))
    RuntimeError: 'module.' of DistributedDataParallel.*consume_prefix
load_state_dict of a compiled model ("_orig_mod." names)
    > wrapped().load_state_dict(state_of(model, "_orig_mod."))
    RuntimeError: '_orig_mod.' of torch.compile.*consume_prefix
load_state_dict of a model with more layers
    > wrapped().load_state_dict({f"{n}.weight": torch.ones(1) for n in range(30)} | state_of(model))
    RuntimeError: Unexpected key.*"9.weight" and 20 more

# one rank alone
if rank == 0: torch.save(model.state_dict()); the other trains on
    > alone(lambda model, _: model.state_dict(), wrapped(), rank)
    RuntimeError: state_dict\(\).*rank 1
if rank == 0: torch.save(model.state_dict()); the other waits
    > alone(lambda model, _: model.state_dict(), wrapped(), rank, waits=True)
    RuntimeError on rank 0: state_dict\(\).*rank 1
if rank == 0: FSDP.optim_state_dict(model, optimizer)
    > alone(FSDP.optim_state_dict, wrapped(), rank)
    RuntimeError: optim_state_dict\(\).*rank 1
if rank == 0: get_model_state_dict(model, full)
    > alone(get_full, wrapped(), rank)
    RuntimeError: get_model_state_dict\(\).*rank 1
if rank == 0: get_model_state_dict(model, full), with fully_shard
    > alone(get_full, sharded(), rank)
    RuntimeError: get_model_state_dict\(\).*rank 1
if rank == 0: with FSDP.summon_full_params(model)
    > alone(summon, wrapped(), rank)
    RuntimeError: summon_full_params\(\).*rank 1
if rank == 0: dict(iter_full_params(model))
    > alone(lambda model, _: dict(iter_full_params(model)), sharded(), rank)
    RuntimeError: iter_full_params\(\).*rank 1
if rank == 0: model.clip_grad_norm_(1.0)
    > alone(lambda model, _: fsdp_wrap.clip_grad_norm_(model, 1.0), wrapped(), rank)
    RuntimeError: rank 0 takes part in ALL_REDUCE|rank 1 takes part in ALL_GATHER
if rank == 0: checkpoint.save(...)
    > with tempfile.TemporaryDirectory() as folder: alone(partial(checkpoint.save, folder), wrapped(), rank)
    RuntimeError: checkpoint.save.*rank 1
if rank == 0: model(batch)
    > alone(lambda model, _: model(batch()), wrapped(), rank, waits=True)
    RuntimeError on rank 0: has not completed: rank 1 did not come
if rank == 0: model.load_state_dict(...)
    > alone(lambda model, _: model.load_state_dict(Net().state_dict()), wrapped(), rank)
    RuntimeError: have loaded or edited apart: rank 0

# checkpoints
checkpoint.save(a file, model)
    > with somewhere() as folder: checkpoint.save(a_file(folder), wrapped())
    ValueError: is a file
checkpoint.save(a folder below a file, model)
    > with somewhere() as folder: checkpoint.save(a_file(folder) / "steps", wrapped())
    ValueError: is a file
checkpoint.save("/proc/run", model)
    > checkpoint.save("/proc/run", wrapped())
    ValueError: /proc.*cannot be written
checkpoint.load(an empty folder, model)
    > with somewhere() as folder: checkpoint.load(folder, wrapped())
    ValueError: no complete checkpoint.*holds no step folder
checkpoint.load(a torch.save file, model)
    > with somewhere() as folder: checkpoint.load(saved_by_torch(folder, rank), wrapped())
    ValueError: is a file; name the folder
checkpoint.save(dir, model, model)  # for the optimizer
    > model = wrapped()
    > with somewhere() as folder: checkpoint.save(folder, model, model)
    TypeError: optim
export_safetensors(model, dir, max_shard_size="big")
    > with somewhere() as folder: checkpoint.export_safetensors(wrapped(), folder, max_shard_size="big")
    ValueError: max_shard_size must look like '80GB'
"""
"""Programs have the names of this file, `rank`, and a plain `model`."""


MISTAKES = told.read(TABLE)


class Told(NamedTuple):
    """What a program was told on a rank: its error's classes, and its first line (two if a list follows)."""

    kinds: tuple[str, ...]
    line: str


def observe(rank: int, world_size: int, code: str) -> Told | None:
    """Runs one program on this rank; returns what it was told, if anything."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            exec(MISTAKES[code].source, {**globals(), "rank": rank, "model": Net()})
        except Exception as error:
            return _told(error)
        finally:
            if dist.is_initialized():
                store().set(f"{rank} has ended", "")
    ours = [
        warning.message
        for warning in caught
        if not isinstance(warning.message, (FutureWarning, DeprecationWarning))
    ]
    return _told(ours[0]) if ours and isinstance(ours[0], Warning) else None


def _told(error: BaseException) -> Told:
    first, *others = map(str.strip, str(error).strip().splitlines() or [""])
    line = f"{first} {others[0]}" if first.endswith(":") and others else first
    return Told(tuple(kind.__name__ for kind in type(error).__mro__), line)


# parts of programs


def wrapped() -> FSDP:
    torch.manual_seed(0)
    return FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)


def sharded() -> Any:
    torch.manual_seed(0)
    net = Net()
    for block in net.blocks:
        fully_shard(block)
    return fully_shard(net)


def batch() -> torch.Tensor:
    return torch.ones(2, WIDTH)


def own_batch(rank: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank))


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    model(batch()).sum().backward()
    if optimizer is not None:
        optimizer.step()


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def state_of(net: nn.Module, prefix: str = "") -> dict[str, torch.Tensor]:
    return {prefix + name: value for name, value in net.state_dict().items()}


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def impatient() -> Any:
    """Lets this package wait for three seconds only."""
    return mock.patch.object(_watch, "time_limit", lambda *_: timedelta(seconds=TIME_LIMIT))


def stays_away() -> None:
    """Waits, as at a barrier of its own, until the first rank has ended."""
    store().wait(["0 has ended"], timedelta(seconds=NEVER))


def alone(
    call: Callable[[nn.Module, torch.optim.Optimizer], object],
    model: nn.Module,
    rank: int,
    waits: bool = False,
) -> None:
    """Trains a step; calls on the first rank alone, while the other trains on, or waits elsewhere."""
    optimizer = sgd(model)
    step(model, optimizer)
    with impatient():
        if rank == 0:
            call(model, optimizer)
        if rank == 1 and waits:
            return stays_away()
        step(model)


def get_full(model: nn.Module, _: Any) -> None:
    get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def summon(model: nn.Module, _: Any) -> None:
    with FSDP.summon_full_params(model):
        pass


def have_fewer_batches(rank: int) -> None:
    model = wrapped()
    with impatient():
        for _ in range(2 - rank):
            step(model)
        if rank == 1:
            stays_away()


def clip_by_the_norm_of_each_part(rank: int) -> None:
    model = FSDP(nn.Linear(WIDTH, 16), use_orig_params=True)
    optimizer = sgd(model)
    for _ in range(2):
        model(own_batch(rank)).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()


def forget_the_root(rank: int) -> None:
    net = Net()
    for block in net.blocks:
        fully_shard(block)
    optimizer = sgd(net)
    for _ in range(2):
        net(own_batch(rank)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def scale_by_torchs_scaler(rank: int) -> None:
    model = wrapped()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0)
    for _ in range(2):
        scaler.scale(model(batch()).square().sum()).backward()
        if rank == 0:  # an infinite gradient in the part of this rank alone
            next(param.grad for param in model.parameters() if param.grad is not None).view(-1)[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@contextlib.contextmanager
def somewhere() -> Iterator[Path]:
    """Yields a folder that all ranks see."""
    box: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    yield Path(box[0])


def a_file(folder: Path) -> Path:
    (folder / "model.pt").write_text("")
    return folder / "model.pt"


def saved_by_torch(folder: Path, rank: int) -> Path:
    if rank == 0:
        torch.save(Net().state_dict(), folder / "model.pt")
    dist.barrier()
    return folder / "model.pt"


def rows() -> Iterator[tuple[str, str, str]]:
    """Yields each mistake, what is said first, and the ranks that are told."""
    for code in MISTAKES:
        try:
            by_rank = run_ranks(2, observe, code, timeout=20)
        except BaseException as error:
            yield code, f"({str(error).splitlines()[0]})", ""
            continue
        lines = dict.fromkeys(f"{report.kinds[0]}: {report.line}" for report in by_rank if report)
        ranks = ", ".join(str(rank) for rank, report in enumerate(by_rank) if report)
        yield code, " / ".join(lines) or "(nothing)", ranks


def main() -> None:
    print("| mistake | first line | ranks |\n|---|---|---|")
    for code, line, ranks in rows():
        print(f"| `{code}` | {line.replace('|', chr(92) + '|')} | {ranks} |", flush=True)


if __name__ == "__main__":
    import mistakes

    mistakes.main()
