"""`reproducible`: a model whose numbers do not depend on the number of ranks."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from fsdp_wrap._by_hand import require_idle
from fsdp_wrap._checks import refuse_unsharded, require_root
from fsdp_wrap._core import check_flag, check_kind
from fsdp_wrap._params import Buffers
from fsdp_wrap._reproducible.refusals import (
    norms_over_batches,
    refuse_aligned,
    refuse_others_sums,
    refuse_training,
    refuse_unowned,
    warn_of_kernels,
)
from fsdp_wrap._reproducible.steps import CountedSteps
from fsdp_wrap._runtime import Step, Unit, step_of, units_in


class Reproducible:
    """The micro-batches of a model from `reproducible`: this rank's, and their random numbers.

    Attributes:
        indices: This rank's micro-batches of each step, in the order in which it has to run them.
        micro_batch_count: The number of micro-batches in a step over all ranks.
    """

    def __init__(
        self, steps: Sequence[Step], indices: range, micro_batches: int, seed: int, average: bool
    ) -> None:
        self.indices, self.micro_batch_count = indices, micro_batches
        self._seed = seed
        self._steps = [CountedSteps(step, micro_batches, average) for step in steps]

    def micro_batches(self, step: int) -> Iterator[int]:
        """Yields this rank's micro-batches of a step, and seeds the generators for each.

        Args:
            step: Number of the step; the seeds depend on it.

        Raises:
            RuntimeError: If there was not just one backward for one of them.
        """
        for index in self.indices:
            before = self._backwards
            self.seed(step, index)
            yield index
            if self._backwards != before + 1:
                raise RuntimeError(
                    f"micro-batch {index} of step {step} had {self._backwards - before} backwards: a "
                    "reproducible model needs one for each, of the whole loss"
                )

    def seed_of(self, step: int, index: int) -> int:
        """Returns a number for generators of a micro-batch, such as those that choose or augment data.

        Args:
            step: Number of the step.
            index: Number of the micro-batch.
        """
        digest = hashlib.blake2b(f"{self._seed} {step} {index}".encode(), digest_size=7)
        return int.from_bytes(digest.digest(), "big")

    def seed(self, step: int, index: int) -> None:
        """Seeds the default generators of torch on all devices, of Python, and of NumPy if it is loaded.

        Nothing puts the former states back.

        Args:
            step: Number of the step.
            index: Number of the micro-batch.
        """
        number = self.seed_of(step, index)
        torch.manual_seed(number)
        random.seed(number)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(number % 2**32)

    def remove(self) -> None:
        """Lets the model sum as usual again; sums of a step that has not ended are dropped."""
        for steps in self._steps:
            steps.remove()

    @property
    def _backwards(self) -> int:
        return max(steps.backwards for steps in self._steps)


def reproducible(
    model: nn.Module, *, micro_batches: int, seed: int = 0, average: bool = True
) -> Reproducible:
    """Makes gradients, norms and random numbers the same, bit for bit, at any number of ranks.

    A step is a fixed number of micro-batches in a fixed order. Each rank runs its contiguous part of them:
    with M of them on W ranks, rank r runs those from r * M / W on. It runs one backward for each, without
    dividing the losses. All sums of gradients follow one binary tree over the micro-batches, whatever the
    number of ranks, the sharding and the way of communicating. The gradients appear after the last backward
    of the step. A backward counts if it adds to a parameter: `torch.autograd.grad` for inputs does not.

    `no_sync()` and its like have no effect: only the last backward communicates gradients. Until then a rank
    holds sums of full gradients, one more each time that the number of its micro-batches doubles. Modules,
    options and optimizers for which that cannot hold are refused or warned of by name.

    Args:
        model: The root, wrapped or sharded by `fully_shard`.
        micro_batches: Number of micro-batches in a step; a multiple of the number of ranks.
        seed: Seed from which those of all steps and micro-batches are made.
        average: Whether gradients are divided by the number of micro-batches. If False they are summed: for
            losses that have been divided by the number of all tokens.

    Returns:
        A `Reproducible`, which gives this rank its micro-batches. Collective.

    Raises:
        ValueError: If nothing in the model is wrapped or sharded, the ranks do not divide `micro_batches`, or
            ranks pass other arguments.
        TypeError: If `seed` is no int.
        RuntimeError: For a model that cannot be reproducible, inside a forward or backward, or while
            gradients of `no_sync` wait.
    """
    check_flag("average", average)
    check_kind("seed", seed, int, optional=False)
    units = [*dict.fromkeys(units_in(model).values())]
    if not units:
        refuse_unsharded(model, "reproducible()")
    require_root(units[0], "reproducible()")
    steps = [*dict.fromkeys(map(step_of, units))]
    owning = [(unit, unit.buffers) for unit in units if unit.params]
    _refuse(model, steps, owning)
    ranks, rank = _place(owning)
    _check_count(micro_batches, ranks)
    chosen = {"micro_batches": micro_batches, "seed": seed, "average": average}
    for communicator in dict.fromkeys(
        communicator for _, buffers in owning for communicator in (buffers.communicator, buffers.replicas)
    ):
        communicator.agree("reproducible()", chosen)
    warn_of_kernels(steps)
    per_rank = micro_batches // ranks
    return Reproducible(steps, range(rank * per_rank, (rank + 1) * per_rank), micro_batches, seed, average)


def _refuse(model: nn.Module, steps: Iterable[Step], owning: Iterable[tuple[Unit, Buffers]]) -> None:
    """Refuses what cannot be the same at any number of ranks."""
    for step in steps:
        refuse_aligned(step)
        require_idle([step.root], "reproducible()")
    for unit, buffers in owning:
        refuse_others_sums(unit, buffers)
        if buffers.gradients.accumulated:
            raise RuntimeError(
                f"gradients of {unit.name} that no_sync left wait for a backward: run it before "
                "reproducible()"
            )
    segments = [segment for _, buffers in owning for segment in buffers.segments]
    # A unit that `unshard()` has gathered shows its leaves.
    refuse_unowned(
        model, (param for segment in segments for param in (*segment.params.sources, *segment.leaves))
    )
    refuse_training(norms_over_batches(model))


def _place(owning: Iterable[tuple[Unit, Buffers]]) -> tuple[int, int]:
    """Returns the number of ranks that have batches of their own, and this one's place among them."""
    places: dict[tuple[int, int], Unit] = {}
    for unit, buffers in owning:
        ranks = buffers.communicator
        here = buffers.replicas.rank * ranks.size + ranks.rank
        places.setdefault((ranks.size * buffers.replicas.size, here), unit)
    if len(places) > 1:
        (one, _), (other, _), *_ = places
        first, second, *_ = places.values()
        raise ValueError(
            f"{first.name} is averaged over {one} ranks and {second.name} over {other}, or this rank has "
            "different places among them: a reproducible model has one order of all ranks"
        )
    return next(iter(places))


def _check_count(micro_batches: int, ranks: int) -> None:
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"micro_batches must be a positive whole number, but is {micro_batches!r}")
    if micro_batches % ranks:
        raise ValueError(
            f"micro_batches={micro_batches} cannot be dealt out evenly to {ranks} ranks: choose a multiple "
            "of each number of ranks on which the run may be"
        )
