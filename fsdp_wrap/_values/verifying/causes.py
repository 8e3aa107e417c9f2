"""`causes_of`: what makes a sharded run differ from a plain one, told from what both have shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fsdp_wrap._core import encloses, listed
from fsdp_wrap._values import files
from fsdp_wrap._values.compare import Departure
from fsdp_wrap._values.finding import quoted
from fsdp_wrap._values.verdict import Verdict
from fsdp_wrap._values.verifying.pair import Pair, apart, factor


@dataclass(frozen=True)
class Cause:
    """One thing that is wrong.

    Attributes:
        kind: Its name.
        told: Sentences about how it shows.
        cure: A sentence about how to mend it.
    """

    kind: str
    told: str
    cure: str


_Check = Callable[[Pair], Cause | None]


def causes_of(pair: Pair, verdict: Verdict | None) -> list[Cause]:
    """Returns the causes, the first one first; none for a run that is right."""
    if (elsewhere := _other_optimizer(pair)) is not None:
        return [elsewhere]
    found = [cause for check in _CHECKS if (cause := check(pair)) is not None]
    large = verdict.first if verdict is not None else None
    if not found and verdict is not None and large is not None and verdict.kind not in ("equal", "rounding"):
        found.append(_explained(pair, verdict, large))
    return found


def _other_optimizer(pair: Pair) -> Cause | None:
    if any(each.options for each in pair.sharded):
        return None
    return Cause(
        "optimizer of other parameters",
        f"The optimizer ({pair.sharded[0].optimizer}) holds no parameter of the sharded model, so it "
        "trains nothing. No step was run",
        "Make it of model.parameters() after sharding",
    )


def _unsynchronised(pair: Pair) -> Cause | None:
    """Compares what each rank holds with the same pieces of the plain module."""
    plain = pair.plain.begins
    others = [
        sorted({place[0] for place, value in each.begins.items() if plain.get(place, value) != value})
        for each in pair.sharded
    ]
    if others[0] or not any(others):
        return None
    ranks = [rank for rank, names in enumerate(others) if names]
    names = sorted({name for each in others for name in each})
    return Cause(
        "weights not synchronised",
        f"Before the first step, rank 0 holds the values of the plain model, and {_ranks(ranks)} other "
        f"ones, of {listed([quoted(name) for name in names])}: each rank has built a model of its own, and "
        "what is trained is a mixture of them",
        "Seed all ranks alike before the model is built, pass sync_module_states=True to the wrapper, or "
        "broadcast or load the weights before sharding",
    )


def _same_batch(pair: Pair) -> Cause | None:
    """Looks whether the inputs of all units are the same bits on all ranks."""
    count = pair.ranks.ranks
    if count == 1 or pair.ranks.contributors != count or not pair.ranks.steps:
        return None
    by_rank = [pair.rows(pair.ranks.steps[0], files.INPUT, rank) for rank in range(count)]
    sums = [{unit: (row.checksum, row.numel) for unit, row in rows.items()} for rows in by_rank]
    if not sums[0] or any(each != sums[0] for each in sums):
        return None
    return Cause(
        "the same batch on all ranks",
        f"In the first step all {count} ranks compute with the same inputs, bit for bit: {count} ranks "
        "learn no more than one would",
        "Give each rank rows of its own: use a DistributedSampler, or seed what draws the batch by the rank",
    )


def _frozen(pair: Pair) -> Cause | None:
    """Compares the names of the parameters that get gradients."""
    sharded = frozenset[str]().union(*(each.trained for each in pair.sharded))
    plain = pair.plain.trained
    if not plain or not sharded or plain == sharded:
        return None
    more, less = sorted(sharded - plain), sorted(plain - sharded)
    told = [f"The sharded run trains {listed(more)}, and the plain one does not"] if more else []
    told += [f"The plain run trains {listed(less)}, and the sharded one does not"] if less else []
    return Cause(
        "other parameters are trained",
        ". ".join(told),
        "Freeze parameters before wrapping: after it the modules show pieces or copies, and a flat "
        "parameter is trained as a whole. Give the optimizer the same parameters in both",
    )


def _other_options(pair: Pair) -> Cause | None:
    """Compares the options with which optimizers hold each parameter."""
    plain = pair.plain.options
    for each in pair.sharded:
        for name in [name for name in plain if name not in each.options or each.options[name] != plain[name]]:
            if each.options:
                now = each.options.get(name)
                told = "no optimizer holds it" if now is None else f"it has {_only(now, plain[name])}"
                alone = "an optimizer holds it" if now is None else _only(plain[name], now)
                return Cause(
                    "other options of the optimizer",
                    f"In the sharded run {told}, and in the plain one {alone}: the parameter {quoted(name)}",
                    "Make parameter groups by names, not by p.ndim or p.shape: sharded parameters are "
                    "flat or cut. Make the optimizer of all parameters after sharding",
                )
    return None


def _unreduced(pair: Pair) -> Cause | None:
    """Compares the reduced gradient with the mean of the ranks' own."""
    for step in pair.ranks.steps if pair.ranks.ranks > 1 else ():
        passes = pair.ranks.records[0].steps[step].passes
        own, reduced = pair.own_gradients(step).sum(0), pair.reduced(step)
        missing = not reduced.numel() or not reduced.norm()
        if own.norm() and (missing or (passes > 1 and apart(own, reduced) > pair.tolerance(step))):
            share = 0.0 if missing else (reduced.norm() / own.norm()).item()
            return Cause(
                "gradients not reduced before the step",
                f"In step {step} the ranks have gradients of {passes} forwards, and the optimizer steps "
                f"before they are summed: the reduced gradient has {share:.2g} times the size of their mean",
                "Leave no_sync(), or call set_requires_gradient_sync(True), for the last micro-batch before "
                "optimizer.step()",
            )
    return None


