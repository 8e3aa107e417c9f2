"""Communication hooks, against a plain model and the reduction without hooks."""

import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks as torch_hooks
from torch.distributed.device_mesh import init_device_mesh

from bed import ranks
from bed.references import count_collectives
from fronts import assert_same_grads
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy, comm_hooks
from fsdp_wrap.comm_hooks import DefaultState, LowPrecisionState
from models import WRAPPINGS, Transformer, full_grads, loss_of, tokens, transformer_twins, twins

MODULES = {"ours": comm_hooks, "torch's": torch_hooks}


def hybrid_mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def assert_averaged(model: FSDP, plain: nn.Module, batches: list[torch.Tensor], factor: float = 1.0) -> None:
    plain.zero_grad()
    (factor * sum(loss_of(plain, batch) for batch in batches)).backward()
    assert_same_grads(model, plain, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    ("strategy", "library"), [("FULL_SHARD", "ours"), ("SHARD_GRAD_OP", "torch's"), ("NO_SHARD", "ours")]
)
@ranks(3)
def test_default_hooks_average(rank, world_size, library, strategy):
    plain, model = transformer_twins(True, strategy)
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


@pytest.mark.parametrize(
    ("strategy", "library"), [("HYBRID_SHARD", "torch's"), ("_HYBRID_SHARD_ZERO2", "ours")]
)
@ranks(4)
def test_hybrid_strategies_average_over_all_ranks(rank, world_size, library, strategy):
    mesh = hybrid_mesh()
    plain, model = transformer_twins(True, strategy, device_mesh=mesh)
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

    for compress in (comm_hooks.fp16_compress_hook, comm_hooks.bf16_compress_hook):
        plain, model = transformer_twins(True, strategy, device_mesh=mesh)
        state = LowPrecisionState(mesh.get_group("shard"), parameter_type=torch.float64)
        model.register_comm_hook(state, compress)
        loss_of(model, tokens(rank, 0)).backward()
        assert all(param.grad is None or param.grad.dtype == torch.float64 for param in model.parameters())
        (sum(loss_of(plain, tokens(r, 0)) for r in range(world_size)) / world_size).backward()
        assert_same_grads(model, plain, rtol=0.05, atol=1e-3)


@pytest.mark.parametrize(
    ("strategy", "library", "name", "dtype"),
    [
        ("FULL_SHARD", "ours", "fp16_compress_hook", torch.float16),
        ("FULL_SHARD", "torch's", "bf16_compress_hook", torch.bfloat16),
        ("NO_SHARD", "ours", "bf16_compress_hook", torch.bfloat16),
    ],
)
@ranks(2)
def test_compressing_hooks_send_half(rank, world_size, library, name, dtype, strategy):
    """They give the bits of halving, rounding and summing, and send half of the bytes."""
    chosen = {"auto_wrap_policy": WRAPPINGS["block"](), "sharding_strategy": ShardingStrategy[strategy]}
    plain, model = twins(Transformer, use_orig_params=True, **chosen)
    _, uncompressed = twins(Transformer, **chosen)
    hooks = MODULES[library]
    model.register_comm_hook(hooks.LowPrecisionState(dist.group.WORLD), getattr(hooks, name))
    travelled = []
    for net in (uncompressed, model):
        with count_collectives() as traffic:
            loss_of(net, tokens(rank, 0)).backward()
        reductions = traffic.keys() & {"reduce_scatter_tensor", "all_reduce"}
        travelled.append(sum(traffic[kind].bytes for kind in reductions))
    names, params = zip(*plain.named_parameters())
    assert travelled[0] == 2 * (travelled[1] - 4 * len(names))  # a number tells whether each was used
    local = [torch.autograd.grad(loss_of(plain, tokens(r, 0)), params) for r in range(world_size)]
    grads = full_grads(model)
    for key, first, second in zip(names, *local):
        assert torch.equal(grads[key], ((first / 2).to(dtype) + (second / 2).to(dtype)).float()), key


@ranks(4)
def test_the_divisors_make_up_the_number_of_ranks(rank, world_size):
    for size in range(1, 5):
        group = dist.new_group(range(size))
        if rank < size:
            ours, theirs = DefaultState(group), torch_hooks.DefaultState(group)
            for name in torch_hooks.DefaultState.__slots__:
                assert getattr(ours, name) == getattr(theirs, name), (name, size)
            assert LowPrecisionState(group, torch.bfloat16).parameter_type == torch.bfloat16
    with pytest.raises(ValueError, match="needs the process group"):
        DefaultState(None)  # type: ignore[arg-type]


