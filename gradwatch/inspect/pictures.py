"""Pictures by matplotlib (`pip install "gradwatch[plot]"`), each a `matplotlib.figure.Figure` to show or to save."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from gradwatch.errors import GradwatchError
from gradwatch.inspect.activation_stats import ActivationStats
from gradwatch.inspect.step_profile import StepProfile
from gradwatch.inspect.update_ratios import UpdateRatios
from gradwatch.runtime.optional_dependencies import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEALTHY_RATIO = 1e-3
"""The update ratio drawn as a line for orientation; Karpathy's rule of thumb, "roughly 1e-3"."""
_WIDE, _WIDEST = 7.0, 30.0  # inches
_NAMED = 16  # lines in a legend


def activation_histograms(stats: ActivationStats, columns: int | None = None) -> Figure:
    """Each module's histogram of |activation| over its calls as one image: a column for a call, zero at the bottom.

    The "colourful dimension" of fastai: log(1 + count). Bands that collapse to the bottom line are units dying, or an
    activation that vanishes.

    Raises:
        GradwatchError: nothing was looked at, or without `with_hist=True`.
    """
    found = {
        name: [one.histogram for one in seen if one.histogram is not None] for name, seen in stats.of.items()
    }
    found = {name: histograms for name, histograms in found.items() if histograms}
    if not found:
        raise GradwatchError(
            "no histogram to draw: ActivationStats(…, with_hist=True), and a forward in its mode"
        )
    columns = columns or (3 if len(found) <= 12 else math.ceil(math.sqrt(len(found))))
    figure, axes = _grid(len(found), columns)
    for (name, histograms), axis in zip(found.items(), axes, strict=True):
        image = np.log1p(np.stack(histograms, axis=1))
        extent = (-0.5, len(histograms) - 0.5, 0.0, stats.top)
        axis.imshow(image, origin="lower", aspect="auto", extent=extent, interpolation="nearest")
        axis.set_title(f"{name} · {stats.kinds[name]}", fontsize=9)
        axis.set_xlabel(_calls(stats), fontsize=8)
        axis.set_ylabel("|activation|", fontsize=8)
    return figure


def activation_lines(stats: ActivationStats) -> Figure:
    """Mean, standard deviation and share near zero of every module over its calls.

    Raises:
        GradwatchError: nothing was looked at.
    """
    found = {name: seen for name, seen in stats.of.items() if seen}
    if not found:
        raise GradwatchError("nothing to draw: no module was called in the mode of these ActivationStats")
    figure, axes = _grid(3, 3)
    titles = ("mean", "standard deviation", f"share with |x| ≤ {stats.near_zero:g}")
    for axis, title, field in zip(axes, titles, ("mean", "std", "near_zero"), strict=True):
        for name, seen in found.items():
            axis.plot([one.call for one in seen], [getattr(one, field) for one in seen], label=name, lw=1)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("call", fontsize=8)
    axes[-1].set_ylim(-0.02, 1.02)
    _legend(figure, axes[0])
    return figure


def feature_maps(values: Tensor, columns: int = 8, title: str = "") -> Figure:
    """Each channel of a tensor [channels, height, width], or of the first of a batch [n, …], as a grey image.

    Raises:
        GradwatchError: the tensor has another number of dimensions.
    """
    values = values.detach().float().cpu()
    maps = values[0] if values.dim() == 4 else values
    if maps.dim() != 3:
        raise GradwatchError(
            f"feature maps are [n, channels, height, width], and this is {list(values.shape)}"
        )
    figure, axes = _grid(len(maps), columns, size=1.0)
    for axis, one in zip(axes, maps, strict=True):
        axis.imshow(one.numpy(), cmap="gray")
        axis.set_axis_off()
    figure.suptitle(title, fontsize=9)
    return figure


