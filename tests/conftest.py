"""The rank processes' life, from pytest's collecting to the session's end; and which files are the core."""

import pytest

import bed

CORE = {
    "test_api_table.py",
    "test_architecture.py",
    "test_checkpoint.py",
    "test_compat.py",
    "test_dcp.py",
    "test_devices.py",
    "test_distributed_state_dict.py",
    "test_fully_shard.py",
    "test_fully_shard_checkpoints.py",
    "test_offload.py",
    "test_optim_state_dict.py",
    "test_parity.py",
    "test_precision.py",
    "test_state_dict.py",
    "test_strategies.py",
    "test_torch_private.py",
}
"""Files of the fast tier that together prove the main behaviours, in five minutes: `pytest -m core`."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in CORE and item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.core)


def pytest_collection(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        bed.warm_up()


def pytest_unconfigure(config: pytest.Config) -> None:
    bed.shutdown()
