"""State dicts of full tensors: what a plain module gives and takes, whichever way it is wrapped."""

import copy
from collections import OrderedDict
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from bed import ranks
from bed.references import count_collectives
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.clip_grad import grad_norms
from models import gather_objects
from state_nets import (
    FULL,
    MODELS,
    SHARDED,
    Block,
    Buffered,
    Failing,
    Mixed,
    Net,
    Shared,
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
    each_way,
    load,
    new_batches,
    note_prefix,
    per_block,
    take,
    train_side_by_side,
    whole,
    wrapped_and_plain,
)

WAYS = [(whole, False), (per_block, True), (below_plain, False)]
"""Of wrapping, with a form of the wrapper."""
WAYS_OF_TIES = [(whole, True), (per_block, False), (by_hand, True), (by_hand, False)]
"""A tie between a wrapped module and a plain one above cannot last."""


def assert_own_memory(state: dict[str, Any]) -> None:
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    for name, value in tensors.items():
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size(), name
        assert not value.requires_grad, name
    assert len({value.untyped_storage().data_ptr() for value in tensors.values()}) == len(tensors)


@pytest.mark.parametrize("name", MODELS)
@ranks(2)
def test_state_dict_equals_that_of_the_plain_module(rank, world_size, name):
    is_tied = name in ("Tied", "Shared")
    for wrap, use_orig_params in WAYS_OF_TIES if is_tied else WAYS:
        model, plain = wrapped_and_plain(MODELS[name], wrap, use_orig_params)
        expected, state = plain.state_dict(), model.state_dict()
        assert_equal(state, expected)
        assert state._metadata.items() >= expected._metadata.items()
        inner = {clean(path): module for path, module in model.named_modules()}
        for path in ("", "blocks.1", "head") if name == "Hooked" else ():
            assert inner[path].seen == plain.get_submodule(path).seen, "once, with clean prefixes"
        if wrap is not below_plain and not is_tied:
            assert_own_memory(state)
            for value in state.values():
                value.fill_(7) if isinstance(value, torch.Tensor) else None
        assert_equal(model.state_dict(), expected)  # neither taking it nor writing into it changes anything

        before = torch.zeros(1)
        state, expected = OrderedDict(before=before), OrderedDict(before=before)
        state._metadata, expected._metadata = OrderedDict(), OrderedDict()  # as nn.Module wants it
        assert model.state_dict(destination=state, prefix="net.") is state
        plain.state_dict(destination=expected, prefix="net.")
        assert_equal(state, expected)
        assert state._metadata.items() >= expected._metadata.items()
        assert_equal(model.state_dict(prefix="net."), plain.state_dict(prefix="net."))
        state, expected = (module.state_dict(keep_vars=True) for module in (model, plain))
        assert list(state) == list(expected)
        for key, value in expected.items():
            assert isinstance(state[key], nn.Parameter) == isinstance(value, nn.Parameter), key
            if isinstance(value, nn.Parameter):
                assert state[key].requires_grad == value.requires_grad, key
                assert torch.equal(state[key], value), key


def clean(name: str) -> str:
    """The innermost module keeps the name that it had before wrapping."""
    return ".".join(part for part in name.split(".") if part != "_fsdp_wrapped_module")


def without_biases(module, state, prefix, metadata):
    return OrderedDict((name, value) for name, value in state.items() if not name.endswith("bias"))


@ranks(2)
def test_hooks_on_the_wrapper_run(rank, world_size):
    model, plain = wrapped_and_plain(Net, per_block, True)
    for module in (model, model.module.blocks[1], plain, plain.blocks[1]):
        module.register_state_dict_pre_hook(note_prefix)
        module.register_state_dict_post_hook(double_biases)
    assert_equal(model.state_dict(), plain.state_dict())
    assert (model.seen, model.module.blocks[1].seen) == (plain.seen, plain.blocks[1].seen)
    model, plain = wrapped_and_plain(Net, per_block, True)
    for module in (model, plain):
        module._register_state_dict_hook(without_biases)  # unlike a post-hook it may return another
    state = model.state_dict()
    assert state and not any(name.endswith("bias") for name in state)
    assert_equal(state, plain.state_dict())


