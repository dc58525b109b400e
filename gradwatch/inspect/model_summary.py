"""Output sizes and parameters of a model, and a table of its layers with their FLOPs."""

from __future__ import annotations

import html
import io
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from gradwatch.inspect.hooks import Hooks
from gradwatch.taps import nested_containers

Shapes = tuple[tuple[int, ...], ...]
COLUMNS = ("layer", "type", "output", "parameters", "trainable", "dtype", "device", "MFLOPs")


class ParamCount(NamedTuple):
    """Elements of a model's parameters, each counted once; `uninitialized` lazy parameters have no size yet."""

    total: int
    trainable: int
    frozen: int
    bytes: int
    uninitialized: int = 0


class LayerInfo(NamedTuple):
    """One module: its own parameters (those of its parts are theirs), and what its last call made.

    `flops` are those of torch's `FlopCounterMode` in one forward (a multiplication and an addition are two), of matrix
    products and convolutions; None where the module has parts. `output` is empty for a module that was not called.
    """

    name: str
    kind: str
    output: Shapes
    params: int
    trainable: int
    dtype: str
    device: str
    flops: int | None


def total_params(model: nn.Module) -> ParamCount:
    """Count the parameters of a model, shared ones once."""
    total = trainable = size = lazy = 0
    for param in model.parameters():
        if isinstance(param, nn.UninitializedParameter):
            lazy += 1
            continue
        total += param.numel()
        trainable += param.numel() * param.requires_grad
        size += param.numel() * param.element_size()
    return ParamCount(total, trainable, total - trainable, size, lazy)


def model_sizes(model: nn.Module, *args: Any, names: str = "", **kwargs: Any) -> dict[str, Shapes]:
    """Shapes of the tensors that each module puts out in one forward of `model(*args, **kwargs)`, by name.

    The modules without parts of their own, or those whose name matches the pattern `names`. The model runs once as in
    evaluation, without a graph; its modes, buffers and torch's random state are put back.
    """
    hooks = Hooks(model, _shapes, names=names or ())
    try:
        with _tried_out(model):
            model(*args, **kwargs)
    finally:
        hooks.remove()
    return {name: shapes or () for name, shapes in hooks.stored.items()}


def layer_info(model: nn.Module, *args: Any, **kwargs: Any) -> list[LayerInfo]:
    """One line for each module of a model, in the order of `named_modules()`; runs it once as `model_sizes` does."""
    modules = dict(model.named_modules())
    counter = FlopCounterMode(display=False)
    hooks = Hooks(modules, _shapes)
    try:
        with _tried_out(model), counter:
            model(*args, **kwargs)
    finally:
        hooks.remove()
    flops = counter.get_flop_counts()
    whole, seen, layers = type(model).__name__, set[int](), []
    for name, module in modules.items():
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        seen.update(map(id, own))
        sized = [p for p in own if not isinstance(p, nn.UninitializedParameter)]
        counted = flops.get(f"{whole}.{name}" if name else whole, {})
        layers.append(
            LayerInfo(
                name or whole,
                type(module).__name__,
                hooks[name].stored or (),
                sum(p.numel() for p in sized),
                sum(p.numel() for p in sized if p.requires_grad),
                _all_of({str(p.dtype).removeprefix("torch.") for p in own}),
                _all_of({str(p.device) for p in own}),
                None if any(module.children()) else sum(counted.values()),
            )
        )
    return layers


class ModelSummary:
    """A table of a model's layers: text by `print`, HTML in a notebook, and `layers` and `count` to read."""

    def __init__(self, layers: list[LayerInfo], count: ParamCount, flops: int) -> None:
        self.layers, self.count, self.flops = layers, count, flops

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The cells of each line of the table, under `COLUMNS`."""
        for one in self.layers:
            yield (
                one.name,
                one.kind,
                ", ".join("×".join(map(str, shape)) or "scalar" for shape in one.output) or "not called",
                f"{one.params:,}" if one.params else "",
                "" if not one.params else "all" if one.trainable == one.params else f"{one.trainable:,}",
                one.dtype,
                one.device,
                "" if not one.flops else f"{one.flops / 1e6:,.2f}",
            )

    @property
    def total(self) -> str:
        """The last line: parameters, memory and FLOPs of the whole model."""
        count = self.count
        lazy = f", {count.uninitialized} of no size yet" if count.uninitialized else ""
        return (
            f"{count.total:,} parameters ({count.trainable:,} trainable, {count.frozen:,} frozen{lazy}), "
            f"{count.bytes / 2**20:,.1f} MiB, {self.flops / 1e6:,.2f} MFLOPs a forward"
        )

    def __rich__(self) -> Any:
        """Table as rich draws it."""
        from rich.table import Table
        from rich.text import Text

        table = Table(caption=Text(self.total), caption_justify="left")
        for number, title in enumerate(COLUMNS):
            table.add_column(title, justify="right" if number in (3, 4, 7) else "left", overflow="fold")
        for row in self.rows():
            table.add_row(*map(Text, row))
        return table

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=120, no_color=True).print(self)
        return text.getvalue().rstrip("\n")

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{title}</th>" for title in COLUMNS)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in self.rows()
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{self.total}</p>"


def module_summary(model: nn.Module, *args: Any, **kwargs: Any) -> ModelSummary:
    """The table of a model's layers, found by one forward of `model(*args, **kwargs)`; see `layer_info`."""
    layers = layer_info(model, *args, **kwargs)
    return ModelSummary(layers, total_params(model), sum(one.flops or 0 for one in layers))


def _shapes(module: nn.Module, args: Any, output: Any) -> Shapes:
    return tuple(tuple(leaf.shape) for leaf in nested_containers.leaves(output) if isinstance(leaf, Tensor))


def _all_of(values: set[str]) -> str:
    return ", ".join(sorted(values))


@contextmanager
def _tried_out(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no graph; modes, buffers and torch's random state are put back."""
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda}
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices=list(devices)))
        try:
            model.eval()
            yield
        finally:
            for module, training in modes.items():
                module.training = training
            for buffer, before in buffers:
                buffer.copy_(before)
