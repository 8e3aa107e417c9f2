"""`owned_matrices`: any function of whole matrices, and who computes it."""

from typing import Any

import pytest
import torch
from torch import nn

import fronts
from bed import ranks
from fronts import full
from fsdp_wrap._comm.process_group import GroupCommunicator
from fsdp_wrap.optim import Block, _owned_matrices, batch, owned_matrices, per_head, split
from fsdp_wrap.optim._owners import Load, owners_of, rounds_of


class Net(nn.Module):
    """Matrices of several shapes, among them one with fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 9), nn.Linear(9, 2)
        self.middle = nn.Sequential(nn.Linear(9, 9), nn.Tanh())
        self.table = nn.Embedding(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(self.table(x))))


NAMES = ["first.weight", "last.weight", "middle.0.weight"]


class Shampoo:
    """A preconditioner as users write it: it keeps the sums of both Gram matrices of each gradient."""

    def __init__(self) -> None:
        self.sums: dict[str, list[torch.Tensor]] = {}

    def __call__(self, grad: torch.Tensor, matrix: Any) -> torch.Tensor:
        left, right = self.sums.setdefault(matrix.name, [torch.eye(n, dtype=grad.dtype) for n in grad.shape])
        left.add_(grad @ grad.T)
        right.add_(grad.T @ grad)
        return self.root(left) @ grad @ self.root(right)

    @staticmethod
    def root(gram: torch.Tensor) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(gram)
        return vectors @ torch.diag(values**-0.25) @ vectors.T


def backward(model: nn.Module, at: int) -> None:
    """Runs a backward of a batch that all ranks see."""
    tokens = torch.randint(4, (3, 2), generator=torch.Generator().manual_seed(at))
    model(tokens).square().mean().backward()


@fronts.each_front
@ranks(3)
def test_a_preconditioner_of_users(rank, world_size, front):
    plain, model = fronts.twins(front, Net, torch.float64)
    matrices, shampoo, expected = owned_matrices(model), Shampoo(), Shampoo()
    assert matrices.names == NAMES and [matrix.shape for matrix in matrices.matrices] == [
        (9, 5),
        (2, 9),
        (9, 9),
    ]
    weights = [plain.get_parameter(name) for name in NAMES]
    for at in range(3):
        model.zero_grad()
        plain.zero_grad()
        backward(model, at)
        backward(plain, at)
        updates = matrices.update([param.grad for param in matrices.params], shampoo)
        for param, update in zip(matrices.params, updates):
            if update is not None:
                param.data.sub_(update, alpha=0.1)
        for weight, matrix in zip(weights, matrices.matrices):
            weight.data.sub_(expected(weight.grad, matrix), alpha=0.1)
    assert sorted(shampoo.sums) == [matrix.name for matrix in matrices.matrices if matrix.owner == rank]
    fronts.assert_same_values(model, plain, rtol=0, atol=1e-10)


@ranks(2)
def test_the_next_round_travels_while_one_is_computed(rank, world_size, monkeypatch):
    log: list[str] = []
    own = GroupCommunicator.all_to_all

    def send(communicator: Any, *args: Any) -> Any:
        log.append("send")
        return own(communicator, *args)

    def compute(value: torch.Tensor, matrix: Any) -> torch.Tensor:
        log.append("compute")
        return value.cumsum(0) * len(matrix.name)

    make = lambda: nn.Sequential(*(nn.Linear(9, 9) for _ in range(6)))  # noqa: E731
    plain, model = fronts.twins("composable", make, torch.float64)
    with monkeypatch.context() as context:
        context.setattr(_owned_matrices, "_ROUND", 1)  # each owner gets one matrix a time
        context.setattr(GroupCommunicator, "all_to_all", send)
        matrices = owned_matrices(model, select=["0.weight", "2.weight", "3.weight", "5.weight"])
        updates = matrices.update([param.detach() for param in matrices.params], compute)
    assert log == ["send", "send", "compute", "send", "compute", "send"]
    with torch.no_grad():
        for param, result in zip(matrices.params, updates):
            param.copy_(result)  # type: ignore[arg-type]
        for name in matrices.names:
            param = plain.get_parameter(name)
            param.copy_(param.cumsum(0) * len(name))
    fronts.assert_same_values(model, plain, rtol=0, atol=1e-12)


@ranks(2)
def test_functions_that_fail_are_named_on_all_ranks(rank, world_size):
    _, model = fronts.twins("orig", Net)
    matrices = owned_matrices(model)
    backward(model, 0)
    grads = [param.grad for param in matrices.params]
    owner = next(matrix.owner for matrix in matrices.matrices if matrix.name == "last.weight")

    def shorter(value: torch.Tensor, matrix: Any) -> torch.Tensor:
        return value[:1] if matrix.name == "last.weight" else value

    told = rf"'last.weight' of shape \(2, 9\) on rank {owner}: ValueError: it returned \(1, 9\)"
    with pytest.raises(RuntimeError, match=told):
        matrices.update(grads, shorter)
    with pytest.raises(RuntimeError, match="ZeroDivisionError") as caught:
        matrices.update(grads, lambda value, matrix: value / (1 // 0))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(ValueError, match="there are 3 parameters, and 1 values were given"):
        matrices.update(grads[:1], shorter)
    again = matrices.update(grads, lambda value, matrix: value)
    for grad, same in zip(grads, again):
        assert grad is same is None or torch.equal(full(grad), full(same))  # type: ignore[arg-type]


@ranks(2)
def test_results_in_another_dtype_and_mistakes(rank, world_size):
    _, model = fronts.twins("composable", Net)
    matrices = owned_matrices(model, select=["middle.*weight"])
    seen = []

    def note(value: torch.Tensor, matrix: Any) -> torch.Tensor:
        seen.append(value.dtype)
        return value.double()

    (update,) = matrices.update([model.middle[0].weight.detach()], note, dtype=torch.bfloat16)
    assert update.dtype == torch.bfloat16 and seen in ([], [torch.bfloat16])
    assert torch.equal(full(update), full(model.middle[0].weight.detach()).bfloat16())  # type: ignore[arg-type]
    others = "ranks 0 and 1 of 2 have other matrices .* 'middle.0.weight'"
    for error, text, options in (
        (ValueError, "'first.bias' of shape .9,. has 1 dimensions, .* matrix has two", {"select": "*.bias"}),
        (ValueError, "'first.weight' .* has 9 along dimension 0, which per_head.2.", {"view": per_head(2)}),
        (ValueError, "'first.weight' .* split.. takes 8", {"view": {"first.*": split([4, 4])}}),
        (ValueError, "'first.weight' .* and batch.. takes three or more", {"view": batch()}),
        (ValueError, "view: 'none' names no parameter of the model", {"view": {"none": batch()}}),
        (TypeError, "view must be a view, such as", {"view": 3}),
        (TypeError, "select must be a function or names, not int", {"select": 3}),
        (TypeError, "select takes names as strings, not 3", {"select": [3]}),
        (ValueError, others, {"select": lambda name, shape: name in NAMES[: 2 + rank]}),
        (
            ValueError,
            others,
            {"view": {"first.weight": per_head(3), "middle.0.weight": per_head(9 - 6 * rank)}},
        ),
    ):
        with pytest.raises(error, match=text):
            owned_matrices(model, **options)


def test_views_cut_what_they_say():
    for view, shape, blocks in (
        (per_head(2), (6, 4), [((0, 0), (3, 4), (3, 4)), ((3, 0), (3, 4), (3, 4))]),
        (split([1, 3], dim=1), (6, 4), [((0, 0), (6, 1), (6, 1)), ((0, 1), (6, 3), (6, 3))]),
        (batch(), (2, 1, 6, 4), [((n, 0, 0, 0), (1, 1, 6, 4), (6, 4)) for n in range(2)]),
    ):
        assert view(torch.Size(shape)) == [Block(*block) for block in blocks]


def transformer(blocks: int, width: int, ranks: int, flat: bool) -> list[Load]:
    """Matrices of a transformer, of which a flat parameter has some wholly on one rank."""
    loads = []
    for _ in range(blocks):
        at, total = 0, 12 * width * width
        for rows, columns in ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width)):
            first, last = at * ranks // total, (at + rows * columns - 1) * ranks // total
            at += rows * columns
            holders = (first,) if flat and first == last else ()
            loads.append(Load(rows * columns * width, rows * columns, holders))
    return loads


@pytest.mark.parametrize("flat", [False, True])
def test_owners_share_costs_and_memory(flat):
    for size in (2, 3, 16):
        loads = transformer(12, 64, size, flat)
        owners = owners_of(loads, size)
        for least in ("cost", "numel"):
            sums = [0] * size
            for load, own in zip(loads, owners):
                sums[own] += getattr(load, least)
            assert max(sums) <= 1.1 * sum(sums) / size, (size, least)
        stayed = sum(owner in load.holders for load, owner in zip(loads, owners))
        assert stayed >= 0.8 * sum(bool(load.holders) for load in loads)


def test_rounds_have_even_parts_of_every_owner():
    loads = dict(enumerate(transformer(6, 64, 4, False)))
    owners = owners_of([*loads.values()], 4)
    travels = [index % 5 != 0 for index in loads]
    first, *rounds = rounds_of(loads, owners, travels, most=30_000)
    assert first == [index for index in loads if index % 5 == 0]
    assert sorted(index for members in rounds for index in members) == [i for i in loads if i % 5]
    largest = max(load.numel for load in loads.values())
    for members in rounds:
        for rank in range(4):
            assert sum(loads[i].numel for i in members if owners[i] == rank) <= 30_000 + largest
    assert rounds_of({}, [], [], 10) == [[]]
