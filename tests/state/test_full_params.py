"""`summon_full_params`: full parameters in the user's hands, and what becomes of edits."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parametrizations

from bed import ranks
from bed.memory import live_bytes
from bed.patience import until
from fronts import each_form
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy
from fsdp_wrap.wrap import ModuleWrapPolicy

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)
        self.register_buffer("slope", torch.tensor(0.9))

    def forward(self, x):
        return x + self.slope * self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Calls `spy` in the middle of its forward."""

    spy: Callable[[torch.Tensor], None] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        x = self.blocks[0](self.stem(x))
        if self.spy is not None:
            self.spy(x)
        return self.head(self.blocks[1](x)) + self.shift


def whole(net: nn.Module, **options: Any) -> FSDP:
    return FSDP(net, **options)


def per_block(net: nn.Module, **options: Any) -> FSDP:
    return FSDP(net, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


each_wrapping = pytest.mark.parametrize("wrap", [whole, per_block])


class Twins:
    """A wrapped model and a plain one, trained side by side: the plain one sees the batches of all ranks."""

    def __init__(
        self, wrap: Callable[..., FSDP], use_orig_params: bool, optimizer: bool = True, **options: Any
    ) -> None:
        self.plain = Net().double()
        self.model = wrap(copy.deepcopy(self.plain), use_orig_params=use_orig_params, **options)
        if optimizer:
            self.optimize(self.model, self.plain)

    def optimize(self, model: nn.Module, plain: nn.Module) -> None:
        modules = (model, plain)
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(module.parameters(), lr=1e-2) for module in modules
        ]

    def forward(self) -> list[torch.Tensor]:
        """The losses of both."""
        batches = torch.randn(dist.get_world_size(), 4, WIDTH, dtype=torch.float64)
        batch = batches[dist.get_rank()]
        return [self.model(batch).square().mean(), self.plain(batches.flatten(0, 1)).square().mean()]

    def backward(self, losses: list[torch.Tensor]) -> None:
        for loss in losses:
            loss.backward()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.backward(self.forward())
            self.update()

    def edit(self, fn: Callable[[torch.Tensor], Any]) -> None:
        """Calls `fn` with every full parameter of both."""
        with torch.no_grad():
            for param in (*self.model.parameters(), *self.plain.parameters()):
                fn(param)

    def check(self) -> None:
        """Both have the same parameters, and go on alike."""
        assert_full(self.model.state_dict(), self.plain.state_dict())
        self.step()
        assert_full(self.model.state_dict(), self.plain.state_dict())


def assert_full(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].detach(), value.detach(), rtol=0, atol=1e-12)


def shapes(module: nn.Module) -> list[tuple[str, torch.Size]]:
    return [(name, param.shape) for name, param in module.named_parameters()]


@contextmanager
def sharded_again(model: nn.Module) -> Iterator[None]:
    """After the body, the model shows what it showed before: the same objects, their shapes and gradients."""
    before = [(name, param, param.shape, param.grad) for name, param in model.named_parameters()]
    yield
    after = [(name, param, param.shape, param.grad) for name, param in model.named_parameters()]
    assert [(name, shape) for name, _, shape, _ in after] == [(name, shape) for name, _, shape, _ in before]
    for (name, old, _, old_grad), (_, new, _, new_grad) in zip(before, after):
        assert new is old, name
        assert new_grad is old_grad, name


# What is shown.


@each_form
@each_wrapping
@ranks(1, 2, 3)
def test_shows_the_plain_parameters(rank, world_size, wrap, use_orig_params):
    twins = Twins(wrap, use_orig_params)
    for steps in (0, 2):  # before the first forward as well as between steps
        twins.step(steps)
        with sharded_again(twins.model):
            with FSDP.summon_full_params(twins.model):
                assert_full(dict(twins.model.named_parameters()), dict(twins.plain.named_parameters()))
                for param in twins.model.parameters():
                    assert type(param) is nn.Parameter
                    assert (param.dtype, param.requires_grad) == (torch.float64, True)
    twins.check()


