"""bitsandbytes' frozen 4-bit weights below both front-ends: codes are sharded, scales whole on each rank."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import fronts
import fsdp_wrap
from bed import ranks
from bed.memory import settled_bytes
from bed.references import count_collectives
from fronts import FRONTS, each_front
from fsdp_wrap import (
    CPUOffload,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    checkpoint,
    find_nonfinite,
    iter_full_params,
)
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.comm_hooks import compress
from fsdp_wrap.weights import weight_source
from fsdp_wrap.wrap import ModuleWrapPolicy
from launch import needs

pytestmark = needs("bitsandbytes")

WIDTH, HIDDEN, BLOCKS = 64, 96, 2
CODES = WIDTH * HIDDEN // 2  # bytes of one matrix
KINDS = [*itertools.product(("nf4", "fp4"), (torch.uint8, torch.bfloat16, torch.float32), (True, False))]
FULL = StateDictOptions(full_state_dict=True)


class Block(nn.Module):
    """Two 4-bit matrices with a norm and a low-rank adapter beside them."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = linear(WIDTH, HIDDEN), linear(HIDDEN, WIDTH)
        self.into, self.back = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, HIDDEN, bias=False)
        for frozen in (self.up.bias, self.down.bias):
            frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(torch.relu(self.up(h) + self.back(self.into(h))))


def unquantised(
    kind: str = "nf4",
    storage: torch.dtype = torch.uint8,
    twice: bool = True,
    seed: int = 0,
    blocksize: int = 64,
) -> nn.Sequential:
    import bitsandbytes as bnb

    def linear(*sizes: int) -> Any:
        made = bnb.nn.Linear4bit(
            *sizes,
            quant_type=kind,
            quant_storage=storage,
            compress_statistics=twice,
            compute_dtype=torch.float32,
        )
        made.weight.blocksize = blocksize
        return made

    torch.manual_seed(seed)
    return nn.Sequential(*(Block(linear) for _ in range(BLOCKS)))


def net(*args: Any, **kwargs: Any) -> Any:
    return unquantised(*args, **kwargs).to("cpu")  # which quantises


def sharded(front: str, model: Any, **options: Any) -> Any:
    return fronts.shard(front, model, ModuleWrapPolicy({Block}), **options)


