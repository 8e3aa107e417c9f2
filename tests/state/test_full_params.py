"""`summon_full_params`: full parameters in the user's hands, and what becomes of edits."""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import nn

from bed import ranks
from bed.memory import live_bytes
from bed.patience import until
from fronts import chosen
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import iter_full_optim_state, iter_full_params
from state_nets import WIDTH, Net, adamw, assert_close, each_way, new_batches, per_block, whole


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """Makes an optimizer for which no gradient and one of zeros are the same."""
    return torch.optim.SGD(module.parameters(), lr=1e-2)


class Twins:
    """A wrapped model and a plain one, trained side by side: the plain one sees the batches of all ranks."""

    def __init__(
        self,
        wrap: Callable[..., nn.Module] = per_block,
        use_orig_params: bool = True,
        make: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        **options: Any,
    ) -> None:
        self.plain: Any = Net().double()
        self.model: Any = wrap(copy.deepcopy(self.plain), use_orig_params=use_orig_params, **options)
        self.optimizers = [make(self.model), make(self.plain)]

    def forward(self) -> list[torch.Tensor]:
        batches = new_batches()
        batch = batches[torch.distributed.get_rank()]
        return [self.model(batch).square().mean(), self.plain(batches.flatten(0, 1)).square().mean()]

    def backward(self, losses: list[torch.Tensor] | None = None) -> None:
        for loss in losses or self.forward():
            loss.backward()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.backward()
            self.update()

    def edit(self, fn: Callable[[torch.Tensor], Any]) -> None:
        """Calls `fn` with every full parameter of both."""
        with torch.no_grad():
            for param in (*self.model.parameters(), *self.plain.parameters()):
                fn(param)

    def assert_shown(self) -> None:
        assert_close(dict(self.model.named_parameters()), dict(self.plain.named_parameters()))

    def check(self) -> None:
        assert_close(self.model.state_dict(), self.plain.state_dict())
        self.step()
        assert_close(self.model.state_dict(), self.plain.state_dict())


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


@each_way
@ranks(1, 3)
def test_full_parameters_are_shown_by_clean_names_and_their_edits_kept(
    rank, world_size, wrap, use_orig_params
):
    twins = Twins(wrap, use_orig_params)
    for net in (twins.model.module, twins.plain):
        net.register_buffer("seen", torch.ones(2).double())
    outside = [name for name, _ in (*twins.model.named_parameters(), *twins.model.named_buffers())]
    assert all(name.startswith("_fsdp_wrapped_module.") for name in outside)
    above = nn.Sequential(twins.model)
    for steps in (0, 2):  # before the first forward as well as between steps
        twins.step(steps)
        with sharded_again(twins.model), FSDP.summon_full_params(above):
            twins.assert_shown()
            assert shapes(twins.model) == shapes(twins.plain)
            assert [name for name, _ in twins.model.named_buffers()] == ["seen"]
            assert shapes(twins.model.blocks[0]) == shapes(twins.plain.blocks[0])
            for param in twins.model.parameters():
                assert type(param) is nn.Parameter
                assert (param.dtype, param.requires_grad) == (torch.float64, True)
            twins.edit(lambda param: param.mul_(0.5))
            twins.edit(lambda param: param.data.flatten()[-1:].fill_(0.25))
            state, expected = twins.model.state_dict(), copy.deepcopy(twins.plain.state_dict())
            assert shapes(twins.model) == shapes(twins.plain), "taking a state dict leaves them shown"
            twins.edit(lambda param: param.mul_(1.5))
            assert_close(state, expected)
    twins.check()
    with FSDP.summon_full_params(twins.plain):  # nothing wrapped: nothing happens
        pass


@ranks(2)
def test_the_outermost_unit_alone_and_a_nested_one(rank, world_size):
    twins = Twins()
    nested, plain_nested = twins.model.module.blocks[1], twins.plain.blocks[1]
    sharded = shapes(nested)
    with sharded_again(twins.model), FSDP.summon_full_params(twins.model, recurse=False), torch.no_grad():
        own = {name: param for name, param in twins.plain.named_parameters() if "blocks" not in name}
        shown = {name: param for name, param in twins.model.named_parameters() if name in own}
        assert_close(shown, own)
        assert shapes(nested) == sharded
        for param in (*shown.values(), *own.values()):
            param.mul_(0.5)
    with sharded_again(twins.model), FSDP.summon_full_params(nested), torch.no_grad():
        assert shapes(nested) == shapes(plain_nested)
        nested.up.weight.mul_(0.5)
        plain_nested.up.weight.mul_(0.5)
    twins.check()


