"""Programs that name torch's wrapper get ours: by rebinding names in place, and only for as long as asked."""

from __future__ import annotations

import importlib
import os
import sys
import textwrap
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as ImportedBefore
from torch.distributed.fsdp import wrap as torch_wrap

import fsdp_wrap
from bed import ranks
from bed.scripts import on_ranks, python
from fsdp_wrap import compat, distributed_state_dict
from fsdp_wrap.compat import helpers
from fsdp_wrap.fully_sharded_data_parallel import clean_names
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import Block, Transformer, tokens


@pytest.fixture
def clean() -> Iterator[None]:
    yield
    compat.uninstall()


def _names(prefix: str) -> dict[tuple[str, str], object]:
    """All that torch's modules of a prefix hold."""
    modules = {name: module for name, module in sys.modules.items() if isinstance(module, ModuleType)}
    held = {name: vars(module) for name, module in modules.items() if name.startswith(prefix)}
    return {(name, key): value for name, names in held.items() for key, value in names.items()}


def test_every_name_of_torchs_wrapper_is_ours():
    """All but those of torch's `fully_shard`, and those that we take from torch."""
    assert compat.missing() == set()
    others = {*torch_fsdp._fully_shard.__all__, *fsdp_wrap.api.__all__}
    assert set(torch_fsdp.__all__) - compat.replacements().keys() == others & set(torch_fsdp.__all__)


def _is_ours() -> bool:
    return torch_fsdp.FullyShardedDataParallel is fsdp_wrap.FullyShardedDataParallel


def test_names_resolve_to_ours_and_back(clean):
    """Those of fsdp2, and of torch's runtime but for the helpers, stay torch's."""
    before = _names("torch.distributed")
    compat.install()
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, api
    from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as ByItsPath
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    assert FullyShardedDataParallel is ByItsPath is ImportedBefore is fsdp_wrap.FullyShardedDataParallel
    assert ShardingStrategy is api.ShardingStrategy is fsdp_wrap.ShardingStrategy
    assert api.CPUOffload is fsdp_wrap.CPUOffload.__bases__[-1], "which we take as it is"
    assert ModuleWrapPolicy is fsdp_wrap.wrap.ModuleWrapPolicy
    assert torch_state_dict.FSDP is fsdp_wrap.FullyShardedDataParallel
    assert torch_state_dict.get_state_dict is distributed_state_dict.get_state_dict
    installed = _names("torch.distributed")
    changed = {key for key in before if installed[key] is not before[key]}
    inside = {key[1] for key in changed if key[0].startswith("torch.distributed.fsdp._")}
    assert inside == {helper.__name__ for _, helper in helpers.HELPERS}
    assert not {name for module, name in changed if module == "torch.distributed.fsdp"} & {
        *torch_fsdp._fully_shard.__all__
    }
    with compat.install():
        assert _names("torch.distributed.fsdp").items() <= installed.items(), "twice changes nothing more"
    assert _is_ours(), "the first one holds"
    compat.uninstall()
    compat.uninstall()
    with pytest.raises(KeyError), compat.install():
        assert _is_ours()
        raise KeyError
    assert not _is_ours()
    after = _names("torch.distributed")
    assert {key for key in before if after[key] is not before[key]} == set()


def test_older_peft_that_reads_no_names_stays_as_it_is(monkeypatch):
    tuners = ModuleType("peft.tuners.tuners_utils")
    tuners.BaseTuner = type("BaseTuner", (), {})  # type: ignore[attr-defined]
    before = dict(vars(tuners.BaseTuner))
    monkeypatch.setitem(sys.modules, tuners.__name__, tuners)
    with compat.install():
        assert dict(vars(tuners.BaseTuner)) == before


def test_clients_are_adapted_once_they_are_imported(tmp_path, monkeypatch):
    """A stand-in for accelerate, imported before, meanwhile and after."""
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "__init__.py").touch()
    (tmp_path / "accelerate" / "state.py").write_text(textwrap.dedent(STATE))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)

    def backend() -> object:
        return importlib.import_module("accelerate.state").PartialState()._prepare_backend()[0]

    def forget() -> None:
        for name in ("accelerate", "accelerate.state"):
            sys.modules.pop(name, None)

    finders = list(sys.meta_path)
    for name in ("accelerate", "accelerate.state"):  # the real one, if it is there, comes back at the end
        monkeypatch.delitem(sys.modules, name, raising=False)
    with compat.install(cpu=True):
        assert "accelerate" not in sys.modules
        assert backend() == os.environ["ACCELERATE_TORCH_DEVICE"].replace("cpu", "gloo")
    assert backend() is None and "ACCELERATE_TORCH_DEVICE" not in os.environ
    with compat.install(cpu=True):
        assert backend() == "gloo"
    forget()
    with compat.install():
        assert backend() is None, "not asked for"
    forget()
    with compat.install(cpu=True):
        pass
    assert backend() is None, "imported after the end"
    assert sys.meta_path == finders
    forget()


