"""Writes docs/clients.md from JUnit reports of tests/clients: which client runs, in which version.

    FSDP_WRAP_THOROUGH=1 pytest -m slow tests/clients -n 2 --junitxml=clients.xml
    python docs/clients.py clients.xml [OTHER.xml ...]
    python docs/clients.py --add OTHER.xml
    python docs/clients.py --broken clients.xml

Reports with the same torch make one table, in which a scenario that was not run in one environment is that of
another. `--add` keeps the page and changes the rows of the scenarios that the reports tell of. `--broken`
writes nothing: it prints what failed or was skipped, with the versions, and exits with 0, since a new version
may break at any time.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

TARGET = Path(__file__).with_name("clients.md")

HEAD = """# Clients

Programs for torch's FSDP that were run on this library, with their versions. All ran on CPUs, none on a GPU.
Each scenario is a test in `tests/clients`: the client's own code trains unmodified on our units, and its
numbers are compared with torch's FSDP, DDP or a plain model.

| result | what it means |
|---|---|
| equal | the numbers are those of torch, within the test's tolerance, often to the bit |
| refused | an error says what is wrong and what to do, before anything changes |
| broken | the test fails with these versions |

Reports of the tests make this page, one report for each environment:

```console
$ FSDP_WRAP_THOROUGH=1 pytest -m slow tests/clients -n 2 --junitxml=clients.xml
$ python docs/clients.py clients.xml
```

The whole loops of `tests/clients/test_loops.py` need clients that cannot be installed together. Each has an
environment of its own, with torch, this package and the versions that the client pins; its report is added.

```console
$ pip install torchtune torchao==0.14.1
$ pytest -m slow tests/clients/test_loops.py -k torchtune --junitxml=torchtune.xml
$ python docs/clients.py --add torchtune.xml
```

Each torch has a table: 2.13.0 with the clients that `.ci/constraints.txt` pins, which the slow tier runs, and
newer ones with the newest clients, with which nothing broke. `FSDP_WRAP_NEWEST=1 .ci/run` prints what has
broken since. `python -m fsdp_wrap.compat --check` says whether all names that a program imports are served,
[without running it](reference/compat.md).
"""

OTHERS = """## Run by hand

These are not in the tests. They ran on two ranks, or four with tensor parallelism, without a GPU:

| client | torch | scenario | result |
|---|---|---|---|
| torchtitan 0.3.0 | 2.14.1 | Llama, `spmd_backend="partial_dtensor"` | equal to the bit |
| torchtitan 0.3.0 | 2.14.1 | Llama, `spmd_backend="full_dtensor"` | equal to the bit |
| torchtitan 0.3.0 | 2.14.1 | the same with tensor parallelism | equal to the bit |
| torchtitan 0.3.0 | 2.14.1 | Llama, `spmd_backend="spmd_types"`, its default | equal to the bit |
| torchtitan 0.3.0 | 2.14.1 | the same with tensor parallelism, or over replicas | equal to the bit |
| torchtitan 0.3.0 | 2.14.1 | the same, types checked, with and without checkpointing | equal to the bit |
| torchtitan 0.3.0 | 2.14.1 | DeepSeek V3, `spmd_types`, also with tensor parallelism | equal to the bit |
| torchtitan 0.3.0 | 2.14.1 | the same with expert parallelism | not run: over gloo it fails, torch's too |
| OpenRLHF 0.11.2 | 2.13.0 | | not run: it has no FSDP, it trains with DeepSpeed |
| axolotl 0.19.0 | 2.14.1 | | not run: it takes a torch up to 2.13 |
| axolotl 0.19.0 | 2.13.0 | FSDP1 | not run: torch's wrapper refuses hosts without an accelerator |
| LLaMA-Factory 0.9.5 | 2.13.0 | SFT by its command | not run: on a host without a GPU it starts no FSDP |
| verl 0.9.1 | 2.13.0 | a whole loop | not run: it knows the platforms CUDA, NPU and ROCm only |
| NeMo Automodel 0.7.0 | 2.13.0 | SFT by its recipe, FSDP2, with stand-ins for calls of CUDA | equal |
| accelerate 1.15.0 | 2.13.0 | `ParallelismConfig`: FSDP2 with tensor parallelism | equal |
| torchsnapshot 0.1.0 | 2.13.0 | full state dicts | equal |
| torchsnapshot 0.1.0 | 2.13.0 | `DTensor`s | not saved, torch's neither |
| torchsnapshot 0.1.0 | 2.13.0 | the wrapper's pieces | not saved: save full state dicts, or use DCP |

`spmd_types` annotates plain parameters. Our `fully_shard` stores them as `DTensor`s and computes with plain
tensors, as torch's does from 2.14 on; ours needs no such torch. Without a GPU, attention of torchtitan 0.3
has a stand-in, since torch's FlexAttention has no backward on a CPU.
torchsnapshot knows torch's `ShardedTensor` alone.

axolotl ran with the versions that it pins. Without a GPU, torchtune's recipes cannot offload (they ask for
two backends of the CPU). Its memory statistics, axolotl's mesh and NCCL have stand-ins in
`tests/clients/in_front`. Ray's own
`prepare_model(parallel_strategy="fsdp")` refuses hosts without a GPU. For its `ParallelismConfig`, accelerate
1.15 calls a class that transformers 5.23 no longer has: it had a stand-in.