def _without_gradients(pair: Pair) -> Cause | None:
    """Looks whether the plain run's optimizer sees no gradients, in the first step at least."""
    steps = pair.alone.steps
    if not steps or not pair.norm(steps[0], files.REDUCED) or pair.norm(steps[0], files.STEP):
        return None
    if pair.plain.early:
        return Cause(
            "step before the backward",
            "In both runs the optimizer steps before the backward of the step, so it sees no gradients in "
            "the first",
            "Call loss.backward() before optimizer.step()",
        )
    return Cause(
        "step without gradients",
        "In both runs there are gradients after the backward, and none when the optimizer steps: it "
        "trains nothing",
        "Call zero_grad() after optimizer.step(), not between the backward and the step",
    )


def _kept_gradients(pair: Pair) -> Cause | None:
    """Looks whether a step has its own gradients, or the sum with those of the step before."""
    for before, step in zip(pair.alone.steps, pair.alone.steps[1:]):
        seen, own = pair.sketch(step, files.STEP), pair.sketch(step, files.REDUCED)
        old = pair.sketch(before, files.STEP)
        alone, together = factor(own, seen), factor(own + old, seen)
        if old.norm() and (alone is None or alone > 1.02) and together is not None and together <= 1.02:
            return Cause(
                "zero_grad missing",
                f"In both runs the gradients of step {before} are still there in step {step}: the "
                "optimizer sees the sum of all steps so far",
                "Call optimizer.zero_grad() in each step",
            )
    return None


def _clipped_alone(pair: Pair) -> Cause | None:
    """Looks whether each rank has scaled its shards to the norm that the whole gradient should have."""
    for step in pair.steps:
        norm = pair.norm(step, files.STEP)
        right = factor(pair.sketch(step, files.REDUCED), pair.sketch(step, files.STEP))
        if not right or right > 0.999:
            continue
        found = [_clipping_of(pair, step, rank, norm) for rank in range(pair.ranks.ranks)]
        held = [each for each in found if each is not None]
        if len(held) == len(found) and any(abs(each / right - 1) > 0.01 for each in held):
            scaled = ", ".join(f"rank {rank} by {each:.3g}" for rank, each in enumerate(held))
            return Cause(
                "clipping by local norms",
                f"In step {step} each rank has clipped its own shards to a norm of {norm:.3g}: {scaled}. "
                f"The plain run has clipped the whole gradient to it, by {right:.3g}",
                "Clip by model.clip_grad_norm_() of the wrapper, or fsdp_wrap.clip_grad_norm_(): "
                "torch.nn.utils.clip_grad_norm_ sees the rank's pieces alone",
            )
    return None