def phase_bars(profile: StepProfile, most: int = 20) -> Figure:
    """CPU milliseconds a step of the longest labelled phases; what a watch does is drawn in another colour."""
    phases = [one for one in profile.phases if one.label != "step"][:most]
    figure, (axis,) = _grid(1, 1, integers=False)
    colours = ["tab:orange" if one.label.startswith("gradwatch") else "tab:blue" for one in phases]
    times = [one.cpu_us / 1e3 / profile.steps for one in phases]
    axis.barh(np.arange(len(phases)), times, color=colours)
    axis.set_yticks(np.arange(len(phases)), [one.label for one in phases], fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("ms of CPU a step, parts included", fontsize=8)
    return figure


def gradient_flow(gradients: nn.Module | Mapping[str, Tensor | None], title: str = "") -> Figure:
    """Mean and largest |gradient| of each parameter, in the model's order, on a log scale.

    `gradients`: a model whose `.grad` is drawn, or gradients by name (`hook_gradients(model).stored`). A parameter
    without a gradient is marked "no gradient", one with a NaN or Inf "not finite"; neither is drawn as a zero.

    Raises:
        GradwatchError: there is no parameter.
    """
    if isinstance(gradients, nn.Module):
        gradients = {name: param.grad for name, param in gradients.named_parameters()}
    if not gradients:
        raise GradwatchError("no gradient to draw: the model has no parameter")
    figure, (axis,) = _grid(1, 1, width=min(max(_WIDE, 0.35 * len(gradients)), _WIDEST))
    means, largest, notes = [], [], []
    for k, grad in enumerate(gradients.values()):
        size = None if grad is None else grad.detach().float().abs()
        finite = size is not None and bool(size.isfinite().all())
        means.append(float(size.mean()) if finite and size is not None else math.nan)
        largest.append(float(size.max()) if finite and size is not None else math.nan)
        if not finite:
            notes.append((k, "no gradient" if grad is None else "not finite"))
    places = np.arange(len(gradients))
    axis.plot(places, np.where(np.array(largest) > 0, largest, np.nan), "o-", lw=1, ms=3, label="largest")
    axis.plot(places, np.where(np.array(means) > 0, means, np.nan), "o-", lw=1, ms=3, label="mean")
    zeros = [k for k, size in enumerate(largest) if size == 0]
    notes += [(k, "all zero") for k in zeros]
    axis.set_yscale("log")
    for k, note in notes:
        axis.text(
            k,
            0.02,
            note,
            rotation=90,
            fontsize=7,
            ha="center",
            va="bottom",
            color="tab:red",
            transform=axis.get_xaxis_transform(),
        )
    shown = slice(None, None, max(1, math.ceil(0.15 * len(gradients) / _WIDEST)))  # names that have room
    axis.set_xticks(places[shown], list(gradients)[shown], rotation=90, fontsize=7)
    axis.set_xlim(-0.5, len(gradients) - 0.5)
    axis.set_ylabel("|gradient|", fontsize=8)
    axis.set_title(title or "gradient flow, from the input to the loss", fontsize=9)
    axis.legend(fontsize=8)
    return figure


def update_ratios(ratios: UpdateRatios, *, matrices_only: bool = False) -> Figure:
    """log10(‖Δw‖ / ‖w‖) of every parameter over the steps, with a dashed line at 1e-3.

    Raises:
        GradwatchError: no step was seen.
    """
    found = {name: seen for name, seen in ratios.of.items() if seen}
    if matrices_only:
        found = {name: seen for name, seen in found.items() if ratios.dims[name] > 1}
    if not found:
        raise GradwatchError("no update ratio to draw: no optimizer of this model took a step")
    figure, (axis,) = _grid(1, 1)
    for name, seen in found.items():
        values = np.array([ratio for _, ratio in seen])
        with np.errstate(divide="ignore"):
            axis.plot([step for step, _ in seen], np.log10(values), lw=1, label=name)
    axis.axhline(math.log10(HEALTHY_RATIO), color="black", ls="--", lw=1)
    axis.set_xlabel("step", fontsize=8)
    axis.set_ylabel("log10(‖Δw‖ / ‖w‖)", fontsize=8)
    _legend(figure, axis)
    return figure


def _grid(
    count: int, columns: int, width: float = _WIDE, size: float | None = None, integers: bool = True
) -> tuple[Figure, list[Any]]:
    """A figure of its own, with nothing registered in pyplot: a script that has a backend keeps it."""
    require("matplotlib", "plot")
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    columns = min(count, columns)
    rows = -(-count // columns)
    if size is not None:  # of a square, in inches
        inches = (size * columns, size * rows + 0.3)
    else:
        inches = (max(width, 3.2 * columns), 2.6 * rows if count > 1 else 4.0)
    figure = Figure(figsize=inches, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for axis in axes[count:]:
        axis.set_axis_off()
    for axis in axes:
        axis.tick_params(labelsize=7)
        axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=integers))
    return figure, axes[:count]


def _legend(figure: Figure, axis: Any) -> None:
    """A legend below; of many lines the first ones, and how many more there are."""
    handles, labels = axis.get_legend_handles_labels()
    if len(labels) > _NAMED:
        labels = [*labels[: _NAMED - 1], f"and {len(labels) - _NAMED + 1} more"]
        handles = handles[:_NAMED]
    figure.legend(handles, labels, loc="outside lower center", fontsize=7, ncols=4)


def _calls(stats: ActivationStats) -> str:
    return "call" if stats.every == 1 else f"every {stats.every}th call"
