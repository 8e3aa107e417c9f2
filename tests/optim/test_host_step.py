"""Steps in host memory: `HostAdamW`, and updates in a thread beside the backward."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from bed import ranks
from bed.accelerator import run_simulated
from bed.patience import until
from fronts import either_front, full_state, shard
from fsdp_wrap import CPUOffload
from fsdp_wrap.distributed_state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from fsdp_wrap.optim import HostAdamW, _host_adamw, backward_steps, step_in_backward
from fsdp_wrap.wrap import ModuleWrapPolicy
from stream_programs import OFFLOAD, STATE, Layer, batch, net, products_beside, wrapped

NUMBERS: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(*shape, dtype=dtype)) for shape in ((3, 4), (7,), (0,))]


def give_gradients(given: list[nn.Parameter], at: int, but: int = -1) -> None:
    generator = torch.Generator().manual_seed(at)
    for number, param in enumerate(given):
        grad = torch.randn(param.shape, generator=generator)
        param.grad = None if number == but else grad.to(param.dtype)


def test_the_bits_of_torchs_fused_adamw():
    def closure(given: list[nn.Parameter]) -> float:
        loss = torch.stack([weight.square().sum() for weight in given]).sum()
        loss.backward()
        return loss.item()

    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        one, other = params(dtype), params(dtype)
        own, usual = HostAdamW(one, **NUMBERS), torch.optim.AdamW(other, fused=True, **NUMBERS)
        for at in range(4):
            for weights in (one, other):
                give_gradients(weights, at, but=1 if at == 2 else -1)
            own.step()
            usual.step()
        with torch.no_grad():  # as programs that step so have it
            assert own.step(partial(closure, one)) == usual.step(partial(closure, other))
        for param, same in zip(one, other):
            assert torch.equal(param, same)
            assert own.state[param].keys() == usual.state[same].keys()
            assert all(torch.equal(value, usual.state[same][key]) for key, value in own.state[param].items())


@pytest.mark.parametrize("piece", [3, 1 << 19])
def test_moments_in_bfloat16_are_rounded_once_a_step(monkeypatch, piece):
    """Against AdamW by hand in float64, whose moments are rounded like these."""
    monkeypatch.setattr(_host_adamw, "_PIECE", piece)
    given, expected = params(), [param.detach().double() for param in params()]
    given[0].data = given[0].data.t().contiguous().t()  # its elements lie in another order
    optimizer = HostAdamW(given, moments=torch.bfloat16, **NUMBERS)
    moments = [[torch.zeros_like(value) for value in expected] for _ in range(2)]
    beta1, beta2 = NUMBERS["betas"]
    for at in range(1, 5):
        give_gradients(given, at)
        optimizer.step()
        for value, param, first, second in zip(expected, given, *moments):
            grad = param.grad.double()
            first.mul_(beta1).add_(grad, alpha=1 - beta1)
            second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            value.mul_(1 - 0.01 * 0.1)
            root = (second / (1 - beta2**at)).sqrt() + 1e-6
            value.sub_(0.01 * first / (1 - beta1**at) / root)
            for moment in (first, second):
                moment.copy_(moment.float().bfloat16())
    for param, value, first in zip(given, expected, moments[0]):
        state = optimizer.state[param]
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16 and state["step"] == 4
        torch.testing.assert_close(param.double(), value, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(state["exp_avg"].double(), first, rtol=0.02, atol=1e-3)


def test_each_loads_the_others_state():
    one, other = params(), params()
    halved, usual = HostAdamW(one, moments=torch.bfloat16), torch.optim.AdamW(other)
    for optimizer, weights in ((halved, one), (usual, other)):
        give_gradients(weights, 0)
        optimizer.step()
    into, back = HostAdamW(params(), moments=torch.bfloat16), torch.optim.AdamW(params())
    into.load_state_dict(usual.state_dict())
    back.load_state_dict(halved.state_dict())
    for optimizer, dtype in (
        (into, torch.bfloat16),
        (back, torch.float32),
        (copy.deepcopy(into), torch.bfloat16),
    ):
        states = [*optimizer.state.values()]
        assert all(state["exp_avg"].dtype == dtype and state["step"] == 1 for state in states)
    for state, same in zip(into.state.values(), usual.state.values()):
        assert torch.equal(state["exp_avg"], same["exp_avg"].bfloat16())
    with pytest.raises(ValueError, match="has amsgrad=True, which HostAdamW does not know"):
        into.load_state_dict(torch.optim.AdamW(params(), amsgrad=True).state_dict())
    given = [*back.param_groups[0]["params"]]
    give_gradients(given, 1)
    back.step()


def test_mistakes_are_named():
    for options, rule in (
        ({"lr": -1.0}, "lr must not be negative"),
        ({"betas": (1.0, 0.9)}, "betas must be at least 0 and less than 1"),
        ({"moments": torch.float16}, "moments must be torch.float32 or torch.bfloat16"),
    ):
        with pytest.raises(ValueError, match=rule):
            HostAdamW(params(), **options)
    (elsewhere,) = [nn.Parameter(torch.ones(2, device="meta"))]
    optimizer = HostAdamW([elsewhere])
    elsewhere.grad = torch.ones(2, device="meta")
    with pytest.raises(RuntimeError, match="is on meta: offload it"):
        optimizer.step()


class Counts(nn.Linear):
    begun = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        y.register_hook(self._count)
        return y

    def _count(self, grad: torch.Tensor) -> None:
        Counts.begun += 1


LAYERS = 6


class Awaits(torch.optim.SGD):
    """Steps in a backward only once that of another layer has begun, if there is one more."""

    def __init__(self, given: Any) -> None:
        super().__init__(given, lr=0.01)
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        begun = Counts.begun
        until(lambda: Counts.begun > begun or begun in (0, LAYERS))
        super().step(closure)
        self.steps += 1


@ranks(2)
def test_updates_run_beside_the_backward(rank, world_size):
    net = nn.Sequential(*(Counts(4, 4) for _ in range(LAYERS)))
    model = shard("orig", net, ModuleWrapPolicy({Counts}), travel_together_bytes=0)
    optimizer = step_in_backward(model, Awaits, in_thread=True)
    x = torch.rand(2, 4)
    for number in (1, 2):
        Counts.begun = 0
        model(x).sum().backward()
        assert optimizer.steps == number * LAYERS


@ranks(2)
def test_what_an_update_raises_is_told_at_the_end_of_the_backward(rank, world_size):
    class Once(torch.optim.SGD):
        fails = True

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if self.fails:
                raise ArithmeticError("on purpose")
            super().step(closure)

    model = shard("composable", net(), ModuleWrapPolicy({Layer}))
    optimizer = step_in_backward(model, lambda given: Once(given, lr=0.1), in_thread=True)
    with pytest.raises(ArithmeticError, match="on purpose"):
        model(batch(rank, 0)).square().sum().backward()
    Once.fails = False
    before = {name: value.clone() for name, value in full_state(model).items()}
    model(batch(rank, 1)).square().sum().backward()
    after = full_state(model)
    assert all(not torch.equal(after[name], before[name]) for name in before if "weight" in name)
    assert len(backward_steps(optimizer).updated) == 4


FULL = StateDictOptions(full_state_dict=True)


@pytest.mark.parametrize("front", ["flat", "composable"])
@ranks(2)
def test_half_moments_of_sharded_parameters(rank, world_size, front):
    """The state goes into an ordinary optimizer of a model that is cut otherwise, and back."""
    policy = ModuleWrapPolicy({Layer})
    model, other = shard(front, net(), policy), shard(front, net())
    optimizer = step_in_backward(model, partial(HostAdamW, moments=torch.bfloat16))
    for step in range(2):
        model(batch(rank, step)).square().sum().backward()
    state: Any = get_optimizer_state_dict(model, optimizer, options=FULL)
    assert {entry["exp_avg"].dtype for entry in state["state"].values()} == {torch.bfloat16}
    plain = torch.optim.AdamW(other.parameters())
    set_optimizer_state_dict(other, plain, copy.deepcopy(state), options=FULL)
    again: Any = get_optimizer_state_dict(other, plain, options=FULL)
    set_optimizer_state_dict(model, optimizer, copy.deepcopy(again), options=FULL)
    last: Any = get_optimizer_state_dict(model, optimizer, options=FULL)
    for name, entry in state["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(last["state"][name][key], entry[key]), (name, key)
            assert torch.equal(again["state"][name][key].bfloat16(), entry[key])


def _offloaded(
    rank: int, device: Any, front: str, in_backward: bool, states: Any = None, **options: Any
) -> Any:
    model = wrapped(front, **options)
    make = partial(torch.optim.SGD, lr=0.001, momentum=0.9, foreach=False)
    optimizer = step_in_backward(model, make) if in_backward else make(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        model(batch(rank, step)).square().sum().backward()
        if not in_backward:
            optimizer.step()
    if states is not None:
        with device.aside():
            states[rank] = {name: value.clone() for name, value in full_state(model).items()}
    return model, optimizer


@pytest.mark.parametrize(
    ("front", "offload"),
    [
        ("flat", True),
        ("composable", True),
        pytest.param("orig", True, marks=pytest.mark.slow),
        pytest.param("orig", False, marks=pytest.mark.slow),
    ],
)
def test_every_order_has_the_bits_of_steps_after_the_backward(front, offload):
    states: dict[int, Any] = {}
    usual: dict[int, Any] = {}
    run = partial(_offloaded, front=front, cpu_offload=OFFLOAD if offload else CPUOffload(False))
    run_simulated(2, partial(run, in_backward=True, states=states), records=True, seeds=1)
    run_simulated(2, partial(run, in_backward=False, states=usual))
    for rank, state in usual.items():
        assert all(torch.equal(states[rank][name], value) for name, value in state.items())


@either_front
def test_the_host_steps_beside_products_of_the_device(front):
    """Those of all units but the last two: nothing is left to run while their gradients travel."""
    run = partial(_offloaded, front=front, in_backward=True, cpu_offload=OFFLOAD)
    (device, _) = run_simulated(2, run)
    steps = [
        action for action in device.actions if action.queue == "host lane" and action.what == "aten::add_"
    ]
    beside = products_beside(device.actions, steps)
    assert steps and sum(map(bool, beside)) >= len(steps) // 2, beside


@either_front
def test_gradients_come_to_the_host_beside_products_without_a_thread_too(front):
    """The host waits for a unit's gradients when the next reduction is issued, not before."""

    def program(rank: int, device: Any) -> None:
        model = wrapped(front, cpu_offload=OFFLOAD)
        step_in_backward(model, partial(torch.optim.SGD, lr=0.001), in_thread=False)
        model(batch(rank, 0)).square().sum().backward()

    (device, _) = run_simulated(2, program)
    copies = [
        action for action in device.actions if action.queue == "to host" and action.what == "aten::copy_"
    ]
    *earlier, _ = products_beside(device.actions, copies)
    assert len(earlier) == 3 and all(earlier), earlier


