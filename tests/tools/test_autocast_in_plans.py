"""Plans under `torch.autocast`: operators, dtypes and bytes of the same steps where they run."""

from __future__ import annotations

import warnings
from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fsdp_wrap
from fronts import FRONTS, either_front, shard
from fsdp_wrap import MixedPrecision
from fsdp_wrap.tools import step_of
from fsdp_wrap.wrap import ModuleWrapPolicy
from params.fake_ranks import fake_ranks
from tools.measured import rest_and_peak

RANKS, WIDTH, HEADS, WORDS = 16, 48, 4, 100  # beyond 8 gloo is asked for its own collectives
BF16 = torch.bfloat16


class Block(nn.Module):
    """Attention twice, by the kernel and by products and softmax, and what else autocast has a rule for."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        made = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(made[0], made[1], made[2], is_causal=True)
        weights = torch.softmax(torch.matmul(made[0], made[1].transpose(-1, -2)), -1)
        other = torch.einsum("bhij,bhjd->bhid", weights, made[2])
        joined = torch.cat([(mixed + other).transpose(1, 2).flatten(2), x], -1)[..., :WIDTH]
        with torch.autocast(x.device.type, enabled=False):
            scaled = torch.mm(joined.flatten(0, 1).float(), torch.diag(self.gain).float()).view_as(x)
        return x + self.out(scaled) + self.out(joined)


class Checkpointed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.token, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.Sequential(block(), block())

    def forward(self, tokens):
        return F.cross_entropy(self.head(self.blocks(self.token(tokens))).flatten(0, 1), tokens.flatten())


class Watching(TorchDispatchMode):
    """Counts operators by the dtypes and shapes of their results.

    Of normalisation the first counts: on the meta device statistics are in float32, on the CPU often not.
    """

    def __init__(self):
        super().__init__()
        self.seen: Counter[Any] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        made = made[:1] if "layer_norm" in str(func) else made
        if func.namespace == "aten" and not func.is_view:
            self.seen[str(func), tuple((tensor.dtype, tuple(tensor.shape)) for tensor in made)] += 1
        return result


def made(front, block=Block, device="cpu", watching=nullcontext, around=True, options=None, **regions):
    """A step whose forward is under autocast, and its backward as well if `around` says so."""
    torch.manual_seed(0)
    model = shard(front, Model(block).to(device), ModuleWrapPolicy({block}), **(options or {}))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    region = {"dtype": BF16, **regions}

    def step():
        optimizer.zero_grad()
        with watching():
            with torch.autocast(device, **region):
                loss = model(torch.randint(WORDS, (2, 16), device=device))
                if around:
                    loss.backward()
            if not around:
                loss.backward()
        optimizer.step()

    return model, optimizer, step


def both(setup):
    """Returns the operators of two steps that run, and of a plan."""
    really, planned = Watching(), Watching()

    with fake_ranks(0, RANKS):
        _, _, step = setup(watching=lambda: really)
        step(), step()
    fsdp_wrap.plan(partial(setup, watching=lambda: planned), RANKS)
    return really.seen, planned.seen


MIXED: dict[str, Any] = {"options": {"mixed_precision": MixedPrecision(BF16, torch.float32)}}
WAYS: dict[str, dict[str, Any]] = {
    "backward outside": {"around": False},
    "checkpointed": {"block": Checkpointed, "around": False},
    "checkpointed, backward inside": {"block": Checkpointed},
    "casts not kept": {"cache_enabled": False},
    "float16": {"dtype": torch.float16},
    "mixed precision": {**MIXED, "around": False},
    "off": {"enabled": False},
}


@pytest.mark.parametrize("way", WAYS)
@either_front
def test_operators_and_their_dtypes_are_those_of_steps_that_run(front, way):
    really, planned = both(partial(made, front, **WAYS[way]))
    assert planned == really
    products = {dtype for (name, made), _ in really.items() if "mm" in name for dtype, _ in made}
    assert len(products) == (1 if way == "off" else 2)  # float32 in the region without autocast


@pytest.mark.parametrize("way", ["backward outside", "checkpointed", "casts not kept", "mixed precision"])
@pytest.mark.parametrize("front", FRONTS)
def test_bytes_are_those_of_steps_that_run(front, way):
    setup = partial(made, front, **WAYS[way])
    with fake_ranks(0, RANKS):
        rest, peak, _ = rest_and_peak(setup)
    plan = fsdp_wrap.plan(setup, RANKS)
    assert plan.rest_bytes == pytest.approx(rest, rel=0.005)
    assert plan.peak_bytes == pytest.approx(peak, rel=0.02)


class Cast(nn.Module):
    """The gradient of what was cast is at the peak, beside the exponentials and their inputs' gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 4096)

    def forward(self, x):
        return (self.linear(x).exp().bfloat16() * 2).sum()


