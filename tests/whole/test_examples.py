"""The examples as a user runs them: under torchrun, to the end, resumed, killed, and with wrong input.

Also training that outlives its hosts, and receivers of weights that die.
"""

import argparse
import copy
import itertools
import json
import math
import os
import random
import re
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bed import ranks
from bed.paths import ROOT
from bed.patience import NEVER, until
from bed.scripts import Done, on_ranks, python, run, script
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import MixedPrecision
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import Block, Transformer, train
from warm import warm

sys.path.insert(0, str(ROOT))  # benchmarks are not installed
sys.path.insert(0, str(ROOT / "examples"))

from lm.data import Corpus, Share

from benchmarks import receiver_kills
from benchmarks.host_kills import ALL_HOSTS, HOST, RANK, disturbed, launcher, run_on
from benchmarks.victims import Host, cores_of, kill
from fronts import assert_tensors

EXAMPLES = ROOT / "examples"
TINY = "--layers 2 --width 32 --heads 2 --context 16 --batch 2 --warmup 2 --eval-windows 8 --sample 4".split()


def report_of(done: Done) -> dict[str, float]:
    report: dict[str, float] = json.loads(done.out.splitlines()[-1])
    return report


def train_lm(*flags: object, processes: int = 2) -> Done:
    return warm(processes, EXAMPLES / "train_lm.py", *TINY, *flags)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


STEPS = 90


