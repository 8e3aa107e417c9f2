"""Mistakes that newcomers make: each a short program of two ranks, with what it is told.

`tests/whole/test_mistakes.py` runs them all. `python tests/mistakes.py` prints them as a table.
"""

from __future__ import annotations

import contextlib
import io
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
from bed import run_ranks
from bed.patience import NEVER
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import (
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    checkpoint,
    fully_shard,
    iter_full_params,
)
from fsdp_wrap._comm.watching import watch as _watch
from fsdp_wrap.distributed_state_dict import StateDictOptions, get_model_state_dict
from fsdp_wrap.tools.command.main import main as fsdp_wrap_command
from fsdp_wrap.wrap import (
    ModuleWrapPolicy,
    NameWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from nets import WIDTH, Block, Net

TIME_LIMIT = 3.0
"""Seconds after which a rank that does not come is given up, by this package."""


class Mistake(NamedTuple):
    """A program with a mistake, and what it is told.

    Attributes:
        code: The mistake as a reader sees it.
        run: The program, given the rank.
        kind: The type of the error or warning.
        says: A pattern of its first line.
        ranks: Those that are told; empty if it is one or the other.
    """

    code: str
    run: Callable[[int], object]
    kind: type[BaseException]
    says: str
    ranks: tuple[int, ...]


MISTAKES: dict[str, Mistake] = {}


def mistake(
    code: str, kind: type[BaseException], says: str, ranks: tuple[int, ...] = (0, 1)
) -> Callable[[Callable[[int], object]], Callable[[int], object]]:
    """Adds a program to the table, under its function's name."""

    def add(run: Callable[[int], object]) -> Callable[[int], object]:
        MISTAKES[run.__name__] = Mistake(code, run, kind, says, ranks)
        return run

    return add


class Told(NamedTuple):
    """What a program was told on a rank: its error's classes, and its first line (two if a list follows)."""

    kinds: tuple[str, ...]
    line: str


def observe(rank: int, world_size: int, name: str) -> Told | None:
    """Runs one program on this rank; returns what it was told, if anything."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            MISTAKES[name].run(rank)
        except Exception as error:
            return _told(error)
        finally:
            if dist.is_initialized():
                store().set(f"{rank} has ended", "")
    ours = [
        each.message for each in caught if not isinstance(each.message, (FutureWarning, DeprecationWarning))
    ]
    return _told(ours[0]) if ours and isinstance(ours[0], Warning) else None


def _told(error: BaseException) -> Told:
    first, *others = map(str.strip, str(error).strip().splitlines() or [""])
    line = f"{first} {others[0]}" if first.endswith(":") and others else first
    return Told(tuple(kind.__name__ for kind in type(error).__mro__), line)


# parts of programs


def wrapped(**options: Any) -> FSDP:
    torch.manual_seed(0)
    return FSDP(Net(), **{"auto_wrap_policy": ModuleWrapPolicy({Block}), "use_orig_params": True, **options})


def sharded(**options: Any) -> Any:
    torch.manual_seed(0)
    net = Net()
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


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


def impatient() -> Any:
    """Lets this package wait for three seconds only."""
    return mock.patch.object(_watch, "time_limit", lambda *_: timedelta(seconds=TIME_LIMIT))


def stays_away() -> None:
    """Waits, as at a barrier of its own, until the first rank has ended."""
    store().wait(["0 has ended"], timedelta(seconds=NEVER))


@contextlib.contextmanager
def somewhere() -> Iterator[Path]:
    """Yields a folder that all ranks see."""
    box: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    yield Path(box[0])


def command(*words: str) -> None:
    """Runs `fsdp-wrap`; its first line of error is raised."""
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
        with contextlib.suppress(SystemExit):
            fsdp_wrap_command([*words])
    lines = [line for line in err.getvalue().splitlines() if "error:" in line]
    if lines:
        raise RuntimeError(lines[-1])


SETUP = """
import torch, fsdp_wrap
def setup():
    model = fsdp_wrap.FullyShardedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, lambda: model(torch.ones(2, 8)).sum().backward()
"""


def planning(*words: str, source: str = SETUP) -> None:
    """Runs `fsdp-wrap plan` on a file with a setup."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(source)
        command("plan", f"{folder}/train.py:setup", *words)


# wrapping


@mistake("FSDP(model)  # before init_process_group", ValueError, r"needs a process group.*init_process_group")
def no_process_group_for_the_wrapper(rank: int) -> None:
    dist.destroy_process_group()
    FSDP(Net())


@mistake(
    "fully_shard(model)  # before init_process_group",
    ValueError,
    r"needs a process group.*init_process_group",
)
def no_process_group_for_fully_shard(rank: int) -> None:
    dist.destroy_process_group()
    fully_shard(Net())


@mistake("FSDP(FSDP(model))", ValueError, r"already wrapped.*wrap a module once")
def wrapped_twice(rank: int) -> None:
    FSDP(FSDP(Net()))


@mistake("FSDP(nn.Linear)  # the class", TypeError, r"wraps a torch.nn.Module, not type")
def a_class_is_wrapped(rank: int) -> None:
    FSDP(nn.Linear)  # type: ignore[arg-type]


@mistake("FSDP(model.blocks)  # a ModuleList", UserWarning, r"ModuleList.*has no forward")
def a_list_is_wrapped(rank: int) -> None:
    FSDP(nn.ModuleList([nn.Linear(2, 2)]))


@mistake("fully_shard(model.blocks)  # a ModuleList", ValueError, r"ModuleList has none.*pass them as a list")
def a_list_is_sharded(rank: int) -> None:
    fully_shard(nn.ModuleList([nn.Linear(2, 2)]))


@mistake("fully_shard(model); fully_shard(model)", ValueError, r"already wrapped.*each once")
def sharded_twice(rank: int) -> None:
    net = Net()
    fully_shard(net)
    fully_shard(net)


@mistake("fully_shard(model) before its blocks", ValueError, r"wrap parts before the whole")
def root_sharded_first(rank: int) -> None:
    net = Net()
    fully_shard(net)
    fully_shard(net.blocks[0])


@mistake("FSDP(model on the meta device), without values", ValueError, r"meta.*param_init_fn")
def no_values(rank: int) -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(4, 4), Scale())
    FSDP(net)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@mistake("FSDP(model, device_id=0)  # no accelerator here", ValueError, r"device_id=0.*accelerator")
