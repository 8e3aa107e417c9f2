"""`fully_shard` on many kinds of modules: refusals, meta device, precision, checkpoints, clipping, copies."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel as DDP

from bed import ranks
from composable import assert_same, shard_blocks, trace
from fsdp_wrap import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
    record_events,
    register_fsdp_forward_method,
)
from fsdp_wrap.clip_grad import GradientNorms
from models import Transformer, loss_of, tokens, train


def refused(error: type[Exception], match: str, module: Any, **kwargs: Any) -> None:
    shown = [type(param) for param in module.parameters()] if isinstance(module, nn.Module) else []
    with pytest.raises(error, match=match):
        fully_shard(module, **kwargs)
    if isinstance(module, nn.Module):
        assert [type(param) for param in module.parameters()] == shown, "half done"


@ranks(2)
def test_what_cannot_be_sharded_is_refused_by_name(rank, world_size):
    scalar = nn.Linear(2, 2)
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    refused(ValueError, "'scale' has no dimension", scalar)
    refused(ValueError, "ModuleList has none", nn.ModuleList([nn.Linear(2, 2)]))
    refused(TypeError, "not int", 3)
    refused(TypeError, "an empty list", [])
    refused(TypeError, "mp_policy must be", nn.Linear(2, 2), mp_policy=torch.bfloat16)
    refused(TypeError, "offload_policy must be", nn.Linear(2, 2), offload_policy=True)
    refused(TypeError, "DeviceMesh", nn.Linear(2, 2), mesh=dist.group.WORLD)
    for number in (0, -2, 3, 4):
        refused(ValueError, "divide the number of ranks", nn.Linear(2, 2), reshard_after_forward=number)
    refused(TypeError, "bool, an int or None", nn.Linear(2, 2), reshard_after_forward="no")
    odd = nn.Linear(3, 4)
    refused(ValueError, r"'weight' of shape \(4, 3\)", odd, shard_placement_fn=lambda _: Shard(1))
    refused(ValueError, "no dimension 2", odd, shard_placement_fn=lambda _: Shard(2))
    refused(TypeError, "must return a Shard", odd, shard_placement_fn=lambda _: Replicate())
    with pytest.raises(ValueError, match="MixedPrecisionPolicy.param_dtype"):
        MixedPrecisionPolicy(param_dtype=torch.int8)
    hooked = nn.Linear(2, 2)
    hooked.weight.register_hook(lambda grad: grad)
    refused(ValueError, "'weight' has gradient hooks", hooked)
    sharded = fully_shard(nn.Linear(2, 2))
    refused(ValueError, "already wrapped", sharded)
    with pytest.raises(ValueError, match="cannot go from cpu to meta"):
        sharded.to("meta")
    for model in (sharded, nn.Sequential(sharded)):
        with pytest.raises(TypeError, match=r"share_memory\(\) of the root unit .* on rank \d: .* DTensors"):
            model.share_memory()
    with pytest.raises(ValueError, match="must be a bool"):
        sharded.set_reshard_after_forward(2)
    outer = fully_shard(nn.Sequential(sharded))
    with pytest.raises(RuntimeError, match="on the root, and this is unit '0'"):
        outer[0].reset_iter_state() if outer(torch.ones(1, 2)) is not None else None


@ranks(3)
def test_how_parameters_are_cut(rank, world_size):
    module = nn.Module()
    shapes = {"long": (7, 2), "short": (2, 3), "one": (1,), "none": (0, 4), "even": (4, 6)}
    for name, shape in shapes.items():
        setattr(module, name, nn.Parameter(torch.randn(shape)))
    module.alias = module.long
    expected = {name: param.detach().clone() for name, param in module.named_parameters()}
    ignored = nn.Parameter(torch.ones(2))
    module.ignored = ignored
    holder = Holding(module)
    fully_shard(
        holder,
        ignored_params={ignored},
        shard_placement_fn=lambda param: Shard(-1) if param.shape == (4, 6) else None,
    )
    assert module.ignored is ignored and module.alias is module.long
    for name, value in expected.items():
        param = getattr(module, name)
        dim = 1 if name == "even" else 0
        chunks = value.chunk(world_size, dim)
        mine = chunks[rank] if rank < len(chunks) else value[:0]
        assert isinstance(param, DTensor) and param.placements == (Shard(dim),)
        assert torch.equal(param.to_local(), mine) and torch.equal(param.full_tensor(), value), name
    layer = nn.Linear(3, 3)
    layer.none = nn.Parameter(torch.ones(0, 2))
    layer.register_forward_hook(lambda module, args, output: output + module.none.sum())
    fully_shard(layer)(torch.ones(1, 3)).sum().backward()
    assert torch.all(layer.bias.grad.full_tensor() == 1), "beside what has no elements"


class Holding(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self) -> None: ...


@ranks(2)
def test_meta_then_to_empty_then_loaded(rank, world_size):
    torch.manual_seed(0)
    plain = Transformer(1)
    with torch.device("meta"):
        model = Transformer(1)
    shard_blocks(model)
    with pytest.raises(ValueError, match="of the root unit .* embed.weight.* to_empty"):
        model(tokens(rank, 0))
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    full = plain.state_dict() if rank == 0 else {}
    options = dcp_state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dcp_state_dict.set_model_state_dict(model, full, options=options)
    ddp = DDP(plain)
    expected = train(ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-2), rank, range(2))
    assert train(model, optimizer, rank, range(2)) == expected
    assert_same(model, plain)
    assigned = {
        key: DTensor.from_local(
            value.to_local().clone(),
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
        for key, value in model.state_dict().items()
    }
    model.load_state_dict({key: value * 0 for key, value in assigned.items()}, assign=True)
    assert loss_of(model, tokens(rank, 0)).item() == pytest.approx(torch.tensor(53.0).log().item())
    halved = model.to(torch.bfloat16)
    assert halved is model and model(tokens(rank, 0)).dtype == torch.bfloat16
    assert {param.to_local().dtype for param in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("at_once", [True, False], ids=["all", "part by part"])
@ranks(2)
def test_a_state_dict_taken_before_the_first_step_follows_what_is_trained(rank, world_size, at_once):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    parts = [model[1], model[2]]
    fully_shard(model[0])
    fully_shard(parts)
    fully_shard(model)
    for each in [model] if at_once else model:
        each.to_empty(device="cpu").double()
    for each in model:
        each.reset_parameters()
    saved = model.state_dict()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
    for name, param in model.named_parameters():
        assert param.grad.full_tensor().any() and param.dtype == torch.float64
        assert torch.equal(saved[name].to_local(), param.to_local()), name
    parts[0].float()
    with pytest.raises(ValueError, match="of one dtype with the unit's others"):
        model(torch.ones(2, 4, dtype=torch.float64))
    parts[1].float(), model[0].float()
    model(torch.ones(2, 4)).sum().backward()


@ranks(4)
def test_checkpoints_by_dcp_at_other_meshes(rank, world_size):
    torch.manual_seed(0)
    saved = shard_blocks(Transformer(1), mesh=init_device_mesh("cpu", (2, 2)))
    optimizer = torch.optim.AdamW(saved.parameters(), lr=1e-2)
    train(saved, optimizer, rank, range(2))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    state, optim = dcp_state_dict.get_state_dict(saved, optimizer)
    dcp.save({"model": state, "optim": optim}, checkpoint_id=folder[0])
    torch.manual_seed(1)
    loaded = fully_shard(Transformer(1))
    again = torch.optim.AdamW(loaded.parameters(), lr=1e-2)
    state, optim = dcp_state_dict.get_state_dict(loaded, again)
    dcp.load({"model": state, "optim": optim}, checkpoint_id=folder[0])
    dcp_state_dict.set_state_dict(loaded, again, model_state_dict=state, optim_state_dict=optim)
    assert all(value.placements == (Shard(0),) for value in state.values())
    losses = [train(one, by, rank, range(2, 4)) for one, by in ((saved, optimizer), (loaded, again))]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)
    full = dcp_state_dict.get_model_state_dict(
        loaded, options=dcp_state_dict.StateDictOptions(full_state_dict=True)
    )
    assert {key: value.shape for key, value in full.items()} == {
        key: value.shape for key, value in Transformer(1).state_dict().items()
    }


@ranks(2)
def test_ranks_that_use_different_parameters(rank, world_size):
    model = fully_shard(Branches())
    model(torch.ones(1, 4), ["left", "right"][rank]).sum().backward()
    assert model.left.weight.grad is not None and model.right.weight.grad is not None
    assert model.neither.weight.grad is None
    assert torch.equal(model.left.weight.grad.full_tensor(), torch.full((3, 4), 0.5))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    model.zero_grad()
    model(torch.ones(1, 4), ["every", "left"][rank]).sum().backward()
    assert torch.equal(model.neither.weight.grad.full_tensor(), torch.full((3, 4), 0.5))
    assert torch.equal(model.left.weight.grad.full_tensor(), torch.ones(3, 4))
    model.zero_grad()
    model.set_reduce_scatter_unused_params(True)
    model.right.requires_grad_(False)
    model(torch.ones(1, 4), "left").sum().backward()
    assert not model.neither.weight.grad.full_tensor().any() and model.right.weight.grad is None


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.neither = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        return getattr(self, way)(x)

    def every(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(x) + self.neither(x)

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.left(x)


@ranks(2)
def test_classes_copies_and_forward_methods(rank, world_size):
    torch.manual_seed(0)
    plain = Branches()
    model = fully_shard(copy.deepcopy(plain))
    assert isinstance(model, Branches) and type(model).__name__ == "FSDPBranches"
    register_fsdp_forward_method(model, "twice")
    x = torch.ones(1, 4)
    assert torch.equal(model.twice(x), plain.twice(x))
    other = copy.deepcopy(model)
    assert type(other) is type(model) and other.left.weight is not model.left.weight
    with torch.no_grad():
        other.left.weight.zero_()
        other.left.bias.zero_()
    assert torch.equal(model(x, "left"), plain(x, "left")) and not other(x, "left").any()
    assert other.to(torch.float64).left.weight.dtype == torch.float64 and not other.twice(x.double()).any()
    layers = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert type(layers[:1]) is nn.Sequential


class Chunked(nn.Module):
    """Runs its head outside of the group's first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x))


