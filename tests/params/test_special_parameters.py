"""Ignored parameters stay as they are, tied ones have one gradient, ranks agree about partly used ones."""

import copy
import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bed import ranks
from beside import train_beside
from fronts import chosen, each_form, each_front, either_front, full_grads, local_numel, shard, twins
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import MixedPrecision, StateDictType
from fsdp_wrap.comm_hooks import DefaultState, LowPrecisionState, fp16_compress_hook, reduce_scatter_hook
from fsdp_wrap.wrap import ModuleWrapPolicy, always_wrap_policy
from models import WRAPPINGS, Transformer, loss_of, tokens
from partly_used import Partly, Wide, assert_small_gradients_count


def _ignored(kind: str, model: nn.Module) -> dict[str, Any]:
    modules = [model.blocks[1], model.norm]
    if kind == "modules":
        return {"ignored_modules": modules}
    params = [param for module in modules for param in module.parameters()]
    return {"ignored_states": modules if kind == "states of modules" else params}


@ranks(2)
def test_ignored_states_stay_whole_and_local(rank, world_size):
    ways = [("modules", "whole"), ("states of modules", "block"), ("states of parameters", "block")]
    for (kind, wrapping), use_orig_params in zip([*ways, ways[0]], (True, True, True, False)):
        plain = Transformer().double()
        raw = copy.deepcopy(plain)
        kept = {f"blocks.1.{name}": param for name, param in raw.blocks[1].named_parameters()}
        kept |= {f"norm.{name}": param for name, param in raw.norm.named_parameters()}
        policy = WRAPPINGS[wrapping]()
        options = {"use_orig_params": use_orig_params, **_ignored(kind, raw)}
        model = FSDP(raw, auto_wrap_policy=policy, **options)
        held = {id(param) for param in model.parameters()}
        for name, param in kept.items():
            assert id(param) in held and param.shape == plain.get_parameter(name).shape, name
        loss_of(model, tokens(rank, 0)).backward()
        sharded = full_grads(model)
        local = loss_of(plain, tokens(rank, 0))
        own = dict(zip(kept, torch.autograd.grad(local, [plain.get_parameter(name) for name in kept])))
        (sum(loss_of(plain, tokens(r, 0)) for r in range(world_size)) / world_size).backward()
        for name, param in plain.named_parameters():
            grad, expected = (kept[name].grad, own[name]) if name in kept else (sharded[name], param.grad)
            torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12, msg=name)
        state = model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    # Clipping counts gradients once that are the same on all ranks, as after a reduction of the user's own.
    plain = Transformer().double()
    raw = copy.deepcopy(plain)
    model = FSDP(raw, ignored_modules=[raw.norm], use_orig_params=True)
    for module in (plain, model):
        loss_of(module, tokens(0, 0)).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(model.clip_grad_norm_(0.1), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(raw.norm.weight.grad, plain.norm.weight.grad, rtol=1e-12, atol=1e-12)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x)


@pytest.mark.parametrize(("argument", "by_policy"), [("ignored_modules", False), ("ignored_states", True)])
@ranks(2)
def test_what_is_wrapped_may_itself_be_ignored(rank, world_size, by_policy, argument):
    """Its unit has nothing to shard; units that were inside before still do."""
    raw = nn.Sequential(Counting(), nn.Linear(4, 4))
    inner = raw[1] = FSDP(raw[1], use_orig_params=True)
    policy = ModuleWrapPolicy({Counting}) if by_policy else None
    with pytest.warns(UserWarning, match=f"{argument} holds the Sequential that is being wrapped") as caught:
        model = FSDP(raw, auto_wrap_policy=policy, **{argument: [raw]})  # type: ignore[arg-type]
    assert caught[0].filename == __file__
    assert raw[1] is inner and FSDP.fsdp_modules(model) == [model, inner]
    outer = FSDP(nn.Sequential(model, nn.Linear(4, 4)), use_orig_params=True)
    outer(torch.randn(3, 4)).sum().backward()
    held = {id(param) for param in outer.parameters()}
    for param in raw[0].parameters():
        assert id(param) in held and param.grad.shape == param.shape == (4, 4)[: param.dim()]
    assert sorted(model.state_dict()) == ["0.calls", "0.linear.bias", "0.linear.weight", "1.bias", "1.weight"]
    assert outer.state_dict()["0.0.linear.weight"].shape == (4, 4)


@each_form
@ranks(2)
def test_state_dicts_have_the_memory_of_what_is_ignored(rank, world_size, use_orig_params):
    """As that of a plain module; what units own is copied, also parameters that are shown in full now."""
    prefix = "below."
    raw = nn.Sequential(Counting(), Counting(), nn.Linear(4, 4))
    options = {"use_orig_params": use_orig_params}
    raw[1] = FSDP(raw[1], ignored_states=[raw[1].linear.weight], **options)
    model = FSDP(raw, ignored_modules=[raw[0]], **options)
    model(torch.ones(2, 4)).sum().backward()
    ignored = {f"0.{name}": value for name, value in raw[0].state_dict(keep_vars=True).items()}
    ignored["1.linear.weight"] = raw[1].module.linear.weight

    def check(state: dict) -> None:
        for name, value in ignored.items():
            assert state[prefix + name].data_ptr() == value.data_ptr(), name

    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        with FSDP.state_dict_type(model, kind):
            check(model.state_dict(prefix=prefix))
    with FSDP.summon_full_params(model):
        full = model.state_dict(prefix=prefix)
        check(full)
        shown = {value.data_ptr() for value in (*raw[2].parameters(), raw[1].module.linear.bias)}
        shown.add(raw[1].module.calls.data_ptr())
        owned = (f"{prefix}{name}" for name in ("2.weight", "2.bias", "1.linear.bias", "1.calls"))
        assert shown.isdisjoint(full[name].data_ptr() for name in owned)


