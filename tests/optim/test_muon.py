"""`Muon` of sharded models beside torch's own on a plain model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.flop_counter import FlopCounterMode

import fronts
import mesh_nets
import tp_nets
from bed import ranks, run_ranks
from bed.references import count_collectives
from fronts import full
from fsdp_wrap import CPUOffload, ShardingStrategy, checkpoint, fully_shard, replicate
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.optim import Muon, batch, per_head, split
from fsdp_wrap.sharded_grad_scaler import ShardedGradScaler
from fsdp_wrap.wrap import ModuleWrapPolicy

OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}


class Layer(nn.Module):
    """Matrices of which two ranks cannot have equal parts, and what is no matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 10), nn.Linear(10, 6, bias=False), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(6, 7)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


POLICY = ModuleWrapPolicy({Layer})


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def backward(model: nn.Module, at: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(100 * at + rank)
    tokens = torch.randint(11, (3, 5), generator=generator)
    model(tokens).square().mean().backward()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, at: int) -> None:
    optimizer.zero_grad()
    backward(model, at, dist.get_rank())
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
    """Torch's own Muon and SGD on a plain model, which sees the batches of all ranks."""

    def __init__(self, model: nn.Module, exact: bool = True, **options: Any) -> None:
        self.model, self._exact = model, exact
        embeddings = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
        params = [*model.parameters()]
        matrices = [each for each in params if each.dim() == 2 and id(each) not in embeddings]
        chosen = {*map(id, matrices)}
        self.muon = torch.optim.Muon(matrices, **{**OPTIONS, **options})
        self.other = sgd([each for each in params if id(each) not in chosen])

    def step(self, at: int) -> None:
        self.muon.zero_grad()
        self.other.zero_grad()
        size = dist.get_world_size()
        for rank in range(size):
            backward(self.model, at, rank)
        self.average_and_step(size)

    def average_and_step(self, size: int) -> None:
        for param in self.model.parameters():
            if param.grad is not None:
                param.grad /= size
        own = torch.optim._muon._zeropower_via_newtonschulz
        torch.optim._muon._zeropower_via_newtonschulz = in_float64 if self._exact else own  # type: ignore[assignment]
        self.muon.step()
        torch.optim._muon._zeropower_via_newtonschulz = own
        self.other.step()


def full_values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in fronts.full_state(model).items()}


def assert_equal(model: nn.Module, plain: nn.Module, atol: float = 1e-10) -> None:
    found = full_values(model)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=name)


def muon(model: nn.Module, **options: Any) -> Muon:
    return Muon(model, **{**OPTIONS, "other": sgd, "ns_dtype": torch.float64, **options})


@fronts.each_front
@ranks(1, 2, 3, 4)
def test_numbers_are_torchs_in_float64(rank, world_size, front):
    plain, model = fronts.twins(front, Net, torch.float64, auto_wrap_policy=POLICY)
    reference, optimizer = Plain(plain), muon(model)
    for at in range(3):
        reference.step(at)
        step(model, optimizer, at)
    assert_equal(model, plain)


@fronts.each_front
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
@pytest.mark.each_value
@ranks(2)
def test_options_mean_what_torchs_mean_in_bf16(rank, world_size, front, nesterov, adjust_lr_fn):
    options = {
        "nesterov": nesterov,
        "adjust_lr_fn": adjust_lr_fn,
        "momentum": 0.8,
        "eps": 1e-3,
        "ns_steps": 3,
    }
    options |= {"ns_coefficients": (3.0, -3.2, 1.2), "weight_decay": 0.3}
    plain, model = fronts.twins(front, Net, torch.float64, auto_wrap_policy=POLICY)
    reference, optimizer = (
        Plain(plain, exact=False, **options),
        muon(model, ns_dtype=torch.bfloat16, **options),
    )
    for at in range(2):
        reference.step(at)
        step(model, optimizer, at)
    assert_equal(model, plain, atol=2e-3)  # where another order of sums rounds the other way
    found = full_values(model)
    assert (
        sum(torch.equal(found[name].bfloat16(), x.bfloat16()) for name, x in plain.state_dict().items()) > 8
    )


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.each_value
@ranks(4)
def test_strategies_and_offload(rank, world_size, use_orig_params, strategy, offload):
    torch.manual_seed(0)
    plain = Net().double()
    mesh = init_device_mesh("cpu", (2, 2) if "HYBRID" in strategy else (4,))
    model = FSDP(
        copy.deepcopy(plain),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy[strategy],
        cpu_offload=CPUOffload(offload),
        use_orig_params=use_orig_params,
        auto_wrap_policy=POLICY,
    )
    reference, optimizer = Plain(plain), muon(model)
    owners = {matrix.owner for matrix in optimizer.matrices.matrices}
    assert owners == {0, 1, 2, 3}  # replicas share the work
    for at in range(2):
        reference.step(at)
        step(model, optimizer, at)
    assert_equal(model, plain)


