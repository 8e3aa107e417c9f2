"""What programs take from torch's wrapper by private names: attributes, and with `compat` installed helpers.

Each flow is one of a program that was written for torch's wrapper, made small; torch's own runs beside ours.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import _common_utils, _flat_param, _runtime_utils, _traversal_utils
from torch.distributed.fsdp import _unshard_param_utils as _unshard_utils
from torch.distributed.fsdp._common_utils import _get_module_fsdp_state as imported_before

import fsdp_wrap
from bed import ranks
from fronts import each_form
from fsdp_wrap import CPUOffload, MixedPrecision, ShardingStrategy, StateDictType, compat
from fsdp_wrap import FullyShardedDataParallel as FSDP
from nets import WIDTH, Block


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block(), nn.Linear(WIDTH, 3))


def wrapped(library: Any, module: nn.Module, use_orig_params: bool, **options: Any) -> Any:
    """Wraps every block and the whole, by either library."""
    if "sharding_strategy" in options:
        options["sharding_strategy"] = library.ShardingStrategy[options["sharding_strategy"].name]
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
        assert [handle.flat_param for handle in handles[:3]] == [state.params[0] for state in states]
        assert handles[3:] == [wrapper._handle for wrapper in of_torch]
        assert imported_before(ours[1]) is ours[1] and imported_before(ours[1].module) is None
        assert imported_before(theirs) is theirs
        assert _runtime_utils._get_fsdp_root_states(both) == [ours, theirs]
        assert [state._is_root for state in states] == [True, False, False]
        with pytest.raises(TypeError, match="takes the _handle of a wrapper"):
            _runtime_utils._reshard(ours, ours._unit.buffers, True)


@each_form
@ranks(2)
def test_a_unit_of_several_flat_parameters_has_as_many_handles(rank, world_size, use_orig_params):
    """None is left out of an average or a move of all that handles hold."""
    layer = nn.Linear(4, 3)
    layer.bias.requires_grad_(False)
    model = FSDP(layer, use_orig_params=use_orig_params)
    with compat.install():
        handles = _traversal_utils._get_fsdp_handles(model)
    assert {handle.flat_param._fqns for handle in handles} == {("weight",), ("bias",)}
    assert [handle.flat_param for handle in model._all_handles] == model.params
    assert model._handle in handles and model._flat_param is model._handle.flat_param


def offloads_between_phases(library: Any, rank: int, use_orig_params: bool) -> dict[str, torch.Tensor]:
    """As verl does it: shards leave, and come back, by their handles."""
    model = wrapped(library, net(), use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        _runtime_utils._lazy_init(model, model)
        assert model._is_root
        for handle in model._all_handles:
            flat, before = handle.flat_param, handle.flat_param.data_ptr()
            assert not handle._offload_params
            assert flat.data.data_ptr() == flat._local_shard.data_ptr()
            assert id(flat.data) != id(flat._local_shard) and flat.data.size() == flat._local_shard.size()
            handle.flat_param_to(torch.device("cpu"), non_blocking=True, copy=True)
            flat._local_shard = flat.data
            assert id(flat._local_shard) != id(flat.data) and handle.flat_param.data_ptr() != before
        train(model, rank, optimizer)
    return full(model)


def averages_by_handles(library: Any, rank: int, use_orig_params: bool) -> dict[str, torch.Tensor]:
    """As Bagel and LLaMA2-Accessory do it: two models' handles side by side."""
    model = trained(library, rank, use_orig_params)
    average = wrapped(library, net(1), use_orig_params)
    pairs = [_traversal_utils._get_fsdp_handles(net) for net in (average, model)]
    assert len(pairs[0]) == len(pairs[1]) == 3
    for old, new in zip(*pairs):
        assert old.flat_param.shape == new.flat_param.shape
        if new.flat_param.requires_grad:
            old.flat_param.data.lerp_(new.flat_param.data, 0.25)
    return full(average) | {"output": average(torch.ones(2, WIDTH)).detach()}


def clips_by_handles(library: Any, rank: int, use_orig_params: bool) -> dict[str, torch.Tensor]:
    """As programs clip that have a loop of their own over the handles: by slices, and by the shard."""
    model = wrapped(library, net(), use_orig_params)
    model(torch.full((2, WIDTH), rank + 1.0)).sum().backward()
    handles = _traversal_utils._get_fsdp_handles(model)
    assert all(handle.uses_sharded_strategy for handle in handles)
    square = sum(handle.sharded_grad.square().sum() for handle in handles)
    dist.all_reduce(square)
    for handle in handles:
        assert handle._use_orig_params is use_orig_params
        held = handle.flat_param._params if use_orig_params else [handle.flat_param]
        for param in held:
            if param.grad is not None:
                param.grad.mul_(1 / square.sqrt())
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return full(model) | {"norm": square.sqrt()}


