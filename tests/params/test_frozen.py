"""Frozen parameters: resharded as soon as their backward is over, and never paid for in communication."""

import itertools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from bed import ranks
from fronts import FULL, KEPT, accumulating, each_front, full_grads, twins
from fsdp_wrap import EventKind, Phase, ShardingStrategy, record_events, set_travel_together_bytes
from fsdp_wrap._runtime.unit import units_in
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import named_state
from params.beside_plain import assert_mean_gradients


def _six_linears() -> nn.Module:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    for linear in model[::2]:
        linear.requires_grad_(False)
    return model


def _assert_same_gradients(model: nn.Module, ddp: nn.Module) -> None:
    grads = full_grads(model)
    for name, param in named_state(ddp):
        if param.requires_grad and param.grad is not None:
            assert torch.equal(grads[name], param.grad), name


def _batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize(
    ("front", "strategy"),
    [("orig", "FULL_SHARD"), ("orig", "SHARD_GRAD_OP"), ("flat", "NO_SHARD"), ("composable", "FULL_SHARD")],
)
@ranks(2)
def test_every_second_linear_frozen(rank, world_size, front, strategy):
    """Units reshard inside of autograd, save a frozen first one whose input needs no gradient.

    That one takes no part in backward, and is sharded again when its forward is over, or stays if it is kept.
    """
    policy, chosen = ModuleWrapPolicy({nn.Linear}), ShardingStrategy[strategy]
    plain, model = twins(front, _six_linears, auto_wrap_policy=policy, sharding_strategy=chosen)
    for input_grad, trains in ((False, False), (True, False), (False, True)):
        for module in (plain, model) if trains else ():
            module.requires_grad_(True)
        ddp, x = DDP(plain), _batch(rank).requires_grad_(input_grad)
        ddp(x).square().sum().backward()
        loss = model(x).square().sum()
        with record_events() as events:
            loss.backward()
        over = [(e.unit, e.phase) for e in events if e.kind is EventKind.POST_BACKWARD]
        all_take_part = input_grad or trains
        stays = [] if all_take_part or strategy == "FULL_SHARD" else [("0", Phase.FINAL_CALLBACK)]
        assert over == [(name, Phase.BACKWARD) for name in "543210"[: 6 if all_take_part else 5]] + stays
        all_buffers = [unit.buffers for unit in units_in(model).values() if unit.params]
        assert len(all_buffers) == 6 and all(buffers.where.value == "sharded" for buffers in all_buffers)
        _assert_same_gradients(model, ddp)
        plain.zero_grad()
        model.zero_grad()


@ranks(2)
def test_a_frozen_unit_that_never_reshards_is_gathered_once(rank, world_size):
    plain, model = twins("composable", _six_linears, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    set_travel_together_bytes(model, 0)
    for unit in model[2], model[3]:  # the latter trains
        unit.set_reshard_after_forward(False)
        unit.set_reshard_after_backward(False)
    ddp = DDP(plain)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, ddp)]
    for step in range(3):
        with record_events() as events:
            for net, optimizer in zip((model, ddp), optimizers):
                optimizer.zero_grad()
                net(_batch(rank, step)).square().sum().backward()
                optimizer.step()
        gathers = Counter(event.unit for event in events if event.kind is EventKind.UNSHARD)
        assert (gathers["2"], gathers["3"]) == (int(step == 0), 1)
        assert gathers["1"] == gathers["4"] == 2
    with torch.no_grad():
        for net in (model, plain):
            net[2].weight.mul_(2)
    with record_events() as events:
        result = model(_batch(rank))
    assert [event.kind for event in events if event.unit == "2"] == [EventKind.RESHARD, EventKind.UNSHARD]
    torch.testing.assert_close(result, plain(_batch(rank)))


class _Switched(nn.Module):
    """A frozen layer with an adapter that can be left out, as peft does where it is disabled."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter, self.on = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), True
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x).tanh()
        return y + self.adapter(x) if self.on else y


class _Adapted(nn.Module):
    """A unit in a unit, and beside it one that may be run again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.outer = _Switched(), nn.Sequential(_Switched(), nn.Linear(8, 8), _Switched())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.first, x, use_reentrant=False)
        return self.outer(x)


class _Adapters:
    def __init__(self, model: nn.Module) -> None:
        self.modules = [module for module in model.modules() if isinstance(module, _Switched)]
        names = [
            [name for name, child in model.named_modules() if child is module] for module in self.modules
        ]
        # Of the wrapper's flat form only the unit around the module has parameters.
        self.units = [model.get_submodule(name.removesuffix("._fsdp_wrapped_module")) for (name,) in names]
        self.params = [[param for param in unit.parameters() if param.requires_grad] for unit in self.units]

    def switch(self, on: bool, which: slice = slice(None)) -> None:
        for module, params in zip(self.modules[which], self.params[which]):
            module.on = on
            for param in params:
                param.requires_grad_(on)


def _off_and_on(how: str, model: nn.Module, batches: list[torch.Tensor]) -> None:
    adapters, (first, second) = _Adapters(model), batches
    if how in ("accumulated", "within"):
        with accumulating(model, "T" if how == "accumulated" else "C"):
            model(first).square().sum().backward()
        adapters.switch(False, slice(1, 2))
        model(second).square().sum().backward()
        adapters.switch(True)
        return
    loss = model(first).square().sum()
    adapters.switch(False, slice(1, 2) if how in ("one", "frozen") else slice(None))
    if how == "frozen":
        loss.backward()
    elif how == "both":  # have a backward
        loss = loss + model(second).square().sum()
    else:
        with torch.no_grad():
            reference = model(second).square().mean()
        loss = loss * reference
    adapters.switch(True)
    if how != "frozen":
        loss.backward()


@each_front
@ranks(2)
def test_off_and_on_between_forward_and_backward(rank, world_size, front):
    """What a forward recorded gets its gradient where it trains in the backward; of a plain model too."""
    policy = ModuleWrapPolicy({_Switched, nn.Sequential})
    hows = ("reference", "one", "both", "frozen", "accumulated", "within")
    for how, (strategy, together) in itertools.product(hows, ((FULL, None), (KEPT, 0))):
        if (how, strategy) == ("within", KEPT) and front != "composable":
            strategy = ShardingStrategy.NO_SHARD  # then each rank is a copy
        options = {"sharding_strategy": strategy, "travel_together_bytes": together}
        plain, model = twins(front, _Adapted, torch.float64, auto_wrap_policy=policy, **options)
        for step in range(2):
            batches = [torch.randn(3, 8, dtype=torch.float64) + rank + step for _ in range(2)]
            for module in (plain, model):
                module.zero_grad()
                _off_and_on(how, module, batches)
            assert_mean_gradients(plain, model, (how, strategy, step))
