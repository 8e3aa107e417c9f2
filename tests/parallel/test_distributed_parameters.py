"""What modules and users see of parameters that are `DTensor`s before they are sharded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

import tp_nets
from bed import ranks
from fronts import full
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import (
    StateDictType,
    checkpoint,
    fully_shard,
    iter_full_params,
    weight_changes,
    weight_source,
)


def sharded(mesh: str = "flat", plan: str = "sequence", **options: Any) -> tuple[tp_nets.Net, tp_nets.Net]:
    """A plain model, and one of the same values that is distributed and sharded."""
    _, data, tensor = tp_nets.mesh_of(mesh)
    model = tp_nets.parallelize(tp_nets.net(), tensor, plan)
    return tp_nets.net(), tp_nets.shard_blocks(model, fully_shard, mesh=data, **options)


@ranks(4)
def test_modules_compute_with_what_was_distributed(rank, world_size):
    _, model = sharded()
    tensor = tp_nets.mesh_of("flat")[2]
    seen = []

    def look(module: nn.Module, args: Any) -> None:
        weight = module.weight
        assert isinstance(weight, DTensor) and isinstance(weight, nn.Parameter) and weight.is_leaf
        seen.append((weight.device_mesh == tensor, weight.placements, tuple(weight.shape)))

    model.blocks[0].up.register_forward_pre_hook(look)
    model.blocks[0].down.register_forward_pre_hook(look)
    tp_nets.loss_of(model, tp_nets.batches(1, 0)[0])
    assert seen == [(True, (Shard(0),), (10, 6)), (True, (Shard(1),), (6, 10))]
    weight = model.blocks[0].up.weight
    assert weight.device_mesh.mesh_dim_names == ("dp", "tp") and tuple(weight.shape) == (10, 6)
    assert weight.grad is not None and weight.grad.placements == weight.placements


class Editing(nn.Module):
    """Writes to its weight, in one of two ways, or returns it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = nn.Linear(4, 6).double(), how

    def forward(self, x: torch.Tensor) -> Any:
        if self.how == "returned":
            return self.inner(x), self.inner.weight
        if self.how == "to_local":
            return torch.tanh(x @ self.inner.weight.to_local().t()).square()
        with torch.no_grad():
            weight = self.inner.weight
            (weight if self.how == "whole" else weight.to_local()).mul_(2)
        return self.inner(x)


def editing(how: str) -> nn.Module:
    _, data, tensor = tp_nets.mesh_of("flat")
    torch.manual_seed(0)
    model = Editing(how)
    parallelize_module(model, tensor, {"inner": ColwiseParallel()})
    return fully_shard(model, mesh=data, reshard_after_forward=True)


@ranks(4)
@pytest.mark.parametrize("how", ["whole", "local"])
def test_edits_in_a_forward_are_refused(rank, world_size, how):
    with pytest.raises(RuntimeError, match=r"wrote to the parameter 'inner\.weight' in place"):
        editing(how)(torch.ones(2, 4, dtype=torch.float64))


@ranks(4)
def test_a_returned_parameter_is_a_copy(rank, world_size):
    model = editing("returned")
    expected = full(model.inner.weight.detach())
    _, weight = model(torch.ones(2, 4, dtype=torch.float64))
    assert torch.equal(full(weight.detach()), expected)
    full(weight).sum().backward()
    assert torch.equal(full(model.inner.weight.grad), torch.ones_like(expected))


