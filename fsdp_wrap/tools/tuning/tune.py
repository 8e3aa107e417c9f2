"""`tune`: finds the fastest recipe of a training step that fits into memory.

A few whole plans give each unit's time and memory with each option, a dynamic program chooses among them, and
every answer is planned as a whole before it counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from fsdp_wrap._core import format_bytes, format_seconds, memory_of, tells_keywords
from fsdp_wrap.tools.planning import Machine, Plan, plan
from fsdp_wrap.tools.planning.figures import BACKWARD, FORWARD, OPTIMIZER, UnitPlan
from fsdp_wrap.tools.planning.planner import MOST_RANKS, many_plans
from fsdp_wrap.tools.progress import ProgressBar, progress_bar
from fsdp_wrap.tools.setups import REFUSALS, Setup, first_line, keywords_of
from fsdp_wrap.tools.timeline import Timeline
from fsdp_wrap.tools.tuning.corrected import corrected
from fsdp_wrap.tools.tuning.recipe import (
    ALWAYS,
    FREED,
    INPUTS_ON_HOST,
    OFFLOADS_ACTIVATIONS,
    ON_HOST,
    RECOMPUTED,
    SHARDS_STATE,
    STAY,
    TO_BACKWARD,
    Recipe,
    UnitRecipe,
    format_names,
)
from fsdp_wrap.tools.tuning.solver import Cost, choose, needed

Option = tuple[str, str]
"""The words for a unit's parameters and for its activations."""

_PLAIN, _RICH, _LEAN, _LEANEST = (
    (FREED, STAY),
    (TO_BACKWARD, STAY),
    (FREED, RECOMPUTED),
    (FREED, INPUTS_ON_HOST),
)
_LOOKS = 8  # plans in search of one answer, and of single units that could do better
_SAME = 1.002  # times that count as equal: then the first recipe stays, which is the plainer one
_NEARLY = 1.02  # of the budget: what the costs say of a recipe that may fit
_DOUBLINGS = 3  # how often ranks are doubled to say what would fit
_BATCHES = (0, 1 << 26)  # bytes to try instead of the default


@tells_keywords({"device_memory": "pass it as memory"})
def tune(
    setup: Setup,
    ranks: int = 8,
    *,
    device: str = "cpu",
    memory: int | str | None = None,
    machine: Machine,
    timeline: Timeline | None = None,
    ran: Recipe | None = None,
    progress: bool = False,
) -> Recipe:
    """Finds the fastest recipe of a step that fits into memory, by plans alone.

    It decides for each unit whether its full parameters stay after forward and after backward, and whether
    its activations stay, are computed again, or leave for the host; and for the run the borders of units, how
    far gathers look ahead, batches of small collectives, replicas, and what is offloaded. Numerics and the
    batch stay as they are.

    The memory is that of all tensors while the model is built, in the first step and in later ones. It leaves
    out the context of a device, fragments of its allocator, and buffers of NCCL: leave room for them.

    Args:
        setup: The `setup` of `plan`. If it takes an argument `recipe`, it gets each `Recipe` that is tried,
            and calls `model = recipe.apply(model)` instead of sharding the model itself. Otherwise the recipe
            is applied to the model that it returns: units, replicas and offload then stay as they are.
        ranks: Number of ranks.
        device: The `device` of `plan`.
        memory: Bytes that a rank may use, such as `"80GB"`; None for the machine's.
        machine: The `machine` of `plan`.
        timeline: A recording of the step, by which the machine is corrected.
        ran: The recipe of that recording; None for the setup's own.
        progress: Show a progress bar after two seconds, on standard error. An interrupt (Ctrl-C) then ends
            the search, and the best recipe so far is returned.

    Returns:
        The recipe; `print` shows its page.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If nothing fits, the setup cannot be planned, or an argument makes no sense.

    Example:
        ```python
        def setup(recipe=Recipe()):
            model = recipe.apply(Transformer(), Block)
            optimizer = torch.optim.AdamW(model.parameters())
            return model, optimizer, partial(train_step, model, optimizer)

        recipe = tune(setup, 64, device="cuda", memory="75GB", machine=preset("h100", attained=0.5))
        ```
    """
    if not isinstance(machine, Machine):
        raise TypeError(f"tune() needs a machine, such as fsdp_wrap.preset('h100'), not {machine!r}")
    memory = machine.device_memory if memory is None else memory
    if memory is None:
        raise ValueError("tune() needs memory, such as '80GB', or a machine with device_memory")
    if ran is not None and timeline is None:
        raise ValueError("ran= is the recipe of a recording: pass its timeline= as well")
    limit = memory_of(memory, "memory")
    with many_plans(), progress_bar(disable=not progress) as bar:
        bar.report(f"searching for the fastest recipe that fits into {format_bytes(limit)}; Ctrl-C ends it")
        search = _Tuning(setup, ranks, device, machine, limit, bar)
        if timeline is not None:
            planned = search.planned(ran or Recipe())
            search.machine, search.notes = corrected(machine.expected, planned, timeline)
            search.forget()
        try:
            return search.answer()
        except KeyboardInterrupt:
            if not progress or search.best is None:
                raise
            bar.report("interrupted: this is the best recipe so far")
            return search.page_so_far(search.best)