@ranks(4)
def test_hybrid_meshes_and_dimensions_of_fully_shard(rank, world_size):
    torch.manual_seed(0)
    plain = Net().double()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def columns(param: nn.Parameter) -> Any:
        return torch.distributed.tensor.Shard(1) if param.dim() == 2 and param.shape[1] % 2 == 0 else None

    model = copy.deepcopy(plain)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, shard_placement_fn=columns)
    fully_shard(model, mesh=mesh)
    reference, optimizer = Plain(plain), muon(model)
    for at in range(2):
        reference.step(at)
        step(model, optimizer, at)
    assert_equal(model, plain)


@pytest.mark.parametrize("way", ["replicate", "torch's fully_shard", "plain"])
@ranks(2)
def test_others_that_shard_or_replicate(rank, world_size, way):
    torch.manual_seed(0)
    plain = Net().double()
    model = copy.deepcopy(plain)
    wrap: Any = {"replicate": replicate, "torch's fully_shard": torch_fully_shard}.get(way)
    for each in (*model.layers, model) if wrap else ():
        wrap(each)
    reference, optimizer = Plain(plain), muon(model)
    owners = [matrix.owner for matrix in optimizer.matrices.matrices]
    assert {*owners} == ({0, 1} if wrap else {rank})
    for at in range(2):
        if wrap:
            reference.step(at)
            step(model, optimizer, at)
            continue
        for each in (plain, model):  # of which no rank knows the others
            each.zero_grad()
            backward(each, at, rank)
        reference.average_and_step(1)
        optimizer.step()
    assert_equal(model, plain)


MESHES = [(front, kind) for kind in ("hybrid_tp", "pp") for front in mesh_nets.FRONTS]


