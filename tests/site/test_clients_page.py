"""The page of clients, as reports of their tests tell it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bed.paths import ROOT
from bed.scripts import script

clients: Any = script("clients", "docs")

CASE = """
<testcase classname="{where}" name="test_training_equals_torchs[{way}]">
  <properties>
    <property name="torch" value="2.13.0"/><property name="clients" value="trl 1.0, peft 2.0"/>
    <property name="shows" value="{shows}"/>
  </properties>
  {failure}
</testcase>
"""


@pytest.fixture
def report(tmp_path: Path) -> Path:
    failure = "<failure message='AssertionError: 1 != 2&#10;and more'>a traceback</failure>"
    of_clients = {"where": "tests.clients.test_trl", "shows": "equal", "failure": ""}
    cases = [
        CASE.format(**of_clients, way="sft"),
        CASE.format(**of_clients, way="dpo"),
        CASE.format(**{**of_clients, "failure": failure}, way="kto"),
        CASE.format(**{**of_clients, "where": "tests.state.test_trl"}, way="elsewhere"),
        '<testcase classname="tests.clients.test_nemo" name="test_it">',
        '<skipped message="not installed"/></testcase>',
    ]
    path = tmp_path / "report.xml"
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return path


def test_rows_tell_versions_cases_and_results(report: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """In another environment one client is there, and others are not: rows are added."""
    target = tmp_path / "clients.md"
    monkeypatch.setattr(clients, "TARGET", target)

    def rows_after(*arguments: object) -> list[str]:
        assert clients.main([str(argument) for argument in arguments]) == 0
        head, _, rows = target.read_text().partition("## Run by hand")[0].partition("## torch 2.13.0\n")
        assert head.startswith("# Clients") and "|---" in rows
        return [row for row in rows.splitlines() if row.startswith("|")][2:]

    trl = "| trl 1.0 | peft 2.0 | training equals torchs | 3 | equal; broken: AssertionError: 1 != 2 |"
    assert rows_after(report) == ["| nemo |  | it | 1 | not run: not installed |", trl]
    nemo = CASE.format(where="tests.clients.test_nemo", way="", shows="equal", failure="")
    nemo = nemo.replace("test_training_equals_torchs", "test_it").replace("trl 1.0, peft 2.0", "nemo 3.0")
    skipped = '<testcase classname="tests.clients.test_trl" name="test_training_equals_torchs">'
    other = tmp_path / "other.xml"
    other.write_text(f"<testsuite>{nemo}{skipped}<skipped message='no trl'/></testcase></testsuite>")
    for reports in ([report, other], ["--add", other]):
        assert rows_after(*reports) == ["| nemo 3.0 |  | it | 1 | equal |", trl]
        rows_after(report)


def test_what_broke(report: Path, capsys: Any) -> None:
    before = clients.TARGET.read_text()
    assert clients.main(["--broken", str(report)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "training equals torchs (trl 1.0, peft 2.0): broken: AssertionError: 1 != 2",
        "it (nemo): not run: not installed",
        "2 of 4 scenarios of clients work",
    ]
    assert clients.TARGET.read_text() == before


def test_the_page_tells_of_every_test_of_a_client() -> None:
    page = clients.TARGET.read_text()
    for path in (ROOT / "tests" / "clients").glob("test_*.py"):
        for line in path.read_text().splitlines():
            if line.startswith("def test_"):
                name = line.removeprefix("def test_").partition("(")[0].replace("_", " ")
                assert f"| {name} |" in page, f"{path.name}: run docs/clients.py anew"
