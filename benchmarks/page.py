"""The page of results: a section a question, with its tables and a picture, and the goals at the end."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.drawing import color_of, picture
from benchmarks.goals import GOALS as ALL_GOALS
from benchmarks.goals import judged
from benchmarks.harness import Figures, Question, as_markdown
from benchmarks.overview import BARS, NAME, TITLE, draw_overview, ratios_of_memory, ratios_of_times

HEAD = """# Performance

Measured by `python -m benchmarks`, which writes this page, its pictures and the
[figures](performance/figures.json). Two ranks on two cores of one host, in fp32, beside torch's own.
"""
HOW = """`--only step,memory` measures some questions anew and keeps the others,
`--cases gpt,lora` some of their tables, `--out DIR` writes elsewhere. Each question is a script of its own
with `--impl`, `--cases`, `--ranks` and `--rounds`, such as
`python -m benchmarks.step --impl ddp,fsdp_wrap --cases mlp`. The end of the page tells how long each took.

Implementations: `ddp` is torch's DistributedDataParallel; `fsdp1` its FullyShardedDataParallel with
original parameters, `_flat` without, `_grad_op` with SHARD_GRAD_OP; `fsdp2` its `fully_shard`, `_keep`
without resharding after forward; `fsdp_wrap` this library's wrapper and `fully_shard` its own function,
likewise; `fsdp_wrap_in_place` is the wrapper with `set_gradients_in_place`. All of them communicate over
gloo, but `_shared` through memory that the ranks of a host share. `deepspeed` (ZeRO stage 3) runs on a CPU
as well, and takes part in the time of a step where it is installed and `--impl` names it; it is left
out here, since its losses depart from those of the others, by 6 % after 22 steps of `small`, for a reason
that was not found. fairscale 0.4.13 installs beside torch 2.13, but its forward needs CUDA streams
(on a CPU: `KeyError: 'all_gather'`).

