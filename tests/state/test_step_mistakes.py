"""Mistakes that show at an optimizer's step: all ranks are told at their next one. Right steps are silent."""

import contextlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import apart
import fronts
import fsdp_wrap
from bed import ranks
from bed.references import count_collectives
from fronts import FRONTS, each_form, each_front, shard
from fsdp_wrap import CPUOffload, MixedPrecision, ShardingStrategy, fully_shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap._checks.factors import factor_of
from fsdp_wrap._comm.positions.notes import behind
from fsdp_wrap.optim import step_in_backward
from fsdp_wrap.replicate import replicate
from fsdp_wrap.sharded_grad_scaler import ShardedGradScaler
from models import WRAPPINGS, Block, Transformer, gather_objects, loss_of, tokens

SCALED = (
    "^ranks have scaled parts of one gradient differently before an optimizer's step: the gradient of '{}' "
    r"by [0-9.e-]+ on rank {} and by [0-9.e-]+ on rank {}\. .*model\.clip_grad_norm_\(max_norm\)"
)
NOT_AVERAGED = (
    r"^a gradient differs between ranks {} and {}: that of '{}', a parameter of this {} beside sharded ones"
    r"\. .*fully_shard\(model\)"
)
BEHIND = (
    "^ranks have taken different numbers of optimizer steps: .*{}, 1 optimizer step behind.*ShardedGradScaler"
)


def made(front: str, world_size: int, strategy: str = "FULL_SHARD", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    options["sharding_strategy"] = ShardingStrategy[strategy]
    if strategy.startswith("HYBRID"):
        options["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return shard(front, Transformer(), WRAPPINGS["block"](), **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def backward(model: nn.Module, rank: int, step: int) -> None:
    loss_of(model, tokens(rank, step)).backward()


def end(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


# Clipping by the norm of this rank's part.


@pytest.mark.parametrize(
    ("strategy", "shared_memory"), [("FULL_SHARD", True), ("FULL_SHARD", False), ("SHARD_GRAD_OP", True)]
)
@each_form
@ranks(2, 4)
def test_clipping_by_the_norm_of_each_part_is_told(
    rank, world_size, use_orig_params, strategy, shared_memory
):
    model = made(FRONTS[use_orig_params], world_size, strategy, shared_memory=shared_memory)
    optimizer = sgd(model)
    backward(model, rank, 0)
    bound = 0.5 * min(gather_objects(_norm_of_part(model)))
    nn.utils.clip_grad_norm_(model.parameters(), bound)
    end(optimizer)
    with pytest.raises(RuntimeError, match=SCALED.format(r"(head|blocks)\.\S+", r"\d", r"\d")) as caught:
        backward(model, rank, 1)
    assert len(set(gather_objects(str(caught.value).partition("\n")[0]))) == 1


def _norm_of_part(model: nn.Module) -> float:
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    return nn.utils.get_total_norm(grads).item()


@each_form
@ranks(4)
def test_clipping_is_told_within_each_copy(rank, world_size, use_orig_params):
    model = made(FRONTS[use_orig_params], world_size, "HYBRID_SHARD")
    optimizer = sgd(model)
    backward(model, rank, 0)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    end(optimizer)
    first = rank // 2 * 2
    with pytest.raises(RuntimeError, match=SCALED.format(".*", first, first + 1)):
        backward(model, rank, 1)


@ranks(2)
def test_one_rank_that_begins_to_clip_later_is_told(rank, world_size):
    """Its factor is 1 at first, like the others'; gradients may be unscaled before, and accumulated."""
    model = made("orig", world_size)
    optimizer, scaler = sgd(model), ShardedGradScaler("cpu", init_scale=4.0)
    for step in range(4):
        with fronts.no_sync(model):
            scaler.scale(loss_of(model, tokens(rank, 10 + step))).backward()
        scaler.scale(loss_of(model, tokens(rank, step))).backward()
        scaler.unscale_(optimizer)
        bound = sum(gather_objects(_norm_of_part(model))) / 2 if step == 3 else 1e9
        nn.utils.clip_grad_norm_(model.parameters(), bound)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=SCALED.format(".*", 0, 1)):
        backward(model, rank, 9)


@pytest.mark.parametrize("ours_first", [True, False])
@each_form
@ranks(2)
def test_right_clipping_hides_no_wrong_one(rank, world_size, use_orig_params, ours_first):
    model = made(FRONTS[use_orig_params], world_size)
    optimizer = sgd(model)
    backward(model, rank, 0)
    if ours_first:
        clip_right(model, rank)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
    clip_right(model, rank)
    end(optimizer)
    with pytest.raises(RuntimeError, match=SCALED.format(".*", 0, 1)):
        backward(model, rank, 1)


@each_form
@ranks(2)
def test_the_first_edits_after_many_steps_are_told_after_the_second(rank, world_size, use_orig_params):
    """Elements are only looked at again once an edit was seen."""
    model = made(FRONTS[use_orig_params], world_size)
    optimizer = sgd(model)
    for step in range(12):
        backward(model, rank, step)
        if step >= 10:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        end(optimizer)
    with pytest.raises(RuntimeError, match=SCALED.format(".*", 0, 1)):
        backward(model, rank, 12)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([1.0, -2.0, 0.5, 3.0], [0.25, -0.5, 0.125, 0.75], 0.25),
        ([1.0, -2.0, 0.5, 3.0, 0.0], [1.0, -2.0, 0.5, 3.0, 0.0], 1.0),
        ([1.0, -2.0, 0.5, 3.0], [0.25, -0.5, 0.125, 0.76], math.nan),  # not by one factor
        ([1.0, -2.0, 0.5, 3.0], [-1.0, 2.0, -0.5, -3.0], math.nan),
        ([1.0, -2.0, 0.5, 3.0], [0.0, 0.0, 0.0, 0.0], math.nan),
        ([1.0, -2.0, 0.5, 3.0], [0.25, -0.5, 0.125, math.inf], math.nan),
        ([1.0, -1.0, 1.0, -1.0], [0.5, -0.5, 0.5, -0.5], math.nan),  # as clipping by value gives
        ([1.0, 0.0, 0.0, 3.0], [0.5, 0.0, 0.0, 1.5], math.nan),  # too few
    ],
)
def test_a_factor_is_of_many_elements_of_different_sizes(before, after, expected):
    assert repr(factor_of(before, after, torch.float32)) == repr(expected)


