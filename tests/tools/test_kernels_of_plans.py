"""Plans count what kernels compute, and name the operator at the peak."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fsdp_wrap
from fronts import either_front, shard
from fsdp_wrap import MixedPrecision, Plan
from fsdp_wrap.tools.planning.kernels import flops_of
from fsdp_wrap.wrap import ModuleWrapPolicy

RANKS, BATCH, HEADS, HEAD_WIDTH = 4, 2, 3, 8
WIDTH = HEADS * HEAD_WIDTH


class Attention(nn.Module):
    """Queries of the first tokens see keys of all; no kernel is for `flat`, without a dimension of heads."""

    def __init__(self, queries, causal, flat=False):
        super().__init__()
        self.queries, self.causal, self.flat = queries, causal, flat
        self.made = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        projected = self.made(x).unflatten(-1, (3, HEADS, HEAD_WIDTH)).permute(2, 0, 3, 1, 4)
        query, key, value = projected.flatten(1, 2) if self.flat else projected
        return F.scaled_dot_product_attention(
            query[..., : self.queries, :], key, value, is_causal=self.causal
        )


def attending(front, device, dtype, queries, keys, causal, flat=False):
    model = shard(front, Attention(queries, causal, flat).to(device, dtype), ModuleWrapPolicy({nn.Linear}))
    optimizer = torch.optim.SGD(model.parameters())

    def step():
        model(torch.randn(BATCH, keys, WIDTH, device=device, dtype=dtype)).sum().backward()
        optimizer.step()

    return model, optimizer, step


def flops(device, *arguments, **options):
    setup = partial(attending, options.pop("front", "orig"), device, *arguments, **options)
    return fsdp_wrap.plan(setup, RANKS, device=device).flops


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.float32), ("cuda", torch.bfloat16), ("cuda", torch.float32)]
)
@pytest.mark.parametrize(("queries", "keys"), [(16, 16), (5, 16)])
def test_causal_attention_counts_the_pairs_that_it_computes(device, dtype, queries, keys):
    """Two products of matrices in forward and five in backward, two operations for each number."""
    pairs = int(torch.ones(queries, keys).tril().sum())
    per_pair = 2 * (2 + 5) * BATCH * HEADS * HEAD_WIDTH
    whole, causal = (flops(device, dtype, queries, keys, causal) for causal in (False, True))
    assert whole - causal == per_pair * (queries * keys - pairs)
    linear = 2 * 2 * BATCH * keys * WIDTH * 3 * WIDTH  # whose input needs no gradient
    assert whole == linear + per_pair * queries * keys


@either_front
def test_attention_that_is_masked_after_all_was_computed_counts_whole(front):
    whole, causal = (
        flops("cuda", torch.float32, 16, 16, causal, flat=True, front=front) for causal in (False, True)
    )
    assert whole == causal > 0


OPERATORS = {
    "_scaled_dot_product_flash_attention": False,
    "_scaled_dot_product_flash_attention_backward": False,
    "_scaled_dot_product_flash_attention_for_cpu": False,
    "_scaled_dot_product_flash_attention_for_cpu_backward": False,
    "_scaled_dot_product_efficient_attention": False,
    "_scaled_dot_product_efficient_attention_backward": False,
    "_scaled_dot_product_cudnn_attention": False,
    "_scaled_dot_product_cudnn_attention_backward": False,
    "_flash_attention_forward": True,
    "_flash_attention_backward": True,
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (4, 9), (9, 4)])
def test_every_operator_of_attention_says_that_it_is_causal(name, queries, keys):
    """Kernels for sequences of several lengths let the last query see the last key.

    They are told the lengths; versions of torch differ in which dimension of a tensor is theirs.
    """
    func = getattr(torch.ops.aten, name).default
    tensors = dict.fromkeys(("query", "grad_out", "grad_out_", "out"), queries)
    tensors |= {"key": keys, "value": keys}
    shapes = {key: (2, 4, 4, 8) if OPERATORS[name] else (2, 3, length, 8) for key, length in tensors.items()}
    given = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    given |= {"max_q": queries, "max_k": keys}

    def counted(causal):
        args = tuple(given.get(argument.name, argument.default_value) for argument in func._schema.arguments)
        names = [argument.name for argument in func._schema.arguments]
        args = (*args[: names.index("is_causal")], causal, *args[names.index("is_causal") + 1 :])
        return flops_of(func, args, {}, None)

    seen = torch.ones(queries, keys).tril(keys - queries if OPERATORS[name] else 0).sum()
    assert counted(False) > 0
    assert counted(True) == counted(False) * int(seen) // (queries * keys)


@pytest.mark.parametrize(("mask", "diagonal"), [(0, None), (1, 0), (2, 5)])
def test_the_kernel_with_masks_of_a_type_counts_by_it(mask, diagonal):
    func = torch.ops.aten._efficient_attention_forward.default
    query = torch.empty(1, 4, 4, 8, device="meta")
    given = (query, query, query, None, None, None, 4, 9, 0.0)
    pairs = 36 if diagonal is None else int(torch.ones(4, 9).tril(diagonal).sum())
    whole = flops_of(func, (*given, 0), {}, None)
    assert flops_of(func, (*given, mask), {}, None) == whole * pairs // 36


# The operator at the peak.


class Wide(nn.Module):
    """Holds most where its middle is made."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x):
        return self.down(torch.exp(self.up(x)))


