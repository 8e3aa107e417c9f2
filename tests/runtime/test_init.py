"""How a module gets its values: initialised from the meta device, received from the first rank, or loaded."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from bed import ranks
from bed.memory import Peak, live_bytes, only_new_objects
from bed.references import count_collectives
from fronts import each_form
from fsdp_wrap import CPUOffload, ShardingStrategy
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap._runtime import materialize as _materialize
from fsdp_wrap.wrap import ModuleWrapPolicy, always_wrap_policy
from models import gather_objects, twins


class Scale(nn.Module):
    """Initialises itself by `reset_parameters`, a buffer included."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.register_buffer("steps", torch.empty(3, dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.steps.copy_(torch.arange(3))

    def forward(self, x):
        return x * self.weight


class Layer(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(width, 5), Scale(5)
        self.norm = nn.BatchNorm1d(5)
        self.down = nn.Linear(5, width)

    def forward(self, x):
        return x + self.down(self.norm(self.scale(self.up(x))).tanh())


class Net(nn.Module):
    """Embedding and head are tied, as are the second layer's `down` and the first's; a layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight
        self.layers[1].down.weight = self.layers[0].down.weight
        self.layers[2].requires_grad_(False)
        self.embed.weight.tag = "tied"
        self.double()

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def by_hand(net: Net, **kwargs: Any) -> FSDP:
    for index, layer in enumerate(net.layers):
        net.layers[index] = FSDP(layer, **kwargs)
    return FSDP(net, **kwargs)


WRAPPINGS: dict[str, Callable[..., FSDP]] = {
    "whole": FSDP,
    "policy": lambda net, **kwargs: FSDP(net, auto_wrap_policy=ModuleWrapPolicy({Layer}), **kwargs),
    "always": lambda net, **kwargs: FSDP(net, auto_wrap_policy=always_wrap_policy, **kwargs),
    "hand": by_hand,
}
each_wrapping = pytest.mark.parametrize("wrapping", list(WRAPPINGS))


def fill(module: nn.Module) -> None:
    """Gives a module's own tensors values that depend on their shapes only."""
    with torch.no_grad():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape).cos() + 2)


def materialise_and_fill(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    fill(module)


def only_materialise(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)


def replace_and_fill(module: nn.Module) -> None:
    """Registers new parameters, as an initialiser written by hand may do."""
    for name, param in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(torch.empty(param.shape, dtype=param.dtype)))
    for name, buffer in list(module.named_buffers(recurse=False)):
        setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))
    fill(module)


def nothing(module: nn.Module) -> None:
    return None


def assert_same_state(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    found = model.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def train(model: nn.Module) -> None:
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    model.eval()
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(0, 11, (4,), generator=generator)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def assert_trains_like(model: FSDP, plain: nn.Module) -> None:
    """Every rank sees the same batches, so a plain module is the reference."""
    train(plain)
    train(model)
    found = model.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)


# From the meta device.


@each_form
@each_wrapping
@pytest.mark.parametrize("function", [materialise_and_fill, replace_and_fill], ids=["to_empty", "replace"])
@ranks(1, 2, 3)
def test_param_init_fn(rank, world_size, function, wrapping, use_orig_params):
    plain = Net()
    plain.apply(fill)
    net = on_meta(Net)
    embedding = net.embed.weight
    model = WRAPPINGS[wrapping](net, param_init_fn=function, use_orig_params=use_orig_params)
    if use_orig_params:
        assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in plain.parameters()]
        held = {id(param): param for param in model.parameters()}
        assert held[id(embedding)].tag == "tied"  # the user's own object, attributes and all
    assert_trains_like(model, plain)


@each_form
@each_wrapping
@ranks(1, 2, 3)
def test_reset_parameters(rank, world_size, wrapping, use_orig_params):
    torch.manual_seed(0)
    net = on_meta(Net)
    model = WRAPPINGS[wrapping](net, use_orig_params=use_orig_params)
    plain = Net()
    plain.load_state_dict(model.state_dict())
    for value in plain.parameters():
        assert value.isfinite().all() and value.abs().max() < 5
    assert plain.head.weight.std() > 0.5  # an embedding's values, not those of a linear layer
    for layer in plain.layers:
        assert layer.scale.steps.tolist() == [0, 1, 2]
        assert layer.norm.running_var.tolist() == [1.0] * 5
        assert layer.up.weight.std() > 0.05
    assert_trains_like(model, plain)