def _clipping_of(pair: Pair, step: int, rank: int, norm: float) -> float | None:
    """Returns the factor by which a rank has clipped to a norm by itself; None if it has not."""
    found = factor(pair.sketch(step, files.REDUCED, rank), pair.sketch(step, files.STEP, rank))
    own = pair.norm(step, files.STEP, rank)
    fits = own <= norm * 1.02 if found is None or found > 0.999 else math.isclose(own, norm, rel_tol=0.02)
    return found if fits else None


_CHECKS: tuple[_Check, ...] = (
    *(_unsynchronised, _same_batch, _frozen, _other_options),
    *(_unreduced, _without_gradients, _kept_gradients, _clipped_alone),
)


# The first departure.


def _explained(pair: Pair, verdict: Verdict, large: Departure) -> Cause:
    """Returns the cause of the first departure."""
    if verdict.kind == "not finite":
        return Cause(verdict.kind, f"{_spot(large)}. {verdict.told}", "Look with fsdp_wrap.find_nonfinite()")
    if large.seam in (files.OUTPUT_GRADIENT, files.INPUT_GRADIENT, files.GRADIENT, files.REDUCED, files.STEP):
        return _of_gradients(pair, verdict, large)
    begins = large.step == pair.steps[0]
    if large.seam == files.SHARD and begins:
        return Cause(
            "other weights",
            f"{_spot(large)}. Before the first step the two runs have other weights, on rank 0 too",
            "Let setup() give both the same: seed before the model is built, load one checkpoint, and "
            "initialise what is built on the meta device as the plain module is",
        )
    if verdict.kind == "other input":
        counts = [each.sums.numel for each in large.before]
        told = f"the ranks have {counts[1]} elements together, and the plain run {counts[0]}"
        return Cause(
            verdict.kind,
            f"{_spot(large)}: "
            f"{told if counts[0] != counts[1] else 'the ranks have other values than the plain run'}",
            "Let step() take the rows of one batch: those of torch.distributed.get_rank() of "
            "get_world_size()",
        )
    if large.seam in (files.INPUT, files.OUTPUT):
        return _of_forward(pair, verdict, large)
    if large.seam == files.UPDATE:
        return Cause(
            "other update",
            f"{_spot(large)}. The optimizer ({pair.plain.optimizer}) gets equal gradients and makes "
            "another update",
            "Use one that computes element by element, or fsdp_wrap.optim: others need whole parameters, "
            "not pieces",
        )
    return Cause(verdict.kind, f"{_spot(large)}. {verdict.told}", "Compare by fsdp_wrap.record_values()")


def _of_batch_norms(large: Departure, names: Sequence[str]) -> Cause:
    return Cause(
        "statistics of the rank's batch",
        f"{_spot(large)}. {listed([quoted(name) for name in names])} normalises by the rows of a rank, and "
        "in the plain run by all rows",
        "Use torch.nn.SyncBatchNorm, or a norm over features, or freeze the statistics by eval()",
    )


def _of_forward(pair: Pair, verdict: Verdict, large: Departure) -> Cause:
    norms = [
        name for name in pair.plain.batch_norms if large.seam == files.INPUT or encloses(large.unit, name)
    ]
    if norms:
        return _of_batch_norms(large, norms)
    if any(before != after for before, after in (*pair.sharded[0].randoms, *pair.plain.randoms)):
        return Cause(
            "random numbers",
            f"{_spot(large)}. What goes in is equal, and the forward draws random numbers",
            "Turn functional dropout and noise off in setup(): modules of dropout are off already",
        )
    return Cause(
        verdict.kind,
        f"{_spot(large)}. What goes in is equal, and what comes out is not",
        "Look for what depends on the rank, on the number of rows, or on other ranks' rows",
    )


