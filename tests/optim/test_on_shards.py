"""Elementwise optimizers on the plain shards behind `DTensor`s; stochastic rounding."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import operator
import pickle
import random
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as theirs
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor
from torch.optim import swa_utils
from torch.utils._python_dispatch import TorchDispatchMode

import fronts
import tp_nets
from bed import ranks
from fronts import FRONTS, assert_tensors, full, full_state
from fsdp_wrap import CPUOffloadPolicy, IntervalTensor, MixedPrecisionPolicy, clip_grad_norm_, fully_shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import distributed_state_dict as ours
from fsdp_wrap.optim import HostAdamW, Muon, _probe, on_shards, steps_on_shards, stochastic_rounding
from fsdp_wrap.optim._stochastic_rounding import draws_of, rounded
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import gather_objects

KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    name: getattr(torch.optim, name)
    for name in "SGD Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop".split()
}
OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}, "Adam": {"amsgrad": True}}


class Net(nn.Module):
    """Layers of which two ranks cannot have equal parts, one without a gradient in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)
        self.sometimes = nn.Linear(7, 7)
        self.short = nn.Parameter(torch.ones(1))  # the last rank has nothing of it

    def forward(self, x: torch.Tensor, often: bool = True) -> torch.Tensor:
        x = torch.tanh(self.first(x)) * self.short
        return self.last(self.sometimes(x) if often else x)


def sharded(dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Net().to(dtype)
    fully_shard(model.first, **options)
    return fully_shard(model, **options)


def make(kind: str, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return KINDS[kind](model.parameters(), lr=0.03, **{**OPTIONS.get(kind, {}), **options})


def backward(model: nn.Module, at: int, rank: int) -> None:
    torch.manual_seed(at + 10 * rank)
    x = torch.rand(4, 5, dtype=next(model.parameters()).dtype)
    model(x, often=at % 2 == 0).square().sum().backward()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, at: int) -> None:
    optimizer.zero_grad()
    backward(model, at, dist.get_rank())
    optimizer.step()


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, at: int) -> None:
    optimizer.zero_grad()
    for rank in range(dist.get_world_size()):
        backward(model, at, rank)
    for param in model.parameters():
        if param.grad is not None:
            param.grad /= dist.get_world_size()
    optimizer.step()


class _Operators(TorchDispatchMode):
    def __init__(self, among: type | None = None) -> None:
        super().__init__()
        self._among, self.operators = among, list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._among is None or self._among in types:
            self.operators.append(func)
        return func(*args, **(kwargs or {}))


def assert_alike(one: Any, other: Any) -> None:
    """Tensors, in whatever structure, are placed alike and of the same bits."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_alike(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for element, same in zip(one, other):
            assert_alike(element, same)
    elif isinstance(one, DTensor):
        assert (one.placements, one.device_mesh) == (other.placements, other.device_mesh)
        assert one.shape == other.shape
        assert_alike(one.to_local(), other.to_local())
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    else:
        assert one == other


def itself(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer


WAYS: dict[str, Callable[[Any], Any]] = {"by itself": itself, "asked for": on_shards}
each_way = pytest.mark.parametrize("way", WAYS)
mostly_by_itself = pytest.mark.parametrize(
    "way", ["by itself", pytest.param("asked for", marks=pytest.mark.slow)]
)


class Both:
    """Two models of the same values: an optimizer's steps on `DTensor`s, and on shards."""

    def __init__(
        self, kind: str = "AdamW", way: str = "by itself", sharding: Any = None, **options: Any
    ) -> None:
        self.models = sharded(**(sharding or {})), sharded(**(sharding or {}))
        self.usual = make(kind, self.models[0], **options)
        self.converted = WAYS[way](make(kind, self.models[1], **options))
        self.optimizers = self.usual, self.converted

    def step(self, *numbers: int) -> Both:
        for at in numbers:
            for model, optimizer in zip(self.models, self.optimizers):
                optimizer.zero_grad()
                backward(model, at, dist.get_rank())
            self.take()
        return self

    def take(self) -> None:
        """Takes a step of each."""
        with steps_on_shards(False):
            self.usual.step()
        self.converted.step()

    def assert_alike(self) -> None:
        """Parameters and state have the same bits, and the optimizer still has the `DTensor`s."""
        one, other = ([*model.parameters()] for model in self.models)
        assert_alike(one, other)
        assert_alike(self.usual.state_dict(), self.converted.state_dict())
        assert [*self.converted.param_groups[0]["params"]] == other and {*self.converted.state} <= {*other}