class Replacing(nn.Module):
    """Initialises itself by new tensors in the place of those that it had."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Parameter(torch.full((3,), 5.0, device="cpu"))
        self.weight = nn.Parameter(torch.empty(4))
        self.register_buffer("offset", torch.empty(2))

    def reset_parameters(self) -> None:
        self.weight = nn.Parameter(torch.arange(4.0))
        self.offset = torch.ones(2)
        self.kept = nn.Parameter(torch.zeros(3))


@each_form
@ranks(2)
def test_reset_parameters_that_replaces_what_it_initialises(rank, world_size, use_orig_params):
    net = on_meta(Replacing)
    before = net.weight
    state = FSDP(net, use_orig_params=use_orig_params).state_dict()
    assert state["weight"].tolist() == [0.0, 1.0, 2.0, 3.0] and state["offset"].tolist() == [1.0, 1.0]
    assert state["kept"].tolist() == [5.0] * 3
    assert not use_orig_params or net.weight is before


class Many(nn.Module):
    """Modules that initialise themselves in ways of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)  # no reset_parameters; touches a child
        self.recurrent = nn.LSTM(4, 4, num_layers=2)  # keeps lists of its weights
        self.convolution = nn.Conv1d(4, 4, 3)
        self.norm = nn.LayerNorm(4)
        self.scale = Scale(4)

    def forward(self, x):
        x = self.recurrent(self.attention(x, x, x)[0])[0]
        return self.scale(self.norm(self.convolution(x.transpose(1, 2)).transpose(1, 2)))


@each_form
@ranks(2)
def test_whole_module_is_as_if_made_on_the_cpu(rank, world_size, use_orig_params):
    torch.manual_seed(0)
    plain = Many()
    net = on_meta(Many)
    torch.manual_seed(0)
    model = FSDP(net, use_orig_params=use_orig_params)
    assert_same_state(model, plain.state_dict())
    x = torch.randn(5, 3, 4)
    torch.testing.assert_close(model(x), plain(x))
    model(x).sum().backward()


@each_form
@ranks(2)
def test_same_values_as_torch_gives(rank, world_size, use_orig_params):
    """In units of one module each, where the order within a unit cannot matter."""
    policy = ModuleWrapPolicy({nn.Linear, nn.Embedding, nn.LayerNorm})

    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))

    nets = on_meta(make), on_meta(make)
    kwargs: dict[str, Any] = {"auto_wrap_policy": policy, "device_id": torch.device("cpu")}
    torch.manual_seed(0)
    reference = TorchFSDP(nets[0], **kwargs, use_orig_params=True)
    torch.manual_seed(0)
    model = FSDP(nets[1], **kwargs, use_orig_params=use_orig_params)
    with TorchFSDP.summon_full_params(reference):
        expected = {name: value.clone() for name, value in reference.named_parameters()}
    found = model.state_dict()
    for name, value in expected.items():
        assert torch.equal(found[name.replace("_fsdp_wrapped_module.", "")], value), name


@each_form
@pytest.mark.parametrize("function", [None, materialise_and_fill], ids=["reset", "function"])
@ranks(2)
def test_what_has_values_keeps_them(rank, world_size, function, use_orig_params):
    net = Net()
    names = ["layers.1.up.weight", "layers.0.scale.weight", "layers.1.norm.bias", "head.bias"]
    for name in names:
        owner, _, attribute = name.rpartition(".")
        place = net.get_submodule(owner)
        setattr(place, attribute, nn.Parameter(getattr(place, attribute).to("meta")))
    net.layers[1].norm.running_mean = torch.empty(5, dtype=torch.float64, device="meta")
    net.layers[1].norm.num_batches_tracked.fill_(7)
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    model = WRAPPINGS["policy"](net, param_init_fn=function, use_orig_params=use_orig_params)
    state = model.state_dict()
    for name, value in expected.items():
        assert not state[name].is_meta
        assert value.is_meta or torch.equal(state[name], value), name
    assert expected["layers.1.norm.running_mean"].is_meta
    train(model)