# tied ones, whichever way the tied modules were wrapped


class Tied(nn.Module):
    """Embedding and head share a weight, as do two inner layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.first(self.embed(x)).tanh()
        return self.head(self.last(self.middle(x).tanh()))


HAND = {
    "nested and root": ["embed", "first"],
    "all": ["embed", "first", "middle", "last", "head"],
    "later first": ["head", "last"],
}


def _loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def _batches(number: int) -> list[torch.Tensor]:
    """Returns a batch that is the same for all ranks."""
    return [torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(number))]


@each_front
@ranks(2)
def test_training_tied_parameters(rank, world_size, front):
    for how in ["always", "linear", *HAND]:
        if how in HAND:
            torch.manual_seed(0)
            plain: nn.Module = Tied().double()
            model: nn.Module = copy.deepcopy(plain)
            for name in HAND[how]:
                setattr(model, name, shard(front, getattr(model, name)))
            model = shard(front, model)
        else:
            policy = always_wrap_policy if how == "always" else ModuleWrapPolicy({nn.Linear})
            plain, model = twins(front, Tied, torch.float64, auto_wrap_policy=policy)
        if how == "all":
            total = torch.tensor(sum(local_numel(param) for param in model.parameters()))
            torch.distributed.all_reduce(total)
            assert abs(total.item() - sum(param.numel() for param in plain.parameters())) <= 16, "alignment"
        train_beside(model, plain, _loss_of, _batches, 0, steps=4)
        names = [name for name, _ in plain.named_parameters()]
        with FSDP.summon_full_params(model) if isinstance(model, FSDP) else nullcontext():
            assert [name for name, _ in model.named_parameters()] == names
            assert model.embed.weight is model.head.weight
            with torch.no_grad():
                model.head.weight.add_(1)
                plain.head.weight.add_(1)
        train_beside(model, plain, _loss_of, _batches, 0, steps=2)


@either_front
@ranks(2)
def test_tied_modules_without_a_common_root(rank, world_size, front):
    torch.manual_seed(0)
    plain = nn.ModuleList([nn.Linear(6, 6).double(), nn.Linear(6, 6).double()])
    plain[1].weight = plain[0].weight
    wrapped = [shard(front, module) for module in copy.deepcopy(plain)]
    x = torch.randn(3, 6, dtype=torch.float64)
    for _ in range(2):
        for first, second in (plain, wrapped):
            second(first(x).tanh()).square().sum().backward()
    grads = {**full_grads(wrapped[0]), "other": full_grads(wrapped[1])["bias"]}
    for name, param in (*plain[0].named_parameters(), ("other", plain[1].bias)):
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-12, atol=1e-12)


@ranks(2)
def test_what_is_tied_to_a_dtensor_is_refused(rank, world_size):
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    shard("composable", model[0])
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"'1\.weight' is the sharded parameter of another unit: tie"):
        shard("composable", model)


# those that some ranks use and others do not


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)


def check(front: str, rank: int, size: int, tolerance: float = 1e-6, **options: Any) -> None:
    plain, model = twins(front, Partly, **options)

    def loss_of(module: Any, member: int) -> torch.Tensor:
        loss = module(member)
        if module is plain and front == "flat":  # whose unused parameters get gradients of zeros
            loss = loss + 0 * plain.none.sum()
        loss.backward()
        return loss.detach()

    optimizers, near = (adamw(model), adamw(plain)), {"rtol": tolerance, "atol": tolerance}
    train_beside(model, plain, loss_of, lambda _: [*range(size)], rank, optimizers=optimizers, near=near)


@each_front
@ranks(2, 3)
def test_ranks_step_alike(rank, world_size, front, monkeypatch):
    check(front, rank, world_size)
    if front == "composable":
        return
    for dtype in (torch.float16, torch.bfloat16):
        check(front, rank, world_size, 1e-2, mixed_precision=MixedPrecision(reduce_dtype=dtype))
    monkeypatch.setenv("FSDP_WRAP_SHARED_MEMORY", "0")  # gloo keeps the sign of zeros
    for way in ("plain", "exchange"):
        monkeypatch.setenv("FSDP_WRAP_GLOO", way)
        check(front, rank, world_size)


@ranks(4)
def test_replicas_step_alike(rank, world_size):
    for front, strategy in itertools.product(("flat", "orig"), ("NO_SHARD", "HYBRID_SHARD")):
        check(front, rank, world_size, **chosen(front, strategy, world_size))


@pytest.mark.parametrize("front", ["flat", "orig"])
@ranks(2)
def test_reductions_that_round(rank, world_size, front):
    for state, hook in ((DefaultState, reduce_scatter_hook), (LowPrecisionState, fp16_compress_hook)):
        _, model = twins(front, lambda: Wide(Partly()))
        model.register_comm_hook(state(dist.group.WORLD), hook)
        assert_small_gradients_count(front, model, rank)
