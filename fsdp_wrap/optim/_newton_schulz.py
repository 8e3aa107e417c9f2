"""The orthogonal factor of matrices by Newton-Schulz iterations, as Muon uses it."""

from __future__ import annotations

from collections.abc import Callable

import torch

Coefficients = tuple[float, float, float]


def orthogonalized(
    matrices: torch.Tensor, coefficients: Coefficients, steps: int, eps: float
) -> torch.Tensor:
    """Orthogonalizes matrices by Newton-Schulz: singular values become about one, singular vectors stay.

    Each step takes X to aX + b(XX')X + c(XX')(XX')X, in the dtype of the matrices. After Keller Jordan,
    "Muon: An optimizer for hidden layers in neural networks" (2024).

    Args:
        matrices: Number x rows x columns; they are overwritten.
        coefficients: a, b and c.
        steps: Number of iterations.
        eps: Least norm by which a matrix is divided at first.
    """
    if matrices.shape[0] == 1:  # as a single product, which has the bits of torch's
        return _iterated(matrices[0], coefficients, steps, eps).unsqueeze(0)
    return _iterated(matrices, coefficients, steps, eps)


def _iterated(x: torch.Tensor, coefficients: Coefficients, steps: int, eps: float) -> torch.Tensor:
    a, b, c = coefficients
    add_product: Callable[..., torch.Tensor] = torch.addmm if x.dim() == 2 else torch.baddbmm
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x.div_(_norms(x).clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _norms(x: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = x.norm() if x.dim() == 2 else x.norm(dim=(-2, -1), keepdim=True)
    return norms