@each_way
@ranks(2)
def test_what_is_put_in_the_place_of_parameters_is_taken(rank, world_size, wrap, use_orig_params):
    twins = Twins(wrap, use_orig_params)
    both = (twins.model.module, twins.plain)
    with sharded_again(twins.model), FSDP.summon_full_params(twins.model):
        for net in both:
            net.blocks[1].up.weight = nn.Parameter(net.blocks[1].up.weight.detach() * 0.5)
            net.shift = nn.Parameter(net.shift.detach() + 1)
            net.head.bias.data = net.head.bias.data.clone().add_(0.5)
    twins.optimizers[1] = adamw(twins.plain)
    twins.check()
    twins.backward()
    with FSDP.summon_full_params(twins.model, with_grads=True):
        for net in both:
            swap(net.stem.weight, net.head.weight)
            swap(net.blocks[0].up.weight, net.blocks[1].up.weight)
            swap(net.blocks[0].up.bias, net.blocks[1].up.bias)
            net.stem.weight.data = net.stem.weight.data.t()
            net.stem.weight.grad = net.stem.weight.grad.t()
    twins.update()
    twins.check()


def swap(one: nn.Parameter, other: nn.Parameter) -> None:
    one.data, other.data = other.data, one.data
    one.grad, other.grad = other.grad, one.grad


@each_way
@ranks(2)
def test_what_is_put_there_must_fit_or_is_dropped(rank, world_size, wrap, use_orig_params):
    twins = Twins(wrap, use_orig_params)
    twins.step()
    kept = copy.deepcopy(twins.plain.state_dict())
    longer, other_rank = torch.zeros(7).double(), torch.zeros(2, 3).double()
    for place, value, only_data, words in (
        ("stem.bias", longer, False, ["(7,)", "(6,)"]),
        ("blocks.0.down.weight", longer, True, ["(7,)", "(6, 5)"]),
        ("head.bias", other_rank, True, ["(2, 3)", "(6,)"]),
        ("blocks.1.up.bias", torch.zeros(5), False, ["torch.float32", "torch.float64"]),
        ("stem.bias", torch.zeros(6), True, ["torch.float32", "torch.float64"]),
    ):
        path, _, name = place.rpartition(".")
        with sharded_again(twins.model), pytest.raises(ValueError) as caught:
            with FSDP.summon_full_params(twins.model):
                twins.edit(lambda param: param.fill_(9))
                module = attrgetter(path)(twins.model)
                if only_data:
                    getattr(module, name).data = value
                else:
                    setattr(module, name, nn.Parameter(value))
        for word in (f"'{place}'", "summon_full_params", *words):
            assert word in str(caught.value), place
    with sharded_again(twins.model), pytest.raises(KeyError, match="of the user's own"):
        with FSDP.summon_full_params(twins.model):
            twins.edit(lambda param: param.fill_(9))
            raise KeyError("of the user's own")
    with sharded_again(twins.model), FSDP.summon_full_params(twins.model, writeback=False):
        twins.edit(lambda param: param.fill_(9))
        twins.model.stem.weight = nn.Parameter(torch.zeros(1))
    twins.plain.load_state_dict(kept)
    twins.check()


def half_and_double(module: Any) -> None:
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


@pytest.mark.parametrize(
    ("strategy", "wrap", "use_orig_params"),
    [
        ("FULL_SHARD", whole, False),
        ("FULL_SHARD", per_block, True),
        ("NO_SHARD", whole, True),
        ("HYBRID_SHARD", per_block, False),
    ],
)
@ranks(4)
def test_every_combination_of_options(rank, world_size, wrap, use_orig_params, strategy):
    twins = Twins(wrap, use_orig_params, sgd, **chosen("flat", strategy, world_size))
    modes = itertools.cycle([nullcontext, torch.inference_mode, torch.no_grad])  # with each option in turn
    for mode, options in zip(modes, itertools.product([True, False], repeat=4)):
        writeback, rank0_only, offload_to_cpu, with_grads = options
        twins.backward()
        outside = list(twins.model.parameters())
        with mode(), FSDP.summon_full_params(twins.model, True, *options):
            if rank0_only and rank > 0:
                assert all(new is old for new, old in zip(twins.model.parameters(), outside, strict=True))
                assert (gradients(twins.model) != {}) or strategy == "FULL_SHARD"  # an empty shard has none
            else:
                twins.assert_shown()
                assert_close(gradients(twins.model), gradients(twins.plain) if with_grads else {})
                half_and_double(twins.model)
        if writeback:
            kept = [param.grad for param in twins.plain.parameters()]
            half_and_double(twins.plain)
            for param, grad in () if with_grads else zip(twins.plain.parameters(), kept):
                param.grad = grad
            if not with_grads:  # edited in place
                torch._foreach_mul_([param.grad for param in twins.plain.parameters()], 0.5)
        twins.update()
        assert_close(twins.model.state_dict(), twins.plain.state_dict())
    twins.check()


