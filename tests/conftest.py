"""The rank processes' life: their launcher starts while pytest collects, they end with the session."""

import pytest

import bed


def pytest_collection(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        bed.warm_up()


def pytest_unconfigure(config: pytest.Config) -> None:
    bed.shutdown()
