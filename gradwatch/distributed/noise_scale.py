"""The gradient noise scale of one step: how many local batches it takes until noise no longer outweighs the gradient.

McCandlish, Kaplan, Amodei and the OpenAI Dota Team, "An Empirical Model of Large-Batch Training" (2018), appendix A:
norms of gradients of two batch sizes give |G|² and tr(Σ) without bias. Here these are the batch of a rank and that of
all ranks, whose norms are known anyway where local norms are measured.

W ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def noise_scale(local_norms: NDArray[np.float64], mean_norm: float) -> float | None:
    """tr(Σ) / |G|² in local batches, of `local_norms[W]` and the norm of the mean of these gradients.

    With q the mean of the squares of the local norms and t² that of the mean: W (q - t²) / (W t² - q). None where
    there is only one rank, where a norm is not finite, and where noise hides the gradient (W t² <= q).
    """
    world = len(local_norms)
    local, mean = float(np.mean(np.square(local_norms))), mean_norm * mean_norm
    gradient = world * mean - local
    if world < 2 or not np.isfinite(local + mean) or gradient <= 0:
        return None
    return max(0.0, world * (local - mean) / gradient)