@each_form
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@ranks(2)
def test_meta_module_offloaded(rank, world_size, strategy, use_orig_params):
    plain = Net()
    plain.apply(fill)
    model = WRAPPINGS["policy"](
        on_meta(Net),
        param_init_fn=materialise_and_fill,
        cpu_offload=CPUOffload(offload_params=True),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=use_orig_params,
    )
    assert_trains_like(model, plain)


@each_form
@ranks(2)
def test_initialisation_that_fails_leaves_tied_parameters_in_place(rank, world_size, use_orig_params):
    def fail(module: nn.Module) -> None:
        raise LookupError("no values today")

    net = on_meta(Net)
    net.layers[0] = FSDP(net.layers[0], param_init_fn=materialise_and_fill, use_orig_params=use_orig_params)
    weight = net.layers[1].down.weight
    with pytest.raises(LookupError, match="no values today"):
        FSDP(net.layers[1], param_init_fn=fail, use_orig_params=use_orig_params)
    assert net.layers[1].down.weight is weight and net.layers[1].up.weight.is_meta
    FSDP(net.layers[1], param_init_fn=materialise_and_fill, use_orig_params=use_orig_params)
    assert net.layers[1].down.weight is net.layers[0].down.weight


@pytest.mark.parametrize("device_id", ["cpu", "cpu:0", 0, torch.device("cpu")], ids=repr)
@ranks(2)
def test_device_id_on_a_host_without_accelerators(rank, world_size, device_id):
    if torch.accelerator.is_available():
        device_id = "cpu"
    model = FSDP(on_meta(Net), device_id=device_id)
    assert all(value.device == torch.device("cpu") for value in model.state_dict().values())
    train(model)


@each_form
@ranks(2)
def test_module_that_is_real_is_not_initialised(rank, world_size, use_orig_params):
    def refuse(module: nn.Module) -> None:
        raise AssertionError(type(module))

    plain, model = twins(Net, param_init_fn=refuse, use_orig_params=use_orig_params)
    assert_same_state(model, plain.state_dict())


@ranks(2)
def test_param_init_fn_is_called_as_apply_would(rank, world_size):
    """Per unit children first, for what holds meta tensors and for what is above it."""
    called: list[str] = []
    net = on_meta(Net)
    net.layers[0].up.to_empty(device="cpu")
    names = {module: name for name, module in net.named_modules()}

    def note(module: nn.Module) -> None:
        called.append(names[module])
        materialise_and_fill(module)

    WRAPPINGS["policy"](net, param_init_fn=note)
    layers = [[f"layers.{i}.{child}" for child in ("up", "scale", "norm", "down")] for i in range(3)]
    layers[0].remove("layers.0.up")
    layers = [[*children, f"layers.{i}"] for i, children in enumerate(layers)]
    assert called == [*layers[0], *layers[1], *layers[2], "embed", "head", ""]


@each_form
@ranks(2)
def test_a_parent_may_adjust_what_its_children_got(rank, world_size, use_orig_params):
    def initialise(module: nn.Module) -> None:
        materialise_and_fill(module)
        if isinstance(module, Layer):
            nn.init.constant_(module.down.weight, 3.0)

    net = on_meta(Layer)
    state = FSDP(net, param_init_fn=initialise, use_orig_params=use_orig_params).state_dict()
    assert (state["down.weight"] == 3.0).all() and (state["up.weight"] != 3.0).any()


@each_form
@each_wrapping
@ranks(2)
def test_ignored_stays_on_the_meta_device(rank, world_size, wrapping, use_orig_params):
    net = on_meta(Net)
    ignored = [net.layers[1].scale, net.layers[0].up.weight]
    kwargs: dict[str, Any] = {"ignored_states": ignored, "use_orig_params": use_orig_params}
    model = WRAPPINGS[wrapping](net, **kwargs)
    state = model.state_dict()
    left = {"layers.0.up.weight", "layers.1.scale.weight", "layers.1.scale.steps"}
    assert {name for name, value in state.items() if value.is_meta} == left