@each_form
@each_wrapping
@ranks(2)
def test_names_are_clean_inside_and_only_there(rank, world_size, wrap, use_orig_params):
    twins = Twins(wrap, use_orig_params)
    model, plain = twins.model, twins.plain
    outside = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    assert all(name.startswith("_fsdp_wrapped_module.") for name in outside)
    with FSDP.summon_full_params(model):
        assert shapes(model) == shapes(plain)
        assert [name for name, _ in model.named_buffers()] == [name for name, _ in plain.named_buffers()]
        assert len(list(model.parameters())) == len(list(plain.parameters()))
        part = [name for name, _ in model.blocks[0].named_parameters()]
        assert part == [name for name, _ in plain.blocks[0].named_parameters()]
    assert [name for name, _ in (*model.named_parameters(), *model.named_buffers())] == outside


@each_form
@ranks(2)
def test_summons_below_any_module(rank, world_size, use_orig_params):
    twins = Twins(per_block, use_orig_params)
    parent = nn.Sequential(twins.model)
    with sharded_again(twins.model):
        with FSDP.summon_full_params(parent):
            expected = [param.shape for param in twins.plain.parameters()]
            assert [param.shape for param in parent.parameters()] == expected
        with FSDP.summon_full_params(twins.plain):  # nothing wrapped: nothing happens
            pass
    twins.check()


@each_form
@ranks(2)
def test_without_recursion_only_the_outermost_unit_is_shown(rank, world_size, use_orig_params):
    twins = Twins(per_block, use_orig_params)
    model = twins.model
    nested = model.module.blocks[0]
    sharded = [(name, param.shape) for name, param in nested.named_parameters()]
    with sharded_again(model):
        with FSDP.summon_full_params(model, recurse=False):
            own = {name: param for name, param in twins.plain.named_parameters() if "blocks" not in name}
            shown = {name: param for name, param in model.named_parameters() if name in own}
            assert_full(shown, own)
            assert [(name, param.shape) for name, param in nested.named_parameters()] == sharded
            with torch.no_grad():
                for param in (*shown.values(), *own.values()):
                    param.mul_(0.5)
    twins.check()


@each_form
@ranks(2)
def test_nested_unit_alone(rank, world_size, use_orig_params):
    twins = Twins(per_block, use_orig_params)
    nested, plain = twins.model.module.blocks[1], twins.plain.blocks[1]
    with sharded_again(twins.model):
        with FSDP.summon_full_params(nested):
            assert shapes(nested) == shapes(plain)
            with torch.no_grad():
                nested.up.weight.mul_(0.5)
                plain.up.weight.mul_(0.5)
    twins.check()


# Edits.


@each_form
@each_wrapping
@ranks(1, 2, 3)
def test_edits_are_written_back(rank, world_size, wrap, use_orig_params):
    twins = Twins(wrap, use_orig_params)
    twins.step()
    with sharded_again(twins.model):
        with FSDP.summon_full_params(twins.model):
            twins.edit(lambda param: param.mul_(0.5))
            twins.edit(lambda param: param.data.flatten()[-1:].fill_(0.25))
    twins.check()


@each_form
@each_wrapping
@ranks(2)
def test_edits_are_dropped_without_writeback(rank, world_size, wrap, use_orig_params):
    twins = Twins(wrap, use_orig_params)
    twins.step()
    kept = copy.deepcopy(twins.plain.state_dict())
    with sharded_again(twins.model):
        with FSDP.summon_full_params(twins.model, writeback=False):
            twins.edit(lambda param: param.fill_(9))
            twins.model.stem.weight = nn.Parameter(torch.zeros(1))
    twins.plain.load_state_dict(kept)
    twins.check()


