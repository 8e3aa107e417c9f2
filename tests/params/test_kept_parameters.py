"""Between a forward that keeps its unit's parameters and the backward: attributes show them in full.

`parameters()` goes on yielding the sharded ones, which optimizers hold: nothing done to those is lost.
`torch.autograd.grad` may be asked for the gradient of what the forward computed with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fronts
from bed import ranks
from fronts import FULL, KEPT, each_front, inner
from fsdp_wrap import ShardingStrategy
from fsdp_wrap.wrap import ModuleWrapPolicy
from nets import Around, Middle
from params.beside_plain import assert_mean_gradients, batch_of, losses, step_beside, zero

orig_and_composable = pytest.mark.parametrize("front", ["orig", "composable"])
STRATEGIES = {"resharded": FULL, "kept": KEPT}


def models(front: str, make: Callable[[], nn.Module] = Around, **options: Any) -> tuple[Any, nn.Module]:
    options = options or {"sharding_strategy": KEPT}
    return fronts.twins(front, make, torch.float64, auto_wrap_policy=ModuleWrapPolicy({Middle}), **options)


def root_kept(front: str, strategy: ShardingStrategy) -> dict[str, Any]:
    """The wrapper's root is kept whatever the strategy, and so is that of fully_shard by default."""
    if (front, strategy) == ("composable", FULL):
        return {"travel_together_bytes": None}
    return {"sharding_strategy": strategy}


def layers_of(model: Any) -> dict[str, nn.Linear]:
    net = inner(model)
    return {"first": net.first, "middle.linear": inner(net.middle).linear, "last": net.last}


@each_front
@ranks(2)
def test_attributes_show_the_full_values_until_the_backward(rank, world_size, front):
    plain, model = models(front)
    expected = layers_of(plain)

    def shown() -> list[bool]:
        return [
            layer.weight.shape == expected[name].weight.shape
            and type(layer.weight) is nn.Parameter
            and torch.equal(layer.weight, expected[name].weight)
            for name, layer in layers_of(model).items()
        ]

    assert not any(shown())
    before = [layer.weight for layer in layers_of(model).values()]
    for _ in range(2):
        loss = model(batch_of(rank)).sum()
        assert all(shown())
        taken = {name: layer.weight for name, layer in layers_of(model).items()}
        loss.backward()
        assert all(layer.weight is kept for layer, kept in zip(layers_of(model).values(), before))
        for name, layer in expected.items():
            torch.testing.assert_close(taken[name], layer.weight, msg="what somebody keeps stays readable")
    for _ in range(2):
        with torch.no_grad():
            model(batch_of(rank))
        assert not any(shown())
        model(batch_of(rank))
        assert all(shown())
    if front == "composable":
        model.reshard()
        inner(model).middle.reshard()
        assert not any(shown())
    step_beside(plain, model, rank)


def write(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.bias.clamp_(-0.01, 0.01)


CHANGES: dict[str, Callable[[nn.Linear], Any]] = {
    "written": write,
    "data": lambda layer: setattr(layer.bias, "data", layer.bias.data.clone()),
    "replaced": lambda layer: setattr(layer, "bias", nn.Parameter(layer.bias.detach().clone())),
}


@each_front
@ranks(2)
def test_changes_of_what_is_shown_are_refused(rank, world_size, front):
    message = rf"parameter 'middle.linear.bias' .* between forward and backward on rank {rank}"
    for how, change in CHANGES.items():
        plain, model = models(front)
        kept = inner(inner(model).middle).linear
        sharded = kept.bias
        loss = model(batch_of(rank)).sum()
        change(kept)
        with pytest.raises(AssertionError, match=message):
            loss.backward()
        step_beside(plain, model, rank, how)
        model(batch_of(rank))
        change(kept)
        error = ValueError if how == "replaced" else RuntimeError
        with pytest.raises(error, match=r"linear.bias' was (written to|replaced)"):
            model(batch_of(rank))
        if how == "replaced" and front == "flat":
            kept._parameters["bias"] = None
        elif how == "replaced":
            kept.bias = sharded
        step_beside(plain, model, rank, how)


def assert_own_gradient(plain: nn.Module, expected: Any, loss: Any, part: str, taken: Any) -> None:
    """`torch.autograd.grad` gives this rank's own gradient, reduced by no one."""
    (wanted,) = torch.autograd.grad(expected, layers_of(plain)[part].weight, retain_graph=True)
    (found,) = torch.autograd.grad(loss, taken, retain_graph=True)
    torch.testing.assert_close(found, wanted)


def assert_backward_still_right(plain: nn.Module, model: nn.Module, expected: Any, loss: Any) -> None:
    expected.backward()
    loss.backward()
    assert_mean_gradients(plain, model)
    zero(plain, model)


@orig_and_composable
@ranks(2)
def test_gradients_of_what_the_forward_computed_with(rank, world_size, front):
    """Of what was taken in the forward, and of what it kept; autograd refuses sharded parameters."""
    for strategy in STRATEGIES.values():
        plain, model = models(front, sharding_strategy=strategy)
        for part in ("last", "middle.linear"):
            taken: list[nn.Parameter] = []
            layer = layers_of(model)[part]
            handle = layer.register_forward_pre_hook(lambda module, _, to=taken: to.append(module.weight))
            expected, loss = losses(plain, model, batch_of(rank))
            handle.remove()
            assert_own_gradient(plain, expected, loss, part, taken)
            assert_backward_still_right(plain, model, expected, loss)
    for strategy, part in ((FULL, "last"), (KEPT, "last"), (KEPT, "middle.linear")):
        plain, model = models(front, **root_kept(front, strategy))
        for _ in range(2):
            expected, loss = losses(plain, model, batch_of(rank))
            assert_own_gradient(plain, expected, loss, part, layers_of(model)[part].weight)
            assert_backward_still_right(plain, model, expected, loss)
    plain, model = models(front, **root_kept(front, FULL))
    expected, loss = losses(plain, model, batch_of(rank))
    with pytest.raises(RuntimeError, match="not have been used in the graph|does not require grad"):
        torch.autograd.grad(loss, layers_of(model)["middle.linear"].weight)
    assert_backward_still_right(plain, model, expected, loss)