@ranks(2)
def test_numbers_are_those_of_a_plain_model(rank, world_size):
    for kind in KINDS:
        torch.manual_seed(0)
        plain, model = Net().double(), sharded()
        one, other = make(kind, plain), on_shards(make(kind, model))
        assert type(other).__name__ == kind and isinstance(other, KINDS[kind])  # type: ignore[arg-type]
        for at in range(4):
            plain_step(plain, one, at)
            step(model, other, at)
        for (name, param), same in zip(plain.named_parameters(), model.parameters()):
            message = f"{kind}: {name}"
            torch.testing.assert_close(same.full_tensor(), param, rtol=1e-10, atol=1e-10, msg=message)


FUSED = ("Adam", "AdamW")  # for DTensors
BITS = [
    *((kind, {}, torch.float32) for kind in KINDS),
    *((kind, {"foreach": True}, torch.float64) for kind in ("SGD", "NAdam")),
    *((kind, {"fused": True}, torch.float32) for kind in FUSED),
    *((kind, {}, torch.bfloat16) for kind in ("SGD", "AdamW")),  # ends of tensors are rounded otherwise
]
ALL_BITS = [
    (kind, {loop: True} if loop else {}, dtype)
    for kind in KINDS
    for loop in ("", "foreach", "fused")
    for dtype in (torch.float32, torch.float64, torch.bfloat16)
    if loop != "fused" or kind in FUSED
]


def assert_same_bits(cases: Any, way: str) -> None:
    for kind, options, dtype in cases:
        if kind != "Rprop":  # which takes no DTensors
            options = {"weight_decay": 0.1, **options}
            Both(kind, way, {"dtype": dtype}, **options).step(*range(4)).assert_alike()


@mostly_by_itself
@ranks(2)
def test_bits_are_those_of_steps_on_dtensors(rank, world_size, way):
    assert_same_bits(BITS, way)


@pytest.mark.slow
@ranks(2)
def test_bits_of_all_kinds_loops_and_dtypes(rank, world_size):
    assert_same_bits([case for case in ALL_BITS if case not in BITS], "by itself")


@each_way
@ranks(2)
def test_neighbours_are_updated_as_one(rank, world_size, way):
    for lrs, count in (((0.1,), 2), ((0.1, 0.2), 7)):
        torch.manual_seed(0)
        plain, model = Net().double(), sharded()
        one, other = (torch.optim.AdamW(_groups(net, lrs)) for net in (plain, model))
        WAYS[way](other)
        for at in (0, 2, 1, 4):  # in the last but one some have no gradients
            plain_step(plain, one, at)
            with _Operators() as seen:
                step(model, other, at)
            if at == 2 and rank == 0:  # the other has fewer rows, with padding between
                assert seen.operators.count(torch.ops.aten.addcdiv_.default) == count
        for param, same in zip(plain.parameters(), model.parameters()):
            torch.testing.assert_close(same.full_tensor(), param, rtol=1e-10, atol=1e-10)
        steps = {param: other.state[param]["step"] for param in model.parameters()}
        seldom = {*model.sometimes.parameters()}
        assert all(count == (3 if param in seldom else 4) for param, count in steps.items())
        assert len({count.data_ptr() for count in steps.values()}) == 7  # each its own


class Inherited(torch.optim.AdamW):
    """Another class with torch's step."""