@ranks(2)
def test_other_ranks_hold_no_full_parameters(rank, world_size):
    model = FSDP(nn.Linear(512, 512, bias=False), use_orig_params=True)
    full = 512 * 512 * 4
    model(torch.ones(1, 512)).sum().backward()
    at_rest = live_bytes()
    for with_grads in (False, True):
        with FSDP.summon_full_params(model, rank0_only=True, with_grads=with_grads):
            more = settled(at_rest + (1024 if rank else 2 * full + 1024)) - at_rest
            assert full * 0.99 < more <= 2 * full + 1024 if rank == 0 else more < 1024
        assert settled(at_rest + 1024) - at_rest < 1024


def settled(expected: int) -> int:
    """Live bytes; a thread of the process group lets go of its last tensors a little later."""
    with contextlib.suppress(TimeoutError):
        until(lambda: live_bytes() <= expected)
    return live_bytes()


@each_way
@ranks(2)
def test_what_fails_on_one_rank_drops_the_edits_on_all(rank, world_size, wrap, use_orig_params):
    twins = Twins(wrap, use_orig_params)
    for how, culprit in (("error", 0), ("error", 1), ("misfit", 0)):
        own = (KeyError, "of the user's own") if how == "error" else (ValueError, "'head.bias'")
        error, said = own if rank == culprit else (RuntimeError, "another rank left summon_full_params")
        with sharded_again(twins.model), pytest.raises(error, match=said):
            with FSDP.summon_full_params(twins.model, rank0_only=True):
                if rank == 0:
                    half_and_double(twins.model)
                if rank == culprit and how == "misfit":
                    twins.model.module.head.bias = nn.Parameter(torch.zeros(2))
                elif rank == culprit:
                    raise KeyError("of the user's own")
    twins.check()


@each_way
@ranks(2)
def test_looking_at_any_point_of_training_changes_nothing(rank, world_size, wrap, use_orig_params):
    twins = Twins(wrap, use_orig_params)
    losses = twins.forward()
    for writeback in (True, False):
        with sharded_again(twins.model), FSDP.summon_full_params(twins.model, writeback=writeback):
            twins.assert_shown()
    twins.backward(losses)
    before = {name: (grad._version, grad.clone()) for name, grad in gradients(twins.model).items()}
    assert before
    for options in ({}, {"with_grads": True}, {"with_grads": True, "rank0_only": True}):
        with sharded_again(twins.model), FSDP.summon_full_params(twins.model, **options):
            pass
    for name, grad in gradients(twins.model).items():
        assert grad._version == before[name][0] and torch.equal(grad, before[name][1]), name
    twins.backward()  # accumulates
    twins.update()
    with twins.model.no_sync():
        twins.backward()
    with FSDP.summon_full_params(twins.model):
        twins.assert_shown()
    with sharded_again(twins.model), pytest.raises(RuntimeError, match="unit.*no_sync.*not reduced"):
        with FSDP.summon_full_params(twins.model, with_grads=True):
            raise AssertionError("the context was entered")
    twins.backward()
    with FSDP.summon_full_params(twins.model, with_grads=True):
        assert_close(gradients(twins.model), gradients(twins.plain))
    twins.update()
    twins.check()


@ranks(2)
def test_an_optimizer_made_inside_holds_slices_but_not_what_a_flat_parameter_leaves(rank, world_size):
    twins = Twins()
    with FSDP.summon_full_params(twins.model):
        twins.optimizers[0] = adamw(twins.model)
    twins.step(3)
    twins.check()
    twins = Twins(use_orig_params=False)
    with FSDP.summon_full_params(twins.model):
        optimizer = torch.optim.SGD(twins.model.parameters(), lr=0.1)
        for param in twins.model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()  # of what is shown, while it is
    with pytest.raises(RuntimeError, match=r"made inside summon_full_params and holds '.+'"):
        optimizer.step()
    twins.step(2)
    twins.check()


