"""`causes_of`: what makes a sharded run differ from a plain one, told from what both have shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fsdp_wrap._core import encloses, listed
from fsdp_wrap._values import files
from fsdp_wrap._values.compare import Departure, apart
from fsdp_wrap._values.finding import quoted, ranked
from fsdp_wrap._values.verdict import Verdict
from fsdp_wrap._values.verifying.pair import Pair, factor

_CURES = {
    "optimizer of other parameters": "make it of model.parameters() after sharding",
    "weights not synchronised": "seed ranks alike, pass sync_module_states=True, or load before sharding",
    "the same batch on all ranks": "use a DistributedSampler, or seed what draws the batch by the rank",
    "other parameters are trained": "freeze before wrapping: a flat parameter is trained as a whole",
    "other options of the optimizer": "make groups by names, not by p.ndim: shards are flat or cut",
    "gradients not reduced before the step": "leave no_sync() for the last micro-batch",
    "step before the backward": "call loss.backward() before optimizer.step()",
    "step without gradients": "call zero_grad() after optimizer.step(), not before it",
    "zero_grad missing": "call optimizer.zero_grad() in each step",
    "clipping by local norms": "use clip_grad_norm_() of the wrapper, or that of fsdp_wrap",
    "other weights": "give both runs one seed or checkpoint, also for what is built on the meta device",
    "other input": "let step() take the rows of rank get_rank() of get_world_size() out of one batch",
    "other update": "use an optimizer that computes element by element, or fsdp_wrap.optim",
    "not finite": "look with fsdp_wrap.find_nonfinite()",
    "statistics of the rank's batch": "use SyncBatchNorm or a norm over features, or call eval() on it",
    "random numbers": "turn functional dropout and noise off in setup(); modules of dropout are off",
    "other computation": "look for what depends on the rank, or on other rows",
    "mean of means": "divide each rank's sum by the mean number of all ranks, or use fsdp_wrap.uneven()",
    "divided by the ranks twice": "do not divide the loss; multiply a sum over rows by the number of ranks",
    "not divided by the ranks": "do not multiply the loss, and leave the divide factor as it is",
    "scale": "look for a factor of the loss: micro-batches, rows, tokens, a loss scale",
    "gradients changed before the step": "look for what changes param.grad on each rank alone",
    "parameter used outside of its unit": "compute the loss in the root's forward, or of full_tensor()",
    "other loss": "look how the loss counts rows, tokens and micro-batches: ranks are averaged",
}
_AT_LAST = "compare records of both runs: fsdp_wrap.record_values()"
_GRADIENTS = (files.OUTPUT_GRADIENT, files.INPUT_GRADIENT, files.GRADIENT, files.REDUCED, files.STEP)


@dataclass(frozen=True)
class Cause:
    """One thing that is wrong.

    Attributes:
        kind: Its name.
        told: Sentences about how it shows.
    """

    kind: str
    told: str

    @property
    def cure(self) -> str:
        """A sentence about how to mend it."""
        return _CURES.get(self.kind, _AT_LAST)


def causes_of(pair: Pair, verdict: Verdict | None) -> list[Cause]:
    """Returns the causes, the first one first; none for a run that is right."""
    if not any(observed.options for observed in pair.sharded):
        told = (
            f"The optimizer ({pair.sharded[0].optimizer}) holds no parameter of the sharded model. No step "
            "was run"
        )
        return [Cause("optimizer of other parameters", told)]
    causes = [cause for check in _CHECKS if (cause := check(pair)) is not None]
    large = verdict.first if verdict is not None and verdict.kind not in ("equal", "rounding") else None
    if not causes and verdict is not None and large is not None:
        kind, told = _explained(pair, verdict, large)
        unit = quoted(large.unit)
        spot = (
            f"First at the {large.seam} of unit {unit} in step {large.step}, by {large.size:.1e} of its size"
        )
        causes.append(Cause(kind, f"{spot}. {told}"))
    return causes


def _unsynchronised(pair: Pair) -> Cause | None:
    """Compares the pieces of each rank with the same pieces of the plain module."""
    plain = pair.plain.begins
    others = [
        {place[0] for place, value in observed.begins.items() if plain.get(place, value) != value}
        for observed in pair.sharded
    ]
    if others[0] or not any(others):
        return None
    ranks = [rank for rank, names in enumerate(others) if names]
    names = listed(map(quoted, sorted(set[str]().union(*others))))
    told = (
        f"Before the first step, rank 0 holds the values of the plain model, and {ranked(ranks)} other ones, "
        f"of {names}"
    )
    return Cause("weights not synchronised", f"{told}: what is trained is a mixture of models")


def _same_batch(pair: Pair) -> Cause | None:
    """Looks whether the inputs of all units are the same bits on all ranks."""
    count = pair.ranks.ranks
    if count == 1 or pair.ranks.contributors != count or not pair.ranks.steps:
        return None
    by_rank = [pair.rows(pair.ranks.steps[0], files.INPUT, rank) for rank in range(count)]
    sums = [{unit: (row.checksum, row.numel) for unit, row in rows.items()} for rows in by_rank]
    if not sums[0] or any(of_rank != sums[0] for of_rank in sums):
        return None
    told = (
        f"In the first step all {count} ranks compute with the same inputs, bit for bit: they learn no more "
        "than one"
    )
    return Cause("the same batch on all ranks", told)


def _frozen(pair: Pair) -> Cause | None:
    """Compares the names of the parameters that get gradients."""
    given = frozenset[str]().union(*(observed.given for observed in pair.sharded))
    trained = frozenset[str]().union(*(observed.trained for observed in pair.sharded))
    more, less = sorted(trained - pair.plain.given), sorted(pair.plain.trained - given)
    if not pair.plain.given or not given or not (more or less):
        return None
    told = [f"The sharded run trains {listed(more)}, and the plain one does not"] if more else []
    told += [f"The plain run trains {listed(less)}, and the sharded one does not"] if less else []
    return Cause("other parameters are trained", ". ".join(told))


def _other_options(pair: Pair) -> Cause | None:
    """Compares the options with which optimizers hold each parameter, as far as both optimizers have them."""
    for observed in pair.sharded:
        for name, plain in pair.plain.options.items():
            now = observed.options.get(name)
            keys = [key for key in plain if now is not None and now.get(key, plain[key]) != plain[key]]
            if now is not None and not keys:
                continue
            ours = "no optimizer" if now is None else ", ".join(f"{key}={now[key]}" for key in keys)
            theirs = ", ".join(f"{key}={plain[key]}" for key in keys) or "one"
            told = (
                f"The parameter {quoted(name)} has {ours} in the sharded run, and {theirs} in the plain one"
            )
            return Cause("other options of the optimizer", told)
    return None


def _unreduced(pair: Pair) -> Cause | None:
    """Compares the reduced gradient with the mean of the ranks' own."""
    for step in pair.ranks.steps if pair.ranks.ranks > 1 else ():
        passes = pair.ranks.records[0].steps[step].passes
        own, reduced = pair.own_gradients(step).sum(0), pair.reduced(step)
        missing = not reduced.norm()
        if own.norm() and (missing or (passes > 1 and apart(own, reduced) > max(0.1, pair.tolerance(step)))):
            share = (reduced.norm() / own.norm()).item()
            told = (
                f"In step {step} the ranks have gradients of {passes} forwards, and the optimizer steps "
                f"before they are summed: the reduced gradient has {share:.2g} times the size of their mean"
            )
            return Cause("gradients not reduced before the step", told)
    return None


