"""Ways by which model and optimizer come from the first half of a program to the second."""

from __future__ import annotations

import copy
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import StateDictType, checkpoint, weight_changes, weight_source
from fsdp_wrap.checkpoint import InMemory, export_safetensors, import_safetensors
from fsdp_wrap.distributed_state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from fsdp_wrap.weights import WeightFolder, apply_changes, stored
from programs import FULL, Capability, Program, Side, World, move_full

FROM_FIRST = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)


class Way(Capability):
    """A way; by default full state dicts on all ranks."""

    slots: ClassVar[tuple[str, ...]] = ("way",)

    def move(self, program: Program, first: Side, second: Side) -> bool:
        self.bring(program, first, second)
        return True

    def bring(self, program: Program, first: Side, second: Side) -> None:
        move_full(first, second)


class FullStates(Way):
    """Full state dicts on all ranks."""

    slots = ("way", "full values")


class FromFirstRank(Way):
    """Full state dicts on the first rank alone."""

    slots = ("way", "full values")
    elsewhere = False

    def bring(self, program: Program, first: Side, second: Side) -> None:
        model, optim = get_state_dict(
            first.model, first.optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        set_state_dict(
            second.model,
            second.optimizer,
            model_state_dict=model,
            optim_state_dict=optim,
            options=FROM_FIRST,
        )


class ShardedStates(Way):
    """Sharded state dicts, each rank its own."""

    elsewhere = False

    def bring(self, program: Program, first: Side, second: Side) -> None:
        model, optim = get_state_dict(first.model, first.optimizer)
        set_state_dict(
            second.model,
            second.optimizer,
            model_state_dict=copy.deepcopy(model),
            optim_state_dict=copy.deepcopy(optim),
        )


class OwnStates(Way):
    """The methods of the wrapper, by its sharded or local kind."""

    fronts = ["flat", "orig"]
    elsewhere = False
    kind = StateDictType.SHARDED_STATE_DICT

    def bring(self, program: Program, first: Side, second: Side) -> None:
        with FSDP.state_dict_type(first.model, self.kind):
            model, optim = first.model.state_dict(), FSDP.optim_state_dict(first.model, first.optimizer)
        with FSDP.state_dict_type(second.model, self.kind):
            second.model.load_state_dict(model)
            optim = FSDP.optim_state_dict_to_load(second.model, second.optimizer, optim)
        second.optimizer.load_state_dict(optim)


class LocalStates(OwnStates):
    """Its local kind."""

    refused = {"TensorParallel": "take a state dict of type SHARDED_STATE_DICT"}
    kind = StateDictType.LOCAL_STATE_DICT


class PlainDicts(Way):
    """`state_dict` and `load_state_dict` of model and optimizer, each rank its own."""

    fronts = ["orig", "composable"]
    elsewhere = False

    def bring(self, program: Program, first: Side, second: Side) -> None:
        second.model.load_state_dict(first.model.state_dict())
        second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))


class Folder(Way):
    """`fsdp_wrap.checkpoint`."""

    def bring(self, program: Program, first: Side, second: Side) -> None:
        assert second.world is not None
        place = self.place(program)
        self.save(place, first)
        checkpoint.load(place, second.model, second.optimizer, process_group=second.world.group)

    def place(self, program: Program) -> Any:
        return program.folder

    def save(self, place: Any, first: Side) -> None:
        checkpoint.save(place, first.model, first.optimizer)


class Background(Folder):
    """The same, in the background."""

    def save(self, place: Any, first: Side) -> None:
        checkpoint.async_save(place, first.model, first.optimizer).result()


class Memory(Folder):
    """The same, in the memory of hosts."""

    elsewhere = False

    def place(self, program: Program) -> Any:
        return InMemory(program.folder / f"host{dist.get_rank() // 2}")


