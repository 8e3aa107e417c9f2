"""Offload on a simulated accelerator: where the host waits, what runs beside what, and what comes of it."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions

from bed.accelerator import run_simulated
from fronts import FRONTS, assert_tensors, each_front, either_front, full_state, inner, no_sync
from fsdp_wrap import BackwardPrefetch, CPUOffload, CPUOffloadPolicy, MixedPrecision, ShardingStrategy
from fsdp_wrap._offloading import Offloading
from fsdp_wrap._params import to_local
from fsdp_wrap._params.shard_gradients import ShardGradients
from fsdp_wrap.distributed_state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from fsdp_wrap.optim import Muon
from stream_programs import BF16, OFFLOAD, STATE, batch, net, offloads, one_step, products_beside, wrapped

_UNITS = 4
_PREFETCHES = [None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST]


def _devices(make, steps=4, **options: Any):
    """Trains on two ranks; returns their devices, and of the first the waits and peaks of each step."""
    told: list[Any] = []

    def program(rank, device):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
        for step in range(steps):
            one_step(model, optimizer, rank, step, **options)
            optimizer.zero_grad()
            if rank == 0:
                told.append(device.end_step())

    return run_simulated(2, program), told


# what runs beside what


def _beside_products(actions, *chosen):
    selected = [
        action for action in actions if (action.what, action.queue, action.where.rpartition(" ")[2]) == chosen
    ]
    return products_beside(actions, selected)


@each_front
def test_gradients_reach_the_host_beside_the_backward(front):
    devices, _ = _devices(partial(wrapped, front, cpu_offload=OFFLOAD), steps=1)
    *earlier, _, last = _beside_products(devices[0].actions, "aten::copy_", "to host", "backward")
    assert len(earlier) == _UNITS - 2 and all(earlier) and last == 0


@pytest.mark.parametrize("prefetch", _PREFETCHES, ids=str)
@each_front
def test_shards_go_to_the_device_one_unit_ahead(front, prefetch):
    """In forward from the second on, when the order is known; in backward where no gather does so already."""
    options = {} if front == "composable" else {"backward_prefetch": prefetch}
    devices, _ = _devices(partial(wrapped, front, cpu_offload=OFFLOAD, **options), steps=2)
    actions = devices[0].actions
    forward = _beside_products(actions, "aten::copy_", "to device", "forward")
    # The root computes nothing before the first.
    assert len(forward) == _UNITS - 1 and all(forward[1:]), forward
    by_gathers = [
        action for action in actions if action.queue == "gather" and action.where.endswith("forward")
    ]
    from_host = [action for action in by_gathers if any(region.block.on_host for region in action.reads)]
    assert len(from_host) == _UNITS + 1, from_host  # in the second forward only the root's
    backward = _beside_products(actions, "aten::copy_", "to device", "backward")
    gathers = _beside_products(actions, "all_gather", "gather", "backward")
    assert all(backward), backward
    if front != "composable" and prefetch is not BackwardPrefetch.BACKWARD_PRE:
        assert len(backward) == len(gathers), (backward, gathers)


def test_the_device_holds_few_shards_beside_what_it_holds_without_sending_ahead():
    """One unit's shard, and one reduced gradient that is on its way."""
    peaks = []
    for expects in (Offloading.expects, lambda *_: None):
        with mock.patch.object(Offloading, "expects", expects):
            _, told = _devices(partial(wrapped, "orig", cpu_offload=OFFLOAD))
        peaks.append(told[-1][1]["compute"])
    shard_nbytes = sum(param.numel() for param in net()[0].parameters()) * 4 // 2
    shard_nbytes = -(-shard_nbytes // 512) * 512
    assert 0 <= peaks[0] - peaks[1] <= shard_nbytes, peaks
    with mock.patch.object(ShardGradients, "release_arriving", lambda self: None):  # until all have come
        _, told = _devices(partial(wrapped, "orig", cpu_offload=OFFLOAD))
    assert peaks[0] < told[-1][1]["compute"]


# what comes of it

_KEPT, _NO_SHARD = ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
_HALF = {"mixed_precision": MixedPrecision(torch.bfloat16, torch.bfloat16)}
SAME: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulates": {"doing": "accumulates"},
    "accumulates-mixed": {"doing": "accumulates", "mixed_precision": BF16},
    "sums": {"doing": "sums in host memory"},
    "sums-half": {"doing": "sums in host memory", **_HALF},
    "evaluates": {"doing": "evaluates"},
    "evaluates-mixed": {"doing": "evaluates", "mixed_precision": BF16},
    "changes-mixed": {"doing": "changes", "mixed_precision": BF16},
    "checkpoints": {"doing": "checkpoints"},
    "checkpoints-half-none": {"doing": "checkpoints", "backward_prefetch": None, **_HALF},
    "skips": {"doing": "skips"},
    "skips-post": {"doing": "skips", "backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "steps in backward": {"doing": "steps in backward"},
    "steps in backward-half": {"doing": "steps in backward", **_HALF},
    "forward_prefetch": {"doing": "accumulates", "forward_prefetch": True},
    "kept-mixed": {"doing": "accumulates", "sharding_strategy": _KEPT, "mixed_precision": BF16},
    "no_shard-sums": {"doing": "sums in host memory", "sharding_strategy": _NO_SHARD},
}
_OF_BOTH = {"doing", "sharding_strategy"}


def _cases():
    for number, (name, options) in enumerate(SAME.items()):
        fronts = [front for front in FRONTS if _has(front, name, options)]
        for turn, front in enumerate(fronts):
            marks = () if turn == number % len(fronts) else pytest.mark.slow
            yield pytest.param(name, front, marks=marks, id=f"{name}-{front}")


def _has(front, name, options):
    if front == "composable":
        return options.keys() <= _OF_BOTH and "no_shard" not in name
    return front == "orig" or "steps" not in name  # a FlatParameter is stepped as a whole


@pytest.mark.parametrize(("name", "front"), [*_cases()])
def test_offloaded_training_has_the_bits_of_training_on_the_device(name, front):
    offloaded: dict[int, Any] = {}
    usual: dict[int, Any] = {}
    run_simulated(2, partial(offloads, front=front, states=offloaded, **SAME[name]), records=True, seeds=1)
    run_simulated(2, partial(offloads, front=front, offload=False, states=usual, **SAME[name]))
    for rank, state in usual.items():
        assert_tensors(offloaded[rank], state)


@either_front
def test_a_hook_sees_the_finished_gradient_in_host_memory(front):
    """That of an accumulation as well; while the gradient of the next unit is computed."""
    seen: dict[bool, list[Any]] = {True: [], False: []}

    def program(rank, device, offload):
        model = wrapped(front, cpu_offload=CPUOffload(offload))

        def look(name, param):
            local = to_local(param.grad)
            assert rank or device.is_on_host(local) is offload, name
            seen[offload].append((rank, name, local.clone().tolist()))

        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(partial(look, name))
        for number in range(2):
            model(batch(rank, number)).square().sum().backward()

    (device, *_) = run_simulated(2, partial(program, offload=True))
    run_simulated(2, partial(program, offload=False))
    assert seen[True] and sorted(seen[True]) == sorted(seen[False])
    waits = [wait for wait in device.host_waits if "Stream.synchronize" in wait]
    assert len(waits) == 2 * (1 + _UNITS), waits


def test_writes_that_no_counter_tells_count_from_the_next_use_on():
    """The copy in the param dtype is made anew for each forward, and for a unit that runs twice in one."""
    outputs: dict[bool, dict[int, Any]] = {True: {}, False: {}}

    def program(rank, device, offload):
        model = wrapped("orig", cpu_offload=CPUOffload(offload), mixed_precision=BF16)
        first, second, *_ = inner(model)
        computed = outputs[offload].setdefault(rank, [])

        def halve_first(*_: Any) -> None:
            for param in first.parameters():
                param.mul_(0.5)

        with torch.no_grad():
            for _ in range(3):
                computed.append(model(batch(rank, 0)).tolist())
                for param in model.parameters():
                    param.data.mul_(0.5)
            inner(model)[2] = first  # which runs twice now
            second.register_forward_hook(halve_first)
            computed += [model(batch(rank, number)).tolist() for number in range(2)]

    for offload in (True, False):
        run_simulated(2, partial(program, offload=offload))
    assert len(outputs[True]) == 2 and outputs[True] == outputs[False]
    one, two, three, *_ = outputs[True][0]
    assert one != two != three


def test_zeroed_sums_stay_away_where_an_earlier_gradient_arrives_among_them():
    """A backward leaves reductions in flight, which the next one finishes; that one accumulates."""
    gradients: dict[bool, dict[int, list[Any]]] = {True: {}, False: {}}

    def program(rank, device, several):
        model = wrapped("composable", cpu_offload=OFFLOAD, travel_together_bytes=0)
        if several:
            model.set_is_last_backward(False)
            model(batch(rank, 0)).square().sum().backward()
            model.set_is_last_backward(True)
            with no_sync(model):
                model(batch(rank, 1)).square().sum().backward()
            model.zero_grad()
        model(batch(rank, 2)).square().sum().backward()
        gradients[several][rank] = [to_local(param.grad).tolist() for param in model.parameters()]

    for several in (True, False):
        run_simulated(2, partial(program, several=several))
    assert len(gradients[True]) == 2 and gradients[True] == gradients[False]


# optimizer state alone


def _stepping(rank, device, front, offload, told, make):
    model = wrapped(front, cpu_offload=offload)
    optimizer = make(model.parameters(), lr=0.001)
    told[rank] = []
    for step in range(4):
        optimizer.zero_grad()
        model(batch(rank, step)).square().sum().backward()
        waits, peaks = device.end_step()
        optimizer.step()
        told[rank].append((peaks["compute"], len(device.end_step()[0])))
    with device.aside():
        tensors = [to_local(value) for state in optimizer.state.values() for value in state.values()]
        told[rank] += [
            [tensor.clone() for tensor in tensors],
            [device.is_on_host(tensor) for tensor in tensors if tensor.dim()],
            full_state(model),
        ]


_MOMENTA = partial(torch.optim.SGD, momentum=0.9, foreach=True)


@pytest.mark.parametrize(
    ("front", "make"),
    [
        *(("orig", torch.optim.AdamW), ("composable", torch.optim.AdamW), ("orig", _MOMENTA)),
        ("orig", partial(torch.optim.Adam, amsgrad=True)),
    ],
)
def test_optimizer_state_alone_on_the_host(front, make):
    """Between steps, which run on the device with the same bits; forward and backward have its memory."""
    told: dict[int, Any] = {}
    expected: dict[int, Any] = {}
    run_simulated(2, partial(_stepping, front=front, offload=STATE, told=told, make=make))
    run_simulated(2, partial(_stepping, front=front, offload=CPUOffload(), told=expected, make=make))
    for rank in range(2):
        *steps, state, on_host, params = told[rank]
        *usual, usual_state, on_device, usual_params = expected[rank]
        assert on_host and all(on_host) and not any(on_device)
        assert len(state) == len(usual_state) and all(map(torch.equal, state, usual_state))
        assert params.keys() == usual_params.keys()
        assert all(torch.equal(params[name], usual_params[name]) for name in params)
        moments = sum(value.nbytes for value in state if value.dim())
        assert steps[2][0] <= usual[2][0] - moments, (steps, usual)
        assert [waits for _, waits in steps] == [waits + 1 for _, waits in usual], (steps, usual)
    # Without counts in host memory, which would be recorded.
    program = partial(_stepping, front=front, offload=STATE, told=told, make=_MOMENTA)
    run_simulated(2, program, records=True, seeds=1)


def test_momentum_of_matrices_in_flat_parameters_on_the_host():
    by_offload: tuple[dict[int, Any], dict[int, Any]] = {}, {}

    def program(rank, device):
        for offload, told in zip((STATE, CPUOffload()), by_offload):
            model = wrapped("flat", cpu_offload=offload)
            optimizer = Muon(model, ns_dtype=torch.float32)
            for step in range(2):
                one_step(model, optimizer, rank, step)
            with device.aside():
                tensors = [value for state in optimizer.state.values() for value in state.values()]
                places = {device.is_on_host(tensor) for tensor in tensors if tensor.numel() and tensor.dim()}
                told[rank] = places, full_state(model)

    run_simulated(2, program)
    for rank in range(2):
        (places, params), (usual, expected) = (of_ranks[rank] for of_ranks in by_offload)
        assert places == {True} and usual == {False}
        assert all(torch.equal(params[name], expected[name]) for name in expected)


@either_front
def test_state_dicts_of_an_optimizer_whose_state_is_on_the_host(front):
    def told(offload):
        values: dict[int, list[Any]] = {0: [], 1: []}

        def program(rank, device):
            model = wrapped(front, cpu_offload=offload)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
            for step in range(2):
                one_step(model, optimizer, rank, step)
            for full in (True, False):
                options = StateDictOptions(full_state_dict=full)
                state = get_optimizer_state_dict(model, optimizer, options=options)
                with device.aside():  # now: steps may write to what they have loaded
                    tensors = [value for entry in state["state"].values() for value in entry.values()]
                    values[rank] += [tensor.tolist() for tensor in tensors if full]
                set_optimizer_state_dict(model, optimizer, state, options=options)
                one_step(model, optimizer, rank, 2)
            with device.aside():
                values[rank] += [value.tolist() for value in full_state(model).values()]

        run_simulated(2, program)
        return values

    values = told(STATE)
    assert values == told(CPUOffload()) and len(values[0]) > 2 * _UNITS


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (partial(CPUOffload, True, offload_optimizer_state=False), "leave offload_optimizer_state out"),
        (partial(CPUOffloadPolicy, offload_optimizer_state=False), "leave offload_optimizer_state out"),
        (partial(CPUOffloadPolicy, offload_params=False), r"pass OffloadPolicy\(\)"),
    ],
)
def test_offload_that_cannot_be_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()
