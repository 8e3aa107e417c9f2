"""`Muon` of sharded models beside torch's own on a plain model."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard
from torch.utils.flop_counter import FlopCounterMode

import fronts
import mesh_nets
import tp_nets
from bed import ranks, run_ranks
from bed.references import count_collectives
from beside import train_beside
from fsdp_wrap import (
    CPUOffload,
    NonFiniteError,
    ShardingStrategy,
    checkpoint,
    find_nonfinite,
    replicate,
    reproducible,
    uneven,
)
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.optim import Muon, batch, per_head, split
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import gather_objects

OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}


POLICY = ModuleWrapPolicy({tp_nets.Block})


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def batch_of(at: int, rank: int) -> torch.Tensor:
    return tp_nets.batches(4, at)[rank]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, at: int) -> None:
    optimizer.zero_grad()
    tp_nets.loss_of(model, batch_of(at, dist.get_rank()))
    optimizer.step()


def in_float64(grad: torch.Tensor, coefficients: Any, steps: int, eps: float) -> torch.Tensor:
    """What torch's Newton-Schulz iteration does, in float64 and by powers of the Gram matrix."""
    a, b, c = coefficients
    x = grad.double() / max(grad.double().norm().item(), eps)
    for _ in range(steps):
        gram = x @ x.T
        x = (a * torch.eye(len(x), dtype=x.dtype) + b * gram + c * gram @ gram) @ x
    return x


class Plain:
    def __init__(self, model: nn.Module, exact: bool = True, **options: Any) -> None:
        self._exact = exact
        embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        chosen = [param.dim() == 2 and id(param) not in embeddings for param in model.parameters()]
        matrices, rest = (
            [param for param, is_matrix in zip(model.parameters(), chosen) if is_matrix is wanted]
            for wanted in (True, False)
        )
        self.muon, self.other = torch.optim.Muon(matrices, **{**OPTIONS, **options}), sgd(rest)

    def zero_grad(self) -> None:
        self.muon.zero_grad()
        self.other.zero_grad()

    def step(self) -> None:
        own = torch.optim._muon._zeropower_via_newtonschulz
        torch.optim._muon._zeropower_via_newtonschulz = in_float64 if self._exact else own  # type: ignore[assignment]
        self.muon.step()
        torch.optim._muon._zeropower_via_newtonschulz = own
        self.other.step()


def train_alike(
    model: nn.Module,
    plain: nn.Module,
    optimizers: tuple[Any, Any] | None = None,
    batches: Callable[[int], Any] | None = None,
    place: int | None = None,
    atol: float = 1e-10,
    steps: int = 2,
) -> None:
    """Trains both by Muon, ours and torch's, a batch for each rank; compares gradients and values."""
    batches = batches or partial(tp_nets.batches, dist.get_world_size())
    place = dist.get_rank() if place is None else place
    optimizers, near = optimizers or (muon(model), Plain(plain)), {"rtol": 0, "atol": atol}
    train_beside(model, plain, tp_nets.loss_of, batches, place, optimizers=optimizers, near=near, steps=steps)


