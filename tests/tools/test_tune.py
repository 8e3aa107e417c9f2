"""`tune`: never above the budget, about as fast as the best recipe, and the model trains alike."""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from bed import ranks
from bed.accelerator import Simulation, run_simulated
from benchmarks.meters import tensors
from fronts import assert_tensors, full_state
from fsdp_wrap import (
    CPUOffload,
    FullyShardedDataParallel,
    Machine,
    fully_shard,
    iter_full_params,
    plan,
    timeline,
)
from fsdp_wrap._runtime import units_in
from fsdp_wrap.tools import Recipe, UnitRecipe, step_of, tune
from fsdp_wrap.tools.command.main import main
from fsdp_wrap.tools.planning import Plan, UnitPlan
from fsdp_wrap.tools.tuning.recipe import (
    ALWAYS,
    FREED,
    INPUTS_ON_HOST,
    ON_DEVICE,
    ON_HOST,
    RECOMPUTED,
    STAY,
    TO_BACKWARD,
)
from fsdp_wrap.tools.tuning.solver import Cost, choose, needed
from fsdp_wrap.wrap import ModuleWrapPolicy
from nets import WIDTH, Block, net
from tools.made_plans import made_plan

tuning = import_module("fsdp_wrap.tools.tuning.tune")

MB = 10**6
MACHINE = Machine(
    name="one", flops={"float32": 1e9}, memory_bandwidth=1e9, bandwidth_within=1e8, bandwidth_between=1e8
)
KEYS = ("", "a", "b", "c")
COMPUTES = {STAY: 3, RECOMPUTED: 4, ON_HOST: 6, INPUTS_ON_HOST: 6}
"""Times that a forward takes; copies of activations take long."""
OPTIONS = [(FREED, STAY), (TO_BACKWARD, STAY), (FREED, RECOMPUTED), (TO_BACKWARD, RECOMPUTED)]


# the solver


@pytest.mark.parametrize("seed", range(20))
def test_the_solver_finds_the_best_of_all_choices(seed):
    draw = random.Random(seed)
    units = [
        {option: Cost(draw.random(), draw.randint(0, 9), draw.randint(0, 9)) for option in range(3)}
        for _ in range(5)
    ]
    every = [*itertools.product(range(3), repeat=5)]
    budget = draw.randint(10, 40)
    fitting = [choice for choice in every if needed(units, choice) <= budget]

    def seconds(choice: Any) -> float:
        return sum(of_unit[option].seconds for of_unit, option in zip(units, choice))

    found = choose(units, budget)
    assert (found is None) == (not fitting)
    if found is not None:
        assert needed(units, found) <= budget
        assert seconds(found) == pytest.approx(min(map(seconds, fitting)))


# the search, on steps whose memory and time are those of a formula


