"""What modules and users see of parameters that are `DTensor`s before they are sharded."""

import copy
import inspect
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed._composable import replicate_with_fsdp as torchs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

import tp_nets
from bed import ranks
from beside import NEAR, train_beside
from composable import shard_blocks
from fronts import assert_same_values, each_form, full
from fsdp_wrap import (
    DataParallelMeshDims,
    StateDictType,
    checkpoint,
    fully_shard,
    iter_full_params,
    replicate,
    weight_changes,
    weight_source,
)
from fsdp_wrap import FullyShardedDataParallel as FSDP
from nets import stack


def sharded(
    mesh: str = "flat", plan: str = "sequence", seed: int = 0, net: Any = None
) -> tuple[tp_nets.Net, tp_nets.Net]:
    """A plain model, and one of the same values that is distributed and sharded."""
    _, data, tensor = tp_nets.mesh_of(mesh)
    model = tp_nets.parallelize(net or tp_nets.net(seed=seed), tensor, plan)
    return tp_nets.net(seed=seed), shard_blocks(model, fully_shard, mesh=data)


@ranks(4)
@pytest.mark.parametrize("mesh", ["flat", "replicas"])
def test_full_parameters_stream_and_go_into_safetensors_and_back(rank, world_size, mesh, tmp_path):
    plain, model = sharded(mesh)
    _, another = sharded(mesh, seed=2)
    checkpoint.export_safetensors(model, tmp_path)
    loaded = tp_nets.net(seed=1)
    for target in (loaded, another):
        checkpoint.import_safetensors(target, tmp_path)
    expected = dict(plain.named_parameters())
    for name, value in iter_full_params(model, budget=1):
        assert torch.equal(value, expected[name]), name
        assert torch.equal(loaded.get_parameter(name), value), name
    assert_same_values(another, plain)
    for number, _ in enumerate(iter_full_params(model)):
        if number == rank:  # ranks that break off take part in what the others need
            break
    for name, value in iter_full_params(model, rank0_only=True):
        assert value.is_meta != (rank == 0), name
        assert value.shape == expected[name].shape
    tp_nets.loss_of(model, tp_nets.batches(1, 0)[0])


@ranks(4)
def test_copies_and_meta_models_train_alike(rank, world_size):
    plain, model = sharded()
    with torch.device("meta"):
        _, empty = sharded(net=tp_nets.Net().double())
    empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    for net in (copy.deepcopy(model), empty):
        train_beside(
            net, copy.deepcopy(plain), tp_nets.loss_of, lambda step: [*tp_nets.batches(1, step)] * 4, rank
        )


@ranks(4)
def test_tied_parameters(rank, world_size):
    _, data, tensor = tp_nets.mesh_of("flat")
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 8, bias=False)).double()
    plan = {"0": RowwiseParallel(input_layouts=Replicate()), "1": ColwiseParallel(output_layouts=Replicate())}
    model = parallelize_module(copy.deepcopy(plain), tensor, plan)
    for net in (plain, model):
        net[1].weight = net[0].weight
    fully_shard(model, mesh=data)
    for net in (plain, model):
        net(torch.arange(4).view(1, 4)).square().sum().backward()
    assert model[1].weight is model[0].weight
    torch.testing.assert_close(full(model[0].weight.grad), plain[0].weight.grad, rtol=0, atol=1e-12)


@ranks(4)
def test_what_cannot_be_sharded_further_is_refused(rank, world_size):
    _, data, tensor = tp_nets.mesh_of("flat")
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), tensor, [Partial()]))
    for shard in (partial(fully_shard, mesh=data), partial(FSDP, device_mesh=data)):
        with pytest.raises(ValueError, match="only sharded and replicated ones"):
            shard(model)
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
@each_form
def test_pieces_of_parts_are_read_from_files_without_trust(rank, world_size, use_orig_params, tmp_path):
    """What users have noted on parameters is there before and after."""
    _, data, tensor = tp_nets.mesh_of("flat")
    model: nn.Module = tp_nets.parallelize(tp_nets.net(), tensor, "columns")
    function = copy.deepcopy(model)
    for module in (model, function):
        for name, param in module.named_parameters():
            param.noted = name
    model = FSDP(model, device_mesh=data, use_orig_params=use_orig_params)
    for module in (model, fully_shard(function, mesh=data)) if use_orig_params else ():
        for name, param in module.named_parameters():
            assert param.noted == name.removeprefix("_fsdp_wrapped_module.")
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        torch.save(model.state_dict(), tmp_path / f"{rank}")
        for param in model.parameters():
            param.data.zero_()
        read = torch.load(tmp_path / f"{rank}", weights_only=True)
        assert not model.load_state_dict(read).missing_keys
    assert_same_values(model, tp_nets.net())


@ranks(4)
def test_parts_whose_rows_lie_apart_or_that_are_empty(rank, world_size, tmp_path):
    for rows, shape, outer in (
        (8, (1, 2, 2), StridedShard(0, split_factor=2)),
        (5, (1, 1, 4), Replicate()),  # of which the last of four ranks has none
    ):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "one", "other"))
        whole = torch.arange(4.0 * rows).view(rows, 4)
        model = nn.Linear(4, rows, bias=False)
        model.weight = nn.Parameter(distribute_tensor(whole, mesh["one", "other"], [outer, Shard(0)]))
        fully_shard(model, mesh=mesh["dp"])
        checkpoint.export_safetensors(model, tmp_path / str(rows))
        with torch.no_grad():
            model.weight.zero_()
        checkpoint.import_safetensors(model, tmp_path / str(rows))
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
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(1)
    checkpoint.import_safetensors(model, tmp_path)
    exported = dict(weight_source(model))
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], value) for name, value in expected.items())
    if whole:
        changes = weight_changes(model)
        with torch.no_grad():
            model[1].running_var.add_(1)
        names = [change.name for change in changes.collect()]
        assert names == ([] if rank else ["1.running_var"])