def summing(state: list, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Sums instead of averaging, by an all-reduce, and remembers what it saw."""
    state.append((grad.shape, None if output is None else (output.shape, bool(output.any())), grad.dtype))
    dist.all_reduce(grad)
    if output is not None:
        output.copy_(grad.chunk(dist.get_world_size())[dist.get_rank()])


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@ranks(1, 2)
def test_nothing_divides_beside_the_hook(rank, world_size, strategy):
    plain, model = transformer_twins(True, strategy)
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


def replacing(state: object, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Puts other tensors into its arguments, as torch's compressing hooks do."""
    grad.data = grad.data.to(torch.bfloat16)
    dist.all_reduce(grad)
    if output is not None:
        output.data = grad.chunk(dist.get_world_size())[dist.get_rank()].clone()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@ranks(2)
def test_hooks_may_replace_the_data_of_their_arguments_or_do_nothing(rank, world_size, strategy):
    """Then gradients are zeros, and nobody waits for others."""
    model = FSDP(nn.Linear(4, 4), sharding_strategy=ShardingStrategy[strategy], use_orig_params=True)
    model.register_comm_hook(None, replacing)
    for count in (1, 2):
        model(torch.ones(1, 4)).sum().backward()
        for grad in full_grads(model).values():
            assert torch.equal(grad, torch.full_like(grad, 2.0 * count))
    assert all(param.grad.dtype == torch.float32 for param in model.parameters() if param.grad is not None)
    model = FSDP(nn.Linear(64, 64))
    model.register_comm_hook(None, lambda state, grad, output: None)
    output = model(torch.ones(1, 64)).sum()
    time.sleep(0.3 * rank)
    output.backward()
    assert not any(grad.any() for grad in full_grads(model).values())


@ranks(2)
def test_wrong_registrations_are_refused(rank, world_size):
    plain, model = twins(Transformer, torch.float64, auto_wrap_policy=WRAPPINGS["block"]())
    whole = FSDP(nn.Linear(4, 4), sharding_strategy=ShardingStrategy.NO_SHARD)
    state, hook = DefaultState(dist.group.WORLD), comm_hooks.reduce_scatter_hook

    def refused(error, match, unit=model, hook=hook):
        with pytest.raises(error, match=match):
            unit.register_comm_hook(state, hook)

    for torchs in (RuntimeError, AssertionError):  # the second is what torch's wrapper raises
        refused(torchs, r"on the root, and this is unit 'blocks\.0'", model.blocks[0])
    refused(ValueError, "must be callable, but is 'sum'", hook="sum")
    with pytest.raises(ValueError, match=r"Linear has no wrapped .* call register_comm_hook\(\)"):
        comm_hooks.register_comm_hook(nn.Linear(4, 4), state, hook)
    allreduce = comm_hooks.allreduce_hook
    refused(ValueError, r"call the communication hook as hook\(state, grad, output\)", hook=allreduce)
    refused(ValueError, r"as hook\(state, grad\), which its signature", whole)
    with model.no_sync():
        loss_of(model, tokens(rank, 0)).backward()
    refused(RuntimeError, r"gradients that no_sync\(\) left unreduced")
    loss_of(model, tokens(rank, 0)).backward()
    assert_averaged(model, plain, [tokens(r, 0) for r in range(world_size)] * 2, 1 / world_size)
    model.register_comm_hook(state, hook)
    for torchs in (RuntimeError, AssertionError):
        refused(torchs, "has a communication hook already")
    whole.module.register_forward_hook(
        lambda *_: refused(RuntimeError, "must not run inside the forward", whole, allreduce)
    )
    whole(torch.ones(1, 4))


@ranks(4)
def test_ready_made_hooks_need_the_ranks_of_every_unit(rank, world_size):
    mesh = hybrid_mesh()
    layers = nn.Sequential(
        FSDP(nn.Linear(4, 4), sharding_strategy=ShardingStrategy.NO_SHARD), nn.Linear(4, 4)
    )
    model = FSDP(layers, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    world, near = dist.group.WORLD, mesh.get_group("shard")
    names, every = (re.escape(str(dist.get_process_group_ranks(group))) for group in (near, world))
    for hooks in MODULES.values():
        hook = hooks.fp16_compress_hook
        for state, said in (
            (hooks.LowPrecisionState(world), f"root unit .* over ranks {names}, .* has ranks {every}"),
            (hooks.LowPrecisionState(near), f"unit '0' over ranks {every}, .* has ranks {names}"),
            (None, "needs a DefaultState or LowPrecisionState, not None"),
        ):
            with pytest.raises(ValueError, match=said):
                model.register_comm_hook(state, hook)

    states = [DefaultState(group) for group in (world, near)]
    chosen = comm_hooks.allreduce_hook, comm_hooks.reduce_scatter_hook
    model.register_comm_hook(
        states, lambda both, grad, *output: chosen[len(output)](both[len(output)], grad, *output)
    )
    model(torch.full((1, 4), 1.0 + rank)).sum().backward()
    assert torch.equal(full_grads(model)["1.bias"], torch.ones(4))
    torch.testing.assert_close(full_grads(model)["1.weight"][0], layers[0](torch.full((1, 4), 2.5))[0])


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@ranks(2)
def test_training_goes_on_after_a_hook_that_failed(rank, world_size, strategy):
    plain, model = transformer_twins(True, strategy)
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