def widening(front, tokens, *widths, loss=torch.sum, foreach=False, ranks=RANKS, **options):
    def setup():
        model = shard(front, nn.Sequential(*map(Wide, widths)).cuda(), ModuleWrapPolicy({Wide}), **options)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)

        def step():
            optimizer.zero_grad()
            loss(model(torch.randn(tokens, 16, device="cuda"))).backward()
            optimizer.step()

        return model, optimizer, step

    machine = fsdp_wrap.preset("h100")
    return fsdp_wrap.plan(setup, ranks, device="cuda", machine=machine)


def line_of_peak(plan):
    page = str(plan)
    assert max(map(len, page.splitlines())) <= 80
    return page[page.index("  peak ") : page.index("  peak of the first step")]


@either_front
def test_the_peak_names_the_operator_of_a_forward_or_backward(front):
    """The gradient of the middle comes beside its values, and then those of the exponential's input."""
    plan = widening(front, 4096, 1024, 16)
    assert (plan.peak_at.phase, plan.peak_operator) == ("backward", "aten.mul")
    shown = line_of_peak(plan)
    assert "in backward of 0, fits in" in shown and shown.endswith(" in aten.mul\n")
    assert Plan.from_json(plan.to_json()).peak_operator == "aten.mul"


@either_front
def test_the_peak_names_the_optimizer_that_calls_the_operator(front):
    plan = widening(front, 1, *[4096] * 6, foreach=True, ranks=1)
    assert plan.peak_at.phase == "optimizer"
    assert plan.peak_operator.startswith("aten._foreach_")
    assert f"in {plan.peak_operator}" in line_of_peak(plan)
    assert plan.peak_operator.endswith(" (AdamW's step)")


@either_front
def test_the_peak_names_the_operator_of_the_programs_own_code(front):
    plan = widening(front, 512, 16, 16, loss=lambda y: torch.outer(y.flatten(), y.flatten()).exp().sum())
    assert plan.peak_at.phase == "step" and plan.peak_operator == "aten.sum"
    shown = line_of_peak(plan)
    assert "forward of 1 and backward of 1" in shown and "in aten.sum" in shown


@either_front
def test_the_peak_names_the_collective_that_a_buffer_is_for(front):
    mixed = MixedPrecision(torch.bfloat16, torch.float32)
    plan = widening(front, 1, *[4096] * 6, mixed_precision=mixed)
    assert plan.peak_operator == "aten.empty (reduce_scatter)"
    assert f"in {plan.peak_operator}" in line_of_peak(plan)
