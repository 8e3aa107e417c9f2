"""What a user of torchtune writes himself and names in its configuration: here a tokenizer and data."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from tiny_models import LENGTH, VOCABULARY


class Numbers:
    """Stands for a tokenizer: the data are tokens already."""

    pad_id = 0


class Texts(Dataset):  # type: ignore[type-arg]
    """Seeded tokens of several lengths."""

    def __init__(self, tokenizer: Numbers, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        generator = torch.Generator().manual_seed(index)
        length = LENGTH - index % 3
        tokens = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        return {"tokens": tokens, "labels": tokens}
