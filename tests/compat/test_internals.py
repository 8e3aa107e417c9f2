"""What programs take from torch's wrapper by private names: attributes, and with `compat` installed helpers.

Each flow is one of a program that was written for torch's wrapper, made small; torch's own runs beside ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import _common_utils, _runtime_utils, _traversal_utils
from torch.distributed.fsdp import _unshard_param_utils as _unshard_utils
from torch.distributed.fsdp._common_utils import _get_module_fsdp_state as imported_before

import fsdp_wrap
from bed import ranks
from fronts import each_form
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import MixedPrecision, compat
from fsdp_wrap._runtime import units_in
from nets import WIDTH, Block


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block(), nn.Linear(WIDTH, 3))


def wrapped(library: Any, module: nn.Module, use_orig_params: bool, **options: Any) -> Any:
    """By either library, every block and the whole."""
    options |= {"auto_wrap_policy": library.wrap.ModuleWrapPolicy({Block})} | _on_cpu(library)
    return library.FullyShardedDataParallel(module, use_orig_params=use_orig_params, **options)


def _on_cpu(library: Any) -> dict[str, Any]:
    return {"device_id": torch.device("cpu")} if library is torch_fsdp else {}


LIBRARIES = (fsdp_wrap, torch_fsdp)


def train(model: nn.Module, rank: int, optimizer: torch.optim.Optimizer, count: int = 2) -> None:
    for step in range(count):
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()


def trained(library: Any, rank: int, use_orig_params: bool, seed: int = 0, **options: Any) -> Any:
    model = wrapped(library, net(seed), use_orig_params, **options)
    train(model, rank, torch.optim.SGD(model.parameters(), lr=0.1))
    return model


def full(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@contextmanager
def installed(library: Any) -> Iterator[None]:
    if library is torch_fsdp:
        yield
    else:
        with compat.install():
            yield


# helpers


@ranks(2)
def test_walks_find_our_wrappers_and_torchs(rank, world_size):
    ours, theirs = (wrapped(library, net(), True) for library in LIBRARIES)
    both = nn.ModuleList([ours, theirs])
    of_torch = [theirs, *theirs.module[1:3]]
    with compat.install():
        assert _traversal_utils._get_fsdp_states(both) == [*FSDP.fsdp_modules(both), *of_torch]
        states, modules = _traversal_utils._get_fsdp_states_with_modules(ours)
        assert states == modules == FSDP.fsdp_modules(ours) and len(states) == 3
        handles = _traversal_utils._get_fsdp_handles(both)
        assert [handle.flat_param for handle in handles[:3]] == [each._flat_param for each in states]
        assert handles[3:] == [each._handle for each in of_torch]
        assert imported_before(ours[1]) is ours[1] and imported_before(ours[1].module) is None
        assert imported_before(theirs) is theirs


def makes_roots_before_the_first_forward(
    library: Any, rank: int, use_orig_params: bool
) -> dict[str, torch.Tensor]:
    """As OLMo and litgpt do it, before tracing or saving."""
    policy = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = wrapped(library, net(), use_orig_params, mixed_precision=policy)
    _runtime_utils._lazy_init(model, model)
    _runtime_utils._lazy_init(model, model)
    assert [each.check_is_root() for each in type(model).fsdp_modules(model)] == [True, False, False]
    assert _runtime_utils._root_pre_forward(model, model, [], {}) in ([], ([], {}), ((), {}))
    (batch,), _ = _runtime_utils._root_pre_forward(model, model, (torch.ones(2, WIDTH),), {})
    (same,), _ = _runtime_utils._root_pre_forward(model[1], model[1], (torch.ones(2),), {})
    assert same.dtype == torch.float32
    return {"batch": batch, "output": model(batch).detach()}


class OutOfMemory(Exception):
    pass


@pytest.mark.parametrize(("use_orig_params", "where"), [(True, "forward"), (False, "backward")])
@ranks(2)
def test_cleaning_up_after_running_out_of_memory(rank, world_size, use_orig_params, where):
    """As composer does it, before it tries again with a smaller batch."""

    def fail(*_: Any) -> None:
        raise OutOfMemory

    model, plain = wrapped(fsdp_wrap, net(), use_orig_params), net()
    with compat.install():
        for _ in range(2):
            batch = torch.ones(2, WIDTH, requires_grad=True)
            hooked = model[2].up.register_forward_pre_hook if where == "forward" else batch.register_hook
            hook = hooked(fail)
            with pytest.raises(OutOfMemory):
                model(batch).sum().backward()
            hook.remove()
            for module in FSDP.fsdp_modules(model):
                if module.check_is_root():
                    _runtime_utils._post_backward_final_callback(module, module)
            for param in model.parameters():
                param.grad = None
            assert all(unit.handle.state.value == "sharded" for unit in units_in(model).values())
        train(model, rank, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(RuntimeError, match="must be called on the root, and this is unit '1'"):
            _runtime_utils._post_backward_final_callback(model[1], model[1])
    reference = wrapped(fsdp_wrap, plain, use_orig_params)
    train(reference, rank, torch.optim.SGD(reference.parameters(), lr=0.1))
    torch.testing.assert_close(full(model), full(reference), rtol=0, atol=0)


def summons_one_wrapper(library: Any, rank: int, use_orig_params: bool) -> dict[str, torch.Tensor]:
    """As verl does it for a rollout: what the root owns is full, what is nested is not."""
    model = trained(library, rank, use_orig_params)
    state: Any = _common_utils._get_module_fsdp_state(model)
    args = (False, False, False)  # rank0_only, offload_to_cpu, with_grads
    context = _unshard_utils._unshard_params_for_summon(model, state, True, *args)
    with context:
        assert model.module[0].weight.shape == (WIDTH, WIDTH)
        model.module[0].weight.data.mul_(2)
    with _unshard_utils._unshard_params(model, True, False, *args):
        assert model.module[1].module.up.weight.shape == (5, WIDTH)
    return full(model)


FLOWS = [
    makes_roots_before_the_first_forward,
    summons_one_wrapper,
]


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.__name__)
@each_form
@ranks(2)
def test_flows_give_the_same_with_both_libraries(rank, world_size, use_orig_params, flow):
    results = []
    for library in LIBRARIES:
        with installed(library):
            results.append(flow(library, rank, use_orig_params))
    ours, theirs = results
    assert ours.keys() == theirs.keys() and ours
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, msg=f"{name}: {{}}".format)


@ranks(2)
def test_the_gradient_of_the_flat_parameter_behind_slices(rank, world_size):
    """It is the shard of which the slices' gradients are views, also where a user has replaced some."""
    model = FSDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), use_orig_params=True)
    flat, batch = model._flat_param, torch.ones(2, 4)
    assert flat.grad is None
    for change in ("nothing", "replaced", "dropped"):
        model(batch).sum().backward()
        held = [param for param in model.parameters() if param.numel()]
        if change == "replaced":
            held[0].grad = held[0].grad * 3
        if change == "dropped":
            held[-1].grad = None
        pieces = [torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in held]
        grad = flat.grad
        assert grad.shape == flat.shape and grad.square().sum().isclose(
            sum(piece.square().sum() for piece in pieces)
        )
        grad.mul_(2)
        for param, piece in zip(held, pieces):
            assert param.grad is None or torch.equal(param.grad, 2 * piece), change
    model.zero_grad()
    with model.no_sync():
        model(batch).sum().backward()
    assert flat.grad is None or not flat.grad.any(), "what waits for a reduction is not in the shard"
    model(batch).sum().backward()
    with FSDP.summon_full_params(model, with_grads=True):
        assert model.module[1].bias.grad.eq(4).all() and flat.grad.shape == flat.shape
    flat.grad = None
    assert all(param.grad is None for param in model.parameters())


