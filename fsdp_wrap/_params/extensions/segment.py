"""`ExtensionSegment`: the memory of parameters whose subclasses have their own all-gather inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from operator import attrgetter

import torch
from torch import nn

from fsdp_wrap._comm import Buffer, Communicator
from fsdp_wrap._core import PlugIns, SegmentDtypes
from fsdp_wrap._core.torch_private import set_version_counters
from fsdp_wrap._params.extensions.gathered import Gathering, Given, Made, Use
from fsdp_wrap._params.extensions.methods import Whole, changed_kinds
from fsdp_wrap._params.extensions.sharded_params import ExtensionParams
from fsdp_wrap._params.parallel import to_local
from fsdp_wrap._params.segment import Segment

_VERSION = attrgetter("_version")


class ExtensionSegment(Segment):
    """Parameters of tensor subclasses with their all-gather buffers, leaves and gradients.

    The buffers hold bytes, and are empty until the subclasses are asked first. What subclasses give may
    depend on what it is gathered for: each use has its kinds of tensors, which stay the same. The leaves are
    made when the first values are gathered; afterwards the subclasses fill them. Memory that subclasses have
    beside the buffers is freed and allocated with them.
    """

    params: ExtensionParams

    def __init__(
        self,
        params: ExtensionParams,
        dtypes: SegmentDtypes,
        communicator: Communicator,
        plug_ins: PlugIns,
    ) -> None:
        self._made = [Made(whole, dtypes.param) for whole in params.wholes]
        self._gatherings: dict[Use, Gathering] = {}
        self._given: list[Given] = []
        self._use, self._asks = Use.BOTH, False
        self._depends = self._gives_both = False
        self._is_made = False
        super().__init__(params, dtypes, communicator, plug_ins)

    def _make_buffers(self) -> tuple[Buffer, Buffer]:
        nothing = self._communicator.buffer(0, torch.uint8)
        return nothing, nothing

    def _follow_buffers(self) -> None:
        self._copies = [], []
        self._write_from_shard()

    _alias_full = _follow_buffers

    def _write_from_shard(self) -> None:
        self.shard, self.from_host = self.params.flat_param.data, None
        self.write_shard = self._write_inputs

    # what the values are for

    def tell_use(self, whether_both: bool) -> Use | None:
        """Tells a subclass that is asked now what it is asked for; None if none is.

        Args:
            whether_both: Whether it asks if this is both uses, not if it is the backward.
        """
        if not self._asks:
            return None
        if whether_both:
            self._gives_both = True
        else:
            self._depends = True
        return self._use

    @property
    def gives_both(self) -> bool:
        """Whether subclasses that depend on the use can give what serves both."""
        return self._gives_both or not self._depends

    @property
    def made_for(self) -> Use | None:
        """For what the values were gathered; None where they are the same for all."""
        return self._use if self._depends or len({*self._gatherings.values()}) > 1 else None

    def serves(self, use: Use) -> bool:
        """Whether the values that were gathered last may be used so."""
        return not self._depends or use in self._use

    # inputs

    @torch.no_grad()
    def prepare(self, use: Use) -> bool:
        """Asks the subclasses for their inputs for a use; returns whether leaves are to be made."""
        with torch.inference_mode(False):
            self._use, self._asks = use, True
            try:
                self._given = [*map(self._ask, self.params.wholes, self.params.locals, self.params.modules)]
            finally:
                self._asks = False
            gathering = self._gathering_for(use)
        self.full, self.gathered, self._copies = gathering.full, gathering.gathered, gathering.copies
        return not self._is_made

    def _ask(self, whole: Whole, local: torch.Tensor, module: nn.Module) -> Given:
        if local.device != self._communicator.device:
            local = local.to(self._communicator.device, non_blocking=True)
        return Given(whole, local, module)

    def _gathering_for(self, use: Use) -> Gathering:
        """Returns the buffers of a use; those of another use serve for the same kinds of tensors."""
        kinds = [given.kinds for given in self._given]
        known = self._gatherings.get(use)
        if known is not None:
            for whole, local, now, before in zip(self.params.wholes, self.params.locals, kinds, known.kinds):
                if now != before:
                    raise changed_kinds(whole.fqn, local, use, now, before)
            return known
        same = (other for other in self._gatherings.values() if other.kinds == kinds)
        gathering = next(same, None) or Gathering(self.params.wholes, kinds, self._communicator)
        self._gatherings[use] = gathering
        return gathering

    def _write_inputs(self) -> None:
        self._gatherings[self._use].write(self._given)

    @property
    def nbytes_by_dtype(self) -> Counter[torch.dtype]:
        """Bytes of the gathered tensors by dtype; none before the first gather."""
        nbytes = Counter[torch.dtype]()
        if self._gatherings:
            for kinds in self._gatherings[self._use].kinds:
                for shape, dtype in kinds:
                    nbytes[dtype] += self._communicator.size * shape.numel() * dtype.itemsize
        return nbytes

    # outputs

    def admit(self, changed: bool, in_place: bool) -> None:
        super().admit(changed, in_place)
        with torch.inference_mode(False), torch.no_grad():
            self._convert()
        set_version_counters(self.counted, self.versions)

    def _convert(self) -> None:
        """Lets the subclasses make the leaves from the outputs, or fill them."""
        gathering, locals_ = self._gatherings[self._use], self.params.locals
        parts = zip(self._made, gathering.outputs, self._given, locals_)
        if self._is_made:
            for (made, outputs, given, local), leaf in zip(parts, self.leaves):
                made.again(outputs, given.metadata, local, leaf)
        else:
            self._make_leaves(
                [
                    made.first(outputs, buffers, given.metadata, local)
                    for (made, outputs, given, local), buffers in zip(parts, gathering.buffers)
                ]
            )
        for whole, local, buffers in zip(self.params.wholes, locals_, gathering.buffers):
            if whole.releases(local):
                for buffer in buffers:
                    buffer.free()

    def _make_leaves(self, unsharded: Sequence[torch.Tensor]) -> None:
        self.params.become(unsharded)
        if self.dtypes.arriving != self.dtypes.param:
            for leaf in self.leaves:
                leaf.grad_dtype = self.dtypes.arriving
        self.places = {leaf: index for index, leaf in enumerate(self.leaves)}
        others = () if self.params.distributed is None else map(to_local, self.leaves)
        self.counted = (*self.leaves, *others)
        self._is_made = True

    def free(self) -> None:
        """Frees the memory of all leaves that users do not hold.

        Held ones keep theirs, which gets other values: only the subclass could copy it.
        """
        if self._admitted:
            self.versions = (*map(_VERSION, self.counted),)
            set_version_counters(self.counted, self._freed)
        self._admitted = False
        held = self._held()
        if not self._keeps_memory and self._gatherings:
            for index, buffers in enumerate(self._gatherings[self._use].buffers):
                if index not in held and all([buffer.free() for buffer in buffers]):
                    self._made[index].free()

    def _held(self) -> Collection[int]:
        """Returns the numbers of leaves that users hold."""
        if self._shown is None:
            return ()
        if self._shown.held:
            self._shown.forget_dropped()
        return self._shown.held

    def take_in_place(self, index: int) -> None:
        """Leaves the gradient where it is: the buffer has another size."""