@pytest.mark.slow
@pytest.mark.parametrize(("front", "kind"), [each for each in MESHES if mesh_nets.can(*each)])
@ranks(4)
def test_meshes_of_several_kinds(rank, world_size, front, kind):
    model = mesh_nets.on_mesh(front, kind, seed=0)
    plain = mesh_nets.net(0, rank // 2 if kind == "pp" else None)
    reference = Plain(plain)
    optimizer = muon(model)
    for at in range(2):
        mesh_nets.train(model, optimizer, at)
        tokens = torch.randint(mesh_nets.WIDTH, (2, 4), generator=torch.Generator().manual_seed(at))
        plain.zero_grad()
        plain(tokens).square().mean().backward()
        reference.average_and_step(1)
    found = dict(_whole_parameters(model))
    for name, value in plain.named_parameters():
        torch.testing.assert_close(found[name], value.detach(), rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("front", ["ours", "torch"])
@ranks(4)
def test_experts_on_a_mesh_of_their_own_are_matrices(rank, world_size, front):
    plain, model = mesh_nets.net(0), mesh_nets.on_mesh(front, "ep", seed=0)
    view = {"blocks.1.up": batch(), "blocks.1.down": batch()}
    optimizers = [muon(each, view=view) for each in (plain, model)]
    assert len(optimizers[1].matrices.matrices) == len(optimizers[0].matrices.matrices) == 12
    for at in range(2):
        for each, optimizer in zip((plain, model), optimizers):
            mesh_nets.train(each, optimizer, at)
    found = dict(_whole_parameters(model))
    for name, value in plain.named_parameters():
        torch.testing.assert_close(found[name], value.detach(), rtol=0, atol=1e-10, msg=name)


@fronts.each_front
@pytest.mark.parametrize("plan", ["columns", "sequence"])
@ranks(4)
def test_tensor_parallelism(rank, world_size, front, plan):
    plain = tp_nets.net()
    _, data, tensor = tp_nets.mesh_of("flat")
    model: Any = tp_nets.parallelize(tp_nets.net(), tensor, plan)
    if front == "composable":
        tp_nets.shard_blocks(model, fully_shard, mesh=data)
    else:
        policy = ModuleWrapPolicy({tp_nets.Block})
        model = FSDP(model, device_mesh=data, use_orig_params=front == "orig", auto_wrap_policy=policy)
    reference, optimizer = Plain(plain), muon(model)
    for at in range(2):
        batches = tp_nets.batches(2, at)
        reference.muon.zero_grad()
        reference.other.zero_grad()
        for each in batches:
            tp_nets.loss_of(plain, each)
        reference.average_and_step(2)
        optimizer.zero_grad()
        tp_nets.loss_of(model, tp_nets.own_batch(batches, data), plan)
        optimizer.step()
    found = dict(_whole_parameters(model))
    for name, value in plain.named_parameters():
        torch.testing.assert_close(found[name], value.detach(), rtol=0, atol=1e-10)


def _whole_parameters(model: nn.Module) -> Any:
    with FSDP.summon_full_params(model, writeback=False):
        for name, param in model.named_parameters():
            yield name.replace("_fsdp_wrapped_module.", ""), full(param.detach()).clone()


class Tied(Net):
    """Its head has the embedding's weight, and one layer is of no use in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight
        self.at = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.embed(tokens))
        return self.head(self.layers[1](x) if self.at % 2 == 0 else x)


@fronts.each_front
@ranks(2)
def test_tied_frozen_and_unused_parameters(rank, world_size, front):
    torch.manual_seed(0)
    plain = Tied().double()
    if front != "flat":  # in which all parameters of a unit are frozen, or none is
        plain.layers[0].down.weight.requires_grad_(False)
    plain.layers[1].requires_grad_(False)
    model = fronts.shard(front, copy.deepcopy(plain), auto_wrap_policy=POLICY)
    reference, optimizer = Plain(plain), muon(model)
    assert "embed.weight" not in optimizer.matrices.names
    for at in range(4):
        if at == 1:
            for each in (plain, fronts.inner(model)):
                fronts.inner(each.layers[1]).requires_grad_(True)
        plain.at = fronts.inner(model).at = at
        reference.step(at)
        step(model, optimizer, at)
    assert_equal(model, plain)
    assert "momentum_buffer" in optimizer.state[optimizer.matrices.params[-1]] or rank == 1


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
@ranks(1, 3)
def test_views_are_matrices_of_their_own(rank, world_size, front):
    torch.manual_seed(0)
    plain = Experts().double()
    model = fronts.shard(front, copy.deepcopy(plain))
    optimizer = muon(model, view=VIEWS, nesterov=False)
    parts = {
        "qkv.weight": lambda each: each.split([10, 4, 4]),
        "out.weight": lambda each: each.split(5, dim=1),
        "experts": lambda each: each.unbind(),
        "back.weight": lambda each: [each],
        "other.weight": lambda each: [each],  # of the shape of a part of the first
    }
    momentum = {name: torch.zeros_like(param) for name, param in plain.named_parameters()}
    for at in range(2):
        for each in (plain, model):
            each.zero_grad()
            each(
                torch.rand(3, 6, generator=torch.Generator().manual_seed(at)).double()
            ).square().sum().backward()
        optimizer.step()
        for name, param in plain.named_parameters():
            momentum[name].lerp_(param.grad, 0.05)
            with torch.no_grad():
                param.mul_(1 - 0.05 * 0.1)
                for target, source in zip(parts[name](param), parts[name](momentum[name])):
                    update = in_float64(source, (3.4445, -4.7750, 2.0315), 5, 1e-7)
                    target.sub_(update * 0.05 * 0.2 * max(source.shape) ** 0.5)
    assert_equal(model, plain)


# what travels, and who computes


class Wide(nn.Module):
    """Equal blocks, so that ranks can share the work evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@fronts.each_front
@ranks(2, 4)
def test_bytes_and_flops_are_shared(rank, world_size, front):
    torch.manual_seed(0)
    model = fronts.shard(front, Wide(), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
    optimizer = muon(model, ns_dtype=torch.float32)
    matrices = 4 * sum(rows * columns for rows, columns in (m.shape for m in optimizer.matrices.matrices))
    model(torch.rand(3, 16)).sum().backward()
    with count_collectives(objects=False) as found, FlopCounterMode(display=False) as flops:
        optimizer.step()
    calls, nbytes = found.pop("all_to_all_single", (0, 0))
    assert calls <= 2 and sum(each.bytes for each in found.values()) <= 64  # who has gradients
    told = torch.tensor([nbytes, flops.get_total_flops()], dtype=torch.float64)
    everyone = [torch.empty_like(told) for _ in range(world_size)]
    dist.all_gather(everyone, told)
    assert sum(each[0] for each in everyone) <= 2 * matrices
    total = sum(each[1] for each in everyone)
    assert total > 0 and max(each[1] for each in everyone) <= 1.1 * total / world_size


@ranks(2)
def test_what_lies_on_one_rank_does_not_travel(rank, world_size):
    torch.manual_seed(0)
    plain = Experts().double()
    model = fully_shard(copy.deepcopy(plain))
    optimizer = muon(model, select="experts", view={"experts": batch()})
    model(torch.rand(3, 6).double()).sum().backward()
    with count_collectives(objects=False) as found:
        optimizer.step()
    assert "all_to_all_single" not in found
    assert [matrix.owner for matrix in optimizer.matrices.matrices] == [0, 0, 1, 1]


# a torch.optim.Optimizer


def _trained(rank: int, world_size: int, front: str, steps: range, path: Any, resumed: bool) -> None:
    torch.manual_seed(0)
    model = fronts.shard(front, Net().double(), auto_wrap_policy=POLICY)
    optimizer = muon(model)
    if resumed:
        checkpoint.load(path, model, optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.07
    for at in steps:
        optimizer.zero_grad()
        for each in range(2):  # all ranks see the same
            backward(model, at, each)
        optimizer.step()
    if not resumed:
        optimizer.param_groups[0]["lr"] = 0.07
        checkpoint.save(path, model, optimizer, step=1)
        return
    plain, expected = _trained_plain()
    assert_equal(model, plain)
    state = _full_state(model, optimizer)
    for name, entry in expected.items():
        assert sorted(state[name]) == sorted(entry), name
        for key, value in entry.items():
            torch.testing.assert_close(state[name][key], value, rtol=0, atol=1e-10)


def _trained_plain() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    plain = Net().double()
    reference = Plain(plain)
    for at in range(4):
        if at == 2:
            reference.muon.param_groups[0]["lr"] = 0.07
        plain.zero_grad()
        backward(plain, at, 0)
        backward(plain, at, 1)
        reference.average_and_step(1)
    names = {param: name for name, param in plain.named_parameters()}
    states = {**reference.muon.state, **reference.other.state}
    return plain, {names[param]: dict(entry) for param, entry in states.items()}


def _full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    if isinstance(model, FSDP):
        return FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    state: Any = get_optimizer_state_dict(model, optimizer)["state"]
    return {name: {key: full(value) for key, value in entry.items()} for name, entry in state.items()}


RESUMES = [("flat", 2, "composable", 3), ("composable", 3, "orig", 2), ("orig", 4, "flat", 1)]


@pytest.mark.parametrize(("giver", "before", "taker", "after"), RESUMES)
def test_resuming_elsewhere_is_torchs_plain_run(tmp_path, giver, before, taker, after):
    run_ranks(before, _trained, giver, range(2), tmp_path, False)
    run_ranks(after, _trained, taker, range(2, 4), tmp_path, True)


@fronts.each_front
@ranks(2)
def test_state_dicts_of_torch_and_of_the_optimizer(rank, world_size, front):
    _, model = fronts.twins(front, Net, torch.float64, auto_wrap_policy=POLICY)
    _, other = fronts.twins(front, Net, torch.float64, auto_wrap_policy=POLICY)
    _, third = fronts.twins(front, Net, torch.float64, auto_wrap_policy=POLICY)
    optimizers = [muon(each) for each in (model, other, third)]
    for at in range(2):
        step(model, optimizers[0], at)
    optimizers[0].param_groups[0]["momentum"] = 0.7
    taken = copy.deepcopy(get_optimizer_state_dict(model, optimizers[0]))  # torch's are not copies
    set_optimizer_state_dict(other, optimizers[1], taken)
    optimizers[2].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for each in (other, third):
        each.load_state_dict(model.state_dict())
    for each, optimizer in zip((model, other, third), optimizers):
        assert optimizer.param_groups[0]["momentum"] == 0.7
        step(each, optimizer, 5)
    for each in (other, third):
        for name, value in full_values(model).items():
            assert torch.equal(full_values(each)[name], value), name


@fronts.each_front
@ranks(2)
def test_schedulers_closures_accumulation_and_zeroing(rank, world_size, front):
    plain, model = fronts.twins(front, Net, torch.float64, auto_wrap_policy=POLICY)
    reference, optimizer = Plain(plain), muon(model)
    schedules = [
        torch.optim.lr_scheduler.ExponentialLR(each, 0.5)
        for each in (reference.muon, reference.other, optimizer)
    ]
    for at in range(3):
        reference.muon.zero_grad()
        reference.other.zero_grad()
        for part in range(2):
            for each in range(world_size):
                backward(plain, 10 * at + part, each)
        reference.average_and_step(world_size)

        def closure(at: int = at) -> float:
            optimizer.zero_grad(set_to_none=at % 2 == 0)
            for part in range(2):
                backward(model, 10 * at + part, rank)
            return 3.0

        assert optimizer.step(closure) == 3.0
        for schedule in schedules:
            schedule.step()
    assert_equal(model, plain)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05 / 8, 0.1 / 8]


@fronts.each_front
@ranks(2)
def test_scaled_gradients_and_overflows(rank, world_size, front):
    plain, model = fronts.twins(front, Net, torch.float64, auto_wrap_policy=POLICY)
    reference, optimizer = Plain(plain), muon(model)
    scaler = ShardedGradScaler(device="cpu", init_scale=4.0)
    for at in range(3):
        if at != 1:
            reference.step(at)
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * at + rank)
        loss = model(torch.randint(11, (3, 5), generator=generator)).square().mean()
        scaler.scale(loss * (torch.inf if at == 1 and rank == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert_equal(model, plain)


@fronts.each_front
@ranks(2)
def test_other_optimizers_by_name(rank, world_size, front):
    _, model = fronts.twins(front, Net, torch.float64, auto_wrap_policy=POLICY)
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
    assert [type(each).__name__ for each in optimizer.others] == ["Adagrad", "SGD", "AdamW"]
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.5, 0, 0.7, 1e-3]
    before = full_values(model)
    before = {name: value.clone() for name, value in before.items()}
    step(model, optimizer, 0)
    same = [name for name, value in full_values(model).items() if torch.equal(value, before[name])]
    assert same == ["head.weight"]


# mistakes


@ranks(2)
def test_mistakes_are_named(rank, world_size):
    _, model = fronts.twins("orig", Net, auto_wrap_policy=POLICY)
    for error, text, options in (
        (ValueError, "lr must not be negative", {"lr": -1}),
        (ValueError, "momentum must not be negative", {"momentum": -0.1}),
        (ValueError, "ns_steps must be", {"ns_steps": 100}),
        (ValueError, "three numbers", {"ns_coefficients": (1.0, 2.0)}),
        (ValueError, "adjust_lr_fn must be one of 'original'", {"adjust_lr_fn": "other"}),
        (ValueError, "ns_dtype must be a floating dtype", {"ns_dtype": torch.int8}),
        (ValueError, "parameter 'layers.0.up.bias' of shape .10,. has 1 dimensions", {"select": "*up.*"}),
        (ValueError, "select: 'nothing' names no parameter", {"select": ["nothing"]}),
        (
            ValueError,
            "parameter 'layers.0.up.bias' .* fits none of 'embed.weight'",
            {"other": {"embed.weight": sgd}},
        ),
        (TypeError, "other must make a torch.optim.Optimizer, not a list", {"other": list}),
    ):
        with pytest.raises(error, match=text):
            Muon(model, **options)
    with pytest.raises(TypeError, match="takes a torch.nn.Module, not a list"):
        Muon([*model.parameters()])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Muon cannot be copied or pickled"):
        copy.deepcopy(muon(model))
    with pytest.raises(ValueError, match="parameter 'weight' is complex"):
        Muon(nn.Linear(2, 2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="since it was made"):
        muon(model).add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})


@ranks(2)
def test_groups_that_others_have_changed_are_refused(rank, world_size):
    _, model = fronts.twins("orig", Net, auto_wrap_policy=POLICY)
    optimizer = muon(model)
    backward(model, 0, rank)
    params = optimizer.param_groups[0]["params"]
    for changed in (params[1:], params[::-1], [params[1], params[0], *params[2:]]):
        optimizer.param_groups[0]["params"] = changed
        with pytest.raises(RuntimeError, match="the parameters of Muon's first group are others"):
            optimizer.step()


@ranks(2)
def test_gradients_that_some_ranks_lack_are_named_before_anything_changes(rank, world_size):
    _, model = fronts.twins("composable", Net, torch.float64, auto_wrap_policy=POLICY)
    optimizer = muon(model)
    backward(model, 0, rank)
    if rank == 1:
        model.layers[1].up.weight.grad = None
    before = [param.to_local().clone() for param in model.parameters()]
    with pytest.raises(
        RuntimeError, match=r"'layers.1.up.weight' has a gradient on ranks \[0\] and none on .*1"
    ):
        optimizer.step()
    assert not optimizer.state
    assert all(torch.equal(param.to_local(), value) for param, value in zip(model.parameters(), before))
    step(model, optimizer, 1)