def reshards_by_hand(library: Any, rank: int, use_orig_params: bool) -> dict[str, torch.Tensor]:
    """As torchtnt does it after averaging, and audiocraft after loading: what is full is freed."""
    strategy = ShardingStrategy.SHARD_GRAD_OP if use_orig_params else ShardingStrategy.FULL_SHARD
    model = trained(library, rank, use_orig_params, sharding_strategy=strategy)
    kept = model(torch.ones(2, WIDTH))  # no backward follows
    for module in type(model).fsdp_modules(model):
        module._flat_param.data.mul_(0.5)
        handle = module._handle
        if handle._get_padded_unsharded_flat_param().untyped_storage().size():
            _runtime_utils._reshard(module, handle, True)
        assert handle._get_padded_unsharded_flat_param().untyped_storage().size() == 0
        assert handle.needs_unshard() and module._state_dict_type.name == "FULL_STATE_DICT"
    return full(model) | {"before": kept.detach(), "after": model(torch.ones(2, WIDTH)).detach()}


def makes_roots_before_the_first_forward(
    library: Any, rank: int, use_orig_params: bool
) -> dict[str, torch.Tensor]:
    """As OLMo and litgpt do it, before tracing or saving."""
    policy = library.MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = wrapped(library, net(), use_orig_params, mixed_precision=policy)
    assert model._is_root is None
    _runtime_utils._lazy_init(model, model)
    _runtime_utils._lazy_init(model, model)
    assert [wrapper._is_root for wrapper in type(model).fsdp_modules(model)] == [True, False, False]
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
            assert all(handle.needs_unshard() for handle in model._all_handles)
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
    states = _common_utils.TrainingState
    assert model.training_state is states.IDLE
    with context:
        assert model.training_state is states.SUMMON_FULL_PARAMS
        assert model.module[0].weight.shape == (WIDTH, WIDTH)
        assert model[1].training_state is states.IDLE
        model.module[0].weight.data.mul_(2)
    with _unshard_utils._unshard_params(model, True, False, *args):
        assert model.module[1].module.up.weight.shape == (5, WIDTH)
    return full(model)


