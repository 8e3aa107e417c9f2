"""Tensor subclasses that give other tensors to be gathered in backward than in forward."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp_wrap
from bed import ranks
from bed.memory import live_bytes
from bed.sampling import few_fast
from fsdp_wrap import compat
from params.phased import (
    BLOCKS,
    WIDTH,
    Block,
    Eights,
    Fours,
    Full,
    Layer,
    Mixed,
    Padded,
    installed,
    phased,
    plain,
    sharded,
)
from params.subclasses import Rounded
from scenario import name_of, pairwise

FORWARD, BACKWARD, BOTH = (True, False), (False, True), (True, True)
"""Uses for which a class is asked: the forward, and the backward."""


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    compat.uninstall()


def losses_and_gradients(model: Any, rank: int, world_size: int, number: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    batches, result = torch.Generator().manual_seed(1), []
    for _ in range(number):
        x = torch.randn(world_size, 4, WIDTH, dtype=torch.float64, generator=batches)
        loss = model(x[rank]).square().mean()
        loss.backward()
        result += [loss.detach(), *(param.grad.to_local().clone() for param in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return result


@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("kind", [Eights, Fours])
@ranks(2)
def test_training_is_that_of_torchs_fully_shard_to_the_bit(rank, world_size, kind, reshards):
    kind.told.clear()
    theirs = sharded(plain(kind), torch_fsdp.fully_shard, reshard_after_forward=reshards)
    wanted, asked = losses_and_gradients(theirs, rank, world_size), [*kind.told]
    with installed():
        results = losses_and_gradients(sharded(plain(kind), reshard_after_forward=reshards), rank, world_size)
        assert kind.told == asked
    assert asked[: 4 * BLOCKS] == (
        [FORWARD] * 2 * BLOCKS + [BACKWARD] * 2 * BLOCKS if reshards else [BOTH] * 4 * BLOCKS
    )
    assert len(results) == len(wanted) and all(map(torch.equal, results, wanted))


SPACE: dict[str, Any] = {
    "kind": [Eights, Padded, Fours, Mixed],  # torch's gathers need equal sizes in both: not `Padded`, `Mixed`
    "mesh": ["flat", "one_a_copy"],
    "reshard": [None, True, False, 2],
    "after_backward": [True, False],
    "checkpointed": [False, True],
    "accumulation": ["T", "FT", "TT"],
    "shared_memory": [True, False],
    "copied": [False, True],
}


@pytest.mark.parametrize("scenario", few_fast(pairwise(SPACE, seed=4), step=4), ids=name_of)
@ranks(2)
def test_training_is_that_of_a_plain_model_that_rounds(rank, world_size, scenario):
    one, kind = scenario["mesh"] == "one_a_copy", scenario["kind"]
    shape, names = ((2, 1), ("replicate", "shard")) if one else ((2,), ("shard",))
    reference = plain(kind)
    with installed():
        model = sharded(
            plain(kind, checkpointed=scenario["checkpointed"]),
            mesh=init_device_mesh("cpu", shape, mesh_dim_names=names),
            reshard_after_forward=True if one and scenario["reshard"] == 2 else scenario["reshard"],
            shared_memory=scenario["shared_memory"],
        )
        model.set_reshard_after_backward(scenario["after_backward"])
        if scenario["copied"]:
            model(torch.zeros(1, WIDTH, dtype=torch.float64)).sum().backward()
            model.zero_grad()
            model = copy.deepcopy(model)
        optimizers = [torch.optim.SGD(net.parameters(), 0.1, momentum=0.9) for net in (reference, model)]
        batches = torch.Generator().manual_seed(1)
        for _ in range(3):
            for syncs in scenario["accumulation"]:
                x = torch.randn(world_size, 2, WIDTH, dtype=torch.float64, generator=batches)
                model.set_requires_gradient_sync(syncs == "T")
                losses = [reference(part).square().mean() for part in x]
                (sum(losses) / world_size).backward()
                loss = model(x[rank]).square().mean()
                torch.testing.assert_close(loss, losses[rank], rtol=0, atol=1e-9)
                loss.backward()
            for (name, param), wanted in zip(model.named_parameters(), reference.parameters()):
                rows = wanted.grad.tensor_split(param.device_mesh.size(-1))  # type: ignore[union-attr]
                own = rows[param.device_mesh.get_local_rank(param.device_mesh.ndim - 1)]
                torch.testing.assert_close(param.grad.to_local(), own, rtol=0, atol=1e-9, msg=name)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@ranks(2)
def test_a_recomputed_forward_gets_what_serves_both(rank, world_size):
    """Even though the first gather in backward cannot know that a forward will be recomputed."""
    with installed():
        model = sharded(plain(Eights, checkpointed=True))
        x = torch.randn(2, WIDTH, dtype=torch.float64)
        for step in range(2):
            Eights.told.clear()
            model(x).sum().backward()
            in_backward = [BOTH] * 2 * BLOCKS if step else [BACKWARD, BACKWARD, BOTH, BOTH] * BLOCKS
            assert Eights.told[: 2 * BLOCKS] == [FORWARD] * 2 * BLOCKS
            assert sorted(Eights.told[2 * BLOCKS :]) == sorted(in_backward)


class ReadsOne(Eights):
    """It gives rows or columns, never both."""

    def uses(self, group: Any) -> tuple[bool, bool]:
        backward = group._training_state.name == "PRE_BACKWARD"
        return not backward, backward


@ranks(2)
def test_recomputed_forwards_that_nothing_can_serve_are_refused_by_name(rank, world_size):
    x = torch.ones(1, WIDTH, dtype=torch.float64)
    with installed():
        alone = sharded(plain(ReadsOne))
        alone(x).sum().backward()
        model = sharded(plain(ReadsOne, checkpointed=True))
        with pytest.raises(RuntimeError, match="'blocks.2'.*does not read _reshard_after_forward"):
            model(x).sum().backward()
        whole = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        (layer,) = phased(nn.Sequential(Layer(WIDTH, WIDTH, Eights)).double())
        model = fsdp_wrap.fully_shard(nn.Sequential(fsdp_wrap.fully_shard(layer, mesh=whole)), mesh=whole)
        fsdp_wrap.set_gradients_in_place(model)
        with pytest.raises(RuntimeError, match="'0'.*set_gradients_in_place.model, False"):
            checkpoint(model, x.requires_grad_(), use_reentrant=False).sum().backward()
        model = sharded(plain(Eights, checkpointed=True))
        with pytest.raises(RuntimeError, match="'blocks.2'.*inside uneven"):
            with fsdp_wrap.uneven(model):
                model(x).sum().backward()


@ranks(2)
def test_the_leaf_stays_the_same_object_and_is_filled(rank, world_size):
    seen: list[tuple[Any, bool, bool]] = []
    with installed():
        model = sharded(plain(Fours))
        block = model.blocks[0]

        def look(*_: Any) -> None:
            weight = block.up.weight
            assert weight._post_accumulate_grad_hooks, "else its reduction waits for the final callback"
            seen.append((weight, weight.rows is not None, weight.columns is not None))

        def look_in_backward(_: Any, __: Any, output: torch.Tensor) -> None:
            look()
            output.register_hook(look)

        block.up.register_forward_hook(look_in_backward)
        for _ in range(2):
            model(torch.randn(2, WIDTH, dtype=torch.float64)).sum().backward()
    assert isinstance(seen[0][0], Full) and all(weight is seen[0][0] for weight, *_ in seen)
    assert [uses for _, *uses in seen] == [[True, False], [False, True]] * 2


class Released(Rounded):
    """What it computes with is made of copies."""

    releases, returns_gathered, full = True, False, 0

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return self.releases

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        made = super().fsdp_post_all_gather(outputs, metadata, param_dtype, out=out)
        if made is None:
            return None
        full, beside = made
        return full, beside if self.returns_gathered else beside[-1:]


class Kept(Released):
    releases = False


class Returned(Released):
    returns_gathered = True


@ranks(2)
def test_gathered_tensors_go_after_post_where_the_class_says_so(rank, world_size):
    held: dict[Any, int] = {}
    outputs: dict[Any, list[torch.Tensor]] = {}
    for kind in (Released, Kept):
        torch.manual_seed(0)
        net = nn.Linear(512, 512, bias=False, dtype=torch.float64)
        net.weight = nn.Parameter(kind(net.weight.detach()))
        model, x = fsdp_wrap.fully_shard(net, shared_memory=False), torch.ones(1, 512, dtype=torch.float64)
        outputs[kind] = []
        for _ in range(2):
            before = live_bytes()
            model.unshard()
            held[kind] = live_bytes() - before
            outputs[kind].append(model(x))
            outputs[kind][-1].sum().backward()
            outputs[kind].append(model.weight.grad.to_local().clone())
            with torch.no_grad():
                model.weight.add_(1)
            model.weight.grad = None
            model.reshard()
    gathered = 512 * 512 + 512 * 4
    assert held[Kept] - held[Released] == gathered, "codes and scales"
    assert held[Released] >= 512 * 512 * 8
    assert all(map(torch.equal, outputs[Released], outputs[Kept]))


@ranks(2)
def test_a_class_must_not_return_what_it_has_released(rank, world_size):
    net = nn.Linear(8, 8, bias=False, dtype=torch.float64)
    net.weight = nn.Parameter(Returned(net.weight.detach()))
    model = fsdp_wrap.fully_shard(net)
    with pytest.raises(RuntimeError, match="Returned in parameter 'weight' says.*return copies"):
        model(torch.ones(1, 8, dtype=torch.float64))
    half = type("Half", (Rounded,), {"fsdp_pre_all_gather": property(), "fsdp_post_all_gather": property()})
    name = "fsdp_should_release_all_gather_outputs_after_post_all_gather"
    setattr(half, name, lambda self: True)
    alone = nn.Linear(8, 8, bias=False)
    alone.weight = nn.Parameter(half(alone.weight.detach()))
    with pytest.raises(TypeError, match="'weight' is a Half without fsdp_pre_all_gather"):
        fsdp_wrap.fully_shard(alone)


@ranks(2)
def test_blocks_that_ranks_would_break_are_refused_by_name(rank, world_size):
    for kind, hidden in ((Eights, 96), (Fours, 48)):
        block: Any = Block(kind, hidden=hidden)
        phased(block)
        with pytest.raises(
            ValueError, match=f"'up.weight' of shape .{hidden}, 64. is a {kind.__name__}"
        ) as told:
            fsdp_wrap.fully_shard(block)
        assert f"rank {rank}" in str(told.value) and "multiple of 2 blocks" in str(told.value)
        assert type(block) is Block and type(block.up.weight) is kind


class Scaled(Rounded):
    """Eight rows share a scale, and its parts stay of the class."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return (self.values_, self.values_[::8].amax(1)), None


