"""Programs that name torch's `fully_shard` get ours where `compat.install(fully_shard=True)` was called."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import _composable_state
from torch.distributed import fsdp as torch_fsdp
from torch.distributed._composable import fsdp as composable_fsdp
from torch.distributed._composable import replicate_with_fsdp as replicating
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule as ImportedBefore
from torch.distributed.fsdp import _fully_shard as package
from torch.distributed.fsdp._fully_shard import _fsdp_api, _fsdp_init, _fsdp_param_group, _fsdp_state
from torch.distributed.fsdp._fully_shard import _fully_shard as private
from torch.distributed.pipelining import stage as pipeline_stage

import fsdp_wrap
from bed import ranks
from beside import assert_close_grads, large_batch_backward
from fsdp_wrap import compat
from models import Transformer, loss_of, tokens

composable_module = sys.modules[f"{composable_fsdp.__name__}.fully_shard"]

HELD = (nn.Sequential, torch_fsdp.FSDPModule)
HELD_OF_REPLICATE = (replicating.replicate, replicating.ReplicateModule)
"""In tuples, which nobody rebinds."""

NAMES = {
    "FSDPModule",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
}


@pytest.fixture
def clean() -> Iterator[None]:
    yield
    compat.uninstall()


def _held_by_torch() -> dict[tuple[str, str], object]:
    modules = {name: module for name, module in sys.modules.items() if name.startswith("torch.distributed")}
    namespaces = {name: vars(module) for name, module in modules.items() if isinstance(module, ModuleType)}
    return {(name, key): value for name, held in namespaces.items() for key, value in held.items()}


def test_names_resolve_to_ours_and_back(clean):
    ours = fsdp_wrap.fully_shard, fsdp_wrap.replicate
    before, attributes = _held_by_torch(), [dict(vars(function)) for function in ours]
    compat.install(fully_shard=True)
    for module in (torch_fsdp, package, composable_fsdp, composable_module):
        held = {name: value for name, value in vars(module).items() if name in NAMES}
        assert held == {name: getattr(fsdp_wrap, name) for name in held}, module.__name__
    assert vars(torch_fsdp).keys() >= NAMES and ImportedBefore is fsdp_wrap.FSDPModule
    for name in {*package.__all__} - {*fsdp_wrap.api.__all__}:  # a newer torch's stay so until we have them
        assert getattr(torch_fsdp, name) is getattr(fsdp_wrap, name, getattr(private, name, None)), name
    assert private.fully_shard is fsdp_wrap.fully_shard, "by its whole path, too"
    assert replicating.replicate is fsdp_wrap.replicate
    assert issubclass(fsdp_wrap.ReplicateModule, replicating.ReplicateModule)
    assert _fsdp_api.MixedPrecisionPolicy is fsdp_wrap.MixedPrecisionPolicy.__base__, "which we take as it is"
    assert torch_fsdp.FullyShardedDataParallel is fsdp_wrap.FullyShardedDataParallel
    compat.uninstall()
    after = _held_by_torch()
    assert {key for key in before if after[key] is not before[key]} == set()
    assert ImportedBefore is HELD[1] and fsdp_wrap.FSDPModule.__bases__ == (nn.Module,)
    assert fsdp_wrap.ReplicateModule.__bases__ == (fsdp_wrap.FSDPModule,)
    assert [vars(function) for function in ours] == attributes
    with compat.install(), compat.install(fully_shard=True):
        assert issubclass(fsdp_wrap.FSDPModule, HELD)
    assert not issubclass(fsdp_wrap.FSDPModule, HELD)


@ranks(2)
def test_sharded_modules_are_instances_of_torchs_class_while_installed(rank, world_size):
    """By whichever name it is asked for, and also those that were sharded before."""
    before = fsdp_wrap.fully_shard(nn.Linear(4, 4))
    with compat.install(fully_shard=True):
        model = torch_fsdp.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        assert type(model) is not nn.Sequential and type(model[:1]) is nn.Sequential
        for module in (before, model):
            assert isinstance(module, torch_fsdp.FSDPModule) and isinstance(module, private.FSDPModule)
            assert isinstance(module, HELD[1]) and type(module).state_dict is fsdp_wrap.FSDPModule.state_dict
        assert not isinstance(model[0], HELD[1])
        model(torch.ones(2, 4)).sum().backward()
    assert not isinstance(before, HELD[1]) and isinstance(before, fsdp_wrap.FSDPModule)


@ranks(2)
def test_programs_that_name_torchs_replicate_get_ours(rank, world_size):
    """Whether they imported it before, inside of it, or hold the class that torch's modules have."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model = copy.deepcopy(plain)
    with compat.install(fully_shard=True):
        theirs = HELD_OF_REPLICATE[0](nn.Linear(2, 2))
        replicating.replicate(model[0])
        replicating.replicate(model)
        assert isinstance(model, fsdp_wrap.ReplicateModule) and type(model[:1]) is nn.Sequential
        assert issubclass(replicating.ReplicateModule, pipeline_stage.FSDPModule), "which pipelines ask for"
        for kind in (HELD_OF_REPLICATE[1], replicating.ReplicateModule, HELD[1], torch_fsdp.FSDPModule):
            assert isinstance(model, kind), kind
        assert not isinstance(torch_fsdp.fully_shard(nn.Linear(2, 2)), HELD_OF_REPLICATE[1])
        state = replicating.replicate.state(model)
        assert isinstance(state, _fsdp_state.FSDPState) and state == model._get_fsdp_state()
        assert type(replicating.replicate.state(theirs)) is replicating._ReplicateState
        state._lazy_init()
        groups = [unit_state._fsdp_param_group for unit_state in state._state_ctx.all_states]
        for group in groups:
            info = group.mesh_info
            assert type(info).__name__ == "DDPMeshInfo" and info.mesh.mesh_dim_names == ("replicate",)
            assert group._all_reduce_process_group.size() == 2 and group.post_forward_mesh_info is None
            for param in group.fsdp_params:
                assert torch.equal(param._sharded_param_data, param.sharded_param.to_local().view(-1))
        inputs = torch.arange(16.0, dtype=torch.float64).view(2, 2, 4)
        model(inputs[rank]).square().sum().backward()
        plain(inputs).square().sum().div(2).backward()
        for param, expected in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad)
    assert not isinstance(model, HELD_OF_REPLICATE[1]) and replicating.replicate is HELD_OF_REPLICATE[0]