class Tied(tp_nets.Net):
    """Its head has the embedding's weight, of which torch's Muon and ours make no matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def twins(front: str, net: type[nn.Module] = tp_nets.Net) -> tuple[nn.Module, nn.Module]:
    """A plain and a sharded model whose matrices cannot be cut into equal parts."""
    return fronts.twins(front, net, torch.float64, auto_wrap_policy=POLICY)


def muon(model: nn.Module, **options: Any) -> Muon:
    return Muon(model, **{**OPTIONS, "other": sgd, "ns_dtype": torch.float64, **options})


@fronts.each_front
@ranks(1, 3)
def test_numbers_are_torchs_in_float64(rank, world_size, front):
    plain, model = twins(front, Tied)
    train_alike(model, plain, steps=3)


@pytest.mark.parametrize(
    ("nesterov", "adjust_lr_fn"), [(True, None), (False, "original"), (True, "match_rms_adamw")]
)
@ranks(2)
def test_options_mean_what_torchs_mean_in_bf16(rank, world_size, nesterov, adjust_lr_fn):
    options = {
        "nesterov": nesterov,
        "adjust_lr_fn": adjust_lr_fn,
        "momentum": 0.8,
        "eps": 1e-3,
        "ns_steps": 3,
        "ns_coefficients": (3.0, -3.2, 1.2),
        "weight_decay": 0.3,
    }
    plain, model = twins("orig")
    reference = Plain(plain, exact=False, **options)
    optimizer = muon(model, ns_dtype=torch.bfloat16, **options)
    train_alike(model, plain, (optimizer, reference), atol=2e-3)  # where another order rounds otherwise
    trained = fronts.full_state(model)
    same = [torch.equal(trained[name].bfloat16(), x.bfloat16()) for name, x in plain.state_dict().items()]
    assert sum(same) > 8


def columns(param: nn.Parameter) -> Any:
    return Shard(1) if param.dim() == 2 and param.shape[1] % 2 == 0 else None


@pytest.mark.parametrize(
    ("front", "strategy", "offload"),
    [
        ("flat", "NO_SHARD", False),
        ("orig", "NO_SHARD", True),
        ("flat", "HYBRID_SHARD", True),
        ("orig", "_HYBRID_SHARD_ZERO2", False),
        ("composable", "HYBRID_SHARD", False),
    ],
)
@ranks(4)
def test_strategies_and_offload(rank, world_size, front, strategy, offload):
    plain = tp_nets.net()
    mesh = init_device_mesh("cpu", (4,) if strategy == "NO_SHARD" else (2, 2))
    options: dict[str, Any] = {"sharding_strategy": ShardingStrategy[strategy]}
    options |= (
        {"shard_placement_fn": columns} if front == "composable" else {"cpu_offload": CPUOffload(offload)}
    )
    model = fronts.shard(front, copy.deepcopy(plain), POLICY, device_mesh=mesh, **options)
    optimizer = muon(model)
    owners = {matrix.owner for matrix in optimizer.matrices.matrices}
    assert owners == {0, 1, 2, 3}  # replicas share the work
    train_alike(model, plain, (optimizer, Plain(plain)))


@pytest.mark.parametrize("wrap", [replicate, torch_fully_shard, None], ids=["replicate", "torchs", "plain"])
@ranks(2)
def test_others_that_shard_or_replicate(rank, world_size, wrap):
    plain = tp_nets.net()
    model: Any = copy.deepcopy(plain)
    for module in (*model.blocks, model) if wrap else ():
        wrap(module)
    optimizer = muon(model)
    owners = {matrix.owner for matrix in optimizer.matrices.matrices}
    assert owners == ({0, 1} if wrap else {rank})
    alone: Any = {} if wrap else {"batches": lambda number: [batch_of(number, rank)], "place": 0}
    train_alike(model, plain, (optimizer, Plain(plain)), **alone)


def same_tokens(number: int) -> list[torch.Tensor]:
    return [torch.randint(mesh_nets.WIDTH, (2, 4), generator=torch.Generator().manual_seed(number))]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("front", "kind"),
    [
        ("ours", "tp"),
        pytest.param("flat", "hybrid_tp", marks=SLOW),
        pytest.param("orig", "pp", marks=SLOW),
        pytest.param("torch", "pp", marks=SLOW),
    ],
)
@ranks(4)
def test_meshes_of_several_kinds(rank, world_size, front, kind):
    model = mesh_nets.on_mesh(front, kind, seed=0)
    plain = mesh_nets.net(0, rank // 2 if kind == "pp" else None)
    train_alike(model, plain, batches=same_tokens, place=0)


@pytest.mark.parametrize("front", [front for front in ("ours", "torch") if mesh_nets.has_experts(front)])
@ranks(4)
def test_experts_on_a_mesh_of_their_own_are_matrices(rank, world_size, front):
    plain, model = mesh_nets.net(0), mesh_nets.on_mesh(front, "ep", seed=0)
    view = {"blocks.1.up": batch(), "blocks.1.down": batch()}
    optimizers = [muon(net, view=view) for net in (model, plain)]
    assert len(optimizers[1].matrices.matrices) == len(optimizers[0].matrices.matrices) == 12
    for at in range(2):
        for net, optimizer in zip((model, plain), optimizers):
            mesh_nets.train(net, optimizer, at)
    fronts.assert_same_values(model, plain, rtol=0, atol=1e-10)


class Experts(nn.Module):
    """Fused projections and stacked experts."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18, bias=False), nn.Linear(10, 6, bias=False)
        self.experts = nn.Parameter(torch.rand(4, 10, 4))
        self.back, self.other = nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, _ = self.qkv(x).split([10, 4, 4], -1)
        mixed = torch.einsum("bi,eio->bo", q, self.experts) + k + self.other(x)
        return self.out(torch.tanh(q)) + self.back(mixed)


