"""accelerate's `ParallelismConfig`, unmodified: FSDP2 over a model with tensor parallelism.

torch's `parallelize_module` cuts it on accelerate's mesh: transformers 5.23 takes none for its own plans.
accelerate 1.15 calls transformers' `ReplicateParallel` for all that is not cut, which transformers 5.23 does
not have any more; `_Replicated` takes its place.
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch

from launch import client_rank, needs, open_to_cpu, require_units
from tiny_models import LENGTH, VOCABULARY, llama

pytestmark = needs("accelerate", "transformers")

WORLD_SIZE, STEPS = 4, 3


class _Replicated:
    """Lets a module compute with parameters that are the same on all ranks."""

    def prepare_module_tp(self, module, mesh):
        from torch.distributed.tensor import DTensor, Replicate

        def enter(_, given):
            return tuple(
                DTensor.from_local(each, mesh, [Replicate()], run_check=False) if _is_plain(each) else each
                for each in given
            )

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(lambda _, given, found: found.to_local())


def _is_plain(value):
    from torch.distributed.tensor import DTensor

    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor)


def _cut(model, mesh):
    """Cuts attention and MLP of each layer by rows and columns."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan: Any = dict.fromkeys(columns, ColwiseParallel()) | dict.fromkeys(
        ("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel()
    )
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)


def _accelerator(checkpointing):
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.parallelism_config import ParallelismConfig

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        activation_checkpointing=checkpointing,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    parallelism = ParallelismConfig(dp_shard_size=2, tp_size=2)
    return Accelerator(parallelism_config=parallelism, fsdp_plugin=plugin)


def _texts():
    """Returns batches of one text for each of the two that share a model."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, VOCABULARY, (2 * STEPS, LENGTH), generator=generator)


def _train(rank, world_size, port, ours, checkpointing):
    """Returns loss and norm of each step, and the weights at the end."""
    with client_rank(rank, port, ours, True, WORLD_SIZE), contextlib.ExitStack() as stack:
        if not ours:
            open_to_cpu(stack)
        from transformers.integrations import tensor_parallel

        stack.enter_context(mock.patch.object(tensor_parallel, "ReplicateParallel", _Replicated, create=True))
        accelerator = _accelerator(checkpointing)
        model = llama()
        _cut(model, accelerator.torch_device_mesh["tp"])
        loader = torch.utils.data.DataLoader(_texts(), batch_size=1)  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        require_units(model, "fsdp_wrap" if ours else "torch")
        _require_two_dimensions(model)
        log = []
        for batch in loader:
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            log.append(
                (loss.item(), norm.full_tensor().item() if hasattr(norm, "full_tensor") else norm.item())
            )
        return log, {name: value.detach().full_tensor() for name, value in model.named_parameters()}


def _require_two_dimensions(model):
    """Projections are cut by both."""
    cut = model.model.layers[0].mlp.up_proj.weight
    assert cut.device_mesh.ndim == 2 and not any(each.is_replicate() for each in cut.placements)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_fsdp2_with_tensor_parallelism_equals_torchs(run, checkpointing):
    torchs, ours = (run(_train, each, checkpointing) for each in (False, True))
    assert len({loss for loss, _ in torchs[0][0]}) == STEPS and all(norm > 0 for _, norm in torchs[0][0])
    torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-6)