@pytest.fixture(scope="module")
def uninterrupted(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[float, Path, str]:
    """The loss in the end, the folder of what a timeline recorded, and what was told meanwhile."""
    seen = tmp_path_factory.mktemp("seen")
    done = train_lm("--data", text, "--steps", STEPS, "--timeline", seen)
    return report_of(done)["val_loss"], seen, done.err


@pytest.mark.slow
def test_the_command_of_the_readme_learns_and_reports_one_line_of_json():
    """In a third of its steps."""
    result = python(*on_ranks(2, EXAMPLES / "train_lm.py", "--steps", 400, "--eval-every", 200))
    report = report_of(result)
    assert set(report) == {"step", "val_loss", "tokens_per_s", "peak_memory_bytes"}
    assert report["step"] == 400
    assert 1 < report["val_loss"] < 2.25  # 2.31 after 300, 2.20 after 400
    assert report["tokens_per_s"] > 0
    assert report["peak_memory_bytes"] > 2**20
    assert len([line for line in result.out.splitlines() if line.strip().startswith(("{", "["))]) == 1
    assert "sampled text" in result.err
    assert "400/400" in result.err and "val=" in result.err


def test_progress_in_a_file_is_ten_lines_of_text(text):
    """Also of a model that has learned nothing, which writes any bytes."""
    told = train_lm("--data", text, "--steps", 20, "--sample", 200).err
    lines = re.split(r"[\r\n]+", told)
    assert [line.split()[1] for line in lines if "tok/s=" in line] == [
        f"{step}/20" for step in range(2, 21, 2)
    ]
    sampled = told.partition("sampled text:")[2]
    assert "\\x" in sampled and all(character.isprintable() or character in "\n\t" for character in sampled)


@pytest.mark.slow
def test_muon_learns_more_in_the_same_steps(text, uninterrupted):
    loss = report_of(train_lm("--data", text, "--steps", STEPS, "--optimizer", "muon"))["val_loss"]
    assert 0 < loss < uninterrupted[0]


@pytest.mark.slow
def test_any_number_of_processes_trains_evaluates_and_samples(text):
    report = report_of(train_lm("--data", text, "--steps", 4, "--accumulation", 2, processes=3))
    assert 1 < report["val_loss"] < 6


@pytest.mark.slow
@pytest.mark.parametrize("way", ["gloo", "folder"])
def test_a_generating_process_follows_the_trainers(way):
    words = f"--way {way} --steps 4 --every 2".split()
    result = python(*on_ranks(2, EXAMPLES / "weights_to_inference.py", *words))
    lines = [line for line in result.out.splitlines() if line.startswith("version")]
    assert [line.split(":")[0] for line in lines] == ["version 1", "version 2", "version 3"]
    assert ": all; 'def " in lines[0] and " changes (" in lines[2]


@pytest.mark.slow
def test_a_plan_is_printed_and_nothing_is_trained(tmp_path):
    planned = python(EXAMPLES / "train_lm.py", *TINY, "--plan", "64", "--checkpoint", tmp_path / "run").out
    assert "rank 0 of 64" in planned and "blocks.1" in planned
    assert "val_loss" not in planned and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_timeline_of_some_steps_is_written_with_report_and_picture(uninterrupted):
    _, seen, told = uninterrupted
    assert "wrote trace.json" in told
    trace = json.loads((seen / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"] if event.get("ph") == "X"} == {0, 1}
    report = (seen / "report.txt").read_text()
    assert "2 ranks on one host, 3 passes" in report and "blocks.1" in report
    assert "<svg" in (seen / "step.svg").read_text()


@ranks(2)
def test_folders_refuse_what_is_not_of_this_run(rank, world_size, tmp_path):
    from lm.checkpoint import Folder
    from lm.launch import RunError

    model = FSDP(nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    folder = Folder(tmp_path / "run", {"width": 32, "seed": 0})

    def refuses(words: str, last_step: int = 5, folder: Folder = folder) -> None:
        with pytest.raises(RunError, match=words):
            folder.load(last_step, model, optimizer)

    refuses("no complete checkpoint in .*run: there is no such folder")
    assert not folder.path.exists()
    dist.barrier()
    folder.prepare()
    refuses("no complete checkpoint in .*run: it holds no step folder")
    folder.save(4, model, optimizer)
    assert folder.load(5, model, optimizer) == 4
    before = contents(tmp_path)
    refuses("step_00000004 lies beyond the last step asked for, --steps 3", 3)
    with pytest.raises(RunError, match="already holds step_00000004: pass --resume"):
        folder.prepare()
    wider = Folder(folder.path, {"width": 64, "seed": 0})
    refuses("does not fit this run: width is 32 in the checkpoint and 64 here", folder=wider)
    assert rank or contents(tmp_path) == before
    dist.barrier()
    if rank == 0:
        part = folder.path / "step_00000004" / "__0_0.distcp"
        data = bytearray(part.read_bytes())
        data[100] ^= 1
        part.write_bytes(data)
    dist.barrier()
    refuses("step_00000004 is damaged")


WRONG_FLAGS = {
    "--steps -3": "--steps: must be at least 1, not -3",
    "--steps many": "--steps: invalid whole number value: 'many'",
    "--lr nan": "--lr: must be positive and finite",
    "--width 30 --heads 4": "--heads 4 does not divide --width 30",
    "--wrap Blok": "--wrap Blok is no module class of the model; it has Attention, Block",
    "--wrap ModuleList": "--wrap ModuleList is no module class of the model",
    "--resume": "--resume needs --checkpoint DIR",
    "--data {tmp}/absent": "absent does not exist or is not a folder",
    "--data {tmp}/empty": "holds 0 bytes of text to train on and 0 held out",
    "--data {tmp}/small": "each must be more than the context of 64 bytes",
}


def test_wrong_flags_end_in_a_usage_error(tmp_path, capsys):
    from lm.options import parse

    (tmp_path / "empty").mkdir()
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "text").write_text("too little to learn from")
    for flags, message in WRONG_FLAGS.items():
        with pytest.raises(SystemExit) as ended:
            parse(flags.format(tmp=tmp_path).split())
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


def saved(folder: Path, pattern: str) -> list[int]:
    """The steps of a run's checkpoints, complete or not."""
    matches = [re.search(r"step_(\d+)", path.name) for path in folder.glob(pattern)]
    return sorted(int(match[1]) for match in matches if match)


def wait_for(victim: Host, folder: Path, pattern: str, after: int) -> int:
    """Returns the newest step, when there is one after another."""
    until(
        lambda: max(saved(folder, pattern), default=0) > after or victim.agent.poll() is not None, pause=0.002
    )
    assert victim.agent.poll() is None, victim.log.with_suffix(".err").read_text()
    return max(saved(folder, pattern), default=after)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the rank processes in /proc")
def test_a_run_that_is_killed_again_and_again_resumes_to_the_same_end(text, uninterrupted, tmp_path):
    """At last over a damaged checkpoint; before, a run whose steps see other data is refused."""
    folder = tmp_path / "checkpoints"
    flags = ["--data", text, "--steps", STEPS, "--checkpoint", folder]
    every = [*flags, "--checkpoint-every", 3]
    newest = 0
    for number, (moment, rank) in enumerate(itertools.product(("in_a_step", "in_a_checkpoint"), (0, 1))):
        resume = ["--resume"] * (number > 0)
        command = on_ranks(2, EXAMPLES / "train_lm.py", *TINY, *every, *resume)
        log = tmp_path / f"{number}.log"
        memory, cores = tmp_path / "memory", sorted(os.sched_getaffinity(0))
        victim = Host([sys.executable, *map(str, command)], memory, log, cores)
        try:
            newest = wait_for(victim, folder, "step_*", newest)
            if moment == "in_a_step":
                time.sleep(random.uniform(0, 0.2))
            else:
                wait_for(victim, folder, ".*.partial", newest)
            kill([victim.ranks()[rank]])
            assert victim.agent.wait(timeout=NEVER) != 0
        finally:
            victim.stop()
        newest = max(saved(folder, "step_*"))
    part = folder / f"step_{newest:08}" / "__1_0.distcp"
    part.write_bytes(part.read_bytes()[:1000])
    before = contents(folder)
    alone = python(EXAMPLES / "train_lm.py", *TINY, *flags, "--resume", code=1)
    assert "error: " in alone.err and "global batch is 4 in the checkpoint and 2 here" in alone.err
    assert contents(folder) == before

    result = train_lm(*every, "--resume")
    assert report_of(result)["step"] == STEPS
    assert report_of(result)["val_loss"] == uninterrupted[0]
    assert f"step_{newest:08}: __1_0.distcp has 1000 of" in result.err
    assert saved(folder, "step_*") == [STEPS - 3, STEPS]


def test_a_step_has_the_same_windows_for_any_number_of_ranks(text):
    """Each once; all ranks run equally many forwards; the mean over ranks is that over the windows."""
    corpus = Corpus.load(text, 16)
    expected, _ = corpus.batch("step 3", 7, 16)
    for size in (1, 2, 3, 5, 9):
        windows, weights = [], 0.0
        for rank in range(size):
            share = Share(rank, size, global_batch=7, batch=2)
            parts = [*share.windows(corpus, "step 3", 16)]
            assert len(parts) == share.forwards == math.ceil(math.ceil(7 / size) / 2)
            for (inputs, targets), count in parts:
                assert 0 < len(inputs) <= 2 and torch.equal(inputs[:, 1:], targets[:, :-1])
                windows.append(inputs[:count])
                weights += count * share.scale / size
        assert torch.equal(torch.cat(windows), expected), size
        assert weights == pytest.approx(1)


@pytest.mark.slow
def test_a_run_goes_on_by_itself_at_the_ranks_that_are_left(text, tmp_path):
    """Of two hosts one goes for good, later a rank of the other; the end is that of an undisturbed run."""
    flags = [*TINY, *"--steps 80 --checkpoint-every 5 --global-batch 8 --data".split(), str(text)]
    undisturbed = report_of(warm(1, EXAMPLES / "train_lm.py", *flags))

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folder, log = tmp_path / "checkpoints", tmp_path / "run.log"
    script = [str(EXAMPLES / "train_lm.py"), *flags, "--checkpoint", str(folder), "--elastic"]
    command = [*launcher(store, 2, 1, last_call=2), *script]
    hosts = [Host(command, tmp_path / f"memory{number}", log, cores_of(number, 2)) for number in range(2)]
    try:
        reached(folder, 10)
        hosts[1].stop()
        newest = reached(folder, 15 + max(saved(folder, "step_*")))  # alone
        hosts[0].lose(RANK, random.Random(0))
        reached(folder, newest + 5)
        assert hosts[0].agent.wait(timeout=NEVER) == 0, log.with_suffix(".err").read_text()[-3000:]
    finally:
        for host in hosts:
            host.stop()
    report = json.loads(log.read_text().splitlines()[-1])
    assert report["step"] == 80
    assert report["val_loss"] == pytest.approx(undisturbed["val_loss"], rel=1e-3)  # other sums, rounded
    assert json.loads((folder / "run.json").read_text())["global batch"] == 8


def reached(folder: Path, step: int) -> int:
    """Returns the newest step once it is this high."""
    until(lambda: max(saved(folder, "step_*"), default=0) >= step)
    return max(saved(folder, "step_*"))


@pytest.mark.slow
def test_a_lost_host_costs_no_more_than_the_steps_since_the_copy(text, tmp_path):
    """Of one host: all comes from the memory of the other. Of both: from the disk. The end is the same."""
    flags = ("--memory", tmp_path / "quiet", "--steps", 60, "--width", 32, "--data", text)
    undisturbed = report_of(warm(2, EXAMPLES / "elastic.py", *flags))
    assert undisturbed["step"] == 60
    options = argparse.Namespace(
        hosts=2, ranks=1, lose_at_most=5, steps=60, disk_every=10, width=32, data=text, seed=0
    )
    with run_on(options, tmp_path / "memory", tmp_path / "disk", step_seconds=0.02) as run:
        events, loss = disturbed(run, options.steps, (HOST, ALL_HOSTS), random.Random(1))
        ways = [(0, "the beginning"), (events[0].resumed, "memory"), (events[1].resumed, "disk")]
        lines = [json.loads(line) for line in run.log.read_text().splitlines() if line.startswith("{")]
        assert [(line["resumed"], line["from"]) for line in lines if "resumed" in line] == ways
    assert [event.kind for event in events] == [HOST, ALL_HOSTS]
    assert events[0].resumed >= 3 and events[0].ranks == 2
    assert 0 <= events[0].lost <= options.lose_at_most
    assert 0 <= events[1].lost <= options.disk_every
    assert loss == undisturbed["loss"]
    assert not any((tmp_path / "memory").glob("*/step_*"))  # freed in the end


@pytest.mark.slow
def test_a_receiver_that_is_killed_costs_no_step_and_the_next_one_has_all():
    """The trainers' bits are those of a run without receivers, and the last receiver has them."""
    events, same = receiver_kills.disturbed(1, seed=3)
    assert [event.lost for event in events] == [0]
    assert events[0].seconds < events[0].away
    assert same


SCRIPT = EXAMPLES / "slurm.sh"
PRINT_ARGUMENTS = '#!/bin/bash\nprintf "%s\\n" "${0##*/}" "$@"\n'


def test_the_slurm_script_is_sound_and_on_its_page():
    run("bash", "-n", SCRIPT)
    page = (ROOT / "docs" / "how-to" / "several-hosts.md").read_text("utf-8")
    assert f"```sh\n{SCRIPT.read_text('utf-8').rstrip()}\n```\n" in page


def started(folder: Path, programs: dict[str, str], **settings: str) -> list[str]:
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    path = os.pathsep.join([str(folder), "/usr/bin", "/bin"])
    job = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "host-[3-4]", "SLURM_JOB_NUM_NODES": "2"}
    done = run("bash", SCRIPT, "train.py", "--lr", "a b", env={"PATH": path, **job, **settings})
    return done.out.splitlines()


@pytest.mark.skipif(Path("/usr/bin/srun").exists(), reason="this host has Slurm")
def test_the_slurm_script_starts_one_torchrun_on_each_host(tmp_path):
    hosts = "#!/bin/bash\nprintf 'host-3\\nhost-4\\n'\n"
    programs = {"srun": PRINT_ARGUMENTS, "torchrun": PRINT_ARGUMENTS, "scontrol": hosts}
    words = started(tmp_path, programs, SLURM_GPUS_ON_NODE="8", SLURM_CPUS_PER_TASK="64")
    assert words[:4] == ["srun", "--kill-on-bad-exit=1", "--cpus-per-task=64", "torchrun"]
    options = dict(zip(words[4:14:2], words[5:14:2]))
    assert options == {
        "--nnodes": "2",
        "--nproc-per-node": "8",
        "--rdzv-id": "12345",
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": "host-3:22345",
    }
    assert words[14:] == ["train.py", "--lr", "a b"]

    for name in programs:
        (tmp_path / name).unlink()  # without Slurm it starts this host's part
    alone = {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "localhost", "RANKS_PER_NODE": "2"}
    words = started(tmp_path, {"torchrun": PRINT_ARGUMENTS}, **alone)
    assert words[0] == "torchrun"
    assert "localhost:22345" in words and words[-3:] == ["train.py", "--lr", "a b"]


example = script("fsdp_in_250_lines", "examples")


def _twins(**dtypes: torch.dtype) -> tuple[nn.Module, FSDP]:
    """The same transformer sharded by the example and by the package, a unit for each block."""
    torch.manual_seed(0)
    model = Transformer()
    model.register_buffer("seen", torch.tensor(3))
    precision = MixedPrecision(**dtypes) if dtypes else None  # type: ignore[arg-type]  # known to be dtypes
    package = FSDP(
        copy.deepcopy(model), auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=precision
    )
    names = {"param_dtype": "compute_dtype"}
    return example.FSDP(model, (Block,), **{names.get(name, name): dtypes[name] for name in dtypes}), package


@pytest.mark.parametrize("dtypes", [{}, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}])
@ranks(2)
def test_the_example_trains_as_the_package_does_bit_for_bit(rank, world_size, dtypes):
    ours, package = _twins(**dtypes)
    losses = []
    for model in (ours, package):
        losses.append(train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), rank, range(5)))
    assert losses[0] == losses[1]
    state, expected = ours.full_state_dict(), package.state_dict()
    assert state.keys() == expected.keys()
    assert_tensors(state, expected)


@ranks(2)
def test_units_that_share_a_parameter_are_refused(rank, world_size):
    model = Transformer()
    model.blocks[1].norm1.weight = model.blocks[0].norm1.weight
    with pytest.raises(ValueError, match=r"'blocks\.0' and 'blocks\.1' share weight"):
        example.FSDP(model, (Block,))


def test_it_is_short_and_needs_torch_alone():
    lines = (EXAMPLES / "fsdp_in_250_lines.py").read_text("utf-8").splitlines()
    assert len(lines) <= 250
    imported = {line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert imported <= {"__future__", "collections", "copy", "itertools", "torch"}
    told = [line.split()[2] for line in lines if line.strip().startswith("# Step ")]
    assert sorted(told, key=lambda number: int(number[:-1])) == [f"{number}," for number in range(1, 11)]
