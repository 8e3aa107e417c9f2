"""Communication hooks, against a plain model, DDP with its own hooks, and the reduction without hooks."""

from __future__ import annotations

import functools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks as torch_hooks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as ddp_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

from bed import ranks
from bed.references import count_collectives
from fronts import assert_same_grads, each_form
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy, comm_hooks
from fsdp_wrap.comm_hooks import DefaultState, LowPrecisionState
from fsdp_wrap.wrap import CustomPolicy
from models import (
    WRAPPINGS,
    Block,
    Transformer,
    full_grads,
    loss_of,
    named_state,
    tokens,
    transformer_twins,
    twins,
)

each_library = pytest.mark.parametrize("library", ["ours", "torch's"])
MODULES = {"ours": comm_hooks, "torch's": torch_hooks}


def hybrid_mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def assert_averaged(model: FSDP, plain: nn.Module, batches: list[torch.Tensor], factor: float = 1.0) -> None:
    """The gradients are the averages of those of all ranks' batches, times a factor."""
    plain.zero_grad()
    (factor * sum(loss_of(plain, batch) for batch in batches)).backward()
    assert_same_grads(model, plain, rtol=1e-10, atol=1e-13)


# The ready-made ones.


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@each_library
@each_form
@ranks(2, 3)
def test_default_hooks_average(rank, world_size, use_orig_params, library, strategy):
    plain, model = transformer_twins(use_orig_params, strategy)
    hooks = MODULES[library]
    hook = hooks.allreduce_hook if strategy == "NO_SHARD" else hooks.reduce_scatter_hook
    model.register_comm_hook(hooks.DefaultState(dist.group.WORLD), hook)
    for inside in ((False,), (True, False), (False, False)):  # without sync; the last one adds to `.grad`
        model.zero_grad()
        for step, unsynced in enumerate(inside):
            with model.no_sync() if unsynced else torch.enable_grad():
                loss_of(model, tokens(rank, step)).backward()
        batches = [tokens(r, step) for r in range(world_size) for step in range(len(inside))]
        assert_averaged(model, plain, batches, 1 / world_size)


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@each_library
@each_form
@ranks(4)
def test_hybrid_strategies_average_over_all_ranks(rank, world_size, use_orig_params, library, strategy):
    """The hook over the shard group, the runtime over the replicas."""
    mesh = hybrid_mesh()
    plain, model = transformer_twins(use_orig_params, strategy, device_mesh=mesh)
    hooks = MODULES[library]
    state = hooks.DefaultState(mesh.get_group("shard"))
    model.register_comm_hook(state, hooks.reduce_scatter_hook)
    with model.no_sync():
        loss_of(model, tokens(rank, 0)).backward()
    with count_collectives() as traffic:
        loss_of(model, tokens(rank, 1)).backward()
    assert traffic["reduce_scatter_tensor"].calls == 4
    assert traffic["all_reduce"].calls == 4 + 4  # over the replicas, and of what was used
    batches = [tokens(r, step) for r in range(world_size) for step in range(2)]
    assert_averaged(model, plain, batches, 1 / world_size)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp16_compress_hook", torch.float16), ("bf16_compress_hook", torch.bfloat16)],
    ids=["fp16", "bf16"],
)
@each_library
@each_form
@ranks(2)
def test_compressing_hooks_send_half(rank, world_size, use_orig_params, library, name, dtype, strategy):
    """Bit for bit what halving, rounding and summing gives, at half of the bytes."""
    chosen = {"auto_wrap_policy": WRAPPINGS["block"](), "sharding_strategy": ShardingStrategy[strategy]}
    plain, model = twins(Transformer, use_orig_params=use_orig_params, **chosen)
    _, uncompressed = twins(Transformer, **chosen)
    hooks = MODULES[library]
    model.register_comm_hook(hooks.LowPrecisionState(dist.group.WORLD), getattr(hooks, name))
    travelled = []
    for each in (uncompressed, model):
        with count_collectives() as traffic:
            loss_of(each, tokens(rank, 0)).backward()
        travelled.append(sum(traffic[kind].bytes for kind in traffic.keys() & REDUCTIONS))
    names, params = zip(*plain.named_parameters())
    assert travelled[0] == 2 * (travelled[1] - 4 * len(names))  # a number tells whether each was used
    local = [torch.autograd.grad(loss_of(plain, tokens(r, 0)), params) for r in range(world_size)]
    found = full_grads(model)
    for key, first, second in zip(names, *local):
        assert torch.equal(found[key], ((first / 2).to(dtype) + (second / 2).to(dtype)).float()), key


