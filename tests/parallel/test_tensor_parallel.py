"""Tensor and sequence parallelism below both front-ends, beside a plain model in float64.

Training, what a wrapper shows and tells of parts, norms of gradients on several meshes, collectives and
their bytes at 8 ranks beside torch's.
"""

import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate_with_fsdp as torchs
from torch.distributed.checkpoint import state_dict as torch_functions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import fronts
import fsdp_wrap
import tp_nets
from bed import ranks
from bed.references import Traffic, count_collectives
from bed.sampling import few_fast
from beside import NEAR, assert_same_gradients, check_each, train_beside
from composable import shard_blocks
from fronts import HYBRID, assert_tensors, each_form, full
from fsdp_wrap import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
    replicate,
    set_gradients_in_place,
)
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap._params.parallel import LocalPart, PartialSums
from fsdp_wrap.clip_grad import clip_grad_norm_
from fsdp_wrap.wrap import ModuleWrapPolicy
from scenario import Scenario, pairwise

SPACE: dict[str, Sequence[Any]] = {
    "front": [*fronts.FRONTS, "replicate"],
    "mesh": ["flat", "replicas", "shards", "long", "wide"],
    "plan": tp_nets.PLANS,
    "accumulation": ["F", "TF", "FF", "CF", "CCF"],
    "precision": ["none", "float32", "reduced"],
    "frozen": ["nothing", "up", "norms", "blocks"],
    "checkpointing": ["none", "reentrant", "early_stop"],
    "reshard": [None, True, False],
    "offload": [False, True],
    "columns": [False, True],
    "clip": [None, 1.0, 2.0, math.inf],
    "sync": [False, True],
    "together": [0, None],
    "reducing": [1, 3],
    "in_place": [False, True],
    "shared_memory": [False, True],
}
"""What one front-end alone has, the others do without."""


DTYPES: dict[str, dict[str, Any]] = {
    "none": {},
    "float32": {"param_dtype": torch.float32},
    "reduced": {"param_dtype": torch.float32, "reduce_dtype": torch.float64},
}


def place_over(size: int) -> Callable[[nn.Parameter], Shard | None]:
    """Shards matrices along their second dimension, where the ranks divide this rank's part of it."""

    def place(param: nn.Parameter) -> Shard | None:
        local = param.to_local() if isinstance(param, DTensor) else param
        return Shard(1) if local.ndim == 2 and local.shape[1] % size == 0 else None

    return place


def by_function(model: tp_nets.Net, data: Any, scenario: Scenario, **told: Any) -> nn.Module:
    policy = MixedPrecisionPolicy(**DTYPES[scenario["precision"]])
    offload = CPUOffloadPolicy() if scenario["offload"] else OffloadPolicy()
    told |= {"mesh": data, "mp_policy": policy, "offload_policy": offload}
    told |= {"shared_memory": scenario["shared_memory"]}
    if scenario["front"] == "replicate":
        shard_blocks(model, replicate, **told)
        model.set_reshard_after_forward(scenario["reshard"] is not False)
        assert all(param.placements[0] == Replicate() for param in model.parameters())
    else:
        told["reshard_after_forward"] = scenario["reshard"]
        place = place_over(data.shape[-1]) if scenario["columns"] else None
        shard_blocks(model, fully_shard, shard_placement_fn=place, **told)
    model.set_reduce_scatter_max_input_buffers(scenario["reducing"])
    return model


def by_wrapper(model: tp_nets.Net, data: Any, scenario: Scenario, **told: Any) -> nn.Module:
    kept, hybrid = scenario["reshard"] is False, data.ndim > 1
    names = ("_HYBRID_SHARD_ZERO2", "HYBRID_SHARD") if hybrid else ("SHARD_GRAD_OP", "FULL_SHARD")
    dtypes = DTYPES[scenario["precision"]]
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({tp_nets.Block}),
        device_mesh=data,
        sharding_strategy=ShardingStrategy[names[0] if kept else names[1]],
        use_orig_params=scenario["front"] == "orig",
        sync_module_states=scenario["sync"],
        cpu_offload=CPUOffload(offload_params=scenario["offload"]),
        mixed_precision=MixedPrecision(**dtypes, cast_root_forward_inputs=False) if dtypes else None,
        **told,
    )


