"""Gradient accumulation: with and without `no_sync`, and with sums within each copy at once.

Those over the replicas come with the last backward then. Against DDP and a plain model.
"""

import copy
import itertools
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bed import ranks
from bed.memory import live_bytes
from bed.references import count_collectives
from beside import large_batch_backward, mean_backward
from fronts import accumulating, assert_same_grads, either_front, no_sync, shard, twins, within_copy
from fsdp_wrap import (
    EventKind,
    ShardingStrategy,
    record_events,
)
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap._core import NotIdleError
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import WRAPPINGS, Block, Transformer, loss_of, tokens, transformer_twins

EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


def backwards(model: Any, rank: int, letters: str, first: int = 0) -> None:
    """Runs one backward for each letter of `accumulating`."""
    for step, letter in enumerate(letters, first):
        with accumulating(model, letter):
            loss_of(model, tokens(rank, step)).backward()


@either_front
@ranks(2)
def test_zero_grad_forgets_what_no_sync_accumulated(rank, world_size, front):
    """After it, every interleaving equals one large batch; without replicas, a sum within the copy is all."""
    plain, wrapped = twins(front, Transformer, torch.float64, auto_wrap_policy=WRAPPINGS["block"]())
    for letters, to_none in itertools.product(["TTFFTTF", "FFTTFF", "TF", "F", "CF", "C"], [True, False]):
        with no_sync(wrapped):
            loss_of(wrapped, tokens(rank, 7)).backward()
        wrapped.zero_grad(set_to_none=to_none)
        plain.zero_grad()
        backwards(wrapped, rank, letters)
        large_batch_backward(plain, range(len(letters)))
        assert_same_grads(wrapped, plain, **EXACT)


@pytest.mark.parametrize(
    ("front", "letter"), [("flat", "T"), ("orig", "T"), ("composable", "T"), ("whole", "T"), ("whole", "C")]
)
@ranks(2)
def test_scaling_gradients_before_their_sum_drops_nothing(rank, world_size, front, letter):
    """Clipping and unscaling there have no effect: the user is told."""
    options = {"sharding_strategy": ShardingStrategy.NO_SHARD} if front == "whole" else {}
    made = "orig" if front == "whole" else front
    plain, model = twins(made, Transformer, torch.float64, auto_wrap_policy=WRAPPINGS["block"](), **options)
    params = [param for param in model.parameters() if param.requires_grad]
    for clips in (False, True):
        backwards(model, rank, letter)
        shown = [param.grad for param in params if param.grad is not None]
        assert shown and not any(
            torch.count_nonzero(getattr(value, "_local_tensor", value)) for value in shown
        )
        if clips:
            nn.utils.clip_grad_norm_(params, 1.0)
            with warnings.catch_warnings():  # it moves no version counter of `DTensor`s
                warnings.simplefilter("ignore")
                backwards(model, rank, "F", 1)
        else:
            for grad in shown:
                grad.mul_(0.5)
            told = rf"^the gradient of '.+' was scaled or written to on rank {rank} .*: clip, unscale"
            with pytest.warns(UserWarning, match=told):
                backwards(model, rank, "F", 1)
        large_batch_backward(plain, range(2))
        assert_same_grads(model, plain, **EXACT)
        for net in (plain, model):
            net.zero_grad()


def _gathers(model, rank, letters):
    with record_events() as events:
        backwards(model, rank, letters)
    return Counter(event.unit for event in events if event.kind is EventKind.UNSHARD)


