"""Recipes that `fit` finds: never above the budget, about as fast as the best, and the model trains alike."""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from bed import ranks
from benchmarks.meters import tensors
from fsdp_wrap import (
    FullyShardedDataParallel,
    Machine,
    MixedPrecision,
    MixedPrecisionPolicy,
    fit,
    fully_shard,
    iter_full_params,
    plan,
    record_events,
    timeline,
)
from fsdp_wrap._core import format_bytes
from fsdp_wrap.tools import Fit, Recipe, UnitRecipe, correct_machine, shard_as, step_of, tune
from fsdp_wrap.tools.command.main import main
from fsdp_wrap.tools.fitting.recipe import (
    ALWAYS,
    FREED,
    INPUTS_ON_HOST,
    ON_HOST,
    RECOMPUTED,
    STAY,
    TO_BACKWARD,
)
from fsdp_wrap.tools.fitting.solver import Cost, choose
from fsdp_wrap.tools.planning import Plan, UnitPlan
from fsdp_wrap.wrap import ModuleWrapPolicy
from nets import WIDTH, Block, net
from tools.made_plans import made_plan

fitting = import_module("fsdp_wrap.tools.fitting.fit")

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
    budget = draw.randint(10, 40)

    def needed(choice: Any) -> int:
        held = [*itertools.accumulate(of_unit[option].held for of_unit, option in zip(units, choice))]
        return max(before + of_unit[option].beside for before, of_unit, option in zip(held, units, choice))

    fitting = [choice for choice in itertools.product(range(3), repeat=5) if needed(choice) <= budget]

    def seconds(choice: Any) -> float:
        return sum(of_unit[option].seconds for of_unit, option in zip(units, choice))

    answer = choose(units, budget)
    assert (answer is None) == (not fitting)
    if answer is not None:
        assert needed(answer) <= budget
        assert seconds(answer) == pytest.approx(min(map(seconds, fitting)))


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
        leaves = {*KEYS} if recipe.offload == "all" else set()
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

    def best(self, limit: int) -> float | None:
        """Returns the shortest time within a limit, by planning all recipes."""
        times = []
        for chosen in itertools.product(OPTIONS, repeat=len(KEYS)):
            units = tuple(UnitRecipe((key,), *option) for key, option in zip(KEYS, chosen))
            made = self.plan(Recipe(units=units))
            if made.needed_bytes <= limit:
                times.append(made.predicted_seconds)
        return min(times, default=None)  # type: ignore[type-var]


def takes_recipe(recipe: Recipe) -> Any: ...


def fitted(steps: Any, memory: int, **options: Any) -> Fit:
    with mock.patch.object(fitting, "plan", steps):
        return fit(takes_recipe, 8, device_memory=memory, machine=MACHINE, **options)