VIEWS = {"qkv.weight": split([10, 4, 4]), "out.weight": per_head(2, dim=1), "experts": batch()}


@fronts.each_front
@ranks(3)
def test_views_are_matrices_of_their_own(rank, world_size, front):
    torch.manual_seed(0)
    plain = Experts().double()
    model = fronts.shard(front, copy.deepcopy(plain))
    optimizer = muon(model, view=VIEWS, nesterov=False)
    parts = {
        "qkv.weight": lambda weight: weight.split([10, 4, 4]),
        "out.weight": lambda weight: weight.split(5, dim=1),
        "experts": lambda weight: weight.unbind(),
        "back.weight": lambda weight: [weight],
        "other.weight": lambda weight: [weight],  # of the shape of a part of the first
    }
    momentum = {name: torch.zeros_like(param) for name, param in plain.named_parameters()}
    for at in range(2):
        x = torch.rand(3, 6, generator=torch.Generator().manual_seed(at)).double()
        for net in (plain, model):
            net.zero_grad()
            net(x).square().sum().backward()
        optimizer.step()
        for name, param in plain.named_parameters():
            momentum[name].lerp_(param.grad, 0.05)
            with torch.no_grad():
                param.mul_(1 - 0.05 * 0.1)
                for target, source in zip(parts[name](param), parts[name](momentum[name])):
                    update = in_float64(source, (3.4445, -4.7750, 2.0315), 5, 1e-7)
                    target.sub_(update * 0.05 * 0.2 * max(source.shape) ** 0.5)
    fronts.assert_same_values(model, plain, rtol=0, atol=1e-10)


def wide() -> nn.Module:
    blocks = (nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(4))
    return nn.Sequential(*blocks)