def _applied(setup: Setup, recipe: Recipe) -> tuple[Any, Any, Any]:
    """Runs a setup that shards its model itself, and applies a recipe to it."""
    made = setup()
    if isinstance(made, tuple) and made and isinstance(made[0], nn.Module):  # else `plan` says what is wrong
        recipe.apply(made[0])
    return made


@dataclass
class _Found:
    """A recipe with its plan, and the costs of the options among which it was chosen."""

    recipe: Recipe
    plan: Plan
    costs: Sequence[Mapping[Option, Cost]] = ()

    @property
    def seconds(self) -> float:
        """The predicted seconds of a step."""
        return self.plan.predicted_seconds or 0.0


@dataclass
class _Tuning:
    """Plans recipes, and keeps the best that fits. `smallest` is the one that needs least."""

    setup: Setup
    ranks: int
    device: str
    machine: Machine
    limit: int
    bar: ProgressBar
    notes: list[str] = field(default_factory=list)
    best: _Found | None = None
    smallest: _Found | None = None
    _known: dict[Recipe, Plan] = field(default_factory=dict)
    _tried: list[str] = field(default_factory=list)
    _blocks: Sequence[str] = ()

    def __post_init__(self) -> None:
        taken = keywords_of(self.setup)
        self._takes = taken is None or "recipe" in taken
        self._offloads = self.device != "cpu" and OFFLOADS_ACTIVATIONS

    def forget(self) -> None:
        """Forgets plans of another machine."""
        self._known.clear()

    def planned(self, recipe: Recipe, ranks: int | None = None) -> Plan:
        """Returns the plan of a recipe."""
        if recipe not in self._known or ranks is not None:
            self.bar.describe(f"planned {len(self._known)} recipes")
            setup = (
                partial(self.setup, recipe=recipe) if self._takes else partial(_applied, self.setup, recipe)
            )
            made = plan(setup, ranks or self.ranks, device=self.device, machine=self.machine)
            if ranks is not None:
                return made
            self._known[recipe] = made
        return self._known[recipe]

    def look(self, recipe: Recipe, costs: Sequence[Mapping[Option, Cost]] = ()) -> _Found:
        """Plans a recipe, and keeps it if it is the best."""
        found = _Found(recipe, self.planned(recipe), costs)
        if self.fits(found) and (self.best is None or found.seconds * _SAME < self.best.seconds):
            self.best = found
        if self.smallest is None or found.plan.needed_bytes < self.smallest.plan.needed_bytes:
            self.smallest = found
        return found

    def fits(self, found: _Found) -> bool:
        """Whether a recipe is within the budget, by its plan."""
        return found.plan.needed_bytes <= self.limit

    def page_so_far(self, best: _Found) -> Recipe:
        """Returns the best recipe of a search that was interrupted, with its page."""
        self.notes.append("The search was interrupted: other recipes may be faster.")
        return self._page(best)

    def answer(self) -> Recipe:
        """Searches, and returns the best recipe with its page."""
        for run in self._runs():
            self._try(run)
        if self.best is not None:
            for together in (2, 4, 0) if self._takes else ():
                self._try(replace(_run_of(self.best.recipe), together=together))
            if self._takes and self.device != "cpu":
                self._improve_shards(self.best.recipe)
        else:
            for run in self._runs() if self._takes else ():
                self._try(replace(run, together=0))
        if self.best is None:
            raise ValueError(self._nothing_fits())
        self._improve_units()
        self._improve_run()
        return self._page(self.best)

    # the run

    def _runs(self) -> Iterator[Recipe]:
        """Yields what may be decided for the run, as recipes without units; the usually faster ones first."""
        plain = Recipe(prefetch=1)
        if not self._takes:
            yield plain
            return
        host = self.machine.ranks_per_host
        sizes = [size for size in (host, 8 * host) if 1 < size < self.ranks and self.ranks % size == 0]
        for offload in ("none",) if self.device == "cpu" else ("none", "optimizer", "all"):
            yield replace(plain, offload=offload)
            for size in sizes:
                for shards in (False, True) if SHARDS_STATE else (False,):
                    yield replace(plain, offload=offload, ranks_per_replica=size, state_over_replicas=shards)

    def _try(self, run: Recipe, on_host: Collection[str] = ()) -> None:
        """Finds the best recipe of a run, unless another one is faster in any case; notes why not.

        `on_host` are the first modules of units whose shards are to lie on the host.
        """
        try:
            told = self._best_of(run, on_host)
        except REFUSALS as error:
            if not self._known:  # not even the setup's own recipe
                raise ValueError(f"the setup cannot be planned: {error}") from error
            told = f"refused: {first_line(error)}"
        there = f", shards of {len(on_host)} units on the host" if on_host else ""
        self._tried.append(f"  {_format_run(run)}{there}: {told}")

    def _best_of(self, run: Recipe, on_host: Collection[str]) -> str:
        made = self.planned(run)
        if run.together == 1:
            self._blocks = [unit.name for unit in made.units if unit.name]
        size = run.together or 1
        groups = [self._blocks[at : at + size] for at in range(0, len(self._blocks), size)]
        units = _units_of(made, {group[0]: tuple(group) for group in groups})
        units = [replace(unit, shards=ON_HOST) if unit.modules[0] in on_host else unit for unit in units]
        with_all = partial(_with_all, run, units)
        rich = self.look(with_all(_RICH))
        if self.best is not None and self.best is not rich and rich.seconds * _SAME >= self.best.seconds:
            return f"at best {format_seconds(rich.seconds)}"
        if self.fits(rich) and not _may_keep_longer(rich.plan):
            return format_seconds(rich.seconds)
        lean = self.look(with_all(_LEAN))
        options = self._options(rich.plan)
        if self._offloads and not self.fits(lean):
            lean = self.look(with_all(_LEANEST))
            options.append(_LEANEST)
        if not self.fits(lean):
            return f"needs {format_bytes(lean.plan.needed_bytes)}"
        costs = _costs(units, {option: self.look(with_all(option)).plan for option in options})
        for activations in (ON_HOST, INPUTS_ON_HOST):
            _share_copies(costs, activations)
        for of_unit in costs:
            _combine(of_unit)
        beside_units = rich.seconds - sum(of_unit[_RICH].seconds for of_unit in costs)
        fastest = self._chosen(run, units, costs, beside_units)
        if self._offloads:  # whose copies hold each other up in ways that costs of units do not know
            here = [{o: cost for o, cost in of_unit.items() if "host" not in o[1]} for of_unit in costs]
            fastest = min(fastest, self._chosen(run, units, here, beside_units))
        return "no faster" if fastest == float("inf") else format_seconds(fastest)

    def _options(self, rich: Plan) -> list[Option]:
        """Returns the options that are planned for all units at once."""
        options = [_PLAIN, _RICH, _LEAN, (TO_BACKWARD, RECOMPUTED)]
        options += [(ALWAYS, STAY)] if _may_keep_longer(rich) else []
        return options + ([(FREED, ON_HOST)] if self._offloads else [])

    def _chosen(
        self,
        run: Recipe,
        units: Sequence[UnitRecipe],
        costs: Sequence[Mapping[Option, Cost]],
        beside_units: float,
    ) -> float:
        """Lets the solver choose, plans its answer, and corrects the budget by what the plan says.

        It stops where the answer would be slower than the best one. `beside_units` are the seconds of a step
        that no unit computes or waits for. Returns the least seconds that were found.
        """
        budget, seen, fastest = float(self.limit), set[tuple[Option, ...]](), float("inf")
        for _ in range(_LOOKS):
            chosen = choose(costs, budget)
            if chosen is None or tuple(chosen) in seen:
                break
            seen.add(tuple(chosen))
            estimate = beside_units + sum(of[option].seconds for of, option in zip(costs, chosen))
            if self.best is not None and estimate >= self.best.seconds * _SAME:
                break
            found = self.look(_with(run, units, chosen), costs)
            off = found.plan.needed_bytes - needed(costs, chosen)
            if self.fits(found):
                fastest = min(fastest, found.seconds)
                budget = self.limit - off
            else:
                budget = min(self.limit - off, needed(costs, chosen) - 1)
        return fastest

    # shards on the host

    def _improve_shards(self, best: Recipe) -> None:
        """Tries shards of some units on the host: of how many, is searched by halves of the way.

        All on the host are the fewest bytes, none the least time to copy; in between, what they free may hold
        activations that are computed again otherwise.
        """
        if best.offload == "none" and all(_option_of(unit) in (_RICH, (ALWAYS, STAY)) for unit in best.units):
            return  # more memory makes nothing faster
        run, units = replace(_run_of(best), offload="none"), best.units
        count = 0 if best.offload == "none" else len(units)
        order = self._by_gain(run, units)
        way = len(units) // 2
        while way:
            for tried in (count - way, count + way):
                before = self.best
                if 0 < tried < len(units):
                    self._try(run, order[:tried])
                if self.best is not before:
                    count = tried
                    break
            way //= 2
        near = order if len(order) <= _LOOKS else order[max(count - 2, 0) : count + 2]
        for name in near:  # of unlike units another one may fit better
            self._try(run, {*order[:count]} ^ {name})

    def _by_gain(self, run: Recipe, units: Sequence[UnitRecipe]) -> list[str]:
        """Returns the units by the bytes of shards that leave for each second lost.

        The larger of equal ones comes first, and the last of alike ones: its gradients are there first, and
        its shards are used last.
        """
        here, there = (
            {
                unit.name: unit
                for unit in self.planned(_with_all(replace(run, offload=offload), units, _RICH)).units
            }
            for offload in ("none", "all")
        )
        gains = []
        for at, name in enumerate(unit.modules[0] for unit in units):
            nbytes = here[name].shard_bytes
            lost = max(_busy(there[name]) - _busy(here[name]), 0.0) + nbytes / self.machine.host_bandwidth
            gains.append((float(f"{nbytes / lost if nbytes else 0.0:.1e}"), nbytes, at, name))
        return [name for *_, name in sorted(gains, reverse=True)]

    # single decisions

    def _improve_units(self) -> None:
        """Tries faster options of single units by whole plans; the costs deem them a little too large."""
        looks = 0
        while looks < _LOOKS:
            before = self.best
            assert before is not None
            for recipe in self._neighbours(before):
                looks += 1
                self.look(recipe, before.costs)
                if self.best is not before or looks == _LOOKS:
                    break
            else:
                return

    def _neighbours(self, found: _Found) -> Iterator[Recipe]:
        """Yields recipes, not planned yet, with a faster option of one unit that may well fit."""
        chosen = [_option_of(unit) for unit in found.recipe.units]
        room = self.limit * _NEARLY - found.plan.needed_bytes
        for steps in _steps(found.costs, chosen):
            recipe = _with(_run_of(found.recipe), found.recipe.units, steps)
            grows = needed(found.costs, steps) - needed(found.costs, chosen)
            if grows <= room and recipe not in self._known:
                yield recipe

    def _improve_run(self) -> None:
        """Tries other batches of collectives, and gathers that look further ahead or not at all."""
        assert self.best is not None
        for name, values in (("prefetch", (0, 2)), ("batch_bytes", _BATCHES)):
            for value in values:
                tried: Any = {name: value}
                self.look(replace(self.best.recipe, **tried), self.best.costs)

    # the page

    def _page(self, best: _Found) -> Recipe:
        plan, recipe = best.plan, best.recipe
        place, kinds = _tightest(plan, 4)
        notes = [*self.notes]
        notes.append(f"Predicted on {self.machine.title}, after {len(self._known)} plans")
        notes.append(f"Tightest {place}: {kinds}")
        if gains := [*_gains(best)]:
            notes.append("\n".join(["Against the other choice, by the units' own figures:", *gains]))
        notes.append("\n".join(["Tried, each with the best choice for its units:", *self._tried]))
        return replace(
            recipe,
            ranks=self.ranks,
            memory=self.limit,
            needed_bytes=plan.needed_bytes,
            predicted_seconds=plan.predicted_seconds,
            notes=tuple(notes),
        )

    def _nothing_fits(self) -> str:
        assert self.smallest is not None
        plan, recipe = self.smallest.plan, self.smallest.recipe
        place, kinds = _tightest(plan, 3)
        return (
            f"no recipe fits into {format_bytes(self.limit)} on {self.ranks} ranks: the least is "
            f"{format_bytes(plan.needed_bytes)} ({_format_run(recipe)}), at its tightest "
            f"{place} ({kinds}). {''.join(f'{line}. ' for line in plan.avoidable())}"
            f"{self._proposal(recipe)}, pass more memory, or let the step take a smaller batch"
        )

    def _proposal(self, recipe: Recipe) -> str:
        """Says on how many ranks the smallest recipe would fit."""
        for ranks in (self.ranks << times for times in range(1, _DOUBLINGS + 1)):
            if ranks <= MOST_RANKS and self.planned(recipe, ranks).needed_bytes <= self.limit:
                return f"It fits on {ranks} ranks: take those"
        return "More ranks alone do not help: take a smaller model"


