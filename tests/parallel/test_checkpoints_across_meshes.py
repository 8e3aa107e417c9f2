"""What one mesh saves another loads, to the bit: every kind of mesh x front-end, torch's among them."""

import functools
import math
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

import mesh_nets
from bed import run_ranks
from bed.paths import ROOT
from fronts import full
from mesh_nets import FRONTS, KINDS, PLAIN, Side
from models import gather_objects

Form = tuple[str, str]

FORMS: list[Form] = [
    (PLAIN, "one"),
    *((front, kind) for kind in KINDS for front in FRONTS if mesh_nets.can(front, kind)),
]
WAYS = ("dcp", "folder")
"""Torch's functions to save and load, given state dicts, and `fsdp_wrap.checkpoint`."""


def ranks_of(form: Form) -> int:
    return 1 if form[0] == PLAIN else math.prod(KINDS[form[1]].shape)


def is_ours(form: Form) -> bool:
    return form[0] not in ("torch", PLAIN)


def there(form: Form) -> bool:
    return form[1] != "ep" or mesh_nets.has_experts(form[0])


def side(form: Form, seed: int) -> Side:
    made = Side(mesh_nets.on_mesh(*form, seed), flatten_optimizer_state_dict=True)
    mesh_nets.train(made.model, made.optimizer, seed)
    return made


def part_like(whole: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a value that is placed as another one."""
    if not isinstance(value, DTensor):
        return whole
    return distribute_tensor(whole, value.device_mesh, value.placements, src_data_rank=None).to_local()


def save(rank: int, world_size: int, form: Form, seed: int, path: Path) -> None:
    """Saves by each way; the first rank also saves all values, those of all stages."""
    given = side(form, seed)
    for way in WAYS:
        given.save(way, path / way)
    values = gather_objects({name: full(value) for name, value in given.values().items()})
    if rank == 0:
        torch.save({name: value for part in values for name, value in part.items()}, path / "values.pt")


def load(rank: int, world_size: int, form: Form, given: list[tuple[Form, str, Path]]) -> None:
    """Loads what others have saved, one after the other, and trains in between."""
    taker = side(form, 99)
    for giver, way, path in given:
        taker.load(way, path / way)
        expected = torch.load(path / "values.pt", weights_only=True)
        values = taker.values()
        assert set(values) == set(expected) if form[1] != "pp" else set(values) < set(expected), (giver, way)
        for name, value in values.items():
            held = value.to_local() if isinstance(value, DTensor) else value
            assert torch.equal(held, part_like(expected[name], value)), (giver, way, name)
        mesh_nets.train(taker.model, taker.optimizer, 99)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns what a form has saved; it saves when first asked."""
    folder = tmp_path_factory.mktemp("saved")

    @functools.cache
    def give(form: Form) -> Path:
        path = folder / "-".join(form)
        run_ranks(ranks_of(form), save, form, FORMS.index(form), path)
        return path

    return give


def exchanges(form: Form) -> list[Form]:
    """Returns the forms whose checkpoints a form loads: all of them if it is ours, else ours."""
    return [giver for giver in FORMS if is_ours(form) or is_ours(giver)]


@pytest.mark.parametrize(
    "forms", [(("ours", "pp"), ("orig", "dp3")), (("ours", "tp"), ("flat", "hybrid_tp"))]
)
def test_two_load_from_each_other(forms, tmp_path):
    for seed, form in enumerate(forms):
        run_ranks(ranks_of(form), save, form, seed, tmp_path / form[0])
    for giver, taker in (forms, forms[::-1]):
        run_ranks(ranks_of(taker), load, taker, [(giver, way, tmp_path / giver[0]) for way in WAYS])


@pytest.mark.left_over(4)
@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_it_loads_what_every_form_has_saved(form, saved):
    if not there(form):
        pytest.skip("this torch has no mesh for each parameter")
    givers = [giver for giver in exchanges(form) if there(giver)]
    ways = [WAYS[zlib.crc32(repr((giver, form)).encode()) % len(WAYS)] for giver in givers]
    run_ranks(ranks_of(form), load, form, [*zip(givers, ways, map(saved, givers))])


def table() -> str:
    """Which forms there are of each mesh; each saves what each other one loads."""
    lines = [f"| mesh | {' | '.join(FRONTS.values())} |", f"|---|{'---|' * len(FRONTS)}"]
    for name, kind in KINDS.items():
        cells = ("saves, loads" if mesh_nets.can(front, name) else "no such mesh" for front in FRONTS)
        lines.append(f"| {kind.about} | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_table_in_the_docs():
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    assert table() in page
    pairs = sum(len(exchanges(form)) for form in FORMS)
    assert f"{len(FORMS)} forms, {pairs} pairs" in page