@pytest.mark.parametrize("front", ["flat", "composable"])
@ranks(4)
def test_bytes_and_flops_are_shared(rank, world_size, front):
    torch.manual_seed(0)
    model = fronts.shard(front, wide(), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
    optimizer = muon(model, ns_dtype=torch.float32)
    matrices = 4 * sum(rows * columns for rows, columns in (m.shape for m in optimizer.matrices.matrices))
    model(torch.rand(3, 16)).sum().backward()
    with count_collectives(objects=False) as counted, FlopCounterMode(display=False) as flops:
        optimizer.step()
    calls, nbytes = counted.pop("all_to_all_single", (0, 0))
    assert calls <= 2 and sum(traffic.bytes for traffic in counted.values()) <= 64  # who has gradients
    everyone = gather_objects((nbytes, flops.get_total_flops()))
    assert sum(share[0] for share in everyone) <= 2 * matrices
    total = sum(share[1] for share in everyone)
    assert total > 0 and max(share[1] for share in everyone) <= 1.1 * total / world_size


def _trained(rank: int, world_size: int, front: str, steps: range, path: Any) -> None:
    """Saves a run after its first steps, or ends what was saved there as a plain model would."""
    plain = tp_nets.net()
    model = fronts.shard(front, copy.deepcopy(plain), auto_wrap_policy=POLICY)
    optimizer, reference = muon(model), Plain(plain)
    if steps.start > 0:
        checkpoint.load(path, model, optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.07
    for at in steps:
        step_alike(model, optimizer, at)
    if steps.start == 0:
        optimizer.param_groups[0]["lr"] = 0.07
        checkpoint.save(path, model, optimizer, step=1)
        return
    for at in range(4):
        if at == 2:
            reference.muon.param_groups[0]["lr"] = 0.07
        step_alike(plain, reference, at)
    fronts.assert_same_values(model, plain, rtol=0, atol=1e-10)


def step_alike(model: nn.Module, optimizer: Any, at: int) -> None:
    """Takes a step on a batch that all ranks see."""
    optimizer.zero_grad()
    tp_nets.loss_of(model, batch_of(at, 0))
    optimizer.step()


@pytest.mark.parametrize(
    "resume", [("flat", 2, "composable", 3), ("composable", 3, "orig", 2), ("orig", 4, "flat", 1)], ids=str
)
def test_resuming_elsewhere_is_a_plain_run(tmp_path, resume):
    giver, before, taker, after = resume
    run_ranks(before, _trained, giver, range(2), tmp_path)
    run_ranks(after, _trained, taker, range(2, 4), tmp_path)


@ranks(2)
def test_schedulers_closures_accumulation_and_zeroing(rank, world_size):
    plain, model = twins("orig")
    reference, optimizer = Plain(plain), muon(model)
    of_all = (reference.muon, reference.other, optimizer)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(stepped, 0.5) for stepped in of_all]
    for at in range(3):
        reference.zero_grad()
        for tokens in (batch_of(10 * at + part, other) for part in range(2) for other in range(world_size)):
            tp_nets.loss_of(plain, tokens)
        for param in plain.parameters():
            param.grad /= world_size
        reference.step()

        def closure(at: int = at) -> float:
            optimizer.zero_grad(set_to_none=at % 2 == 0)
            for part in range(2):
                tp_nets.loss_of(model, batch_of(10 * at + part, rank))
            return 3.0

        assert optimizer.step(closure) == 3.0
        for schedule in schedules:
            schedule.step()
    fronts.assert_same_values(model, plain, rtol=0, atol=1e-10)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05 / 8, 0.1 / 8]


@pytest.mark.filterwarnings("ignore:reproducible")
@fronts.each_front
@ranks(2)
def test_who_looks_at_steps_sees_those_of_matrices(rank, world_size, front):
    """Also of a `FlatParameter`, of which it holds pieces."""
    _, model = twins(front)
    optimizer = muon(model)
    with pytest.raises(RuntimeError, match=r"Muon\.step\(\) was called inside uneven"), uneven(model):
        optimizer.step()
    counted = reproducible(model, micro_batches=4)
    model(batch_of(0, rank)).sum().backward()
    with pytest.raises(RuntimeError, match="a step came after 1 of this rank's 2 micro-batches"):
        optimizer.step()
    counted.remove()
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = math.inf
    with pytest.raises(NonFiniteError, match="phase update"), find_nonfinite(model):
        step(model, optimizer, 0)