def test_an_interrupt_keeps_the_best_recipe_so_far(capsys):
    steps, asked = Steps(0), 0

    def plan(*args: Any, **options: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked > last:
            raise KeyboardInterrupt
        return steps(*args, **options)

    last = 6
    report = fitted(plan, int(steps.plan(Recipe()).needed_bytes * 0.9), progress=True)
    assert asked == last + 1 and report.best is not None and report.best.recipe is not None
    assert not report.complete and "interrupted before the rest" in str(report)
    assert capsys.readouterr().err.startswith("searching 1 configurations for what fits into ")
    for end, progress in ((3, False), (0, True)):  # nobody to tell, or nothing to keep
        last, asked = end, 0
        with pytest.raises(KeyboardInterrupt):
            fitted(plan, 1 << 40, progress=progress)


@pytest.mark.parametrize("seed", range(6))
def test_it_is_never_above_the_budget_and_nearly_as_fast_as_the_best_of_all(seed):
    steps = Steps(seed)
    most = max(steps.plan(Recipe()).needed_bytes, 200 * MB)
    for part in (0.5, 0.65, 0.8, 0.95, 1.3):
        limit = int(most * part)
        best = steps.best(limit)
        answer = fitted(steps, limit).best
        assert (answer is None) == (best is None)
        if answer is not None and best is not None:
            assert answer.recipe is not None and answer.predicted_seconds is not None
            checked = steps.plan(answer.recipe)
            assert checked.needed_bytes == answer.peak_bytes <= limit
            assert checked.predicted_seconds == answer.predicted_seconds <= best * 1.03
    assert len(steps.planned) < 5 * 15


def test_what_does_not_fit_says_how_much_is_missing_and_where():
    steps = Steps(0)
    least = min(
        steps.plan(Recipe(units=tuple(UnitRecipe((key,), FREED, RECOMPUTED) for key in KEYS))).needed_bytes,
        steps.plan(Recipe()).needed_bytes,
    )
    report = fitted(steps, least // 2)
    assert report.best is None and not any(choice.fits for choice in report.choices)
    text = str(report)
    assert f"nothing fits into {format_bytes(least // 2)}: the least is {format_bytes(least)}" in text
    assert "too much (8 ranks, recipe=" in text and "at its tightest in " in text


def test_what_is_alike_is_decided_by_few_plans():
    steps = Steps(3)
    report = fitted(steps, steps.plan(Recipe()).needed_bytes * 2)
    recipe = report.best and report.best.recipe
    assert recipe is not None and {unit.parameters for unit in recipe.units} == {TO_BACKWARD}
    assert len(steps.planned) <= 8, "where all fits, units are not looked at one by one"
    tight = fitted(steps, int(steps.plan(Recipe()).needed_bytes * 0.85))
    text = str(tight)
    for part in ("predicted for one", "recomputed", "The first one is tightest in", "yes"):
        assert part in text
    recipe = tight.best and tight.best.recipe
    assert recipe is not None and Recipe.from_json(recipe.to_json()) == recipe
    told = json.loads(tight.to_json())["choices"][0]["recipe"]
    assert Recipe.from_json(json.dumps(told)) == recipe


def test_the_batch_and_the_recipe_are_found_together():
    """The largest batch with all kept, and the largest with all computed again."""

    def setup(*, batch: int, recipe: Recipe) -> Any: ...

    def plan(made: Any, ranks: int, **_: Any) -> Plan:
        batch, recipe = made.keywords["batch"], made.keywords["recipe"]
        units = recipe.units or tuple(UnitRecipe((key,)) for key in KEYS)
        moments, seconds, held, planned = [], 0.1, 10 * MB, []
        for unit in units:
            own = batch * MB * (10 if unit.activations == STAY else 1)
            held += own
            moments.append((unit.modules[0], "forward", held + 9 * batch * MB))
            computes = batch * COMPUTES[unit.activations] / 1e3
            planned.append(UnitPlan(unit.modules[0], 0, 0, 0, 1, 1, 0, {}, computes, 0.0, 0.0, 0, own))
            seconds += computes
        return made_plan(moments, seconds, units=tuple(planned))

    with mock.patch.object(fitting, "plan", plan):
        report = fit(setup, 8, device_memory=500 * MB, machine=MACHINE)
    answers = {choice.batch: choice for choice in report.choices}
    kept, computed = answers[10], answers[37]  # 10 + 49 * 10 MB, and 10 + 13 * 37 MB
    assert kept.recipe is not None and {unit.activations for unit in kept.recipe.units} == {STAY}
    assert computed.recipe is not None and RECOMPUTED in {unit.activations for unit in computed.recipe.units}
    assert report.best is max((kept, computed), key=lambda choice: choice.speed)


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
    Recipe(units=(UnitRecipe(("",)), UnitRecipe(BLOCKS, TO_BACKWARD, RECOMPUTED)), prefetch=2),
    Recipe(units=MIXED, ranks_per_replica=1, offload="all"),
    Recipe(together=2, offload="optimizer", ranks_per_replica=2),
]


@ranks(2)
def test_a_model_with_a_recipe_trains_as_the_plain_one(rank, world_size):
    """By steps of two backwards, of which each reduces, or the last."""
    plain = net(1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        seen = [batch(other, 2 * step + part) for other in range(2) for part in range(2)]
        (sum(plain(inputs).square().mean() for inputs in seen) / len(seen)).backward()
        reference.step(), reference.zero_grad()

    def check(model: nn.Module, told: str, sync: str = "last") -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        turn = iter(range(8))
        step_once = step_of(
            model,
            optimizer,
            lambda: model(batch(rank, next(turn))).square().mean(),
            accumulation=2,
            sync=sync,
        )
        for _ in range(4):
            step_once()
        full = dict(iter_full_params(model))
        for name, expected in plain.named_parameters():
            torch.testing.assert_close(full[name], expected.detach(), rtol=1e-12, atol=1e-12, msg=told)

    for recipe, sync in zip(RECIPES, itertools.cycle(("last", "every"))):
        check(recipe.apply(net(1), Block), f"{sync}: {recipe}", sync)
    for recipe in (RECIPES[2], RECIPES[0]):
        wrapped = FullyShardedDataParallel(
            net(1), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True
        )
        check(recipe.apply(wrapped), f"wrapped: {recipe}")
        composed = net(1)
        for unit in (*composed.blocks, composed):  # type: ignore[misc]
            fully_shard(unit)
        check(copy.deepcopy(recipe.apply(composed)), f"sharded and copied: {recipe}")
        # a second recipe takes the place of the first one
        check(replace(recipe, units=(UnitRecipe(("blocks.0",)),)).apply(composed), "another one")


@ranks(2)
def test_gradients_are_reduced_once_a_step_or_in_every_backward(rank, world_size):
    for sync, times in (("last", 1), ("every", 3)):
        model = Recipe(together=0).apply(net(1), Block)
        optimizer = torch.optim.SGD(model.parameters())
        step = step_of(model, optimizer, lambda model=model: model(batch(0, 0)).mean(), 3, sync=sync)  # type: ignore[misc]
        with record_events() as events:
            step()
        assert sum(event.kind.name == "REDUCE" for event in events) == times


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
    for module in (*model, model):
        fully_shard(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, step_of(model, optimizer, lambda: model(torch.randn(4096, 32)).square().mean())


def test_a_setup_that_shards_by_itself_keeps_its_units():
    least = plan(shards_itself, 2, machine=MACHINE)

    def setup(recipe: Recipe) -> Any:
        model, *rest = shards_itself()
        return recipe.apply(model), *rest

    limit = int(least.needed_bytes * 0.8)
    best = fit(setup, 2, device_memory=limit, machine=MACHINE).best
    assert best is not None and best.recipe is not None and best.peak_bytes <= limit
    assert [unit.modules for unit in best.recipe.units] == [("",), ("0",), ("1",), ("2",)]
    assert RECOMPUTED in {unit.activations for unit in best.recipe.units}


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
    best = fit(setup, 2, device="cuda", device_memory=leave.needed_bytes, machine=fast).best
    assert best is not None and best.recipe is not None
    assert ON_HOST in {unit.activations for unit in best.recipe.units}


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


@pytest.mark.parametrize("front", ["fully_shard", "wrapper"])
def test_precision_and_meta_models_are_as_they_were_asked_for(front):
    dtypes: list[torch.dtype] = []
    seen: list[torch.dtype] = []

    def setup():
        with torch.device("meta"):
            model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if front == "fully_shard":
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            model = Recipe().apply(model, nn.Linear, mp_policy=policy)
        else:
            model = FullyShardedDataParallel(
                model,
                auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
                mixed_precision=MixedPrecision(torch.bfloat16, torch.float32),
                use_orig_params=True,
            )
        dtypes.extend(param.dtype for param in model.parameters())
        return model, torch.optim.SGD(model.parameters()), lambda: seen.append(model(torch.ones(2, 4)).dtype)

    planned = plan(setup, 2)
    assert {*dtypes} == {torch.float32} and {*seen} == {torch.bfloat16}
    for unit in planned.units:
        assert unit.gathered_bytes == 2 * unit.parameters, "computed with in 16 bits"


@pytest.mark.slow
def test_of_a_small_program_no_recipe_is_much_faster():
    for part in (0.75, 0.9):
        limit = int(plan(lambda: small(rows=4096), 2).needed_bytes * part)
        best = fit(lambda recipe: small(recipe, 4096), 2, device_memory=limit, machine=MACHINE).best
        assert best is not None and best.recipe is not None and best.predicted_seconds is not None
        times = []
        for chosen in itertools.product(OPTIONS, repeat=4):
            units = tuple(UnitRecipe((name,), *option) for name, option in zip(("", "0", "1", "2"), chosen))
            tried = Recipe(units=units, prefetch=best.recipe.prefetch)
            made = plan(lambda tried=tried: small(tried, 4096), 2, machine=MACHINE)  # type: ignore[misc]
            if made.needed_bytes <= limit:
                times.append(made.predicted_seconds)
        assert best.predicted_seconds <= 1.03 * min(times)  # type: ignore[type-var]


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
    limits = [int(part * most) for part in (0.65, 0.75, 0.9, 1.2)]
    choices: list[Any] = [
        fit(trains, world_size, device_memory=limit, machine=MACHINE).best for limit in limits
    ]
    assert len({choice.recipe.units for choice in choices}) > 2
    path = tmp_path / "recipes.json"
    path.write_text(json.dumps([choice.recipe.to_json() for choice in choices]))
    measure(path=path, world_size=world_size)
    for rank in range(world_size):
        peaks = json.loads((tmp_path / f"{rank}").read_text())
        for choice, limit, peak in zip(choices, limits, peaks):
            assert 0.98 * choice.peak_bytes < peak <= limit, f"rank {rank}: {choice}"


@ranks(2)
def record(rank, world_size, path):
    made, _, step = small()
    for param in made.parameters():
        torch.nn.init.normal_(param)
    step()
    with timeline(made, path):
        step(), step()


def test_a_timeline_corrects_a_machine_which_says_by_how_much(tmp_path):
    from fsdp_wrap.tools.timeline.recording import merge

    record(path=tmp_path, world_size=2)
    recorded = merge([tmp_path], tmp_path / "both.json")
    slow = replace(MACHINE, operator_seconds=0.0)
    again = correct_machine(plan(small, 2, machine=slow), recorded)
    assert again.name == "one, corrected" and "by a timeline: computation " in again.source
    faster = slow.flops["float32"] / again.flops["float32"]
    assert faster == pytest.approx(slow.memory_bandwidth / again.memory_bandwidth)
    off = correct_machine(plan(small, 2, machine=again), recorded)
    assert off.flops["float32"] == pytest.approx(again.flops["float32"], rel=0.02), "it was right already"
    # Of a machine with a range the middle is corrected, and no range is left.
    ranged = replace(slow, flops={dtype: 2 * rate for dtype, rate in slow.flops.items()}, attained=(0.4, 0.6))
    ranged = replace(ranged, memory_bandwidth=2 * slow.memory_bandwidth)
    middle = correct_machine(plan(small, 2, machine=ranged), recorded)
    assert middle.attained is None and middle.flops == pytest.approx(again.flops)
    with pytest.raises(ValueError, match="scales the plan's machine: pass one to plan"):
        correct_machine(plan(small, 2), recorded)


# wrong uses, and the command


def nothing() -> Any:
    """No setup."""


def stepping(**words: Any) -> None:
    model = nn.Linear(1, 1)
    step_of(model, torch.optim.SGD(model.parameters()), lambda: torch.ones(()), **words)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: UnitRecipe(("",), "there"), ValueError, "parameters must be one of freed, "),
        (lambda: UnitRecipe(("",), FREED, "gone"), ValueError, "activations must be one of stay, "),
        (lambda: UnitRecipe(()), ValueError, "modules must name a module"),
        (lambda: Recipe(offload="half"), ValueError, "offload must be one of none, "),
        (lambda: Recipe(prefetch=-1), ValueError, "prefetch counts units: pass 0 or a positive int, not -1"),
        (lambda: Recipe(units=(UnitRecipe(("a",)), UnitRecipe(("a",)))), ValueError, "'a' is in two units"),
        (lambda: Recipe.from_json("{}"), ValueError, "this is not what Recipe.to_json.. writes"),
        (lambda: stepping(accumulation=0), ValueError, "accumulation must be at least 1, not 0"),
        (lambda: stepping(sync="never"), ValueError, "sync must be 'last' or 'every', not 'never'"),
        (lambda: fit(small, device_memory="1GB"), ValueError, "fit.. chooses the recipe .* pass a machine"),
        (lambda: fit(small, machine=MACHINE), ValueError, "fit.. needs device_memory, such as '80GB'"),
        (
            lambda: fit(nothing, device_memory="1GB", machine=MACHINE),
            ValueError,
            "no configuration can be planned: setup.. must return",
        ),
        (
            lambda: shard_as(nn.Linear(1, 1), nn.Linear),
            TypeError,
            "shard_as.. is gone: let setup.. take recipe",
        ),
    ],
)
def test_wrong_uses_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_the_former_name_gives_the_recipe_of_the_best(recwarn):
    limit = int(plan(shards_itself, 2).needed_bytes * 0.8)
    with pytest.warns(FutureWarning, match=r"tune\(\) is fit\(\) now: call fit"):
        recipe = tune(shards_itself, 2, memory=limit, machine=MACHINE)
    assert RECOMPUTED in {unit.activations for unit in recipe.units}, "applied to what setup() has sharded"
    with pytest.warns(FutureWarning):
        assert (
            tune(small, 2, memory="1GB", machine=MACHINE)
            == fit(small, 2, device_memory="1GB", machine=MACHINE).best.recipe
        )  # type: ignore[union-attr]
    with pytest.warns(FutureWarning), pytest.raises(ValueError, match="nothing fits into 1.00 kB: the least"):
        tune(small, 2, memory="1KB", machine=MACHINE)
    gone: dict[str, Any]
    for gone in ({"timeline": object()}, {"ran": Recipe()}):
        with pytest.warns(FutureWarning), pytest.raises(TypeError, match="pass machine=correct_machine"):
            tune(small, 2, memory="1GB", machine=MACHINE, **gone)


def test_the_command_prints_the_answer_and_writes_the_recipe(tmp_path, capsys):
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
    asked = [f"{script_file}:setup", "--ranks", "2", "--machine", str(machine)]
    assert main(["fit", *asked, "--device-memory", "1GB", "--out", str(tmp_path / "recipe.json")]) == 0
    page = capsys.readouterr().out
    recipe = Recipe.from_json((tmp_path / "recipe.json").read_text())
    assert str(recipe) in page and page.splitlines()[3].endswith("recipe")
    assert main(["fit", *asked, "--device-memory", "100B"]) == 1
    assert "nothing fits into 100 B: the least is" in capsys.readouterr().out
    assert main(["tune", *asked, "--device-memory", "1GB"]) == 0
    told = capsys.readouterr()
    assert str(recipe) in told.out and "fsdp-wrap tune is fsdp-wrap fit now" in told.err
    assert main(["tune", *asked, "--device-memory", "1GB", "--ran", "recipe.json"]) == 2
    assert "--ran is gone" in capsys.readouterr().err