class Overridden(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Initial(torch.optim.AdamW):
    def _init_group(self, *args: Any, **kwargs: Any) -> Any:
        return super()._init_group(*args, **kwargs)


def scheduled(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(params)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return optimizer


MAKERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], bool]] = {
    "torch's": (torch.optim.AdamW, True),
    "of another class": (Inherited, True),
    "with a scheduler": (scheduled, True),
    "asked for": (lambda params: on_shards(torch.optim.AdamW(params)), True),
    "with a step of its own": (Overridden, False),
    "with state of its own": (Initial, False),
    "not elementwise": (lambda params: torch.optim.LBFGS(params, max_iter=1), False),
}


@ranks(2)
def test_steps_that_are_taken_and_those_that_are_left_to_torch(rank, world_size):
    model = fully_shard(nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()

    def takes(optimizer: torch.optim.Optimizer) -> bool:
        with _Operators(DTensor) as seen:
            optimizer.step(lambda: 1.0)
        return not seen.operators

    for name, (maker, taken) in MAKERS.items():
        assert takes(maker(model.parameters())) == taken, name
    optimizer = torch.optim.AdamW(model.parameters())
    for enabled in (False, True):
        with steps_on_shards(enabled):
            with steps_on_shards(not enabled):
                assert takes(optimizer) != enabled
            assert takes(optimizer) == enabled
    assert takes(optimizer)
    steps_on_shards(False)
    assert not takes(optimizer)
    steps_on_shards(True)
    around = functools.wraps(torch.optim.AdamW.step)(partial(torch.optim.AdamW.step))
    with mock.patch.object(torch.optim.AdamW, "step", lambda *args: around(*args)):
        assert not takes(torch.optim.AdamW(model.parameters()))


def failing(optimizer: torch.optim.Optimizer) -> None:
    with mock.patch("torch.optim.adamw.adam", side_effect=ZeroDivisionError, create=True):
        with mock.patch("torch.optim.adam.adam", side_effect=ZeroDivisionError):
            with pytest.raises(ZeroDivisionError):
                optimizer.step()


def reloaded(optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def moved(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state.update({key: value.clone() for key, value in state.items()})


def in_groups(optimizer: torch.optim.Optimizer, **options: Any) -> None:
    for group in optimizer.param_groups:
        group.update(options)


def by_a_closure(optimizer: torch.optim.Optimizer) -> None:
    def closure() -> float:
        for param in optimizer.param_groups[0]["params"]:
            param.grad = None if param.grad is None else param.grad * 2
        assert torch.is_grad_enabled()
        return 3.0

    assert optimizer.step(closure) == optimizer.step(closure=closure) == 3.0


def by_a_scaler(optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    scaler.scale(torch.ones(()))
    optimizer.param_groups[0]["params"][0].grad.to_local().fill_(torch.inf)
    scaler.step(optimizer)


def by_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Hooks before a step may change gradients, and give it another closure."""

    def double(_: Any, args: Any, kwargs: Any) -> Any:
        optimizer.param_groups[0]["params"][0].grad *= 2
        return (args[0], lambda: None), {}

    handle = optimizer.register_step_pre_hook(double)
    optimizer.step()
    handle.remove()


EVENTS: dict[str, Callable[[Any], Any]] = {
    "a step that raises": failing,
    "a state dict": reloaded,
    "state that has moved": moved,
    "state that is gone": lambda optimizer: optimizer.state.clear(),
    "a scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    "fused from now on": partial(in_groups, fused=True),
    "foreach from now on": partial(in_groups, foreach=True),
    "a learning rate in a tensor": partial(in_groups, lr=torch.tensor(0.01)),
    "a closure": by_a_closure,
    "a scaler": by_a_scaler,
    "hooks": by_hooks,
}


@mostly_by_itself
@ranks(2)
def test_what_happens_between_steps_changes_both_alike(rank, world_size, way):
    for name, event in EVENTS.items():
        if way == "asked for" and name == "hooks":  # the closure is its own then
            continue
        for first in ((), (0, 1)):
            both = Both("AdamW", way).step(*first)
            for model in both.models:
                backward(model, 0, rank)
            with steps_on_shards(False):
                event(both.usual)
            event(both.converted)
            both.assert_alike()
            both.step(2, 3).assert_alike()


def otherwise(grad: DTensor) -> DTensor:
    local = grad._local_tensor
    turned = local.as_strided(local.shape, (1, local.shape[0]))
    return DTensor.from_local(
        turned, grad.device_mesh, grad.placements, shape=grad.shape, stride=grad.stride()
    )


@each_way
@ranks(2)
def test_gradients_that_lie_elsewhere_or_otherwise_are_seen(rank, world_size, way):
    """After steps in which all lay side by side; also clipping takes them as they are. Versions move."""
    both = Both(way=way)
    for change in (None, None, torch.clone, otherwise, None, lambda grad: None, None):
        for model, optimizer in zip(both.models, both.optimizers):
            optimizer.zero_grad()
            backward(model, 0, rank)
            params = [*model.parameters()]
            if change is not None:
                model.first.weight.grad = change(model.first.weight.grad)  # type: ignore[operator]
            clip_grad_norm_(model, 0.01)
            versions = [param._version for param in params if param.grad is not None]
            with steps_on_shards(optimizer is both.converted):
                optimizer.step()
            after = [param._version for param in params if param.grad is not None]
            assert all(map(operator.lt, versions, after))
        both.assert_alike()
        plain = [param.grad.full_tensor() for param in params if param.grad is not None]
        assert nn.utils.get_total_norm(plain) <= 0.01


def _groups(model: nn.Module, lrs: tuple[float, ...]) -> list[dict[str, Any]]:
    """Makes a group for each learning rate; neighbouring parameters are in different groups."""
    params, count = [*model.parameters()], len(lrs)
    return [{"params": params[first::count], "lr": lr} for first, lr in enumerate(lrs)]


@each_way
@ranks(2)
def test_copies_and_groups_that_come_later(rank, world_size, way):
    model = sharded()
    optimizer: torch.optim.Optimizer = WAYS[way](torch.optim.AdamW([model.first.weight], lr=0.1))
    step(model, optimizer, 0)
    before = model.last.weight.to_local().clone()
    optimizer.add_param_group({"params": [model.last.weight, plain := nn.Parameter(torch.ones(3))]})
    plain.grad = torch.ones(3)
    model(torch.ones(2, 5).double()).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.last.weight.to_local()) and plain[0] != 1
    assert {*optimizer.state} == {model.first.weight, model.last.weight, plain}
    optimizer = WAYS[way](torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))
    for again in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(again) is type(optimizer)
        again.param_groups[0]["params"][0].grad = torch.ones(1)
        again.step()
        assert again.param_groups[0]["params"][0].item() == 0


@each_way
@ranks(2)
def test_averages_and_groups_that_come_later_are_those_of_a_plain_model(rank, world_size, way):
    """Averages by one call for all parameters, and one by one, which read what the steps have written."""
    torch.manual_seed(0)
    models, averages = (Net().double(), sharded()), []
    optimizers = []
    for model, made in zip(models, (itself, WAYS[way])):
        optimizers.append(made(torch.optim.AdamW([*model.first.parameters(), model.short], lr=0.05)))
        ways = [{}, {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.8)}]
        averages.append([swa_utils.AveragedModel(model, **options) for options in ways])
    schedulers = [swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=3) for optimizer in optimizers]
    for at in range(5):
        if at == 2:
            for model, optimizer in zip(models, optimizers):
                later = [*model.last.parameters(), *model.sometimes.parameters()]
                optimizer.add_param_group({"params": later, "lr": 0.02, "weight_decay": 0.3, "swa_lr": 0.03})
        plain_step(models[0], optimizers[0], at)
        step(models[1], optimizers[1], at)
        for model, of_model, scheduler in zip(models, averages, schedulers):
            for averaged in of_model:
                averaged.update_parameters(model)
            scheduler.step()
    near: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
    assert_tensors(full_state(models[1]), full_state(models[0]), **near)
    for plain, averaged in zip(*averages):
        assert_tensors(full_state(averaged), full_state(plain), **near)
        x = torch.ones(2, 5).double()
        torch.testing.assert_close(averaged(x), plain(x), **near)


@each_way
@ranks(2)
def test_closures_schedulers_and_hooks_see_dtensors(rank, world_size, way):
    model = sharded()
    optimizer = WAYS[way](make("AdamW", model))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    seen = []

    def look(*_: Any) -> None:
        kinds = {type(param) for group in optimizer.param_groups for param in group["params"]}
        seen.append(kinds == {DTensor} and not any(type(key) is nn.Parameter for key in optimizer.state))

    def closure() -> torch.Tensor:
        look()
        optimizer.zero_grad()
        backward(model, 0, rank)
        return torch.ones(1)

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    assert optimizer.step(closure) == 1  # type: ignore[arg-type]
    scheduler.step()
    optimizer.step()
    assert seen == [True] * 5 and optimizer.param_groups[0]["lr"] == 0.015


OFFLOADED = CPUOffloadPolicy(offload_params=False, offload_optimizer_state=True)


@pytest.mark.parametrize("sharding", [{}, {"offload_policy": OFFLOADED}])
@each_way
@ranks(2)
def test_memory_goes_with_gradients_models_and_state_that_moves(rank, world_size, sharding, way):
    both = Both("AdamW", way, sharding)
    gc.disable()
    for at in range(3):
        both.step(at)
        known = [entry["exp_avg"]._local_tensor for entry in both.converted.state.values()]
        known = [weakref.ref(moment if moment._base is None else moment._base) for moment in known]
        for state in both.converted.state.values():  # as the offload does where there is an accelerator
            state["exp_avg"] = state["exp_avg"].clone()
        assert all(reference() is None for reference in known)
    both.assert_alike()
    model, optimizer = both.models[1], both.converted
    grads = [weakref.ref(param.grad._local_tensor) for param in model.parameters()]
    assert all(grad() is not None for grad in grads)
    optimizer.zero_grad()
    assert all(grad() is None for grad in grads)
    gone = weakref.ref(optimizer)
    del optimizer, both, state
    assert gone() is None
    gc.enable()


@each_way
@ranks(2)
def test_precision_offload_and_conversion(rank, world_size, way):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for options in ({"mp_policy": policy}, {"offload_policy": CPUOffloadPolicy()}):
        both = Both("SGD", way, options, momentum=0).step(0, 1)
        for model in both.models:  # the parameters' memory is another then
            model.float()
        both.step(2, 3).assert_alike()


@ranks(4)
def test_parameters_of_several_meshes_and_of_a_wrapper(rank, world_size):
    def distributed() -> nn.Module:
        _, data, tensor = tp_nets.mesh_of("flat")
        model = tp_nets.parallelize(tp_nets.net(), tensor, "columns")
        fully_shard(model.blocks[0], mesh=data)  # the rest is left to tensor parallelism and to each rank
        return model

    for made in (distributed, lambda: FSDP(tp_nets.net(), use_orig_params=True)):
        sides = []
        for convert, enabled in ((itself, False), (itself, True), (on_shards, True)):
            model = made()
            optimizer = convert(torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False))
            for at in range(3):
                optimizer.zero_grad()
                tp_nets.loss_of(model, tp_nets.batches(1, at)[0])
                with steps_on_shards(enabled):
                    optimizer.step()
            sides.append(([*model.parameters()], optimizer.state_dict()))
        assert_alike(sides[0], sides[1])
        assert_alike(sides[0], sides[2])


class Foreign(torch.optim.Optimizer):
    def __init__(self, params: Any, kind: str = "signs") -> None:
        super().__init__(params, {"lr": 0.0, "kind": kind})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                update, state = param.grad.sign(), self.state[param]
                if group["kind"] == "norms":
                    update = update * param.norm()
                elif group["kind"] == "rows":
                    state["most"] = param.grad.abs().amax(-1)
                    update = update * state["most"].unsqueeze(-1)
                elif group["kind"] == "later":  # not at once, as preconditioners
                    state["sums"] = param.grad.T @ param.grad
                elif group["kind"] == "all":
                    update = update * sum(weight.grad.sum() for weight in group["params"])
                elif group["kind"] == "noise":
                    update = update * (random.random() + torch.rand_like(update))
                    warnings.warn("noisy", stacklevel=1)
                param.sub_(update, alpha=group["lr"])


def test_what_computes_with_wholes_is_found_out_and_refused():
    params, generator = [nn.Parameter(torch.ones(2, 2))], (torch.get_rng_state(), random.getstate())
    for kind in ("norms", "rows", "later", "all"):
        second = {"params": [nn.Parameter(torch.ones(2, 2))], "kind": kind}
        for optimizer in (Foreign(params, kind), Foreign([{"params": params}, second])):
            with pytest.raises(ValueError, match=r"Foreign computes with whole parameters.*owned_matrices"):
                on_shards(optimizer)
            assert type(optimizer) is Foreign and not optimizer.state
    on_shards(Foreign(params))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(2):
            warnings.warn("shown once", stacklevel=1)
            on_shards(Foreign(params, "noise"))
    assert [str(warning.message) for warning in told] == ["shown once"]
    assert torch.equal(torch.get_rng_state(), generator[0]) and random.getstate() == generator[1]
    assert bool((params[0] == 1).all())


def torchs_optimizers() -> list[type[torch.optim.Optimizer]]:
    classes = [value for value in vars(torch.optim).values() if isinstance(value, type)]
    return [
        kind
        for kind in classes
        if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    ]


CUTS = (_probe.by_rows, _probe.in_pieces, _probe.flattened, _probe.joined)


@pytest.mark.parametrize("kind", [*torchs_optimizers(), HostAdamW], ids=lambda kind: kind.__name__)
def test_what_is_known_of_torchs_optimizers_is_what_a_trial_finds(kind):
    for dims, cut in itertools.product(({1}, {2}, {1, 2}), CUTS):
        optimizer = kind([nn.Parameter(torch.ones(2, 2))])
        group = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
        seen = _probe.TrialGroup(group, frozenset(dims), several=cut is _probe.joined)
        with mock.patch.object(_probe, "trial_differs", side_effect=AssertionError("tried")):
            known = _probe.computes_with_wholes(optimizer, seen, cut)
        if kind is torch.optim.Muon and (cut is not _probe.by_rows or dims != {2}):
            continue  # it refuses other tensors itself
        assert known == _probe.trial_differs(optimizer, seen, cut), (dims, cut.__name__)


def test_wrong_uses_are_refused_and_nothing_changes():
    params = [nn.Parameter(torch.ones(2, 2))]
    whole = "computes with whole parameters"
    refused: list[tuple[Any, type[Exception], str]] = [
        (nn.Linear(1, 1), TypeError, "takes a torch.optim.Optimizer, not a Linear"),
        (torch.optim.LBFGS(params), ValueError, f"LBFGS {whole}"),
        (torch.optim.Adafactor(params), ValueError, f"Adafactor {whole}"),
        (torch.optim.Muon(params), ValueError, f"Muon {whole}"),
        (torch.optim.SGD(params, lr=1.0, differentiable=True), ValueError, "differentiable=False"),
        (Muon(nn.Linear(2, 2)), ValueError, "Muon knows of shards: use it without on_shards"),
    ]
    for given, error, rule in refused:
        with pytest.raises(error, match=rule):
            on_shards(given)
    optimizer = torch.optim.SGD(params, lr=1.0)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with pytest.raises(ValueError, match="make the scheduler afterwards"):
        on_shards(optimizer)
    assert type(optimizer) is torch.optim.SGD
    assert on_shards(on_shards(torch.optim.SGD(params, lr=1.0))).param_groups[0]["params"] == params


# States on several ranks, full and sharded, beside those of a plain model.

FULL = StateDictOptions(full_state_dict=True)


class LateNet(tp_nets.Net):
    """Has heads of which ranks have uneven parts or none; one is unused at first."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.gain = nn.Linear(tp_nets.WIDTH, tp_nets.VOCABULARY), nn.Parameter(torch.ones(1))
        self.used = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.gain * (self.head(x) + self.late(x) if self.used else self.head(x))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, foreach=True)


MAKE: dict[str, Any] = {
    "on_shards": lambda model: on_shards(adamw(model.parameters())),
    "muon": lambda model: Muon(model, lr=0.01, other=adamw, ns_dtype=torch.float64),
}


def train_late(model: Any, optimizer: torch.optim.Optimizer, steps: range, seen: range, late: int) -> None:
    """Steps with the batches of some ranks; the late head is used from one of the steps on."""
    for at in steps:
        fronts.inner(model).used = at >= late
        for rank in seen:
            (model(tp_nets.batches(4, at)[rank]).square().mean() / len(seen)).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_state(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """All ranks have the names and keys in one order."""
    assert sorted(actual["state"]) == sorted(expected["state"])
    for name, entry in actual["state"].items():
        for key, value in entry.items():
            told = f"{name} {key} on rank {dist.get_rank()}"
            value, whole = full(value), expected["state"][name][key]
            assert value.shape == whole.shape, told
            if isinstance(value, IntervalTensor):
                value, whole = value.piece, whole.reshape(-1)[value.start : value.stop]
            torch.testing.assert_close(value, whole, rtol=0, atol=1e-12, msg=told)
    everywhere = gather_objects([(name, [*entry]) for name, entry in actual["state"].items()])
    assert all(entries == everywhere[0] for entries in everywhere)


@pytest.mark.parametrize("kind", MAKE)
@fronts.each_front
@ranks(3)
def test_states_are_those_of_a_plain_model(rank, world_size, front, kind):
    policy = ModuleWrapPolicy({tp_nets.Block})
    plain, model = fronts.twins(front, LateNet, torch.float64, auto_wrap_policy=policy)
    reference, optimizer = MAKE[kind](plain), MAKE[kind](model)
    own, everyone = range(rank, rank + 1), range(world_size)
    late = 0 if front == "flat" else 1  # a FlatParameter has one count for all that it stands for
    train_late(plain, reference, range(2), everyone, late)
    train_late(model, optimizer, range(2), own, late)
    expected = theirs.get_optimizer_state_dict(plain, reference)
    for functions in (ours, theirs):
        for options in (FULL, None):
            state = functions.get_optimizer_state_dict(model, optimizer, options=options)
            assert_state(state, expected)
            fresh = MAKE[kind](model)
            functions.set_optimizer_state_dict(model, fresh, copy.deepcopy(state), options=options)
            assert_state(functions.get_optimizer_state_dict(model, fresh, options=FULL), expected)
    again = MAKE[kind](model)
    fresh.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = 0.07
    again.load_state_dict(copy.deepcopy(fresh.state_dict()))
    train_late(plain, reference, range(2, 3), everyone, late)
    train_late(model, again, range(2, 3), own, late)
    fronts.assert_same_values(model, plain, rtol=0, atol=1e-12)


# stochastic rounding that does not depend on the ranks


def test_rounding_is_to_neighbours_and_right_in_the_mean():
    values = torch.tensor([1.0 + 2**-9, -3.0 - 2**-8, 1e-40, 2.5, 0.0, torch.inf, -torch.inf])
    draws = torch.arange(65536, dtype=torch.int32).view(-1, 1).expand(-1, values.numel())
    drawn = rounded(values.expand(65536, -1), draws).double()
    assert torch.equal(drawn.mean(0), values.double())  # every draw once: exact
    assert [column.unique().numel() for column in drawn.T] == [2, 2, 2, 1, 1, 1, 1]
    assert torch.isnan(rounded(torch.tensor([torch.nan]), draws[-1:, 0])).all()


def test_draws_are_of_the_index_and_even():
    keys = (123456789, 987654321)
    whole = draws_of(keys, 0, 1 << 16, torch.device("cpu"))
    assert torch.equal(draws_of(keys, 40000, 100, torch.device("cpu")), whole[40000:40100])
    counts = torch.bincount(whole >> 8, minlength=256).double()
    assert (counts - 256).abs().max() < 6 * 16  # 6 standard deviations
    pairs = torch.stack([whole[:-1], whole[1:]]).double()
    assert torch.corrcoef(pairs)[0, 1].abs() < 0.02
    others = draws_of((keys[0] + 1, keys[1]), 0, 1 << 16, torch.device("cpu"))
    assert (others == whole).sum() < 20
    beyond = draws_of(keys, 1 << 32, 1 << 10, torch.device("cpu"))
    assert (beyond == whole[: 1 << 10]).sum() < 20


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5, bias=False)).to(torch.bfloat16)


def sharded_by(front: str, group: Any = None, **options: Any) -> Any:
    return fronts.shard(front, net(), process_group=group, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """All ranks see the same batch: means of 1, 2 and 4 gradients have the bits of each."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(3, 6, generator=generator).to(torch.bfloat16)
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    assert_tensors(full_state(plain), full_state(model))


def rounding(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return stochastic_rounding(torch.optim.AdamW(model.parameters(), lr=1e-3, **options), model, seed=5)


@ranks(4)
def test_bits_do_not_depend_on_ranks_or_front_end(rank, world_size):
    plain = net()
    train(plain, rounding(plain), range(4))
    groups = {size: dist.new_group(range(size)) for size in (1, 2, 4)}
    for size, group in groups.items():
        for front in FRONTS if rank < size else ():
            model = sharded_by(front, group)
            train(model, rounding(model, foreach=front == "orig"), range(4))
            assert_same(model, plain)
    nearest = net()
    train(nearest, torch.optim.AdamW(nearest.parameters(), lr=1e-3), range(4))
    assert not torch.equal(nearest[0].weight, plain[0].weight)
    other = net()
    train(other, stochastic_rounding(torch.optim.AdamW(other.parameters(), lr=1e-3), other), range(4))
    assert not torch.equal(other[0].weight, plain[0].weight)  # another seed


@ranks(2)
def test_draws_go_on_where_a_state_dict_is_loaded(rank, world_size):
    for front in FRONTS:
        model = sharded_by(front)
        optimizer = rounding(model)
        train(model, optimizer, range(2))
        saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
        train(model, optimizer, range(2, 4))
        again = sharded_by(front)
        again.load_state_dict(weights)
        resumed = rounding(again)
        resumed.load_state_dict(saved)
        state = next(iter(resumed.state.values()))
        assert full(state["exp_avg"]).dtype == torch.float32
        train(again, resumed, range(2, 4))
        assert_same(again, model)


def test_what_cannot_round_is_refused():
    model = net()
    itself = torch.optim.SGD(model.parameters())
    itself.bf16_stochastic_round = True  # type: ignore[attr-defined]
    cases: list[tuple[Any, type[Exception], str]] = [
        (model, TypeError, "stochastic_rounding takes a torch.optim.Optimizer"),
        (torch.optim.Adafactor(model.parameters()), ValueError, "Adafactor computes with whole parameters"),
        (torch.optim.SGD(net().parameters()), ValueError, "not one of the model's"),
        (rounding(model), ValueError, "rounds stochastically already"),
        (itself, ValueError, "bf16_stochastic_round=False"),
    ]
    for optimizer, error, rule in cases:
        with pytest.raises(error, match=rule):
            stochastic_rounding(optimizer, model)
    with pytest.raises(TypeError, match=r"seed must be an int, not 0\.5"):
        stochastic_rounding(torch.optim.SGD(model.parameters()), model, seed=0.5)  # type: ignore[arg-type]


def test_a_trial_has_the_gradients_of_its_loss():
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((3, 2), (4,))]
    slopes, offsets = ([torch.randn_like(param) for param in params] for _ in range(2))
    loss = _probe._loss(params, slopes, offsets)
    expected: Any = sum((s * p * p / 2 + o * p).sum() for p, s, o in zip(params, slopes, offsets))
    torch.testing.assert_close(loss, expected.detach(), check_dtype=False)
    for param, grad in zip(params, torch.autograd.grad(expected, params)):
        torch.testing.assert_close(param.grad, grad)
