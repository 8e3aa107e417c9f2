"""What users mistake most often is told by name, before anything changes."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh

from bed import ranks
from bed.paths import ROOT
from fronts import each_front
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import StateDictType, fully_shard
from fsdp_wrap.wrap import CustomPolicy, ModuleWrapPolicy


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def assert_names_both(name: str, call: Callable[[], Any]) -> None:
    path = rf"fsdp_wrap\.api\.{name}, not a torch\.distributed\.fsdp[\w.]*\.{name}"
    with pytest.raises(TypeError, match=path) as error:
        call()
    assert f"import {name} from fsdp_wrap" in str(error.value)


OF_TORCH: dict[str, Any] = {
    "sharding_strategy": torch_fsdp.ShardingStrategy.FULL_SHARD,
    "cpu_offload": torch_fsdp.CPUOffload(),
    "backward_prefetch": torch_fsdp.BackwardPrefetch.BACKWARD_PRE,
    "mixed_precision": torch_fsdp.MixedPrecision(torch.bfloat16),
}


@pytest.mark.parametrize("argument", OF_TORCH)
@ranks(2)
def test_torchs_objects_are_told_from_ours(rank, world_size, argument):
    value = OF_TORCH[argument]
    model = net()
    before = list(model.parameters())
    assert_names_both(type(value).__name__, lambda: FSDP(model, **{argument: value}))
    policy = CustomPolicy(lambda module: {argument: value} if isinstance(module, nn.Linear) else False)
    assert_names_both(type(value).__name__, lambda: FSDP(model, auto_wrap_policy=policy))
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))


@ranks(2)
def test_torchs_objects_are_told_from_ours_elsewhere(rank, world_size):
    wrapped, mesh = FSDP(net()), init_device_mesh("cpu", (world_size,))
    kind = torch_fsdp.StateDictType.FULL_STATE_DICT
    assert_names_both("StateDictType", lambda: FSDP.set_state_dict_type(wrapped, kind))  # type: ignore[arg-type]
    for config in (torch_fsdp.FullStateDictConfig(), torch_fsdp.FullOptimStateDictConfig()):
        place = "optim_state_dict_config" if "Optim" in type(config).__name__ else "state_dict_config"
        options: dict[str, Any] = {place: config}
        assert_names_both(
            type(config).__name__,
            lambda: FSDP.set_state_dict_type(wrapped, StateDictType.FULL_STATE_DICT, **options),  # noqa: B023
        )
    for policy in (
        torch_fsdp.MixedPrecisionPolicy(),
        torch_fsdp.OffloadPolicy(),
        torch_fsdp.CPUOffloadPolicy(),
    ):
        argument = "mp_policy" if "Mixed" in type(policy).__name__ else "offload_policy"
        options = {argument: policy}
        assert_names_both(type(policy).__name__, lambda: fully_shard(net(), mesh=mesh, **options))  # noqa: B023
    with pytest.raises(TypeError, match="must be a ShardingStrategy or None, not 'FULL_SHARD'"):
        FSDP(net(), sharding_strategy="FULL_SHARD")  # type: ignore[arg-type]


def made(front: str, module: nn.Module, **options: Any) -> nn.Module:
    """Sharded by a front-end, with an option that has the same name in all."""
    if front != "composable":
        return FSDP(module, use_orig_params=front == "orig", **options)
    return fully_shard(module, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)), **options)


@each_front
@ranks(2)
def test_shared_memory_is_a_flag(rank, world_size, front):
    for wrong in ("yes", 1, "0"):
        model = net()
        with pytest.raises(TypeError, match=f"shared_memory must be True, False or None.*not {wrong!r}"):
            made(front, model, shared_memory=wrong)
        assert [param.numel() for param in model.parameters()] == [16, 4, 8, 2]
    for right in (None, True, False):
        made(front, net(), shared_memory=right)(torch.ones(1, 4)).sum().backward()


@ranks(2)
def test_a_policy_that_matches_nothing_warns(rank, world_size):
    told = r"no module is an instance of .*Conv2d, .*classes present.*Linear \(2\)"
    with pytest.warns(UserWarning, match=told):
        FSDP(net(), auto_wrap_policy=ModuleWrapPolicy({nn.Conv2d}))
    with pytest.warns(UserWarning, match="no module is an instance of no class at all"):
        FSDP(net(), auto_wrap_policy=ModuleWrapPolicy(set()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for matching in ({nn.Linear}, {nn.Sequential}):  # also the root alone
            FSDP(net(), auto_wrap_policy=ModuleWrapPolicy(matching))
        FSDP(net(), auto_wrap_policy=ModuleWrapPolicy({nn.ReLU, nn.Conv2d}))


class LazyScale(nn.modules.lazy.LazyModuleMixin, nn.Module):  # type: ignore[misc]
    """A lazy module with a buffer and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.parameter.UninitializedBuffer()

    def initialize_parameters(self, x: torch.Tensor) -> None:
        self.scale.materialize(x.shape[1:])
        self.scale.fill_(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@each_front
@ranks(2)
def test_lazy_modules_are_to_run_once(rank, world_size, front):
    for lazy, named in ((nn.LazyLinear(3), "1.weight"), (LazyScale(), "1.scale")):
        model = nn.Sequential(nn.Linear(4, 4), lazy)
        with pytest.raises(ValueError, match=f"'{named}' .*lazy.* no shape yet; run one forward"):
            made(front, model)
        model(torch.ones(2, 4))
        made(front, model)(torch.ones(2, 4)).sum().backward()
    if front != "composable":
        ignoring = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3))
        FSDP(ignoring, ignored_modules=[ignoring[1]], use_orig_params=front == "orig")


@each_front
@ranks(2)
def test_pickling_says_what_to_do_instead(rank, world_size, front):
    model = made(front, net())
    holder = nn.ModuleDict({"inner": model})
    for value in (model, holder):
        for save in (pickle.dumps, lambda each: torch.save(each, io.BytesIO())):
            with pytest.raises(TypeError, match=r"cannot be pickled.*state"):
                save(value)
    model(torch.ones(1, 4)).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "told"),
    [
        ("host", ["--cases", "12"], "--cases: '12' unknown; there are 4 parameters, 12 parameters, 24 par"),
        ("step", ["--impl", "ddp,fdsp"], "--impl: 'fdsp' unknown; there are ddp, "),
        ("collectives", ["--impl", "ddp"], "--impl: 'ddp' unknown; collectives has none to choose from"),
    ],
)
def test_benchmarks_refuse_names_that_are_none(script, arguments, told):
    command = [sys.executable, "-m", f"benchmarks.{script}", *arguments]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 2 and told in found.stderr and not found.stdout


def test_benchmarks_know_their_names():
    sys.path.insert(0, str(ROOT))
    from benchmarks.__main__ import questions
    from benchmarks.harness import Settings

    for question in questions():
        question.check(Settings(impl=tuple(question.implementations), cases=tuple(question.cases)))
        assert question.cases or question.implementations
        with pytest.raises(ValueError, match="--cases: 'none' unknown"):
            question.check(Settings(cases=(*question.cases, "none")))