def _run_of(recipe: Recipe) -> Recipe:
    """Returns a recipe without its units."""
    return replace(recipe, units=())


def _units_of(plan: Plan, groups: Mapping[str, tuple[str, ...]]) -> list[UnitRecipe]:
    """Returns the plan's units, in the order of their first forwards; `groups` are by their first module."""
    order = [moment.place.unit for moment in plan.moments if moment.place.phase == FORWARD]
    names = [unit.name for unit in plan.units if " (mesh " not in unit.name]
    order = [name for name in dict.fromkeys([*order, *names]) if name in names]
    return [UnitRecipe(groups.get(name, (name,))) for name in order]


def _with_all(run: Recipe, units: Sequence[UnitRecipe], option: Option) -> Recipe:
    return _with(run, units, [option] * len(units))


def _with(run: Recipe, units: Sequence[UnitRecipe], chosen: Sequence[Option]) -> Recipe:
    """Returns the recipe of a run with an option for each unit."""
    made = (
        replace(unit, parameters=parameters, activations=activations)
        for unit, (parameters, activations) in zip(units, chosen)
    )
    return replace(run, units=tuple(made))


def _may_keep_longer(plan: Plan) -> bool:
    """Whether parameters that stay after backward may save a gather: of frozen units, or between batches."""
    return any(unit.gathers > 1 or (unit.gathers and not unit.reductions) for unit in plan.units)