@ranks(4)
def test_what_stays_for_backward_stays_under_no_sync(rank, world_size):
    blocks = ("blocks.0", "blocks.1", "blocks.2")
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"):
        mesh = {"device_mesh": init_device_mesh("cpu", (2, 2))} if "HYBRID" in strategy else {}
        stays = strategy != "FULL_SHARD"
        plain, wrapped = transformer_twins(True, strategy, **mesh)
        for _ in range(2):
            expected = dict.fromkeys(["", *blocks], 1) if stays else {"": 3, **dict.fromkeys(blocks, 6)}
            assert _gathers(wrapped, rank, "TTT") == expected
            assert _gathers(wrapped, rank, "F")["blocks.0"] == (0 if stays else 2)
            assert _gathers(wrapped, rank, "F")["blocks.0"] == (1 if stays else 2), (
                "backward outside of no_sync frees"
            )
        large_batch_backward(plain, [0, 1, 2, 0, 0] * 2)
        assert_same_grads(wrapped, plain, **EXACT)
        with wrapped.no_sync():  # what has changed does not stay
            loss_of(wrapped, tokens(rank, 0)).backward()
            with torch.no_grad():
                torch._foreach_mul_([*plain.parameters(), *wrapped.parameters()], 0.5)
            losses = [loss_of(net, tokens(rank, 2)) for net in (plain, wrapped)]
            torch.testing.assert_close(*losses, rtol=1e-12, atol=0.0)


# over replicas


def hybrid(front: str, net: nn.Module, strategy: str = "HYBRID_SHARD", unit: type[nn.Module] = Block) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "copy"))
    options = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy[strategy]}
    return shard(front, net, ModuleWrapPolicy({unit}), travel_together_bytes=0, **options)


def hybrid_twins(front: str, strategy: str = "HYBRID_SHARD") -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    plain = Transformer().double()
    return plain, hybrid(front, copy.deepcopy(plain), strategy)


UNITS = 4
"""Three blocks and the root."""


@pytest.mark.parametrize(
    ("front", "strategy"), [("orig", "HYBRID_SHARD"), ("composable", "_HYBRID_SHARD_ZERO2")]
)
@ranks(4)
def test_collectives_by_kind(rank, world_size, front, strategy):
    _, model = hybrid_twins(front, strategy=strategy)
    expected = {
        "T": {},
        "C": {"reduce_scatter_tensor": UNITS},
        "F": {"reduce_scatter_tensor": UNITS, "all_reduce": UNITS},
    }
    for letter in "CCFTCFF":
        with count_collectives() as traffic, record_events() as events:
            backwards(model, rank, letter)
        reduced = {name: count.calls for name, count in traffic.items() if name != "all_gather_into_tensor"}
        assert reduced == expected[letter], letter
        assert sum(event.kind is EventKind.REDUCE for event in events) == UNITS * (letter != "T")
    if front == "orig":
        with no_sync(model), count_collectives() as traffic:
            with no_sync(model):  # nested
                pass
            backwards(model, rank, "F")
        assert "reduce_scatter_tensor" not in traffic


class Wide(nn.Module):
    """Large layers, each of which is used in the backwards whose numbers it is told."""

    SIDE = 256

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(self.SIDE, self.SIDE) for _ in range(4))

    def forward(self, x: torch.Tensor, used: Any = range(4)) -> torch.Tensor:
        for index in used:
            x = self.layers[index](x).tanh()
        return x


@ranks(4)
def test_what_is_kept_is_a_shard(rank, world_size):
    """`no_sync` keeps whole gradients and the shard of zeros by which it notices `zero_grad`."""
    model = hybrid("orig", Wide(), unit=nn.Linear)
    full = 4 * sum(param.numel() for param in Wide().parameters())
    kept = {}
    for letter in "FTFC":  # F ends what the one before has kept
        before = live_bytes()
        with accumulating(model, letter):
            model(torch.ones(1, Wide.SIDE)).sum().backward()
        kept[letter] = (live_bytes() - before) / full
        model.zero_grad()
    assert 1.45 < kept["T"] < 1.55
    assert 0.45 < kept["C"] < 0.55


def fail(*_: Any) -> None:
    raise ArithmeticError("on purpose")