def device_id_without_accelerator(rank: int) -> None:
    FSDP(Net(), device_id=0)


@mistake('FSDP(model, device_id="cuda")  # no CUDA here', ValueError, r"device_id.*cuda")
def device_name_without_accelerator(rank: int) -> None:
    FSDP(Net(), device_id="cuda")  # type: ignore[arg-type]


# policies


@mistake(
    "ModuleWrapPolicy(Block)",
    TypeError,
    r"a set of module classes, not the class Block: write ModuleWrapPolicy\(\{Block\}\)",
)
def policy_of_a_class(rank: int) -> None:
    FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy(Block))  # type: ignore[arg-type]


@mistake('ModuleWrapPolicy("Block")', TypeError, r"NameWrapPolicy\('Block'\)")
def policy_of_a_name(rank: int) -> None:
    FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy("Block"))  # type: ignore[arg-type]


@mistake(
    "auto_wrap_policy=ModuleWrapPolicy",
    TypeError,
    r"not the class ModuleWrapPolicy: write ModuleWrapPolicy\(\{Block\}\)",
)
def policy_class(rank: int) -> None:
    FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy)


@mistake("auto_wrap_policy={Block}", TypeError, r"ModuleWrapPolicy")
def policy_set(rank: int) -> None:
    FSDP(Net(), auto_wrap_policy={Block})


@mistake("auto_wrap_policy=Block", TypeError, r"ModuleWrapPolicy\(\{Block\}\)")
def policy_module_class(rank: int) -> None:
    FSDP(Net(), auto_wrap_policy=Block)