@each_form
@ranks(2)
def test_what_ranks_tell_each_other_takes_no_collective(rank, world_size, use_orig_params):
    model = made(FRONTS[use_orig_params], world_size)
    optimizer = torch.optim.SGD([*model.parameters(), beside := nn.Parameter(torch.ones(2))], lr=0.1)
    counts = []
    for step in range(6):
        with count_collectives() as traffic:
            backward(model, rank, step)
            beside.grad = torch.ones(2)
            if step % 2:
                scale_all(model, rank)
            end(optimizer)
        counts.append({name: count for name, (count, _) in traffic.items()})
    assert counts[2] == counts[3] == counts[4] == counts[5] != {}


# Parameters without a unit.


@pytest.mark.parametrize("shared_memory", [True, False])
@each_front
@ranks(2, 4)
def test_a_root_that_was_forgotten_is_told(rank, world_size, front, shared_memory):
    torch.manual_seed(0)
    model = Transformer()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = shard(front, block, shared_memory=shared_memory)
    optimizer = torch.optim.AdamW(model.parameters())
    backward(model, rank, 0)
    end(optimizer)
    told = NOT_AVERAGED.format(0, r"\d", r"embed\.weight", "AdamW")
    with pytest.raises(RuntimeError, match=told):
        backward(model, rank, 1)


@ranks(4)
def test_a_forgotten_root_over_replicas_is_told(rank, world_size):
    torch.manual_seed(0)
    model = Transformer()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    optimizer = sgd(model)
    backward(model, rank % 2, 0)  # copies of the model have equal batches
    end(optimizer)
    first = rank // 2 * 2
    with pytest.raises(RuntimeError, match=NOT_AVERAGED.format(first, first + 1, ".*", "SGD")):
        backward(model, rank, 1)


def average(model: nn.Module) -> None:
    for param in (*model.embed.parameters(), *model.norm.parameters(), *model.head.parameters()):
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()


@each_front
@ranks(2)
def test_plain_parameters_that_are_averaged_or_ignored_are_silent(rank, world_size, front):
    torch.manual_seed(0)
    averaged, partly = Transformer(), Transformer()
    for number, block in enumerate(averaged.blocks):
        averaged.blocks[number] = shard(front, block)
    apart_by_rank = [*partly.head.parameters()]
    whom: dict[str, Any] = {"ignored_states": apart_by_rank}
    if front == "composable":
        whom = {"ignored_params": {*apart_by_rank}}
    ignoring = shard(front, partly, **whom)
    for model, before in ((averaged, average), (ignoring, lambda _: None)):
        optimizer = sgd(model)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})  # without a gradient
        if model is ignoring and front != "composable":  # the wrapper does not list ignored parameters twice
            assert {*map(id, apart_by_rank)} <= {id(p) for g in optimizer.param_groups for p in g["params"]}
        for step in range(5):
            backward(model, rank, step)
            before(model)
            end(optimizer)