@each_form
@each_wrapping
@ranks(2)
def test_replaced_parameters_are_taken(rank, world_size, wrap, use_orig_params):
    twins = Twins(wrap, use_orig_params)
    with sharded_again(twins.model):
        with FSDP.summon_full_params(twins.model):
            for net in (twins.model.module, twins.plain):
                net.blocks[1].up.weight = nn.Parameter(net.blocks[1].up.weight.detach() * 0.5)
                net.shift = nn.Parameter(net.shift.detach() + 1)
                net.head.bias.data = net.head.bias.data.clone().add_(0.5)
    twins.optimizers[1] = torch.optim.AdamW(twins.plain.parameters(), lr=1e-2)
    twins.check()


@each_form
@ranks(2)
def test_data_in_the_place_of_other_data(rank, world_size, use_orig_params):
    """Swapped within a unit and between units, transposed in place; gradients likewise."""
    twins = Twins(per_block, use_orig_params)
    twins.backward(twins.forward())
    with FSDP.summon_full_params(twins.model, with_grads=True):
        for net in (twins.model.module, twins.plain):
            swap(net.stem.weight, net.head.weight)
            swap(net.blocks[0].up.weight, net.blocks[1].up.weight)
            swap(net.blocks[0].down.bias, net.blocks[1].down.bias)
            net.stem.weight.data = net.stem.weight.data.t()
            net.stem.weight.grad = net.stem.weight.grad.t()
    twins.update()
    twins.check()


def swap(one: nn.Parameter, other: nn.Parameter) -> None:
    one.data, other.data = other.data, one.data
    one.grad, other.grad = other.grad, one.grad


MISFITS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[str]]] = {
    "longer": (lambda full: torch.zeros(7, dtype=full.dtype), ["(7,)", "(6,)"]),
    "other rank": (lambda full: full.reshape(2, 3).clone(), ["(2, 3)", "(6,)"]),
    "dtype": (lambda full: full.float(), ["torch.float32", "torch.float64"]),
}


@each_form
@each_wrapping
@pytest.mark.parametrize(
    ("how", "place", "only_data"),
    [
        ("longer", "stem", False),
        ("longer", "blocks.0.down", True),
        ("longer", "head", False),
        ("other rank", "blocks.1.down", True),
        ("dtype", "blocks.1.down", False),
        ("dtype", "stem", True),
    ],
)
@ranks(2)
def test_replaced_parameters_must_fit(rank, world_size, wrap, use_orig_params, how, place, only_data):
    twins = Twins(wrap, use_orig_params)
    twins.step()
    make, words = MISFITS[how]
    kept = copy.deepcopy(twins.plain.state_dict())
    with sharded_again(twins.model):
        with pytest.raises(ValueError) as caught:
            with FSDP.summon_full_params(twins.model):
                twins.edit(lambda param: param.fill_(9))
                misfit = twins.model.get_submodule(shown_path(twins.model, place))
                value = make(misfit.bias.detach())
                if only_data:
                    misfit.bias.data = value
                else:
                    misfit.bias = nn.Parameter(value)
    for word in (f"'{place}.bias'", "summon_full_params", *words):
        assert word in str(caught.value)
    twins.plain.load_state_dict(kept)
    twins.check()


def shown_path(model: nn.Module, clean: str) -> str:
    """The name of a module with the prefixes of its wrappers."""
    parts = {name.replace("_fsdp_wrapped_module.", ""): name for name, _ in model.named_modules()}
    return parts[clean]


@each_form
@each_wrapping
@ranks(2)
def test_exception_inside_drops_the_edits(rank, world_size, wrap, use_orig_params):
    twins = Twins(wrap, use_orig_params)
    twins.step()
    kept = copy.deepcopy(twins.plain.state_dict())
    with sharded_again(twins.model):
        with pytest.raises(KeyError, match="of the user's own"):
            with FSDP.summon_full_params(twins.model):
                twins.edit(lambda param: param.fill_(9))
                raise KeyError("of the user's own")
    twins.plain.load_state_dict(kept)
    twins.check()
    with FSDP.summon_full_params(twins.model):
        assert shapes(twins.model) == shapes(twins.plain)


# Options: on the first rank only, in host memory, with gradients.


