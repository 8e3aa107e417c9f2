"""Models whose state is saved and loaded, ways of wrapping them, and how their states are compared."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fronts import assert_tensors
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import StateDictType
from fsdp_wrap.wrap import ModuleWrapPolicy
from nets import WIDTH


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.tensor(1.1))

    def forward(self, x):
        return x + self.gain * self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Parameters before, between and after submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WIDTH)
        self.register_parameter("absent", None)

    def forward(self, x):
        x = self.stem(x + self.shift)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Tied(Net):
    """Ties within the root, within a block, and between the two."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.stem.weight
        self.blocks[1].up.weight = self.blocks[0].up.weight


class Shared(Net):
    """A module of a block stands in the root as well."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.blocks[0].down

    def forward(self, x):
        return super().forward(self.again(x[:, :5]))


class Buffered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks[0].register_buffer("kept", torch.randn(3))
        self.blocks[0].register_buffer("not_kept", torch.randn(3), persistent=False)
        self.blocks[1].register_buffer("nothing", None)

    def forward(self, x):
        return self.norm(super().forward(x))


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.count = 3

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


class WithExtraState(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Counting()


class Doubling(nn.Linear):
    """Loads in a way of its own, which looks at the parameter."""

    def _load_from_state_dict(self, state_dict, prefix, *args):
        assert self.weight.detach().flatten().shape == (self.weight.numel(),)
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, *args)


class WithDoubling(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up = Doubling(WIDTH, 5)


class Mixed(Net):
    """Several dtypes, frozen parameters, memory that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.coarse = nn.Parameter(torch.randn(3).bfloat16())
        self.blocks[0].table = nn.Parameter(torch.arange(5), requires_grad=False)
        self.blocks[1].up.requires_grad_(False)
        self.stem.weight = nn.Parameter(self.stem.weight.detach().clone().t())


class Casting(nn.Module):
    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8).to(dtype) for dtype in dtypes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x.float()


class Hooked(Net):
    """With state-dict hooks of the user on inner modules and on the whole."""

    def __init__(self) -> None:
        super().__init__()
        for module in (self, self.blocks[1], self.head):
            module.register_state_dict_pre_hook(note_prefix)
            module.register_state_dict_post_hook(double_biases)
        self.seen: list[str] = []


def note_prefix(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    module.__dict__.setdefault("seen", []).append(prefix)


def double_biases(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in [name for name in state if name.startswith(prefix) and name.endswith("bias")]:
        state[f"{name}_doubled"] = state.pop(name) * 2


MODELS: dict[str, Callable[[], nn.Module]] = {
    cls.__name__: cls for cls in (Net, Tied, Shared, Buffered, WithExtraState, Mixed, Hooked)
}


def whole(net: nn.Module, **options: Any) -> nn.Module:
    return FSDP(net, **options)


def per_block(net: nn.Module, **options: Any) -> nn.Module:
    return FSDP(net, auto_wrap_policy=ModuleWrapPolicy({Block, nn.BatchNorm1d}), **options)


def below_plain(net: nn.Module, **options: Any) -> nn.Module:
    """Wraps all but the outermost module, which stays plain."""
    net.stem = FSDP(net.stem, **options)
    net.blocks[1] = FSDP(net.blocks[1], auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **options)
    return net


def by_hand(net: nn.Module, **options: Any) -> nn.Module:
    for index in range(2):
        net.blocks[index] = FSDP(net.blocks[index], **options)
    return FSDP(net, **options)


each_way = pytest.mark.parametrize(
    ("wrap", "use_orig_params"), [(whole, False), (per_block, True)], ids=["whole-flat", "per_block-orig"]
)
"""Both forms of the wrapper, and both ways in which units lie; they do not depend on each other."""


def wrapped_and_plain(cls: Callable[[], nn.Module], wrap: Callable[..., nn.Module], use_orig_params: bool):
    plain = cls()
    if cls is not Mixed:
        plain.double()
    return wrap(copy.deepcopy(plain), use_orig_params=use_orig_params), plain


def assert_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        if not isinstance(value, torch.Tensor):
            assert actual[name] == value, name
            continue
        assert type(actual[name]) is type(value), name
        assert (actual[name].dtype, actual[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(actual[name], value), name


def assert_close(actual: dict[Any, Any], expected: dict[Any, Any]) -> None:
    assert list(actual) == list(expected)
    assert_tensors(actual, expected, rtol=0, atol=1e-12)


def changed(state: dict[str, Any]) -> dict[str, Any]:
    """Returns other values under the same names."""
    other = copy.deepcopy(state)
    for name, value in other.items():
        other[name] = {"count": 8} if isinstance(value, dict) else value + 1
    return other


def new_batches() -> torch.Tensor:
    """Returns one batch for each rank, the same on every rank."""
    return torch.randn(dist.get_world_size(), 4, WIDTH, dtype=torch.float64)


def train_side_by_side(steps: int, model: nn.Module, ours: Any, plain: nn.Module, theirs: Any) -> None:
    for _ in range(steps):
        batches = new_batches()
        inputs = (batches[dist.get_rank()], batches.flatten(0, 1))
        for module, optimizer, batch in zip((model, plain), (ours, theirs), inputs):
            optimizer.zero_grad()
            module(batch).square().mean().backward()
            optimizer.step()


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


class Failing(Block):
    fails = False

    def _load_from_state_dict(self, *args):
        if self.fails:
            raise KeyError("of the user's own")
        super()._load_from_state_dict(*args)


class WithFailing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Failing()


FULL, LOCAL, SHARDED = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
)


def take(model: nn.Module, kind: StateDictType, config: Any = None) -> dict[str, Any]:
    with FSDP.state_dict_type(model, kind, config):
        return model.state_dict()


def load(model: nn.Module, kind: StateDictType, state: dict[str, Any], **options: Any) -> Any:
    with FSDP.state_dict_type(model, kind):
        return model.load_state_dict(state, **options)