def check(mesh_of: Callable[[str], Any], scenario: Scenario) -> None:
    mesh = scenario["mesh"]
    if scenario["front"] == "replicate" and mesh in ("replicas", "shards"):  # it takes one dimension
        mesh = "flat"
    _, data, tensor = mesh_of(mesh)
    plain, model = tp_nets.net_for(mesh), tp_nets.net_for(mesh, scenario["checkpointing"])
    tp_nets.parallelize(model, tensor, scenario["plan"])
    for net in (plain, model):  # afterwards: what it distributes needs gradients
        tp_nets.freeze(net, scenario["frozen"])
    make = by_wrapper if scenario["front"] in ("flat", "orig") else by_function
    shown = make(model, data, scenario, travel_together_bytes=scenario["together"])
    set_gradients_in_place(shown, scenario["in_place"])
    p = scenario["clip"]
    train_beside(
        shown,
        plain,
        functools.partial(tp_nets.loss_of, plan=scenario["plan"]),
        lambda number: tp_nets.batches(data.size(), number),
        tp_nets.place_in(data),
        accumulation=scenario["accumulation"],
        clip=p and (lambda net: clip(net, 0.1, p)),
        near=NEAR if scenario["precision"] == "none" else {"rtol": 0, "atol": 2e-5},
    )


def clip(model: nn.Module, bound: float, p: float) -> torch.Tensor:
    if isinstance(model, FSDP):
        return model.clip_grad_norm_(bound, p)
    return full(clip_grad_norm_(model.parameters(), bound, p))


@ranks(4)
@pytest.mark.parametrize("part", few_fast(range(12), 6))
def test_training_equals_a_plain_model(rank, world_size, part):
    mesh_of = functools.cache(tp_nets.mesh_of)
    check_each(functools.partial(check, mesh_of), pairwise(SPACE, seed=22)[part::12])


FRONTS_ON_MESHES = [
    *(("flat", "flat"), ("orig", "wide"), ("orig", "replicas"), ("replicate", "flat")),
    *(("composable", mesh) for mesh in ("flat", "wide", "replicas")),
]


def exact_gradients(model: nn.Module, data: Any, numbers: Sequence[int]) -> dict[str, torch.Tensor]:
    """Returns gradients of a model cut by tensor parallelism alone; ranks and batches are added in fp32."""
    sums: dict[str, torch.Tensor] = {}
    for number in numbers:
        model.zero_grad()
        tp_nets.loss_of(model, tp_nets.own_batch(tp_nets.batches(data.size(), number), data), "sequence")
        for name, param in model.named_parameters():
            own, mesh = param.grad.to_local().float(), param.grad.device_mesh
            (placed,) = param.grad.placements
            if isinstance(placed, Partial):
                dist.all_reduce(own, group=mesh.get_group())
                placed = Replicate()
            placed_sum = DTensor.from_local(own, mesh, [placed], shape=param.shape, stride=param.stride())
            whole = placed_sum.full_tensor()
            for dim in range(data.ndim):
                dist.all_reduce(whole, group=data.get_group(dim))
            sums[name] = sums.get(name, 0.0) + whole / data.size()
    return sums


@pytest.mark.parametrize(("front", "mesh"), FRONTS_ON_MESHES)
@ranks(4)
def test_sums_over_tensor_parallelism_are_in_the_reduce_dtype(rank, world_size, front, mesh):
    _, data, tensor = tp_nets.mesh_of(mesh)
    net = tp_nets.net_for(mesh)
    lower = tp_nets.parallelize(copy.deepcopy(net).bfloat16(), tensor, "sequence")

    def check(scenario: tuple[str, bool, int]) -> None:
        accumulation, in_place, together = scenario
        model: Any = tp_nets.parallelize(copy.deepcopy(net).float(), tensor, "sequence")
        dtypes: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        told: dict[str, Any] = {"travel_together_bytes": together}
        if front in fronts.FRONTS[:2]:
            policy, precision = ModuleWrapPolicy({tp_nets.Block}), MixedPrecision(**dtypes)
            told |= {"auto_wrap_policy": policy, "mixed_precision": precision, "device_mesh": data}
            strategy = HYBRID if data.ndim > 1 else ShardingStrategy.FULL_SHARD
            model = FSDP(model, sharding_strategy=strategy, use_orig_params=front == "orig", **told)
        else:
            told |= {"mesh": data, "mp_policy": MixedPrecisionPolicy(**dtypes)}
            shard_blocks(model, replicate if front == "replicate" else fully_shard, **told)
        set_gradients_in_place(model, in_place)
        for number, letter in enumerate(accumulation):
            with fronts.accumulating(model, letter):
                batch = tp_nets.own_batch(tp_nets.batches(data.size(), number), data)
                tp_nets.loss_of(model, batch, "sequence")
        expected = exact_gradients(lower, data, range(len(accumulation)))
        assert_tensors(fronts.full_grads(model), expected, rtol=1e-6, atol=1e-9)

    scenarios = [("F", False, 0), ("F", True, 0), ("FFF", False, 1 << 20), ("TF", False, 0), ("FTF", True, 0)]
    check_each(check, scenarios + [("CF", False, 0)] * (data.ndim > 1))