def _without_gradients(pair: Pair) -> Cause | None:
    """Looks whether the plain run's optimizer sees no gradients, in the first step at least."""
    steps = pair.alone.steps
    if not steps or not pair.norm(steps[0], files.REDUCED) or pair.norm(steps[0], files.STEP):
        return None
    if pair.plain.early:
        told = (
            "In both runs the optimizer steps before the backward, so it sees no gradients in the first step"
        )
        return Cause("step before the backward", told)
    told = (
        "In both runs there are gradients after the backward, and none when the optimizer steps: it trains "
        "nothing"
    )
    return Cause("step without gradients", told)


def _kept_gradients(pair: Pair) -> Cause | None:
    """Looks whether a step has its own gradients, or the sum with those of the step before."""
    for before, step in zip(pair.alone.steps, pair.alone.steps[1:]):
        seen, own, old = (
            pair.sketch(number, seam)
            for number, seam in ((step, files.STEP), (step, files.REDUCED), (before, files.STEP))
        )
        alone, together = factor(own, seen), factor(own + old, seen)
        if old.norm() and (alone is None or alone > 1.02) and together is not None and together <= 1.02:
            told = f"In both runs the gradients of step {before} are still there in step {step}, and so on"
            return Cause("zero_grad missing", told)
    return None


def _clipped_alone(pair: Pair) -> Cause | None:
    """Looks whether each rank has scaled its shards to the norm that the whole gradient should have."""
    for step in pair.steps:
        norm = pair.norm(step, files.STEP)
        right = factor(pair.sketch(step, files.REDUCED), pair.sketch(step, files.STEP))
        if not right or right > 0.999:
            continue
        clippings = [_clipping_of(pair, step, rank, norm) for rank in range(pair.ranks.ranks)]
        held = [clipping for clipping in clippings if clipping is not None]
        if len(held) == len(clippings) and any(abs(clipping / right - 1) > 0.01 for clipping in held):
            scaled = ", ".join(f"rank {rank} by {clipping:.3g}" for rank, clipping in enumerate(held))
            told = (
                f"In step {step} each rank has clipped its own shards to a norm of {norm:.3g}: {scaled}. "
                f"The plain run has clipped the whole gradient to it, by {right:.3g}"
            )
            return Cause("clipping by local norms", told)
    return None