@mistake("auto_wrap_policy=size_based_auto_wrap_policy(min_num_params=10)", TypeError, r"functools.partial")
def policy_called(rank: int) -> None:
    FSDP(Net(), auto_wrap_policy=size_based_auto_wrap_policy(min_num_params=10))  # type: ignore[call-arg]


@mistake(
    "auto_wrap_policy=transformer_auto_wrap_policy", TypeError, r"functools.partial.*transformer_layer_cls"
)
def policy_without_partial(rank: int) -> None:
    FSDP(Net(), auto_wrap_policy=transformer_auto_wrap_policy)


@mistake("partial(transformer_auto_wrap_policy, transformer_layer_cls=Block)", TypeError, r"\{Block\}")
def policy_with_a_class(rank: int) -> None:
    FSDP(Net(), auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls=Block))


@mistake('NameWrapPolicy("Blok")', ValueError, r"did you mean 'Block'")
def policy_misspelt(rank: int) -> None:
    FSDP(Net(), auto_wrap_policy=NameWrapPolicy("Blok"))


@mistake(
    "ModuleWrapPolicy({nn.Conv2d})  # there is none", UserWarning, r"no module is an instance of .*Conv2d"
)
def policy_that_matches_nothing(rank: int) -> None:
    FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy({nn.Conv2d}))


# keywords


@mistake("FSDP(model, mesh=mesh)", TypeError, r"'mesh'.*device_mesh")
def mesh_for_the_wrapper(rank: int) -> None:
    FSDP(Net(), mesh=init_device_mesh("cpu", (2,)))  # type: ignore[call-arg]


@mistake("fully_shard(model, device_mesh=mesh)", TypeError, r"'device_mesh'.*mesh")
def device_mesh_for_fully_shard(rank: int) -> None:
    fully_shard(Net(), device_mesh=init_device_mesh("cpu", (2,)))  # type: ignore[call-overload]


@mistake("FSDP(model, mp_policy=...)", TypeError, r"'mp_policy'.*mixed_precision")
def mp_policy_for_the_wrapper(rank: int) -> None:
    FSDP(Net(), mp_policy=MixedPrecisionPolicy())  # type: ignore[call-arg]


@mistake("fully_shard(model, mixed_precision=...)", TypeError, r"'mixed_precision'.*mp_policy")
def mixed_precision_for_fully_shard(rank: int) -> None:
    fully_shard(Net(), mixed_precision=MixedPrecision())  # type: ignore[call-overload]


@mistake("FSDP(model, reshard_after_forward=False)", TypeError, r"'reshard_after_forward'.*sharding_strategy")
def reshard_for_the_wrapper(rank: int) -> None:
    FSDP(Net(), reshard_after_forward=False)  # type: ignore[call-arg]


@mistake("fully_shard(model, auto_wrap_policy=...)", TypeError, r"'auto_wrap_policy'.*apply fully_shard to")
def auto_wrap_policy_for_fully_shard(rank: int) -> None:
    fully_shard(Net(), auto_wrap_policy=ModuleWrapPolicy({Block}))  # type: ignore[call-overload]


@mistake("FSDP(model, sharding_stratgy=...)", TypeError, r"did you mean.*sharding_strategy")
def misspelt_for_the_wrapper(rank: int) -> None:
    FSDP(Net(), sharding_stratgy=ShardingStrategy.FULL_SHARD)  # type: ignore[call-arg]


@mistake("fully_shard(model, reshard_after_foward=True)", TypeError, r"did you mean.*reshard_after_forward")
def misspelt_for_fully_shard(rank: int) -> None:
    fully_shard(Net(), reshard_after_foward=True)  # type: ignore[call-overload]


