"""Which names of torch's FSDP packages use, by their sources, and what is said of each."""

from __future__ import annotations

import functools
import sys
import textwrap

import pytest
import torch

from bed.scripts import python
from fsdp_wrap import compat
from fsdp_wrap.compat._checking import check

CLIENT = """
    raise RuntimeError("a check imports no client")
    import torch.distributed.fsdp as short
    import torch.distributed.fsdp._runtime_utils, torch.distributed.fsdp.wrap
    from torch.distributed import fsdp
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard, of_tomorrow
    from torch.distributed.fsdp._common_utils import _get_module_fsdp_state, FSDP_WRAPPED_MODULE
    from torch.distributed.fsdp._flat_param import FlatParamHandle
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp_of_another import thing
    from .torch.distributed.fsdp import near
    own.FSDP, module.fully_shard = near, thing
    fsdp.StateDictType.FULL_STATE_DICT, short.ShardingStrategy, torch.distributed.fsdp.wrap.enable_wrap()
    FSDPParam.init_dtype_attrs = None
    FullyShardedDataParallel._wait_unshard_streams_on_current_stream
    torch.distributed.fsdp._runtime_utils._lazy_init
"""
OF_FSDP = "torch.distributed.fsdp."
VERDICTS = {  # by every form of import
    "torch.distributed._composable_state._module_state_mapping": "served",
    "torch.distributed.checkpoint.state_dict.StateDictOptions": "torch's own",
    "torch.distributed.checkpoint.state_dict.get_state_dict": "torch's own",
    f"{OF_FSDP}FullyShardedDataParallel": "served",
    f"{OF_FSDP}FullyShardedDataParallel._wait_unshard_streams_on_current_stream": "not served",
    f"{OF_FSDP}ShardingStrategy": "torch's own",
    f"{OF_FSDP}StateDictType": "torch's own",
    f"{OF_FSDP}StateDictType.FULL_STATE_DICT": "torch's own",
    f"{OF_FSDP}_common_utils.FSDP_WRAPPED_MODULE": "torch's own",
    f"{OF_FSDP}_common_utils._get_module_fsdp_state": "served",
    f"{OF_FSDP}_flat_param.FlatParamHandle": "not served",
    f"{OF_FSDP}_fully_shard._fsdp_param.FSDPParam": "torch's own",
    f"{OF_FSDP}_fully_shard._fsdp_param.FSDPParam.init_dtype_attrs": "not served",
    f"{OF_FSDP}_runtime_utils._lazy_init": "served",
    f"{OF_FSDP}fully_shard": "served",
    f"{OF_FSDP}of_tomorrow": "not in torch",
    f"{OF_FSDP}wrap.enable_wrap": "served",
}


@pytest.fixture
def client(tmp_path, monkeypatch):
    package = tmp_path / "a_client_of_the_test"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('a check imports no client')\n")
    (package / "template.py").write_text("import torch.distributed.fsdp {{ and no Python }}\n")
    (package / "deep" / "part.py").write_text(textwrap.dedent(CLIENT))
    monkeypatch.syspath_prepend(str(tmp_path))
    return package.name


def test_verdicts(client):
    before = torch.distributed.fsdp.FullyShardedDataParallel
    findings = check([client], functools.partial(compat.install, fully_shard=True))
    assert {finding.name: finding.verdict for finding in findings} == VERDICTS
    assert {finding.package for finding in findings} == {client} and client not in sys.modules
    reasons = {finding.name.rpartition(".")[2]: finding.reason for finding in findings}
    assert reasons["of_tomorrow"] == f"of version {torch.__version__}"
    assert reasons["FlatParamHandle"] == "it belongs to torch's own runtime"
    assert reasons["FSDPParam"] == "our units pass for instances" and not reasons["fully_shard"]
    assert torch.distributed.fsdp.FullyShardedDataParallel is before


def test_the_command_tells_and_fails_where_a_name_is_not_served(client, tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        compat.main(["--check", client])
    lines = capsys.readouterr().out.splitlines()
    assert left.value.code == 1 and len(lines) == len(VERDICTS)
    assert f"{client}: served       {OF_FSDP}fully_shard" in lines
    (tmp_path / client / "deep" / "part.py").write_text(f"from {OF_FSDP[:-1]} import fully_shard\n")
    with pytest.raises(SystemExit) as left:
        compat.main(["--check", client])
    assert not left.value.code
    assert capsys.readouterr().out == f"{client}: served       {OF_FSDP}fully_shard\n"


def test_a_package_that_is_not_there(capsys):
    with pytest.raises(ModuleNotFoundError, match="no package 'of_tomorrow'.*by which it is imported"):
        compat.main(["--check", "of_tomorrow"])
    with pytest.raises(SystemExit):
        compat.main([])
    assert "arguments are required: script" in capsys.readouterr().err


def test_all_installed_packages_where_none_is_named(client, monkeypatch):
    installed = {client: [client], "torch": ["torch"], "no-name": ["x"], "nowhere_to_be_found": ["y"]}
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: installed)
    findings = check([], functools.partial(compat.install, fully_shard=True))
    assert {finding.package for finding in findings} == {client}


EARLY = """
    import functools
    from torch.distributed import fsdp
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard

    class Subclass(FullyShardedDataParallel):
        pass

    class Strategy:
        shard = staticmethod(fully_shard)

        @classmethod
        def wrap(cls, module, by=FullyShardedDataParallel):
            return by(module)

    def default(module, *, shard=fully_shard):
        return shard(module)

    bound = functools.partial(fully_shard, reshard_after_forward=False)
    choices = {"fsdp1": FullyShardedDataParallel, "fsdp2": fully_shard}
    kinds = (FSDPModule,)  # our modules are instances
    rebound = fully_shard

    class Lazy:
        def __getattr__(self, name):
            raise ModuleNotFoundError(f"imported where it is asked for {name}, as modules of six.moves are")

    class Moves:
        gone = Lazy()

    build = lambda module: fsdp.fully_shard(module)
"""
PROGRAM = """
    import warnings
    import early
    from fsdp_wrap import compat

    def told(**options):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compat.install(**options)
            compat.uninstall()
        return [(str(warning.message), warning.filename) for warning in caught]

    for message, filename in (*told(), *told(fully_shard=True)):
        print(message, filename == __file__)
"""


def test_what_was_taken_before_and_cannot_be_rebound_is_named(tmp_path):
    """By two installations, of the wrapper's names alone and of all."""
    (tmp_path / "early.py").write_text(textwrap.dedent(EARLY))
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    wrapper, function = "FullyShardedDataParallel", "fully_shard"
    held = (
        {"Subclass": wrapper, "Strategy": wrapper, "choices": wrapper},
        {
            "Subclass": wrapper,
            "Strategy": f"{wrapper}, {function}",
            "default": function,
            "bound": function,
            "choices": f"{wrapper}, {function}",
        },
    )
    lines = python(tmp_path / "program.py").out.splitlines()
    assert len(lines) == len(held)
    for line, places in zip(lines, held):
        named = "; ".join(f"early.{name} ({what})" for name, what in places.items())
        assert f"before fsdp_wrap.compat.install(): {named}. They still use torch's: call install()" in line
        assert line.endswith("True"), "the line that installs is told"


def test_nothing_is_told_where_all_is_rebound(tmp_path):
    (tmp_path / "early.py").write_text("from torch.distributed.fsdp import FSDPModule, fully_shard\n")
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    assert python(tmp_path / "program.py").out == ""
