"""The capabilities of the package that `test_seams.py` brings together.

To add one, write a subclass of `Capability` here; or of `Optimizer`, or of `Way` in `ways.py`, of which
every program has one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor

import moe_nets
from fronts import FRONTS, clip
from fsdp_wrap import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    clip_grad_norm_,
    comm_hooks,
    replicate,
    set_gradients_in_place,
)
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.optim import HostAdamW, Muon, on_shards, step_in_backward, stochastic_rounding
from fsdp_wrap.replica_groups import join_replica_groups
from fsdp_wrap.sharded_grad_scaler import ShardedGradScaler
from programs import Capability, Net, Side, World, adamw

COMPOSABLE, WRAPPER, BY_NAME = ["composable"], ["flat", "orig"], ["orig", "composable"]


# What becomes a unit, and which parameters a forward reads.


class Grouped(Capability):
    """Norm and head are one unit."""

    slots, fronts = ("units",), COMPOSABLE

    def units(self, net: Net, units: list[Any]) -> list[Any]:
        return [*units, [net.norm, net.head]]


class Layers(Capability):
    """Every layer but the head is a unit, below its block's."""

    slots = ("units",)

    def units(self, net: Net, units: list[Any]) -> list[Any]:
        layers = [module for module in net.modules() if isinstance(module, nn.Linear | nn.Embedding)]
        return [layer for layer in layers if layer is not net.head] + units


class Tied(Capability):
    """Embedding and head have one weight."""

    slots, spec = ("tied", "aliases"), {"tied": "embed_head"}


class TiedBlocks(Capability):
    """Two units have one weight."""

    slots, spec = ("tied", "aliases", "ties below tensor parallelism"), {"tied": "blocks"}


class FusedHead(Capability):
    """The model reads the head's parameters without its forward, as fused losses do."""

    slots = ("head",)

    def build(self, net: Net) -> None:
        net.reads = "head"


class BorrowedHead(Capability):
    """The model reads the weight of the embedding, a unit of its own, once more: of the wrapper no matrix."""

    slots: ClassVar[tuple[str, ...]]
    slots, fronts = ("head", "tied", "units"), COMPOSABLE

    def build(self, net: Net) -> None:
        net.reads, net.head = "embed", nn.Identity()  # type: ignore[assignment]

    def units(self, net: Net, units: list[Any]) -> list[Any]:
        return [*units, net.embed]


class BorrowedKeptHead(BorrowedHead):
    """The same, where full parameters stay."""

    slots, fronts = (*BorrowedHead.slots, "strategy"), FRONTS
    wrapper = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
    composable = {"reshard_after_forward": False}


class Frozen(Capability):
    """Two of three blocks do not train."""

    slots, spec = ("frozen",), {"frozen": "second_blocks"}


class MostlyFrozen(Capability):
    """Only norms train."""

    slots, spec = ("frozen",), {"frozen": "all_but_norms"}


class Toggled(Capability):
    """A block is frozen for one step."""

    slots = ("frozen",)

    def before_step(self, side: Side, at: int) -> None:
        side.net.blocks[0].requires_grad_(at != 1)

    def after_step(self, side: Side, at: int) -> None:
        side.net.blocks[0].requires_grad_(True)


class AdaptersOff(Capability):
    """Between forward and backward comes one of reference, with adapters frozen, as DPO with peft has it."""

    slots = ("frozen",)

    def loss(self, side: Side, loss: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        adapters = [block.adapter for block in side.net.blocks]
        for adapter in adapters:
            adapter.requires_grad_(False)
        with torch.no_grad():
            side.model(*inputs)
        for adapter in adapters:
            adapter.requires_grad_(True)
        return loss


class Skipped(Capability):
    """One step does not use a block; a `FlatParameter` would have zero gradients."""

    fronts = BY_NAME

    def before_step(self, side: Side, at: int) -> None:
        side.net.skips = at == 1


class OddShapes(Capability):
    """Parameters of one row, of three, and of none."""

    def build(self, net: Net) -> None:
        norm = net.norm
        norm.one, norm.three = nn.Parameter(_ones(1, 8)), nn.Parameter(_ones(3, 1))
        norm.none = nn.Parameter(_ones(0, 2))
        norm.register_forward_hook(_use_odd_shapes)


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float64)