def summon(module: nn.Module) -> None:
    with FSDP.summon_full_params(module):
        raise AssertionError("the context was entered")


@ranks(2)
def test_methods_of_the_whole_model_are_refused_inside_a_forward_or_backward(rank, world_size):
    twins = Twins()
    twins.step()
    model, block, optimizer = twins.model, twins.model.module.blocks[0], twins.optimizers[0]
    for call, doing in (
        (lambda: summon(model), "summon_full_params"),
        (lambda: summon(block), "summon_full_params"),
        (lambda: model.state_dict(), r"state_dict\(\)"),
        (lambda: model.load_state_dict(twins.plain.state_dict()), r"load_state_dict\(\)"),
        (lambda: model.apply(lambda module: None), r"apply\(\)"),
        (lambda: FSDP.optim_state_dict(model, optimizer), r"optim_state_dict\(\)"),
        (lambda: iter_full_params(model), r"iter_full_params\(\)"),
        (lambda: iter_full_optim_state(model, optimizer), r"iter_full_optim_state\(\)"),
        (lambda: model.clip_grad_norm_(1.0), r"clip_grad_norm_\(\)"),
        (lambda: model.grad_norms(), r"grad_norms\(\)"),
    ):
        hook = block.register_forward_hook(lambda *_, call=call: call() and None)
        inside = rf"{doing}.* inside the forward of the root unit \(Net\)"
        with sharded_again(model), pytest.raises(AssertionError, match=inside) as raised:  # torch's type
            twins.forward()
        assert isinstance(raised.value, RuntimeError) and isinstance(raised.value, ValueError)
        hook.remove()
        losses = twins.forward()
        losses[0].register_hook(lambda _, call=call: call() and None)
        with pytest.raises(AssertionError, match=rf"{doing}.* inside a backward"):
            losses[0].backward()
    twins.check()


def fill(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        assert module.weight.dim() == 2
        with torch.no_grad():
            nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(module.out_features))


@each_way
@ranks(2)
def test_apply_visits_every_module_once_with_full_parameters(rank, world_size, wrap, use_orig_params):
    twins = Twins(wrap, use_orig_params)
    visited: list[nn.Module] = []
    parent = nn.Sequential(twins.model)
    parent.apply(visited.append)
    assert set(visited) == set(parent.modules()) and len(visited) == len(set(visited))
    with sharded_again(twins.model):
        assert twins.model.apply(fill) is twins.model
    twins.plain.apply(fill)
    twins.check()


@each_way
@ranks(2)
def test_evaluation_inside_computes_with_what_is_shown(rank, world_size, wrap, use_orig_params):
    """As transformers does for `generate`: by the wrapped module, so that nested wrappers run alone."""
    twins = Twins(wrap, use_orig_params)
    batch = torch.randn(3, WIDTH, dtype=torch.float64)
    for recurse in (True, False):
        with FSDP.summon_full_params(twins.model, recurse=recurse), torch.no_grad():
            for net in (twins.model.module, twins.plain):
                net.stem.weight.mul_(0.5)
            assert_close({"": twins.model.module(batch)}, {"": twins.plain(batch)})
            if recurse:
                assert_close({"": twins.model(batch)}, {"": twins.plain(batch)})
                with torch.enable_grad(), pytest.raises(RuntimeError, match="leave its context"):
                    twins.model(batch)
    twins.check()


@each_way
@ranks(2)
def test_the_first_rank_evaluates_and_saves_alone(rank, world_size, wrap, use_orig_params):
    twins = Twins(wrap, use_orig_params)
    batch = torch.randn(3, WIDTH, dtype=torch.float64)
    twins.step(2)  # units share collectives from then on, which a refused forward must not change
    with FSDP.summon_full_params(twins.model, writeback=False, rank0_only=True), torch.no_grad():
        if rank == 0:
            assert_close({"": twins.model(batch)}, {"": twins.plain(batch)})
            assert_close(twins.model.state_dict(), twins.plain.state_dict())
        else:
            with pytest.raises(RuntimeError, match="leave its context"):
                twins.model(batch)
            for call in (twins.model.state_dict, lambda: twins.model.apply(fill)):
                with pytest.raises(RuntimeError, match="first rank only.*not on rank 1"):
                    call()
    twins.check()
