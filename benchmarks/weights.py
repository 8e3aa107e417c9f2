"""Time and memory of getting the weights of a model in training; how few elements a step changes.

python -m benchmarks.weights --cases gpt,changes
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import truediv
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp

import fsdp_wrap
from benchmarks.harness import Figures, Question, Settings, Table, ask_alone, compare, interleave, run_ranks
from benchmarks.implementations import SHARED, Trained
from benchmarks.meters import received, tensors
from benchmarks.models import SHORT_CASES, Block, Case, SplitTransformerBlock, stacked, transformer
from fsdp_wrap.weights import WeightSource, apply_changes

STATE_DICT, FULL_TENSOR = "fsdp1", "fsdp2"
BASELINES = {"full_tensor": (FULL_TENSOR,), "state_dict": (STATE_DICT,)}
RATES, CHANGES, WARM = (1e-3, 1e-5, 1e-6), "changes", 3
USUAL = ["fsdp_wrap", "fully_shard", *SHARED.values(), STATE_DICT, FULL_TENSOR]
RANK, SCALE = 8, 2.0


class LoraLinear(nn.Module):
    """A frozen linear layer with an adapter, of the parts that peft's layers have."""

    merged = disable_adapters = False
    active_adapters = ("default",)

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, RANK, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(RANK, layer.out_features, bias=False)})
        self.lora_embedding_A = nn.ParameterDict()
        self.scaling = {"default": SCALE}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base_layer(x)
        return out + SCALE * self.lora_B["default"](self.lora_A["default"](x))


def with_lora(case: Case) -> Case:
    """Returns the case with an adapter on every linear layer of its blocks."""

    def model() -> nn.Module:
        made = case.model()
        for block in [module for module in made.modules() if isinstance(module, Block)]:
            for name, layer in [*block.named_children()]:
                if isinstance(layer, nn.Linear):
                    setattr(block, name, LoraLinear(layer))
        return made

    return replace(case, model=model)


@dataclass(frozen=True)
class Read:
    """A model, and the options of its `weight_source`."""

    case: Case
    options: Mapping[str, Any] = field(default_factory=dict)


GPT = transformer(8, 512, 8, 16, 4096, 1, SplitTransformerBlock)
TINY = transformer(2, 16, 2, 4, 16, 2, SplitTransformerBlock)
FUSED = {"fuse": {"qkv": ("query", "key", "value")}}
READS = {
    "gpt": Read(GPT),
    "gpt, fused": Read(GPT, FUSED),
    "gpt, LoRA merged": Read(with_lora(GPT)),
    "288 parameters": Read(stacked(24, 12)),
    "tiny": Read(with_lora(TINY), FUSED),
}
ASKED = [title for title in READS if title != "tiny"]


def reader(name: str, read: Read) -> Callable[[], object]:
    """Returns a function that reads all full tensors once; called on every rank."""
    trained = Trained(name, read.case)
    trained.step()
    model = trained.model
    if name == FULL_TENSOR:
        return lambda: [param.full_tensor() is None for param in model.parameters()]
    if name == STATE_DICT:
        return lambda: _state_dict(model)
    source = fsdp_wrap.weight_source(model, **read.options)
    return partial(_read, source)


def _read(source: WeightSource) -> None:
    for _ in source:
        pass


def _state_dict(model: Any) -> None:
    config = torch_fsdp.FullStateDictConfig(rank0_only=True)
    with torch_fsdp.FullyShardedDataParallel.state_dict_type(
        model, torch_fsdp.StateDictType.FULL_STATE_DICT, config
    ):
        model.state_dict()


def measure(title: str, names: list[str], rounds: int) -> Table:
    """Returns milliseconds of reading all, and megabytes received and alive; called on every rank."""
    readers = {name: reader(name, READS[title]) for name in names}
    table = compare(interleave(readers, rounds), BASELINES)
    for name, read in readers.items():
        before = received()
        read()
        table[name]["received MB"] = (received() - before) / 1e6
        table[name]["peak MB"] = tensors(read).peak / 1e6
    return table


def changes(rounds: int) -> Table:
    """Called on every rank: what one step of AdamW changes in bf16, by learning rate.

    A receiver is played on every rank, and holds the same bits after each round.
    """
    trained = Trained("fsdp_wrap", SHORT_CASES["gpt"])
    source = fsdp_wrap.weight_source(trained.model, dtype=torch.bfloat16)
    full = sum(torch.Size(meta.shape).numel() * meta.dtype.itemsize for meta in source.metadata())
    table: Table = {}
    for rate in RATES:
        trained.optimizer.param_groups[0]["lr"] = rate
        for _ in range(WARM):
            trained.step()
        following = fsdp_wrap.weight_changes(trained.model, torch.bfloat16)
        receiver = dict(source)
        seconds: dict[str, list[float]] = {"ms": [], "ms without checksums": [], "ms of all": []}
        counts: list[int] = []
        for _ in range(rounds):
            for column in ("ms", "ms without checksums"):
                trained.step()
                collect = partial(following.collect, checksums=column == "ms")
                collected = _timed(collect, seconds[column])
                apply_changes(receiver, collected)
                counts.append(sum(len(change.index) for change in collected))
            _timed(partial(_read, source), seconds["ms of all"])
            for name, value in source:
                if dist.get_rank() == 0 and not torch.equal(receiver[name], value):
                    raise AssertionError(f"the receiver has other bits of {name}")
        table[f"lr {rate:g}"] = {
            "elements %": 100 * statistics.median(counts) / (full / 2),
            "bytes / all": collected.nbytes / full,
            **{column: 1e3 * statistics.median(times) for column, times in seconds.items()},
            "time / all": statistics.median(map(truediv, seconds["ms"], seconds["ms of all"])),
        }
    return table


def _timed(action: Callable[[], Any], seconds: list[float]) -> Any:
    dist.barrier()
    begin = time.perf_counter()
    result = action()
    seconds.append(time.perf_counter() - begin)
    return result


def ask(settings: Settings) -> Figures:
    """Returns a table for each model, and one of changes."""
    figures: Figures = {}
    names = settings.implementations(USUAL)
    for title in settings.cases_of([*READS, CHANGES], [*ASKED, CHANGES]):
        if title == CHANGES:
            figures[title] = run_ranks(changes, settings.ranks, settings.rounds or 5)
        else:
            figures[title] = run_ranks(measure, settings.ranks, title, names, settings.rounds or 12)
    return figures


QUESTION = Question(
    "weights",
    "Weights out",
    """\
Milliseconds of reading all full tensors once, one after the other, on 2 ranks: by `weight_source` (`_shared`
through memory), by torch's `state_dict` for the first rank (`fsdp1`), and by `full_tensor()` of each
parameter of torch's `fully_shard` (`fsdp2`); megabytes that the first rank receives over TCP meanwhile, and
the most megabytes of its tensors beyond the model. `fused` joins q, k and v; `LoRA merged` adds adapters of
rank 8 to their weights, where torch's two read weights and adapters as they are. `changes`: what one step of
AdamW changes in bf16, for `gpt`: `weight_changes` to reading all of it; a receiver that applies the changes
holds the same bits after each round, or there would be no figures.""",
    ask,
    chart="ms",
    cases=[*READS, CHANGES],
    implementations=USUAL,
)


if __name__ == "__main__":
    ask_alone(QUESTION)