@ranks(4)
def test_a_freed_parameter_is_refused_by_autograd(rank, world_size):
    model = editing("returned")
    kept = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        kept.append(module.weight.to_local().square().sum())  # no output: nothing unshards it for a backward

    model.inner.register_forward_hook(keep)
    model(torch.ones(2, 4, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="modified (by an )?inplace"):
        kept[0].backward()


@ranks(4)
def test_a_forward_may_compute_with_local_parts(rank, world_size):
    model = editing("to_local")
    whole = full(model.inner.weight.detach()).requires_grad_()
    x = torch.ones(2, 4, dtype=torch.float64)
    model(x).sum().backward()
    torch.tanh(x @ whole.t()).square().sum().backward()
    torch.testing.assert_close(full(model.inner.weight.grad), whole.grad, rtol=0, atol=1e-12)


@ranks(4)
@pytest.mark.parametrize("mesh", ["flat", "replicas"])
def test_full_parameters_stream(rank, world_size, mesh):
    plain, model = sharded(mesh)
    expected = dict(plain.named_parameters())
    for name, value in iter_full_params(model, budget=1):
        assert torch.equal(value, expected[name]), name
    for number, _ in enumerate(iter_full_params(model)):
        if number == rank:  # ranks that break off take part in what the others need
            break
    for name, value in iter_full_params(model, rank0_only=True):
        assert value.is_meta != (rank == 0), name
        assert value.shape == expected[name].shape
    tp_nets.loss_of(model, tp_nets.batches(1, 0)[0])


@ranks(4)
def test_safetensors_go_there_and_back(rank, world_size, tmp_path):
    plain, model = sharded()
    checkpoint.export_safetensors(model, tmp_path)
    loaded = tp_nets.net(seed=1)
    checkpoint.import_safetensors(loaded, tmp_path)
    for (name, param), other in zip(loaded.named_parameters(), plain.parameters()):
        assert torch.equal(param, other), name
    another = tp_nets.parallelize(tp_nets.net(seed=2), tp_nets.mesh_of("flat")[2], "sequence")
    tp_nets.shard_blocks(another, fully_shard, mesh=tp_nets.mesh_of("flat")[1])
    checkpoint.import_safetensors(another, tmp_path)
    for name, value in iter_full_params(another):
        assert torch.equal(value, dict(plain.named_parameters())[name]), name


@ranks(4)
def test_copies_and_meta_models_train_alike(rank, world_size):
    plain, model = sharded()
    again = copy.deepcopy(model)
    _, data, tensor = tp_nets.mesh_of("flat")
    with torch.device("meta"):
        empty = tp_nets.Net().double()
    tp_nets.shard_blocks(tp_nets.parallelize(empty, tensor, "sequence"), fully_shard, mesh=data)
    empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    tokens = tp_nets.batches(1, 0)[0]
    tp_nets.loss_of(plain, tokens)
    for each in (model, again, empty):
        tp_nets.loss_of(each, tokens)
        for (name, param), other in zip(each.named_parameters(), plain.parameters()):
            torch.testing.assert_close(full(param.grad), other.grad, rtol=0, atol=1e-12, msg=name)


class Tied(nn.Module):
    """An embedding whose weight the head uses as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 6), nn.Linear(6, 8, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


@ranks(4)
def test_tied_parameters(rank, world_size):
    _, data, tensor = tp_nets.mesh_of("flat")
    torch.manual_seed(0)
    plain = Tied().double()
    model = copy.deepcopy(plain)
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, tensor, plan)
    for each in (plain, model):
        each.head.weight = each.embed.weight
    fully_shard(model, mesh=data)
    tokens = torch.arange(4).view(1, 4)
    for each in (plain, model):
        each(tokens).square().sum().backward()
    assert model.head.weight is model.embed.weight
    torch.testing.assert_close(full(model.embed.weight.grad), plain.embed.weight.grad, rtol=0, atol=1e-12)


@ranks(4)
def test_what_cannot_be_sharded_further_is_refused(rank, world_size):
    _, data, tensor = tp_nets.mesh_of("flat")
    model = nn.Linear(4, 4)
    part = DTensor.from_local(torch.ones(4, 4), tensor, [Partial()])
    model.weight = nn.Parameter(part)
    with pytest.raises(ValueError, match="only sharded and replicated ones"):
        fully_shard(model, mesh=data)
    with pytest.raises(ValueError, match="only sharded and replicated ones"):
        FSDP(model, device_mesh=data)
    other = parallelize_module(nn.Linear(4, 4), tensor, ColwiseParallel())
    with pytest.raises(ValueError, match="they must share no rank but this one"):
        FSDP(other)
    assert isinstance(other.weight, DTensor)
    wrapped = FSDP(other, device_mesh=data)
    with pytest.raises(NotImplementedError, match="take a state dict of type"):
        with FSDP.state_dict_type(wrapped, StateDictType.LOCAL_STATE_DICT):
            wrapped.state_dict()
    wrapped(torch.ones(1, 4)).sum().backward()
    with torch.device("meta"):
        empty = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="on the meta device: give it values"):
        FSDP(parallelize_module(empty, tensor, ColwiseParallel()), device_mesh=data)


@ranks(4)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_pieces_of_parts_are_read_from_files_without_trust(rank, world_size, use_orig_params, tmp_path):
    _, data, tensor = tp_nets.mesh_of("flat")
    model: nn.Module = tp_nets.parallelize(tp_nets.net(), tensor, "columns")
    model = FSDP(model, device_mesh=data, use_orig_params=use_orig_params)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        torch.save(model.state_dict(), tmp_path / f"{rank}")
        before = dict(iter_full_params(model))
        for param in model.parameters():
            param.data.zero_()
        read = torch.load(tmp_path / f"{rank}", weights_only=True)
        assert not model.load_state_dict(read).missing_keys
    for name, value in iter_full_params(model):
        assert torch.equal(value, before[name]), name


@ranks(4)
@pytest.mark.parametrize("front", ["wrapper", "fully_shard"])
def test_what_users_have_noted_on_parameters_stays_there(rank, world_size, front):
    _, data, tensor = tp_nets.mesh_of("flat")
    model: nn.Module = tp_nets.parallelize(tp_nets.net(), tensor, "columns")
    for name, param in model.named_parameters():
        param.noted = name
    wrapped = front == "wrapper"
    model = FSDP(model, device_mesh=data, use_orig_params=True) if wrapped else fully_shard(model, mesh=data)
    for name, param in model.named_parameters():
        assert param.noted == name.removeprefix("_fsdp_wrapped_module.")


@ranks(4)
@pytest.mark.parametrize("apart", [False, True])
def test_parts_whose_rows_lie_apart_or_that_are_empty(rank, world_size, tmp_path, apart):
    mesh = init_device_mesh("cpu", (1, *((2, 2) if apart else (1, 4))), mesh_dim_names=("dp", "one", "other"))
    rows = 8 if apart else 5  # of which the last of four ranks has none
    whole = torch.arange(4.0 * rows).view(rows, 4)
    model = nn.Linear(4, rows, bias=False)
    placements = [StridedShard(0, split_factor=2) if apart else Replicate(), Shard(0)]
    model.weight = nn.Parameter(distribute_tensor(whole, mesh["one", "other"], placements))
    fully_shard(model, mesh=mesh["dp"])
    checkpoint.export_safetensors(model, tmp_path)
    with torch.no_grad():
        model.weight.zero_()
    checkpoint.import_safetensors(model, tmp_path)
    assert torch.equal(full(model.weight.detach()), whole)
    assert torch.equal(dict(iter_full_params(model))["weight"], whole)


@pytest.mark.parametrize("whole", [False, True])
@ranks(2)
def test_distributed_tensors_that_no_unit_owns_are_exported(rank, world_size, tmp_path, whole):
    """Buffers, of which `distribute_module` makes `DTensor`s, and parameters of modules without units."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 5))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    parallelize_module(model[2], mesh["tp"], ColwiseParallel())
    distribute_module(model[1], mesh["tp"])
    fully_shard(model if whole else model[0], mesh=mesh["dp"])
    assert isinstance(model[1].running_mean, DTensor)
    checkpoint.export_safetensors(model, tmp_path)
    with torch.no_grad():
        for each in (*model.parameters(), *model.buffers()):
            each.fill_(1)
    checkpoint.import_safetensors(model, tmp_path)
    found = dict(weight_source(model))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    if whole:
        changes = weight_changes(model)
        with torch.no_grad():
            model[1].running_var.add_(1)
        names = [change.name for change in changes.collect()]
        assert names == ([] if rank else ["1.running_var"])