@pytest.mark.parametrize("op", ["sum", "avg"])
@ranks(4)
def test_a_sum_of_parts_is_in_the_reduce_dtype(rank, world_size, op):
    """Gradients that are summed by redistribution: a part of a sum, or a mean."""
    *_, mesh = tp_nets.mesh_of("wide")
    torch.manual_seed(rank)
    own = torch.rand(8, 3).bfloat16()
    whole = own.float()
    dist.all_reduce(whole)
    param = distribute_tensor(torch.zeros(8, 3), mesh, [Shard(0) if op == "sum" else Replicate()])
    sums = PartialSums([LocalPart.of(param)], torch.float32)
    (total,) = sums.take([(0, DTensor.from_local(own, mesh, [Partial(op)]))], [[]], [False], waits=False)
    expected = whole[2 * rank : 2 * rank + 2] if op == "sum" else whole / 4
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)


def with_gradients(mesh_name: str, plan: str, way: Any = fully_shard) -> tuple[nn.Module, nn.Module]:
    _, data, tensor = tp_nets.mesh_of(mesh_name)
    plain, model = tp_nets.net(), tp_nets.parallelize(tp_nets.net(), tensor, plan)
    shard_blocks(model, way, mesh=data)
    for net in (plain, model):
        tp_nets.loss_of(net, tp_nets.batches(1, 0)[0], plan)
    return model, plain


@ranks(4)
def test_clipping_by_torchs_own_function_equals_that_of_a_plain_model(rank, world_size):
    for mesh, plan, way, foreach in (
        ("replicas", "sequence", fully_shard, True),
        ("shards", "loss", fully_shard, False),
        ("flat", "sequence", replicate, True),
    ):
        for p in (1.0, 3.5, math.inf):
            model, plain = with_gradients(mesh, plan, way)
            norm, expected = (
                nn.utils.clip_grad_norm_(net.parameters(), 0.01, p, foreach=foreach) for net in (model, plain)
            )
            torch.testing.assert_close(full(norm), expected, rtol=1e-12, atol=0)
            assert_same_gradients(model, plain, {"rtol": 0, "atol": 1e-13})
    model, _ = with_gradients("flat", "columns")  # on several meshes, which it refuses
    with pytest.raises(RuntimeError):
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)


@ranks(4)
def test_what_is_not_finite_is_so_on_all_ranks_and_what_cannot_be_clipped_is_refused(rank, world_size):
    model, _ = with_gradients("flat", "columns")
    held = model.blocks[0].up.weight.grad.to_local()
    for value in (math.nan, math.inf):
        if rank == 2:
            held.view(-1)[0] = value
        for p in (2.0, math.inf):
            for function, of in ((clip_grad_norm_, model.parameters()), (fsdp_wrap.clip_grad_norm_, model)):
                with pytest.raises(RuntimeError, match="total norm of order"):
                    function(of, 1.0, p, error_if_nonfinite=True)
    assert not torch.isfinite(clip_grad_norm_(model.parameters(), 1.0))
    mesh, _, _ = tp_nets.mesh_of("flat")
    param = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Partial(), Partial()]))
    param.grad = DTensor.from_local(torch.ones(2), mesh, [Partial(), Partial()])
    for args, rule in (
        ((1.0,), "redistribute it first"),
        ((1.0, 0), "norm_type must be positive"),
        ((-1.0,), "max_norm must not be negative"),
    ):
        with pytest.raises(ValueError, match=rule):
            clip_grad_norm_([param], *args)
    assert clip_grad_norm_([], 1.0) == 0


def wrapped(
    use_orig_params: bool, mesh: str = "flat", plan: str = "sequence", model: tp_nets.Net | None = None
) -> tuple[tp_nets.Net, nn.Module]:
    _, data, tensor = tp_nets.mesh_of(mesh)
    whole = tp_nets.parallelize(model or tp_nets.net(), tensor, plan)
    options = {"device_mesh": data, "sharding_strategy": HYBRID if data.ndim > 1 else None}
    form = "orig" if use_orig_params else "flat"
    return tp_nets.net(), fronts.shard(form, whole, ModuleWrapPolicy({tp_nets.Block}), **options)


def train(plain: nn.Module, model: nn.Module, mesh: str = "flat") -> None:
    """Runs a backward of the same batches on both."""
    data = tp_nets.mesh_of(mesh)[1]
    tokens = tp_nets.batches(data.size(), 3)
    tp_nets.loss_of(plain, tokens.flatten(0, 1))
    tp_nets.loss_of(model, tp_nets.own_batch(tokens, data))


