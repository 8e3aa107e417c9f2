"""What users mistake most often is told by name, before anything changes."""

from __future__ import annotations

import io
import pickle
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp

from bed import ranks
from bed.paths import ROOT
from bed.scripts import python
from fronts import shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import StateDictType, fully_shard
from fsdp_wrap.wrap import CustomPolicy, ModuleWrapPolicy

each_api = pytest.mark.parametrize("front", ["orig", "composable"])


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


@ranks(2)
def test_torchs_objects_are_told_from_ours(rank, world_size):
    model = net()
    before = list(model.parameters())
    for argument, value in OF_TORCH.items():
        assert_names_both(type(value).__name__, partial(FSDP, model, **{argument: value}))
        policy = CustomPolicy(partial(overridden, options={argument: value}))
        assert_names_both(type(value).__name__, partial(FSDP, model, auto_wrap_policy=policy))
    with pytest.raises(TypeError, match="must be a ShardingStrategy or None, not 'FULL_SHARD'"):
        FSDP(model, sharding_strategy="FULL_SHARD")  # type: ignore[arg-type]
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))

    wrapped, kind = FSDP(net()), torch_fsdp.StateDictType.FULL_STATE_DICT
    assert_names_both("StateDictType", partial(FSDP.set_state_dict_type, wrapped, kind))  # type: ignore[arg-type]
    for argument, value in (
        ("state_dict_config", torch_fsdp.FullStateDictConfig()),
        ("optim_state_dict_config", torch_fsdp.FullOptimStateDictConfig()),
    ):
        ours: Any = partial(FSDP.set_state_dict_type, wrapped, StateDictType.FULL_STATE_DICT)
        assert_names_both(type(value).__name__, partial(ours, **{argument: value}))
    for argument, value in (
        ("mp_policy", torch_fsdp.MixedPrecisionPolicy()),
        ("offload_policy", torch_fsdp.OffloadPolicy()),
        ("offload_policy", torch_fsdp.CPUOffloadPolicy()),
    ):
        ours = partial(fully_shard, net())
        assert_names_both(type(value).__name__, partial(ours, **{argument: value}))


def overridden(module: nn.Module, options: dict[str, Any]) -> bool | dict[str, Any]:
    return options if isinstance(module, nn.Linear) else False


@each_api
@ranks(2)
def test_shared_memory_is_a_flag(rank, world_size, front):
    for wrong in ("yes", 1, "0"):
        model = net()
        with pytest.raises(TypeError, match=f"shared_memory must be True, False or None.*not {wrong!r}"):
            shard(front, model, shared_memory=wrong)
        assert [param.numel() for param in model.parameters()] == [16, 4, 8, 2]
    for right in (None, True, False):
        shard(front, net(), shared_memory=right)(torch.ones(1, 4)).sum().backward()


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


@each_api
@ranks(2)
def test_lazy_modules_are_to_run_once(rank, world_size, front):
    for lazy, named in ((nn.LazyLinear(3), "1.weight"), (LazyScale(), "1.scale")):
        model = nn.Sequential(nn.Linear(4, 4), lazy)
        with pytest.raises(ValueError, match=f"'{named}' .*lazy.* no shape yet; run one forward"):
            shard(front, model)
        model(torch.ones(2, 4))
        shard(front, model)(torch.ones(2, 4)).sum().backward()
    ignoring = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3))
    FSDP(ignoring, ignored_modules=[ignoring[1]], use_orig_params=True)


@ranks(2)
def test_pickling_says_what_to_do_instead(rank, world_size):
    """With `fully_shard`; of the wrapper `test_errors.py` shows it."""
    model = fully_shard(net())
    for value in (model, nn.ModuleDict({"inner": model})):
        for save in (pickle.dumps, lambda each: torch.save(each, io.BytesIO())):
            with pytest.raises(TypeError, match=r"cannot be pickled.*state"):
                save(value)
    model(torch.ones(1, 4)).sum().backward()


@pytest.mark.slow
def test_benchmarks_refuse_names_that_are_none():
    for words, told in (
        ("host --cases 12", "--cases: '12' unknown; there are 4 parameters, 12 parameters, 24 par"),
        ("step --impl ddp,fdsp", "--impl: 'fdsp' unknown; there are ddp, "),
        ("collectives --impl ddp", "--impl: 'ddp' unknown; collectives has none to choose from"),
    ):
        found = python("-m", *f"benchmarks.{words}".split(), code=2)
        assert told in found.err and not found.out


def test_benchmarks_know_their_names():
    sys.path.insert(0, str(ROOT))
    from benchmarks.__main__ import questions
    from benchmarks.harness import Settings

    for question in questions():
        question.check(Settings(impl=tuple(question.implementations), cases=tuple(question.cases)))
        assert question.cases or question.implementations
        with pytest.raises(ValueError, match="--cases: 'none' unknown"):
            question.check(Settings(cases=(*question.cases, "none")))