@ranks(2)
def test_what_is_not_there_says_what_to_use(rank, world_size):
    model = wrapped(fsdp_wrap, net(), False)
    refused = [
        (lambda: model._handle.unshard, "'unshard' of a FlatHandle.*use summon_full_params"),
        (lambda: model._handle.needs_unshard(), "'needs_unshard' of a FlatHandle.*read the wrapper's"),
        (lambda: model._unshard_stream, "'_unshard_stream' of a wrapper"),
        (lambda: model._is_root, "'_is_root' of a wrapper.*call check_is_root()"),
        (lambda: model.params, "'params' of a wrapper.*parameters()"),
        (lambda: model[1]._comm_hook, "'_comm_hook' of a wrapper.*register_comm_hook"),
        (lambda: model[1]._comm_hook_state, "'_comm_hook_state' of a wrapper.*register_comm_hook"),
        (lambda: model._flat_param._local_shard, "'_local_shard' of a FlatParameter.* is the shard"),
        (lambda: model._handle.anything, "no attribute 'anything'"),
        (lambda: model._flat_param.anything, "no attribute 'anything'"),
    ]
    for look, said in refused:
        with pytest.raises(AttributeError, match=said):
            look()
    for name in ("_comm_hook", "_comm_hook_state"):  # set by programs that go past the method
        with pytest.raises(RuntimeError, match=rf"'{name}' of unit '1' .* register_comm_hook"):
            setattr(model[1], name, print)