@pytest.mark.parametrize("wrapping", ["whole", "policy"])
@ranks(2)
def test_what_no_one_materialised_is_named(rank, world_size, wrapping):
    def forget_down(module: nn.Module) -> None:
        if getattr(module, "out_features", 0) != 6:
            materialise_and_fill(module)

    whole = r"meta device.*'layers.0.down.weight'.*'layers.2.down.bias'"
    policy = r"in 'layers.0'.*'down.bias'"
    with pytest.raises(RuntimeError, match=f"{whole if wrapping == 'whole' else policy}.*param_init_fn"):
        WRAPPINGS[wrapping](on_meta(Net), param_init_fn=forget_down)


@ranks(2)
def test_param_init_fn_that_changes_the_class_of_a_parameter(rank, world_size):
    class Special(nn.Parameter):
        pass

    def specialise(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        if isinstance(module, nn.Linear):
            module.bias = Special(module.bias.detach())

    with pytest.raises(RuntimeError, match=r"'up\.bias' a Special.*must stay a Parameter"):
        FSDP(on_meta(Layer), param_init_fn=specialise)


@ranks(2)
def test_param_init_fn_may_choose_a_dtype_and_freeze(rank, world_size):
    def initialise(module: nn.Module) -> None:
        materialise_and_fill(module)
        if isinstance(module, nn.Linear):
            module.double().requires_grad_(False)

    model = FSDP(on_meta(lambda: nn.Sequential(nn.Linear(3, 3), Scale(3))), param_init_fn=initialise)
    facts = {name: (value.dtype, value.numel()) for name, value in model.state_dict().items()}
    assert facts["0.weight"] == (torch.float64, 9) and facts["1.weight"] == (torch.float32, 3)
    held = {(param.dtype, param.requires_grad) for param in model.parameters()}
    assert held == {(torch.float64, False), (torch.float32, True)}


# From the first rank.


@each_form
@each_wrapping
@pytest.mark.parametrize("first", ["real", "meta"])
@ranks(1, 2, 3)
def test_ranks_on_meta_get_the_states_of_the_first(rank, world_size, first, wrapping, use_orig_params):
    torch.manual_seed(rank)
    net = Net() if first == "real" and rank == 0 else on_meta(Net)
    kwargs: dict[str, Any] = {"sync_module_states": True, "use_orig_params": use_orig_params}
    expected = gather_objects(net.state_dict() if rank == 0 else None)[0]
    model = WRAPPINGS[wrapping](net, **kwargs)
    plain = Net()
    plain.load_state_dict(model.state_dict())
    if first == "real":
        assert_same_state(model, expected)
    states = gather_objects(plain.state_dict())
    for name, value in states[0].items():
        assert all(torch.equal(value, state[name]) for state in states), name
    assert_trains_like(model, plain)


@each_form
@ranks(2)
def test_receiving_ranks_need_no_way_to_initialise(rank, world_size, use_orig_params):
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

    called: list[nn.Module] = []
    torch.manual_seed(0)
    expected = Bare().weight.detach()
    torch.manual_seed(rank)
    net = Bare() if rank == 0 else on_meta(Bare)
    model = FSDP(net, sync_module_states=True, param_init_fn=called.append, use_orig_params=use_orig_params)
    assert torch.equal(model.state_dict()["weight"], expected)
    assert called == []


DTYPES = [
    torch.uint8, torch.int8, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@each_form
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@ranks(2)
def test_states_of_every_dtype_travel(rank, world_size, dtype, use_orig_params):
    class Typed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            values = torch.arange(15).reshape(3, 5) % 2
            self.weight = nn.Parameter(values.to(dtype), requires_grad=False)
            self.register_buffer("buffer", values[0].to(dtype))
            self.register_buffer("scalar", values[0, 1].to(dtype), persistent=False)
            self.register_buffer("strided", values.to(dtype).t())
            self.register_buffer("empty", values[:0].to(dtype))

    net = Typed() if rank == 0 else on_meta(Typed)
    model = FSDP(net, sync_module_states=True, use_orig_params=use_orig_params)
    expected = Typed()
    found = model.state_dict()
    for name, value in expected.state_dict().items():
        assert found[name].shape == value.shape and found[name].dtype == dtype
        assert found[name].flatten().tolist() == value.flatten().tolist(), name
    assert torch.equal(model.scalar.double(), expected.scalar.double())
    assert model.strided.stride() == expected.strided.stride()


@each_form
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "NO_SHARD"])
@ranks(4)
def test_states_reach_all_copies(rank, world_size, strategy, use_orig_params):
    mesh = init_device_mesh("cpu", (2, 2) if strategy == "HYBRID_SHARD" else (4,))
    torch.manual_seed(rank)
    net = Net() if rank == 0 else on_meta(Net)
    expected = gather_objects(net.state_dict() if rank == 0 else None)[0]
    model = WRAPPINGS["policy"](
        net,
        sync_module_states=True,
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=use_orig_params,
    )
    assert_same_state(model, expected)