def _sharded(**options):
    torch.manual_seed(0)
    model = Transformer()
    for block in model.blocks:
        torch_fsdp.fully_shard(block, **options)
    return torch_fsdp.fully_shard(model)


@ranks(2)
def test_programs_read_the_state_by_torchs_names(rank, world_size):
    """As tools do that offload, average or count what is sharded."""
    with compat.install(fully_shard=True):
        policy = torch_fsdp.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
        model = _sharded(mp_policy=policy, offload_policy=None)  # which torch takes for "no offload"
        asked, own = (module._get_fsdp_state()._mp_policy for module in (model.blocks[0], model))
        assert (asked.param_dtype, asked.output_dtype) == (torch.bfloat16, torch.float32)
        assert (own.param_dtype, own.output_dtype) == (torch.float32, None) and asked.cast_forward_inputs
        state = model._get_fsdp_state()
        assert isinstance(state, _fsdp_state.FSDPState)
        assert state == _fsdp_state._get_module_fsdp_state(model) == torch_fsdp.fully_shard.state(model)
        assert isinstance(_composable_state._get_module_state(model), _fsdp_state.FSDPState)
        assert _fsdp_state._get_module_fsdp_state(model.head) is None
        known = _composable_state._module_state_mapping  # programs look there for the unit around a module
        here = {*map(id, model.modules())}  # earlier tests of the process may have left models
        assert [module for module in known if id(module) in here] == [*model.blocks, model]
        assert known[model]() == state and model.head not in known
        theirs: Any = HELD_OF_REPLICATE[0](nn.Linear(2, 2))
        assert known[theirs]() is _composable_state._get_module_state(theirs) and theirs in list(known)
        assert state._is_root is None and state._modules == (model,)
        state._lazy_init()
        states = state._state_ctx.all_states
        assert [unit_state._modules for unit_state in states] == [
            (model,),
            *((block,) for block in model.blocks),
        ]
        assert [unit_state._is_root for unit_state in states] == [True, False, False, False]
        groups = [unit_state._fsdp_param_group for unit_state in states]
        assert all(isinstance(group, _fsdp_param_group.FSDPParamGroup) for group in groups)
        assert [unit_state._fsdp_param_groups for unit_state in states] == [[group] for group in groups]
        params = [param for group in groups for param in group.fsdp_params]
        names = {id(param): name for name, param in model.named_parameters()}
        assert {param._param_fqn: id(param.sharded_param) for param in params} == {
            name: number for number, name in names.items()
        }
        info = groups[1].fsdp_params[0]._module_info
        assert getattr(info.module, info.param_name) is groups[1].fsdp_params[0].sharded_param
        assert groups[1].mesh_info.shard_process_group is groups[1]._all_gather_process_group
        assert groups[1]._all_gather_process_group.size() == 2
        for param in params:
            if param._orig_size.numel() == 2 * param.sharded_size.numel():
                assert torch.equal(param._sharded_param_data, param.sharded_param.to_local().view(-1))
        block = model.blocks[0]
        del model, state, states, groups, params, param, names, info
        gc.collect()  # a part answers for its tree when the root has gone
        assert [unit_state._modules for unit_state in block._get_fsdp_state()._state_ctx.all_states] == [
            (block,)
        ]