FLOWS = [
    offloads_between_phases,
    averages_by_handles,
    clips_by_handles,
    reshards_by_hand,
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
def test_summoning_a_part_first(rank, world_size):
    """As verl does it for adapters, block by block: the part is no root afterwards."""
    model = wrapped(fsdp_wrap, net(), True)
    for module in (model[1], model[2]):
        with FSDP.summon_full_params(module, writeback=False):
            assert module._is_root
            module._is_root = False
        assert not module._is_root
    train(model, rank, torch.optim.SGD(model.parameters(), lr=0.1))
    assert [wrapper._is_root for wrapper in FSDP.fsdp_modules(model)] == [True, False, False]
    with pytest.raises(RuntimeError, match="unit '1' is no root, since another instance encloses it"):
        model[1]._is_root = True
    before = full(model)
    for module in FSDP.fsdp_modules(model):
        module._is_root = None
    assert model._is_root is None and model[1]._is_root is None
    torch.testing.assert_close(full(model), before)
    train(model, rank, torch.optim.SGD(model.parameters(), lr=0.1))


# attributes


def _pieces(flat: Any) -> dict[str, torch.Tensor]:
    """What a rank holds of each parameter, cut from the shard as Distributed Shampoo does it."""
    pieces = {}
    for fqn, numel, info in zip(flat._fqns, flat._numels, flat._shard_param_infos):
        in_shard, offset, length, first, last = info
        assert (info.in_shard, info.offset_in_shard) == (in_shard, offset)
        whole = torch.full((numel,), torch.nan)
        if in_shard:
            assert last - first + 1 == length == info.numel_in_shard
            whole[first : last + 1] = flat.data[offset : offset + length]
        pieces[fqn] = whole
    return pieces


@pytest.mark.parametrize(
    ("use_orig_params", "strategy"), [(False, "FULL_SHARD"), (True, "FULL_SHARD"), (True, "NO_SHARD")]
)
@ranks(3)
def test_where_parameters_lie_in_the_shard(rank, world_size, use_orig_params, strategy):
    plain, sharding = net(), ShardingStrategy[strategy]
    model = wrapped(fsdp_wrap, net(), use_orig_params, sharding_strategy=sharding)
    values = {name: param.flatten() for name, param in plain.named_parameters()}
    seen: dict[str, torch.Tensor] = {}
    for prefix, wrapper in (("", model), ("1.", model[1]), ("2.", model[2])):
        flat = wrapper._flat_param
        for fqn, piece in _pieces(flat).items():
            held = ~piece.isnan()
            assert torch.equal(piece[held], values[prefix + fqn][held])
            seen[prefix + fqn] = held.int()
        if use_orig_params:
            sizes = [info.numel_in_shard or 0 for info in flat._shard_param_infos]
            assert [param.numel() for param in flat._params] == sizes
            assert {id(param) for param in flat._params} <= {id(param) for param in model.parameters()}
    for name, held in seen.items():
        dist.all_reduce(held)
        assert held.eq(world_size if strategy == "NO_SHARD" else 1).all(), name


@each_form
@ranks(2)
def test_named_tuples_equal_those_of_torch(rank, world_size, use_orig_params):
    """Where no alignment makes the two differ: parameters of 8 and 16 elements."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.c = nn.Linear(2, 4, bias=False)
            self.c.weight = self.a.weight

    def described(info: Any) -> tuple[Any, ...]:
        return tuple(type(value).__name__ if isinstance(value, nn.Module) else value for value in info)

    rows_of_both = []
    for library in LIBRARIES:
        model = library.FullyShardedDataParallel(Tied(), use_orig_params=use_orig_params, **_on_cpu(library))
        _runtime_utils._lazy_init(model, model) if library is torch_fsdp else None
        flat = model._flat_param
        rows: list[Any] = [flat._shard_param_infos, flat._numels, [*flat._fqns], [*flat._shapes]]
        rows += [tuple(map(described, flat._param_infos))]
        rows += [None if flat._params is None else [param.shape for param in flat._params]]
        rows_of_both.append(rows)
    for ours, theirs in zip(*rows_of_both):
        assert ours == theirs
    assert isinstance(model._flat_param, _flat_param.FlatParameter)


class Spy(nn.Linear):
    """Says in its forward what its wrapper's flat parameter is."""

    def look_at(self, wrapper: Any) -> None:
        self.__dict__["wrapper"], self.__dict__["seen"] = wrapper, []

    def forward(self, x):
        for param in self.wrapper.params:
            away = param.data_ptr() != param._local_shard.data_ptr()
            padded = param._full_param_padded if self.wrapper._handle.uses_sharded_strategy else param
            self.seen.append((param.dtype, away, padded.dtype, self.wrapper.training_state.name))
            if away:
                self.seen.append(torch.equal(param[: self.weight.numel()], self.weight.flatten()))
        return super().forward(x)


@pytest.mark.parametrize(
    ("use_orig_params", "dtype", "strategy"),
    [
        (False, torch.bfloat16, "FULL_SHARD"),
        (True, None, "FULL_SHARD"),
        (True, torch.bfloat16, "SHARD_GRAD_OP"),
        (False, None, "NO_SHARD"),
        (True, torch.bfloat16, "NO_SHARD"),
    ],
)
@ranks(2)
def test_flat_parameters_while_their_unit_computes(rank, world_size, use_orig_params, dtype, strategy):
    """The full values in the dtype of the computation, as torch has them; the shard before and after."""
    looks_of_both = []
    for library in LIBRARIES:
        policy = library.MixedPrecision(param_dtype=dtype)
        spy = Spy(WIDTH, 4)
        model = library.FullyShardedDataParallel(
            spy,
            mixed_precision=policy,
            sharding_strategy=library.ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
            **_on_cpu(library),
        )
        spy.look_at(model)
        looks: list[Any] = []
        for _ in range(2):
            output = model(torch.ones(2, WIDTH))
            spy.seen.append("backward")
            flat = model._flat_param
            looks.append((flat.dtype, flat.shape == flat._local_shard.shape))
            output.sum().backward()
            flat = model._flat_param
            size = 0 if strategy == "NO_SHARD" else flat._full_param_padded.untyped_storage().size()
            looks.append((flat.dtype, size, model.training_state.name))
        looks_of_both.append((spy.seen, looks))
    ours: Any
    theirs: Any
    ours, theirs = looks_of_both
    if strategy == "NO_SHARD":  # torch computes with the low-precision shard, ours with a buffer
        ours, theirs = (
            [look[:2] + look[3:] for look in seen if isinstance(look, tuple)] for seen, _ in looks_of_both
        )
    assert ours == theirs


@ranks(2)
def test_what_is_shown_while_a_unit_computes_is_a_copy(rank, world_size):
    kept = []
    model = FSDP(Spy(WIDTH, 4))
    model.module.look_at(model)
    expected = model(torch.ones(2, WIDTH))

    def change(*_: Any) -> None:
        kept.append(model.params[0])
        kept[0].data.zero_()  # which is nobody else's memory

    model.module.register_forward_pre_hook(change)
    output = model(torch.ones(2, WIDTH))
    assert torch.equal(output, expected)
    output.sum().backward()
    assert kept[0] is not model.params[0] and kept[0]._local_shard.data_ptr() == model.params[0].data_ptr()
    assert kept[0].eq(0).all() and model.params[0].any()
    assert torch.equal(kept[0].grad, model.params[0].grad)


@each_form
@ranks(2)
def test_the_shard_follows_what_is_assigned(rank, world_size, use_orig_params):
    model = wrapped(fsdp_wrap, net(), use_orig_params)
    flat = model._flat_param
    assert flat._local_shard is flat._local_shard
    flat._local_shard = torch.full_like(flat.data, 0.5)
    assert flat.data.eq(0.5).all()
    with FSDP.summon_full_params(model, recurse=False):
        assert model.module[0].weight.eq(0.5).all()
    flat.data = torch.full_like(flat.data, 0.25)
    assert flat._local_shard.eq(0.25).all()
    with pytest.raises(ValueError, match=r"cannot be replaced by a tensor of shape \(3,\)"):
        flat._local_shard = torch.zeros(3)


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
        pieces = [torch.zeros_like(own) if own.grad is None else own.grad.clone() for own in held]
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


@each_form
@ranks(2)
def test_attributes_of_a_copy_and_of_one_that_is_pickled(rank, world_size, use_orig_params):
    model = wrapped(fsdp_wrap, net(), use_orig_params)
    model(torch.ones(2, WIDTH)).sum().backward()
    second = copy.deepcopy(model)
    for one, other in zip(model._all_handles, second._all_handles):
        assert one is not other and one.flat_param is not other.flat_param
        assert one.flat_param._shard_param_infos == other.flat_param._shard_param_infos
        assert other.flat_param._local_shard.data_ptr() == other.flat_param.data_ptr()
    flat = model._flat_param
    assert flat._local_shard is not None
    file = io.BytesIO()
    torch.save(flat, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False), flat)
    alone = copy.deepcopy(flat)
    assert torch.equal(alone._local_shard, flat.data)
    with pytest.raises(AttributeError, match="is a copy, or its model is gone"):
        alone._shard_param_infos  # noqa: B018


