"""`shard_alignment`: where in a parameter the part of a rank begins, and what that takes."""

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from bed import ranks
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy, fully_shard
from fsdp_wrap._core import UnevenCutError
from fsdp_wrap._state import Originals
from fsdp_wrap.wrap import CustomPolicy
from params.fake_ranks import fake_ranks


def test_parts_begin_at_multiples_and_make_up_the_whole():
    draw, refused = random.Random(24), 0
    for number in range(40):
        shapes = [
            tuple(draw.choice([1, 2, 3, 7, 16, 40]) for _ in range(draw.choice([1, 2, 2, 3])))
            for _ in range(5)
        ]
        size, alignment = draw.choice([1, 2, 3, 4, 8]), [None, 1, 8, 256, "rows"][number % 5]
        held: dict[str, list[tuple[int, int]]] = {}
        for rank in range(size):
            with fake_ranks(rank, size):
                net = nn.Module()
                net.all = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
                try:
                    model = FSDP(net, use_orig_params=number % 2 == 0, shard_alignment=alignment)
                except ValueError as error:
                    assert alignment == "rows" and "cannot hold for parameters 'all." in str(error)
                    refused += 1
                    break
                for fqn, original in Originals(model).by_name.items():
                    interval = original.interval
                    if interval.data.numel():
                        held.setdefault(fqn, []).append((interval.start, interval.stop))
        for fqn, intervals in held.items():
            shape = torch.Size(shapes[int(fqn.rpartition(".")[2])])
            grain: Any = shape[1:].numel() if alignment == "rows" else alignment or 1
            assert all(start % grain == 0 for start, _ in intervals), (fqn, intervals)
            ends = [0, *(stop for _, stop in intervals)]
            assert [*(start for start, _ in intervals), shape.numel()] == ends
    assert 0 < refused < 6  # of eight with rows


def test_padding_is_shown_and_no_more_than_needed():
    with fake_ranks(0, 2):
        model = FSDP(nn.Linear(100, 60), use_orig_params=True, shard_alignment=256)
        # 6000 elements and 60, which begin at 6144; two shards of 13 blocks.
        assert "holds 3328 of 6060 float32 (aligned to 256 elements, 596 of padding)" in repr(model)
        assert "aligned" not in repr(FSDP(nn.Linear(100, 60)))
        by_rows = FSDP(nn.Linear(100, 60), use_orig_params=True, shard_alignment="rows")
        assert "(aligned to rows, 140 of padding)" in repr(by_rows)
        net = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5))
        chosen: dict[Any, Any] = {net[0]: {"shard_alignment": "rows"}, net[1]: {"shard_alignment": None}}
        policy = CustomPolicy(lambda module: chosen.get(module, False))
        units: Any = FSDP(net, auto_wrap_policy=policy, shard_alignment=8)
        told = [repr(unit) for unit in (units.module[0], units.module[1], units)]
    assert "aligned to rows" in told[0] and "aligned" not in told[1] and "aligned to 8 elements" in told[2]


def test_dtensors_stay_whole_or_are_refused():
    with fake_ranks(1, 2):
        net = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32))
        model: Any = fully_shard(net, shard_alignment=1024)
        placements = {name: param.placements for name, param in model.named_parameters()}
        assert placements.pop("0.weight") == (Shard(0),)
        assert set(placements.values()) == {(Replicate(),)} and len(placements) == 3
        assert "aligned to 1024 elements ('0.bias', '1.weight', '1.bias' whole on every rank)" in repr(model)
        rows: Any = fully_shard(nn.Linear(7, 5), shard_alignment="rows")
        assert {param.placements for param in rows.parameters()} == {(Shard(0),)}
        large = nn.Linear(100, 60)
        with pytest.raises(UnevenCutError, match=r"shard_alignment=256 .* 'weight' .* of 3000 elements"):
            fully_shard(large, shard_alignment=256)
        assert type(large) is nn.Linear and not hasattr(large.weight, "placements")
        with pytest.raises(UnevenCutError, match=r"shard_alignment='rows' .* cut along dimension 1"):
            fully_shard(
                nn.Linear(4, 4, bias=False), shard_placement_fn=lambda _: Shard(1), shard_alignment="rows"
            )


def test_what_stays_whole_on_a_mesh_of_copies_and_shards_is_whole_everywhere():
    with fake_ranks(1, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model: Any = fully_shard(nn.Linear(64, 32), mesh=mesh, shard_alignment=1024)
        assert model.weight.placements == (Replicate(), Shard(0))
        assert model.bias.placements == (Replicate(),) and model.bias.device_mesh.size() == 4
        assert model.bias.to_local().shape == model.bias.shape


@pytest.mark.parametrize("make", [FSDP, fully_shard])
def test_other_values_are_refused(make):
    for value, error in (("row", ValueError), (0, ValueError), (True, TypeError), (2.0, TypeError)):
        with fake_ranks(0, 2), pytest.raises(error, match="shard_alignment must be"):
            make(nn.Linear(2, 2), shard_alignment=value)


def batch(rank: int) -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


class RowScaled(torch.optim.Optimizer):
    """Keeps two numbers for each row of what it gets: the largest gradient so far, and its opposite."""

    def __init__(self, params: Any, row: int) -> None:
        super().__init__(params, {"row": row})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    rows = param.grad.view(-1, group["row"])
                    ends = self.state[param].setdefault("ends", torch.zeros_like(rows[:, :2]))
                    most = torch.maximum(ends[:, 0], rows.abs().amax(1))
                    ends.copy_(torch.stack([most, -most], dim=1))
                    param.sub_((rows / most.unsqueeze(1)).view_as(param), alpha=0.1)


@ranks(2, 3)
def test_state_by_rows_is_saved_and_cut_where_rows_are_whole(rank, world_size):
    def model_of(**options: Any) -> Any:
        torch.manual_seed(0)
        return FSDP(nn.Linear(6, 5, bias=False).double(), use_orig_params=True, **options)

    plain = model_of(sharding_strategy=ShardingStrategy.NO_SHARD)
    model = model_of(shard_alignment="rows")
    optimizers = [RowScaled(net.parameters(), 6) for net in (plain, model)]
    for net, optimizer in zip((plain, model), optimizers):
        net(batch(rank)).square().mean().backward()
        optimizer.step()
    state = FSDP.optim_state_dict(model, optimizers[1])["state"]["weight"]
    expected = optimizers[0].state[next(plain.parameters())]["ends"]
    torch.testing.assert_close(state["ends"], expected, rtol=0, atol=1e-14)
    saved = FSDP.sharded_optim_state_dict(model, optimizers[1])
    resumed = RowScaled(model.parameters(), 6)
    resumed.load_state_dict(FSDP.optim_state_dict_to_load(model, resumed, saved))
    for param in model.parameters():
        if param.numel():
            assert torch.equal(resumed.state[param]["ends"], optimizers[1].state[param]["ends"])
    cut = model_of()
    torn = RowScaled(cut.parameters(), 1)
    with pytest.raises(ValueError, match=r"'ends' of parameter 'weight' .*shard_alignment='rows'"):
        torn.load_state_dict(FSDP.optim_state_dict_to_load(cut, torn, {"state": {"weight": state}}))