def inputs(parts: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(parts, 4, WIDTH, generator=torch.Generator().manual_seed(seed))


def numbers(weight: Any) -> torch.Tensor:
    """Returns what the codes of a weight mean; other parameters as they are."""
    import bitsandbytes as bnb

    if not hasattr(weight, "quant_state"):
        return weight.detach()
    return bnb.functional.dequantize_4bit(weight.data, weight.quant_state)


def held_bytes(model: nn.Module) -> int:
    """Returns the bytes of this rank's parts of the 4-bit weights, and of nothing else."""
    weights = [module.weight for module in model.modules() if _is_4bit(module)]
    local = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def _is_4bit(module: nn.Module) -> bool:
    import bitsandbytes as bnb

    return isinstance(module, bnb.nn.Linear4bit)


@pytest.mark.parametrize("kind, storage, twice", KINDS)
@ranks(2)
def test_training_of_adapters_equals_a_plain_model(rank, world_size, kind, storage, twice):
    for front in FRONTS:
        plain, model = (
            net(kind, storage, twice),
            sharded(front, net(kind, storage, twice), shared_memory=False),
        )
        optimizers = [
            torch.optim.SGD([param for param in module.parameters() if param.requires_grad], 0.1)
            for module in (plain, model)
        ]
        for step in range(3):
            x = inputs(world_size, step)
            wanted = [plain(part) for part in x]
            (sum(output.square().mean() for output in wanted) / world_size).backward()
            with count_collectives(objects=False) as traffic:
                output = model(x[rank])
            output.square().mean().backward()
            if step == 0:
                assert torch.equal(output, wanted[rank])
            torch.testing.assert_close(output, wanted[rank], rtol=1e-5, atol=1e-6)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        of_codes = BLOCKS * 2 * CODES
        beside = sum(4 * param.numel() for param in plain.parameters() if param.dtype == torch.float32)
        beside -= of_codes if storage == torch.float32 else 0
        assert held_bytes(model) == of_codes // world_size
        padding = BLOCKS * 16 * 16 * world_size
        assert of_codes + beside <= traffic["all_gather_into_tensor"].bytes <= of_codes + beside + padding
        output = model(x[rank])
        twin = copy.deepcopy(model)
        assert torch.equal(twin(x[rank]), output)
        assert torch.equal(model.eval()(x[rank]), output)  # bitsandbytes repacks plain ones for the processor


@each_front
@ranks(4)
def test_full_parameters_and_state_dicts_have_what_a_plain_model_has(rank, world_size, front):
    import bitsandbytes as bnb

    plain, model = net(), sharded(front, net())
    wanted = plain.state_dict()
    state: dict[str, Any] = get_model_state_dict(model, options=FULL)
    assert list(state) == list(wanted)
    for name, value in wanted.items():
        same = state[name][: len(value)] if "bitsandbytes__" in name else state[name]
        assert torch.equal(same, value), name
    for name, param in iter_full_params(model):
        whole = plain.get_parameter(name)
        assert type(param) is type(whole) or not isinstance(whole, bnb.nn.Params4bit)
        assert torch.equal(numbers(param), numbers(whole)), name
    if front != "composable":
        with FSDP.summon_full_params(model, writeback=False):
            weight = model[1].up.weight
            assert type(weight) is bnb.nn.Params4bit and torch.equal(
                numbers(weight), numbers(plain[1].up.weight)
            )
    other, x = sharded(front, net(seed=1)), inputs(1)[0]
    assert not torch.equal(other(x), plain(x))
    set_model_state_dict(other, state, options=FULL)
    assert torch.equal(other(x), plain(x))


@each_front
@ranks(4)
def test_checkpoints_are_loaded_by_other_numbers_of_ranks(rank, world_size, front, tmp_path):
    model, x = sharded(front, net()), inputs(1)[0]
    alone = DeviceMesh.from_group(dist.new_group([rank], use_local_synchronization=True), "cpu")
    options = {"mesh": alone} if front == "composable" else {"device_mesh": alone}
    dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path / "dcp")
    other = fronts.shard(front, net(seed=1), ModuleWrapPolicy({Block}), **options)
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_model_state_dict(other, state)
    assert torch.equal(other(x), model(x))
    checkpoint.save(tmp_path / "own", model)
    again = sharded(front, net(seed=2))
    checkpoint.load(tmp_path / "own", again)
    assert torch.equal(again(x), model(x))
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))["parts"]
    by_two = {"mesh": pair} if front == "composable" else {"device_mesh": pair}
    half = fronts.shard(front, net(seed=3), ModuleWrapPolicy({Block}), **by_two)
    state = get_model_state_dict(half)
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_model_state_dict(half, state)
    assert torch.equal(half(x), model(x))


@pytest.mark.shows("refused: a checkpoint quantised in another way")
@each_front
@ranks(2)
def test_codes_of_another_kind_are_refused(rank, world_size, front):
    for other, said in (
        (net("fp4"), "kind mismatch for 0.up.weight: the checkpoint has kind fp4, and the model kind nf4"),
        (net(blocksize=128), "0.up.weight: the checkpoint has block size 128, and the model block size 64"),
        (net(twice=False), "0.up.weight: the checkpoint has nested block size None, and the model .* 256"),
    ):
        model = sharded(front, net())
        before = [
            value.detach().clone() for name, value in iter_full_params(model) if name.endswith("p.weight")
        ]
        with pytest.raises(RuntimeError, match=said):
            set_model_state_dict(model, other.state_dict(), options=FULL)
        after = [value for name, value in iter_full_params(model) if name.endswith("p.weight")]
        assert all(map(torch.equal, before, after))
    model = sharded(front, net())
    state = {name: value for name, value in net(seed=1).state_dict().items() if not name.endswith("absmax")}
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*0.up.weight.absmax"):
        set_model_state_dict(model, state, options=FULL)


@each_front
@ranks(2)
def test_codes_are_not_cast_by_mixed_precision(rank, world_size, front):
    model: Any = net(storage=torch.bfloat16)
    if front == "composable":
        model = sharded(
            front, model, mp_policy=MixedPrecisionPolicy(torch.float16, cast_forward_inputs=False)
        )
    else:
        model = sharded(front, model, mixed_precision=MixedPrecision(torch.float16))
    wanted = net(storage=torch.bfloat16)
    for block in wanted:
        for layer in (block.norm, block.into, block.back):
            layer.half()
        block.up.bias.data, block.down.bias.data = block.up.bias.data.half(), block.down.bias.data.half()
    x = inputs(1)[0].half()
    assert torch.equal(model(x), wanted(x))