def sharding(strategy: str) -> dict[str, Any]:
    """Options for 4 ranks; hybrid ones in two copies."""
    mesh = {"device_mesh": init_device_mesh("cpu", (2, 2))} if "HYBRID" in strategy else {}
    return {"sharding_strategy": ShardingStrategy[strategy], **mesh}


def with_sgd(twins: Twins) -> Twins:
    """To which no gradient and one of zeros are the same."""
    twins.optimizers = [torch.optim.SGD(net.parameters(), lr=1e-2) for net in (twins.model, twins.plain)]
    return twins


def half_and_double(module: nn.Module) -> None:
    """Edits parameters, and gradients where they are."""
    with torch.no_grad():
        for param in module.parameters():
            param.mul_(0.5)
            if param.grad is not None:
                param.grad.mul_(2)
    module.stem.bias.grad = None
    if module.head.bias.grad is not None:
        module.head.bias.grad = torch.full_like(module.head.bias, 0.25)


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.grad for name, param in module.named_parameters() if param.grad is not None}


@each_form
@each_wrapping
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
@ranks(4)
def test_every_combination_of_options(rank, world_size, wrap, use_orig_params, strategy):
    twins = with_sgd(Twins(wrap, use_orig_params, **sharding(strategy)))
    for options in itertools.product([True, False], repeat=4):
        writeback, rank0_only, offload_to_cpu, with_grads = options
        twins.backward(twins.forward())
        outside = list(twins.model.parameters())
        with FSDP.summon_full_params(twins.model, True, *options):
            if rank0_only and rank > 0:
                assert all(new is old for new, old in zip(twins.model.parameters(), outside, strict=True))
                assert (gradients(twins.model) != {}) or strategy == "FULL_SHARD"  # an empty shard has none
            else:
                assert_full(dict(twins.model.named_parameters()), dict(twins.plain.named_parameters()))
                expected = gradients(twins.plain) if with_grads else {}
                assert_full(gradients(twins.model), expected)
                half_and_double(twins.model)
        if writeback:
            kept = [param.grad for param in twins.plain.parameters()]
            half_and_double(twins.plain)
            for param, grad in () if with_grads else zip(twins.plain.parameters(), kept):
                param.grad = grad
            if not with_grads:  # edited in place
                torch._foreach_mul_([param.grad for param in twins.plain.parameters()], 0.5)
        twins.update()
        assert_full(twins.model.state_dict(), twins.plain.state_dict())
    twins.check()


@pytest.mark.each_value
@each_form
@pytest.mark.parametrize("options", [{}, {"with_grads": True}], ids=["params", "grads"])
@ranks(2)
def test_other_ranks_hold_no_full_parameters(rank, world_size, use_orig_params, options):
    model = FSDP(nn.Linear(512, 512, bias=False), use_orig_params=use_orig_params)
    full = 512 * 512 * 4
    model(torch.ones(1, 512)).sum().backward()
    at_rest = live_bytes()
    with FSDP.summon_full_params(model, rank0_only=True, **options):
        more = settled(at_rest + (1024 if rank else 2 * full + 1024)) - at_rest
        assert full * 0.99 < more <= 2 * full + 1024 if rank == 0 else more < 1024
    assert settled(at_rest + 1024) - at_rest < 1024


def settled(expected: int) -> int:
    """Live bytes; a thread of the process group lets go of its last tensors a little later."""
    with contextlib.suppress(TimeoutError):
        until(lambda: live_bytes() <= expected)
    return live_bytes()


@each_form
@each_wrapping
@ranks(2)
def test_gradients_that_are_looked_at_stay_the_same_objects(rank, world_size, wrap, use_orig_params):
    twins = Twins(wrap, use_orig_params)
    twins.backward(twins.forward())
    versions = [param.grad._version for param in twins.model.parameters() if param.grad is not None]
    for rank0_only in (False, True):
        with sharded_again(twins.model):
            with FSDP.summon_full_params(twins.model, rank0_only=rank0_only, with_grads=True):
                pass
    after = [param.grad._version for param in twins.model.parameters() if param.grad is not None]
    assert after == versions
    twins.update()
    twins.check()


