"""The rank processes' life, from pytest's collecting to the session's end; which tests are of which tier."""

import gc

import pytest

import bed
from bed import sampling

CORE = {
    "test_api_table.py",
    "test_architecture.py",
    "test_checkpoint.py",
    "test_compat.py",
    "test_dcp.py",
    "test_devices.py",
    "test_distributed_state_dict.py",
    "test_optim_state_dict.py",
    "test_parity.py",
    "test_precision.py",
    "test_state_dict.py",
    "test_torch_private.py",
    "test_torchs_configurations.py",
}
"""Files of the fast tier that together prove the main behaviours, in five minutes: `pytest -m core`."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if omitted := sampling.sample(items, config.args):
        config.hook.pytest_deselected(items=omitted)
    for item in items:
        if item.get_closest_marker("slow") is not None:
            continue
        if item.path.name in CORE:
            item.add_marker(pytest.mark.core)


def pytest_report_header() -> str:
    part = "all" if sampling.THOROUGH else f"a part, drawn by {sampling.DRAW}={sampling.draw()}"
    return f"left-over combinations in the slow tier: {part}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    failed = [*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")]
    if not sampling.THOROUGH and any("left_over" in getattr(report, "keywords", ()) for report in failed):
        terminalreporter.write_line(
            f"Left-over combinations are among these. The same are drawn by: "
            f"{sampling.DRAW}='{sampling.draw()}' pytest -m slow. One alone: pytest -m 'slow or not slow' ID"
        )


def pytest_collection(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        bed.warm_up()


@pytest.fixture(scope="module", autouse=True)
def only_new_garbage() -> None:
    """Hides earlier objects from the garbage collector: a session holds a million, and some tests collect."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    bed.shutdown()
