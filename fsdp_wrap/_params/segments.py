"""`Segments`: the segments of one unit, how they are made, and what they hold between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter

import torch
from torch.distributed.tensor import DTensor

from fsdp_wrap._comm import Communicator
from fsdp_wrap._core import PlugIns, SegmentDtypes, SegmentPolicy, format_dtype, segment_dtypes
from fsdp_wrap._params.extensions import ExtensionSegment
from fsdp_wrap._params.segment import Segment
from fsdp_wrap._params.sharded_params import ShardedParams
from fsdp_wrap._params.side_data import refuse_training

_REQUIRES_GRAD = attrgetter("requires_grad")


def trains(sharded: ShardedParams) -> bool:
    """Whether any of a segment's parameters needs a gradient now."""
    return any(map(_REQUIRES_GRAD, sharded.sources))


class Segments(list[Segment]):
    """The segments of one unit.

    Args:
        params: Of each segment, this rank's shard and the sharded parameters.
        policies: Dtypes of each segment.
        communicator: The ranks that hold one copy of the unit between them.
        plug_ins: What is attached to the unit, to its steps and to all steps.

    Attributes:
        in_full: Whether the unit computes in the master dtype, whatever its policies say.
        keeps_memory: Whether unsharded buffers keep their memory while the unit is sharded.
        generation: Count of times that leaves were made anew; older graphs cannot run backward.
        hookings: Count of times that leaves or sharded parameters became others, or others came to train.
        extended: Those of tensor subclasses that give what is gathered.
        unsharded_nbytes: Bytes of the full parameters.
        batch_nbytes: Bytes of the full parameters in a batched gather.
        without_values: Names of parameters on the meta device.
        trainable: Whether any leaf needs a gradient now.
        bulky: Whether one leaf's gradient alone takes half of a segment's memory.
        sizeable: Whether one takes a quarter of it.
    """

    __slots__ = (
        "_communicator",
        "_params",
        "_plug_ins",
        "_policies",
        "_trained",
        "batch_nbytes",
        "bulky",
        "extended",
        "generation",
        "hookings",
        "in_full",
        "keeps_memory",
        "sizeable",
        "trainable",
        "unsharded_nbytes",
        "without_values",
    )

    def __init__(
        self,
        params: Sequence[ShardedParams],
        policies: Sequence[SegmentPolicy],
        communicator: Communicator,
        plug_ins: PlugIns,
    ) -> None:
        self._params, self._policies = params, policies
        self._communicator, self._plug_ins = communicator, plug_ins
        self._trained = [*map(trains, params)]  # dtypes of reductions stay as they are
        self.in_full = self.keeps_memory = False
        self.generation = self.hookings = 0
        super().__init__(map(self._make, params, self._dtypes(self.in_full)))
        self._note_contents()

    # making

    def _make(self, sharded: ShardedParams, dtypes: SegmentDtypes) -> Segment:
        kind: Callable[..., Segment] = ExtensionSegment if sharded.extended else Segment
        segment = kind(sharded, dtypes, self._communicator, self._plug_ins)
        if self.keeps_memory:
            segment.keep_memory(True)
        return segment

    def _dtypes(self, in_full: bool) -> list[SegmentDtypes]:
        if in_full:
            return [SegmentDtypes.full(sharded.dtype) for sharded in self._params]
        masters = (sharded.dtype for sharded in self._params)
        return segment_dtypes([*zip(masters, self._policies, self._trained)])

    @property
    def mix_dtypes(self) -> bool:
        """Whether the policies ask for another dtype than the master dtype."""
        return any(dtypes.mixed for dtypes in self._dtypes(in_full=False))

    def make_anew(self, every: bool = False) -> None:
        """Makes the segments whose dtypes have changed anew, or all of them."""
        self.hookings += 1
        for index, (segment, dtypes) in enumerate(zip(self, self._dtypes(self.in_full))):
            if every or dtypes != segment.dtypes:
                self[index] = self._make(segment.params, dtypes)
                self.generation += 1
        self._note_contents()

    def keep_memory(self, keep: bool) -> None:
        """Decides whether unsharded buffers keep their memory when they are freed."""
        self.keeps_memory = keep
        for segment in self:
            segment.keep_memory(keep)

    # leaves

    def follow_requires_grad(self) -> None:
        """Copies `requires_grad` from sharded parameters to leaves."""
        changed = False
        for segment in self:
            wanted = [*map(_REQUIRES_GRAD, segment.params.sources)]
            if wanted != [*map(_REQUIRES_GRAD, segment.leaves)]:
                refuse_training(segment.params.side_data, wanted, segment.params.name_of)
                segment.train(wanted)
                changed = True
        if changed:
            self.hookings += 1
            self._note_contents()

    def follow_subclasses(self, made_anew: bool) -> None:
        """Notes what tensor subclasses give to be gathered next; the first time, they make leaves anew."""
        self.generation += made_anew
        self.hookings += made_anew
        self._note_contents()

    # contents

    def _note_contents(self) -> None:
        self.extended = [segment for segment in self if isinstance(segment, ExtensionSegment)]
        self.unsharded_nbytes = sum(segment.full.nbytes for segment in self)
        self.batch_nbytes = self._communicator.size * sum(segment.batched_nbytes for segment in self)
        self.without_values = [fqn for sharded in self._params for fqn in sharded.without_values]
        self.trainable = any(segment.trainable for segment in self)
        trained = [segment.gradients for segment in self if segment.trainable]
        self.bulky = any(gradients.bulky for gradients in trained)
        self.sizeable = any(gradients.sizeable for gradients in trained)

    def owns_memory_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is part of an unsharded buffer."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        storage = tensor.untyped_storage()._cdata
        for segment in self:
            if storage in segment.full.storages:
                return True
        return False

    def nbytes_by_dtype(self) -> dict[str, int]:
        """Returns the bytes of the full parameters, by the dtype in which they travel."""
        nbytes = Counter[torch.dtype]()
        for segment in self:
            nbytes += segment.nbytes_by_dtype
        return {format_dtype(dtype): count for dtype, count in nbytes.items()}
