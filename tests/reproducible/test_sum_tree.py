"""The tree and the norm give the same bits however leaves and numbers are spread."""

from __future__ import annotations

import math

import pytest
import torch

from fsdp_wrap._reproducible.norms import exact_power
from fsdp_wrap._reproducible.tree import Node, SumTree
from fsdp_wrap._state import Summand


def leaves_of(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(50, generator=generator) * 10.0**number for number in range(count)]


def sum_in_blocks(leaves: list[torch.Tensor], size: int) -> torch.Tensor:
    """Adds each block of leaves by itself, then the nodes that are left."""
    whole = SumTree(0, torch.float32)
    for start in range(0, len(leaves), size):
        block = SumTree(start, torch.float32)
        for number in range(start, min(start + size, len(leaves))):
            block.push(Node(number, 1, leaves[number].clone()))
        block.settle()
        for node in block.nodes:
            whole.push(node)
        assert len(whole.nodes) <= math.log2(len(leaves)) + 1
    total = whole.total(len(leaves)).value
    assert total is not None
    return total


@pytest.mark.parametrize("count", [1, 2, 6, 7, 12, 16, 24])
def test_blocks_of_leaves_change_no_bit(count):
    leaves = leaves_of(count)
    expected = sum_in_blocks(leaves, 1)
    torch.testing.assert_close(expected, torch.stack(leaves).sum(0))
    for size in range(2, count + 1):
        assert torch.equal(sum_in_blocks(leaves, size), expected), size


def test_missing_leaves_are_nothing():
    leaves = leaves_of(6)
    some, all_there = SumTree(0, torch.float32), SumTree(0, torch.float32)
    for number, leaf in enumerate(leaves):
        there = number in (1, 4)
        all_there.push(Node(number, 1, leaf.clone() if there else torch.full_like(leaf, -0.0)))
        if there:
            some.push(Node(number, 1, leaf.clone()))
    total, expected = some.total(6).value, all_there.total(6).value
    assert total is not None and expected is not None and torch.equal(total, expected)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_norms_are_exact_in_any_order(p):
    device = torch.device("cpu")
    values = torch.randn(70_001, generator=torch.Generator().manual_seed(0)) * 1e-20
    expected = exact_power([Summand([values], [])], p, device)
    power = expected if math.isinf(p) else expected ** (1 / p)
    torch.testing.assert_close(power.squeeze(), values.double().norm(p), rtol=1e-12, atol=0)
    for shuffled in (values.flip(0), values[torch.randperm(70_001)]):
        parts = [*shuffled.split(999)]
        assert torch.equal(exact_power([Summand(parts[:5], []), Summand(parts[5:], [])], p, device), expected)
    for number in (math.inf, math.nan):
        norm = exact_power([Summand([values, torch.tensor([number])], [])], p, device)
        assert norm.item() == number or (math.isnan(number) and norm.isnan())
    assert exact_power([Summand([torch.zeros(3)], []), Summand([], [])], p, device).item() == 0.0
