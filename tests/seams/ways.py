"""Ways by which model and optimizer come from the first half of a program to the second."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

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
    """Brings model and optimizer over; by default by full state dicts on all ranks."""

    slots: Any = ("way",)

    def move(self, program: Program, first: Side, second: Side) -> bool:
        self.bring(program, first, second)
        return True

    def bring(self, program: Program, first: Side, second: Side) -> None:
        move_full(first, second)


def from_first_rank(program: Program, first: Side, second: Side) -> None:
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optim = get_state_dict(first.model, first.optimizer, options=whole)
    set_all(second, model, optim, FROM_FIRST)


def set_all(side: Side, model: Any, optim: Any, options: StateDictOptions | None = None) -> None:
    set_state_dict(
        side.model, side.optimizer, model_state_dict=model, optim_state_dict=optim, options=options
    )


def sharded_states(program: Program, first: Side, second: Side) -> None:
    set_all(second, *copy.deepcopy(get_state_dict(first.model, first.optimizer)))


class OwnStates(Way):
    """The methods of the wrapper, by its sharded or local kind."""

    kind = StateDictType.SHARDED_STATE_DICT

    def bring(self, program: Program, first: Side, second: Side) -> None:
        with FSDP.state_dict_type(first.model, self.kind):
            model, optim = first.model.state_dict(), FSDP.optim_state_dict(first.model, first.optimizer)
        with FSDP.state_dict_type(second.model, self.kind):
            second.model.load_state_dict(model)
            optim = FSDP.optim_state_dict_to_load(second.model, second.optimizer, optim)
        second.optimizer.load_state_dict(optim)


def plain_dicts(program: Program, first: Side, second: Side) -> None:
    """Takes `state_dict` and `load_state_dict` of model and optimizer, each rank its own."""
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))


class Folder(Way):
    """`fsdp_wrap.checkpoint`; the save in the background, or in the memory of hosts, if so told."""

    in_background = in_memory = False

    def bring(self, program: Program, first: Side, second: Side) -> None:
        assert second.world is not None
        host = program.folder / f"host{dist.get_rank() // 2}"
        place: Any = InMemory(host) if self.in_memory else program.folder
        if self.in_background:
            checkpoint.async_save(place, first.model, first.optimizer).result()
        else:
            checkpoint.save(place, first.model, first.optimizer)
        checkpoint.load(place, second.model, second.optimizer, process_group=second.world.group)


class TorchsCheckpoint(Way):
    """`torch.distributed.checkpoint`, of nested states."""

    kind = StateDictOptions()

    def bring(self, program: Program, first: Side, second: Side) -> None:
        assert second.world is not None
        state = self.of(first)
        dcp.save(state, checkpoint_id=program.folder)
        state = self.of(second)
        dcp.load(state, checkpoint_id=program.folder, process_group=second.world.group)
        set_all(second, state["model"], state["optim"], self.kind)

    def of(self, side: Side) -> dict[str, Any]:
        model, optim = get_state_dict(side.model, side.optimizer, options=self.kind)
        return {"model": model, "optim": optim}


class Weights(Way):
    """What a way brings of the model alone; the optimizer's state is brought in full."""

    slots: Any = ("way", "full values")

    def bring(self, program: Program, first: Side, second: Side) -> None:
        values, buffers = self.brought(program, first), dict(first.model.named_buffers())
        full: Any = get_model_state_dict(first.model, options=FULL)
        for name, value in full.items():
            if name in values:
                program.assert_close(values[name], value, f"{self.name} '{name}'")
            elif name in buffers:
                values[name] = value
        lenient = StateDictOptions(full_state_dict=True, strict=False)
        set_model_state_dict(second.model, dict(values), options=lenient)
        move_full(first, second, model=False)

    def brought(self, program: Program, first: Side) -> dict[str, torch.Tensor]:
        raise NotImplementedError


class HuggingFace(Weights):
    """Torch's storage of safetensors, consolidated, of rows; the format has no tensor of two names."""

    def options(self, front: str, world: World) -> dict[str, Any]:
        return {"device_mesh": world.data}

    def brought(self, program: Program, first: Side) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        writer = HuggingFaceStorageWriter(
            str(program.folder), save_distributed=True, enable_consolidation=True
        )
        dcp.save(get_model_state_dict(first.model), storage_writer=writer)
        dist.barrier()
        files = [load_file(path) for path in program.folder.glob("*.safetensors")]
        return {name: value for file in files for name, value in file.items()}


class HuggingFacePieces(HuggingFace):
    """The same of the wrapper without a mesh, whose pieces are rows only where it is told so."""

    def refusal(self, names: Collection[str]) -> str | None:
        rows = "Aligned" in names or "NotSharded" in names
        return None if rows else "stores one box of a tensor for each rank"

    def options(self, front: str, world: World) -> dict[str, Any]:
        return {}


class Exported(Weights):
    """Our own safetensors files, exported and imported."""

    def bring(self, program: Program, first: Side, second: Side) -> None:
        export_safetensors(first.model, program.folder)
        import_safetensors(second.model, program.folder)
        move_full(first, second, model=False)


def from_source(program: Program, first: Side) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in weight_source(first.model, buffers=True)}


def from_weight_files(program: Program, first: Side) -> dict[str, torch.Tensor]:
    """Sends them to a folder, for whoever reads them."""
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
        changes = [first.notes["changes"].collect()]
        dist.broadcast_object_list(changes)
        apply_changes(first.notes["before"], changes[0])
        return first.notes["before"]


OF_ROWS = ("way", "full values", "aliases", "process group")
WAYS: dict[str, Capability] = {
    "FullStates": Way(slots=("way", "full values")),
    "FromFirstRank": Way(slots=("way", "full values"), elsewhere=False, bring=from_first_rank),
    "ShardedStates": Way(elsewhere=False, bring=sharded_states),
    "OwnStates": OwnStates(fronts=["flat", "orig"], elsewhere=False),
    "LocalStates": OwnStates(
        fronts=["flat", "orig"],
        elsewhere=False,
        refused={"TensorParallel": "take a state dict of type SHARDED_STATE_DICT"},
        kind=StateDictType.LOCAL_STATE_DICT,
    ),
    "PlainDicts": Way(fronts=["orig", "composable"], elsewhere=False, bring=plain_dicts),
    "Folder": Folder(),
    "Background": Folder(in_background=True),
    "Memory": Folder(in_memory=True, elsewhere=False),
    "TorchsCheckpoint": TorchsCheckpoint(),
    "TorchsFlattened": TorchsCheckpoint(kind=StateDictOptions(flatten_optimizer_state_dict=True)),
    "HuggingFace": HuggingFace(slots=OF_ROWS, needs="safetensors"),
    "HuggingFacePieces": HuggingFacePieces(
        slots=(*OF_ROWS, "mesh"), needs="safetensors", fronts=["flat", "orig"]
    ),
    "Exported": Exported(needs="safetensors"),
    "Source": Weights(brought=from_source),
    "WeightFiles": Weights(
        slots=("way", "full values", "process group"), needs="safetensors", brought=from_weight_files
    ),
    "WeightChanges": WeightChanges(),
}
"""By their names."""