@ranks(2)
def test_messages_are_bounded(rank, world_size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_materialize, "_MESSAGE_BYTES", 1000)
        net = nn.Linear(100, 7) if rank == 0 else on_meta(lambda: nn.Linear(100, 7))
        with count_collectives() as traffic:
            FSDP(net, sync_module_states=True)
    assert traffic["broadcast"].calls == 4  # 2800 bytes of the weight, 28 of the bias
    assert traffic["broadcast"].bytes == 2828


@pytest.mark.parametrize("difference", ["shape", "dtype", "name", "frozen", "more", "other rank"])
@ranks(3)
def test_modules_that_differ_between_ranks(rank, world_size, difference):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    if rank == (1 if difference == "other rank" else 2):
        replaced = {
            "shape": nn.Linear(4, 5),
            "other rank": nn.Linear(4, 5),
            "dtype": nn.Linear(4, 4).double(),
            "name": Scale(4),
            "frozen": nn.Linear(4, 4).requires_grad_(False),
            "more": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        }
        net[1] = replaced[difference]
    with pytest.raises(ValueError, match="same parameters and buffers on all ranks") as caught:
        FSDP(net, sync_module_states=True)
    messages = gather_objects(str(caught.value))
    culprit = messages[1] if difference == "other rank" else messages[2]
    assert "rank 1 has '1." in culprit or "rank 2 has '1." in culprit
    assert "the first '1." in culprit and "errors of the other ranks" in messages[0]


# Memory.


class Square(nn.Module):
    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x)


class Tower(nn.Module):
    """Equal units; the root owns as much as one of them."""

    def __init__(self, units: int = 6) -> None:
        super().__init__()
        self.first = Square()
        self.squares = nn.ModuleList(Square() for _ in range(units))
        for square in self.squares:
            square.is_unit = True


UNIT_BYTES = 4 * (512 * 512 + 512)