@ranks(4)
@pytest.mark.parametrize(("use_orig_params", "mesh"), [(False, "flat"), (True, "replicas")])
def test_values_gradients_and_norms_by_name_are_those_of_a_plain_model(
    rank, world_size, use_orig_params, mesh
):
    plain, model = wrapped(use_orig_params, mesh, "columns" if mesh == "flat" else "sequence")
    train(plain, model, mesh)
    for p in (2.0, math.inf):
        norms = model.grad_norms(p)
        assert [*norms] == [name for name, _ in plain.named_parameters()]
        for name, param in plain.named_parameters():
            expected = torch.linalg.vector_norm(param.grad, p)
            torch.testing.assert_close(norms[name], expected, rtol=1e-10, atol=1e-14, msg=name)
    with FSDP.summon_full_params(model, with_grads=True):
        shown = dict(model.module.named_parameters())
        assert isinstance(shown["blocks.0.up.weight"], DTensor)
        assert shown["blocks.0.up.weight"].device_mesh == tp_nets.mesh_of(mesh)[2]
        for name, param in plain.named_parameters():
            assert torch.equal(full(shown[name]), param), name
            torch.testing.assert_close(full(shown[name].grad), param.grad, **NEAR)
        before = tp_nets.batches(1, 5)[0]
        with torch.no_grad():
            torch.testing.assert_close(model(before), plain(before), **NEAR)
    train(plain, model, mesh)


@ranks(4)
@pytest.mark.parametrize(
    ("use_orig_params", "rank0_only", "how"),
    [(False, False, "in place"), (False, True, "replaced"), (True, True, "data"), (True, False, "replaced")],
)
def test_edits_are_kept(rank, world_size, use_orig_params, rank0_only, how):
    plain, model = wrapped(use_orig_params)
    train(plain, model)
    options = {"rank0_only": rank0_only, "offload_to_cpu": rank0_only, "with_grads": True}
    with torch.no_grad(), FSDP.summon_full_params(model, **options):
        up = model.module.blocks[0].module.up
        if tp_nets.mesh_of("flat")[1].get_local_rank() == 0 or not rank0_only:
            assert isinstance(up.weight, DTensor)
            if how == "replaced":
                grad, up.weight = up.weight.grad, nn.Parameter(up.weight.detach() * 3)
                up.weight.grad = grad
            else:
                (up.weight.data if how == "data" else up.weight).mul_(3)
            up.weight.grad.mul_(2)
        plain.blocks[0].up.weight.mul_(3)
        plain.blocks[0].up.weight.grad.mul_(2)
    with FSDP.summon_full_params(model, with_grads=True):
        for (name, own), param in zip(model.module.named_parameters(), plain.parameters()):
            torch.testing.assert_close(full(own), param, rtol=0, atol=0, msg=name)
            torch.testing.assert_close(full(own.grad), param.grad, **NEAR, msg=name)
    fronts.assert_same_values(model, plain)


@ranks(4)
@each_form
def test_edits_that_do_not_fit_are_refused_and_none_is_kept(rank, world_size, use_orig_params):
    plain, model = wrapped(use_orig_params)
    mesh = tp_nets.mesh_of("flat")[2]
    for other in (torch.ones(10, 6).double(), distribute_tensor(torch.ones(10, 6).double(), mesh)):
        placed = "plain tensor" if type(other) is torch.Tensor else r"placements \(Replicate\(\),\)"
        with pytest.raises(ValueError, match=rf"blocks.0.up.weight' was replaced .*{placed}.*distribute"):
            with torch.no_grad(), FSDP.summon_full_params(model):
                model.module.blocks[1].module.down.weight.mul_(2)
                model.module.blocks[0].module.up.weight = nn.Parameter(other)
    fronts.assert_same_values(model, plain)