@each_form
@each_wrapping
@pytest.mark.parametrize("rank0_only", [False, True])
@ranks(2)
def test_gradients_made_and_removed_inside(rank, world_size, wrap, use_orig_params, rank0_only):
    twins = with_sgd(Twins(wrap, use_orig_params))
    shown = rank == 0 or not rank0_only
    with FSDP.summon_full_params(twins.model, rank0_only=rank0_only, with_grads=True):
        assert gradients(twins.model) == {}
        twins.plain.stem.weight.grad = torch.ones_like(twins.plain.stem.weight)
        if shown:
            twins.model.module.stem.weight.grad = torch.ones_like(twins.model.module.stem.weight)
    twins.update()
    assert_full(twins.model.state_dict(), twins.plain.state_dict())
    twins.backward(twins.forward())
    with FSDP.summon_full_params(twins.model, rank0_only=rank0_only, with_grads=True):
        if shown:
            twins.model.zero_grad()
    assert gradients(twins.model) == {}
    twins.plain.zero_grad()
    twins.check()


@each_form
@ranks(2)
def test_unused_and_frozen_parameters_show_no_gradient(rank, world_size, use_orig_params):
    class Partly(Net):
        def forward(self, x):
            return self.head(self.stem(x))

    torch.manual_seed(0)
    net = Partly()
    net.stem.weight.requires_grad_(False)
    model = per_block(net, use_orig_params=use_orig_params)
    model(torch.ones(2, WIDTH)).sum().backward()
    with FSDP.summon_full_params(model, with_grads=True):
        found = set(gradients(model))
    used = {"stem.bias", "head.weight", "head.bias"}
    assert found == used | (set() if use_orig_params else {"shift"})  # a flat parameter is used as a whole


@each_form
@each_wrapping
@ranks(2)
def test_gradients_that_are_not_reduced_are_not_shown(rank, world_size, wrap, use_orig_params):
    twins = Twins(wrap, use_orig_params)
    with twins.model.no_sync():
        twins.backward(twins.forward())
    with sharded_again(twins.model), pytest.raises(RuntimeError, match="unit.*no_sync.*not reduced"):
        with FSDP.summon_full_params(twins.model, with_grads=True):
            raise AssertionError("the context was entered")
    twins.backward(twins.forward())
    with FSDP.summon_full_params(twins.model, with_grads=True):
        assert_full(gradients(twins.model), gradients(twins.plain))
    twins.update()
    twins.check()


@each_form
@each_wrapping
@pytest.mark.parametrize("culprit", [0, 1])
@ranks(2)
def test_exception_on_one_rank_drops_the_edits_on_all(rank, world_size, wrap, use_orig_params, culprit):
    twins = Twins(wrap, use_orig_params)
    error = KeyError if rank == culprit else RuntimeError
    said = "of the user's own" if rank == culprit else "another rank left summon_full_params"
    with sharded_again(twins.model), pytest.raises(error, match=said):
        with FSDP.summon_full_params(twins.model, rank0_only=True):
            if rank == 0:
                half_and_double(twins.model)
            if rank == culprit:
                raise KeyError("of the user's own")
    twins.check()


@each_form
@each_wrapping
@ranks(2)
def test_misfit_on_the_first_rank_drops_the_edits_on_all(rank, world_size, wrap, use_orig_params):
    twins = Twins(wrap, use_orig_params)
    error, said = (ValueError, "'head.bias'") if rank == 0 else (RuntimeError, "another rank left")
    with sharded_again(twins.model), pytest.raises(error, match=said):
        with FSDP.summon_full_params(twins.model, rank0_only=True):
            if rank == 0:
                half_and_double(twins.model)
                twins.model.module.head.bias = nn.Parameter(torch.zeros(2))
    twins.check()


