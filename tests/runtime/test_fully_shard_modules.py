"""`fully_shard` on many kinds of modules: refusals, cuts, the meta device, both front-ends."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel as DDP

from bed import ranks
from composable import assert_same, shard_blocks
from fronts import assert_same_grads, either_front, full_state, no_sync, shard
from fsdp_wrap import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard, replicate
from fsdp_wrap.clip_grad import GradientNorms
from fsdp_wrap.wrap import always_wrap_policy
from models import Transformer, loss_of, tokens, train
from nets import WIDTH, Middle


def with_scalar() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.scale = nn.Parameter(torch.tensor(1.0))
    return layer


REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (with_scalar(), {}, ValueError, "'scale' has no dimension"),
    (nn.ModuleList([nn.Linear(2, 2)]), {}, ValueError, "ModuleList has none.*pass them as a list"),
    (3, {}, TypeError, "not int"),
    ([], {}, TypeError, "an empty list"),
    (nn.Linear(2, 2), {"mp_policy": torch.bfloat16}, TypeError, "mp_policy must be"),
    (nn.Linear(2, 2), {"offload_policy": True}, TypeError, "offload_policy must be"),
    (nn.Linear(2, 2), {"mesh": "cpu"}, TypeError, "DeviceMesh"),
    (nn.Linear(2, 2), {"reshard_after_forward": "no"}, TypeError, "bool, an int or None"),
    (nn.Linear(3, 4), {"shard_placement_fn": lambda _: Shard(1)}, ValueError, r"'weight' of shape \(4, 3\)"),
    (nn.Linear(3, 4), {"shard_placement_fn": lambda _: Shard(2)}, ValueError, "no dimension 2"),
    (nn.Linear(3, 4), {"shard_placement_fn": lambda _: Replicate()}, TypeError, "must return a Shard"),
]


@ranks(2)
def test_what_cannot_be_sharded_is_refused_by_name(rank, world_size):
    for module, options, error, match in REFUSED:
        with pytest.raises(error, match=match):
            fully_shard(module, **options)
        params = module.parameters() if isinstance(module, nn.Module) else ()
        assert all(type(param) is nn.Parameter for param in params), "half done"
    with pytest.raises(ValueError, match="MixedPrecisionPolicy.param_dtype"):
        MixedPrecisionPolicy(param_dtype=torch.int8)
    sharded = fully_shard(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="already wrapped"):
        fully_shard(sharded)
    with pytest.raises(ValueError, match="cannot go from cpu to meta"):
        sharded.to("meta")
    for model in (sharded, nn.Sequential(sharded)):
        with pytest.raises(TypeError, match=r"share_memory\(\) of the root unit .* on rank \d: .* DTensors"):
            model.share_memory()
    with pytest.raises(ValueError, match="must be a bool"):
        sharded.set_reshard_after_forward(2)  # type: ignore[arg-type]
    outer = fully_shard(nn.Sequential(sharded))
    outer(torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="on the root, and this is unit '0'"):
        outer[0].reset_iter_state()


@ranks(3)
def test_how_parameters_are_cut(rank, world_size):
    module = nn.Module()
    shapes = {"long": (7, 2), "short": (2, 3), "one": (1,), "none": (0, 4), "even": (4, 6)}
    for name, shape in shapes.items():
        setattr(module, name, nn.Parameter(torch.randn(shape)))
    module.alias = module.long
    expected = {name: param.detach().clone() for name, param in module.named_parameters()}
    ignored = nn.Parameter(torch.ones(2))
    module.ignored = ignored
    holder = nn.Sequential(module)
    fully_shard(
        holder,
        ignored_params={ignored},
        shard_placement_fn=lambda param: Shard(-1) if param.shape == (4, 6) else None,
    )
    assert module.ignored is ignored and module.alias is module.long
    for name, value in expected.items():
        param = getattr(module, name)
        dim = 1 if name == "even" else 0
        chunks = value.chunk(world_size, dim)
        mine = chunks[rank] if rank < len(chunks) else value[:0]
        assert isinstance(param, DTensor) and param.placements == (Shard(dim),)
        assert torch.equal(param.to_local(), mine) and torch.equal(param.full_tensor(), value), name
    layer = nn.Linear(3, 3)
    layer.none = nn.Parameter(torch.ones(0, 2))
    layer.register_forward_hook(lambda module, args, output: output + module.none.sum())
    fully_shard(layer)(torch.ones(1, 3)).sum().backward()
    assert torch.all(layer.bias.grad.full_tensor() == 1), "beside what has no elements"


@ranks(2)
def test_meta_then_to_empty_then_loaded(rank, world_size):
    torch.manual_seed(0)
    plain = Transformer(1)
    with torch.device("meta"):
        model = Transformer(1)
    shard_blocks(model)
    with pytest.raises(ValueError, match="of the root unit .* embed.weight.* to_empty"):
        model(tokens(rank, 0))
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    full = plain.state_dict() if rank == 0 else {}
    options = dcp_state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dcp_state_dict.set_model_state_dict(model, full, options=options)
    ddp = DDP(plain)
    expected = train(ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-2), rank, range(2))
    assert train(model, optimizer, rank, range(2)) == expected
    assert_same(model, plain)
    assigned = {
        key: DTensor.from_local(
            value.to_local().clone(),
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
        for key, value in model.state_dict().items()
    }
    model.load_state_dict({key: value * 0 for key, value in assigned.items()}, assign=True)
    assert loss_of(model, tokens(rank, 0)).item() == pytest.approx(torch.tensor(53.0).log().item())
    halved = model.to(torch.bfloat16)
    assert halved is model and model(tokens(rank, 0)).dtype == torch.bfloat16
    assert {param.to_local().dtype for param in model.parameters()} == {torch.bfloat16}


@ranks(2)
def test_an_optimizer_from_before_a_load_that_assigns_is_refused_by_name(rank, world_size):
    """It holds parameters that training no longer reaches; one made afterwards trains as with DDP."""
    torch.manual_seed(0)
    plain = Transformer(1).double()
    model = copy.deepcopy(plain)
    shard_blocks(model)
    early = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, early, rank, range(1))
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    loss_of(model, tokens(rank, 1)).backward()
    with pytest.raises(RuntimeError, match=f"this SGD holds the parameter 'embed.weight' .*on rank {rank}"):
        early.step()
    model.zero_grad()
    plain.load_state_dict(full_state(model))
    ddp = DDP(plain)
    for one in (ddp, model):
        train(one, torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9), rank, range(3))
    assert_same(model, plain)


@pytest.mark.parametrize("zeroes", [False, True])
@ranks(2)
def test_a_load_that_assigns_drops_what_was_accumulated(rank, world_size, zeroes):
    """As with a plain module, whose new parameters have no gradients."""
    torch.manual_seed(0)
    plain = Transformer(1).double()
    model = copy.deepcopy(plain)
    shard_blocks(model)
    with no_sync(model):
        loss_of(model, tokens(rank, 0)).backward()
    if zeroes:
        model.zero_grad()
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    ddp = DDP(plain)
    for one in (ddp, model):
        loss_of(one, tokens(rank, 1)).backward()
    assert_same_grads(model, plain, rtol=1e-12, atol=1e-12)


@ranks(2)
def test_both_front_ends_in_one_model(rank, world_size):
    """The wrapper around units of `fully_shard`; and the other way round, beside a compiled unit."""
    torch.manual_seed(0)
    plain = Transformer(2).double()
    mixed = copy.deepcopy(plain)
    for block in mixed.blocks:
        fully_shard(block)
    model: Any = FullyShardedDataParallel(mixed, use_orig_params=True)
    ddp = DDP(copy.deepcopy(plain))
    for one in (ddp, model):
        train(one, torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9), rank, range(3))
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    for name, expected in ddp.module.state_dict().items():
        is_block = name.startswith("blocks")
        assert isinstance(saved[name], DTensor) == is_block
        torch.testing.assert_close(saved[name].full_tensor() if is_block else saved[name], expected, msg=name)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(saved)
    with FullyShardedDataParallel.summon_full_params(model):
        for (name, own), expected in zip(mixed.named_parameters(), ddp.module.parameters(), strict=True):
            torch.testing.assert_close(own, expected, msg=name)
    losses = [loss_of(one, tokens(rank, 9)) for one in (model, ddp)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for norm_type in (2.0, float("inf")):
        norm = nn.utils.clip_grad_norm_(ddp.parameters(), 0.1, norm_type)
        torch.testing.assert_close(model.clip_grad_norm_(0.1, norm_type), norm)

    mixed = copy.deepcopy(plain)
    mixed.blocks[0] = FullyShardedDataParallel(mixed.blocks[0], use_orig_params=True)
    mixed.blocks[1].compile(backend="aot_eager")
    fully_shard(mixed.blocks[1])
    model, ddp = fully_shard(mixed), DDP(plain)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (ddp, model)]
    expected = train(ddp, optimizers[0], rank, range(3))
    assert train(model, optimizers[1], rank, range(3)) == pytest.approx(expected)
    norms = GradientNorms(model).by_name(2.0)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(norms[name], param.grad.norm())
    with pytest.raises(ValueError, match="was sharded by fully_shard, so its optimizer state"):
        FullyShardedDataParallel.optim_state_dict(model, optimizers[1])


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.neither = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        return getattr(self, way)(x)


@ranks(2)
def test_classes_of_what_is_sharded_and_gradients_of_what_is_not_used_or_failed(rank, world_size):
    model = fully_shard(Branches())
    assert isinstance(model, Branches) and type(model).__name__ == "FSDPBranches"
    assert type(fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))[:1]) is nn.Sequential
    for net in (model, replicate(Branches())):
        net(torch.ones(1, 4), ["left", "right"][rank]).sum().backward()
        assert net.neither.weight.grad is None
        for branch in (net.left, net.right):
            assert torch.equal(branch.weight.grad.full_tensor(), torch.full((3, 4), 0.5))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    model.zero_grad()
    model.set_reduce_scatter_unused_params(True)
    model.right.requires_grad_(False)
    model(torch.ones(1, 4), "left").sum().backward()
    assert not model.neither.weight.grad.full_tensor().any() and model.right.weight.grad is None

    sharded = dict(model.named_parameters())  # full between forward and a backward that raises
    hook = model.left.register_forward_hook(lambda *args: args[-1].register_hook(lambda _: 1 / 0) and None)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(1, 4), "left").sum().backward()
    hook.remove()
    model.zero_grad()
    assert all(param.grad is None for param in sharded.values())
    assert all(param is sharded[name] for name, param in model.named_parameters())


# modules made by TorchScript, which run where they are not sharded

COMPILERS: tuple[Any, ...] = (torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(2, WIDTH)))


def refuse(wrap: Callable[[nn.Module], Any], module: nn.Module, *words: str) -> None:
    before = [(name, id(param)) for name, param in module.named_parameters()]
    with pytest.raises(TypeError) as raised:
        wrap(module)
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert [(name, id(param)) for name, param in module.named_parameters()] == before, "half done"


@either_front
@ranks(2)
def test_parameters_of_compiled_modules_are_refused_and_run_where_they_are_left_out(rank, world_size, front):
    words = ["torch.jit.script", "torch.compile", "plain module", "ignored"]
    for make in COMPILERS:
        nets = []  # two, since a deep copy of a compiled module has no leaves
        for _ in range(2):
            torch.manual_seed(0)
            nets.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), make(Middle()), nn.Linear(WIDTH, WIDTH)))
        plain, net = nets
        refuse(lambda net: shard(front, net), net, "'1.linear.weight'", *words)
        refuse(lambda root: shard(front, root), make(Middle()), "torch.jit.script", "plain module")
        left_out = [*net[1].parameters()]
        if front == "composable":
            refuse(lambda net: fully_shard(net[1]), net, "changes a module's class", "torch.jit.script")
            model: nn.Module = fully_shard(net, ignored_params={*left_out})
        else:
            refuse(lambda net: shard(front, net, always_wrap_policy), net, "'1.linear.weight'", *words)
            model = shard(front, net, always_wrap_policy, ignored_states=left_out)
        for module in (plain, model):
            module(torch.ones(4, WIDTH)).square().mean().backward()
            torch.optim.SGD(module.parameters(), lr=0.1).step()
        torch.testing.assert_close(dict(full_state(model)), dict(plain.state_dict()))
    first = Middle()
    net = nn.Sequential(first, nn.Linear(WIDTH, WIDTH), torch.jit.script(first))
    refuse(lambda net: shard(front, net), net, "'0.linear.weight'", "torch.jit.script")
    net[0] = shard(front, first)  # the compiled one computes with the former parameters still
    with pytest.raises(TypeError, match=r"'2\.linear\.weight'.*torch\.jit\.script"):
        shard(front, net)


class Named(nn.Linear):
    """A user's module with attributes of names that the library might have chosen."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self._schedule, self._units, self._handles, self._set = "cosine", 2, list[int](), set[int]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * len(self._schedule) * self._units


@ranks(2)
def test_private_attributes_of_a_users_module_stay_its_own(rank, world_size):
    torch.manual_seed(0)
    plain = Named()
    model = fully_shard(copy.deepcopy(plain))
    model.set_requires_gradient_sync(True)
    model.set_gradient_divide_factor(world_size)
    model.set_is_last_backward(True)
    x = torch.ones(2, 3)
    assert torch.equal(model(x), plain(x)) and "FSDPNamed" in repr(model)
    model(x).sum().backward()
    plain(x).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), plain.weight.grad)
    assert (model._schedule, model._units, model._handles, model._set) == ("cosine", 2, [], set())


@ranks(2)
def test_a_model_runs_without_a_part_that_was_converted_and_dropped(rank, world_size):
    model = nn.Sequential(*[fully_shard(nn.Linear(4, 4)) for _ in range(3)])
    fully_shard(model)
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)(torch.ones(2, 4, dtype=dtype)).sum().backward()
    del model[0]
    model.zero_grad()
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