@ranks(4)
@pytest.mark.parametrize(
    ("ways", "mesh", "plan"),
    [
        ((fully_shard, torch_fully_shard), "flat", "columns"),
        ((fully_shard, torch_fully_shard), "replicas", "sequence"),
        ((fully_shard, torch_fully_shard), "wide", "loss"),
        ((replicate, torchs.replicate), "flat", "sequence"),
    ],
)
def test_state_dicts_are_those_of_upstream(rank, world_size, ways, mesh, plan):
    _, data, tensor = tp_nets.mesh_of(mesh)
    nets = [tp_nets.net(seed=seed, hidden=12) for seed in (0, 0, 1)]
    ours, theirs, others = (
        shard_blocks(tp_nets.parallelize(net, tensor, plan), way, mesh=data)
        for net, way in zip(nets, (ways[0], ways[1], ways[1]))
    )
    for state, expected in (
        (ours.state_dict(), theirs.state_dict()),
        (torch_functions.get_model_state_dict(ours), torch_functions.get_model_state_dict(theirs)),
    ):
        assert list(state) == list(expected)
        for name, value in expected.items():
            assert type(state[name]) is type(value) is DTensor
            assert state[name].placements == value.placements, name
            assert state[name].device_mesh == value.device_mesh, name
            assert torch.equal(state[name].to_local(), value.to_local()), name
    assert not ours.load_state_dict(others.state_dict()).missing_keys
    for (name, param), other in zip(ours.named_parameters(), others.parameters()):
        assert torch.equal(param.to_local(), other.to_local()), name
    for trained in (ours, others):
        tp_nets.loss_of(trained, tp_nets.batches(1, 0)[0], plan)
    assert_same_gradients(ours, others)
    options = torch_functions.StateDictOptions(full_state_dict=True)
    whole: Any = torch_functions.get_model_state_dict(ours, options=options)
    assert_tensors(whole, tp_nets.net(seed=1, hidden=12).state_dict())


MESHES = {
    "hybrid": ((2, 2, 2), ("replicate", "shard", "tp")),
    "tall": ((4, 2), ("shard", "tp")),
    "wide": ((2, 4), ("shard", "tp")),
    "copies": ((4, 1, 2), ("replicate", "shard", "tp")),
}
"""Of eight ranks, each looked at by itself on a group that sends nothing."""
BESIDE = 24
"""Bytes beside a part: it starts at a multiple of 16 bytes, and a number tells who has a gradient."""


def made(way: Any, mesh_name: str, plan: str, **options: Any) -> nn.Module:
    shape, names = MESHES[mesh_name]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    data = names[:-1]
    model = tp_nets.parallelize(tp_nets.net(hidden=12), mesh["tp"], plan)
    return shard_blocks(model, way, mesh=mesh[data if len(data) > 1 else data[0]], **options)


def counted(model: Any, plan: str, letters: str) -> dict[tuple[int, str], Traffic]:
    """What each backward of the third step takes, forward and all; the first steps compare units."""
    totals: dict[tuple[int, str], Traffic] = {}
    for _ in range(3):
        model.zero_grad()
        totals.clear()
        for number, letter in enumerate(letters):
            model.set_requires_gradient_sync(letter != "T")
            model.set_requires_all_reduce(letter != "C")
            with count_collectives() as counts:
                tp_nets.loss_of(model, tp_nets.batches(1, 0)[0], plan)
            counts.pop("_wrap_tensor_autograd", None)  # which sends nothing
            totals.update(((number, kind), traffic) for kind, traffic in counts.items())
    return totals


def assert_placed_alike(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, param), other in zip(ours.named_parameters(), theirs.parameters()):
        for own, expected in ((param, other), (param.grad, other.grad)):
            if expected is not None:
                assert own.device_mesh == expected.device_mesh, name
                assert own.placements == expected.placements, name
                assert own.to_local().shape == expected.to_local().shape, name


CASES = [
    (mesh, plan, reshard, letters)
    for number, mesh in enumerate(MESHES)
    for plan in tp_nets.PLANS
    for reshard, letters in [(True, "F"), (False, "TF"), (True, "CF"), (None, "F")][number % 2 :: 2]
]


@ranks(1, backend=None)
@pytest.mark.parametrize("place", [0, 5])
@pytest.mark.parametrize("case", few_fast(CASES, 12), ids=lambda case: "-".join(map(str, case)))
def test_shapes_and_collectives_are_at_most_those_of_upstream(rank, world_size, case, place):
    mesh, plan, reshard, letters = case
    dist.init_process_group("fake", store=FakeStore(), rank=place, world_size=8)
    ours, theirs = (
        made(way, mesh, plan, reshard_after_forward=reshard) for way in (fully_shard, torch_fully_shard)
    )
    assert_placed_alike(ours, theirs)
    most = 2 if reshard else 1  # each gathers in backward once more
    beside = most * BESIDE * len(list(ours.parameters())) * MESHES[mesh][0][-2]
    own, upstream = (counted(net, plan, letters) for net in (ours, theirs))
    for key in own.keys() | upstream.keys():
        assert own.get(key, Traffic()).calls <= upstream.get(key, Traffic()).calls, key
        assert own.get(key, Traffic()).bytes <= upstream.get(key, Traffic()).bytes + beside, key
    assert_placed_alike(ours, theirs)