def _option_of(unit: UnitRecipe) -> Option:
    return unit.parameters, unit.activations


def _costs(units: Sequence[UnitRecipe], plans: Mapping[Option, Plan]) -> list[dict[Option, Cost]]:
    """Returns the cost of each option of each unit, from plans in which all units have it."""
    found: list[dict[Option, Cost]] = [{} for _ in units]
    names = [unit.modules[0] for unit in units]
    for option, made in plans.items():
        figures = {unit.name: unit for unit in made.units}
        held = [
            figures[name].activation_bytes + figures[name].gathered_bytes * (option[0] != FREED)
            for name in names
        ]
        beside = _beside(names, made, held)
        for at, name in enumerate(names):
            found[at][option] = Cost(_busy(figures[name]), held[at], beside[at])
    return found


def _busy(unit: UnitPlan) -> float:
    """Returns the seconds in which a unit computes or is waited for."""
    return (unit.compute_seconds or 0.0) + (unit.wait_seconds or 0.0)


def _share_copies(costs: Sequence[dict[Option, Cost]], activations: str) -> None:
    """Shares the time of copies between the units that cause it: all queue for one way to the host."""
    option, plain = (FREED, activations), _PLAIN if activations == ON_HOST else _LEAN
    if any(option not in of_unit for of_unit in costs):
        return
    moved = [max(of_unit[plain].held - of_unit[option].held, 0.0) for of_unit in costs]
    seconds = sum(of_unit[option].seconds - of_unit[plain].seconds for of_unit in costs)
    for of_unit, nbytes in zip(costs, moved):
        share = seconds * nbytes / (sum(moved) or 1.0)
        of_unit[option] = of_unit[option]._replace(seconds=of_unit[plain].seconds + share)


