"""Parameters of one unit on several meshes: a mixture of experts, as a plain model in float64."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common as torch_common
from torch.distributed.tensor import DTensor, Replicate, Shard

import mesh_nets
import moe_nets
from bed import ranks
from bed.sampling import few_fast
from beside import NEAR, check_each, train_beside
from fronts import full
from fsdp_wrap import (
    CPUOffloadPolicy,
    EventKind,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Phase,
    api,
    fully_shard,
    iter_full_params,
    record_events,
    set_gradients_in_place,
)
from fsdp_wrap.clip_grad import clip_grad_norm_
from mesh_nets import assert_same_sides
from scenario import Scenario, pairwise

SPACE: dict[str, Sequence[Any]] = {
    "replicas": [False, True],
    "experts": ["shard", "columns", "hybrid", "copies"],
    "accumulation": ["F", "TF", "FF", "CF"],
    "precision": ["none", "float32", "reduced"],
    "frozen": ["nothing", "router", "up", "blocks"],
    "reshard": [None, True, False, 2],
    "offload": [False, True],
    "together": [0, None],
    "reducing": [1, 3],
    "in_place": [False, True],
    "shared_memory": [False, True],
}


def frozen_of(model: nn.Module, which: str) -> list[nn.Parameter]:
    wanted = {"nothing": "-", "up": ".up", "router": "router.", "blocks": "blocks."}[which]
    return [param for name, param in model.named_parameters() if wanted in name]


def place_of(experts: str, mesh: Any) -> Any:
    if experts == "hybrid":
        both = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("copies", "edp", "ep"))
        return both["ep"], moe_nets.placing(api.HSDPMeshInfo(both["copies", "edp"], 1, 0))
    edp, ep = mesh
    if experts == "copies":
        return ep, moe_nets.placing(api.DDPMeshInfo(edp, replicate_mesh_dim=0))
    return ep, moe_nets.placing(moe_nets.info_of(edp), Shard(1) if experts == "columns" else None)


def check(scenario: Scenario) -> None:
    data, *mesh = moe_nets.meshes(scenario["replicas"])
    ep, place = place_of(scenario["experts"], mesh)
    plain, model = moe_nets.net(), moe_nets.distribute(moe_nets.net(), ep)
    for net in (plain, model):
        for param in frozen_of(net, scenario["frozen"]):
            param.requires_grad_(False)
    dtype = None if scenario["precision"] == "none" else torch.float32
    several = scenario["replicas"] and scenario["reshard"] == 2
    moe_nets.shard(
        model,
        fully_shard,
        mesh=data,
        reshard_after_forward=True if several else scenario["reshard"],
        mp_policy=MixedPrecisionPolicy(dtype, torch.float64 if scenario["precision"] == "reduced" else None),
        offload_policy=CPUOffloadPolicy() if scenario["offload"] else OffloadPolicy(),
        shard_placement_fn=place,
        travel_together_bytes=scenario["together"],
        shared_memory=scenario["shared_memory"],
    )
    model.set_reduce_scatter_max_input_buffers(scenario["reducing"])
    set_gradients_in_place(model, scenario["in_place"])
    train_beside(
        model,
        plain,
        moe_nets.loss_of,
        moe_nets.batches,
        dist.get_rank(),
        accumulation=scenario["accumulation"],
        near=NEAR if dtype is None else {"rtol": 0, "atol": 5e-5},
    )


@ranks(4)
@pytest.mark.parametrize("part", few_fast(range(4), 2))
def test_training_equals_a_plain_model(rank, world_size, part):
    check_each(check, pairwise(SPACE, seed=22)[part::4])


def side(seed: int, way: Any = fully_shard, classes: Any = api, columns: Any = None) -> mesh_nets.Side:
    """A mixture of experts with its optimizer, sharded or plain."""
    model = moe_nets.net(seed)
    if way is not None:
        data, edp, ep = moe_nets.meshes()
        place = moe_nets.placing(moe_nets.info_of(edp, classes), columns, classes)
        moe_nets.distribute(model, ep)
        moe_nets.shard(model, way, mesh=data, shard_placement_fn=place)
    return mesh_nets.Side(model)


def train(sharded: mesh_nets.Side, plain: mesh_nets.Side, steps: range) -> None:
    """Trains with clipped gradients; their norms before are the plain model's."""
    train_beside(
        sharded.model,
        plain.model,
        moe_nets.loss_of,
        lambda number: moe_nets.batches(number + steps.start),
        dist.get_rank(),
        steps=len(steps),
        optimizers=(sharded.optimizer, plain.optimizer),
        clip=lambda model: full(clip_grad_norm_(model.parameters(), 0.3)),
        near={"rtol": 0, "atol": 1e-11},
    )