## Names that are served

`python -m fsdp_wrap.compat --check`, for packages that were mostly not run, on torch 2.13.0:

| package | not served |
|---|---|
| verl 0.9.1 | none |
| LLaMA-Factory 0.9.5 | none |
| NeMo 3.0.0 | none |
| torchtune 0.6.1 | none |
| ray 2.60.0 | none |
| Liger 0.8.5 | none |
| axolotl 0.19.0 | three methods of `FSDPParam` |

axolotl replaces these methods to shard four-bit weights; [ours need none of that](how-to/qlora.md).
"""


@dataclass(frozen=True)
class Run:
    """One case of a test of a client."""

    test: str
    torch: str
    clients: tuple[str, ...]
    result: str
    """What it shows, or why it does not."""
    works: bool
    file: str

    @property
    def ran(self) -> bool:
        """Whether it was run at all."""
        return not self.result.startswith(NOT_RUN)

    @classmethod
    def of(cls, case: ElementTree.Element) -> Run:
        told = {node.get("name", ""): node.get("value", "") for node in case.iter("property")}
        outcomes = {kind: case.find(kind) for kind in ("failure", "error", "skipped")}
        failed = next(((kind, node) for kind, node in outcomes.items() if node is not None), None)
        test = case.get("name", "").partition("[")[0].removeprefix("test_").replace("_", " ")
        file = case.get("classname", "").rpartition(".")[2].removeprefix("test_")
        clients = tuple(told.get("clients", file).split(", "))
        if failed is None:
            return cls(test, told["torch"], clients, told["shows"], works=True, file=file)
        kind, element = failed
        why = (element.get("message") or "").strip().partition("\n")[0]
        return cls(
            test, told.get("torch", ""), clients, f"{BROKEN.get(kind, kind)}: {why}", works=False, file=file
        )


NOT_RUN = "not run"
BROKEN = {"failure": "broken", "error": "broken", "skipped": NOT_RUN}


def runs_of(report: Path) -> Iterator[Run]:
    """Yields what a report tells of clients."""
    for case in ElementTree.parse(report).iter("testcase"):
        if ".clients." in f".{case.get('classname', '')}":
            yield Run.of(case)


TITLE = ["| client | with | scenario | cases | result |", "|---|---|---|---|---|"]


def rows_of(runs: list[Run]) -> list[str]:
    """Returns the rows of one version of torch: by client and test, with the number of cases."""
    ran = {(run.file, run.test) for run in runs if run.ran}
    rows: dict[tuple[tuple[str, ...], str], list[Run]] = defaultdict(list)
    for run in runs:
        if run.ran or (run.file, run.test) not in ran:
            rows[run.clients, run.test].append(run)
    lines = []
    for (clients, test), cases in sorted(rows.items()):
        results = "; ".join(dict.fromkeys(case.result for case in cases))
        row = (clients[0], ", ".join(clients[1:]), test, str(len(cases)), results)
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |")
    return lines


def rows_in(page: str, torch: str) -> list[str]:
    """Returns the rows that a page has for a version of torch."""
    section = page.partition(f"## torch {torch}\n")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| ") and line not in TITLE]


def added(old: list[str], runs: list[Run]) -> list[str]:
    """Returns rows of a page in which those of scenarios that were run are replaced, and others added."""
    new = [run for run in runs if run.ran]
    told = {(run.clients[0].partition(" ")[0], run.test) for run in new}
    told |= {(run.file, run.test) for run in new}  # a client that was not installed goes by its file
    return sorted([row for row in old if _key(row) not in told] + rows_of(new))


def _key(row: str) -> tuple[str, str]:
    client, _, scenario, *_ = row.removeprefix("| ").split(" | ")
    return client.partition(" ")[0], scenario


def table(rows: list[str]) -> str:
    """Returns a table of rows."""
    return "\n".join([*TITLE, *rows])


def broken(runs: list[Run]) -> str:
    """Returns a line for each case that does not work, and a count."""
    lines = [f"{run.test} ({', '.join(run.clients)}): {run.result}" for run in runs if not run.works]
    return "\n".join([*lines, f"{len(runs) - len(lines)} of {len(runs)} scenarios of clients work"])


def main(arguments: list[str] | None = None) -> int:
    """Writes the page, or prints what broke."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reports", nargs="+", type=Path, help="JUnit reports")
    parser.add_argument("--broken", action="store_true", help="print what does not work; write nothing")
    parser.add_argument("--add", action="store_true", help="keep the rows of other scenarios")
    given = parser.parse_args(arguments)
    environments: dict[str, list[Run]] = defaultdict(list)
    for report in given.reports:
        runs = list(runs_of(report))
        torch = next((run.torch for run in runs if run.torch), "of another version")
        environments[torch] += runs
    if given.broken:
        print(*map(broken, environments.values()), sep="\n")
        return 0
    rows = {torch: rows_of(runs) for torch, runs in environments.items()}
    if given.add:
        page = TARGET.read_text("utf-8")
        known = dict.fromkeys([*re.findall(r"^## torch (.+)$", page, re.M), *rows])
        rows = {torch: added(rows_in(page, torch), environments[torch]) for torch in known}
    tables = [f"## torch {torch}\n\n{table(lines)}\n" for torch, lines in rows.items()]
    TARGET.write_text("\n".join([HEAD, *tables, OTHERS]), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
