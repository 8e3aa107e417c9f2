"""`observe`: a few steps of the user's program in this process, and what is seen of them."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fsdp_wrap._core import clean_fqn
from fsdp_wrap._core.torch_private import graph_task
from fsdp_wrap._params import to_local
from fsdp_wrap._runtime import units_in
from fsdp_wrap._values import files
from fsdp_wrap._values.pieces import Piece, key_of, whole
from fsdp_wrap._values.plain import PlainRecorder
from fsdp_wrap._values.record import Rows, ValueRecord, header_of
from fsdp_wrap._values.statistics import Statistics

Setup = Callable[[bool], tuple[nn.Module, Any, Callable[[], object]]]
Place = tuple[str, int, int]
"""A piece of a parameter: its name, its first element and its number of elements."""

_SEED = 20261
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class Errand:
    """Steps for a rank to run.

    Attributes:
        setup: The user's function.
        sharded: Its argument.
        steps: How many steps.
        units: Names of the modules that count as units in a plain run.
        asked: Pieces whose checksums a plain run tells.
        rounding: Relative size of a change of all parameters before the first step; 0 for none.
    """

    setup: Setup
    sharded: bool
    steps: int
    units: Sequence[str] = ()
    asked: frozenset[Place] = frozenset()
    rounding: float = 0.0


@dataclass(frozen=True)
class Observed:
    """One rank of a run.

    Attributes:
        values: Its record.
        units: Names of the units without the root.
        begins: Checksums before the first step: of its pieces, of pieces that were asked for, of buffers.
        options: Options with which an optimizer holds a parameter, by name.
        given: Names of parameters that had a gradient when an optimizer stepped.
        trained: Names of parameters whose gradient was not zero then.
        early: Whether an optimizer has stepped before the first backward.
        optimizer: Class of the optimizer.
        dropouts: Names of the modules of dropout, which were turned off.
        batch_norms: Names of the modules that normalise over the rank's batch.
        randoms: The state of random numbers before and after each forward that trains.
        losses: The numbers that the steps returned; None for other things.
    """

    values: files.RankValues
    units: tuple[str, ...]
    begins: Mapping[Place, int]
    options: Mapping[str, Mapping[str, str]]
    given: frozenset[str]
    trained: frozenset[str]
    early: bool
    optimizer: str
    dropouts: tuple[str, ...]
    batch_norms: tuple[str, ...]
    randoms: tuple[tuple[int, int], ...]
    losses: tuple[float | None, ...]


def seed_as_of(rank: int) -> None:
    """Seeds torch and Python: other numbers on each rank, and equal ones in each run."""
    torch.manual_seed(_SEED + rank)
    random.seed(_SEED + rank)


def observe(errand: Errand) -> Observed:
    """Runs an errand in this process, a rank of the default group.

    Raises:
        WrongSetup: If `setup` returns something else than a program, sharded or not as it should be.
    """
    model, optimizers, step = _program(errand)
    dropouts = _turn_off_dropout(model)
    witness = _Witness(model, errand.units)
    begins, options = witness.begins(errand.asked), witness.options(optimizers)
    if errand.rounding:
        _round(model, errand.rounding)
    losses: list[float | None] = []
    # Inside a compiled graph the seams of a plain module cannot be seen; those of units can.
    stance = torch.compiler.set_stance("default" if errand.sharded else "force_eager")
    if options:
        with stance, witness.watching():
            losses = [_number(step()) for _ in range(errand.steps)]
    return Observed(
        values=files.RankValues(header_of(model, errand.units), witness.steps),
        units=tuple(name for name in units_in(model) if name),
        begins=begins,
        options=options,
        given=frozenset(witness.given),
        trained=frozenset(witness.trained),
        early=witness.early,
        optimizer=", ".join(type(optimizer).__name__ for optimizer in optimizers),
        dropouts=dropouts,
        batch_norms=tuple(
            clean_fqn(name)
            for name, module in model.named_modules()
            if isinstance(module, _BATCH_NORMS) and module.training
        ),
        randoms=tuple(witness.randoms),
        losses=tuple(losses),
    )


class WrongSetup(Exception):
    """The user's `setup` returned something wrong; `error` tells it."""

    def __init__(self, error: TypeError | ValueError) -> None:
        super().__init__(str(error))
        self.error = error