def _combine(costs: dict[Option, Cost]) -> None:
    """Adds the options that were not planned: both decisions of a unit change its costs by themselves."""
    planned, plain = dict(costs), costs[_PLAIN]
    for parameters in (TO_BACKWARD, ALWAYS):
        for activations in (RECOMPUTED, ON_HOST, INPUTS_ON_HOST):
            first, second = planned.get((parameters, STAY)), planned.get((FREED, activations))
            if first is not None and second is not None and (parameters, activations) not in planned:
                seconds, held, beside = (a + b - c for a, b, c in zip(first, second, plain))
                costs[parameters, activations] = Cost(max(seconds, 0.0), held, beside)


def _beside(names: Sequence[str], plan: Plan, held: Sequence[int]) -> list[float]:
    """Returns for each unit the most bytes at its places in the step, without those that units hold there."""
    most, at = [0.0] * len(names), 0
    index = {name: at for at, name in enumerate(names)}
    before = [sum(held[: at + 1]) for at in range(len(held))]
    for moment in plan.moments:
        unit = index.get(moment.place.unit, 0)
        if moment.place.phase == FORWARD:
            at = max(at, unit)
        elif moment.place.phase == BACKWARD and moment.place.unit:
            at = unit
        elif moment.place.phase == OPTIMIZER:
            at = 0
        most[at] = max(most[at], moment.nbytes - before[at])
    return most