@ranks(2)
def test_scales_of_parts_of_blocks_are_refused_by_name(rank, world_size):
    net = nn.Linear(8, 23, bias=False)
    net.weight = nn.Parameter(Scaled(net.weight.detach()))
    model = fsdp_wrap.fully_shard(net)
    with pytest.raises(ValueError, match=f"'weight' of shape .23, 8.*rank {rank}.*2 ranks get whole blocks"):
        model(torch.ones(1, 8))


@ranks(2)
def test_full_parameters_left_by_a_backward_do_not_serve_a_forward(rank, world_size):
    with installed():
        model = sharded(plain(Eights))
        model.set_reshard_after_backward(False)
        x = torch.randn(2, WIDTH, dtype=torch.float64)
        outputs = []
        for _ in range(2):
            Eights.told.clear()
            outputs.append(model(x))
            outputs[-1].sum().backward()
            model.zero_grad()
        assert torch.equal(*outputs) and Eights.told == [FORWARD] * 2 * BLOCKS + [BACKWARD] * 2 * BLOCKS


@ranks(4)
def test_state_over_replicas_keeps_no_part_for_another_use(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    both = []
    for over in (False, True):
        with installed():
            model = sharded(plain(Fours), mesh=mesh, state_over_replicas=over)
            losses = []
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for step in range(3):
                x = torch.randn(2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
                losses.append(model(x).square().mean())
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
            both.append(torch.stack(losses))
    torch.testing.assert_close(both[0], both[1], rtol=1e-12, atol=0)


@ranks(2)
def test_ranks_without_a_batch_gather_alike(rank, world_size):
    with installed():
        model, reference = sharded(plain(Eights)), plain(Eights)
        batches = torch.randn(3, 2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        with fsdp_wrap.uneven(model):
            for x in batches[: 3 - rank]:
                model(x).square().mean().backward()
        for x in (*batches, *batches[:2]):
            (reference(x).square().mean() / 2).backward()
        for (name, param), wanted in zip(model.named_parameters(), reference.parameters()):
            own = wanted.grad.chunk(2)[rank]  # type: ignore[union-attr]
            scale = own.norm() / param.grad.to_local().norm()
            torch.testing.assert_close(param.grad.to_local() * scale, own, rtol=0, atol=1e-9, msg=name)