@each_front
@ranks(2)
def test_codes_are_not_compressed(rank, world_size, front):
    """Their dtype is that of a storage, not of numbers; what is beside them is small, and stays exact too."""
    for storage in (torch.uint8, torch.bfloat16, torch.float32):
        model = fronts.shard(front, net(storage=storage), ModuleWrapPolicy({nn.Sequential}))
        compress(model, gathers="int8")
        x = inputs(1)[0]
        assert torch.equal(model(x), net(storage=storage)(x)), storage


@pytest.mark.parametrize("front", FRONTS[:2])
@ranks(2)
def test_values_of_the_first_rank_are_sent_with_their_scales(rank, world_size, front):
    model, x = sharded(front, net(seed=rank), sync_module_states=True), inputs(1)[0]
    assert torch.equal(model(x), net(seed=0)(x))


@pytest.mark.shows("refused: weights that train, have no values, or were repacked")
@each_front
@ranks(2)
def test_what_cannot_be_sharded_raises_an_error_that_names_it(rank, world_size, front):
    with torch.device("meta"):
        empty = unquantised()
    trains = net(storage=torch.bfloat16)
    trains[0].up.weight.requires_grad_(True)
    import bitsandbytes as bnb

    eight = net()
    eight[0].up = bnb.nn.Linear8bitLt(WIDTH, HIDDEN, has_fp16_weights=False).to("cpu")
    packed = net()
    packed[0].up.weight.quant_state.packing_format_for_cpu = True
    for model, said in (
        (empty, "'(0.)?up.weight' is a Params4bit on the meta device"),
        (trains, "'(0.)?up.weight' is a Params4bit that requires gradients"),
        (unquantised(), "'(0.)?up.weight' is a Params4bit that is not quantised yet"),
        (packed, "'(0.)?up.weight' was repacked"),
        (eight, "'(0.)?up.weight' is a Int8Params.*load_in_4bit.*torchao"),
    ):
        with pytest.raises((ValueError, TypeError), match=said):
            sharded(front, model)
        assert type(model) is nn.Sequential and type(model[0]) is Block


@pytest.mark.shows("refused: unfreezing and casting codes")
@pytest.mark.parametrize("front", FRONTS[1:])
@ranks(2)
def test_codes_are_neither_trained_nor_cast(rank, world_size, front):
    model, x = sharded(front, net(storage=torch.bfloat16)), inputs(1)[0]
    with pytest.raises(ValueError, match=f"'(0.)?up.weight' cannot go from .*rank {rank}.*nf4"):
        model.to(torch.float16)
    model[0].up.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=f"'0.up.weight' was made to require gradients .on rank {rank}"):
        model(x)
    model[0].up.weight.requires_grad_(False)
    assert torch.equal(model(x), net(storage=torch.bfloat16)(x))


class Unquantised(Block):
    def __init__(self) -> None:
        super().__init__(nn.Linear)


def quantise(layer: nn.Module) -> nn.Module:
    """Puts 4-bit matrices in the place of those with a bias."""
    import bitsandbytes as bnb

    for name, linear in [*layer.named_modules()]:
        if isinstance(linear, nn.Linear) and linear.bias is not None:
            made = bnb.nn.Linear4bit(
                linear.in_features,
                linear.out_features,
                quant_type="nf4",
                compute_dtype=torch.float32,
                device="meta",
            )
            values = linear.weight.detach()
            made.weight = bnb.nn.Params4bit(values, requires_grad=False, quant_type="nf4", module=made)
            made.bias = linear.bias.requires_grad_(False)
            layer.set_submodule(name, made)
    return layer.to("cpu")


@each_front
@ranks(2)
def test_units_are_quantised_one_by_one_from_full_precision(rank, world_size, front):
    torch.manual_seed(0)
    stored = nn.Sequential(*(Unquantised() for _ in range(BLOCKS))).state_dict()
    with torch.device("meta"):
        model: Any = nn.Sequential(*(Unquantised() for _ in range(BLOCKS)))
    for index, block in enumerate(model):
        names = block.state_dict()
        block.load_state_dict({name: stored[f"{index}.{name}"].clone() for name in names}, assign=True)
        model[index] = fronts.shard(front, quantise(block))
    model = fronts.shard(front, model)
    plain: Any = nn.Sequential(*(Unquantised() for _ in range(BLOCKS)))
    plain.load_state_dict(stored)
    x = inputs(1)[0]
    assert torch.equal(model(x), nn.Sequential(*map(quantise, plain))(x))
    assert held_bytes(model) == BLOCKS * 2 * CODES // world_size