CASES: dict[str, tuple[tuple[int, ...], tuple[str, ...], dict[str, Any]]] = {
    "tp_first": ((2, 2), ("tp", "dp"), {"shard": "dp"}),
    "hybrid": ((2, 1, 2), ("rep", "dp", "tp"), {"shard": "dp", "replicate": "rep"}),
    "replicate": ((2, 2), ("rep", "tp"), {"replicate": "rep"}),
    "two": ((2, 1, 2), ("dp", "cp", "tp"), {"shard": ("dp", "cp")}),
    "copies": ((2, 2), ("dp", "tp"), {"replicate": "dp"}),
    "two_copies": ((2, 2, 1), ("a", "b", "tp"), {"replicate": ("a", "b")}),
    "two_hybrid": ((1, 2, 2), ("rep", "dp", "cp"), {"shard": ("dp", "cp"), "replicate": "rep"}),
}
"""Of `dp_mesh_dims`: all parameters are `DTensor`s on a mesh before they are sharded over a part of it."""


def distribute(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Cuts the first layer by rows and the second by columns over "tp"; all else is replicated."""
    names = mesh.mesh_dim_names or ()
    for layer, dims in ((model[0], {"weight": 0, "bias": 0}), (model[2], {"weight": 1})):
        for name, param in [*layer.named_parameters()]:
            placements: list[Any] = [Replicate()] * mesh.ndim
            if name in dims and "tp" in names:
                placements[names.index("tp")] = Shard(dims[name])
            setattr(layer, name, nn.Parameter(distribute_tensor(param.detach(), mesh, placements)))
    return model


@ranks(4)
@pytest.mark.parametrize("case", CASES)
def test_training_over_dimensions_equals_a_plain_model_and_upstream(rank, world_size, case):
    shape, names, given = CASES[case]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    own = tuple(name for name in names if name != "tp")
    parts = math.prod(mesh[name].size() for name in own)
    ours, theirs = (
        (replicate, torchs.replicate) if "copies" in case else (fully_shard, torch_fsdp.fully_shard)
    )
    models: list[Any] = [
        ours(distribute(stack(5, 6, 5), mesh), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**given))
    ]
    if "dp_mesh_dims" in inspect.signature(theirs).parameters:
        dims = torch_fsdp.DataParallelMeshDims(**given)
        models.append(theirs(distribute(stack(5, 6, 5), mesh), mesh=mesh, dp_mesh_dims=dims))

    def batches(number: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        return [torch.randn(8, 5, dtype=torch.float64, generator=generator)] * parts

    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        sharded = isinstance(model[0].weight, DTensor)
        if sharded:  # over the dimensions of data parallelism
            cut = [Shard(0) if name in own else Replicate() for name in names]
            batch = distribute_tensor(batch, mesh, cut)
        loss = model(batch).square().sum()
        # As with torch, the sum over the ranks is divided by their number.
        (loss * (parts if sharded else 1)).backward()
        return full(loss).detach()

    for model in models:
        train_beside(model, stack(5, 6, 5), loss_of, batches, 0, steps=3)
    for other in models[1:]:
        for (name, param), twin in zip(models[0].named_parameters(), other.parameters()):
            assert param.placements == twin.placements and param.device_mesh == twin.device_mesh, name
            torch.testing.assert_close(param.to_local(), twin.to_local(), **NEAR, msg=name)


@ranks(4)
def test_dimensions_that_do_not_fit_are_refused_before_anything_changes(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dims = DataParallelMeshDims(shard="dp")
    Dims = DataParallelMeshDims
    cases: list[tuple[nn.Module, Any, str]] = [
        (stack(5, 6, 5), {"mesh": mesh, "dp_mesh_dims": dims}, "'0.weight' is a plain tensor"),
        (stack(5, 6, 5), {"mesh": mesh, "dp_mesh_dims": Dims(shard="data")}, r"names \('data',\)"),
        (stack(5, 6, 5), {"mesh": mesh, "dp_mesh_dims": Dims("dp", "dp")}, "each once"),
        (stack(5, 6, 5), {"mesh": mesh, "dp_mesh_dims": Dims(())}, r"names \(\), and mesh has"),
        (distribute(stack(5, 6, 5), mesh), {"mesh": mesh, "dp_mesh_dims": Dims("tp")}, "must be Replicate"),
        (
            distribute(stack(5, 6, 5), mesh),
            {"mesh": mesh, "dp_mesh_dims": Dims(None, "dp"), "reshard_after_forward": 2},
            "shards over that many ranks",
        ),
        (distribute(stack(5, 6, 5), mesh), {"mesh": mesh["dp"]}, "both must be slices of one mesh"),
        (distribute(stack(5, 6, 5), mesh), {}, "both must be slices of one mesh"),
    ]
    for model, options, message in cases:
        before = copy.copy(dict(model.named_parameters()))
        with pytest.raises(ValueError, match=message):
            fully_shard(model, **options)
        assert all(param is before[name] for name, param in model.named_parameters())
        assert type(model) is nn.Sequential
    with pytest.raises(TypeError, match="dp_mesh_dims must be a"):
        fully_shard(distribute(stack(5, 6, 5), mesh), mesh=mesh, dp_mesh_dims="dp")  # type: ignore[call-overload]