@pytest.mark.parametrize("names", [("embed", "norm", "head"), ("norm",)])
@each_front
@ranks(2)
def test_averaged_plain_parameters_may_have_another_order_on_each_rank(rank, world_size, front, names):
    torch.manual_seed(0)
    model = Transformer()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = shard(front, block)
    plain = [param for name in names for param in model.get_submodule(name).parameters()]
    assert len({param.shape for param in plain}) == (1 if names == ("norm",) else 3)
    optimizer = torch.optim.SGD([*model.blocks.parameters(), *(plain if rank else plain[::-1])], lr=0.05)
    for step in range(5):
        backward(model, rank, step)
        average(model)
        end(optimizer)


@ranks(2)
def test_ddp_around_sharded_blocks_is_silent(rank, world_size):
    torch.manual_seed(0)
    model = Transformer()
    for block in model.blocks:
        fully_shard(block)
    DDP._set_params_and_buffers_to_ignore_for_model(
        model, [name for name, _ in model.named_parameters() if name.startswith("blocks")]
    )
    outer = DDP(model)
    optimizer = sgd(outer)
    for step in range(4):
        backward(outer, rank, step)
        end(optimizer)
    assert len(set(gather_objects(model.head.weight.sum().item()))) == 1


# A scaler that does not agree.