@ranks(4)
def test_clipped_steps_around_a_checkpoint_equal_those_of_a_plain_model(rank, world_size, tmp_path):
    """The plain model also reads the checkpoint."""
    plain, model = side(0, None), side(0)
    train(model, plain, range(3))

    def check(way: str) -> None:
        taker, beside = side(1), copy.deepcopy(plain)
        model.give(taker, way, tmp_path / way)
        assert_same_sides(taker, model)
        train(taker, beside, range(3, 5))
        assert_same_sides(taker, beside, 1e-11)

    check_each(check, ("dcp", "folder", "full"))
    other = side(1, None)
    other.load("dcp", tmp_path / "dcp")
    assert_same_sides(other, model)


@ranks(4)
@pytest.mark.skipif(not hasattr(torch_common, "ShardPlacementResult"), reason="this torch has no such thing")
def test_torchs_classes_do_and_shards_are_those_of_upstream(rank, world_size):
    for columns in (None, Shard(1)):
        model = side(0, classes=torch_common, columns=columns)
        theirs = side(0, torch_fsdp.fully_shard, torch_common, columns)
        for trained in (model, theirs):
            train(trained, side(0, None), range(2))
        pairs = zip(model.model.state_dict().items(), theirs.model.state_dict().values())
        for (name, param), expected in pairs:
            assert param.placements == expected.placements, name
            assert param.device_mesh == expected.device_mesh, name
            torch.testing.assert_close(param.to_local(), expected.to_local(), **NEAR, msg=name)


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for number, name in enumerate(("dense", "own", "hybrid", "copied"), 1):
            self.register_parameter(name, nn.Parameter(torch.full((6, 2), float(number)).double()))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return sum(number * param.sum() for number, param in enumerate(self.parameters(), 1)) * factor


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Sums() for _ in range(3)])

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            factor = torch.tanh(layer(factor) / 1000)
        return factor


def mesh_of_four() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))


def sums(model: Any = None, **options: Any) -> Any:
    """Parameters on four meshes, the first the default."""
    model, mesh = model or Sums(), mesh_of_four()
    infos = {
        model.own: api.FSDPMeshInfo(mesh["edp"], shard_mesh_dim=0),
        model.hybrid: api.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0),
        model.copied: api.DDPMeshInfo(mesh["ep"], replicate_mesh_dim=0),
    }
    told = {param: api.ShardPlacementResult(None, info) for param, info in infos.items()}
    return fully_shard(model, shard_placement_fn=told.get, **options)


def run(model: nn.Module, rank: float) -> torch.Tensor:
    loss = model(torch.tensor(rank + 1.0, dtype=torch.float64))
    loss.backward()
    return loss.detach()


@ranks(4)
def test_each_mesh_averages_over_its_own_ranks(rank, world_size):
    model = sums()
    layouts = {name: (param.device_mesh.ndim, param.placements) for name, param in model.named_parameters()}
    assert layouts == {
        "dense": (1, (Shard(0),)),
        "own": (1, (Shard(0),)),
        "hybrid": (2, (Replicate(), Shard(0))),
        "copied": (1, (Replicate(),)),
    }
    run(model, rank)
    edp, ep = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
    for number, (members, name) in enumerate(zip((range(4), edp, range(4), ep), layouts), 1):
        mean = number * sum(member + 1.0 for member in members) / len(members)
        grad = full(model.get_parameter(name).grad)
        assert torch.equal(grad, torch.full_like(grad, mean)), name
    model.set_gradient_divide_factor(8.0)
    model.zero_grad()
    run(model, rank)
    assert torch.equal(full(model.own.grad), torch.full((6, 2), 2 * sum(r + 1.0 for r in edp) / 8).double())


@ranks(4)
def test_methods_reach_all_meshes(rank, world_size):
    model = sums(reshard_after_forward=True)
    shapes = {name: param.to_local().shape for name, param in model.named_parameters()}
    model.unshard(async_op=True).wait()
    assert not any(isinstance(getattr(model, name), DTensor) for name in shapes)
    model.reshard()
    assert all(getattr(model, name).to_local().shape == shape for name, shape in shapes.items())
    for synced in (False, True):
        model.set_requires_gradient_sync(synced)
        run(model, rank)
        assert all(full(param.grad).any() == synced for param in model.parameters())
    model.float()
    assert all(param.dtype == torch.float32 for param in model.parameters())
    seen: list[int] = []
    model.set_all_reduce_hook(lambda reduced: seen.append(reduced.numel()))
    model(torch.ones(())).backward()
    assert len(seen) == 4