@either_front
def test_the_gradient_of_a_cast_takes_memory(front):
    def setup():
        model = shard(front, Cast(), ModuleWrapPolicy({nn.Linear}))
        optimizer = torch.optim.SGD(model.parameters())
        return model, optimizer, step_of(model, optimizer, lambda: model(torch.randn(512, WIDTH)))

    with fake_ranks(0, RANKS):
        _, peak, _ = rest_and_peak(setup)
    assert fsdp_wrap.plan(setup, RANKS).peak_bytes == pytest.approx(peak, rel=0.02)


# For a device that is not there.


def dtypes(counted, name):
    """The dtypes of the first result of an operator."""
    return {made[0][0] for (func, made), _ in counted.items() if func.startswith(f"aten.{name}.")}


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@either_front
def test_rules_for_cuda_are_torchs_own(front, dtype):
    """They differ from the CPU's in normalisation, softmax and sums."""
    planned = Watching()
    setup = partial(made, front, device="cuda", dtype=dtype, around=False, watching=lambda: planned)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, that autocast is disabled
        fsdp_wrap.plan(setup, RANKS, device="cuda")
    assert dtypes(planned.seen, "native_layer_norm") == {torch.float32}
    assert dtypes(planned.seen, "addmm") == dtypes(planned.seen, "bmm") == {dtype}
    assert dtypes(planned.seen, "_scaled_dot_product_flash_attention") == {dtype}
    assert dtypes(planned.seen, "nll_loss_forward") == {torch.float32}
    assert dtypes(planned.seen, "cat") == {torch.float32}


def one_layer(layer, loss, rows=64, device="cuda"):
    def setup():
        model = fsdp_wrap.fully_shard(layer().to(device))
        optimizer = torch.optim.SGD(model.parameters())

        def value():
            with torch.autocast(device, dtype=BF16):
                return loss(model, torch.randn(rows, 1024, device=device))

        return model, optimizer, step_of(model, optimizer, value)

    return setup


def test_softmax_in_float32_makes_no_copy_of_its_input():
    """As CUDA's kernels: the result lies beside its input, and later beside the input's gradient."""
    rows, columns = 64, 1 << 14

    def loss(layer, x):
        return F.softmax(layer(x[:, :16]), -1).sum()

    plan = fsdp_wrap.plan(
        one_layer(partial(nn.Linear, 16, columns, bias=False), loss, rows), 1, device="cuda"
    )
    numbers = rows * columns
    assert 6 * numbers < plan.peak_by_kind["activations"] < 7 * numbers


def test_what_autocast_refuses_is_refused():
    setup = one_layer(
        partial(nn.Linear, 1024, 4), lambda layer, x: F.binary_cross_entropy(layer(x).sigmoid(), x[:, :4])
    )
    with pytest.raises(RuntimeError, match="unsafe to autocast"):
        fsdp_wrap.plan(setup, 4, device="cuda")


def test_operations_count_in_the_dtype_that_is_computed():
    machine = fsdp_wrap.Machine(
        name="halves",
        flops={"float32": 1e9, "bfloat16": 1e12},
        memory_bandwidth=1e15,
        bandwidth_within=1e15,
        bandwidth_between=1e15,
        operator_seconds=1e-12,
    )
    setup = partial(made, "orig", device="cuda", around=False)
    slow, fast = (
        fsdp_wrap.plan(partial(setup, enabled=on), 4, device="cuda", machine=machine) for on in (False, True)
    )
    assert fast.flops == slow.flops
    assert slow.compute_seconds == pytest.approx(slow.flops / 1e9, rel=0.01)
    single = 2 * 4 * 32 * WIDTH * WIDTH * 3  # of the region without autocast, in forward and backward
    assert fast.compute_seconds < slow.compute_seconds / 2
    assert fast.compute_seconds > single / 4 / 1e9


def test_a_plan_leaves_no_trace_in_autocast():
    kept = torch.set_autocast_enabled, torch.clear_autocast_cache, torch.cuda.is_bf16_supported
    with torch.autocast("cpu", dtype=BF16):
        fsdp_wrap.plan(partial(made, "composable"), 4)
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == BF16
    assert kept == (torch.set_autocast_enabled, torch.clear_autocast_cache, torch.cuda.is_bf16_supported)
    meta = torch.ones(2, 2, device="meta")
    with torch.autocast("cpu", dtype=BF16):
        assert (meta @ meta).dtype == torch.float32
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="Disabling autocast"):
            torch.autocast("cuda")