@pytest.mark.parametrize("front", ["flat", "composable"])
def test_offloaded_state_comes_to_the_device_unit_by_unit(front):
    peaks = []
    for in_backward in (True, False):

        def program(rank: int, device: Any, in_backward: bool = in_backward) -> None:
            model = wrapped(front, cpu_offload=STATE)
            make = partial(torch.optim.SGD, lr=0.001, momentum=0.9, foreach=False)
            optimizer = step_in_backward(model, make) if in_backward else make(model.parameters())
            for step in range(3):
                model(batch(rank, step)).square().sum().backward()
                device.end_step()
                if not in_backward:
                    optimizer.step()
                    if rank == 0 and step == 2:
                        peaks.append(device.end_step()[1]["compute"])
                elif rank == 0 and step == 2:
                    peaks.append(_state_bytes_on_device(device, optimizer))
                optimizer.zero_grad()

        run_simulated(2, program)
    assert peaks[0] == 0 < peaks[1]


def _state_bytes_on_device(device: Any, optimizer: torch.optim.Optimizer) -> int:
    states = [value for entry in optimizer.state.values() for value in entry.values()]
    held = [getattr(value, "_local_tensor", value) for value in states if isinstance(value, torch.Tensor)]
    return sum(value.nbytes for value in held if not device.is_on_host(value))