def _steps(costs: Sequence[Mapping[Option, Cost]], chosen: Sequence[Option]) -> Iterator[list[Option]]:
    """Yields choices with a faster option of one unit, the fastest first; one of alike units."""
    found: dict[Any, tuple[float, list[Option]]] = {}
    for at, of_unit in enumerate(costs):
        for option, cost in of_unit.items():
            gain = of_unit[chosen[at]].seconds - cost.seconds
            if gain > 0:
                kind = (tuple(each[:2] for each in of_unit.values()), chosen[at], option)
                found[kind] = gain, [*chosen[:at], option, *chosen[at + 1 :]]
    yield from (steps for _, steps in sorted(found.values(), key=lambda each: -each[0]))


def _gains(best: _Found) -> Iterator[str]:
    """Yields a line for each kind of decision: what it costs and gains against the plain choice."""
    by_option: dict[Option, list[int]] = {}
    for at, unit in enumerate(best.recipe.units if best.costs else ()):
        by_option.setdefault(_option_of(unit), []).append(at)
    for option, members in by_option.items():
        for title, other in (("parameters", (FREED, option[1])), ("activations", (option[0], STAY))):
            if other == option:
                continue
            pairs = [
                (best.costs[at][option], best.costs[at][other]) for at in members if other in best.costs[at]
            ]
            seconds = sum(own.seconds - against.seconds for own, against in pairs)
            held = sum(own.held - against.held for own, against in pairs)
            names = format_names([best.recipe.units[at].modules for at in members])
            word = option[0] if title == "parameters" else option[1]
            yield f"  {names} {word}: {_format_change(seconds, held)}"


def _format_change(seconds: float, held: float) -> str:
    time = f"{'costs' if seconds > 0 else 'saves'} {format_seconds(abs(seconds))}"
    return f"{time}, {'takes' if held > 0 else 'frees'} {format_bytes(round(abs(held)))}"


def _format_run(run: Recipe) -> str:
    parts = [f"offload {run.offload}"]
    if run.ranks_per_replica is not None:
        parts.append(f"replicas of {run.ranks_per_replica} ranks")
    if run.state_over_replicas:
        parts.append("state over replicas")
    if run.together != 1:
        parts.append(f"{run.together} blocks a unit" if run.together else "one unit")
    return ", ".join(parts)


def _tightest(plan: Plan, most: int) -> tuple[str, str]:
    """Returns where a plan needs the most bytes, and the largest kinds of memory in its step."""
    place = f"in {max(plan.moments, key=lambda moment: moment.nbytes).place}"
    if plan.needed_bytes > plan.peak_bytes:
        first = plan.first_peak_bytes == plan.needed_bytes
        place = "in the first step" if first else "while the model is built"
    kinds = sorted(plan.peak_by_kind.items(), key=lambda item: -item[1])[:most]
    return place, ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in kinds)