@pytest.mark.parametrize("cls", [Net, Tied, Shared, Buffered, WithExtraState, Mixed, WithDoubling])
@ranks(2)
def test_loads_what_a_plain_module_saved_and_the_other_way(rank, world_size, cls):
    """Where modules only copy, without communication, whatever kind of state dict is chosen."""
    for wrap, use_orig_params in WAYS_OF_TIES if cls in (Tied, Shared) else WAYS:
        model, plain = wrapped_and_plain(cls, wrap, use_orig_params)
        fresh = cls() if cls is Mixed else cls().double()
        if cls is not WithDoubling:
            assert str(fresh.load_state_dict(model.state_dict())) == "<All keys matched successfully>"
            assert_equal(fresh.state_dict(), plain.state_dict())
        if cls in (Tied, Shared):
            train_side_by_side(2, model, adamw(model), plain, adamw(plain))
            assert_close(model.state_dict(), plain.state_dict())
        for kind in (FULL,) if cls is WithDoubling else (FULL, SHARDED):
            state = changed(plain.state_dict())
            untouched = copy.deepcopy(state)
            with count_collectives() as traffic:
                assert str(load(model, kind, state)) == "<All keys matched successfully>"
            assert (traffic == {}) == (cls is not WithDoubling)
            assert_equal(state, untouched)
            plain.load_state_dict(state)
            assert_equal(model.state_dict(), plain.state_dict())


@ranks(2)
def test_values_are_cast_and_names_may_miss_as_in_a_plain_module(rank, world_size):
    for wrap, use_orig_params in WAYS:
        model, plain = wrapped_and_plain(Buffered, wrap, use_orig_params)
        state = {name: value.float() for name, value in changed(plain.state_dict()).items()}
        for name in ("shift", "blocks.1.up.bias", "norm.running_var", "stem.weight"):
            del state[name]
        state["extra"] = state["blocks.1.extra"] = torch.zeros(2)
        expected, outcome = (module.load_state_dict(state, strict=False) for module in (plain, model))
        assert sorted(outcome.missing_keys) == sorted(expected.missing_keys)
        assert sorted(outcome.unexpected_keys) == sorted(expected.unexpected_keys)
        assert_equal(model.state_dict(), plain.state_dict())
        state = dict(changed(plain.state_dict()))
        # What hooks forgive, or old versions: before it had one, BatchNorm did not count its batches.
        del state["norm.num_batches_tracked"], state["head.bias"]
        for module in (model, plain):
            module.head.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.clear())
            assert str(module.load_state_dict(state)) == "<All keys matched successfully>"
        assert_equal(model.state_dict(), plain.state_dict())
    model, plain = wrapped_and_plain(Net, below_plain, True)
    state = changed(plain.state_dict())
    model.load_state_dict(copy.deepcopy(state), assign=True)
    assert_equal(model.state_dict(), state)


@pytest.mark.parametrize("kind", [FULL, SHARDED])
@each_way
@ranks(2)
def test_saving_and_loading_beside_training(rank, world_size, wrap, use_orig_params, kind):
    """After a forward, with its parameters kept or not; between steps; beside gradients."""
    model, plain = wrapped_and_plain(Net, wrap, use_orig_params)
    ours, theirs = adamw(model), adamw(plain)
    source, _ = wrapped_and_plain(Net, wrap, use_orig_params)

    def look_and_load() -> None:
        own = model.state_dict()
        assert_close(own, plain.state_dict())
        assert_own_memory(own)
        for other in gather_objects(own):
            assert_equal(other, own)
        state = {name: value * 0.9 + 0.01 for name, value in plain.state_dict().items()}
        plain.load_state_dict(state)
        source.load_state_dict(state)
        load(model, kind, take(source, kind))
        assert_equal(model.state_dict(), plain.state_dict())

    batches = new_batches()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            model(batches[rank])
            look_and_load()
            assert_close({"": model(batches[rank])}, {"": plain(batches[rank])})
    for _ in range(2):
        train_side_by_side(2, model, ours, plain, theirs)
        look_and_load()
    for module, batch in ((model, batches[rank]), (plain, batches.flatten(0, 1))):
        module.zero_grad()
        module(batch).square().mean().backward()
    look_and_load()
    ours.step(), theirs.step()
    assert_close(model.state_dict(), plain.state_dict())


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


