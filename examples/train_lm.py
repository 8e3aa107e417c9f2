"""Train a byte-level GPT with fsdp_wrap on real text, on one process or several.

    torchrun --nproc-per-node 2 examples/train_lm.py --checkpoint runs/lm
    torchrun --nproc-per-node 2 examples/train_lm.py --checkpoint runs/lm --resume --steps 2400
    python examples/train_lm.py --plan 64
    torchrun --nproc-per-node 2 examples/train_lm.py --steps 10 --timeline runs/seen
    torchrun --nproc-per-node 2 examples/train_lm.py --reproducible --global-batch 64
    torchrun --nproc-per-node 2 examples/train_lm.py --audit

Under torchrun's elastic agent it resumes automatically, on any number of ranks (docs/elastic.md):

    torchrun --nnodes 1:4 --nproc-per-node 8 --max-restarts 20 \\
        --rdzv-backend c10d --rdzv-endpoint HOST:PORT \\
        examples/train_lm.py --checkpoint runs/lm --elastic --global-batch 64

The corpus is the source text of Python's standard library unless `--data` names another folder. Progress and
a sampled text go to standard error; standard output ends with one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lm import checkpoint, launch
from lm.data import Corpus, Share
from lm.launch import RunError, World
from lm.model import GPT
from lm.options import Options, parse
from lm.reproducing import digest, make_reproducible
from lm.seeing import Recording, Unread, auditing, print_plan
from tqdm import tqdm

from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.optim import Muon
from fsdp_wrap.wrap import NameWrapPolicy

EVAL_BATCH = 32
PROMPT = b"def "
TEMPERATURE = 0.8
BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
"""Without tqdm's own rate, so that all figures fit into a terminal of 80 columns."""
LINES = 10
"""Lines of progress in a run whose standard error is no terminal."""


@dataclass
class Run:
    """A model in training, with what it learns from. Each method is called by every rank."""

    options: Options
    corpus: Corpus | Unread
    world: World
    share: Share
    model: FSDP = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.options.seed)
        module = GPT(self.options.model)
        device_id = self.world.device if self.world.device.type == "cuda" else None
        self.model = FSDP(module, auto_wrap_policy=NameWrapPolicy(self.options.wrap), device_id=device_id)
        self.optimizer = make_optimizer(self.options, self.model, self.world)
        self.reproducible = make_reproducible(self.model, self.options)

    def train_step(self, step: int) -> torch.Tensor:
        """Update the parameters once.

        The data depend on the step and the global batch, whatever the number of ranks; the learning rate on
        the step alone. Returns this rank's part of the loss.
        """
        total = torch.zeros((), device=self.world.device)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.options)
        for loss in self._losses(step):
            loss.backward()
            total += loss.detach()
        self.model.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total if self.reproducible is None else total / self.share.forwards

    def _losses(self, step: int) -> Iterator[torch.Tensor]:
        """Yields this rank's losses of a step, for a backward each."""
        key, context = f"seed {self.options.seed} step {step}", self.options.context
        if self.reproducible is not None:  # it divides the sum of gradients itself
            for index in self.reproducible.micro_batches(step):
                yield self._loss(*self.share.micro_batch(self.corpus, key, context, index)).mean()
            return
        for part, (batch, count) in enumerate(self.share.windows(self.corpus, key, context), 1):
            with nullcontext() if part == self.share.forwards else self.model.no_sync():
                yield self._loss(*batch)[:count].sum() * self.share.scale

    @torch.no_grad()
    def evaluate(self) -> float:
        """Returns the mean loss over the held-out windows, in nats per byte, the same on every rank."""
        assert isinstance(self.corpus, Corpus)
        count, context = self.options.eval_windows, self.options.context
        sums = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        for start in range(0, count, EVAL_BATCH * self.world.size):
            index = torch.arange(EVAL_BATCH) + start + EVAL_BATCH * self.world.rank
            # Ranks run in lockstep, so a rank past the last window computes on others that do not count.
            losses = self._loss(*self.corpus.held_out_windows(index % count, count, context))
            counted = losses[(index < count).to(losses.device)].double()
            sums += torch.stack([counted.sum(), counted.new_tensor(counted.numel())])
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    @torch.no_grad()
    def sample(self, length: int) -> str:
        """Draws text from the model; every rank draws the same bytes, as all take part in each forward."""
        generator = torch.Generator().manual_seed(self.options.seed)
        text = list(PROMPT)
        for _ in range(length):
            window = torch.tensor([text[-self.options.context :]], device=self.world.device)
            logits = self.model(window)[0, -1].float().cpu()
            likely = torch.softmax(logits / TEMPERATURE, dim=0)
            text.append(int(torch.multinomial(likely, 1, generator=generator)))
        return readable(bytes(text))

    def peak_memory_bytes(self) -> int:
        """Returns the highest of all ranks."""
        peak = torch.tensor(launch.peak_memory_bytes(self.world.device), device=self.world.device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        return int(peak)

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns each window's mean loss."""
        logits = self.model(inputs.to(self.world.device))
        wanted = targets.to(self.world.device).flatten()
        losses = F.cross_entropy(logits.flatten(0, 1), wanted, reduction="none")
        return losses.view(targets.shape).mean(dim=1)


def readable(text: bytes) -> str:
    """Returns text for a terminal: bytes that are no text, as an untrained model writes them, as `\\xff`."""
    decoded = text.decode(errors="backslashreplace")
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in decoded)


