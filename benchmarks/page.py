"""The page of results: first what came out, then for each question its tables and a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.drawing import color_of, picture
from benchmarks.harness import Figures, Question, as_markdown
from benchmarks.overview import (
    BARS,
    NAME,
    NARROW,
    SHARED_MEMORY,
    TITLE,
    draw_overview,
    ratios_of_memory,
    ratios_of_times,
)

HEAD = "# Performance\n"
HOST = "On two ranks of one host, without a GPU,"
NO_GPU = "No GPU has run it yet: [what runs where](start/what-runs-where.md).\n"
HOW = """`--only step,memory` measures some questions again and keeps the others, `--cases gpt,lora` some of
their tables, and `--out DIR` writes elsewhere. Each question is also a script with `--impl`, `--cases`,
`--ranks` and `--rounds`, such as `python -m benchmarks.step --impl ddp,fsdp_wrap --cases mlp`.

| name | implementation |
|---|---|
| `ddp` | torch's `DistributedDataParallel` |
| `fsdp1` | torch's wrapper with original parameters; `_flat`: without them; `_grad_op`: SHARD_GRAD_OP |
| `fsdp2` | torch's `fully_shard`; `_keep`: without resharding after forward |
| `fsdp_wrap` | this library's wrapper, with the same endings; `_in_place`: with `set_gradients_in_place` |
| `fully_shard` | this library's function, with the same endings |
| `_shared` | through memory that the ranks of a host share; all others communicate over gloo |

`deepspeed` (ZeRO stage 3) also runs on a CPU, and takes part in the time of a step if it is installed and
`--impl` names it. It is left out here because its losses differ from the others', by 6 % after 22 steps of
`small`; we did not find out why. The forward of fairscale 0.4.13 needs CUDA streams (on a CPU: `KeyError:
'all_gather'`).

All implementations train in the same processes and take turns. A time is the median over rounds of the
slowest rank's time; `min` and `max` are the extremes. `/ x` is the median over rounds of the ratio to `x`
in the same round, which tolerates a changing load; `medians / x` is the ratio of medians. If `x` has
several forms, the fastest counts: in the time of a step `fsdp1` is the faster of original and flat
parameters. A form that is in no table takes part if `--impl` names it.
"""
TORCHS = {"fsdp1": "`FullyShardedDataParallel`", "fsdp2": "`fully_shard`"}
CONCLUSIONS = """Torch's own is 1, and less is better. Ranges are over the models of the picture: `gpt`,
`small` with narrow blocks, `mlp` with little to compute, `lora` with frozen blocks. `python -m benchmarks`
measures it in fp32, and writes this page and its [figures](performance/figures.json).
"""
MORE = """Click on the line under a heading to unfold its picture and its tables.
"""
DURATIONS = """Seconds that each question took, `python -m benchmarks.<name>`.
"""


def write_page(folder: Path, questions: list[Question], answers: Mapping[str, Any]) -> Path:
    """Writes `performance.md` and the pictures of what was answered; what could not be is left out."""
    (folder / "performance").mkdir(parents=True, exist_ok=True)
    answered = {name: answer for name, answer in answers.items() if answer["figures"]}
    asked = [question for question in questions if question.name in answered]
    sections = [_section(folder, question, answered[question.name]) for question in asked]
    drawn = draw_overview(folder / "performance", answered)
    forms = {NAME: "wide", NARROW: "narrow"}  # of which `site.css` shows one
    overview = [f"![{TITLE}](performance/{name}){{ .{form} }}" for name, form in forms.items() if drawn]
    lines = [HEAD, *summary(answered), *overview, "", conclusions(answered), MORE, *sections]
    lines += ["## How it was measured\n", folded("Commands, implementations, ratios", HOW)]
    lines += [
        "## Durations\n",
        folded("Seconds that each question took", f"{DURATIONS}\n{durations(answered)}"),
    ]
    page = folder / "performance.md"
    page.write_text("\n".join(lines))
    return page


def summary(answers: Mapping[str, Any]) -> list[str]:
    """Says in a sentence or two what came out, and on what it was not measured."""
    times, memory = ratios_of_times(answers), ratios_of_memory(answers)
    lines = []
    if times and memory:
        shared = [bar.label for bar in BARS if bar.label.endswith(SHARED_MEMORY)]
        gloo = [bar.label for bar in BARS if bar.label not in shared]
        lines.append(
            f"{HOST} a step takes {_range(times, [*gloo, *shared])} of the time of torch's own. The host's "
            f"peak memory is {_range(memory, gloo)} of torch's over gloo, and {_range(memory, shared)} "
            "through shared memory, which is the default."
        )
    return [*lines, NO_GPU] if "gpu" not in answers else [*lines, ""]


def _range(ratios: Mapping[str, Mapping[str, float]], labels: list[str]) -> str:
    """Returns the least and the most of some bars over all models, in words."""
    values = [by_bar[label] for by_bar in ratios.values() for label in labels]
    return f"{min(values):.2f} to {max(values):.2f}"


def conclusions(answers: Mapping[str, Any]) -> str:
    """Summarises the figures: the range over the models for each front-end."""
    lines = ["| | beside torch's | time of a step | peak memory of a host |", "|---|---|---:|---:|"]
    tables = [ratios_of_times(answers), ratios_of_memory(answers)]
    for bar in BARS:
        times, memory = (_range(table, [bar.label]) if table else "" for table in tables)
        lines.append(f"| {bar.label} | {TORCHS[bar.beside]} | {times} | {memory} |")
    return "\n".join([*lines, "", CONCLUSIONS])


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
