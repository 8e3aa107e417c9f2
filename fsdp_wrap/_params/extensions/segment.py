"""`ExtensionSegment`: the memory of parameters whose subclasses have their own all-gather inputs."""

from __future__ import annotations

from operator import attrgetter

import torch

from fsdp_wrap._comm import Buffer, Communicator
from fsdp_wrap._core import PlugIns, SegmentDtypes, round_up
from fsdp_wrap._core.torch_private import set_version_counters
from fsdp_wrap._params.extensions.gathered import Gathered, Several
from fsdp_wrap._params.extensions.sharded_params import ExtensionParams
from fsdp_wrap._params.layout import ALIGNMENT_BYTES
from fsdp_wrap._params.parallel import to_local
from fsdp_wrap._params.segment import Segment

_VERSION = attrgetter("_version")


class ExtensionSegment(Segment):
    """Parameters of tensor subclasses with their all-gather buffers, leaves and gradients.

    The buffers hold bytes, and are empty until the subclasses are asked first. The leaves are made when the
    first values are gathered; afterwards the subclasses fill them. Memory that subclasses have beside the
    buffers is freed and allocated with them.
    """

    params: ExtensionParams

    def __init__(
        self,
        params: ExtensionParams,
        dtypes: SegmentDtypes,
        communicator: Communicator,
        contributors: float,
        plug_ins: PlugIns,
    ) -> None:
        self._values = [Gathered(whole, dtypes.param) for whole in params.wholes]
        self._is_made = False
        self._own_rows: list[torch.Tensor] = []
        super().__init__(params, dtypes, communicator, contributors, plug_ins)

    def _make_buffers(self) -> tuple[Buffer, Buffer]:
        nothing = self._communicator.buffer(0, torch.uint8)
        return nothing, nothing

    def _alias_full(self) -> None:
        self._copies = [], []
        self._write_from_shard()

    def _write_from_shard(self) -> None:
        self.shard, self.from_host = self.params.flat_param.data, None
        self.write_shard = self._write_inputs

    # inputs

    @torch.no_grad()
    def prepare(self) -> bool:
        """Asks the subclasses for their inputs; returns whether leaves are to be made."""
        with torch.inference_mode(False):
            anew = False
            for values, local, module in zip(self._values, self.params.locals, self.params.modules):
                if local.device != self._communicator.device:
                    local = local.to(self._communicator.device, non_blocking=True)
                anew = values.ask(local, module) or anew
            if anew:
                self._lay_out()
        return not self._is_made

    def _lay_out(self) -> None:
        """Makes the buffers: one for a single tensor; several tensors are gathered in one, and then split."""
        ranks = self._communicator.size
        sizes = [nbytes for values in self._values for nbytes in values.nbytes]
        if len(sizes) == 1:
            self.full = self.gathered = self._communicator.buffer(ranks * sizes[0], torch.uint8)
            rows = [self.gathered.data.view(ranks, -1)]
            apart = [self.full]
        else:
            steps = [round_up(size, ALIGNMENT_BYTES) for size in sizes]
            self.gathered = self._communicator.buffer(ranks * sum(steps), torch.uint8)
            wide = torch.split_with_sizes(self.gathered.data.view(ranks, -1), steps, dim=1)
            rows = [row[:, :size] for row, size in zip(wide, sizes)]
            # Each has memory of its own, since subclasses read storage offsets.
            apart = [Buffer(ranks * size, torch.uint8, self._communicator.device) for size in sizes]
            self.full = Several(apart)
            self._copies = [buffer.data.view(ranks, -1) for buffer in apart], rows
        self._own_rows = [row[self._communicator.rank] for row in rows]
        following = iter(apart)
        for values in self._values:
            values.lie_in([next(following) for _ in values.kinds])
        self.full.free()
        self.gathered.free()

    def _write_inputs(self) -> None:
        inputs = [tensor for values in self._values for tensor in values.inputs]
        for row, tensor in zip(self._own_rows, inputs):
            row.copy_(tensor.reshape(-1).view(torch.uint8), non_blocking=True)
        for values in self._values:
            values.inputs = ()

    # outputs

    def admit(self, changed: bool, in_place: bool) -> None:
        super().admit(changed, in_place)
        with torch.inference_mode(False), torch.no_grad():
            self._convert()
        set_version_counters(self.counted, tuple(self.versions))

    def _convert(self) -> None:
        """Lets the subclasses make the leaves from the outputs, or fill them."""
        if self._is_made:
            for values, local, leaf in zip(self._values, self.params.locals, self.leaves):
                values.again(local, leaf)
            return
        pairs = zip(self._values, self.params.locals)
        self.params.become([values.first(local) for values, local in pairs])
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
            self.versions = [*map(_VERSION, self.counted)]
            set_version_counters(self.counted, self._freed)
        self._admitted = False
        if self._held:
            self._forget_dropped()
        for index, values in enumerate([] if self._keeps_memory else self._values):
            if index not in self._held:
                values.free()

    def take_in_place(self, index: int) -> None:
        """Leaves the gradient where it is: the buffer has another size."""
