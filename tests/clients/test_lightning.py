"""Lightning's `FSDPStrategy`, unmodified, on our wrapper: the losses of its DDP, checkpoints, resuming."""

from __future__ import annotations

import pytest
import torch

from fronts import each_form
from launch import client_rank, needs
from lightning_runs import STEPS, fit
from models import Block

pytestmark = needs("lightning")


def _fit(rank, world_size, port, wrapped, folder, options=None, resume=None):
    """Fits as a user of Lightning does, with evaluations in between; returns the losses of both."""
    with client_rank(rank, port, wrapped):
        from lightning.pytorch.strategies import FSDPStrategy

        strategy = FSDPStrategy(auto_wrap_policy={Block}, **(options or {})) if wrapped else "ddp"
        return fit(world_size, strategy, folder, resume, None)


@each_form
def test_fitting_equals_lightnings_ddp(run, tmp_path, use_orig_params):
    expected = run(_fit, False, str(tmp_path))
    found = run(_fit, True, str(tmp_path), {"use_orig_params": use_orig_params})
    assert len(expected[0][0]) == STEPS
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["full", "sharded"])
@each_form
def test_resuming_equals_lightnings_ddp(run, tmp_path, use_orig_params, kind):
    """The loader starts anew in the middle of an epoch, in Lightning's DDP as well."""
    options = {"use_orig_params": use_orig_params, "state_dict_type": kind}
    run(_fit, False, str(tmp_path / "ddp"))
    expected = run(_fit, False, str(tmp_path), {}, str(tmp_path / "ddp" / "step=2.ckpt"))
    run(_fit, True, str(tmp_path / kind), options)
    found = run(_fit, True, str(tmp_path), options, str(tmp_path / kind / "step=2.ckpt"))
    assert [len(losses) for losses, _ in found] == [STEPS - 2] * 2
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@each_form
def test_ddp_reads_our_full_checkpoint_and_we_read_ddps(run, tmp_path, use_orig_params):
    """Model and optimizer."""
    options = {"use_orig_params": use_orig_params}
    results = []
    for saved_by, resumed_by in ((False, True), (True, False)):
        folder = tmp_path / str(saved_by)
        run(_fit, saved_by, str(folder), options)
        results.append(run(_fit, resumed_by, str(tmp_path), options, str(folder / "step=2.ckpt")))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-5)