@ranks(2)
def test_parameters_on_several_meshes_are_groups_of_one_state(rank, world_size):
    model = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    info = fsdp_wrap.api.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    told = {model.bias: fsdp_wrap.api.ShardPlacementResult(None, info)}
    fsdp_wrap.fully_shard(model, shard_placement_fn=told.get)
    with compat.install(fully_shard=True):
        state = private.fully_shard.state(model)
        state._lazy_init()
        names = [[param._param_fqn for param in group.fsdp_params] for group in state._fsdp_param_groups]
        assert names == [["weight"], ["bias"]]
        assert state._fsdp_param_groups[1].mesh_info.mesh == mesh and state._fsdp_param_groups[1]._is_hsdp
        assert state._state_ctx.all_states == [state]


@ranks(2)
def test_what_the_state_cannot_tell_raises_by_its_name(rank, world_size):
    """An absent attribute, or an assignment without effect, would pass for "not sharded"."""
    with compat.install(fully_shard=True):
        model = torch_fsdp.fully_shard(nn.Sequential(nn.Linear(4, 3)))
        state = model._get_fsdp_state()
        group = state._fsdp_param_group
        with pytest.raises(RuntimeError, match="'_training_state' of torch's FSDPState.*root unit"):
            getattr(state, "_training_state", None)
        with pytest.raises(RuntimeError, match="'_all_gather_comm' of torch's FSDPParamGroup"):
            group._all_gather_comm = None
        with pytest.raises(RuntimeError, match="'_sharded_param_data'"):  # torch's would be padded
            _ = group.fsdp_params[1]._sharded_param_data
        with pytest.raises(RuntimeError, match="full parameter '0.weight' is not in memory"):
            _ = group.fsdp_params[0].unsharded_param
        assert not hasattr(state, "no_such_thing")
        group.unshard()
        group.wait_for_unshard()
        assert group.is_unsharded and group.fsdp_params[0].unsharded_param is model[0].weight
        group.reshard()
        assert group.is_sharded and not group.is_unsharded
        bare_model = torch_fsdp.fully_shard(nn.Sequential(nn.ReLU()))
        bare = bare_model._get_fsdp_state()
        assert bare._fsdp_param_group is None and bare._fsdp_param_groups == []
        assert state._device == torch.device("cpu")
        with pytest.raises(RuntimeError, match="'_device' of torch's FSDPState"):  # nothing is on any
            _ = bare._device
        parts: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 4)]
        torch_fsdp.fully_shard(parts)
        assert torch_fsdp.fully_shard.state(parts[1])._modules == tuple(parts)
        assert torch_fsdp.fully_shard.state(nn.Tanh()) is None


