"""The rank processes' life, from pytest's collecting to the session's end; which tests are of which tier."""

import importlib
from collections.abc import Iterator
from contextlib import suppress

import pytest

import bed
from bed import sampling
from bed.purity import is_pure, no_processes

CORE = {
    "test_api_table.py",
    "test_architecture.py",
    "test_checkpoint.py",
    "test_compat.py",
    "test_dcp.py",
    "test_devices.py",
    "test_distributed_state_dict.py",
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
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if omitted := sampling.sample(items, config.args):
        config.hook.pytest_deselected(items=omitted)
    for item in items:
        if item.get_closest_marker("slow") is not None:
            continue
        if item.path.name in CORE:
            item.add_marker(pytest.mark.core)
        if is_pure(item):
            item.add_marker(pytest.mark.pure)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    if item.get_closest_marker("pure") is None:
        return (yield)
    with no_processes():
        return (yield)


def pytest_report_header() -> str:
    part = "all" if sampling.THOROUGH else f"an eighth, drawn by {sampling.DRAW}={sampling.draw()}"
    return f"left-over combinations in the slow tier: {part}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    failed = [*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")]
    if not sampling.THOROUGH and any("left_over" in getattr(report, "keywords", ()) for report in failed):
        terminalreporter.write_line(
            f"Left-over combinations are among these. The same are drawn by: "
            f"{sampling.DRAW}='{sampling.draw()}' pytest -m slow. One alone: pytest ID"
        )


def pytest_collection(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        bed.warm_up()
        # Once on a machine, matplotlib lists its fonts by a process, which pure tests may not start.
        with suppress(ImportError):
            importlib.import_module("matplotlib.font_manager")


def pytest_unconfigure(config: pytest.Config) -> None:
    bed.shutdown()