@pytest.mark.parametrize(("wrap", "use_orig_params"), WAYS)
@ranks(2)
def test_module_that_renames_what_it_loads_by_its_version(rank, world_size, wrap, use_orig_params):
    model, plain = wrapped_and_plain(Migrating, wrap, use_orig_params)
    (renamed,) = (module for module in model.modules() if isinstance(module, Renamed))
    savers = [model] if wrap is below_plain else [plain, model]
    for saver in savers:
        for given in (saver.state_dict(), dict(saver.state_dict())):  # the second comes without versions
            model.load_state_dict(given)
    assert renamed.versions == [2, None] * len(savers)
    state = changed(plain.state_dict())
    state["blocks.1.scale"] = state.pop("blocks.1.gain")
    for module in (model, plain):
        assert str(module.load_state_dict(state)) == "<All keys matched successfully>"
    assert_equal(model.state_dict(), plain.state_dict())


def values_after_norms(model: nn.Module) -> dict[str, torch.Tensor]:
    assert grad_norms(model) == {}
    return dict(FSDP.iter_full_params(model))


def summoned_values(model: nn.Module) -> dict[str, torch.Tensor]:
    with FSDP.summon_full_params(model):
        return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", [FULL, SHARDED])
@pytest.mark.parametrize(("wrap", "use_orig_params"), [*WAYS, (by_hand, True)])
@ranks(2)
def test_module_that_fails_to_load_leaves_a_usable_model(rank, world_size, wrap, use_orig_params, kind):
    """Whatever looks at the model next, or loads it again; a load of pieces leaves it as it was."""
    model, plain = wrapped_and_plain(WithFailing, wrap, use_orig_params)
    (failing,) = (module for module in model.modules() if isinstance(module, Failing))
    state = {name: value * 0.9 for name, value in plain.state_dict().items()}
    expected = plain.state_dict()
    owned = [name for name in expected if wrap is not below_plain or name.startswith("blocks.1")]
    for values_of in (
        summoned_values,
        lambda model: dict(FSDP.iter_full_params(model)),
        lambda model: copy.deepcopy(model).state_dict(),
        values_after_norms,
    ):
        failing.fails = True
        with pytest.raises(KeyError, match="of the user's own"):
            load(model, kind, state)
        failing.fails = False
        values = values_of(model) if kind is SHARDED or wrap is below_plain else {}
        for name in owned if values else ():
            assert torch.equal(values[name], expected[name]), (values_of, name)
    batch = new_batches()[rank]
    model(batch).square().mean().backward()
    load(model, kind, state)
    plain.load_state_dict(state)
    torch.testing.assert_close(model(batch), plain(batch), rtol=0, atol=1e-12)
    assert_equal(model.state_dict(), plain.state_dict())


class Lazy:
    """Becomes a tensor in any torch function, like the values of checkpoints that Lightning reads."""

    reads = 0

    def __init__(self, value: torch.Tensor) -> None:
        self._value, self.shape = value, value.shape

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.reads += 1
        given = [arg._value if isinstance(arg, Lazy) else arg for arg in args]
        return function(*given, **(kwargs or {}))


@pytest.mark.parametrize("own_way", [False, True])
@ranks(2)
def test_values_that_are_read_when_asked(rank, world_size, own_way):
    """Each is read once, both where every rank takes its part and in torch's walk, which hooks need."""
    source = Net()
    model = per_block(Net(), use_orig_params=True)
    if own_way:
        model.head.register_load_state_dict_pre_hook(lambda *_: None)
    Lazy.reads = 0
    load = FSDP._load_from_state_dict
    with mock.patch.object(FSDP, load.__name__, autospec=True, side_effect=load) as walked:
        model.load_state_dict({name: Lazy(value) for name, value in source.state_dict().items()})
    assert walked.called == own_way
    assert Lazy.reads == len(source.state_dict())
    assert_equal(model.state_dict(), source.state_dict())
    unfit = {name: Lazy(value[:1]) for name, value in source.state_dict().items() if value.dim()}
    with pytest.raises(RuntimeError, match="size mismatch for stem.weight"):
        model.load_state_dict(unfit, strict=False)