@each_form
@each_wrapping
@ranks(2)
def test_state_dict_of_the_first_rank_alone(rank, world_size, wrap, use_orig_params):
    twins = Twins(wrap, use_orig_params)
    with FSDP.summon_full_params(twins.model, rank0_only=True, writeback=False):
        if rank == 0:
            assert_full(twins.model.state_dict(), twins.plain.state_dict())
        else:
            for call in (twins.model.state_dict, lambda: twins.model.apply(fill)):
                with pytest.raises(RuntimeError, match="first rank only.*not on rank 1"):
                    call()
    twins.check()


@each_form
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@ranks(2)
def test_without_recording_gradients(rank, world_size, use_orig_params, mode):
    twins = with_sgd(Twins(per_block, use_orig_params))
    twins.backward(twins.forward())
    with mode():
        for options in ({}, {"rank0_only": True}, {"offload_to_cpu": True}):
            with FSDP.summon_full_params(twins.model, with_grads=True, **options):
                if rank == 0 or "rank0_only" not in options:
                    half_and_double(twins.model)
    for _ in range(3):
        half_and_double(twins.plain)
    twins.update()
    twins.check()


@each_form
@pytest.mark.parametrize("rank0_only", [False, True])
@ranks(2)
def test_units_that_lend_to_each_other(rank, world_size, use_orig_params, rank0_only):
    plain = Net().double()
    plain.head.weight = plain.stem.weight
    plain.head.bias.requires_grad_(False)
    net = copy.deepcopy(plain)
    net.head = FSDP(net.head, use_orig_params=use_orig_params)  # type: ignore[assignment]
    net.blocks[0] = FSDP(net.blocks[0], use_orig_params=use_orig_params)
    twins = Twins(whole, use_orig_params, optimizer=False)
    twins.plain, twins.model = plain, FSDP(net, use_orig_params=use_orig_params)
    with_sgd(twins)
    for target in (twins.model, twins.model.module.head):  # the lender alone as well
        twins.backward(twins.forward())
        part = twins.plain if target is twins.model else twins.plain.head
        with FSDP.summon_full_params(target, rank0_only=rank0_only, with_grads=True):
            if rank == 0 or not rank0_only:
                assert_full(gradients(target), gradients(part))
                assert target is not twins.model or target.head.weight is target.stem.weight
                torch._foreach_mul_([param.data for param in target.parameters()], 0.5)
                torch._foreach_mul_(list(gradients(target).values()), 2.0)
        torch._foreach_mul_([param.data for param in part.parameters()], 0.5)
        torch._foreach_mul_(list(gradients(part).values()), 2.0)
        twins.update()
        assert_full(twins.model.state_dict(), twins.plain.state_dict())
    twins.check()


@each_form
@ranks(2)
def test_computed_tensors_are_read_on_the_first_rank_only(rank, world_size, use_orig_params):
    model = FSDP(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), use_orig_params=use_orig_params)
    with FSDP.summon_full_params(model, rank0_only=True, writeback=False):
        if rank == 0:
            assert model.module.weight.shape == (WIDTH, WIDTH)
        else:
            with pytest.raises(RuntimeError, match="parametrised tensor.*sharded now"):
                model.module.weight  # noqa: B018


# Beside training.


@each_form
@each_wrapping
@pytest.mark.parametrize("writeback", [True, False])
@ranks(2)
def test_between_forward_and_backward(rank, world_size, wrap, use_orig_params, writeback):
    twins = Twins(wrap, use_orig_params)
    losses = twins.forward()
    with sharded_again(twins.model):
        with FSDP.summon_full_params(twins.model, writeback=writeback):
            assert_full(dict(twins.model.named_parameters()), dict(twins.plain.named_parameters()))
    twins.backward(losses)
    twins.update()
    twins.check()


@each_form
@each_wrapping
@ranks(2)
def test_gradients_are_neither_lost_nor_changed(rank, world_size, wrap, use_orig_params):
    twins = Twins(wrap, use_orig_params)
    twins.backward(twins.forward())
    before = [param.grad.clone() for param in twins.model.parameters() if param.grad is not None]
    assert before
    with sharded_again(twins.model):
        with FSDP.summon_full_params(twins.model):
            pass
    after = [param.grad for param in twins.model.parameters() if param.grad is not None]
    for old, new in zip(before, after):
        assert torch.equal(old, new)
    twins.backward(twins.forward())  # accumulates
    twins.update()
    twins.check()