@mistake(
    "checkpoint.save(dir, model, optimizer=optimizer)",
    TypeError,
    r"save\(\) has no argument 'optimizer': pass it as optim",
)
def misspelt_for_save(rank: int) -> None:
    model = wrapped()
    checkpoint.save("/tmp/nowhere", model, optimizer=sgd(model))  # type: ignore[call-arg]


@mistake("fsdp_wrap.plan(setup, 2, machin=...)", TypeError, r"did you mean.*machine")
def misspelt_for_plan(rank: int) -> None:
    fsdp_wrap.plan(lambda: None, 2, machin=None)  # type: ignore[call-arg,arg-type,return-value]


# values of arguments


@mistake(
    'FSDP(model, sharding_strategy="FULL_SHARD")', TypeError, r"must be a ShardingStrategy.*'FULL_SHARD'"
)
def strategy_as_text(rank: int) -> None:
    FSDP(Net(), sharding_strategy="FULL_SHARD")  # type: ignore[arg-type]


@mistake(
    "FSDP(model, mixed_precision=torch.bfloat16)", TypeError, r"mixed_precision must be a MixedPrecision"
)
def precision_as_dtype(rank: int) -> None:
    FSDP(Net(), mixed_precision=torch.bfloat16)  # type: ignore[arg-type]


@mistake("FSDP(model, cpu_offload=True)", TypeError, r"cpu_offload must be a CPUOffload")
def offload_as_flag(rank: int) -> None:
    FSDP(Net(), cpu_offload=True)  # type: ignore[arg-type]


@mistake("fully_shard(model, mp_policy=MixedPrecision(torch.bfloat16))", TypeError, r"MixedPrecisionPolicy")
def policy_of_the_wrapper(rank: int) -> None:
    fully_shard(Net(), mp_policy=MixedPrecision(torch.bfloat16))  # type: ignore[call-overload]


@mistake(
    'FSDP(model, ignored_modules=["head"])', ValueError, r"ignored_modules must hold Module objects only"
)
def ignored_by_name(rank: int) -> None:
    FSDP(Net(), ignored_modules=["head"])  # type: ignore[list-item]