def choose_squares(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or getattr(module, "is_unit", False)


@contextmanager
def peak_within(least: float, most: float) -> Iterator[None]:
    gc.collect()
    before = live_bytes()
    with Peak(before + most * UNIT_BYTES) as peak:
        yield
    assert least <= (peak.value - before) / UNIT_BYTES <= most


WAYS: dict[str, dict[str, Any]] = {
    "reset": {},
    "function": {"param_init_fn": only_materialise},
    "received": {"sync_module_states": True},
}


@pytest.mark.each_value
@each_form
@pytest.mark.parametrize("way", list(WAYS))
@ranks(4)
def test_materialising_takes_the_shard_and_one_unit(rank, world_size, way, use_orig_params):
    has_all = way == "received" and rank == 0
    shards = 7 / world_size
    with only_new_objects():
        net = Tower() if has_all else on_meta(Tower)
        with peak_within(*((0, 0.3) if has_all else (shards, shards + 1.05))):
            model = FSDP(net, auto_wrap_policy=choose_squares, use_orig_params=use_orig_params, **WAYS[way])
        del net
        gc.collect()
        assert live_bytes() <= (shards + 0.05) * UNIT_BYTES
    assert len(FSDP.fsdp_modules(model)) == 7


class Reading(Mapping[str, torch.Tensor]):
    """Reads each value from a file of its own, when asked."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self._folder, self._names = folder, list(names)

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.load(self._folder / name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@pytest.mark.each_value
@each_form
@pytest.mark.parametrize("lazily", ["mapped file", "mapping that reads"])
@ranks(4)
def test_loading_into_a_meta_model_takes_the_shard_and_one_unit(
    rank, world_size, lazily, use_orig_params, tmp_path
):
    torch.manual_seed(0)
    plain = Tower()
    folder = tmp_path / str(rank)
    folder.mkdir()
    torch.save(plain.state_dict(), folder / "all")
    for name, value in plain.state_dict().items():
        torch.save(value, folder / name)
    some = plain.squares[1].linear.weight[:3].clone()
    reading = Reading(folder, plain.state_dict())
    del plain
    state = torch.load(folder / "all", mmap=True) if lazily == "mapped file" else reading
    peak = peak_within(7 / world_size, 7 / world_size + 1.05)
    with only_new_objects(), peak, count_collectives() as traffic:
        model = FSDP(
            on_meta(Tower),
            auto_wrap_policy=choose_squares,
            param_init_fn=only_materialise,
            use_orig_params=use_orig_params,
        )
        model.load_state_dict(state)
    assert traffic == {}
    found = model.state_dict()
    assert torch.equal(found["squares.1.linear.weight"][:3], some)
    assert_same_state(model, {name: reading[name] for name in reading})


# Loading without communication.


@each_form
@each_wrapping
@ranks(1, 2, 3)
def test_every_rank_loads_its_part(rank, world_size, wrapping, use_orig_params):
    torch.manual_seed(0)
    model = WRAPPINGS[wrapping](Net(), use_orig_params=use_orig_params)
    train(model)
    torch.manual_seed(1)
    plain = Net()
    train(plain)
    with count_collectives() as traffic:
        result = model.load_state_dict(plain.state_dict())
    assert traffic == {} and result.missing_keys == result.unexpected_keys == []
    assert_same_state(model, plain.state_dict())
    model.load_state_dict({name: value.float() for name, value in Net().state_dict().items()})
    model.load_state_dict(plain.state_dict())
    assert_trains_like(model, plain)


@each_form
@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"])
@ranks(4)
def test_loading_after_a_forward_that_keeps_parameters(rank, world_size, strategy, use_orig_params):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2) if strategy == "HYBRID_SHARD" else (4,))
    model = WRAPPINGS["policy"](
        Net(), device_mesh=mesh, sharding_strategy=ShardingStrategy[strategy], use_orig_params=use_orig_params
    )
    tokens = torch.arange(5)
    model.eval()(tokens)
    plain = Net()
    with count_collectives() as traffic:
        model.load_state_dict(plain.state_dict())
    assert traffic == {}
    torch.testing.assert_close(model(tokens), plain.eval()(tokens))


@each_form
@pytest.mark.parametrize("hook", ["pre", "post"])
@ranks(2)
def test_load_hooks_see_full_parameters(rank, world_size, hook, use_orig_params):
    seen: list[tuple[int, ...]] = []
    net = Net()
    layer = net.layers[1].up
    if hook == "pre":
        layer.register_load_state_dict_pre_hook(lambda m, *args: seen.append(tuple(m.weight.shape)))
    else:
        layer.register_load_state_dict_post_hook(lambda m, *args: seen.append(tuple(m.weight.shape)))
    model = WRAPPINGS["policy"](net, use_orig_params=use_orig_params)
    plain = Net()
    model.load_state_dict(plain.state_dict())
    assert seen == [(5, 6)]
    assert_same_state(model, plain.state_dict())


@each_form
@ranks(2)
def test_loading_a_part_that_borrows_a_tied_parameter(rank, world_size, use_orig_params):
    net = Net()
    model = by_hand(net, use_orig_params=use_orig_params)
    plain = Layer()
    with count_collectives() as traffic:
        net.layers[1].load_state_dict(plain.state_dict())
    assert traffic == {}
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(state[f"layers.1.{name}"], value.to(state[f"layers.1.{name}"].dtype)), name
    assert torch.equal(state["layers.0.down.weight"], plain.down.weight.double())
