"""What tests of Lightning share: a module, its data, and fitting it as a user does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from models import Transformer, loss_of, tokens

STEPS = 4


def fit(
    devices: int,
    strategy: Any,
    folder: str,
    resume: str | None,
    shard: Callable[..., None] | None,
    **options: Any,
) -> tuple[list[float], list[float]]:
    """Fits, with evaluations in between; returns the losses of both.

    Args:
        devices: The number of ranks.
        strategy: As the trainer takes it.
        folder: Where checkpoints go.
        resume: The path of a checkpoint.
        shard: What the module does to its model, given that and the mesh of the ranks.
        options: The trainer's others.
    """
    import lightning.pytorch as lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=STEPS,
        val_check_interval=2,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=2)],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        **options,
    )
    module = _module(lightning, shard)
    trainer.fit(module, _loader(), _loader(), ckpt_path=resume)
    return module.losses, module.evaluated


def _loader() -> torch.utils.data.DataLoader:
    data = torch.cat([tokens(rank, step) for step in range(STEPS) for rank in range(2)])
    return torch.utils.data.DataLoader(data, batch_size=2)  # type: ignore[arg-type]


def _module(lightning: Any, shard: Callable[..., None] | None) -> Any:
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.losses, self.evaluated = [], []

        def configure_model(self):
            torch.manual_seed(0)
            self.model = Transformer()
            if shard is not None:
                shard(self.model, self.device_mesh["data_parallel"])

        def training_step(self, batch):
            loss = loss_of(self.model, batch)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch):
            self.evaluated.append(loss_of(self.model, batch).item())

        def configure_optimizers(self):
            return torch.optim.AdamW(self.trainer.model.parameters(), lr=1e-2)

    return Module()