@ranks(4)
def test_what_does_not_fit_is_refused_before_anything_changes(rank, world_size):
    mesh = mesh_of_four()
    half = DeviceMesh("cpu", [0, 1], mesh_dim_names=("half",))
    dp = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    shard, hybrid, edp = api.FSDPMeshInfo, api.HSDPMeshInfo, mesh["edp"]
    meta = copy.copy(edp)
    meta._device_type = "meta"
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        (None, shard(mesh, shard_mesh_dim=0), ValueError, "must be all of its dimensions, in this order"),
        (None, hybrid(mesh, 0, 1), ValueError, r"replicate_mesh_dim=1 and shard_mesh_dim=0"),
        (None, mesh, TypeError, "must be a FSDPMeshInfo"),
        (None, None, TypeError, "must be a FSDPMeshInfo"),
        (None, shard(meta, 0), ValueError, "is of meta devices, and the unit computes on cpu"),
        (Shard(2), shard(edp, 0), ValueError, "no dimension 2"),
        (Shard(1), shard(dp, 0), ValueError, "must be a multiple of the 4 ranks"),
        (Replicate(), shard(edp, 0), TypeError, "must return a Shard"),
        (Shard(0), api.DDPMeshInfo(edp, None, 0), ValueError, "its placement must be None"),
    ]
    if rank > 1:
        cases.append((None, shard(half, 0), ValueError, rf"rank {rank} is not part of DeviceMesh"))
    for placement, info, kind, message in cases:
        model = Sums()
        before = dict(model.named_parameters())
        told = {before["own"]: api.ShardPlacementResult(placement, info)}
        with pytest.raises(kind, match=message) as caught:
            fully_shard(model, shard_placement_fn=told.get)
        assert "parameter 'own'" in str(caught.value)
        assert all(param is before[name] for name, param in model.named_parameters())
        assert type(model) is Sums
    with pytest.raises(ValueError, match=r"'blocks\.0\.up' is a DTensor .* both must be slices of one mesh"):
        data, _, ep = moe_nets.meshes()
        place = moe_nets.placing(moe_nets.info_of(dp))
        fully_shard(moe_nets.distribute(moe_nets.net(), ep), mesh=data, shard_placement_fn=place)
    for cls in (api.FSDPMeshInfo, api.DDPMeshInfo, api.HSDPMeshInfo, api.DataParallelMeshInfo):
        with pytest.raises(ValueError, match=f"{cls.__name__} needs"):
            cls(mesh)


@ranks(4)
def test_backward_gathers_a_module_before_it_prefetches_the_next_and_messages_name_it(rank, world_size):
    model = Chain()
    for layer in model.layers:
        sums(layer, reshard_after_forward=True)
    fully_shard(model, travel_together_bytes=0)
    run(model, rank)
    with record_events() as events:
        run(model, rank)
    backward = [
        (event.unit.split()[0], event.kind)
        for event in events
        if event.phase is Phase.BACKWARD and event.unit
    ]
    gathers = [unit for unit, kind in backward if kind is EventKind.UNSHARD]
    assert gathers == [f"layers.{number}" for number in (2, 1, 0) for _ in range(4)]
    assert backward.index(("layers.1", EventKind.UNSHARD)) < backward.index(("layers.2", EventKind.REDUCE))

    def edit(module: nn.Module, args: Any) -> None:
        with torch.no_grad():
            module.own.mul_(2)

    model.layers[1].register_forward_pre_hook(edit)
    with pytest.raises(RuntimeError, match=r"unit 'layers\.1 \(mesh 2: edp\)' .*'layers\.1\.own'"):
        run(model, rank)


@ranks(4)
def test_parameters_get_values_after_sharding(rank, world_size):
    with torch.device("meta"):
        model = Sums()
    sums(model)
    assert all(param.is_meta for param in model.parameters())
    told = r"of the root unit \(.*\) \(mesh 2: edp\) are on the meta device.*own"
    with pytest.raises(RuntimeError, match=told):
        run(model, rank)
    model.to_empty(device="cpu")
    given = sums()
    model.load_state_dict(given.state_dict())
    run(model, rank)
    run(given, rank)
    for (name, param), other in zip(model.named_parameters(), given.parameters()):
        assert torch.equal(full(param.detach()), full(other.detach())), name
        assert torch.equal(full(param.grad), full(other.grad)), name
    full_params = dict(iter_full_params(model))
    assert list(full_params) == ["dense", "own", "hybrid", "copied"]
    assert all(torch.equal(value, full(given.get_parameter(name))) for name, value in full_params.items())