class TorchsCheckpoint(Way):
    """`torch.distributed.checkpoint`, of nested states."""

    kind = StateDictOptions()

    def bring(self, program: Program, first: Side, second: Side) -> None:
        assert second.world is not None
        state = self.of(first)
        dcp.save(state, checkpoint_id=program.folder)
        state = self.of(second)
        dcp.load(state, checkpoint_id=program.folder, process_group=second.world.group)
        set_state_dict(
            second.model,
            second.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=self.kind,
        )

    def of(self, side: Side) -> dict[str, Any]:
        model, optim = get_state_dict(side.model, side.optimizer, options=self.kind)
        return {"model": model, "optim": optim}


class TorchsFlattened(TorchsCheckpoint):
    """The same, of an optimizer state of one level."""

    kind = StateDictOptions(flatten_optimizer_state_dict=True)


class Weights(Way):
    """What a way brings of the model alone; the optimizer's state is brought in full."""

    slots: ClassVar[tuple[str, ...]] = ("way", "full values")

    def bring(self, program: Program, first: Side, second: Side) -> None:
        found, buffers = self.brought(program, first), dict(first.model.named_buffers())
        for name, value in get_model_state_dict(first.model, options=FULL).items():
            if name in found:
                program.assert_close(found[name], value, f"{type(self).__name__} '{name}'")
            elif name in buffers:
                found[name] = value
        set_model_state_dict(
            second.model, found, options=StateDictOptions(full_state_dict=True, strict=False)
        )
        move_full(first, second, model=False)

    def brought(self, program: Program, first: Side) -> dict[str, torch.Tensor]:
        raise NotImplementedError


class HuggingFace(Weights):
    """Torch's storage of safetensors, consolidated, of rows; the format has no tensor of two names."""

    slots: ClassVar[tuple[str, ...]] = ("way", "full values", "aliases", "process group")
    needs = "safetensors"

    def options(self, front: str, world: World) -> dict[str, Any]:
        return {} if front == "composable" else {"device_mesh": world.data}

    def brought(self, program: Program, first: Side) -> dict[str, torch.Tensor]:
        writer = HuggingFaceStorageWriter(
            str(program.folder), save_distributed=True, enable_consolidation=True
        )
        dcp.save(get_model_state_dict(first.model), storage_writer=writer)
        dist.barrier()
        return _in_files(program.folder)


class HuggingFacePieces(HuggingFace):
    """The same of the wrapper without a mesh, whose pieces are rows only where it is told so."""

    slots = (*HuggingFace.slots, "mesh")
    fronts = ["flat", "orig"]

    def refusal(self, names: Collection[str]) -> str | None:
        rows = "Aligned" in names or "NotSharded" in names
        return None if rows else "stores one box of a tensor for each rank"

    def options(self, front: str, world: World) -> dict[str, Any]:
        return {}


class Exported(Weights):
    """Our own safetensors files, exported and imported."""

    needs = "safetensors"

    def bring(self, program: Program, first: Side, second: Side) -> None:
        export_safetensors(first.model, program.folder)
        import_safetensors(second.model, program.folder)
        move_full(first, second, model=False)


class Source(Weights):
    """`weight_source`."""

    def brought(self, program: Program, first: Side) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in weight_source(first.model, buffers=True)}


class WeightFiles(Weights):
    """A folder of weights for whoever reads them."""

    slots = ("way", "full values", "process group")
    needs = "safetensors"

    def brought(self, program: Program, first: Side) -> dict[str, torch.Tensor]:
        folder = WeightFolder(program.folder if dist.get_rank() == 0 else None)
        folder.send(weight_source(first.model, buffers=True))
        dist.barrier()
        return dict(next(stored(program.folder)))


class WeightChanges(Weights):
    """The elements that changed since the first step."""

    def after_step(self, side: Side, at: int) -> None:
        if side.world is not None and at == 1:
            side.notes["before"] = {name: value.clone() for name, value in weight_source(side.model)}
            side.notes["changes"] = weight_changes(side.model)

    def brought(self, program: Program, first: Side) -> dict[str, torch.Tensor]:
        found = [first.notes["changes"].collect()]
        dist.broadcast_object_list(found)
        apply_changes(first.notes["before"], found[0])
        return first.notes["before"]


def _in_files(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