STATE = """
    import enum

    class DistributedType(enum.Enum):
        NO = 0
        MULTI_GPU = 1

    class PartialState:
        def _prepare_backend(self, cpu=False):
            return None, DistributedType.NO
"""


@ranks(2)
def test_torchs_helpers_take_our_modules_and_policies(rank, world_size):
    """Those that ask for the wrapper's class, or call a policy, as clients do after installing."""
    with compat.install():
        policy = torch_wrap.ModuleWrapPolicy({Block})
        model = torch_fsdp.FullyShardedDataParallel(Transformer(), auto_wrap_policy=policy)
        assert type(model) is torch_fsdp.FullyShardedDataParallel
        assert isinstance(model.blocks[0], torch_fsdp.FullyShardedDataParallel)
        apply_activation_checkpointing(model, auto_wrap_policy=policy)
        assert sum(isinstance(module, CheckpointWrapper) for module in model.modules()) == 3
        with torch_wrap.enable_wrap(wrapper_cls=torch_fsdp.FullyShardedDataParallel):
            assert isinstance(torch_wrap.wrap(nn.Linear(2, 2)), fsdp_wrap.FullyShardedDataParallel)
        model(tokens(rank, 0)).sum().backward()
        model.clip_grad_norm_(1.0)
    assert all(param.grad is not None for param in model.parameters() if param.numel())


SCRIPT = """
    import sys
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
    from torch.distributed.tensor import DTensor
    import helper  # next to the script

    if not dist.is_torchelastic_launched():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")
    model = FSDP(helper.model(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    model(torch.ones(2, 8)).sum().backward()
    norm = model.clip_grad_norm_(1.0).item()
    other = fully_shard(helper.model(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    assert isinstance(other, FSDPModule) and isinstance(other.weight, DTensor)
    other(torch.ones(2, 8)).sum().backward()
    assert f"{torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0).full_tensor():.3f}" == f"{norm:.3f}"
    if dist.get_rank() == 0:
        print(__name__, sys.argv[1:], type(model).__module__, fully_shard.__module__, f"{norm:.3f}")
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_script_from_the_command_line(tmp_path, ranks):
    """Launched with an option on two ranks."""
    (tmp_path / "helper.py").write_text("import torch\n\ndef model():\n    return torch.nn.Linear(8, 8)\n")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    option = ["--fully-shard"] if ranks == 2 else []
    command = ["-m", "fsdp_wrap.compat", *option, script, "--cpu", "x"]
    done = python(*on_ranks(2, *command) if ranks == 2 else command)
    modules = "fsdp_wrap.fully_sharded_data_parallel", fsdp_wrap.fully_shard.__module__
    told = f"__main__ ['--cpu', 'x'] {modules[0]} {modules[1] if option else 'torch.distributed.fsdp'}"
    assert done.out == f"{told} {(8 * 8 * 4 + 8 * 4) ** 0.5:.3f}\n"


@ranks(2)
def test_names_without_prefixes(rank, world_size):
    """Of modules as well: peft looks for adapters by the names of modules, in state dicts."""
    model = fsdp_wrap.FullyShardedDataParallel(
        Transformer(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True
    )
    outside = [name for name, _ in model.named_modules()]
    for opened in (clean_names(), model.summon_full_params(model, writeback=False)):
        with opened:
            modules = dict(model.named_modules())
            params = [name for name, _ in model.named_parameters()]
            within = [name for name, _ in model.module.named_modules()]
        assert params == [name for name, _ in Transformer().named_parameters()]
        assert set(modules) == set(within) == {name for name, _ in Transformer().named_modules()}
        assert isinstance(modules["blocks.1"], Block), "what is wrapped goes by the name that it had"
    assert [name for name, _ in model.named_modules()] == outside
    assert sum("_fsdp_wrapped_module" in name for name in outside) > 4


def test_state_dict_functions_still_serve_plain_models(clean):
    compat.install()
    plain = torch.nn.Linear(2, 2)
    before = {name: value.clone() for name, value in torch_state_dict.get_model_state_dict(plain).items()}
    assert list(before) == ["weight", "bias"]
    torch_state_dict.set_model_state_dict(plain, {name: value + 1 for name, value in before.items()})
    assert torch.equal(plain.weight, before["weight"] + 1)