@ranks(2)
def test_fp16_compression_equals_that_of_ddp(rank, world_size):
    plain, model = twins(Transformer, auto_wrap_policy=WRAPPINGS["block"]())
    ddp = DDP(plain)
    ddp.register_comm_hook(dist.group.WORLD, ddp_hooks.fp16_compress_hook)
    model.register_comm_hook(LowPrecisionState(dist.group.WORLD), comm_hooks.fp16_compress_hook)
    for each in (ddp, model):
        loss_of(each, tokens(rank, 0)).backward()
    found = full_grads(model)
    for key, param in named_state(ddp):  # DDP rounds before it halves, which tells for the smallest numbers
        torch.testing.assert_close(found[key], param.grad, rtol=1e-3, atol=2**-23, msg=key)


REDUCTIONS = {"reduce_scatter_tensor", "all_reduce"}


@pytest.mark.parametrize("name", ["fp16_compress_hook", "bf16_compress_hook"])
@ranks(4)
def test_compression_within_hybrid_strategies(rank, world_size, name):
    mesh = hybrid_mesh()
    hybrid = ShardingStrategy.HYBRID_SHARD
    plain, model = twins(Transformer, torch.float64, sharding_strategy=hybrid, device_mesh=mesh)
    state = LowPrecisionState(mesh.get_group("shard"), parameter_type=torch.float64)
    model.register_comm_hook(state, getattr(comm_hooks, name))
    loss_of(model, tokens(rank, 0)).backward()
    (sum(loss_of(plain, tokens(r, 0)) for r in range(world_size)) / world_size).backward()
    found = full_grads(model)
    for key, param in plain.named_parameters():
        assert found[key].dtype == torch.float64
        torch.testing.assert_close(found[key], param.grad, rtol=0.05, atol=1e-3, msg=key)


@ranks(1, 2, 3, 4)
def test_the_divisors_make_up_the_number_of_ranks(rank, world_size):
    ours, theirs = DefaultState(dist.group.WORLD), torch_hooks.DefaultState(dist.group.WORLD)
    for name in torch_hooks.DefaultState.__slots__:
        assert getattr(ours, name) == getattr(theirs, name), name
    low = LowPrecisionState(dist.group.WORLD, torch.bfloat16)
    assert low.parameter_type == torch.bfloat16 and low.world_size == world_size
    with pytest.raises(ValueError, match="needs the process group"):
        DefaultState(None)  # type: ignore[arg-type]


# The user's own.