def _use_odd_shapes(norm: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * norm.one * norm.three.mean() + norm.none.sum()


class Buffered(Capability):
    """Statistics that forwards update."""

    def build(self, net: Net) -> None:
        net.blocks[1].norm.register_buffer("calls", torch.zeros(1, dtype=torch.float64))
        net.blocks[1].norm.register_forward_hook(_count)


def _count(norm: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    norm.calls += norm.training and torch.is_grad_enabled()
    return output * (1 + norm.calls / 100).to(output)


class Subclass(Capability):
    """A frozen weight of a tensor subclass, which has a dtype of its own and is not loaded in full."""

    slots, fronts = ("placement", "dtype", "full values"), COMPOSABLE
    refused = dict.fromkeys(("Summoned", "Rounded"), "weight' is a TwoTensor")

    def build(self, net: Net) -> None:
        torch.serialization.add_safe_globals([TwoTensor])
        weight = net.blocks[1].adapter.weight.detach()
        net.blocks[1].adapter.weight = nn.Parameter(TwoTensor(weight, weight.clone()), requires_grad=False)
        net.blocks[1].adapter.register_forward_hook(_first_of_two)


def _first_of_two(module: Any, args: Any, output: Any) -> Any:
    return output.a if isinstance(output, TwoTensor) else output


# How a forward and a backward compute.


class Checkpointed(Capability):
    """Blocks checkpoint from inside."""

    slots, spec = ("checkpointing",), {"checkpointing": "early_stop"}


class Reentrant(Capability):
    """The same by the older kind, which needs an input that needs a gradient."""

    slots, spec = ("checkpointing", "reentrant"), {"checkpointing": "reentrant"}

    def begin(self, side: Side) -> None:
        side.notes["input_grad"] = True


class CheckpointedAround(Capability):
    """Checkpoints around units."""

    slots = ("checkpointing",)

    def build(self, net: Net) -> None:
        net.checkpoints_blocks = True


class Compiled(Capability):
    """A block is compiled."""

    slots = ("compiled",)

    def before_sharding(self, net: Net, world: World) -> None:
        torch._dynamo.reset()
        net.blocks[0].compile(backend="aot_eager")


class Precision(Capability):
    """Computation in float32."""

    slots = ("dtype",)
    tolerance = 1e-4
    wrapper = {"mixed_precision": MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float64)}
    composable = {"mp_policy": MixedPrecisionPolicy(torch.float32, torch.float64)}


class Accumulated(Capability):
    """Two backwards a step, the first without reductions."""

    slots, letters = ("backwards",), "TF"


class TwoForwards(Capability):
    """Two forwards before one backward."""

    def loss(self, side: Side, loss: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return loss + side.model(inputs[0], 2 * inputs[1]).square().mean()


class Penalty(Capability):
    """A gradient penalty: second order, which torch has not with any of these."""

    slots = ("reentrant", "compiled", "tensor parallel")

    def begin(self, side: Side) -> None:
        side.notes["input_grad"] = True

    def loss(self, side: Side, loss: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        (slope,) = torch.autograd.grad(loss, inputs[1], create_graph=True)
        return loss + (slope * len(slope)).square().sum() / len(slope)


class Inferring(Capability):
    """The model infers between a forward and its backward."""

    def loss(self, side: Side, loss: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        side.model.eval()
        with torch.inference_mode():
            side.model(*inputs)
        side.model.train()
        return loss


class Failing(Capability):
    """A forward that raises, before a step."""

    def before_step(self, side: Side, at: int) -> None:
        if at == 1:
            hook = side.net.blocks[1].norm.register_forward_hook(_fail)
            try:
                side.model(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, 8, dtype=torch.float64))
            except ArithmeticError:
                pass
            hook.remove()


def _fail(*_: Any) -> None:
    raise ArithmeticError("on purpose")


class ForwardHooks(Capability):
    """Hooks of the user's on modules: before and after forwards, and in backwards."""

    def build(self, net: Net) -> None:
        net.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        net.blocks[0].register_forward_hook(lambda module, args, output: output * 0.5)
        net.blocks[2].fc1.register_full_backward_hook(lambda module, given, got: (given[0] * 0.5,))


class ParameterHooks(Capability):
    """Hooks of the user's on gradients that are there."""

    slots = ("backwards", "hooks", "parameter objects")

    def begin(self, side: Side) -> None:
        for param in side.model.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(_halve)


def _halve(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


class CommunicationHook(Capability):
    """A hook that reduces by itself, or that sees what was reduced."""

    def sharded(self, side: Side) -> None:
        if side.front == "composable":
            for module in side.model.modules():
                if hasattr(module, "set_all_reduce_hook"):
                    module.set_all_reduce_hook(lambda reduced: reduced.mul_(1.0))
        else:
            assert side.world is not None
            state = comm_hooks.DefaultState(side.world.mesh["shard"].get_group())
            whole = side.model.sharding_strategy is ShardingStrategy.NO_SHARD
            hook = comm_hooks.allreduce_hook if whole else comm_hooks.reduce_scatter_hook
            side.model.register_comm_hook(state, hook)


class InPlace(Capability):
    """Gradients lie where the optimizer has them already."""

    def refusal(self, names: Collection[str]) -> str | None:
        return "got a second gradient in one backward" if {"TiedBlocks", "Reentrant"} <= {*names} else None

    def sharded(self, side: Side) -> None:
        set_gradients_in_place(side.model)


# Where parameters lie, and how they travel.


class Stays(Capability):
    """Full parameters stay from forward to backward."""

    slots = ("strategy",)
    wrapper = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
    composable = {"reshard_after_forward": False}


class NotSharded(Capability):
    """Each rank keeps all parameters."""

    slots, fronts = ("strategy",), WRAPPER
    wrapper = {"sharding_strategy": ShardingStrategy.NO_SHARD}


class Replicated(Capability):
    """One unit is replicated beside those that are sharded."""

    slots, fronts = ("strategy",), COMPOSABLE

    def units(self, net: Net, units: list[Any]) -> list[Any]:
        self._block = net.blocks[0]
        return [unit for unit in units if unit not in [*self._block.modules()][1:]]

    def makes_unit(self, unit: Any, options: dict[str, Any]) -> bool:
        if unit is self._block:
            known = ("mesh", "mp_policy", "offload_policy", "shared_memory", "travel_together_bytes")
            replicate(unit, **{name: options[name] for name in known if name in options})
        return unit is self._block


class ReshardedToTwo(Capability):
    """Two ranks keep the parameters between them."""

    slots, fronts, sizes = ("strategy",), COMPOSABLE, [4]
    composable = {"reshard_after_forward": 2}
    elsewhere = False


class Hybrid(Capability):
    """Two replicas."""

    slots: ClassVar[tuple[str, ...]]
    slots, sizes, mesh = ("strategy", "mesh"), [4], {"replicas": 2}

    def options(self, front: str, world: World) -> dict[str, Any]:
        strategy = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": world.data}
        return {} if front == "composable" else strategy


class WithinCopies(Hybrid):
    """The same, with a first backward that reduces within each copy alone."""

    slots, letters = ("strategy", "mesh", "backwards"), "CF"


class ReplicaGroups(Capability):
    """Two replicas that a manager keeps alike, each with a first rank."""

    slots, sizes, mesh = ("strategy", "mesh", "process group"), [4], {"replicas": 2}
    elsewhere = False

    def refusal(self, names: Collection[str]) -> str | None:
        return "have a hook already" if {"composable", "CommunicationHook"} <= {*names} else None

    def options(self, front: str, world: World) -> dict[str, Any]:
        mesh = world.mesh["shard"]
        return {"mesh": mesh} if front == "composable" else {"process_group": mesh.get_group()}

    def begin(self, side: Side) -> None:
        if side.world is not None:
            join_replica_groups(
                _Manager(side.world.mesh["replicate"].get_group()), side.model, side.optimizer
            )


class _Manager:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def allreduce(self, tensor: torch.Tensor) -> Any:
        return dist.all_reduce(tensor.div_(2), group=self._group, async_op=True)

    def register_state_dict_fn(self, *_: Any) -> None:
        pass


class ByMesh(Capability):
    """The wrapper over a mesh, as the functions always are."""

    slots, fronts = ("mesh",), WRAPPER

    def options(self, front: str, world: World) -> dict[str, Any]:
        return {"device_mesh": world.data}


class TensorParallel(Capability):
    """Blocks are cut by tensor parallelism too; torch unties what it cuts."""

    slots = ("mesh", "placement", "tensor parallel", "ties below tensor parallelism")
    sizes, mesh = [4], {"tensor": 2}
    elsewhere = False

    def before_sharding(self, net: Net, world: World) -> None:
        for block in net.blocks:
            parallelize_module(
                block, world.mesh["tensor"], {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}
            )

    def options(self, front: str, world: World) -> dict[str, Any]:
        return {"mesh": world.data} if front == "composable" else {"device_mesh": world.data}


class Experts(Capability):
    """A mixture of experts, whose parameters have a mesh of their own."""

    slots, fronts, sizes = ("mesh", "placement"), COMPOSABLE, [4]
    elsewhere = False

    def build(self, net: Net) -> None:
        net.blocks[1].experts = moe_nets.MoE().double()
        net.blocks[1].register_forward_hook(_to_experts)

    def before_sharding(self, net: Net, world: World) -> None:
        _, own, self._spread = moe_nets.meshes()
        self._info = moe_nets.info_of(own)
        moe_nets.distribute_in(net.blocks[1].experts, self._spread)  # type: ignore[arg-type]

    def options(self, front: str, world: World) -> dict[str, Any]:
        return {"shard_placement_fn": moe_nets.placing(self._info)}

    def sharded(self, side: Side) -> None:
        side.net.blocks[1].set_gradient_divide_factor(4)


def _to_experts(block: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    width = moe_nets.WIDTH
    return torch.cat([block.experts(output[..., :width]), output[..., width:]], -1)


class Columns(Capability):
    """Matrices are cut along their second dimension."""

    slots, fronts = ("placement",), COMPOSABLE
    refused = dict.fromkeys(
        ("Exported", "Source", "WeightFiles", "WeightChanges", "Rounded"),
        "is cut along dimension 1",
    )

    def options(self, front: str, world: World) -> dict[str, Any]:
        ranks = world.copies // world.replicas
        return {"shard_placement_fn": lambda param: _columns(param, ranks)}


def _columns(param: nn.Parameter, ranks: int) -> Shard | None:
    return Shard(1) if param.ndim == 2 and param.shape[1] % ranks == 0 else None


class Aligned(Capability):
    """Parts begin at rows."""

    slots, wrapper, composable = ("placement",), {"shard_alignment": "rows"}, {"shard_alignment": "rows"}


class Budgeted(Capability):
    """Some full parameters may stay."""

    wrapper, composable = {"keep_unsharded_bytes": 3000}, {"keep_unsharded_bytes": 3000}


class Offloaded(Capability):
    """Parameters live on the host."""

    slots = ("offload",)
    wrapper, composable = {"cpu_offload": CPUOffload(True)}, {"offload_policy": CPUOffloadPolicy()}


class StateOffloaded(Capability):
    """Optimizer state lives on the host."""

    slots = ("offload",)
    wrapper = {"cpu_offload": CPUOffload(False, offload_optimizer_state=True)}
    composable = {
        "offload_policy": CPUOffloadPolicy(offload_params=False, offload_optimizer_state=True),
    }


class Alone(Capability):
    """Each unit has collectives of its own; small ones share them else, from the second step on."""

    wrapper, composable = {"travel_together_bytes": 0}, {"travel_together_bytes": 0}


class OverGloo(Capability):
    """No shared memory."""

    wrapper, composable = {"shared_memory": False}, {"shared_memory": False}


# Optimizers, of which every program has one.


class Optimizer(Capability):
    """Makes the optimizer, the same on both sides if it need not be another."""

    slots: ClassVar[tuple[str, ...]] = ("optimizer",)

    def optimizer(self, side: Side) -> torch.optim.Optimizer:
        return self.of(side.model.parameters())

    def of(self, params: Any) -> torch.optim.Optimizer:
        return adamw(params)


class AdamW(Optimizer):
    """Torch's own."""


class Momentum(Optimizer):
    """One moment."""

    def of(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)


class NAdam(Optimizer):
    """With a float32 number for each parameter, which torch loads in the dtype of that."""

    tolerance = 1e-7

    def of(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.NAdam(params, lr=0.02, eps=1e-2)


class Numbers(Optimizer):
    """With Python numbers for each parameter."""

    def of(self, params: Any) -> torch.optim.Optimizer:
        return Counting(params, lr=0.1)


class Counting(torch.optim.Optimizer):
    """Descends ever more slowly along a sum of gradients."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state.setdefault("sum", torch.zeros_like(param)).add_(param.grad)
                    state["count"] = state.get("count", 0) + 1
                    state["rate"] = group["lr"] / math.sqrt(state["count"])
                    param.sub_(state["sum"] * state["rate"])


class Groups(Optimizer):
    """Without decay of what has one dimension."""

    fronts = COMPOSABLE

    def of(self, params: Any) -> torch.optim.Optimizer:
        params = [*params]
        decayed, rest = ([each for each in params if (each.ndim > 1) is wide] for wide in (True, False))
        return adamw([{"params": rest, "weight_decay": 0.0}, {"params": decayed}])


class Fused(Optimizer):
    """One kernel for all."""

    def of(self, params: Any) -> torch.optim.Optimizer:
        return adamw(params, fused=True)


class OnShards(Optimizer):
    """Torch's own, on the shards behind `DTensor`s."""

    def optimizer(self, side: Side) -> torch.optim.Optimizer:
        made = adamw(side.model)
        return on_shards(made) if side.world else made


class OnShardsNumbers(Numbers):
    """With Python numbers, on shards."""

    def optimizer(self, side: Side) -> torch.optim.Optimizer:
        made = super().optimizer(side)
        return on_shards(made) if side.world else made


class Matrices(Optimizer):
    """Muon."""

    tolerance = 1e-6

    def optimizer(self, side: Side) -> torch.optim.Optimizer:
        return Muon(side.model, lr=0.02, ns_dtype=torch.float64, other=adamw)


class OnHost(Optimizer):
    """AdamW in one pass over what lies on the host."""

    def of(self, params: Any) -> torch.optim.Optimizer:
        return HostAdamW(params, lr=0.02, eps=1e-2)


class Rounded(Optimizer):
    """Stochastic rounding, of which parameters in float64 need none."""

    def optimizer(self, side: Side) -> torch.optim.Optimizer:
        return stochastic_rounding(adamw(side.model), side.model, seed=3)


class InBackward(Optimizer):
    """Steps in the backward."""

    slots = ("optimizer", "update", "clipping", "hooks")

    def optimizer(self, side: Side) -> torch.optim.Optimizer:
        if side.world is None:
            return adamw(param for param in side.model.parameters() if param.requires_grad)
        return step_in_backward(side.model, adamw)

    def update(self, side: Side) -> bool:
        return side.world is not None


# What a training loop does besides.


class Scaled(Capability):
    """A loss that is scaled."""

    slots = ("update",)

    def begin(self, side: Side) -> None:
        kind = ShardedGradScaler if side.world else torch.amp.GradScaler
        side.notes["scaler"] = kind("cpu", init_scale=1024.0, growth_interval=2)

    def loss(self, side: Side, loss: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return side.notes["scaler"].scale(loss)

    def after_backward(self, side: Side) -> None:
        side.notes["scaler"].unscale_(side.optimizer)

    def update(self, side: Side) -> bool:
        side.notes["scaler"].step(side.optimizer)
        side.notes["scaler"].update()
        return True

    def goes_on(self, first: Side, second: Side) -> None:
        second.notes["scaler"].load_state_dict(first.notes["scaler"].state_dict())


class Clipped(Capability):
    """Gradients are clipped by their norm."""

    slots = ("clipping",)

    def after_backward(self, side: Side) -> None:
        if side.front == "composable":  # torch's own takes parameters of one mesh
            clip_grad_norm_(side.model, 0.3)
        else:
            clip(side.model, 0.3)


class Scheduled(Capability):
    """A learning rate that falls."""

    slots = ("optimizer object",)

    def begin(self, side: Side) -> None:
        side.notes["scheduler"] = torch.optim.lr_scheduler.LambdaLR(side.optimizer, _falling)

    def after_step(self, side: Side, at: int) -> None:
        side.notes["scheduler"].step()

    def goes_on(self, first: Side, second: Side) -> None:
        second.notes["scheduler"].load_state_dict(first.notes["scheduler"].state_dict())


def _falling(step: int) -> float:
    return 1 / (1 + step)


class Summoned(Capability):
    """Full parameters are changed by hand."""

    def after_step(self, side: Side, at: int) -> None:
        if at == 1:
            with FSDP.summon_full_params(side.model), torch.no_grad():
                for param in side.model.parameters():
                    param.mul_(0.9)


class Copied(Capability):
    """A deep copy goes on in place of the model."""

    slots = ("optimizer object", "parameter objects")

    def after_step(self, side: Side, at: int) -> None:
        if at == 1:
            state = side.optimizer.state_dict()
            side.model = copy.deepcopy(side.model)
            side.optimizer = side.make_optimizer(side)
            side.optimizer.load_state_dict(state)
