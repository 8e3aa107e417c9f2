"""The page of results: a section a question, with its tables and a picture, and the goals at the end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.goals import GOALS as ALL_GOALS
from benchmarks.goals import judged
from benchmarks.harness import Figures, Question, as_markdown
from benchmarks.overview import BARS, NAME, TITLE, draw_overview, ratios_of_memory, ratios_of_times

HEAD = """# Performance

Measured by `python -m benchmarks`, which writes this page, its pictures and the
[figures](performance/figures.json). Two ranks on two cores of one host, in fp32, beside torch's own.
"""
HOW = """## How it was measured

`--only step,memory` measures some questions anew and keeps the others,
`--cases gpt,lora` some of their tables, `--out DIR` writes elsewhere. Each question is a script of its own
with `--impl`, `--cases`, `--ranks` and `--rounds`, such as
`python -m benchmarks.step --impl ddp,fsdp_wrap --cases mlp`. The end of the page tells how long each took.
Tables are folded: click on a title to see its figures.

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
GOALS = """## Goals

Ratios; the smaller the better. Times are paired ratios, with those of the medians in parentheses; what
misses its goal is bold. A goal is met where all of our implementations that it names, and that took part,
meet it. Rows of shared memory and of gradients in place stand in the column of the same form without.
"""
DURATIONS = """## Durations

Seconds that each question took, `python -m benchmarks.<name>`.
"""


def write_page(folder: Path, questions: list[Question], answers: Mapping[str, Any]) -> Path:
    """Writes `performance.md` and the pictures of what was answered."""
    (folder / "performance").mkdir(parents=True, exist_ok=True)
    asked = [question for question in questions if question.name in answers]
    sections = [_section(folder, question, answers[question.name]) for question in asked]
    results = {name: answer["figures"] for name, answer in answers.items()}
    drawn = draw_overview(folder / "performance" / NAME, answers)
    overview = [f"![{TITLE}](performance/{NAME})\n"] if drawn else []
    lines = [HEAD, *overview, conclusions(answers, results), HOW, *sections]
    lines += [GOALS, folded("All goals", judged(results)), DURATIONS, durations(answers), ""]
    page = folder / "performance.md"
    page.write_text("\n".join(lines))
    return page


def conclusions(answers: Mapping[str, Any], results: Mapping[str, Figures]) -> str:
    """Summarises the figures: the range over the models for each front-end, and how many goals are met."""
    lines = []
    for what, ratios in (("A step takes", ratios_of_times), ("A host's peak memory is", ratios_of_memory)):
        by_bar = [[values[bar.label] for values in ratios(answers).values()] for bar in BARS]
        lines += [
            f"- {what} {min(found):.2f} to {max(found):.2f} of torch's {TORCHS[bar.beside]}: {bar.label}."
            for bar, found in zip(BARS, by_bar)
            if found
        ]
    verdicts = [verdict for goal in ALL_GOALS if (verdict := goal.met(results)) is not None]
    return "\n".join([*lines, f"- Of {len(verdicts)} [goals](#goals) {sum(verdicts)} are met.", ""])


def folded(title: str, content: str) -> str:
    """Returns a part of the page that opens when a reader clicks on its title."""
    return f'<details markdown="1"><summary>{title}</summary>\n\n{content}\n</details>\n'


def durations(answers: Mapping[str, Any]) -> str:
    """Returns a table of the time that each question took, and all together."""
    seconds = {name: answer["seconds"] for name, answer in answers.items()}
    seconds["all"] = sum(seconds.values())
    return as_markdown({name: {"s": value} for name, value in seconds.items()})


def _section(folder: Path, question: Question, answer: Mapping[str, Any]) -> str:
    lines = [
        f"## {question.title}\n",
        f"`python -m benchmarks.{question.name}`. {question.about}\n",
        _measured(answer),
    ]
    if draw(folder / "performance" / f"{question.name}.svg", question, answer["figures"]):
        lines.append(f"![{question.title}](performance/{question.name}.svg)\n")
    if not answer["figures"]:
        lines.append("This machine cannot answer it.\n")
    later: Mapping[str, Any] = answer.get("later", {})
    for title, table in answer["figures"].items():
        apart = [_measured(later[title])] if title in later else []
        lines.append(folded(title, "\n".join([*apart, as_markdown(table)])))
    return "\n".join(lines)


def _measured(answer: Mapping[str, Any]) -> str:
    """Says when and where figures were measured."""
    machine = answer["machine"]
    return (
        f"{answer['date']}: torch {machine['torch']}, Python {machine['python']}, {machine['cores']} cores "
        f"of {machine['processor']}, load {machine['load']} at the start; took {answer['seconds']:.0f} s.\n"
    )


def draw(path: Path, question: Question, figures: Figures) -> bool:
    """Draws one column of all tables as groups of bars; returns whether it could."""
    groups = {title: table for title, table in figures.items() if _has(table, question.chart)}
    try:
        import matplotlib
    except ModuleNotFoundError:
        return False
    if not groups:
        return False
    matplotlib.use("svg")
    from matplotlib import pyplot

    rows = list(dict.fromkeys(row for table in groups.values() for row in table))
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "benchmarks", "font.size": 8}):
        figure, axes = pyplot.subplots(figsize=(8, 3), layout="constrained")
        for index, row in enumerate(rows):
            heights = [table.get(row, {}).get(question.chart, 0.0) for table in groups.values()]
            places = [group + (index + 0.5) / (len(rows) + 1) for group in range(len(groups))]
            axes.bar(places, heights, width=1 / (len(rows) + 1), label=row, color=f"C{index % 10}")
        axes.set_xticks([group + 0.5 for group in range(len(groups))], list(groups))
        axes.set_ylabel(question.chart)
        axes.legend(fontsize=6, ncols=2)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
    return True


def _has(table: Mapping[str, Mapping[str, float]], column: str) -> bool:
    return any(column in row for row in table.values())