Competitors train in the same processes and take turns. A time is the median over rounds of the slowest
rank's, `min` and `max` are the extremes. `/ x` is the median over rounds of the ratio to `x`
within the same round, which bears a changing load; `medians / x` is the ratio of medians. Of several forms
of `x`, the fastest counts: in the time of a step `fsdp1` stands for the better of original and flat
parameters. A form that is named above and stands in no table takes part where `--impl` names it.
"""
TORCHS = {"fsdp1": "`FullyShardedDataParallel`", "fsdp2": "`fully_shard`"}
CONCLUSIONS = """Torch's own is 1, and less is better. Each range is over the models of the picture: `gpt`
with 8 blocks, `small` with 12 narrow ones, `mlp` with wide layers and little to compute, `lora` with frozen
blocks. Shared memory is what the ranks of one host get without doing anything."""
MORE = """Each question has a heading below. Click on the line under it to unfold its picture and its tables.
"""
GOALS = """Ratios; the smaller the better. Times are paired ratios, with those of the medians in parentheses;
what misses its goal is bold. A goal is met where all of our implementations that it names, and that took
part, meet it. Rows of shared memory and of gradients in place stand in the column of the same form without.
"""
DURATIONS = """Seconds that each question took, `python -m benchmarks.<name>`.
"""


def write_page(folder: Path, questions: list[Question], answers: Mapping[str, Any]) -> Path:
    """Writes `performance.md` and the pictures of what was answered."""
    (folder / "performance").mkdir(parents=True, exist_ok=True)
    asked = [question for question in questions if question.name in answers]
    sections = [_section(folder, question, answers[question.name]) for question in asked]
    results = {name: answer["figures"] for name, answer in answers.items()}
    drawn = draw_overview(folder / "performance" / NAME, answers)
    overview = [f"![{TITLE}](performance/{NAME})\n"] if drawn else []
    lines = [HEAD, *overview, conclusions(answers, results), MORE, *sections]
    lines += ["## Goals\n", folded("All goals, and those that are met", f"{GOALS}\n{judged(results)}")]
    lines += ["## How it was measured\n", folded("Commands, implementations, ratios", HOW)]
    lines += [
        "## Durations\n",
        folded("Seconds that each question took", f"{DURATIONS}\n{durations(answers)}"),
    ]
    page = folder / "performance.md"
    page.write_text("\n".join(lines))
    return page


def conclusions(answers: Mapping[str, Any], results: Mapping[str, Figures]) -> str:
    """Summarises the figures: the range over the models for each front-end, and how many goals are met."""
    lines = ["| | beside torch's | time of a step | peak memory of a host |", "|---|---|---:|---:|"]
    tables = [ratios(answers).values() for ratios in (ratios_of_times, ratios_of_memory)]
    for bar in BARS:
        found = [[values[bar.label] for values in table] for table in tables]
        ranges = [f"{min(each):.2f} to {max(each):.2f}" if each else "" for each in found]
        lines.append(f"| {bar.label} | {TORCHS[bar.beside]} | {ranges[0]} | {ranges[1]} |")
    verdicts = [verdict for goal in ALL_GOALS if (verdict := goal.met(results)) is not None]
    met = f"Of {len(verdicts)} [goals](#goals) {sum(verdicts)} are met."
    if not results.get("gpu"):
        met += " Nothing was measured on a GPU yet."
    return "\n".join([*lines, "", f"{CONCLUSIONS} {met}", ""])


def folded(title: str, content: str) -> str:
    """Returns a part of the page that opens when a reader clicks on its title."""
    return f'<details markdown="1"><summary>{title}</summary>\n\n{content}\n</details>\n'


def durations(answers: Mapping[str, Any]) -> str:
    """Returns a table of the time that each question took, and all together."""
    seconds = {name: answer["seconds"] for name, answer in answers.items()}
    seconds["all"] = sum(seconds.values())
    return as_markdown({name: {"s": value} for name, value in seconds.items()})


def _section(folder: Path, question: Question, answer: Mapping[str, Any]) -> str:
    """Returns a heading, and all else folded: how it was measured, the picture and the tables."""
    parts = [f"`python -m benchmarks.{question.name}`. {question.about}\n", _measured(answer)]
    if draw(folder / "performance" / f"{question.name}.svg", question, answer["figures"]):
        parts.append(f"![{question.title}](performance/{question.name}.svg)\n")
    if not answer["figures"]:
        parts.append("This machine cannot answer it.\n")
    later: Mapping[str, Any] = answer.get("later", {})
    for title, table in answer["figures"].items():
        apart = [_measured(later[title])] if title in later else []
        parts += [f"**{title}**\n", *apart, as_markdown(table), ""]
    return f"## {question.title}\n\n" + folded("Picture, tables, and how it was measured", "\n".join(parts))


def _measured(answer: Mapping[str, Any]) -> str:
    """Says when and where figures were measured."""
    machine = answer["machine"]
    return (
        f"{answer['date']}: torch {machine['torch']}, Python {machine['python']}, {machine['cores']} cores "
        f"of {machine['processor']}, load {machine['load']} at the start; took {answer['seconds']:.0f} s.\n"
    )


def draw(path: Path, question: Question, figures: Figures) -> bool:
    """Draws one column of all tables as bars, each with its name and its figure; returns whether it could."""
    groups = {title: table for title, table in figures.items() if _has(table, question.chart)}
    if importlib.util.find_spec("matplotlib") is None or not groups:
        return False
    ticks: list[tuple[float, str]] = []
    bars: list[tuple[float, float, str]] = []
    headings: list[tuple[float, str]] = []
    place = 0.0
    for title, table in groups.items():
        headings.append((place, title))
        for row, cells in table.items():
            if question.chart in cells:
                place += 1
                ticks.append((place, row))
                bars.append((place, cells[question.chart], color_of(row)))
        place += 1.6
    with picture(path, (7.2, 0.6 + 0.19 * place), 9) as figure:
        axes = figure.subplots()
        drawn = axes.barh(*zip(*[bar[:2] for bar in bars]), height=0.8, color=[bar[2] for bar in bars])
        axes.bar_label(drawn, fmt=_written, padding=3)
        axes.set_yticks(*zip(*ticks))
        for height, title in headings:
            axes.annotate(title, (0, height), (4, 0), textcoords="offset points", weight="bold", va="center")
        axes.set_ylim(place - 0.9, -0.7)
        axes.margins(x=0.12)
        axes.set_xticks([])
        axes.tick_params(length=0)
        axes.set_title(_unit(question.chart), fontsize=9, loc="left")
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    return True


def _written(value: float) -> str:
    """Writes a figure beside its bar."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _unit(column: str) -> str:
    """Says what the bars show."""
    return f"relative to {column[2:]}" if column.startswith("/ ") else column


def _has(table: Mapping[str, Mapping[str, float]], column: str) -> bool:
    return any(column in row for row in table.values())