@pytest.mark.parametrize("front", FRONTS[:2])
@ranks(2)
def test_an_initialising_function_may_quantise(rank, world_size, front):
    import bitsandbytes as bnb

    stored, x = unquantised().state_dict(), inputs(1)[0]
    with torch.device("meta"):
        empty = unquantised()
    names = {module: name for name, module in empty.named_modules()}

    def load(module: nn.Module) -> None:
        for name, param in [*module.named_parameters(recurse=False)]:
            value = stored[f"{names[module]}.{name}"]
            if isinstance(param, bnb.nn.Params4bit):
                options = {**vars(param), "module": module}
                made = bnb.nn.Params4bit(value, requires_grad=False, **options).to("cpu")
            else:
                made = nn.Parameter(value.clone(), param.requires_grad)
            module.register_parameter(name, made)

    model = sharded(front, empty, param_init_fn=load)
    assert torch.equal(model(x), net()(x))


@each_front
@ranks(2)
def test_exports_have_the_numbers_that_codes_mean(rank, world_size, front, tmp_path):
    from safetensors.torch import load_file

    for storage in (torch.uint8, torch.bfloat16):
        plain, model = net(storage=storage), sharded(front, net(storage=storage))
        wanted = {name: numbers(param) for name, param in plain.named_parameters()}
        for dtype in (None, torch.bfloat16):
            source = weight_source(model, dtype=dtype)
            exported = dict(source)
            assert [meta[1:] for meta in source.metadata()] == [
                (value.dtype, tuple(value.shape)) for value in exported.values()
            ]
            assert list(exported) == list(wanted)
            for name, value in wanted.items():
                assert torch.equal(exported[name], value if dtype is None else value.to(dtype)), name
        checkpoint.export_safetensors(model, tmp_path / str(storage))
        dist.barrier()
        saved = load_file(tmp_path / str(storage) / "model.safetensors")
        assert all(torch.equal(saved[name], value) for name, value in wanted.items())


MORE: dict[str, Any] = {
    "replicas": {"sharding_strategy": ShardingStrategy.HYBRID_SHARD},
    "kept": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "offloaded": {"cpu_offload": CPUOffload(True)},
}


@pytest.mark.parametrize("how", MORE)
@each_front
@ranks(4)
def test_options_of_both_front_ends(rank, world_size, front, how):
    options = dict(MORE[how])
    if how == "replicas":
        options["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
    plain, model = net(storage=torch.bfloat16), sharded(front, net(storage=torch.bfloat16), **options)
    for part in inputs(world_size):
        (plain(part).square().mean() / world_size).backward()
    model(inputs(world_size)[rank]).square().mean().backward()
    parts = 2 if how == "replicas" else world_size
    grads, wanted = fronts.full_grads(model), dict(plain.named_parameters())
    trained = {name: param.grad for name, param in wanted.items() if param.grad is not None}
    fronts.assert_tensors({name: grads[name] for name in trained}, trained, rtol=1e-5, atol=1e-7)
    x = inputs(1, 1)[0]
    assert torch.equal(model(x), plain(x))
    model.state_dict()  # which reshards
    assert held_bytes(model) == BLOCKS * 2 * CODES // parts


@each_front
@ranks(2)
def test_codes_are_not_taken_for_numbers_that_are_not_finite(rank, world_size, front):
    for storage in (torch.bfloat16, torch.float32):
        plain = net(storage=storage)
        assert plain[0].up.weight.isnan().any(), "codes that read as NaN"
        model = sharded(front, net(storage=storage))
        with find_nonfinite(model):
            model(inputs(1)[0]).sum().backward()


def planned() -> Any:
    model = sharded("composable", net())
    optimizer = torch.optim.AdamW(param for param in model.parameters() if param.requires_grad)

    def step() -> None:
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def at_rest(rank: int, world_size: int, port: int) -> int:
    """Returns the bytes of tensors that are alive between steps."""
    dist.init_process_group("gloo", f"tcp://localhost:{port}", rank=rank, world_size=world_size)
    try:
        net()  # tables of bitsandbytes, which stay
        before = settled_bytes()
        model, optimizer, step = planned()
        step()
        nbytes = settled_bytes() - before
        del model, optimizer, step
        return nbytes
    finally:
        dist.destroy_process_group()


def test_a_plan_has_the_memory_that_is_measured(run):
    net()
    plan = fsdp_wrap.plan(planned, ranks=2)
    for nbytes in run(at_rest):
        assert abs(nbytes - plan.rest_bytes) <= 0.02 * plan.rest_bytes, (nbytes, plan.rest_bytes)