@ranks(2)
def test_programs_set_what_happens_after_forward(rank, world_size):
    """In the state, as they do where torch's method was missing once: the root reshards, a unit does not."""
    with compat.install(fully_shard=True):
        model = _sharded()
        states = [module._get_fsdp_state() for module in (model, *model.blocks)]
        groups = [state._fsdp_param_group for state in states]
        model(tokens(rank, 0))
        assert [group.is_unsharded for group in groups] == [True, False, False, False]
        assert [group.post_forward_mesh_info is None for group in groups] == [True, False, False, False]
        for state, group, reshards in zip(states, groups, (True, False, True, True)):
            state._auto_reshard_after_forward = False
            group.post_forward_mesh_info = _fsdp_init._get_post_forward_mesh_info(reshards, group.mesh_info)
        model(tokens(rank, 0)).sum()
        assert [group.is_unsharded for group in groups] == [False, True, False, False]


def uses_of_a_unit(rank: int) -> list[str]:
    """What a unit is used for in a step, and what happens to it after its backward, by its state."""
    model = _sharded()
    model.set_reshard_after_backward(False)
    group = torch_fsdp.fully_shard.state(model.blocks[0])._fsdp_param_group
    told = [group._training_state.name]

    def tell(*_: Any) -> None:
        told.append(group._training_state.name)

    def tell_in_backward(_: Any, __: Any, output: Any) -> None:
        tell()
        output.register_hook(tell)

    model.blocks[0].norm1.register_forward_hook(tell_in_backward)
    model(tokens(rank, 0)).sum().backward()
    tell()
    group._training_state = type(group._training_state).IDLE  # as programs do before they offload
    return [*told, group.reshard_after_backward]


@ranks(2)
def test_programs_read_and_reset_the_use_of_a_unit(rank, world_size):
    torchs = uses_of_a_unit(rank)
    with compat.install(fully_shard=True):
        assert uses_of_a_unit(rank) == torchs == ["IDLE", "FORWARD", "PRE_BACKWARD", "IDLE", False]
        model = _sharded()
        group = torch_fsdp.fully_shard.state(model)._fsdp_param_group
        with pytest.raises(RuntimeError, match="'_training_state' of torch's FSDPParamGroup"):
            group._training_state = type(group._training_state).FORWARD


@ranks(2)
def test_backwards_ended_by_the_state(rank, world_size):
    """As pipelines do: backwards that neither reduce nor reshard, and then each unit's part by hand."""
    with compat.install(fully_shard=True):
        model = _sharded()
        torch.manual_seed(0)
        plain = Transformer()
        for flag, steps in ((False, (0, 1)), (True, ())):
            for setting in ("is_last_backward", "reshard_after_backward", "requires_gradient_sync"):
                getattr(model, f"set_{setting}")(flag)
            for step in steps:
                loss_of(model, tokens(rank, step)).backward()
        state = torch_fsdp.fully_shard.state(model)
        for unit_state in state._state_ctx.all_states:
            unit_state._fsdp_param_group.post_backward()
        state._root_post_backward_final_callback()
        large_batch_backward(plain, (0, 1))
        assert_close_grads(model, plain, rtol=1.3e-6, atol=1e-5)
        assert all(unit_state._fsdp_param_group.is_sharded for unit_state in state._state_ctx.all_states)


def test_a_program_from_the_command_line(tmp_path, monkeypatch, capsys, clean):
    """A module of a package."""
    package = tmp_path / "a_package_of_the_test"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "beside.py").write_text("from torch.distributed.fsdp import fully_shard\n")
    lines = "import sys", "from .beside import fully_shard", "print(__name__, __package__, sys.argv[1:])"
    (package / "run.py").write_text("\n".join([*lines, "print(fully_shard.__module__)", ""]))
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.syspath_prepend(tmp_path)
    compat.main(["--fully-shard", "-m", f"{package.name}.run", "--cpu", "-m", "x"])
    shown = f"__main__ {package.name} ['--cpu', '-m', 'x']\nfsdp_wrap.fully_shard\n"
    assert capsys.readouterr().out == shown