def summing(state: list, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Sums instead of averaging, by an all-reduce, and remembers what it saw."""
    state.append((grad.shape, None if output is None else (output.shape, bool(output.any())), grad.dtype))
    dist.all_reduce(grad)
    if output is not None:
        output.copy_(grad.chunk(dist.get_world_size())[dist.get_rank()])


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@each_form
@ranks(1, 2)
def test_nothing_divides_beside_the_hook(rank, world_size, use_orig_params, strategy):
    plain, model = transformer_twins(use_orig_params, strategy)
    seen: list = []
    model.register_comm_hook(seen, summing)
    loss_of(model, tokens(rank, 0)).backward()
    assert len(seen) == 4  # three blocks and the root
    for full, output, dtype in seen:
        shard = None if strategy == "NO_SHARD" else ((full[0] // world_size,), False)
        assert output == shard and dtype == torch.float64
    with model.no_sync():
        loss_of(model, tokens(rank, 1)).backward()
    assert len(seen) == 4
    loss_of(model, tokens(rank, 2)).backward()
    assert len(seen) == 8
    assert_averaged(model, plain, [tokens(r, step) for r in range(world_size) for step in range(3)])


@each_form
@ranks(2)
def test_one_hook_serves_strategies_that_differ_and_dtypes(rank, world_size, use_orig_params):
    chosen = iter(["NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD"])

    def choose(module):
        return isinstance(module, Block) and {"sharding_strategy": ShardingStrategy[next(chosen)]}

    plain, model = twins(
        Transformer,
        torch.float64,
        auto_wrap_policy=CustomPolicy(choose),
        use_orig_params=use_orig_params,
    )
    seen: list = []
    model.register_comm_hook(seen, functools.partial(summing))
    loss_of(model, tokens(rank, 0)).backward()
    assert sorted(output is None for _, output, _ in seen) == [False, False, False, True]
    assert_averaged(model, plain, [tokens(r, 0) for r in range(world_size)])

    mixed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    mixed[1].register_forward_pre_hook(lambda _, args: (args[0].double(),))
    model, seen = FSDP(mixed, use_orig_params=use_orig_params), []
    model.register_comm_hook(seen, summing)
    model(torch.ones(1, 4)).sum().backward()
    assert {dtype for _, _, dtype in seen} == {torch.float32, torch.float64}
    assert torch.equal(full_grads(model)["1.bias"], torch.full((4,), 2.0).double())


@ranks(2)
def test_a_root_without_parameters_of_its_own(rank, world_size):
    layers = nn.Sequential(*(FSDP(nn.Linear(4, 4)) for _ in range(2)))
    model = FSDP(layers)
    seen: list[Any] = []
    model.register_comm_hook(seen, summing)
    for layer in layers:
        with pytest.raises(AssertionError, match="on the root, and this is unit '[01]'"):
            layer.register_comm_hook(seen, summing)
    model(torch.ones(1, 4)).sum().backward()
    assert len(seen) == 2
    assert torch.equal(full_grads(model)["1.bias"], torch.full((4,), 2.0))


class Feedback:
    """Sends signs and mean sizes only, and adds to each gradient what the ones before have lost."""

    def __init__(self) -> None:
        self.lost: dict[int, torch.Tensor] = {}

    def __call__(self, state: object, grad: torch.Tensor, output: torch.Tensor) -> None:
        grad += self.lost.get(grad.numel(), torch.zeros(()))
        sent = grad.sign() * grad.abs().mean()
        self.lost[grad.numel()] = grad - sent
        dist.all_reduce(sent)
        output.copy_(sent.chunk(dist.get_world_size())[dist.get_rank()] / dist.get_world_size())


@ranks(2)
def test_a_hook_with_a_memory_of_its_own(rank, world_size):
    plain, model = twins(lambda: nn.Linear(6, 4, bias=False), torch.float64)
    model.register_comm_hook(None, Feedback())
    inputs = [torch.full((1, 6), 1.0 + r).double() for r in range(world_size)]
    feedbacks, mean = [Feedback() for _ in inputs], torch.zeros(24).double()
    for _ in range(3):
        (model(inputs[rank]) * torch.arange(4)).sum().backward()
        for x, feedback in zip(inputs, feedbacks):
            grad = torch.autograd.grad((plain(x) * torch.arange(4)).sum(), plain.weight)[0].flatten()
            grad = grad + feedback.lost.get(24, 0)
            sent = grad.sign() * grad.abs().mean()
            feedback.lost[24] = grad - sent
            mean += sent / world_size
    torch.testing.assert_close(full_grads(model)["weight"].flatten(), mean)


def replacing(state: object, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Puts other tensors into its arguments, as torch's compressing hooks do."""
    grad.data = grad.data.to(torch.bfloat16)
    dist.all_reduce(grad)
    if output is not None:
        output.data = grad.chunk(dist.get_world_size())[dist.get_rank()].clone()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@each_form
@ranks(2)
def test_hooks_may_replace_the_data_of_their_arguments(rank, world_size, use_orig_params, strategy):
    _, model = twins(
        lambda: nn.Linear(4, 4),
        use_orig_params=use_orig_params,
        sharding_strategy=ShardingStrategy[strategy],
    )
    model.register_comm_hook(None, replacing)
    for count in (1, 2):
        model(torch.ones(1, 4)).sum().backward()
        for grad in full_grads(model).values():
            assert torch.equal(grad, torch.full_like(grad, 2.0 * count))
    assert all(param.grad.dtype == torch.float32 for param in model.parameters() if param.grad is not None)


@each_form
@ranks(2)
def test_a_hook_that_does_nothing_gives_zeros_and_waits_for_nobody(rank, world_size, use_orig_params):
    _, model = twins(lambda: nn.Linear(64, 64), use_orig_params=use_orig_params)
    model.register_comm_hook(None, lambda state, grad, output: None)
    output = model(torch.ones(1, 64)).sum()
    time.sleep(0.3 * rank)
    output.backward()
    assert not any(grad.any() for grad in full_grads(model).values())


# When it is refused.


@ranks(2)
def test_wrong_registrations_are_refused(rank, world_size):
    plain, model = twins(Transformer, torch.float64, auto_wrap_policy=WRAPPINGS["block"]())
    state, hook = DefaultState(dist.group.WORLD), comm_hooks.reduce_scatter_hook
    for caught in (RuntimeError, AssertionError):  # the second is what torch's wrapper raises
        with pytest.raises(caught, match=r"on the root, and this is unit 'blocks\.0'"):
            model.blocks[0].register_comm_hook(state, hook)
    with pytest.raises(ValueError, match="must be callable, but is 'sum'"):
        model.register_comm_hook(state, "sum")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"call the communication hook as hook\(state, grad, output\)"):
        model.register_comm_hook(state, comm_hooks.allreduce_hook)
    with model.no_sync():
        loss_of(model, tokens(rank, 0)).backward()
    with pytest.raises(RuntimeError, match=r"gradients that no_sync\(\) left unreduced"):
        model.register_comm_hook(state, hook)
    loss_of(model, tokens(rank, 0)).backward()
    assert_averaged(model, plain, [tokens(r, 0) for r in range(world_size)] * 2, 1 / world_size)
    model.register_comm_hook(state, hook)
    for caught in (RuntimeError, AssertionError):
        with pytest.raises(caught, match="has a communication hook already"):
            model.register_comm_hook(state, hook)

    whole = FSDP(nn.Linear(4, 4), sharding_strategy=ShardingStrategy.NO_SHARD)
    with pytest.raises(ValueError, match=r"as hook\(state, grad\), which its signature"):
        whole.register_comm_hook(state, hook)
    handle = whole.module.register_forward_hook(
        lambda *_: whole.register_comm_hook(state, comm_hooks.allreduce_hook)
    )
    with pytest.raises(RuntimeError, match="must not run inside the forward"):
        whole(torch.ones(1, 4))
    handle.remove()