def _clipping_of(pair: Pair, step: int, rank: int, norm: float) -> float | None:
    """Returns the factor by which a rank has clipped to a norm by itself; None if it has not."""
    clipping = factor(pair.sketch(step, files.REDUCED, rank), pair.sketch(step, files.STEP, rank))
    own = pair.norm(step, files.STEP, rank)
    fits = (
        own <= norm * 1.02 if clipping is None or clipping > 0.999 else math.isclose(own, norm, rel_tol=0.02)
    )
    return clipping if fits else None


_CHECKS: tuple[Callable[[Pair], Cause | None], ...] = (
    *(_unsynchronised, _same_batch, _frozen, _other_options),
    *(_unreduced, _without_gradients, _kept_gradients, _clipped_alone),
)


# The first departure: its kind, and a sentence about it.


def _explained(pair: Pair, verdict: Verdict, large: Departure) -> tuple[str, str]:
    if verdict.kind == "not finite":
        return verdict.kind, "One run has values that are not finite"
    if large.seam in _GRADIENTS:
        return _of_gradients(pair, verdict, large)
    if large.seam == files.SHARD and large.step == pair.steps[0]:
        return "other weights", "The two runs begin with other weights, on rank 0 too"
    if verdict.kind == "other input":
        counts = [totals.sums.numel for totals in large.before]
        if counts[0] != counts[1]:
            return (
                verdict.kind,
                f"The ranks have {counts[1]} elements together, and the plain run {counts[0]}",
            )
        return verdict.kind, "The ranks have other values than the plain run"
    if large.seam in (files.INPUT, files.OUTPUT):
        return _of_forward(pair, verdict, large)
    if large.seam == files.UPDATE:
        return "other update", f"{pair.plain.optimizer} gets equal gradients and makes another update"
    return verdict.kind, verdict.told


def _of_forward(pair: Pair, verdict: Verdict, large: Departure) -> tuple[str, str]:
    norms = [
        name for name in pair.plain.batch_norms if large.seam == files.INPUT or encloses(large.unit, name)
    ]
    if norms:
        return _of_batch_norms(norms)
    if any(before != after for before, after in (*pair.sharded[0].randoms, *pair.plain.randoms)):
        return "random numbers", "What goes in is equal, and the forward draws random numbers"
    return verdict.kind, "What goes in is equal, and what comes out is not"


def _of_batch_norms(names: Sequence[str]) -> tuple[str, str]:
    told = f"{listed(map(quoted, names))} normalises by the rows of a rank, and in the plain run by all rows"
    return "statistics of the rank's batch", told


def _of_gradients(pair: Pair, verdict: Verdict, large: Departure) -> tuple[str, str]:
    """Finds how much the gradient of each rank counts."""
    target, own = pair.sketch(large.step, files.GRADIENT), pair.own_gradients(large.step)
    weights = torch.linalg.lstsq(own.T, target.unsqueeze(1), driver="gelsd").solution.flatten()
    tolerance = pair.tolerance(large.step)
    if apart(weights @ own, target) <= tolerance:
        least, most = weights.min().item(), weights.max().item()
        if most - least > tolerance * most > 0:
            counted = ", ".join(
                f"those of rank {rank} {1 / w:.3g} times" for rank, w in enumerate(weights.tolist())
            )
            told = (
                f"Rows count otherwise than in one mean over all: {counted} as much. Each rank takes the "
                "mean of its own rows or tokens, and the ranks have other numbers of them"
            )
            return "mean of means", told
        if abs(least - 1) > tolerance or verdict.kind in ("scale", "doubled sum"):
            return _scaled(1 / least, pair.ranks.ranks)
    if pair.plain.batch_norms:
        return _of_batch_norms(pair.plain.batch_norms)
    if large.seam == files.STEP:
        told = "The reduced gradients are equal, and those that the optimizer sees are not"
        return "gradients changed before the step", told
    if any(departure.seam == files.OUTPUT_GRADIENT and departure.exceeds for departure in verdict.steps):
        told = (
            "Outputs are equal and their gradients are not: the loss of a rank's rows is no part of that "
            "of all rows"
        )
        return "other loss", told
    told = (
        "Outputs and their gradients are equal, so a parameter of this unit is used outside of its "
        "forward, and the gradients of that are not averaged, or are those of a piece"
    )
    return "parameter used outside of its unit", told


def _scaled(by: float, ranks: int) -> tuple[str, str]:
    told = f"The gradients are {by:.3g} times those of the plain run"
    if math.isclose(by, 1 / ranks, rel_tol=0.02):
        told += f": one of {ranks} ranks. Gradients are averaged over the ranks already"
        return "divided by the ranks twice", told
    if math.isclose(by, ranks, rel_tol=0.02):
        return "not divided by the ranks", f"{told}: the number of ranks"
    return "scale", told