@either_front
@ranks(4)
def test_zero_grad_forgets_partial_sums(rank, world_size, front):
    plain, model = hybrid_twins(front)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for to_none in (True, False):
        for first in (0, 10):
            backwards(model, rank, "CTC", first)
            optimizer.zero_grad(set_to_none=to_none)
            backwards(model, rank, "CF", first + 5)
            large_batch_backward(plain, range(first + 5, first + 7))
            assert_same_grads(model, plain, **EXACT)
            backwards(model, rank, "F" if first else "FC", first)
            for net in (plain, model):
                net.zero_grad(set_to_none=to_none)
    backwards(model, rank, "C")
    block = [module for module in model.modules() if isinstance(module, Block)][1]
    hook = block.register_forward_hook(lambda module, args, result: result.register_hook(fail) and None)
    with within_copy(model), pytest.raises(ArithmeticError):
        loss_of(model, tokens(rank, 1)).backward()
    hook.remove()
    optimizer.zero_grad()
    plain.zero_grad()
    backwards(model, rank, "CF", 5)
    large_batch_backward(plain, range(5, 7))
    assert_same_grads(model, plain, **EXACT)


@either_front
@ranks(4)
def test_what_may_not_come_before_the_last_sum(rank, world_size, front):
    plain, model = hybrid_twins(front)
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    backwards(model, rank, "C")
    with pytest.raises(RuntimeError, match=rf"AdamW must not step now: gradients of .*rank {rank}"):
        optimizer.step()
    assert not optimizer.state
    for name, value in model.state_dict().items():
        assert torch.equal(*(getattr(grad, "_local_tensor", grad) for grad in (value, before[name])))
    if front == "orig":
        with pytest.warns(UserWarning, match="are not clipped"):
            model.clip_grad_norm_(1.0)
        with pytest.raises(RuntimeError, match="which are not reduced yet"):
            with FSDP.summon_full_params(model, with_grads=True):
                pass
        with pytest.raises(RuntimeError, match="cannot go from"):
            model.float()
        with pytest.raises(TypeError, match="reduce_within_copy"), model.no_sync(reduce_within_copy=1):
            pass
    backwards(model, rank, "F", 1)
    large_batch_backward(plain, range(2))
    assert_same_grads(model, plain, **EXACT)
    optimizer.step()
    backwards(model, rank, "C")
    optimizer.zero_grad()
    optimizer.step()  # as there is nothing left


@ranks(4)
def test_what_the_last_backward_does_not_reach_is_summed_as_well(rank, world_size):
    """Copies may have used different units before: the other one sums now what it did then."""
    torch.manual_seed(0)
    plain = Wide().double()
    model = hybrid("orig", copy.deepcopy(plain), unit=nn.Linear)
    x = torch.randn(4, 3, Wide.SIDE, dtype=torch.float64)
    uses = [(0, 1, 2, 3), (2, 1), (1, 2)]
    with within_copy(model):
        for used in uses[:2]:
            model(x[rank], used).sum().backward()
    with count_collectives() as traffic:
        model(x[rank], uses[2]).sum().backward()
    for used in uses:
        mean_backward(lambda other: plain(x[other], used).sum())  # noqa: B023
    assert_same_grads(model, plain, **EXACT)
    assert traffic["all_reduce"].calls == 4


@either_front
@ranks(4)
def test_switching_inside_a_backward_is_refused(rank, world_size, front):
    _, model = hybrid_twins(front)
    told = []
    words = r"inside a backward of the root unit \((FSDP)?Transformer\) on rank"

    def switch(grad: torch.Tensor) -> None:
        with pytest.raises(NotIdleError, match=words), within_copy(model):
            pass
        told.append(True)

    block = next(module for module in model.modules() if isinstance(module, Block))
    hooked = block.register_forward_hook(lambda module, args, result: result.register_hook(switch) and None)
    loss_of(model, tokens(rank, 0)).backward()
    hooked.remove()
    assert told