@each_form
@each_wrapping
@ranks(2)
def test_inside_accumulation_without_communication(rank, world_size, wrap, use_orig_params):
    twins = Twins(wrap, use_orig_params)
    with twins.model.no_sync():
        twins.backward(twins.forward())
    with FSDP.summon_full_params(twins.model):
        assert_full(dict(twins.model.named_parameters()), dict(twins.plain.named_parameters()))
    twins.backward(twins.forward())
    twins.update()
    twins.check()


@each_wrapping
@ranks(2)
def test_optimizer_made_inside(rank, world_size, wrap):
    twins = Twins(wrap, use_orig_params=True, optimizer=False)
    with FSDP.summon_full_params(twins.model):
        twins.optimize(twins.model, twins.plain)
    twins.step(3)
    twins.check()


@each_wrapping
@ranks(2)
def test_optimizer_made_inside_of_what_training_leaves(rank, world_size, wrap):
    twins = Twins(wrap, use_orig_params=False)
    with FSDP.summon_full_params(twins.model):
        optimizer = torch.optim.SGD(twins.model.parameters(), lr=0.1)
        for param in twins.model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()  # of what is shown, while it is
    with pytest.raises(RuntimeError, match=r"made inside summon_full_params and holds '.+'"):
        optimizer.step()
    twins.step(2)
    twins.check()


@each_form
@each_wrapping
@ranks(2)
def test_references_kept_past_the_context_stay_valid(rank, world_size, wrap, use_orig_params):
    twins = Twins(wrap, use_orig_params)
    with FSDP.summon_full_params(twins.model):
        params = dict(twins.model.named_parameters())
        views = {name: param.detach().view(-1) for name, param in params.items()}
        data = {name: param.data for name, param in params.items()}
        copies = {name: param.detach().clone() for name, param in params.items()}
    twins.step(2)
    for name, expected in copies.items():
        assert torch.equal(views[name], expected.view(-1))
        assert torch.equal(data[name], expected)
        held = params[name]
        assert held.detach().clone().sum().isfinite() and repr(held)
        if not use_orig_params:  # otherwise they are the user's own: sharded parameters again
            assert torch.equal(held, expected)
            held.data.zero_()  # nobody else's memory
    twins.check()


# Where it cannot be.


@each_form
@each_wrapping
@pytest.mark.parametrize("part", [False, True], ids=["root", "nested"])
@ranks(2)
def test_refused_inside_a_forward(rank, world_size, wrap, use_orig_params, part):
    twins = Twins(wrap, use_orig_params)
    twins.step()
    target = twins.model.module.blocks[0] if part and wrap is per_block else twins.model

    def spy(_: torch.Tensor) -> None:
        with FSDP.summon_full_params(target):
            raise AssertionError("the context was entered")

    twins.model.module.spy = spy
    said = r"summon_full_params.*inside the forward of the root unit \(Net\)"
    with sharded_again(twins.model), pytest.raises(RuntimeError, match=said) as raised:
        twins.forward()
    assert isinstance(raised.value, AssertionError), "torch's type"

    twins.model.module.spy = None
    twins.check()


@each_form
@each_wrapping
@ranks(2)
def test_refused_inside_a_backward(rank, world_size, wrap, use_orig_params):
    twins = Twins(wrap, use_orig_params)
    twins.step()

    def hook(grad: torch.Tensor) -> None:
        with FSDP.summon_full_params(twins.model):
            raise AssertionError("the context was entered")

    twins.model.module.spy = lambda x: x.register_hook(hook) and None
    losses = twins.forward()
    twins.model.module.spy = None
    with pytest.raises(AssertionError, match="summon_full_params.*inside a backward"):
        losses[0].backward()
    twins.check()