@ranks(2)
def test_a_list_of_modules_is_one_unit(rank, world_size):
    torch.manual_seed(0)
    plain = Chunked().double()
    model: Any = copy.deepcopy(plain)
    fully_shard([model.norm, model.head])
    fully_shard(model)
    ddp = DDP(plain)

    def loss(run: nn.Module, head: nn.Module) -> torch.Tensor:
        x = torch.arange(8, dtype=torch.float64).view(2, 4) + rank
        return torch.stack([head(chunk).square().sum() for chunk in run(x).split(1)]).sum()

    with ddp.no_sync():
        expected = loss(ddp, plain.head)
        expected.backward()
    for param in plain.parameters():
        dist.all_reduce(param.grad)
        param.grad /= world_size
    found = loss(model, model.head)
    found.backward()
    torch.testing.assert_close(found, expected)
    assert_same(model, plain, exact=False)
    model = Transformer(1)
    fully_shard([model.embed, model.head])
    fully_shard(model)
    with record_events() as events:
        loss_of(model, tokens(rank, 0))
    assert trace(events) == ["u root", "u embed, head", "r embed, head"]


@ranks(2)
def test_both_front_ends_in_one_model(rank, world_size):
    torch.manual_seed(0)
    plain = Transformer(2).double()
    mixed = copy.deepcopy(plain)
    for block in mixed.blocks:
        fully_shard(block)
    model = FullyShardedDataParallel(mixed, use_orig_params=True)
    ddp = DDP(plain)
    for one in (ddp, model):
        train(one, torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9), rank, range(3))
    with FullyShardedDataParallel.summon_full_params(model):
        for (name, found), expected in zip(mixed.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found, expected, msg=name)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    for name, expected in plain.state_dict().items():
        is_block = name.startswith("blocks")
        assert isinstance(saved[name], DTensor) == is_block
        torch.testing.assert_close(saved[name].full_tensor() if is_block else saved[name], expected, msg=name)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(saved)
    losses = [loss_of(one, tokens(rank, 9)) for one in (model, ddp)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for norm_type in (2.0, float("inf")):
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
        torch.testing.assert_close(model.clip_grad_norm_(0.1, norm_type), norm)


@ranks(2)
def test_what_mixed_models_cannot_do_and_what_else_runs(rank, world_size):
    torch.manual_seed(0)
    plain = Transformer(2)
    mixed = copy.deepcopy(plain)
    mixed.blocks[0] = FullyShardedDataParallel(mixed.blocks[0], use_orig_params=True)
    mixed.blocks[1].compile(backend="aot_eager")
    fully_shard(mixed.blocks[1])
    model = fully_shard(mixed)
    ddp = DDP(plain)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (ddp, model)]
    expected = train(ddp, optimizers[0], rank, range(3))
    assert train(model, optimizers[1], rank, range(3)) == pytest.approx(expected, rel=1e-5)
    norms = GradientNorms(model).by_name(2.0)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(norms[name], param.grad.norm(), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="was sharded by fully_shard, so its optimizer state"):
        FullyShardedDataParallel.optim_state_dict(model, optimizers[1])


@ranks(2)
def test_zero_grad_after_a_backward_that_raised_clears_what_is_sharded(rank, world_size):
    """The root's parameters are full between forward and backward, where such a backward leaves them."""

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError

    model = shard_blocks(Transformer())
    sharded = dict(model.named_parameters())
    loss_of(model, tokens(rank, 0)).backward()
    assert all(isinstance(param, DTensor) and param.grad is not None for param in sharded.values())
    hook = model.blocks[0].register_forward_hook(lambda *args: args[-1].register_hook(fail) and None)
    loss = loss_of(model, tokens(rank, 1))
    with pytest.raises(ArithmeticError):
        loss.backward()
    hook.remove()
    model.zero_grad()
    assert all(param.grad is None for param in sharded.values())
    assert all(param is sharded[name] for name, param in model.named_parameters())