@mistake("HYBRID_SHARD on a mesh of one dimension", ValueError, r"HYBRID_SHARD takes .* two dimensions")
def hybrid_on_a_line(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    FSDP(Net(), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


@mistake(
    "FULL_SHARD on a mesh of two dimensions", ValueError, r"FULL_SHARD takes one .*HYBRID_SHARD takes two"
)
def full_shard_on_a_square(rank: int) -> None:
    FSDP(Net(), device_mesh=init_device_mesh("cpu", (1, 2)))


@mistake(
    "FSDP(model, process_group=group of rank 0)  # on all ranks", ValueError, r"rank 1 is not part of", (1,)
)
def group_of_others(rank: int) -> None:
    FSDP(Net(), dist.new_group([0]))


# training


@mistake(
    "AdamW(model.parameters()) before FSDP(model)",
    RuntimeError,
    r"this SGD was made before the model was sharded.*after sharding",
)
def optimizer_before_the_wrapper(rank: int) -> None:
    net = Net()
    optimizer = sgd(net)
    step(FSDP(net), optimizer)


@mistake(
    "AdamW(model.parameters()) before fully_shard(model)",
    RuntimeError,
    r"this SGD was made before the model was sharded.*after sharding",
)
def optimizer_before_fully_shard(rank: int) -> None:
    net = Net()
    optimizer = sgd(net)
    step(fully_shard(net), optimizer)


@mistake(
    "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)  # of FSDP",
    RuntimeError,
    r"ranks have scaled parts of one gradient differently.*model\.clip_grad_norm_\(max_norm\)",
)
def clipped_by_the_norm_of_each_part(rank: int) -> None:
    model = FSDP(nn.Linear(WIDTH, 16), use_orig_params=True)
    optimizer = sgd(model)
    for _ in range(2):
        model(own_batch(rank)).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()


@mistake(
    "for block in model.blocks: fully_shard(block)  # and not the model",
    RuntimeError,
    r"a gradient differs between ranks 0 and 1: that of 'stem\.weight'.*fully_shard\(model\)",
)
def root_forgotten(rank: int) -> None:
    torch.manual_seed(0)
    net = Net()
    for block in net.blocks:
        fully_shard(block)
    optimizer = sgd(net)
    for _ in range(2):
        net(own_batch(rank)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@mistake(
    "torch.amp.GradScaler  # with FSDP",
    RuntimeError,
    r"ranks have taken different numbers of optimizer steps.*ShardedGradScaler",
)
def scaler_of_one_rank(rank: int) -> None:
    model = wrapped()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0)
    for _ in range(2):
        scaler.scale(model(batch()).square().sum()).backward()
        if rank == 0:  # an infinite gradient in the part of this rank alone
            next(param.grad for param in model.parameters() if param.grad is not None).view(-1)[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@mistake("loss.backward() inside summon_full_params", RuntimeError, r"summon_full_params; leave its context")
def backward_inside_summon(rank: int) -> None:
    model = wrapped()
    loss = model(batch()).sum()
    with FSDP.summon_full_params(model):
        loss.backward()


@mistake("model(batch) inside summon_full_params", RuntimeError, r"summon_full_params; leave its context")
def forward_inside_summon(rank: int) -> None:
    model = wrapped()
    with FSDP.summon_full_params(model):
        model(batch())


@mistake("model.blocks[0].no_sync()", RuntimeError, r"no_sync\(\).*root")
def no_sync_below_the_root(rank: int) -> None:
    wrapped().module.blocks[0].no_sync()  # type: ignore[union-attr,operator]


@mistake("loss.backward(create_graph=True)", RuntimeError, r"create_graph=True.*torch.autograd.grad")
def graph_of_a_backward(rank: int) -> None:
    wrapped()(batch()).square().sum().backward(create_graph=True)


@mistake('model.to("meta")  # after wrapping', ValueError, r"sharded parameters.*before wrapping")
def moved_after_wrapping(rank: int) -> None:
    wrapped().to("meta")


@mistake(
    "layer.weight = nn.Parameter(...)  # after fully_shard", ValueError, r"weight.*replaced|replaced.*weight"
)
def parameter_replaced(rank: int) -> None:
    model = sharded()
    model.head.weight = nn.Parameter(torch.ones(3, WIDTH))
    step(model)


@mistake("the ranks run different blocks", RuntimeError, r"ranks communicate for different units: rank 0")
def other_blocks(rank: int) -> None:
    model = wrapped()
    model(batch())
    if rank == 0:
        del model.module.blocks[0]  # type: ignore[union-attr,operator]
    step(model)


@mistake("a rank has fewer batches", RuntimeError, r"has not completed: rank 1 did not come", (0,))
def fewer_batches(rank: int) -> None:
    model = wrapped()
    with impatient():
        for _ in range(2 - rank):
            step(model)
        if rank == 1:
            stays_away()


@mistake("ranks begin with other values", UserWarning, r"began with other values.*same seed", ())
def other_values(rank: int) -> None:
    torch.manual_seed(rank)
    step(FSDP(Net()))


# names of the last release


@mistake("FSDP(model, keep_unsharded_bytes=2**30)", TypeError, r"is gone since 0.2.*SHARD_GRAD_OP")
def kept_segments_of_the_wrapper(rank: int) -> None:
    FSDP(Net(), keep_unsharded_bytes=2**30)  # type: ignore[call-arg]


@mistake("fully_shard(model, keep_unsharded_bytes=2**30)", TypeError, r"gone.*set_reshard_after_backward")
def kept_segments_of_fully_shard(rank: int) -> None:
    fully_shard(Net(), keep_unsharded_bytes=2**30)  # type: ignore[call-overload]


@mistake("model.set_keep_unsharded_bytes(0)  # of FSDP", AttributeError, r"is gone since 0.2.*SHARD_GRAD_OP")
def set_kept_segments_of_the_wrapper(rank: int) -> None:
    wrapped().set_keep_unsharded_bytes(0)


@mistake("model.set_keep_unsharded_bytes(0)  # of fully_shard", AttributeError, r"set_reshard_after_backward")
def set_kept_segments_of_fully_shard(rank: int) -> None:
    sharded().set_keep_unsharded_bytes(0)


# methods of the other front-end


@mistake("model.no_sync()  # of fully_shard", AttributeError, r"no_sync.*set_requires_gradient_sync")
def no_sync_of_fully_shard(rank: int) -> None:
    sharded().no_sync()


@mistake("model.clip_grad_norm_(1.0)  # of fully_shard", AttributeError, r"fsdp_wrap.clip_grad_norm_")
def clip_of_fully_shard(rank: int) -> None:
    sharded().clip_grad_norm_(1.0)


@mistake("model.summon_full_params()  # of fully_shard", AttributeError, r"summon_full_params")
def summon_of_fully_shard(rank: int) -> None:
    sharded().summon_full_params()


@mistake("model.set_requires_gradient_sync(False)  # of FSDP", AttributeError, r"no_sync\(\)")
def gradient_sync_of_the_wrapper(rank: int) -> None:
    wrapped().set_requires_gradient_sync(False)


@mistake("model.unshard()  # of FSDP", AttributeError, r"summon_full_params")
def unshard_of_the_wrapper(rank: int) -> None:
    wrapped().unshard()


# state dicts


def state_of(net: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: value for name, value in net.state_dict().items()}


@mistake(
    'load_state_dict of a DDP checkpoint ("module." names)',
    RuntimeError,
    r"'module.' of DistributedDataParallel.*consume_prefix",
)
def prefix_of_ddp(rank: int) -> None:
    wrapped().load_state_dict(state_of(Net(), "module."))


@mistake("the same with fully_shard", RuntimeError, r"'module.' of DistributedDataParallel.*consume_prefix")
def prefix_of_ddp_for_fully_shard(rank: int) -> None:
    sharded().load_state_dict(state_of(Net(), "module."))


@mistake(
    'load_state_dict of a compiled model ("_orig_mod." names)',
    RuntimeError,
    r"'_orig_mod.' of torch.compile.*consume_prefix",
)
def prefix_of_compile(rank: int) -> None:
    wrapped().load_state_dict(state_of(Net(), "_orig_mod."))


@mistake(
    "load_state_dict of a model with more layers", RuntimeError, r'Unexpected key.*"9.weight" and 20 more'
)
def many_unexpected(rank: int) -> None:
    wrapped().load_state_dict({f"{n}.weight": torch.ones(1) for n in range(30)} | state_of(Net(), ""))


@mistake(
    "load_state_dict of a head of other classes",
    RuntimeError,
    r"size mismatch for head.weight: .*\[7, 6\].*\[3, 6\]",
)
def other_shape(rank: int) -> None:
    wrapped().load_state_dict(state_of(Net(), "") | {"head.weight": torch.ones(7, WIDTH)})


@mistake("load_state_dict(list(...))", TypeError, r"must map names to tensors, and is a list")
def state_as_list(rank: int) -> None:
    wrapped().load_state_dict([])  # type: ignore[arg-type]


@mistake("load_state_dict(..., assign=True)", ValueError, r"leave assign out")
def assigning(rank: int) -> None:
    wrapped().load_state_dict(state_of(Net(), ""), assign=True)


@mistake("torch.save(model)", TypeError, r"cannot be pickled.*state_dict\(\)")
def model_pickled(rank: int) -> None:
    torch.save(wrapped(), io.BytesIO())


@mistake(
    "set_state_dict_type(model, SHARDED..., FullStateDictConfig())",
    TypeError,
    r"takes a ShardedStateDictConfig",
)
def config_of_another_kind(rank: int) -> None:
    FSDP.set_state_dict_type(wrapped(), StateDictType.SHARDED_STATE_DICT, fsdp_wrap.FullStateDictConfig())  # type: ignore[attr-defined]


# one rank alone


def alone(
    call: Callable[[nn.Module, torch.optim.Optimizer], object], model: nn.Module, rank: int, then: str
) -> None:
    """Trains a step; calls on the first rank alone, while the other trains on, or waits elsewhere."""
    optimizer = sgd(model)
    step(model, optimizer)
    with impatient():
        if rank == 0:
            call(model, optimizer)
        if rank == 1 and then == "waits":
            return stays_away()
        step(model)


@mistake(
    "if rank == 0: torch.save(model.state_dict()); the other trains on",
    RuntimeError,
    r"state_dict\(\).*rank 1",
)
def state_dict_alone(rank: int) -> None:
    alone(lambda model, _: model.state_dict(), wrapped(), rank, "trains")


@mistake(
    "if rank == 0: torch.save(model.state_dict()); the other waits",
    RuntimeError,
    r"state_dict\(\).*rank 1",
    (0,),
)
def state_dict_alone_before_a_barrier(rank: int) -> None:
    alone(lambda model, _: model.state_dict(), wrapped(), rank, "waits")


@mistake(
    "if rank == 0: FSDP.optim_state_dict(model, optimizer)", RuntimeError, r"optim_state_dict\(\).*rank 1"
)
def optim_state_dict_alone(rank: int) -> None:
    alone(FSDP.optim_state_dict, wrapped(), rank, "trains")


@mistake("if rank == 0: get_model_state_dict(model, full)", RuntimeError, r"get_model_state_dict\(\).*rank 1")
def get_model_state_dict_alone(rank: int) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    alone(lambda model, _: get_model_state_dict(model, options=options), wrapped(), rank, "trains")


@mistake("the same with fully_shard", RuntimeError, r"get_model_state_dict\(\).*rank 1")
def get_model_state_dict_of_fully_shard_alone(rank: int) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    alone(lambda model, _: get_model_state_dict(model, options=options), sharded(), rank, "trains")


def enter_alone(model: nn.Module, _: Any) -> None:
    with FSDP.summon_full_params(model):
        pass


@mistake("if rank == 0: with FSDP.summon_full_params(model)", RuntimeError, r"summon_full_params\(\).*rank 1")
def summon_alone(rank: int) -> None:
    alone(enter_alone, wrapped(), rank, "trains")


@mistake("if rank == 0: dict(iter_full_params(model))", RuntimeError, r"iter_full_params\(\).*rank 1")
def iter_full_params_alone(rank: int) -> None:
    alone(lambda model, _: dict(iter_full_params(model)), sharded(), rank, "trains")


@mistake(
    "if rank == 0: model.clip_grad_norm_(1.0)",
    RuntimeError,
    r"rank 0 takes part in ALL_REDUCE|rank 1 takes part in ALL_GATHER",
)
def clip_alone(rank: int) -> None:
    alone(lambda model, _: fsdp_wrap.clip_grad_norm_(model, 1.0), wrapped(), rank, "trains")  # type: ignore[attr-defined]


@mistake("if rank == 0: checkpoint.save(...)", RuntimeError, r"checkpoint.save.*rank 1")
def save_alone(rank: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        alone(partial(checkpoint.save, folder), wrapped(), rank, "trains")


@mistake("if rank == 0: model(batch)", RuntimeError, r"has not completed: rank 1 did not come", (0,))
def forward_alone(rank: int) -> None:
    alone(lambda model, _: model(batch()), wrapped(), rank, "waits")


@mistake("if rank == 0: model.load_state_dict(...)", RuntimeError, r"have loaded or edited apart: rank 0")
def load_alone(rank: int) -> None:
    alone(lambda model, _: model.load_state_dict(Net().state_dict()), wrapped(), rank, "trains")


# checkpoints


@mistake("checkpoint.save(a file, model)", ValueError, r"is a file")
def save_to_a_file(rank: int) -> None:
    with somewhere() as folder:
        path = folder / "model.pt"
        path.write_text("")
        checkpoint.save(path, wrapped())


@mistake("checkpoint.save(a folder below a file, model)", ValueError, r"is a file")
def save_below_a_file(rank: int) -> None:
    with somewhere() as folder:
        path = folder / "model.pt"
        path.write_text("")
        checkpoint.save(path / "steps", wrapped())


@mistake('checkpoint.save("/proc/run", model)', ValueError, r"/proc.*cannot be written")
def save_to_proc(rank: int) -> None:
    checkpoint.save("/proc/run", wrapped())


@mistake('export_safetensors(model, "/proc/run")', ValueError, r"/proc.*cannot be written")
def export_to_proc(rank: int) -> None:
    checkpoint.export_safetensors(wrapped(), "/proc/run")


@mistake(
    "checkpoint.load(an empty folder, model)", ValueError, r"no complete checkpoint.*holds no step folder"
)
def load_of_nothing(rank: int) -> None:
    with somewhere() as folder:
        checkpoint.load(folder, wrapped())


@mistake("checkpoint.load(a torch.save file, model)", ValueError, r"is a file; name the folder")
def load_of_a_file(rank: int) -> None:
    with somewhere() as folder:
        if rank == 0:
            torch.save(Net().state_dict(), folder / "model.pt")
        dist.barrier()
        checkpoint.load(folder / "model.pt", wrapped())


@mistake("checkpoint.save(dir, model, model)  # for the optimizer", TypeError, r"optim")
def model_for_optimizer(rank: int) -> None:
    model = wrapped()
    with somewhere() as folder:
        checkpoint.save(folder, model, model)  # type: ignore[arg-type]


@mistake(
    'export_safetensors(model, dir, max_shard_size="big")',
    ValueError,
    r"max_shard_size must look like '80GB'",
)
def shard_size(rank: int) -> None:
    with somewhere() as folder:
        checkpoint.export_safetensors(wrapped(), folder, max_shard_size="big")


# plans


@mistake("fsdp-wrap plan train.py:setup --device-memory 80", RuntimeError, r"80 bytes.*80GB")
def memory_without_unit(rank: int) -> None:
    planning("--device-memory", "80")


@mistake("fsdp_wrap.fit(setup, device_memory=80)", ValueError, r"80 bytes.*80GB")
def memory_without_unit_in_python(rank: int) -> None:
    fsdp_wrap.fit(lambda: None, device_memory=80)  # type: ignore[arg-type,return-value]


@mistake("fsdp-wrap fit train.py:setup", RuntimeError, r"fit needs --device-memory, such as 80GB")
def fit_without_memory(rank: int) -> None:
    command("fit", "train.py:setup")


@mistake("fsdp-wrap plan train.py", RuntimeError, r"names no function: write FILE.py:name")
def plan_without_function(rank: int) -> None:
    command("plan", "train.py")


@mistake("fsdp-wrap plan train.py:setup --machine h1000", RuntimeError, r"h1000")
def unknown_machine(rank: int) -> None:
    planning("--machine", "h1000")


def rows() -> Iterator[tuple[str, str, str]]:
    """Yields each mistake, what is said first, and the ranks that are told."""
    for name, row in MISTAKES.items():
        try:
            told = run_ranks(2, observe, name, timeout=20)
        except BaseException as error:
            yield row.code, f"({str(error).splitlines()[0]})", ""
            continue
        lines = dict.fromkeys(f"{each.kinds[0]}: {each.line}" for each in told if each)
        ranks = ", ".join(str(rank) for rank, each in enumerate(told) if each)
        yield row.code, " / ".join(lines) or "(nothing)", ranks


def main() -> None:
    print("| mistake | first line | ranks |\n|---|---|---|")
    for code, line, ranks in rows():
        print(f"| `{code}` | {line.replace('|', chr(92) + '|')} | {ranks} |", flush=True)


if __name__ == "__main__":
    import mistakes

    mistakes.main()