STATE_CALLS: dict[str, Callable[[FSDP], Any]] = {
    "state_dict": lambda model: model.state_dict(),
    "load_state_dict": lambda model: model.load_state_dict(model.state_dict()),
    "apply": lambda model: model.apply(lambda module: None),
}


@each_form
@each_wrapping
@pytest.mark.parametrize("call", list(STATE_CALLS))
@ranks(2)
def test_state_calls_are_refused_inside_a_forward(rank, world_size, wrap, use_orig_params, call):
    twins = Twins(wrap, use_orig_params)
    twins.model.module.spy = lambda _: STATE_CALLS[call](twins.model)
    with sharded_again(twins.model):
        with pytest.raises(ValueError, match="inside the forward of the root unit") as raised:
            twins.forward()
        assert isinstance(raised.value, RuntimeError)
    twins.model.module.spy = None
    twins.check()


@each_form
@each_wrapping
@ranks(2)
def test_state_dict_inside_shows_the_edits_and_keeps_them(rank, world_size, wrap, use_orig_params):
    twins = Twins(wrap, use_orig_params)
    with sharded_again(twins.model):
        with FSDP.summon_full_params(twins.model):
            twins.edit(lambda param: param.mul_(0.5))
            state, expected = twins.model.state_dict(), copy.deepcopy(twins.plain.state_dict())
            assert shapes(twins.model) == shapes(twins.plain)
            twins.edit(lambda param: param.mul_(1.5))
            assert_full(state, expected)
    twins.check()


# apply.


def fill(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        assert module.weight.dim() == 2
        with torch.no_grad():
            nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(module.out_features))
            module.bias.fill_(0.1)


@each_form
@each_wrapping
@ranks(2)
def test_apply_sees_and_edits_full_parameters(rank, world_size, wrap, use_orig_params):
    twins = Twins(wrap, use_orig_params)
    with sharded_again(twins.model):
        assert twins.model.apply(fill) is twins.model
    twins.plain.apply(fill)
    twins.check()


@each_form
@each_wrapping
@ranks(2)
def test_apply_visits_every_module_once(rank, world_size, wrap, use_orig_params):
    twins = Twins(wrap, use_orig_params)
    visited: list[nn.Module] = []
    parent = nn.Sequential(twins.model)
    parent.apply(visited.append)
    assert set(visited) == set(parent.modules())
    assert len(visited) == len(set(visited))
    twins.check()


# Evaluation inside.


@each_form
@each_wrapping
@pytest.mark.parametrize("recurse", [True, False])
@ranks(2)
def test_evaluation_inside_computes_with_what_is_shown(rank, world_size, wrap, use_orig_params, recurse):
    """As transformers does for `generate`: by the wrapped module, so that nested wrappers run alone."""
    twins = Twins(wrap, use_orig_params)
    batch = torch.randn(3, WIDTH, dtype=torch.float64)
    with FSDP.summon_full_params(twins.model, recurse=recurse), torch.no_grad():
        for net in (twins.model.module, twins.plain):
            net.stem.weight.mul_(0.5)
        torch.testing.assert_close(twins.model.module(batch), twins.plain(batch), rtol=0, atol=1e-12)
        if recurse:
            torch.testing.assert_close(twins.model(batch), twins.plain(batch), rtol=0, atol=1e-12)
            with torch.enable_grad(), pytest.raises(RuntimeError, match="leave its context"):
                twins.model(batch)
    twins.check()


@each_form
@each_wrapping
@ranks(2)
def test_the_first_rank_evaluates_alone(rank, world_size, wrap, use_orig_params):
    twins = Twins(wrap, use_orig_params)
    batch = torch.randn(3, WIDTH, dtype=torch.float64)
    with FSDP.summon_full_params(twins.model, writeback=False, rank0_only=True), torch.no_grad():
        if rank == 0:
            torch.testing.assert_close(twins.model(batch), twins.plain(batch), rtol=0, atol=1e-12)
        else:
            with pytest.raises(RuntimeError, match="leave its context"):
                twins.model(batch)
    twins.check()
