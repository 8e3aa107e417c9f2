"""What building the site does not see: links of README, kinds of blocks, figures, and every public name."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections import Counter

import pytest

from bed.paths import ROOT
from bed.scripts import run
from site_pages import DOCS, blocks, name_of, pages, program_of

LANGUAGES = {"python", "bash", "sh", "console", "text", "json", "yaml", "toml"}
COMMANDS = [
    "pip install -e . && torchrun --nproc-per-node 2 examples/train_lm.py",
    'pip install -e ".[test]" && pytest -n 2',
]
INK = "#1f2328"
"""Of words in coloured boxes, which are alike on light and dark pages."""
_LINK = re.compile(r"(?<!\\)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_FENCED = re.compile(r"^ *```.*?^ *```$|<!--.*?-->", re.M | re.S)


def test_links_of_readme_lead_somewhere():
    """Those of the pages, their headings and the navigation `mkdocs build --strict` follows."""
    targets = _LINK.findall((ROOT / "README.md").read_text("utf-8"))
    here = [target for target in targets if not target.startswith(("http://", "https://"))]
    assert here and [target for target in here if not (ROOT / target).is_file()] == []


def test_blocks_say_what_they_are():
    """So that none is passed over when snippets run. Those of `sh` are files for clusters."""
    for page in pages():
        shown = blocks(page)
        assert {block.language for block in shown} <= LANGUAGES, [block[::2] for block in shown]
        fences = re.findall(r"^ *```", page.read_text("utf-8"), re.M)
        assert len(fences) == 2 * len(shown), f"{name_of(page)}: a fence is not closed"
        for block in shown:
            if block.language in {"bash", "sh"}:
                done = run("bash", "-n", given=block.source, code=None)
                assert done.code == 0, f"{name_of(page)}:{block.line}: {done}"


def statements(code: str) -> tuple[set[str], list[str]]:
    """The imports of a program or of a part of one, and its other statements; without comments and layout."""
    nodes = []
    for node in ast.parse(code).body:
        nodes += [node, *node.body] if isinstance(node, ast.If) else [node]
    imports = {
        f"{getattr(node, 'module', '')} {name.name} {name.asname}"
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    return imports, [ast.unparse(node) for node in nodes if not isinstance(node, ast.Import | ast.ImportFrom)]


def test_pages_that_show_parts_of_a_program_show_it_as_it_is():
    shown = {page: program for page in pages() if (program := program_of(name_of(page)))}
    assert {*shown.values()} == {*(ROOT / "examples" / "how_to").rglob("*.py")}
    for page, program in shown.items():
        imports, whole = statements(program.read_text("utf-8"))
        begin = 0
        for block in (
            candidate
            for candidate in blocks(page)
            if candidate.language == "python" and not candidate.skipped
        ):
            told = f"{name_of(page)}, line {block.line}: {program.name} has it otherwise"
            needed, part = statements(block.source)
            assert needed <= imports, told
            starts = [n for n in range(begin, len(whole)) if whole[n : n + len(part)] == part]
            assert starts, told
            begin = starts[0]


def test_pages_hide_nothing():
    for page in pages():
        assert "invisible-code-block" not in page.read_text("utf-8"), name_of(page)


def test_messages_have_a_cause_and_a_cure():
    """Each has a heading of its own, by which the search finds it, and below it more than its own words."""
    text = (DOCS / "messages.md").read_text("utf-8")
    assert {*re.findall(r"^#+ ", text, re.M)} == {"# ", "## ", "##### "}
    entries = re.findall(r"^##### ([^\n]+)\n\n(.*?)(?=\n\n#|\n\Z)", text, re.M | re.S)
    assert len(entries) == text.count("\n#####") and len({message for message, _ in entries}) == len(entries)
    for message, told in entries:
        own, words = ({*re.findall(r"[A-Za-z]{2,}", part.lower())} for part in (message, told))
        assert len(words - own) >= 8, f"{message}: tell why it comes, and what to change"
        assert len(told.split()) <= 60 and "\n\n" not in told, f"{message}: one to three sentences"


def test_pages_write_into_folders_of_their_own():
    """So that a reader may try one page after the other."""
    owners: dict[str, set[str]] = {}
    for page in pages():
        parts = [block.source for block in blocks(page) if block.language in {"bash", "python"}]
        program = program_of(name_of(page))
        parts += [program.read_text("utf-8")] if program else []
        for folder in re.findall(r"\bruns/\w+", "".join(parts)):
            owners.setdefault(folder, set()).add(name_of(page))
    assert not {folder: users for folder, users in owners.items() if len(users) > 1}


def test_what_pages_install_is_there():
    extras = set(re.findall(r'^        "(\w+)": ', (ROOT / "setup.py").read_text("utf-8"), re.M))
    for page in pages():
        text = "".join(block.source for block in blocks(page))
        for command in re.findall(r"^pip install (.*?)(?: &&|$)", text, re.M):
            for word in shlex.split(command):
                matched = re.fullmatch(r"(?:\.|fsdp-wrap)(?:\[([\w,]+)\])?", word)
                assert word == "-e" or matched, f"{name_of(page)}: pip install {word}"
                wanted = {*(matched[1] or "").split(",")} - {""} if matched else set()
                assert wanted <= extras, f"{name_of(page)}: {word}"


def test_readme_begins_with_two_commands():
    assert [block.source.strip() for block in blocks(ROOT / "README.md")][:2] == COMMANDS
    assert f"bash -c '{COMMANDS[1]}'" in (ROOT / ".ci" / "run").read_text("utf-8")


SECTIONS = (
    "Highlights",
    "Breaking changes",
    "Added",
    "Changed",
    "Deprecated",
    "Removed",
    "Fixed",
    "Security",
)


def test_the_changelog_can_be_read_at_a_glance():
    """Each change is one line; what breaks programs comes before what is new."""
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    versions = re.split(r"^## ", text, flags=re.M)[1:]
    assert versions[0].startswith("[Unreleased]\n")
    for version in versions:
        titles = re.findall(r"^### (.+)$", version, re.M)
        assert titles == [title for title in SECTIONS if title in titles], "in this order"
        bullets = re.findall(r"^- .*(?:\n  .*)*", version, re.M)
        long = [bullet for bullet in bullets if len(bullet) > len("- ") + 100]
        assert bullets and not long, "at most 100 characters, and no word on what users cannot see"
    highlights = versions[0].partition("### Highlights\n")[2].partition("\n### ")[0]
    assert 5 <= highlights.count("\n- ") <= 8


def test_the_picture_shows_the_figures_that_were_kept(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))  # benchmarks are not installed
    from benchmarks.overview import NAME, NARROW, ratios_of_memory, ratios_of_times

    answers = json.loads((DOCS / "performance" / "figures.json").read_text("utf-8"))
    groups = [*ratios_of_times(answers).values(), *ratios_of_memory(answers).values()]
    assert len(groups) == 6
    kept = [f"{value:.2f}" for values in groups for value in values.values()]
    for name in (NAME, NARROW):
        drawn = re.findall(r">(\d\.\d\d)</text>", (DOCS / "performance" / name).read_text("utf-8"))
        assert Counter(kept) == Counter(drawn), "run python -m benchmarks.overview"


def test_first_pages_say_what_was_measured(monkeypatch):
    """README and the front page sum up the figures in words, and say on what nothing was measured."""
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.overview import ratios_of_memory, ratios_of_times

    answers = json.loads((DOCS / "performance" / "figures.json").read_text("utf-8"))
    memory = [(bar, value) for values in ratios_of_memory(answers).values() for bar, value in values.items()]
    assert max(value for values in ratios_of_times(answers).values() for value in values.values()) < 1
    assert max(value for bar, value in memory if "gloo" in bar) < 1
    assert 1.05 < max(value for bar, value in memory if "shared" in bar) < 1.105
    for page in (ROOT / "README.md", DOCS / "index.md"):
        text = " ".join(page.read_text("utf-8").split())
        assert "no GPU has run it yet" in text.partition("```")[0], "before anything else"
        assert "up to a tenth more through shared memory, which is the default" in text


def test_performance_is_written_from_the_figures_that_were_kept(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.__main__ import questions
    from benchmarks.page import write_page

    pytest.importorskip("matplotlib")
    answers = json.loads((DOCS / "performance" / "figures.json").read_text("utf-8"))
    page = write_page(tmp_path, questions(), answers).read_text("utf-8")
    assert page == (DOCS / "performance.md").read_text("utf-8"), "run python -m benchmarks --render"
    top = page.partition("\n## ")[0]
    first = top.split("\n")[2]
    assert re.search(r"a step takes 0\.\d\d to \d\.\d\d of the time", first), "it opens with what came out"
    assert ("No GPU has run it yet" in top) == (not answers["gpu"]["figures"])
    assert "## On a GPU" not in page or answers["gpu"]["figures"], "a question without an answer is left out"
    assert len(re.sub(r"^!.*$", "", top, flags=re.M).split()) < 200, "the conclusions can be read in a minute"
    shown = _FENCED.sub("", re.sub(r"<details.*?</details>", "", page, flags=re.S))
    assert not re.search(r"^\|", shown.replace(top, ""), re.M), "tables are folded"


def test_pictures_follow_light_and_dark_pages_with_few_colours():
    for path in [*DOCS.glob("performance/*.svg"), *DOCS.glob("pictures/*.svg")]:
        text = path.read_text("utf-8")
        colours = {
            colour.lower() for colour in re.findall(r"#[0-9a-fA-F]{6}\b", text.partition("</style>")[2])
        }
        assert "prefers-color-scheme:dark" in text and "currentColor" in text, path.name
        assert "#ffffff" not in colours and "#000000" not in colours, path.name
        assert len(colours - {INK}) <= 5, f"{path.name}: {colours}"
