"""What users and clients read from a wrapped model, write to it and call on it, beside training."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bed import ranks
from fronts import each_form
from fsdp_wrap import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import ModuleWrapPolicy
from nets import WIDTH, Block


class Net(nn.Sequential):
    motto = "of the class"

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), Block(), Block(), nn.Linear(WIDTH, 3))
        self.note = {"of": "the instance"}

    def widths(self, *, times: int = 1) -> list[int]:
        return [times * param.shape[-1] for param in self.parameters()]

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self[0](x)


def per_block(net: nn.Module, **options: Any) -> FSDP:
    return FSDP(net, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, members: list[int], count: int = 3) -> None:
    for step in range(count):
        generator = torch.Generator().manual_seed(step)
        batches = torch.randn(dist.get_world_size(), 4, WIDTH, generator=generator)
        optimizer.zero_grad()
        dtype = next(param.dtype for param in model.parameters())
        model(batches[members].flatten(0, 1).to(dtype)).square().mean().backward()
        optimizer.step()


def train_both(model: nn.Module, plain: nn.Module) -> None:
    steps(model, torch.optim.SGD(model.parameters(), lr=0.1), [dist.get_rank()])
    steps(plain, torch.optim.SGD(plain.parameters(), lr=0.1), list(range(dist.get_world_size())))


def assert_equal_state(model: nn.Module, plain: nn.Module, tolerance: float) -> None:
    state = model.state_dict()
    for name, expected in plain.state_dict().items():
        assert state[name].dtype == expected.dtype, name
        torch.testing.assert_close(state[name], expected, rtol=0, atol=tolerance)


# Data that are replaced.


def upcast_as_accelerate_does(model: nn.Module) -> None:
    for module in FSDP.fsdp_modules(model):
        if module._has_params:
            param = module._flat_param
            if param.dtype != torch.float32 and param.requires_grad:
                assert param.device == torch.device("cpu") and all(param._fqns)
                param.data = param.data.to(torch.float32)
                module._handle._orig_param_dtype = torch.float32


def change_data(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for param in model.parameters():
        param.data = change(param.data)


CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "to": lambda model: nn.Sequential(model).to("cpu", torch.float64),
    "half and double": lambda model: model.half().double(),
    "bfloat16 and float": lambda model: model.bfloat16().float(),
    "behind the wrapper": lambda model: getattr(model, "module", model).double(),
    "replaced data": lambda model: change_data(model, lambda data: data * 0.5),
}
UPCASTS: dict[str, Callable[[nn.Module], Any]] = {
    "accelerate": upcast_as_accelerate_does,
    "all": lambda model: change_data(model, torch.Tensor.float),
}
"""Of models in bfloat16, before their first forward."""


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@each_form
@ranks(2)
def test_replaced_data_are_what_counts(rank, world_size, use_orig_params, strategy):
    options = {"use_orig_params": use_orig_params, "sharding_strategy": ShardingStrategy[strategy]}
    for number, (how, change) in enumerate({**CONVERSIONS, **UPCASTS}.items()):
        plain = Net().bfloat16() if how in UPCASTS else Net()
        model = (FSDP, per_block)[number % 2](copy.deepcopy(plain), **options)
        params = list(model.parameters())
        if how not in UPCASTS:
            train_both(model, plain)
            plain.load_state_dict(model.state_dict())
        change(model)
        plain.float() if how in UPCASTS else change(plain)
        assert all(new is old for new, old in zip(model.parameters(), params, strict=True))
        dtypes = {param.dtype for param in plain.parameters()}
        # With original parameters, those of some upcasts are seen at the next use.
        assert how in UPCASTS or {param.dtype for param in model.parameters()} == dtypes
        assert {param.grad.dtype for param in model.parameters() if param.grad is not None} <= dtypes
        assert how in UPCASTS or any(param.grad is not None for param in model.parameters())
        assert_equal_state(model, plain, 0)
        with FSDP.summon_full_params(model):
            assert {param.dtype for param in model.parameters()} == dtypes
        train_both(model, plain)
        assert {param.dtype for param in model.parameters()} == dtypes
        assert {unit._handle._orig_param_dtype for unit in FSDP.fsdp_modules(model)} == dtypes
        assert_equal_state(model, plain, 1e-6 if dtypes == {torch.float32} else 1e-12)


# What clients read.


@each_form
@ranks(2)
def test_private_names_of_torch_that_clients_read(rank, world_size, use_orig_params):
    net = Net()
    net[3].weight.requires_grad_(False)
    whole = list(net.parameters())
    model = per_block(net, use_orig_params=use_orig_params)
    empty = FSDP(nn.Sequential(nn.Tanh()))
    assert model._has_params and not empty._has_params
    assert empty._flat_param is None and empty._handle is None
    assert model._flat_param is model._handle.flat_param and model._flat_param.requires_grad
    assert model._flat_param._fqns == ("0.weight", "0.bias", "3.bias")
    assert model[1]._flat_param._fqns == ("up.weight", "up.bias", "down.weight", "down.bias")
    assert all(param._fsdp_flattened for param in whole)
    assert (list(model.parameters()) == whole) == use_orig_params
    assert (model._is_root, model[1]._is_root) == (None, None)
    model(torch.ones(1, WIDTH))
    assert (model._is_root, model[1]._is_root) == (True, False)
    for module in net.modules():
        assert module._is_fsdp_managed_module and module._fsdp_use_orig_params
    ignoring = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    FSDP(ignoring, ignored_states=[ignoring[1]])
    assert not hasattr(ignoring[1], "_is_fsdp_managed_module")


@each_form
@ranks(2)
def test_attributes_items_and_units(rank, world_size, use_orig_params):
    plain, net = Net(), Net()
    model = per_block(net, use_orig_params=use_orig_params)
    assert model.module is net and model.motto == "of the class" and model.note is net.note
    assert model[1] is net[1] and isinstance(model[1], FSDP) and model[1].up is net[1].module.up
    assert model[-1] is net[3] and FSDP(nn.ModuleDict({"a": nn.Linear(2, 2)}))["a"].in_features == 2
    with FSDP.summon_full_params(model):
        assert model.widths(times=2) == plain.widths(times=2)
    for ask, error, said in (
        (lambda: model.absent, AttributeError, "'Net' object has no attribute 'absent'"),
        (lambda: model[1].absent, AttributeError, "'Block' object has no attribute 'absent'"),
        (lambda: model[1][0], TypeError, "'Block' object is not subscriptable"),
    ):
        with pytest.raises(error, match=said):
            ask()
    units = FSDP.fsdp_modules(model)
    assert units == [model, model[1], model[2]] and FSDP.fsdp_modules(plain) == []
    parent = nn.ModuleList([model, FSDP(nn.Linear(2, 2)), nn.Linear(2, 2)])
    assert FSDP.fsdp_modules(parent) == [*units, parent[1]]
    assert FSDP.fsdp_modules(parent, root_only=True) == [model, parent[1]]
    model(torch.ones(1, WIDTH))
    assert [unit.check_is_root() for unit in units] == [True, False, False]
    names = [name.replace("_fsdp_wrapped_module.", "") for name, _ in model.named_parameters()]
    flat = ["_flat_param", "1._flat_param", "2._flat_param"]
    assert names == ([name for name, _ in plain.named_parameters()] if use_orig_params else flat)
    model.share_memory()
    assert all(param.is_shared() for param in model.parameters())
    assert not any(module.training for module in model.eval().modules())
    assert not model.requires_grad_(False)(torch.ones(1, WIDTH)).requires_grad


@ranks(2)
def test_repr_is_one_line_per_unit(rank, world_size):
    net = Net()
    net[3].requires_grad_(False)
    net[0].bfloat16()
    model = per_block(net, use_orig_params=True, shared_memory=False)
    lines = [line.strip() for line in repr(model).splitlines() if "SHARD" in line]
    pieces = [[*unit.parameters(recurse=False)] for unit in (net[0], net[3], model[1].up, model[1].down)]
    low, frozen, *block = (sum(map(torch.numel, of_unit)) for of_unit in pieces)
    assert len(lines) == 3 and lines[:2] == [
        f"FULL_SHARD, rank {rank} of 2, holds {low} of 42 bfloat16, {frozen} of 21 float32 (frozen)",
        f"FULL_SHARD, rank {rank} of 2, holds {sum(block)} of 71 float32",
    ]
    whole = FSDP(Net(), sharding_strategy=ShardingStrategy.NO_SHARD, shared_memory=False)
    assert "NO_SHARD, rank 0 of 1 x 2 copies, holds 205 of 205 float32\n" in repr(whole)
    assert "FULL_SHARD, no parameters of its own" in repr(FSDP(nn.Tanh()))


@ranks(2)
def test_how_a_wrapper_was_set_up_can_be_read(rank, world_size):
    group = dist.new_group(list(range(world_size)))
    options: dict[str, Any] = {
        "process_group": group,
        "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
        "cpu_offload": CPUOffload(offload_params=True),
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16),
        "backward_prefetch": BackwardPrefetch.BACKWARD_POST,
        "forward_prefetch": True,
        "limit_all_gathers": False,
    }
    model = per_block(Net(), use_orig_params=True, **options)
    for wrapper in FSDP.fsdp_modules(copy.deepcopy(model)) + FSDP.fsdp_modules(model):
        assert {name: getattr(wrapper, name) for name in options} == options
        assert (wrapper.rank, wrapper.world_size) == (dist.get_rank(group), world_size)
        assert wrapper.compute_device == torch.device("cpu")
        with pytest.raises(AttributeError):
            wrapper.cpu_offload = CPUOffload()  # type: ignore[misc]
    held = sum(param.numel() for unit in FSDP.fsdp_modules(model) for param in unit.params)
    full = sum(param.numel() for param in Net().parameters())
    assert full / world_size <= held < full / world_size + 4 * len(FSDP.fsdp_modules(model))
    default = FSDP(nn.Sequential(FSDP(nn.Linear(3, 4))))
    assert default.params == [] and [param.numel() for param in default[0].params] == [8]
    assert default.cpu_offload == CPUOffload() and default.mixed_precision.param_dtype is None
    assert default.backward_prefetch is BackwardPrefetch.BACKWARD_PRE and default.limit_all_gathers is True
    assert default.process_group is dist.group.WORLD