def print_line(step: int, steps: int, shown: dict[str, str]) -> None:
    """Prints what the bar would show."""
    figures = ", ".join(f"{name}={value}" for name, value in shown.items())
    print(f"{step / steps:.0%} {step}/{steps} [{figures}]", file=sys.stderr, flush=True)


def make_optimizer(options: Options, model: FSDP, world: World) -> torch.optim.Optimizer:
    """Makes AdamW, or Muon for the matrices of the blocks and AdamW for all else."""

    def adamw(params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, betas=(0.9, 0.95), weight_decay=0.01)

    if options.optimizer == "adamw":
        return adamw(model.parameters())
    return Muon(
        model,
        weight_decay=0.01,
        adjust_lr_fn="match_rms_adamw",  # so that one learning rate fits both
        other=adamw,
        select=lambda name, shape: name.startswith("blocks.") and len(shape) == 2,
        ns_dtype=torch.bfloat16 if world.device.type == "cuda" else torch.float32,
    )


def learning_rate(step: int, options: Options) -> float:
    """Returns the rate: linearly up, down with the square root; it knows no end, so runs may be prolonged."""
    return options.lr * min(step / options.warmup, (options.warmup / step) ** 0.5)


def train(run: Run, folder: checkpoint.Folder | None, first_step: int) -> float:
    """Trains from `first_step` on, with evaluations and checkpoints between; returns tokens per second."""
    options, world = run.options, run.world
    recording = Recording(options.timeline, world)
    tokens = run.share.global_batch * options.context
    todo = range(first_step, options.steps + 1)
    # None: no bar where standard error is no terminal, as in a file, which gets some lines instead.
    disable = None if world.is_first else True
    bar = tqdm(todo, initial=first_step - 1, total=options.steps, bar_format=BAR, disable=disable)
    seconds, shown = 0.0, {}
    for done, step in enumerate(bar, 1):
        started = time.perf_counter()
        with recording.step(run.model, is_last=step == options.steps):
            loss = run.train_step(step).item()
        seconds += time.perf_counter() - started
        if step % options.eval_every == 0 and step < options.steps:
            shown["val"] = f"{run.evaluate():.3f}"
        speed, peak = done * tokens / seconds, launch.peak_memory_bytes(world.device) / 2**20
        shown |= {"loss": f"{loss:.3f}", "tok/s": f"{speed:.0f}", "MB": f"{peak:.0f}"}
        bar.set_postfix(shown, refresh=False)
        if (
            world.is_first
            and bar.disable
            and (step % max(1, options.steps // LINES) == 0 or done == len(todo))
        ):
            print_line(step, options.steps, shown)
        if folder and (step % options.checkpoint_every == 0 or step == options.steps):
            folder.save(step, run.model, run.optimizer)
    return len(todo) * tokens / seconds if todo else 0.0


def work(options: Options, corpus: Corpus, world: World) -> dict[str, Any]:
    """Does the whole run; returns the numbers of its last line."""
    folder, last_step = None, 0
    share = options.share(world.rank, world.size)
    run = Run(options, corpus, world, share)
    if options.checkpoint:
        folder = checkpoint.Folder(options.checkpoint, options.identity(corpus, share.global_batch))
        if options.resume or (options.elastic and folder.is_begun()):
            last_step = folder.load(options.steps, run.model, run.optimizer)
        else:
            folder.prepare()
    with auditing(run.model, options.audit):
        tokens_per_s = train(run, folder, last_step + 1)
    val_loss = run.evaluate()
    text = run.sample(options.sample)
    if world.is_first:
        print(f"\nsampled text:\n{text}\n", file=sys.stderr, flush=True)
    report = {
        "step": options.steps,
        "val_loss": val_loss,
        "tokens_per_s": round(tokens_per_s, 1),
        "peak_memory_bytes": run.peak_memory_bytes(),
    }
    return report | ({"digest": digest(run.model, run.optimizer)} if options.reproducible else {})


def planned(options: Options, world: World) -> tuple[FSDP, torch.optim.Optimizer, Callable[[], object]]:
    """Makes model, optimizer and step for `fsdp_wrap.plan`: this very run, on text without values."""
    run = Run(options, Unread(), world, options.share(world.rank, world.size))
    return run.model, run.optimizer, lambda: run.train_step(1)


def main() -> None:
    options, corpus = parse()
    if options.plan is not None:
        return print_plan(options.plan, lambda world: planned(options, world))
    world = launch.start()
    if world.is_first and world.size > 1:
        threads = torch.get_num_threads()  # which start() has chosen, whatever torchrun says
        print(f"{world.size} ranks, of {threads} thread{'s' * (threads > 1)} each", file=sys.stderr)
    try:
        report = work(options, corpus, world)
    except RunError as error:
        sys.exit(f"{sys.argv[0]}: error: {error}")
    if world.is_first:
        print(json.dumps(report), flush=True)
    launch.finish()


if __name__ == "__main__":
    main()