@each_library
@ranks(4)
def test_ready_made_hooks_need_the_ranks_of_every_unit(rank, world_size, library):
    """Otherwise replicas would drift apart silently."""
    mesh, hooks = hybrid_mesh(), MODULES[library]
    layers = nn.Sequential(
        FSDP(nn.Linear(4, 4), sharding_strategy=ShardingStrategy.NO_SHARD), nn.Linear(4, 4)
    )
    model = FSDP(layers, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    hook, near = hooks.fp16_compress_hook, mesh.get_group("shard")
    names = str(dist.get_process_group_ranks(near)).replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(ValueError, match=rf"root unit .* over ranks {names}, .* has ranks \[0, 1, 2, 3\]"):
        model.register_comm_hook(hooks.LowPrecisionState(dist.group.WORLD), hook)
    with pytest.raises(ValueError, match=rf"unit '0' over ranks \[0, 1, 2, 3\], .* has ranks {names}"):
        model.register_comm_hook(hooks.LowPrecisionState(near), hook)
    with pytest.raises(ValueError, match="needs a DefaultState or LowPrecisionState, not None"):
        model.register_comm_hook(None, hook)

    states = [hooks.DefaultState(group) for group in (dist.group.WORLD, near)]
    chosen = hooks.allreduce_hook, hooks.reduce_scatter_hook
    model.register_comm_hook(
        states, lambda both, grad, *output: chosen[len(output)](both[len(output)], grad, *output)
    )
    model(torch.full((1, 4), 1.0 + rank)).sum().backward()
    assert torch.equal(full_grads(model)["1.bias"], torch.ones(4))
    torch.testing.assert_close(full_grads(model)["1.weight"][0], layers[0](torch.full((1, 4), 2.5))[0])


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@each_form
@ranks(2)
def test_training_goes_on_after_a_hook_that_failed(rank, world_size, use_orig_params, strategy):
    plain, model = transformer_twins(use_orig_params, strategy)
    trouble = ["raises", "shrinks"]

    def hook(state, grad, output=None):
        if trouble and trouble[0] == "raises":
            raise KeyError("the hook's own")
        summing([], grad, output)
        if trouble:
            result = grad if output is None else output
            result.data = result.data[1:]

    model.register_comm_hook(None, hook)
    with pytest.raises(KeyError, match="the hook's own"):
        loss_of(model, tokens(rank, 0)).backward()
    trouble.pop(0)
    with pytest.raises(RuntimeError, match=r"left gradients of shape .* for (unit 'blocks|the root)"):
        loss_of(model, tokens(rank, 1)).backward()
    trouble.pop(0)
    model.zero_grad()
    loss_of(model, tokens(rank, 2)).backward()
    assert_averaged(model, plain, [tokens(r, 2) for r in range(world_size)])