@pytest.mark.parametrize(
    ("strategy", "fused", "shared_memory"),
    [("FULL_SHARD", False, True), ("FULL_SHARD", True, False), ("SHARD_GRAD_OP", False, True)],
)
@each_form
@ranks(2, 4)
def test_a_step_that_one_rank_skips_is_told(
    rank, world_size, use_orig_params, strategy, fused, shared_memory
):
    model = made(FRONTS[use_orig_params], world_size, strategy, shared_memory=shared_memory)
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        scaler.scale(loss_of(model, tokens(rank, step))).backward()
        if step == 2 and rank == 1:
            _overflow(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert gather_objects(scaler.get_scale())[:2] == [4.0, 2.0]
    with pytest.raises(RuntimeError, match=BEHIND.format(r"rank 1 gathers [^,]*")):
        backward(model, rank, 3)


def _overflow(model: nn.Module) -> None:
    grad = next(param.grad for param in model.parameters() if param.grad is not None)
    grad.view(-1)[0] = math.inf


@ranks(4)
def test_ranks_of_other_copies_are_told_of_a_skipped_step(rank, world_size):
    model = made("orig", world_size, "HYBRID_SHARD")
    optimizer = sgd(model)
    backward(model, rank, 0)
    if rank != 3:
        optimizer.step()
    with pytest.raises(RuntimeError, match=BEHIND.format("rank 3 .*")):
        backward(model, rank, 1)


def test_steps_are_counted_in_a_circle():
    """Numbers of steps are compared modulo 128; a rank on which a step has raised has none."""
    digest = 7 << 8
    marks = [127 << 1, 0, 127 << 1]
    assert behind([digest | mark for mark in marks]) == [
        ", 1 optimizer step behind",
        "",
        ", 1 optimizer step behind",
    ]
    assert behind([digest | 6, digest | 2]) == ["", ", 2 optimizer steps behind"]
    assert behind([digest | 6, digest | 3]) == ["", ""]
    assert behind([digest | 6, digest << 1 | 2]) == ["", ""]


# What is right, or nobody's mistake.


def clip_right(model: Any, rank: int) -> None:
    fsdp_wrap.clip_grad_norm_(model, 1e-3)


def each_grad(change: Callable[[Any, torch.Tensor, int], Any]) -> Callable[[Any, int], None]:
    """Returns an edit that changes every gradient, given its parameter and the parameter's number."""

    def edit(model: Any, rank: int) -> None:
        for number, param in enumerate(model.parameters()):
            if param.grad is not None:
                change(param, getattr(param.grad, "_local_tensor", param.grad), number)

    return edit


def add_noise(model: Any, rank: int) -> None:
    noise = torch.Generator().manual_seed(rank)
    each_grad(lambda _, local, __: local.add_(1e-3 * torch.randn(local.shape, generator=noise).to(local)))(
        model, rank
    )


def zero_on_one_rank(model: Any, rank: int) -> None:
    """As a mask does whose other elements are on other ranks."""
    if rank:
        each_grad(lambda _, local, __: local.zero_())(model, rank)


def edit_in_full(model: Any, rank: int) -> None:
    if isinstance(model, FSDP):
        with FSDP.summon_full_params(model, with_grads=True):
            each_grad(lambda param, _, number: param.grad.mul_(0.1 * (1 + number)))(model, rank)


scale_all = each_grad(lambda param, *_: param.grad.mul_(0.5))
EDITS: list[Callable[[Any, int], None]] = [
    *(scale_all, clip_right, add_noise, zero_on_one_rank),
    lambda model, rank: nn.utils.clip_grad_value_(model.parameters(), 1e-3),
    each_grad(lambda param, *_: param.grad.add_(param.detach(), alpha=0.1)),
    # By the parameter: the same on all ranks, however many of them hold a part.
    each_grad(lambda param, _, number: param.grad.mul_(0.1 * number) if number % 3 else None),
    each_grad(lambda param, *_: setattr(param, "grad", param.grad * 0.3)),
    each_grad(lambda _, local, __: local.sign_()),
    each_grad(lambda param, _, number: setattr(param, "grad", None) if number % 2 == 0 else None),
]


@pytest.mark.parametrize(
    ("front", "half"), [*((front, False) for front in FRONTS), ("flat", True), ("orig", True)]
)
@ranks(2, 4)
def test_other_edits_of_gradients_are_silent(rank, world_size, front, half):
    precision = MixedPrecision(torch.bfloat16, torch.bfloat16, keep_low_precision_grads=True)
    options: dict[str, Any] = {"mixed_precision": precision} if half else {}
    model = made(front, world_size, **options)
    edits = [*EDITS, edit_in_full] if front == "orig" and not half else EDITS
    for edit in edits:
        optimizer = sgd(model)
        for step in range(3):
            with contextlib.nullcontext() if step != 1 else fronts.no_sync(model):
                backward(model, rank, step)
            if step != 1:
                edit(model, rank)
                optimizer.step()
                optimizer.zero_grad()
    backward(model, rank, 9)


@ranks(1, 2)
def test_clipping_by_torchs_function_is_silent_where_each_rank_has_whole_gradients(rank, world_size):
    """Or where these are `DTensor`s; scalers agree there by themselves."""
    torch.manual_seed(0)
    copied = Transformer()
    for module in (*copied.blocks, copied):
        replicate(module)
    strategies = ["NO_SHARD"] if world_size > 1 else ["NO_SHARD", "FULL_SHARD"]
    wrapped = [made(front, world_size, strategy) for front in FRONTS[:2] for strategy in strategies]
    for model in (copied, *wrapped, made("composable", world_size)):
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(4):
            loss = loss_of(model, tokens(rank, step)) * (math.inf if step == 2 and rank else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@pytest.mark.parametrize("offload", [False, True], ids=["", "offloaded"])
@each_front
@ranks(2)
def test_programs_whose_ranks_do_different_things_are_silent(rank, world_size, front, offload):
    torch.manual_seed(0)
    model = shard(front, nn.Sequential(Block(8), Block(8)), cpu_offload=CPUOffload(offload))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss(module: nn.Module) -> torch.Tensor:
        return module(torch.ones(2, 3, 8) * (1 + rank)).square().mean()

    for program in apart.programs_for(model):
        program(model, optimizer, loss)
        scale_all(model, rank)
        optimizer.step()


@each_front
@ranks(2)
def test_closures_and_several_optimizers_are_silent(rank, world_size, front):
    model = made(front, world_size)
    params = [*model.parameters()]
    halves = [torch.optim.SGD(params[:1], lr=0.1), torch.optim.AdamW(params[1:] or params)]
    for step in range(3):
        backward(model, rank, step)
        scale_all(model, rank)
        for optimizer in halves:
            optimizer.step()
        halves[step % 2].step()
        model.zero_grad()

    closed = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            for _ in range(2):
                closed.zero_grad()
                loss = loss_of(model, tokens(rank, step))
                loss.backward()
            return loss

        closed.step(closure)
    backward(model, rank, 9)


class Derived(torch.optim.SGD):
    """Its step calls that of its base class, and both have torch's hooks."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@each_front
@ranks(2)
def test_a_step_inside_that_of_a_derived_optimizer_counts_once(rank, world_size, front):
    model = made(front, world_size)
    optimizer = (torch.optim.SGD, Derived)[rank](model.parameters(), lr=0.1)
    for step in range(3):
        backward(model, rank, step)
        end(optimizer)
    backward(model, rank, 3)


@each_front
@ranks(2)
def test_steps_inside_a_backward_are_silent(rank, world_size, front):
    model = made(front, world_size)
    step_in_backward(model, partial(torch.optim.SGD, lr=0.1))
    for step in range(3):
        backward(model, rank, step)