class Steps:
    """Stands for `plan`: units with drawn figures, of which each gather hides behind the unit before."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.activations = {key: draw.randint(5, 60) * MB for key in KEYS}
        self.gathered = {key: draw.randint(1, 30) * MB for key in KEYS}
        self.computes = {key: draw.uniform(0.5, 3) for key in KEYS}
        self.state = {key: draw.randint(5, 40) * MB for key in KEYS}
        self.planned: list[Recipe] = []

    def __call__(self, setup: Any, ranks: int, **_: Any) -> Plan:
        recipe = setup.keywords["recipe"]
        self.planned.append(recipe)
        return self.plan(recipe)

    def plan(self, recipe: Recipe) -> Plan:
        units = recipe.units or tuple(UnitRecipe((key,)) for key in KEYS)
        by_key = {unit.modules[0]: unit for unit in units}
        inputs = {key: self.activations[key] if by_key[key].activations == STAY else 2 * MB for key in KEYS}
        stays = {key: self.gathered[key] * (by_key[key].parameters != FREED) for key in KEYS}
        leaves = {key for key in KEYS if recipe.offload == "all" or by_key[key].shards == ON_HOST}
        held = 10 * MB + sum(nbytes for key, nbytes in self.state.items() if key not in leaves)
        moments, seconds, times = [], 0.0 if recipe.offload != "optimizer" else 100.0, {}
        for key in KEYS:
            moments.append((key, "forward", held + self.activations[key] + self.gathered[key]))
            held += inputs[key] + stays[key]
        for number, key in reversed([*enumerate(KEYS)]):
            own = self.activations[key] - inputs[key] + self.gathered[key] - stays[key]
            moments.append((key, "backward", held + own + self.gathered[key]))  # with its gradients
            held -= inputs[key] + stays[key]
            gathers = 0.0 if stays[key] else self.gathered[key] / 20 / MB
            before = self.computes[KEYS[number + 1]] if number + 1 < len(KEYS) else 0.0
            times[key] = self.computes[key] * COMPUTES[by_key[key].activations]
            times[key] += max(0.0, gathers - before) + (self.state[key] / 60 / MB if key in leaves else 0)
            seconds += times[key]
        planned = tuple(
            UnitPlan(
                key, 0, self.state[key], self.gathered[key], 1, 1, 0, {}, times[key], 0.0, 0.0, 0, inputs[key]
            )
            for key in KEYS
        )
        return made_plan(moments, seconds, units=planned)

    def best(self, limit: int, shards: Any = (ON_DEVICE,)) -> float | None:
        """By planning all recipes."""
        found = []
        for chosen in itertools.product(itertools.product(OPTIONS, shards), repeat=len(KEYS)):
            units = tuple(UnitRecipe((key,), *option, there) for key, (option, there) in zip(KEYS, chosen))
            made = self.plan(Recipe(units=units))
            if made.needed_bytes <= limit:
                found.append(made.predicted_seconds)
        return min(found, default=None)  # type: ignore[type-var]


def takes_recipe(recipe: Recipe) -> Any: ...


def tuned(steps: Any, memory: int, **options: Any) -> Recipe:
    with mock.patch.object(tuning, "plan", steps):
        return tune(takes_recipe, 8, memory=memory, machine=MACHINE, **options)


def test_an_interrupt_keeps_the_best_recipe_so_far(capsys):
    steps, asked = Steps(0), 0

    def plan(*args: Any, **options: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked > last:
            raise KeyboardInterrupt
        return steps(*args, **options)

    last = 6
    found = tuned(plan, 1 << 40, progress=True)
    assert asked == last + 1 and found.needed_bytes and "interrupted" in str(found)
    begin, end = capsys.readouterr().err.splitlines()
    assert begin.startswith("searching for the fastest recipe that fits into 1.10 TB")
    assert end == "interrupted: this is the best recipe so far"
    for last, progress in ((asked, False), (asked, True)):
        asked = last if progress else 0  # nothing to keep, or nobody to tell
        with pytest.raises(KeyboardInterrupt):
            tuned(plan, 1 << 40, progress=progress)


@pytest.mark.parametrize("seed", range(6))
def test_it_is_never_above_the_budget_and_nearly_as_fast_as_the_best_of_all(seed):
    steps = Steps(seed)
    most = max(steps.plan(Recipe()).needed_bytes, 200 * MB)
    for part in (0.5, 0.65, 0.8, 0.95, 1.3):
        limit = int(most * part)
        best = steps.best(limit)
        if best is None:
            with pytest.raises(
                ValueError, match=r"no recipe fits into .* the least is .* at its tightest in"
            ):
                tuned(steps, limit)
            continue
        found = tuned(steps, limit)
        checked = steps.plan(found)
        assert checked.needed_bytes == found.needed_bytes <= limit
        assert checked.predicted_seconds == found.predicted_seconds
        assert checked.predicted_seconds <= best * 1.03
    assert len(steps.planned) < 5 * 45


@pytest.mark.parametrize("seed", range(6))
def test_shards_of_as_many_units_leave_as_makes_the_step_fastest(seed):
    steps, gains = Steps(seed), 0
    for part in (0.65, 0.75, 0.85, 0.95):
        limit = int(max(steps.plan(Recipe()).needed_bytes, 200 * MB) * part)
        best = steps.best(limit, (ON_DEVICE, ON_HOST))
        if best is None:
            continue
        found = tuned(steps, limit, device="cuda")
        assert steps.plan(found).needed_bytes == found.needed_bytes <= limit
        assert found.predicted_seconds is not None
        alike = [steps.best(limit, (there,)) or 100.0 for there in (ON_DEVICE, ON_HOST)]
        gains += found.predicted_seconds < 0.99 * min(alike)
        assert found.predicted_seconds <= best * 1.03
    assert gains, "shards of some units on the host: faster than those of none, and of all"
    assert len(steps.planned) < 4 * 90


def test_what_is_alike_is_decided_by_few_plans_and_told_on_the_page():
    steps = Steps(3)
    found = tuned(steps, steps.plan(Recipe()).needed_bytes * 2)
    assert {unit.parameters for unit in found.units} == {TO_BACKWARD}
    assert len(steps.planned) <= 14, "where all fits, units are not looked at one by one"
    tight = tuned(steps, int(steps.plan(Recipe()).needed_bytes * 0.85))
    text = str(tight)
    for part in ("by the plan, on 8 ranks", "of", "recomputed", "Tightest in", "costs", "frees", "Tried"):
        assert part in text
    assert Recipe.from_json(tight.to_json()) == tight and str(Recipe.from_json(tight.to_json())) == text


# the model


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)


BLOCKS = ("blocks.0", "blocks.1")
MIXED = (
    UnitRecipe(("",), TO_BACKWARD),
    UnitRecipe(("blocks.0",), FREED, RECOMPUTED),
    UnitRecipe(("blocks.1",), ALWAYS, STAY),
)
RECIPES = [
    Recipe(),
    Recipe(together=0),
    Recipe(units=MIXED, prefetch=1),
    Recipe(units=(UnitRecipe(("",), FREED, RECOMPUTED),), together=0),
    Recipe(units=(UnitRecipe(("",)), UnitRecipe(BLOCKS, TO_BACKWARD, RECOMPUTED)), batch_bytes=0, prefetch=2),
    Recipe(units=MIXED, ranks_per_replica=1, offload="all"),
    Recipe(together=2, offload="optimizer", ranks_per_replica=2),
]


@ranks(2)
def test_a_model_with_a_recipe_trains_as_the_plain_one(rank, world_size):
    plain = net(1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        (sum(plain(batch(each, step)).square().mean() for each in range(2)) / 2).backward()
        reference.step(), reference.zero_grad()

    def check(model: nn.Module, told: str) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        turn = iter(range(4))
        step_once = step_of(model, optimizer, lambda: model(batch(rank, next(turn))).square().mean())
        for _ in range(4):
            step_once()
        found = dict(iter_full_params(model))
        for name, expected in plain.named_parameters():
            torch.testing.assert_close(found[name], expected.detach(), rtol=1e-12, atol=1e-12, msg=told)

    for recipe in RECIPES:
        check(recipe.apply(net(1), Block), str(recipe))
    for recipe in (RECIPES[2], RECIPES[0]):
        wrapped = FullyShardedDataParallel(
            net(1), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True
        )
        check(recipe.apply(wrapped), f"wrapped: {recipe}")
        composed = net(1)
        for each in (*composed.blocks, composed):  # type: ignore[misc]
            fully_shard(each)
        check(copy.deepcopy(recipe.apply(composed)), f"sharded and copied: {recipe}")
        # a second recipe takes the place of the first one
        check(replace(recipe, units=(UnitRecipe(("blocks.0",)),)).apply(composed), "another one")


@ranks(2)
def test_blocks_of_a_recipe_are_found_and_recomputed(rank, world_size):
    made = Recipe(units=MIXED).apply(net(1))
    assert isinstance(made, nn.Module) and {type(made.blocks[0]).__name__} == {"FSDPBlock"}  # type: ignore[index]
    calls = []
    hidden = made.blocks[0].up, made.blocks[1].up  # type: ignore[index,union-attr]
    for at, module in enumerate(hidden):
        module.register_forward_hook(lambda *_, at=at: calls.append(at))
    made(batch(rank, 0)).sum().backward()
    assert sorted(calls) == [0, 0, 1], "the first is computed twice"
    for words, message in [
        ({"units": (UnitRecipe(("other",)),)}, "'other' is no unit"),
        ({"offload": "all"}, "is sharded already, and the recipe offloads"),
    ]:
        with pytest.raises(ValueError, match=message):
            Recipe(**words).apply(made)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is sharded already: .'mesh'. have no effect"):
        Recipe().apply(made, mesh=None)
    with pytest.raises(ValueError, match="has a unit 'other', and Net has not"):
        Recipe(units=(UnitRecipe(("other",)),)).apply(net(1))
    with pytest.raises(TypeError, match="the recipe decides offload_policy"):
        Recipe().apply(net(1), offload_policy=None)
    with pytest.raises(ValueError, match="2 ranks are no replicas of 3"):
        Recipe(ranks_per_replica=3).apply(net(1))


ON_HOST_TOO = (
    UnitRecipe(("",), TO_BACKWARD),
    UnitRecipe(("blocks.0",), FREED, RECOMPUTED, ON_HOST),
    UnitRecipe(("blocks.1",)),
)


def whole_on_host(model: nn.Module) -> dict[str, bool]:
    """Returns which units have all of their shards offloaded."""
    return {name: all(layout.offloaded for layout in unit.layouts) for name, unit in units_in(model).items()}


def nested(recipe: Recipe, model: Any) -> nn.Module:
    """Wraps the blocks of a net by the wrapper, the first with its parameters on the host."""
    for at, block in enumerate(model.blocks):
        model.blocks[at] = FullyShardedDataParallel(
            block, cpu_offload=CPUOffload(at == 0), use_orig_params=True
        )
    return recipe.apply(FullyShardedDataParallel(model, use_orig_params=True))


@pytest.mark.parametrize("front", ["fully_shard", "wrapper"])
def test_shards_of_single_units_lie_on_the_host_and_train_as_the_plain_ones(front):
    recipe = Recipe.from_json(Recipe(units=ON_HOST_TOO).to_json())
    assert "shards      on host                     blocks.0" in str(recipe)
    plain, begin = net(1), net(1)  # made once: ranks are threads, with one random generator
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(3):
        (sum(plain(batch(each, step)).square().mean() for each in range(2)) / 2).backward()
        reference.step(), reference.zero_grad()
    state = plain.state_dict()

    def program(rank: int, device: Simulation) -> None:
        make = partial(nested, recipe) if front == "wrapper" else recipe.apply
        model = make(copy.deepcopy(begin))
        assert whole_on_host(model) == {"": False, "blocks.0": True, "blocks.1": False}
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(3):
            model(batch(rank, step)).square().mean().backward()
            optimizer.step(), optimizer.zero_grad()
            device.end_step()
        with device.aside():
            assert_tensors(full_state(model), state, rtol=1e-12, atol=1e-12)
        loaded = make(copy.deepcopy(begin))
        loaded.load_state_dict(model.state_dict())
        x = batch(rank, 9)
        with torch.no_grad():
            assert torch.equal(loaded(x), model(x))

    run_simulated(2, program)


# plans


UNTUNED = Recipe()


def three_parts(width: int, hidden: int) -> nn.Sequential:
    parts = (nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width)) for _ in "abc")
    return nn.Sequential(*parts)


def small(recipe: Recipe = UNTUNED, rows: int = 64) -> Any:
    with torch.device("meta"):
        model = three_parts(32, 128)
    made = recipe.apply(model)
    optimizer = torch.optim.AdamW(made.parameters())
    return made, optimizer, step_of(made, optimizer, lambda: made(torch.randn(rows, 32)).square().mean())


def shards_itself() -> Any:
    model = three_parts(32, 128)
    for each in (*model, model):
        fully_shard(each)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, step_of(model, optimizer, lambda: model(torch.randn(4096, 32)).square().mean())


def test_a_recipe_may_shard_state_over_replicas():
    plans = [
        plan(partial(small, Recipe(ranks_per_replica=2, state_over_replicas=each)), 4, machine=MACHINE)
        for each in (False, True)
    ]
    assert plans[1].needed_bytes < 0.8 * plans[0].needed_bytes
    with pytest.raises(ValueError, match="pass ranks_per_replica"):
        Recipe(state_over_replicas=True)


def test_a_setup_that_shards_by_itself_keeps_its_units():
    least = plan(shards_itself, 2, machine=MACHINE)
    found = tune(shards_itself, 2, memory=int(least.needed_bytes * 0.8), machine=MACHINE)
    assert [unit.modules for unit in found.units] == [("",), ("0",), ("1",), ("2",)]
    assert found.needed_bytes is not None and found.needed_bytes <= int(least.needed_bytes * 0.8)
    assert RECOMPUTED in {unit.activations for unit in found.units}


def test_activations_leave_for_the_host_where_there_is_a_device():
    def setup(recipe):
        with torch.device("meta"):
            model = nn.Sequential(
                *(nn.Sequential(nn.Linear(64, 2048), nn.Linear(2048, 64)) for _ in range(8))
            )
        made = recipe.apply(model)
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)

        def loss():
            return made(torch.randn(4096, 64, device="cuda", requires_grad=True)).square().mean()

        return made, optimizer, step_of(made, optimizer, loss)

    fast = replace(MACHINE, host_bandwidth=1e12, flops={"float32": 1e11})
    units = tuple(UnitRecipe((name,), FREED, STAY) for name in ("", *"01234567"))
    there = [replace(unit, activations=ON_HOST) if unit.modules != ("",) else unit for unit in units]

    def planned(units: Any) -> Plan:
        return plan(lambda: setup(Recipe(units=tuple(units))), 2, device="cuda", machine=fast)

    stay, leave = planned(units), planned(there)
    assert leave.needed_bytes < 0.8 * stay.needed_bytes
    found = tune(setup, 2, device="cuda", memory=leave.needed_bytes, machine=fast)
    assert ON_HOST in {unit.activations for unit in found.units}


def on_gpus(recipe: Recipe = UNTUNED) -> Any:
    with torch.device("meta"):
        model = three_parts(64, 2048)
    made = recipe.apply(model)
    optimizer = torch.optim.AdamW(made.parameters(), fused=True)
    loss = lambda: made(torch.randn(16, 64, device="cuda")).square().mean()  # noqa: E731
    return made, optimizer, step_of(made, optimizer, loss)


def wrapped_on_gpus(recipe: Recipe) -> Any:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in "ab"))
    model[0] = FullyShardedDataParallel(model[0], cpu_offload=CPUOffload(True), device_id=0)
    made: Any = recipe.apply(FullyShardedDataParallel(model, device_id=0))
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    loss = lambda: made(torch.randn(16, 64, device="cuda")).square().mean()  # noqa: E731
    return made, optimizer, step_of(made, optimizer, loss)


def test_what_leaves_the_device_is_planned_and_found():
    names, machine = ("", "0", "1", "2"), replace(MACHINE, host_bandwidth=1e7)

    def planned(*on_host: str) -> Plan:
        units = [UnitRecipe((each,), shards=ON_HOST if each in on_host else ON_DEVICE) for each in names]
        return plan(partial(on_gpus, Recipe(units=tuple(units))), 2, device="cuda", machine=machine)

    none, one, every = planned(), planned("1"), planned(*names)
    state = 3 * next(unit.shard_bytes for unit in none.units if unit.name == "1")
    assert none.rest_bytes - one.rest_bytes == pytest.approx(state, abs=100)
    assert one.host.offloaded - none.host.offloaded == pytest.approx(state, abs=100)
    assert every.rest_bytes < 1000 and every.host.offloaded > 2.9 * state
    assert none.predicted_seconds < one.predicted_seconds < every.predicted_seconds  # type: ignore[operator]
    limit = (one.needed_bytes + planned("1", "2").needed_bytes) // 2
    found = tune(on_gpus, 2, device="cuda", memory=limit, machine=machine)
    on_host = [unit.modules[0] for unit in found.units if unit.shards == ON_HOST]
    assert 0 < len(on_host) < 3 and found.needed_bytes <= limit  # type: ignore[operator]
    assert "of 1 units on the host" in str(found)


def test_shards_of_a_sharded_model_lie_where_they_were_put():
    for name, fits in (("0", True), ("", False)):
        recipe = Recipe(units=(UnitRecipe((name,), shards=ON_HOST),))
        if fits:
            assert plan(partial(wrapped_on_gpus, recipe), 2, device="cuda").host.offloaded > 0
        else:
            with pytest.raises(ValueError, match="has the shards of '' on the host, and this"):
                plan(partial(wrapped_on_gpus, recipe), 2, device="cuda")


def test_a_plan_shows_each_word_of_a_recipe():
    def figures(recipe: Recipe) -> dict[str, Any]:
        return {unit.name: unit for unit in plan(lambda: small(recipe), 2).units}

    freed = figures(Recipe(units=tuple(UnitRecipe((name,)) for name in ("", "0", "1", "2"))))
    mixed = figures(
        Recipe(
            units=(
                UnitRecipe(("",)),
                UnitRecipe(("0",), TO_BACKWARD),
                UnitRecipe(("1",), FREED, RECOMPUTED),
                UnitRecipe(("2",)),
            )
        )
    )
    assert [freed[name].gathers for name in "012"] == [2, 2, 2]
    assert [mixed[name].gathers for name in "012"] == [1, 2, 2]
    assert mixed["0"].activation_bytes == freed["0"].activation_bytes > 2 * mixed["1"].activation_bytes
    assert freed["1"].activation_bytes == freed["0"].activation_bytes
    pairs = figures(Recipe(units=(UnitRecipe(("",)), UnitRecipe(("0", "1")), UnitRecipe(("2",)))))
    assert pairs.keys() == {"", "0", "2"}, "a unit of two modules is one"
    assert pairs["0"].parameters == freed["0"].parameters + freed["1"].parameters


@pytest.mark.slow
def test_of_a_small_program_no_recipe_is_much_faster():
    for part in (0.75, 0.9):
        limit = int(plan(lambda: small(rows=4096), 2).needed_bytes * part)
        found = tune(lambda recipe: small(recipe, 4096), 2, memory=limit, machine=MACHINE)
        times = []
        for chosen in itertools.product(OPTIONS, repeat=4):
            units = tuple(UnitRecipe((name,), *option) for name, option in zip(("", "0", "1", "2"), chosen))
            tried = Recipe(units=units, prefetch=found.prefetch)
            made = plan(lambda tried=tried: small(tried, 4096), 2, machine=MACHINE)  # type: ignore[misc]
            if made.needed_bytes <= limit:
                times.append(made.predicted_seconds)
        assert found.predicted_seconds <= 1.03 * min(times)  # type: ignore[type-var,operator]


def trains(recipe: Recipe = UNTUNED) -> Any:
    torch.manual_seed(0)
    made: Any = recipe.apply(nn.Sequential(*(Hidden() for _ in range(4))), Hidden)
    optimizer = torch.optim.AdamW(made.parameters())
    return made, optimizer, step_of(made, optimizer, lambda: made(torch.randn(2048, 128)).square().mean())


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@ranks(2, 3)
def measure(rank, world_size, path):
    """Builds and trains with each recipe of a file; writes the most bytes of tensors meanwhile."""
    texts, peaks = json.loads(path.read_text()), []
    for text in [texts[0], *texts]:  # once for what is made once for all
        kept: list[Any] = []

        def whole(text: str = text, kept: list[Any] = kept) -> None:
            kept += trains(Recipe.from_json(text))
            for _ in range(3):
                kept[2]()

        with mock.patch.dict(os.environ, FSDP_WRAP_SHARED_MEMORY="0"):
            peaks.append(tensors(whole).peak)
    (path.parent / f"{rank}").write_text(json.dumps(peaks[1:]))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_found_takes_no_more_than_the_budget_when_it_runs(world_size, tmp_path):
    most = plan(trains, world_size).needed_bytes
    found = [
        tune(trains, world_size, memory=int(part * most), machine=MACHINE) for part in (0.65, 0.75, 0.9, 1.2)
    ]
    assert len({recipe.units for recipe in found}) > 2
    path = tmp_path / "recipes.json"
    path.write_text(json.dumps([recipe.to_json() for recipe in found]))
    measure(path=path, world_size=world_size)
    for rank in range(world_size):
        for recipe, peak in zip(found, json.loads((tmp_path / f"{rank}").read_text())):
            assert 0.98 * recipe.needed_bytes < peak <= recipe.memory, f"rank {rank}: {recipe}"


@ranks(2)
def record(rank, world_size, path):
    made, _, step = small()
    for param in made.parameters():
        torch.nn.init.normal_(param)
    step()
    with timeline(made, path):
        step(), step()


def test_a_timeline_corrects_the_machine_and_the_page_says_by_how_much(tmp_path):
    from fsdp_wrap.tools.timeline.recording import merge

    record(path=tmp_path, world_size=2)
    recorded = merge([tmp_path], tmp_path / "both.json")
    slow = replace(MACHINE, operator_seconds=0.0)
    found = tune(small, 2, memory="1GB", machine=slow, timeline=recorded)
    again, told = import_module("fsdp_wrap.tools.tuning.corrected").corrected(
        slow, plan(small, 2, machine=slow), recorded
    )
    assert told and all(line in str(found) for line in told) and "one, corrected" in str(found)
    off, told = import_module("fsdp_wrap.tools.tuning.corrected").corrected(
        again, plan(small, 2, machine=again), recorded
    )
    computed = [line for line in told if "computation" in line]
    assert not computed, "the corrected machine computes as long as was measured"
    # Of a machine with a range the middle is corrected, and no range is left.
    ranged = replace(slow, flops={dtype: 2 * each for dtype, each in slow.flops.items()}, attained=(0.4, 0.6))
    ranged = replace(ranged, memory_bandwidth=2 * slow.memory_bandwidth)
    assert "of its peak" in str(tune(small, 2, memory="1GB", machine=ranged))
    middle = tune(small, 2, memory="1GB", machine=ranged, timeline=recorded)
    assert middle.predicted_seconds == found.predicted_seconds and "of its peak" not in str(middle)


# wrong uses, and the command


def nothing() -> Any:
    """No setup."""


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: UnitRecipe(("",), "there"), ValueError, "parameters must be one of freed, "),
        (lambda: UnitRecipe(("",), FREED, "gone"), ValueError, "activations must be one of stay, "),
        (lambda: UnitRecipe(("",), shards="gone"), ValueError, "shards must be one of on device, on host"),
        (lambda: UnitRecipe(()), ValueError, "modules must name a module"),
        (lambda: Recipe(offload="half"), ValueError, "offload must be one of none, "),
        (lambda: Recipe(prefetch=-1), ValueError, "prefetch counts units: pass 0 or a positive int, not -1"),
        (lambda: Recipe(units=(UnitRecipe(("a",)), UnitRecipe(("a",)))), ValueError, "'a' is in two units"),
        (lambda: Recipe.from_json("{}"), ValueError, "this is not what Recipe.to_json.. writes"),
        (lambda: tune(small, machine=None), TypeError, "tune.. needs a machine, such as"),  # type: ignore[arg-type]
        (lambda: tune(small, machine=MACHINE), ValueError, "tune.. needs memory, such as '80GB'"),
        (
            lambda: tune(small, machine=MACHINE, memory="1GB", ran=Recipe()),
            ValueError,
            "ran= is the recipe of a recording",
        ),
        (
            lambda: tune(nothing, memory="1GB", machine=MACHINE),
            ValueError,
            "the setup cannot be planned: setup.. must return",
        ),
    ],
)
def test_wrong_uses_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_the_command_prints_the_page_and_writes_the_recipe(tmp_path, capsys):
    script_file = tmp_path / "mine.py"
    script_file.write_text(
        "import torch\nfrom torch import nn\nfrom fsdp_wrap.tools import Recipe, step_of\n"
        "def setup(recipe=Recipe()):\n"
        "    model = recipe.apply(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))\n"
        "    optimizer = torch.optim.SGD(model.parameters())\n"
        "    return model, optimizer, step_of(model, optimizer, lambda: model(torch.randn(2, 8)).mean())\n"
    )
    machine = tmp_path / "machine.json"
    machine.write_text(json.dumps(MACHINE.to_dict()))
    asked = ["tune", f"{script_file}:setup", "--ranks", "2", "--machine", str(machine)]
    assert main([*asked, "--device-memory", "1GB", "--out", str(tmp_path / "recipe.json")]) == 0
    page = capsys.readouterr().out
    found = Recipe.from_json((tmp_path / "recipe.json").read_text())
    assert page.strip() == str(found) and found.ranks == 2
    assert main([*asked, "--device-memory", "100B"]) == 2
    assert "no recipe fits into 100 B on 2 ranks" in capsys.readouterr().err
