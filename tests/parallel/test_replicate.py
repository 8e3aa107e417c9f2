"""`replicate`: parameters that are whole on each rank; beside a plain model in float64, torch's and DDP."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate_with_fsdp as torchs
from torch.distributed.checkpoint import state_dict as torch_functions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel as DDP

import composable
from bed import ranks
from bed.memory import live_bytes
from bed.references import count_collectives
from beside import NEAR
from composable import shard_blocks
from fronts import full
from fsdp_wrap import (
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    ReplicateModule,
    fully_shard,
    replicate,
)
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.clip_grad import clip_grad_norm_
from mesh_nets import Side, assert_same_sides
from nets import net


def batches(step: int, count: int) -> torch.Tensor:
    return torch.randn(count, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def named_mesh(size: int) -> Any:
    return init_device_mesh("cpu", (size,), mesh_dim_names=("replicate",))


def backward(model: Callable[..., torch.Tensor], batch: torch.Tensor) -> None:
    model(batch).square().sum().backward()


assert_same = partial(composable.assert_same, exact=False, atol=1e-12)


@ranks(2)
def test_steps_and_collectives_beside_those_of_torch_and_ddp(rank, world_size):
    mesh = named_mesh(world_size)
    apart, together, theirs = net(), net(), net()
    shard_blocks(apart, replicate, mesh=mesh, travel_together_bytes=0)
    shard_blocks(together, replicate)
    shard_blocks(theirs, torchs.replicate, mesh=mesh)
    ddp = DDP(net())
    models = {"apart": apart, "together": together, "torch's": theirs, "DDP": ddp}
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.05) for net in models.values()]
    for step in range(3):
        counts: dict[str, dict[str, int]] = {}
        for name, model in models.items():
            with count_collectives(objects=False) as counted:
                backward(model, batches(step, world_size)[rank])
            counts[name] = {kind: traffic.calls for kind, traffic in counted.items()}
        units = len(apart.blocks) + 1
        assert counts["apart"] == counts["torch's"] == {"all_reduce": units}
        assert counts["together"] == {"all_reduce": 1 if step else units}
        for model in (together, theirs, ddp):
            assert_same(apart, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, param in apart.named_parameters():
        twin = theirs.get_parameter(name)
        assert param.placements == twin.placements == (Replicate(),) and param.device_mesh == twin.device_mesh
        assert param.to_local().shape == param.shape == twin.shape
    for step, synced in enumerate([False, False, True]):
        apart.set_requires_gradient_sync(synced)
        apart.set_is_last_backward(synced)
        with count_collectives() as counted:
            backward(apart, batches(step, world_size)[rank])
        assert [*counted] == ["all_reduce"] * synced and (not synced or counted["all_reduce"].calls == units)
        backward(ddp, batches(step, world_size)[rank])
        if not synced:
            assert not any(full(param.grad).any() for param in apart.parameters())
    assert_same(apart, ddp)


@ranks(2)
def test_the_signature_is_that_of_torch(rank, world_size):
    ours, theirs = (inspect.signature(one).parameters for one in (replicate, torchs.replicate))
    names = [name for name in ours if name not in ("shared_memory", "travel_together_bytes")]
    if "dp_mesh_dims" not in theirs:  # torch 2.11
        names.remove("dp_mesh_dims")
    assert names == [*theirs]
    for name in names:
        assert ours[name].kind == theirs[name].kind
        assert type(ours[name].default).__name__ == type(theirs[name].default).__name__, name
    model = nn.Linear(2, 2)
    assert replicate(model) is model and isinstance(model, ReplicateModule)
    assert type(model).__name__ == type(torchs.replicate(nn.Linear(2, 2), mesh=named_mesh(2))).__name__
    assert type(model).__mro__[1:4] == (ReplicateModule, FSDPModule, nn.Linear)
    theirs_too = {name for name in dir(torchs.ReplicateModule) if not name.startswith("_")}
    assert theirs_too <= {*dir(ReplicateModule)}


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(500, 500))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.live = live_bytes()
        return x @ self.weight


@ranks(2)
def test_memory_is_that_of_the_parameters_and_of_what_is_cast(rank, world_size):
    size = 500 * 500 * 4
    for dtype, cast in ((None, 0), (torch.bfloat16, size / 2)):
        before = live_bytes()
        model = replicate(Wide(), mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        assert size <= live_bytes() - before < 1.1 * size
        out = model(torch.ones(1, 500))
        assert size + cast <= model.live - before < size + cast + 0.1 * size
        assert (live_bytes() - before > 1.4 * size) == (dtype is not None), "kept for backward"
        out.sum().backward()
        del out
        assert 2 * size <= live_bytes() - before < 2.1 * size, "the gradient"
        assert full(model.weight.grad).dtype == torch.float32
        del model


@ranks(2)
def test_parameters_get_values_after_replicating_and_are_those_that_modules_compute_with(rank, world_size):
    plain = net()
    with torch.device("meta"):
        model = net()
    shard_blocks(model, replicate)
    assert all(param.is_meta and param.placements == (Replicate(),) for param in model.parameters())
    model.to_empty(device="cpu")
    torch_functions.set_model_state_dict(
        model, plain.state_dict(), options=torch_functions.StateDictOptions(full_state_dict=True)
    )
    twin, linear = DDP(plain), model.blocks[0].up
    where = {name: param.to_local().data_ptr() for name, param in linear.named_parameters()}
    seen: dict[str, int] = {}
    linear.register_forward_pre_hook(
        lambda module, _: seen.update((name, param.data_ptr()) for name, param in module.named_parameters())
    )
    for step in range(2):
        for trained in (model, twin):
            backward(trained, batches(step, 2)[rank])
        assert seen == where, "no copy"
        seen.clear()
        assert_same(model, twin)
        for trained in (model, twin):
            torch.optim.SGD(trained.parameters(), lr=0.1).step()


WAYS: dict[str, list[Any]] = {
    "replicated": [replicate] * 3,
    "root": [fully_shard, fully_shard, replicate],
    "inside": [replicate, fully_shard, fully_shard],
    "wrapper": [replicate, fully_shard, FSDP],
    "sharded": [fully_shard] * 3,
    "theirs": [torchs.replicate] * 3,
}
"""What makes units of the two blocks, and of the model."""


def made(way: str, seed: int = 0) -> Any:
    first, second, root = WAYS[way]
    model = net(seed)
    options = {"mesh": named_mesh(dist.get_world_size())} if way == "theirs" else {}
    for block, way_of_it in zip(model.blocks, (first, second)):
        way_of_it(block, **options)
    if root is FSDP:
        return FSDP(model, use_orig_params=True)
    return root(model, **options)


@ranks(2)
@pytest.mark.parametrize("way", ["root", "inside", "wrapper", "replicated"])
def test_units_of_both_kinds_in_one_model(rank, world_size, way):
    """Norms are told by what a model of each kind is clipped by, torch's own function among them."""
    model, ddp = made(way), DDP(net())
    by = {"wrapper": lambda _, bound: model.clip_grad_norm_(bound), "replicated": nn.utils.clip_grad_norm_}
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.05) for net in (model, ddp)]
    for step in range(3):
        for trained in (model, ddp):
            backward(trained, batches(step, world_size)[rank])
        norm, expected = (
            clip(net.parameters(), 0.5)
            for clip, net in ((by.get(way, clip_grad_norm_), model), (nn.utils.clip_grad_norm_, ddp))
        )
        assert expected > 0.5
        torch.testing.assert_close(full(norm), expected, rtol=1e-12, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    wanted = {name.removeprefix("module."): value for name, value in ddp.state_dict().items()}
    for name, value in model.state_dict().items():
        torch.testing.assert_close(full(value), wanted[name], msg=name, **NEAR)


@ranks(2)
@pytest.mark.parametrize(
    ("saved", "loaded", "way"),
    [
        ("replicated", "replicated", "full"),
        ("replicated", "sharded", "folder"),
        ("replicated", "root", "dcp"),
        ("replicated", "theirs", "dcp"),
        ("sharded", "replicated", "dcp"),
        ("inside", "replicated", "folder"),
        ("theirs", "replicated", "full"),
    ],
)
def test_states_are_exchanged(rank, world_size, saved, loaded, way, tmp_path):
    one, other = Side(made(saved, 0)), Side(made(loaded, 1))
    for side in (one, other, one):
        backward(side.model, batches(0, world_size)[rank])
        side.optimizer.step()
        side.optimizer.zero_grad()
    one.give(other, way, tmp_path)
    assert_same_sides(other, one)
    for given in (one, other):
        backward(given.model, batches(9, world_size)[rank])
    assert_same(one.model, other.model)


@ranks(2)
def test_what_does_not_fit_is_refused_before_anything_changes(rank, world_size):
    two = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    scalar = nn.Linear(2, 2)
    scalar.gain = nn.Parameter(torch.ones(()))
    both = DataParallelMeshDims(shard="tp", replicate="dp")
    cases: list[tuple[Any, dict[str, Any], Any, str]] = [
        (nn.Linear(2, 2), {"mesh": two}, ValueError, "replicate takes a mesh of one dimension"),
        (nn.Linear(2, 2), {"mesh": two, "dp_mesh_dims": both}, ValueError, r"names \('tp',\) to shard over"),
        (nn.Linear(2, 2), {"mesh": "dp"}, TypeError, "DeviceMesh"),
        (nn.Linear(2, 2), {"mp_policy": torch.float16}, TypeError, "mp_policy"),
        (nn.Linear(2, 2), {"offload_policy": True}, TypeError, "offload_policy"),
        (nn.Linear(2, 2), {"dp_mesh_dims": "dp"}, TypeError, "dp_mesh_dims"),
        (nn.Linear(2, 2), {"travel_together_bytes": -1}, ValueError, "travel_together_bytes"),
        (scalar, {}, ValueError, "parameter 'gain' has no dimension"),
        (nn.ModuleList([nn.Linear(2, 2)]), {}, ValueError, "replicate the modules in it"),
        (torch.jit.trace(nn.Linear(2, 2), torch.ones(2)), {}, TypeError, "changes a module's class"),
    ]
    for module, options, error, words in cases:
        kind, before = type(module), [*module.parameters()]
        with pytest.raises(error, match=words):
            replicate(module, **options)
        assert type(module) is kind and all(map(torch.equal, before, module.parameters()))
        assert not any(isinstance(param, DTensor) for param in module.parameters())
    with pytest.raises(TypeError, match="replicate takes"):
        replicate([])


@ranks(2)
def test_a_module_is_taken_once(rank, world_size):
    for first, second in [(fully_shard, replicate), (replicate, fully_shard), (replicate, replicate)]:
        with pytest.raises((RuntimeError, AssertionError), match="already|before"):
            second(first(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="already wrapped, or part"):
        replicate(replicate(nn.Sequential(nn.Linear(2, 2)))[0])
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        torchs.replicate(replicate(nn.Linear(2, 2)), mesh=named_mesh(2))
    with pytest.raises(ValueError, match="is not sharded yet"):
        replicate(nn.Linear(2, 2)).set_modules_to_forward_prefetch([nn.Linear(2, 2)])  # type: ignore[list-item]
    with pytest.raises(RuntimeError, match="on the root"):
        model = replicate(nn.Sequential(replicate(nn.Linear(2, 2))))
        model[0].reset_iter_state()
