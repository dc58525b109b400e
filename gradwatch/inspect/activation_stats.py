"""Statistics of activations over a training: mean, standard deviation, share near zero, and histograms.

As fastai's `ActivationStats` gives them, but on the host each output is walked once, in blocks that stay in the cache,
and no device is waited for before the numbers are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradwatch.inspect.hooks import Hook, Hooks, Modules, UntilRemoved, chosen
from gradwatch.reading.layouts import dense
from gradwatch.taps import nested_containers

BLOCK = 1 << 16  # elements at a time: 256 KiB of float32, which stay in a core's own cache
_ONES = np.ones(BLOCK, np.float32)
CANCELS = 1e-4
"""Variance relative to the squared mean below which it is taken once more, of the deviations: what the difference of
two sums loses to float32 stays below a hundredth of it (24 bits of which the difference takes 13)."""


class Activation(NamedTuple):
    """Statistics of one module's output in one forward call.

    `call` counts the module's calls from 0; `std` is that of a sample (n − 1, as `Tensor.std()`); `near_zero` the share
    of elements with |x| ≤ the threshold; `histogram[bins]` counts |x| in equal bins up to `ActivationStats.top` (what
    lies above is not counted), None unless asked for. NaN and Inf make `mean` and `std` so, and count in no bin.
    """

    call: int
    mean: float
    std: float
    near_zero: float
    histogram: NDArray[np.int64] | None = None


class ActivationStats(UntilRemoved):
    """Keeps statistics of the output of each of some modules, from the `with` on until it ends.

    `of[name]` lists them by module; `activation_histograms` and `activation_lines` draw them. Of an output that
    holds several tensors the first is taken.

    Args:
        modules: as in `Hooks`; of a model by default the modules without parts of their own.
        every: look at each N-th call of a module, the first included.
        with_hist: keep histograms too.
        names: patterns of module names, as in `Hooks`.
        near_zero: |x| up to which an activation counts as near zero (fastai: 0.05).
        mode: look at calls in training mode, in evaluation mode, or in both.
        bins, top: the histogram's, of |x| (fastai: 40 up to 10).
    """

    def __init__(
        self,
        modules: Modules,
        *,
        every: int = 1,
        with_hist: bool = False,
        names: str | Iterable[str] = (),
        near_zero: float = 0.05,
        mode: Literal["train", "eval", "both"] = "train",
        bins: int = 40,
        top: float = 10.0,
    ) -> None:
        if every < 1 or bins < 1 or not top > 0:
            raise ValueError(f"every={every}, bins={bins} and top={top} must be positive")
        self.every, self.with_hist, self.near_zero, self.mode = every, with_hist, near_zero, mode
        self.bins, self.top = bins, top
        self._calls: dict[str, int] = {}
        self._kept: dict[str, list[Activation | _OnDevice]] = {}
        self._names: dict[int, str] = {}
        self.kinds: dict[str, str] = {}  # class of each module
        looked_at = chosen(modules, names)
        for name, module in looked_at.items():
            self._calls[name], self._kept[name] = 0, []
            self._names[id(module)], self.kinds[name] = name, type(module).__name__
        self._hooks = Hooks(looked_at, self._look)

    @property
    def of(self) -> dict[str, list[Activation]]:
        """Statistics by module, in the order of the calls; waits for a device."""
        for kept in self._kept.values():
            kept[:] = [one if isinstance(one, Activation) else one.arrived() for one in kept]
        return {name: list(kept) for name, kept in self._kept.items()}  # type: ignore[arg-type]

    def remove(self) -> None:
        """Look at no further call; what was found stays. Idempotent."""
        self._hooks.remove()

    def awaiting(self) -> Iterable[Hook]:
        """Hooks on the modules that are looked at."""
        return self._hooks.awaiting()

    def _look(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.mode != "both" and module.training != (self.mode == "train"):
            return
        name = self._names[id(module)]
        call, self._calls[name] = self._calls[name], self._calls[name] + 1
        if call % self.every:
            return
        values = output if type(output) is Tensor else _first(output)
        if values is not None and values.numel() and not values.is_complex():
            self._kept[name].append(self._statistics(call, dense(values)))

    def _statistics(self, call: int, values: Tensor) -> Activation | _OnDevice:
        flat = values.reshape(-1)
        if flat.is_cpu:
            wide = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
            with np.errstate(
                over="ignore", invalid="ignore"
            ):  # NaN, Inf and their squares are shown, not warned of
                return _on_host(call, wide, self.near_zero, self._bins())
        flat = flat.float()
        std, mean = torch.std_mean(flat)
        size = flat.abs()
        near = (size <= self.near_zero).float().mean()
        histogram = torch.histc(size, self.bins, 0, self.top) if self.with_hist else None
        return _OnDevice(call, torch.stack((mean, std, near)), histogram)

    def _bins(self) -> tuple[int, float] | None:
        return (self.bins, self.top) if self.with_hist else None


def _first(output: Any) -> Tensor | None:
    return next((leaf for leaf in nested_containers.leaves(output) if isinstance(leaf, Tensor)), None)


class _OnDevice(NamedTuple):
    """Statistics that have not been copied from their device yet."""

    call: int
    numbers: Tensor
    histogram: Tensor | None

    def arrived(self) -> Activation:
        mean, std, near = self.numbers.tolist()
        histogram = None if self.histogram is None else self.histogram.cpu().numpy().astype(np.int64)
        return Activation(self.call, mean, std, near, histogram)


def _on_host(call: int, flat: Tensor, near_zero: float, bins: tuple[int, float] | None) -> Activation:
    """The statistics of float32[n] or float64[n] on the host, in one walk over its blocks."""
    values, n = flat.numpy(), len(flat)
    total = square = 0.0
    far = 0
    compared = np.empty(min(n, BLOCK), np.bool_)
    for block in _blocks(values):
        here = compared[: len(block)]
        total += float(np.dot(block, _ONES[: len(block)]))
        square += float(np.dot(block, block))
        # Two comparisons are faster than one of |x|, which has to be written first.
        far += int(np.count_nonzero(np.greater(block, near_zero, out=here)))
        far += int(np.count_nonzero(np.less(block, -near_zero, out=here)))
    mean, nonfinite = total / n, not np.isfinite(total)
    if nonfinite:
        far += int(np.count_nonzero(np.isnan(values)))
    variance = square / n - mean * mean
    if (
        not CANCELS * mean * mean < variance < np.inf and not nonfinite
    ):  # the square of a float32 may exceed it
        mean = sum(float(block.sum(dtype=np.float64)) for block in _blocks(values)) / n
        deviations = (block.astype(np.float64) - mean for block in _blocks(values))
        variance = sum(float(np.dot(each, each)) for each in deviations) / n
    std = float(np.sqrt(variance * n / (n - 1))) if n > 1 else float("nan")
    histogram = None if bins is None else _histogram(values, *bins, nonfinite)
    return Activation(call, mean, std, (n - far) / n, histogram)


def _histogram(values: NDArray[Any], bins: int, top: float, nonfinite: bool) -> NDArray[np.int64]:
    """Counts of |x| in equal bins up to `top`, which belongs to the last."""
    width = bins + 2  # and what lies above `top`, by one bin and by more
    pairs, counts = np.zeros(width * width, np.int64), np.zeros(width, np.int64)
    per_bin, at_top = values.dtype.type(bins / top), 0
    buffer = np.empty(min(len(values), BLOCK), values.dtype)
    for block in _blocks(values):
        if nonfinite:
            block = block[np.isfinite(block)]
        size = np.abs(block, out=buffer[: len(block)])
        at_top += int(np.count_nonzero(size == top))
        size *= per_bin
        np.minimum(size, bins + 1, out=size)
        place, half = size.astype(np.int32), len(size) // 2
        # Two elements at a time: half as many increments, which wait for each other where many fall into one bin.
        pairs += np.bincount(place[:half] * width + place[half : 2 * half], minlength=width * width)
        counts += np.bincount(place[2 * half :], minlength=width)
    both = pairs.reshape(width, width)
    counts += both.sum(0) + both.sum(1)
    counts[bins - 1] += at_top
    return counts[:bins]


def _blocks(values: NDArray[Any]) -> list[NDArray[Any]]:
    return [values[k : k + BLOCK] for k in range(0, len(values), BLOCK)]
