"""State dicts of full tensors: what a plain module gives and takes, whichever way it is wrapped."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bed import ranks
from bed.references import count_collectives
from fronts import each_form
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import ModuleWrapPolicy
from state_nets import (
    MODELS,
    Block,
    Buffered,
    Failing,
    Hooked,
    Mixed,
    Net,
    Tied,
    WithDoubling,
    WithExtraState,
    WithFailing,
    adamw,
    assert_close,
    assert_equal,
    below_plain,
    by_hand,
    changed,
    double_biases,
    new_batches,
    note_prefix,
    per_block,
    train_side_by_side,
    whole,
    wrapped_and_plain,
)

each_wrapping = pytest.mark.parametrize("wrap", [whole, per_block, below_plain])
each_full_wrapping = pytest.mark.parametrize("wrap", [whole, per_block])


# What is saved.


@each_form
@each_wrapping
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("Tied", "Shared")])
@ranks(2)
def test_state_dict_equals_that_of_the_plain_module(rank, world_size, name, wrap, use_orig_params):
    model, plain = wrapped_and_plain(MODELS[name], wrap, use_orig_params)
    expected = plain.state_dict()
    found = model.state_dict()
    assert_equal(found, expected)
    assert found._metadata.items() >= expected._metadata.items()
    assert_equal(model.state_dict(), expected)  # taking it has changed nothing


@each_form
@pytest.mark.parametrize("wrap", [whole, per_block, by_hand])
@pytest.mark.parametrize("name", ["Tied", "Shared"])
@ranks(2)
def test_tied_parameters_are_saved_under_every_name(rank, world_size, name, wrap, use_orig_params):
    model, plain = wrapped_and_plain(MODELS[name], wrap, use_orig_params)
    assert_equal(model.state_dict(), plain.state_dict())
    train_side_by_side(2, model, adamw(model), plain, adamw(plain))
    state = model.state_dict()
    assert_close(state, plain.state_dict())
    ties = {"stem": "head", "blocks.0.up": "blocks.1.up"} if name == "Tied" else {"blocks.0.down": "again"}
    for one, other in ties.items():
        assert torch.equal(state[f"{one}.weight"], state[f"{other}.weight"])


@each_form
@each_wrapping
@ranks(2)
def test_hooks_of_inner_modules_run_once_with_clean_prefixes(rank, world_size, wrap, use_orig_params):
    model, plain = wrapped_and_plain(Hooked, wrap, use_orig_params)
    plain.state_dict()
    model.state_dict()
    inner = {clean(name): module for name, module in model.named_modules()}
    for name in ("", "blocks.1", "head"):
        assert inner[name].seen == plain.get_submodule(name).seen


def clean(name: str) -> str:
    """The innermost module keeps the name that it had before wrapping."""
    return ".".join(part for part in name.split(".") if part != "_fsdp_wrapped_module")


@each_form
@ranks(2)
def test_hooks_on_the_wrapper_run(rank, world_size, use_orig_params):
    model, plain = wrapped_and_plain(Net, per_block, use_orig_params)
    for module in (model, model.module.blocks[1], plain, plain.blocks[1]):
        module.register_state_dict_pre_hook(note_prefix)
        module.register_state_dict_post_hook(double_biases)
    assert_equal(model.state_dict(), plain.state_dict())
    assert (model.seen, model.module.blocks[1].seen) == (plain.seen, plain.blocks[1].seen)


def without_biases(module, state, prefix, metadata):
    return OrderedDict((name, value) for name, value in state.items() if not name.endswith("bias"))


@each_form
@ranks(2)
def test_a_hook_may_return_another_state_dict(rank, world_size, use_orig_params):
    model, plain = wrapped_and_plain(Net, per_block, use_orig_params)
    for module in (model, plain):
        module._register_state_dict_hook(without_biases)  # unlike a post-hook it may
    found = model.state_dict()
    assert found and not any(name.endswith("bias") for name in found)
    assert_equal(found, plain.state_dict())


@each_form
@each_wrapping
@ranks(2)
def test_prefix_and_destination(rank, world_size, wrap, use_orig_params):
    model, plain = wrapped_and_plain(Buffered, wrap, use_orig_params)
    before = torch.zeros(1)
    found, expected = OrderedDict(before=before), OrderedDict(before=before)
    found._metadata, expected._metadata = OrderedDict(), OrderedDict()  # as nn.Module wants it
    assert model.state_dict(destination=found, prefix="net.") is found
    plain.state_dict(destination=expected, prefix="net.")
    assert_equal(found, expected)
    assert found._metadata.items() >= expected._metadata.items()
    assert_equal(model.state_dict(prefix="net."), plain.state_dict(prefix="net."))


@each_form
@each_wrapping
@ranks(2)
def test_keep_vars(rank, world_size, wrap, use_orig_params):
    model, plain = wrapped_and_plain(Mixed, wrap, use_orig_params)
    expected, found = plain.state_dict(keep_vars=True), model.state_dict(keep_vars=True)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert isinstance(found[name], nn.Parameter), name
        assert found[name].requires_grad == value.requires_grad, name
        assert torch.equal(found[name], value), name


@each_form
@each_full_wrapping
@pytest.mark.parametrize(("name", "steps"), [("Buffered", 0), ("Buffered", 2), ("Mixed", 0)])
@ranks(2)
def test_saved_tensors_have_memory_of_their_own(rank, world_size, name, steps, wrap, use_orig_params):
    model, _ = wrapped_and_plain(MODELS[name], wrap, use_orig_params)
    for _ in range(steps):
        model(new_batches()[rank]).square().mean().backward()
    state = model.state_dict()
    for key, value in state.items():
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size(), key
        assert not value.requires_grad, key
    assert len({value.untyped_storage().data_ptr() for value in state.values()}) == len(state)


@each_form
@each_full_wrapping
@ranks(2)
def test_training_on_does_not_change_what_was_saved(rank, world_size, wrap, use_orig_params):
    model, plain = wrapped_and_plain(Buffered, wrap, use_orig_params)
    optimizer = adamw(model)
    state = model.state_dict()
    for _ in range(2):
        model(new_batches()[rank]).square().mean().backward()
        optimizer.step()
    assert_equal(state, plain.state_dict())
    assert not torch.equal(model.state_dict()["norm.running_mean"], state["norm.running_mean"])


@each_form
@each_full_wrapping
@ranks(2)
def test_writing_into_what_was_saved_does_not_change_the_model(rank, world_size, wrap, use_orig_params):
    model, plain = wrapped_and_plain(Buffered, wrap, use_orig_params)
    for value in model.state_dict().values():
        value.fill_(7)
    assert_equal(model.state_dict(), plain.state_dict())


@each_form
@each_full_wrapping
@ranks(1, 2, 3)
def test_every_rank_saves_the_same(rank, world_size, wrap, use_orig_params):
    model, plain = wrapped_and_plain(Net, wrap, use_orig_params)
    train_side_by_side(3, model, adamw(model), plain, adamw(plain))
    state = model.state_dict()
    assert_close(state, plain.state_dict())
    states: list[Any] = [None] * world_size
    dist.all_gather_object(states, state)
    for other in states:
        assert_equal(other, state)


@each_form
@each_full_wrapping
@ranks(2)
def test_saving_while_parameters_are_kept_for_a_backward(rank, world_size, wrap, use_orig_params):
    model, plain = wrapped_and_plain(Net, wrap, use_orig_params)
    ours, theirs = adamw(model), adamw(plain)
    batches = new_batches()
    loss = model(batches[rank]).square().mean()
    assert_equal(model.state_dict(), plain.state_dict())
    loss.backward()
    plain(batches.flatten(0, 1)).square().mean().backward()
    ours.step(), theirs.step()
    assert_close(model.state_dict(), plain.state_dict())
    train_side_by_side(1, model, ours, plain, theirs)
    assert_close(model.state_dict(), plain.state_dict())


# What is loaded.


@each_form
@each_wrapping
@pytest.mark.parametrize("name", ["Net", "Buffered", "WithExtraState", "Mixed"])
@ranks(2)
def test_loads_what_a_plain_module_saved(rank, world_size, name, wrap, use_orig_params):
    model, plain = wrapped_and_plain(MODELS[name], wrap, use_orig_params)
    state = changed(plain.state_dict())
    untouched = copy.deepcopy(state)
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    assert_equal(model.state_dict(), untouched)
    assert_equal(state, untouched)


@each_form
@pytest.mark.parametrize("wrap", [whole, per_block, by_hand])
@pytest.mark.parametrize("name", ["Tied", "Shared"])
@ranks(2, 3)
def test_loads_tied_parameters(rank, world_size, name, wrap, use_orig_params):
    model, plain = wrapped_and_plain(MODELS[name], wrap, use_orig_params)
    state = changed(plain.state_dict())
    model.load_state_dict(state)
    plain.load_state_dict(state)
    assert_equal(model.state_dict(), plain.state_dict())
    train_side_by_side(2, model, adamw(model), plain, adamw(plain))
    assert_close(model.state_dict(), plain.state_dict())


@each_form
@each_wrapping
@pytest.mark.parametrize("name", ["Net", "Buffered", "Tied", "WithExtraState"])
@ranks(2)
def test_a_plain_module_loads_what_was_saved(rank, world_size, name, wrap, use_orig_params):
    if (name, wrap) == ("Tied", below_plain):
        wrap = by_hand  # a tie between a wrapped module and a plain one above cannot last
    model, plain = wrapped_and_plain(MODELS[name], wrap, use_orig_params)
    fresh = MODELS[name]().double()
    assert str(fresh.load_state_dict(model.state_dict())) == "<All keys matched successfully>"
    assert_equal(fresh.state_dict(), plain.state_dict())


@pytest.mark.parametrize("source", [whole, per_block, below_plain])
@pytest.mark.parametrize("target", [whole, per_block, below_plain])
@ranks(3)
def test_loads_what_was_saved_in_another_wrapping(rank, world_size, source, target):
    saved, plain = wrapped_and_plain(Buffered, source, use_orig_params=True)
    model, _ = wrapped_and_plain(Buffered, target, use_orig_params=False)
    model.load_state_dict(saved.state_dict())
    assert_equal(model.state_dict(), plain.state_dict())


@each_form
@each_wrapping
@ranks(2)
def test_values_are_cast_to_the_dtype_of_the_model(rank, world_size, wrap, use_orig_params):
    model, plain = wrapped_and_plain(Net, wrap, use_orig_params)
    state = {name: value.float() for name, value in changed(plain.state_dict()).items()}
    plain.load_state_dict(state)
    model.load_state_dict(state)
    assert_equal(model.state_dict(), plain.state_dict())


@each_form
@each_wrapping
@ranks(2)
def test_unstrict_loading_reports_and_loads_like_a_plain_module(rank, world_size, wrap, use_orig_params):
    model, plain = wrapped_and_plain(Buffered, wrap, use_orig_params)
    state = changed(plain.state_dict())
    for name in ("shift", "blocks.1.up.bias", "norm.running_var", "stem.weight"):
        del state[name]
    state["extra"] = state["blocks.1.extra"] = torch.zeros(2)
    expected, found = plain.load_state_dict(state, strict=False), model.load_state_dict(state, strict=False)
    assert sorted(found.missing_keys) == sorted(expected.missing_keys)
    assert sorted(found.unexpected_keys) == sorted(expected.unexpected_keys)
    assert_equal(model.state_dict(), plain.state_dict())


@each_form
@pytest.mark.parametrize("cls", [Net, Tied, WithExtraState, WithDoubling])
@ranks(2)
def test_full_tensors_are_taken_without_communication_where_modules_only_copy(
    rank, world_size, cls, use_orig_params
):
    for wrap in (per_block, by_hand, *([] if cls is Tied else [below_plain])):
        model, plain = wrapped_and_plain(cls, wrap, use_orig_params)
        state = changed(plain.state_dict())
        del state["shift"]
        with count_collectives() as traffic:
            assert list(model.load_state_dict(state, strict=False).missing_keys) == ["shift"]
        assert (traffic == {}) == (cls is not WithDoubling)
        plain.load_state_dict(state, strict=False)
        assert_equal(model.state_dict(), plain.state_dict())


@each_form
@ranks(2)
def test_assignment_below_a_plain_module(rank, world_size, use_orig_params):
    model, plain = wrapped_and_plain(Net, below_plain, use_orig_params)
    state = changed(plain.state_dict())
    try:
        model.load_state_dict(copy.deepcopy(state), assign=True)
    except ValueError:
        state = plain.state_dict()  # refused, as the wrapper itself does; then nothing has changed
    assert_equal(model.state_dict(), state)


@each_form
@each_full_wrapping
@pytest.mark.parametrize("grad", [True, False], ids=["kept_for_backward", "no_grad"])
@ranks(2)
def test_loading_after_a_forward(rank, world_size, wrap, use_orig_params, grad):
    model, plain = wrapped_and_plain(Net, wrap, use_orig_params)
    batches = new_batches()
    with torch.set_grad_enabled(grad):
        model(batches[rank])
    state = changed(plain.state_dict())
    model.load_state_dict(state)
    plain.load_state_dict(state)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(model(batches[rank]), plain(batches[rank]), rtol=0, atol=1e-12)
    assert_equal(model.state_dict(), plain.state_dict())


@each_form
@each_full_wrapping
@ranks(2, 3)
def test_loading_in_the_middle_of_training(rank, world_size, wrap, use_orig_params):
    model, plain = wrapped_and_plain(Net, wrap, use_orig_params)
    state = {name: value + 0.01 for name, value in plain.state_dict().items()}
    ours, theirs = adamw(model), adamw(plain)
    train_side_by_side(2, model, ours, plain, theirs)
    model.load_state_dict(state)
    plain.load_state_dict(state)
    assert_equal(model.state_dict(), plain.state_dict())
    train_side_by_side(2, model, ours, plain, theirs)
    assert_close(model.state_dict(), plain.state_dict())


@each_form
@ranks(2)
def test_loading_keeps_gradients(rank, world_size, use_orig_params):
    model, plain = wrapped_and_plain(Net, per_block, use_orig_params)
    ours, theirs = adamw(model), adamw(plain)
    batches = new_batches()
    model(batches[rank]).square().mean().backward()
    plain(batches.flatten(0, 1)).square().mean().backward()
    state = {name: value * 0.9 for name, value in plain.state_dict().items()}
    model.load_state_dict(state)
    plain.load_state_dict(state)
    ours.step(), theirs.step()
    assert_close(model.state_dict(), plain.state_dict())


# Modules that load in ways of their own.


class Renamed(Block):
    """Reads a name of an earlier version of itself, and knows its version."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.versions: list[int | None] = []

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        self.versions.append(local_metadata.get("version"))
        if f"{prefix}scale" in state_dict:
            state_dict[f"{prefix}gain"] = state_dict.pop(f"{prefix}scale")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class Migrating(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Renamed()


@each_form
@each_wrapping
@ranks(2)
def test_module_that_renames_what_it_loads(rank, world_size, wrap, use_orig_params):
    model, plain = wrapped_and_plain(Migrating, wrap, use_orig_params)
    state = changed(plain.state_dict())
    state["blocks.1.scale"] = state.pop("blocks.1.gain")
    for module in (model, plain):
        assert str(module.load_state_dict(state)) == "<All keys matched successfully>"
    assert_equal(model.state_dict(), plain.state_dict())


@each_form
@pytest.mark.parametrize(
    ("wrap", "saver"),
    [
        (whole, "plain"),
        (per_block, "plain"),
        (whole, "wrapped"),
        (per_block, "wrapped"),
        (below_plain, "wrapped"),
    ],
)
@ranks(2)
def test_version_of_a_module_reaches_it(rank, world_size, wrap, saver, use_orig_params):
    model, plain = wrapped_and_plain(Migrating, wrap, use_orig_params)
    state = (plain if saver == "plain" else model).state_dict()
    (renamed,) = (module for module in model.modules() if isinstance(module, Renamed))
    for given in (state, dict(state)):  # the second comes without versions
        model.load_state_dict(given)
    assert renamed.versions == [2, None]


@each_form
@each_wrapping
@ranks(2)
def test_load_hooks_see_names_and_module_of_the_plain_module(rank, world_size, wrap, use_orig_params):
    model, plain = wrapped_and_plain(Net, wrap, use_orig_params)
    loaded: list[tuple[str, str]] = []

    def before(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
        state[f"{prefix}gain"] = state.pop(f"{prefix}scale")
        loaded.append(("before", type(module).__name__))

    def after(module: nn.Module, incompatible: Any) -> None:
        assert not incompatible.missing_keys
        loaded.append(("after", type(module).__name__))

    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for block in blocks:
        block.register_load_state_dict_pre_hook(before)
        block.register_load_state_dict_post_hook(after)
    state = changed(plain.state_dict())
    expected = dict(state)
    for index in range(2):
        state[f"blocks.{index}.scale"] = state.pop(f"blocks.{index}.gain")
    model.load_state_dict(state)
    assert loaded == [("before", "Block"), ("after", "Block")] * 2
    assert_equal(model.state_dict(), {name: expected[name] for name in plain.state_dict()})


@each_form
@ranks(2)
def test_load_hooks_may_forgive_missing_names(rank, world_size, use_orig_params):
    model, plain = wrapped_and_plain(Net, per_block, use_orig_params)
    state = changed(plain.state_dict())
    del state["head.bias"]
    for module in (model, plain):
        module.head.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.clear())
        assert str(module.load_state_dict(state)) == "<All keys matched successfully>"
    assert_equal(model.state_dict(), plain.state_dict())


@each_form
@each_full_wrapping
@ranks(2)
def test_batch_norm_of_an_old_checkpoint(rank, world_size, wrap, use_orig_params):
    """Before it had a version, BatchNorm did not count its batches."""
    model, plain = wrapped_and_plain(Buffered, wrap, use_orig_params)
    state = dict(changed(plain.state_dict()))
    del state["norm.num_batches_tracked"]
    for module in (model, plain):
        assert str(module.load_state_dict(state)) == "<All keys matched successfully>"
    assert_equal(model.state_dict(), plain.state_dict())


@each_form
@each_wrapping
@ranks(2)
def test_module_that_fails_to_load_leaves_a_usable_model(rank, world_size, wrap, use_orig_params):
    model, plain = wrapped_and_plain(WithFailing, wrap, use_orig_params)
    (failing,) = (module for module in model.modules() if isinstance(module, Failing))
    state = {name: value * 0.9 for name, value in plain.state_dict().items()}
    failing.fails = True
    with pytest.raises(KeyError, match="of the user's own"):
        model.load_state_dict(state)
    failing.fails = False
    batch = new_batches()[rank]
    model(batch).square().mean().backward()
    model.load_state_dict(state)
    plain.load_state_dict(state)
    torch.testing.assert_close(model(batch), plain(batch), rtol=0, atol=1e-12)
    assert_equal(model.state_dict(), plain.state_dict())


def summoned_values(model: nn.Module) -> dict[str, torch.Tensor]:
    with FSDP.summon_full_params(model):
        return {name: value.clone() for name, value in model.state_dict().items()}


def streamed_values(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(FSDP.iter_full_params(model))


def copied_values(model: nn.Module) -> dict[str, torch.Tensor]:
    return copy.deepcopy(model).state_dict()


@each_form
@pytest.mark.parametrize("values_of", [summoned_values, streamed_values, copied_values])
@ranks(2)
def test_what_failed_to_load_below_a_plain_module_is_not_in_the_way(
    rank, world_size, values_of, use_orig_params
):
    model, plain = wrapped_and_plain(WithFailing, below_plain, use_orig_params)
    (failing,) = (module for module in model.modules() if isinstance(module, Failing))
    failing.fails = True
    with pytest.raises(KeyError, match="of the user's own"):
        model.load_state_dict({name: value * 0.9 for name, value in plain.state_dict().items()})
    failing.fails = False
    found, expected = values_of(model), plain.state_dict()
    for name in ("gain", "up.weight", "down.weight"):
        torch.testing.assert_close(found[f"blocks.1.{name}"], expected[f"blocks.1.{name}"], rtol=0, atol=0)


class Lazy:
    """No tensor, but one in any torch function; such things stand in the checkpoints that Lightning reads."""

    reads = 0

    def __init__(self, value: torch.Tensor) -> None:
        self._value, self.shape = value, value.shape

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.reads += 1
        given = [arg._value if isinstance(arg, Lazy) else arg for arg in args]
        return function(*given, **(kwargs or {}))


@each_form
@pytest.mark.parametrize("own_way", [False, True])
@ranks(2)
def test_values_that_are_read_when_asked(rank, world_size, use_orig_params, own_way):
    """Once each where every rank takes its part, and in torch's walk, which load hooks call for."""
    source = Net()
    model = FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=use_orig_params)
    if own_way:
        model.head.register_load_state_dict_pre_hook(lambda *_: None)
    Lazy.reads = 0
    load = FSDP._load_from_state_dict
    with mock.patch.object(FSDP, load.__name__, autospec=True, side_effect=load) as walked:
        model.load_state_dict({name: Lazy(value) for name, value in source.state_dict().items()})
    assert walked.called == own_way
    assert Lazy.reads == len(source.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(value, source.state_dict()[name]), name
    unfit = {name: Lazy(value[:1]) for name, value in source.state_dict().items() if value.dim()}
    with pytest.raises(RuntimeError, match="size mismatch for stem.weight"):
        model.load_state_dict(unfit, strict=False)