def _of_gradients(pair: Pair, verdict: Verdict, large: Departure) -> Cause:
    """Finds how much the gradient of each rank counts."""
    step, count = large.step, pair.ranks.ranks
    target, own = pair.sketch(step, files.GRADIENT), pair.own_gradients(step)
    weights = torch.linalg.lstsq(own.T, target.unsqueeze(1), driver="gelsd").solution.flatten()
    if apart(weights @ own, target) <= pair.tolerance(step):
        least, most = weights.min().item(), weights.max().item()
        if most - least > pair.tolerance(step) * most > 0:
            told = ", ".join(
                f"those of rank {rank} {1 / w:.3g} times" for rank, w in enumerate(weights.tolist())
            )
            return Cause(
                "mean of means",
                f"{_spot(large)}. Rows count otherwise than in one mean over all: {told} as much. Each "
                "rank takes the mean of its own rows or tokens, and the ranks have other numbers of them",
                "Divide each rank's sum by the mean number over all ranks (all_reduce it before the "
                "backward), or use fsdp_wrap.uneven() and its weights",
            )
        if abs(least - 1) > pair.tolerance(step) or verdict.kind in ("scale", "doubled sum"):
            return _scaled(large, 1 / least, count)
    if pair.plain.batch_norms:
        return _of_batch_norms(large, pair.plain.batch_norms)
    outputs = [each for each in verdict.steps if each.seam == files.OUTPUT_GRADIENT and each.exceeds]
    if large.seam == files.STEP:
        return Cause(
            "gradients changed before the step",
            f"{_spot(large)}. The reduced gradients are equal, and those that the optimizer sees are not",
            "Look for what changes param.grad on each rank alone: clipping by value or norm, scaling, noise",
        )
    if not outputs:
        return Cause(
            "parameter used outside of its unit",
            f"{_spot(large)}. Outputs and their gradients are equal, so a parameter of this unit is used "
            "outside of its forward, and the ranks' gradients of that are not averaged, or are those of a "
            "piece",
            "Compute the loss in the forward of the root, or use full_tensor() of the parameter "
            "(fully_shard)",
        )
    return Cause(
        "other loss",
        f"{_spot(large)}. Outputs are equal and their gradients are not: the loss of the ranks' rows is no "
        "part of that of all rows",
        "Look how the loss counts rows, tokens and micro-batches: gradients are averaged over the ranks",
    )


def _scaled(large: Departure, by: float, ranks: int) -> Cause:
    told = f"{_spot(large)}. The gradients are {by:.3g} times those of the plain run"
    if math.isclose(by, 1 / ranks, rel_tol=0.02):
        return Cause(
            "divided by the ranks twice",
            f"{told}: one of {ranks} ranks. Gradients are averaged over the ranks already",
            "Do not divide the loss by the number of ranks. If it is a sum over rows, multiply it by the "
            "number of ranks",
        )
    if math.isclose(by, ranks, rel_tol=0.02):
        return Cause(
            "not divided by the ranks",
            f"{told}: the number of ranks",
            "Do not multiply the loss by the number of ranks, and leave the divide factor as it is",
        )
    return Cause(
        "scale",
        told,
        "Look for a factor of the loss: the number of micro-batches, of rows or tokens, or a loss scale",
    )


def _spot(large: Departure) -> str:
    unit = quoted(large.unit)
    return f"First at the {large.seam} of unit {unit} in step {large.step}, by {large.size:.1e} of its size"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _only(options: str, others: str) -> str:
    """Returns the options that differ."""
    found = [each for each in options.split(", ") if each not in others.split(", ")]
    return ", ".join(found) or options