class _Witness(Rows):
    """Sees, beside what passes the seams, what optimizers get and how random numbers go on."""

    def __init__(self, model: nn.Module, units: Sequence[str]) -> None:
        self.steps: dict[int, files.RecordedStep] = {}
        super().__init__(model, units, self._keep, every=1)
        self._model = model
        self.given: set[str] = set()
        self.trained: set[str] = set()
        self.early = False
        self.randoms: list[tuple[int, int]] = []
        self._begun = 0
        self._devices = sorted({param.device.type for param in model.parameters()} - {"cpu", "meta"})

    def _keep(self, step: files.RecordedStep) -> None:
        rows = {key: row for key, row in step.rows.items() if row.tensors}
        self.steps[step.number] = files.RecordedStep(step.number, step.passes, rows)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Records while the context is open."""
        before: Callable[..., Any] = self._before
        with ExitStack() as undo:
            undo.enter_context(ValueRecord(self))
            undo.callback(register_module_forward_pre_hook(before).remove)
            undo.callback(register_module_forward_hook(self._after).remove)
            yield

    def _trains(self, module: nn.Module) -> bool:
        return module is self._model and torch.is_grad_enabled() and graph_task() == -1

    def _before(self, module: nn.Module, args: Any) -> None:
        if self._trains(module):
            self._begun = _state_of_randoms(self._devices)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._trains(module):
            self.randoms.append((self._begun, _state_of_randoms(self._devices)))

    def before_step(self, optimizer: torch.optim.Optimizer, closure: Any) -> None:
        self.early |= not any(self.has(files.GRADIENT, unit) for unit in self.recorder.units)
        held = {key_of(param) for group in optimizer.param_groups for param in group["params"]}
        for unit in self.recorder.units:
            pieces = [*self.recorder.step_gradients(unit, held)]
            self.add(files.STEP, unit, pieces)
            self.given.update(piece.fqn for piece in pieces)
            self.trained.update(piece.fqn for piece in pieces if piece.data.any())

    def options(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, dict[str, str]]:
        """Returns the options of the parameters that optimizers hold."""
        told: dict[object, dict[str, str]] = {}
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            values = {key: str(value) for key, value in group.items() if key not in ("params", "param_names")}
            told.update({key_of(param): values for param in group["params"]})
        keys = (pair for unit in self.recorder.units for pair in self.recorder.keys(unit))
        return {name: told[key] for name, key in keys if key in told}

    def begins(self, asked: frozenset[Place]) -> dict[Place, int]:
        """Returns checksums of buffers, and of pieces: this rank's, or those asked for of a plain module."""
        pieces = [piece for unit in self.recorder.units for piece in self.recorder.shards(unit)]
        if isinstance(self.recorder, PlainRecorder):
            params = {piece.fqn: piece for piece in pieces}
            pieces = [
                Piece(fqn, params[fqn].shape, start, params[fqn].data.reshape(-1)[start : start + numel])
                for fqn, start, numel in asked
                if fqn in params and start + numel <= params[fqn].data.numel()
            ]
        for name, buffer in self._model.named_buffers():
            if buffer.is_floating_point():
                pieces.append(whole(f"buffer {clean_fqn(name)}", buffer))
        checksums = {}
        for piece in pieces:
            if numel := piece.data.numel():
                sums = Statistics()
                sums.add(piece.data, piece.fqn, piece.start)
                checksums[piece.fqn, piece.start, numel] = sums.checksum
        return checksums


def _program(errand: Errand) -> tuple[nn.Module, list[torch.optim.Optimizer], Callable[[], object]]:
    """Makes the user's model, optimizers and step."""
    made = errand.setup(errand.sharded)
    try:
        return _checked(made, errand.sharded)
    except (TypeError, ValueError) as error:
        raise WrongSetup(error) from None


def _checked(made: Any, sharded: bool) -> tuple[nn.Module, list[torch.optim.Optimizer], Callable[[], object]]:
    call = f"setup(sharded={sharded})"
    if not isinstance(made, tuple) or len(made) != 3:
        returned = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise TypeError(f"{call} must return (model, optimizer, step), and returned {returned}")
    model, optimizer, step = made
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model that {call} returns must be an nn.Module, not {type(model).__name__}")
    optimizers = [*optimizer] if isinstance(optimizer, (list, tuple)) else [optimizer]
    for candidate in optimizers:
        if not isinstance(candidate, torch.optim.Optimizer):
            raise TypeError(
                f"the optimizer that {call} returns must be a torch.optim.Optimizer, not "
                f"{type(candidate).__name__}"
            )
    if not callable(step):
        raise TypeError(f"the step that {call} returns must be a function, not {type(step).__name__}")
    if bool(units_in(model)) != sharded:
        raise ValueError(
            f"{call} returned a model that {'is not' if sharded else 'is'} sharded: wrap it by "
            "FullyShardedDataParallel or fully_shard if `sharded` is true, and only then"
        )
    return model, optimizers, step


def _turn_off_dropout(model: nn.Module) -> tuple[str, ...]:
    """Sets dropout to 0, since other numbers of ranks draw other masks. Returns the names of its modules."""
    names = []
    for name, module in model.named_modules():
        attribute = "p" if isinstance(module, _DROPOUTS) else "dropout"
        known = isinstance(module, (*_DROPOUTS, nn.MultiheadAttention, nn.RNNBase))
        if known and module.training and getattr(module, attribute):
            setattr(module, attribute, 0.0)
            names.append(clean_fqn(name))
    return tuple(names)


def _round(model: nn.Module, size: float) -> None:
    """Changes each parameter by a relative size, up or down."""
    generator = torch.Generator().manual_seed(_SEED)
    for param in model.parameters():
        local = to_local(param.detach())
        signs = torch.randint(0, 2, local.shape, generator=generator).mul_(2).sub_(1)
        local.mul_(1 + size * signs.to(local.device, torch.float64)) if local.is_floating_point() else None


def _state_of_randoms(devices: Iterable[str]) -> int:
    states = [torch.get_rng_state(), *(torch.get_device_module(device).get_rng_state() for device in devices)]
    return zlib.crc32(b"".join(state.numpy().tobytes() for state in states))


def _number(told: object) -> float | None:
    if isinstance(told, torch.Tensor) and told.numel() == 1:
        return float(to_local(told.detach()).float())
    return float(told) if isinstance(told, (int, float)) else None


def places_of(observed: Iterable[Observed]) -> frozenset[Place]:
    """Returns the pieces of all ranks."""
    return frozenset(place for of_rank in observed for place in of_rank.begins)
