"""What a wrapper shows, and tells of gradients, where tensor parallelism has distributed parameters."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import tp_nets
from bed import ranks
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy
from fsdp_wrap.wrap import ModuleWrapPolicy

both_forms = pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])


def wrapped(
    use_orig_params: bool, mesh: str = "flat", plan: str = "sequence", seed: int = 0
) -> tuple[tp_nets.Net, FSDP]:
    """A plain model, and a wrapped one of the same values."""
    _, data, tensor = tp_nets.mesh_of(mesh)
    model = tp_nets.parallelize(tp_nets.net(seed=seed), tensor, plan)
    policy = ModuleWrapPolicy({tp_nets.Block})
    hybrid = {} if data.ndim == 1 else {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    options: dict[str, Any] = {**hybrid, "auto_wrap_policy": policy, "use_orig_params": use_orig_params}
    return tp_nets.net(seed=seed), FSDP(model, device_mesh=data, **options)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(plain: nn.Module, model: nn.Module, mesh: str = "flat") -> None:
    """Leaves both with gradients, of the same batches."""
    data = tp_nets.mesh_of(mesh)[1]
    tokens = tp_nets.batches(data.size(), 3)
    tp_nets.loss_of(plain, tokens.flatten(0, 1))
    tp_nets.loss_of(model, tp_nets.own_batch(tokens, data))


@ranks(4)
@both_forms
@pytest.mark.parametrize("mesh", ["flat", "replicas"])
def test_values_and_gradients_are_those_of_a_plain_model(rank, world_size, use_orig_params, mesh):
    plain, model = wrapped(use_orig_params, mesh)
    train(plain, model, mesh)
    tensor = tp_nets.mesh_of(mesh)[2]
    with FSDP.summon_full_params(model, with_grads=True):
        shown = dict(model.module.named_parameters())
        assert isinstance(shown["blocks.0.up.weight"], DTensor)
        assert shown["blocks.0.up.weight"].device_mesh == tensor
        for name, param in plain.named_parameters():
            assert torch.equal(whole(shown[name]), param), name
            torch.testing.assert_close(whole(shown[name].grad), param.grad, rtol=0, atol=1e-12)
        before = tp_nets.batches(1, 5)[0]
        with torch.no_grad():
            torch.testing.assert_close(model(before), plain(before), rtol=0, atol=1e-12)
    train(plain, model, mesh)


@ranks(4)
@both_forms
@pytest.mark.parametrize("rank0_only", [False, True])
@pytest.mark.parametrize("how", ["in place", "data", "replaced"])
def test_edits_are_kept(rank, world_size, use_orig_params, rank0_only, how):
    plain, model = wrapped(use_orig_params)
    train(plain, model)
    options = {"rank0_only": rank0_only, "offload_to_cpu": rank0_only, "with_grads": True}
    data = tp_nets.mesh_of("flat")[1]
    with torch.no_grad(), FSDP.summon_full_params(model, **options):
        block = model.module.blocks[0].module
        if data.get_local_rank() == 0 or not rank0_only:
            weight = block.up.weight
            assert isinstance(weight, DTensor)
            if how == "in place":
                weight.mul_(3)
            elif how == "data":
                weight.data.mul_(3)
            else:
                block.up.weight = nn.Parameter(weight.detach() * 3)
                block.up.weight.grad = weight.grad
            block.up.weight.grad.mul_(2)
        plain.blocks[0].up.weight.mul_(3)
        plain.blocks[0].up.weight.grad.mul_(2)
    with FSDP.summon_full_params(model, with_grads=True):
        for (name, found), param in zip(model.module.named_parameters(), plain.parameters()):
            torch.testing.assert_close(whole(found), param, rtol=0, atol=0, msg=name)
            torch.testing.assert_close(whole(found.grad), param.grad, rtol=0, atol=1e-12, msg=name)
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name])


@ranks(4)
@both_forms
def test_edits_that_do_not_fit_are_refused_and_none_is_kept(rank, world_size, use_orig_params):
    plain, model = wrapped(use_orig_params)
    mesh = tp_nets.mesh_of("flat")[2]
    for other in (torch.ones(10, 6).double(), distribute_tensor(torch.ones(10, 6).double(), mesh)):
        placed = "plain tensor" if type(other) is torch.Tensor else r"placements \(Replicate\(\),\)"
        with pytest.raises(ValueError, match=rf"blocks.0.up.weight' was replaced .*{placed}.*distribute"):
            with torch.no_grad(), FSDP.summon_full_params(model):
                model.module.blocks[1].module.down.weight.mul_(2)
                model.module.blocks[0].module.up.weight = nn.Parameter(other)
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name])


@ranks(4)
@both_forms
@pytest.mark.parametrize(("mesh", "plan"), [("flat", "columns"), ("replicas", "sequence")])
def test_norms_by_name_are_those_of_a_plain_model(rank, world_size, use_orig_params, mesh, plan):
    plain, model = wrapped(use_orig_params, mesh, plan)
    train(plain, model, mesh)
    for p in (2.0, float("inf")):
        found = model.grad_norms(p)
        assert [*found] == [name for name, _ in plain.named_parameters()]
        for name, param in plain.named_parameters():
            expected = torch.linalg.vector_norm(param.grad, p)
            torch.testing.assert_close(found[name], expected, rtol=1e-10, atol=1e-14, msg=name)


class _InItsOwnWay(nn.Linear):
    """Stores twice what it computes with."""

    def _load_from_state_dict(self, state_dict, prefix, *args):
        state_dict[prefix + "weight"] = state_dict[prefix + "weight"] / 2
        super()._load_from_state_dict(state_dict, prefix, *args)


@ranks(4)
@both_forms
def test_modules_that_load_in_ways_of_their_own(rank, world_size, use_orig_params):
    _, data, tensor = tp_nets.mesh_of("flat")
    model: Any = tp_nets.net()
    model.blocks[0].up = _InItsOwnWay(tp_nets.WIDTH, tp_nets.HIDDEN).double()
    model = tp_nets.parallelize(model, tensor, "sequence")
    wrap = functools.partial(FSDP, device_mesh=data, use_orig_params=use_orig_params)
    model = wrap(model, auto_wrap_policy=ModuleWrapPolicy({tp_nets.Block}))
    other = tp_nets.net(seed=1).state_dict()
    model.load_state_dict(other)
    expected = {**other, "blocks.0.up.weight": other["blocks.0.up.weight"] / 2}
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