@pytest.mark.parametrize(("use_orig_params", "offload"), [(False, True), (True, False)])
@ranks(2)
def test_what_wrappers_and_handles_say_of_themselves(rank, world_size, use_orig_params, offload):
    options: dict[str, Any] = {"cpu_offload": CPUOffload(offload_params=offload)}
    options["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    model = wrapped(fsdp_wrap, net(), use_orig_params, **options)
    handle = model._handle
    assert handle is model._handle and handle is model._all_handles[0]
    assert handle._offload_params is offload and handle._orig_param_dtype == torch.float32
    assert model._use_orig_params is use_orig_params
    assert model._exec_order_data.all_handles == model._all_handles
    assert model._device_handle.is_available() and model._has_params
    assert all(param._is_flat_param for param in model.params)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        assert model[1]._state_dict_type is StateDictType.SHARDED_STATE_DICT


@ranks(2)
def test_what_is_not_there_says_what_to_use(rank, world_size):
    model = wrapped(fsdp_wrap, net(), False)
    whole = wrapped(fsdp_wrap, net(), False, sharding_strategy=ShardingStrategy.NO_SHARD)
    refused = [
        (lambda: model._handle.unshard, "'unshard' of a handle.*use summon_full_params"),
        (lambda: model._unshard_stream, "'_unshard_stream' of a wrapper"),
        (lambda: model[1]._comm_hook, "'_comm_hook' of a wrapper.*register_comm_hook"),
        (lambda: model[1]._comm_hook_state, "'_comm_hook_state' of a wrapper.*register_comm_hook"),
        (lambda: model._exec_order_data.handles_post_forward_order, "handles_post_forward_order"),
        (lambda: model._handle.anything, "no attribute 'anything'"),
        (whole._handle._get_padded_unsharded_flat_param, "only where it is sharded"),
    ]
    for look, said in refused:
        with pytest.raises(AttributeError, match=said):
            look()
    for name in ("_comm_hook", "_comm_hook_state"):  # set by programs that go past the method
        with pytest.raises(RuntimeError, match=rf"'{name}' of unit '1' .* register_comm_hook"):
            setattr(model[1], name, print)
    with FSDP.summon_full_params(model):
        with pytest.raises(RuntimeError, match="must not run inside summon_full_params"):
            model._handle.flat_param_to("cpu")
        with pytest.raises(AttributeError):
            model.training_state = "idle"
    assert not hasattr(model, "_handles")