def with_momentum_of_one(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns an optimizer that has made its state at once."""
    optimizer = torch.optim.SGD(params, lr=0.5, momentum=0.9)
    for param in params:
        optimizer.state[param]["momentum_buffer"] = torch.ones_like(param)
    return optimizer


@ranks(2)
def test_other_optimizers_by_name(rank, world_size):
    _, model = twins("orig")
    default = Muon(model, lr=0.3, weight_decay=0.2)
    assert type(default.others[0]).__name__ == "AdamW"
    assert [(group["lr"], group["weight_decay"]) for group in default.param_groups] == [(0.3, 0.2)] * 2
    chosen = {
        "*norm*": lambda params: torch.optim.Adagrad(params, lr=0.5),
        "head.*": lambda params: torch.optim.SGD(
            [{"params": params[:1], "lr": 0.0}, {"params": params[1:]}], 0.7
        ),
        "*": torch.optim.AdamW,
    }
    optimizer = Muon(model, select=["*up.weight", "*down.weight"], other=chosen)
    assert [type(other).__name__ for other in optimizer.others] == ["Adagrad", "SGD", "AdamW"]
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.5, 0, 0.7, 1e-3]
    before = {name: value.clone() for name, value in fronts.full_state(model).items()}
    step(model, optimizer, 0)
    same = [name for name, value in fronts.full_state(model).items() if torch.equal(value, before[name])]
    assert same == ["head.weight"]
    optimizer = Muon(model, other=with_momentum_of_one)
    values = [(param, param.detach().clone()) for param in optimizer.param_groups[1]["params"]]
    step(model, optimizer, 1)
    for param, value in values:
        if param.grad is not None:
            torch.testing.assert_close(param.detach(), value - 0.5 * (0.9 + param.grad))


@ranks(2)
def test_mistakes_are_named(rank, world_size):
    _, model = twins("orig")
    for text, options in (
        ("lr must not be negative", {"lr": -1}),
        ("momentum must not be negative", {"momentum": -0.1}),
        ("ns_steps must be", {"ns_steps": 100}),
        ("three numbers", {"ns_coefficients": (1.0, 2.0)}),
        ("adjust_lr_fn must be one of 'original'", {"adjust_lr_fn": "other"}),
        ("ns_dtype must be a floating dtype", {"ns_dtype": torch.int8}),
        ("select: 'nothing' names no parameter", {"select": ["nothing"]}),
        ("parameter 'blocks.0.norm.weight' .* fits none of 'embed", {"other": {"embed.weight": sgd}}),
    ):
        with pytest.raises(ValueError, match=text):
            Muon(model, **options)
    with pytest.raises(TypeError, match="other must make a torch.optim.Optimizer, not a list"):
        Muon(model, other=list)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes a torch.nn.Module, not a list"):
        Muon([*model.parameters()])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Muon cannot be copied or pickled"):
        copy.deepcopy(muon(model))
    with pytest.raises(ValueError, match="parameter 'weight' is complex"):
        Muon(nn.Linear(2, 2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="since it was made"):
        muon(model).add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})


@ranks(2)
def test_groups_that_others_have_changed_and_gradients_that_some_ranks_lack_are_named(rank, world_size):
    _, model = twins("composable")
    optimizer = muon(model)
    tp_nets.loss_of(model, batch_of(0, rank))
    params = optimizer.param_groups[0]["params"]
    for changed in (params[1:], params[::-1], [params[1], params[0], *params[2:]]):
        optimizer.param_groups[0]["params"] = changed
        with pytest.raises(RuntimeError, match="the parameters of Muon's first group are others"):
            optimizer.step()
    optimizer.param_groups[0]["params"] = params
    if rank == 1:
        model.blocks[1].up.weight.grad = None
    before = [param.to_local().clone() for param in model.parameters()]
    lacking = r"'blocks.1.up.weight' has a gradient on ranks \[0\] and none on .*1"
    with pytest.raises(RuntimeError, match=lacking):
        optimizer.step()
    assert not optimizer.state
    assert all(torch.equal(param.to_local(), value) for param, value in zip(model.parameters(), before))
    step(model, optimizer, 1)


@ranks(4)
def test_flat_parameters_are_not_stepped_before_the_last_sum(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2))
    strategy = ShardingStrategy.HYBRID_SHARD
    options: dict[str, Any] = {"auto_wrap_policy": POLICY, "device_mesh": mesh, "sharding_strategy": strategy}
    model = FSDP(tp_nets.net(), use_orig_params=False, **options)
    optimizer = Muon(model)
    with fronts.accumulating(model, "C"):
        tp_nets.loss_of(model, batch_of(0, rank))
    with pytest.raises(RuntimeError, match=rf"Muon must not step now: gradients of .*rank {rank}"):
        optimizer.step()
    assert not optimizer.state
    tp_nets.loss_of(model, batch_of(1, rank))
    optimizer.step()
