"""Finite gradients that are too large or too small, against what is usual of each layer's own.

A layer may multiply gradients by fifty and be healthy (a LayerNorm of small numbers does): its gain alone says little.
What does is how far the gradients of the parameters are off their own usual level, layer by layer on the way from the
loss: where all of them are alike it came so to the model's outputs, else it began where the first of them is.

The gradient of a bias is the sum of what came to the output of its layer. That of a weight has the layer's inputs in
it, too: where activations are off, it is, though the gradient that came is as ever. So biases say where it began, and
where too few layers have one, it is only said how far the layers are off.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

from gradwatch.localise.diagnosis.module_gain import Gain, gains, parent
from gradwatch.records.finding import Finding, Layer, Phase

SHOWN = 64  # rows of a profile in a Finding
OFF = 2.0
"""A layer whose gradient is off its usual level by a smaller factor is none that says anything."""

ALIKE = 10.0
"""A layer further off than the one next to the outputs by a larger factor is not off as that one is."""

NO_EVERYDAY_GAIN = 1e3
"""A gain that shows where it began by itself, usual levels unknown: below it a healthy layer may have it."""

FEWEST = 2
"""Layers with a bias (or with weights) of which something can be said."""


class Off(NamedTuple):
    """A layer with parameters, and the logarithm of the factor by which their gradient is off its usual level."""

    module: str
    kind: str
    log: float

    def __str__(self) -> str:
        """`×35 in blocks.0.norm1`."""
        return f"×{math.exp(self.log):.3g} in {self.module}"


def with_levels(layers: Sequence[Layer], moved: Mapping[str, float]) -> list[Layer]:
    """The layers with the factors by which their bias and their other parameters are off, the furthest of each.

    `moved` are these factors by the name of a parameter, of those whose usual level is known.
    """
    biases: dict[str, float] = {}
    others: dict[str, float] = {}
    for name, factor in moved.items():
        module, _, own = name.rpartition(".")
        if not factor > 0:
            continue
        known = biases if is_bias(own) else others
        if module not in known or abs(math.log(factor)) > abs(math.log(known[module])):
            known[module] = factor
    return [
        replace(
            layer,
            moved=biases.get(layer.module, math.nan),
            weights_moved=others.get(layer.module, math.nan),
        )
        for layer in layers
    ]


def is_bias(name: str) -> bool:
    """True for the last part of the name of a bias: `bias`, `in_proj_bias`, `bias_ih_l0`."""
    return name == "bias" or name.endswith("_bias") or name.startswith("bias_")


def suspect(layers: Sequence[Layer], exploding: bool, moved: Mapping[str, float]) -> Finding | None:
    """The place where finite gradients began to explode or vanish; None where no hook was called.

    By the usual levels of the parameters where these are known (`moved`, factors by name) and any is off; else it is
    the module, or the gap between two, with the most extreme gain.
    """
    layers = with_levels(layers, moved)
    found = off_level(layers, exploding) or _of_largest_gain(layers, exploding)
    return None if found is None else found.amended(profile=tuple(layers[:SHOWN]))


def _of_largest_gain(layers: Sequence[Layer], exploding: bool) -> Finding | None:
    known = gains(layers, exploding)
    if not known:
        return None
    most = (max if exploding else min)(known, key=lambda step: step.factor)
    if _grows(most, 1.0 if exploding else -1.0) >= math.log(NO_EVERYDAY_GAIN):
        note = f"the gradient is multiplied by {most.factor:.3g} here: {most.said}"
        return Finding(_phase(exploding), "replay", module=most.module, module_type=most.kind, note=note)
    place = f" in {most.module}" if most.module else ""
    note = (
        "no usual levels tell where; the gradient is multiplied most by "
        f"{most.factor:.3g}{place}, which may be usual: {most.said}"
    )
    return Finding(_phase(exploding), "replay", note=note)


def _phase(exploding: bool) -> Phase:
    return "exploding" if exploding else "vanishing"


def off_level(layers: Sequence[Layer], exploding: bool) -> Finding | None:
    """The place by the usual levels of the layers alone; None where none is off."""
    sign = 1.0 if exploding else -1.0
    rows = _rows((one, one.moved) for one in layers)
    if len(rows) < FEWEST:
        return of_weights(layers, exploding)
    most = max(sign * row.log for row in rows)
    others = _rows((one, one.weights_moved) for one in layers if math.isnan(one.moved))
    if most < math.log(OFF):
        return None
    if any(sign * row.log > 2 * most for row in others):
        return of_weights(
            layers, exploding
        )  # a layer without a bias is off, and no bias is nearly so far off
    off = [sign * row.log >= most / 2 for row in rows]
    first = off.index(True)
    if sum(off) == 1 and first < len(rows) - 1:
        note = f"against its usual level the gradient is {rows[first]}, and of no other layer is it nearly so far off"
        module, kind = rows[first].module, rows[first].kind
        return Finding(_phase(exploding), "replay", module=module, module_type=kind, note=note)
    if not all(off[first:]):
        return _of_some(rows, off, exploding)
    if first == 0:
        return _of_all(layers, rows, exploding)
    return _between(layers, rows, first, exploding)


def _of_some(rows: Sequence[Off], off: Sequence[bool], exploding: bool) -> Finding:
    """The module that contains all that are off, where they are next to each other: a branch of it."""
    first = off.index(True)
    last = len(off) - 1 - list(reversed(off)).index(True)
    found = f"off their usual level are the gradients of {sum(off)} of {len(rows)} layers"
    if not all(off[first : last + 1]):
        note = f"{found}, between which others are not: {rows[first]}"
        return Finding(_phase(exploding), "replay", note=note)
    common = reduce(parent, (row.module for row in rows[first : last + 1]))
    note = f"{found}, {rows[first]} to {rows[last]}; on both sides of these it is as usual"
    return Finding(_phase(exploding), "replay", module=common, note=note)


def _of_all(layers: Sequence[Layer], rows: Sequence[Off], exploding: bool) -> Finding:
    """The outputs, unless a layer is far further off than the first, or what is behind the first may explain it."""
    sign = 1.0 if exploding else -1.0
    note = f"against their usual level the gradients of all layers are off, {rows[0]}, {rows[-1]}"
    furthest = max(rows, key=lambda row: sign * row.log)
    if sign * (furthest.log - rows[0].log) > math.log(ALIKE):
        return Finding(_phase(exploding), "replay", note=f"{note}, and at most {furthest}")
    # The first layer of which a level is known need not be the last: a head may have no bias, or be frozen.
    last = max(number for number, layer in enumerate(layers) if layer.module == rows[0].module)
    own = replace(layers[last], at_input=math.nan)  # what it gives its input is not behind it
    explain = [
        gain
        for gain in gains([own, *layers[last + 1 :]], exploding)
        if _grows(gain, sign) >= sign * rows[0].log / 2
    ]
    if explain:
        most = max(explain, key=lambda gain: _grows(gain, sign))
        note = f"{note}; between these and the outputs it is multiplied by {most.factor:.3g}: {most.said}"
    return Finding(_phase(exploding), "replay", at_outputs=not explain, note=note)


def of_weights(layers: Sequence[Layer], exploding: bool) -> Finding | None:
    """The factors by which weights are off, where biases do not show it. A place only where one layer alone is off."""
    sign = 1.0 if exploding else -1.0
    rows = _rows((one, one.weights_moved) for one in layers)
    most = max(rows, key=lambda row: sign * row.log, default=None)
    if len(rows) < FEWEST or most is None or sign * most.log < math.log(OFF):
        return None
    # Of the layer next to the inputs it may have come from anywhere between it and the next.
    alone = most is not rows[-1] and sum(sign * row.log >= math.log(OFF) for row in rows) == 1
    if alone and not any(
        sign * one.log >= math.log(OFF) for one in _rows((layer, layer.moved) for layer in layers)
    ):
        note = f"against its usual level the gradient is {most}, and of no other layer is it off"
        return Finding(_phase(exploding), "replay", module=most.module, module_type=most.kind, note=note)
    note = f"against their usual level the gradients of weights are {rows[0]}, {rows[-1]}, and at most {most}"
    return Finding(_phase(exploding), "replay", note=note)


def _between(layers: Sequence[Layer], rows: Sequence[Off], first: int, exploding: bool) -> Finding:
    """The module behind the layer before `first`: the only one whose gain explains it, else what contains both."""
    sign = 1.0 if exploding else -1.0
    before, here = rows[first - 1], rows[first]
    names = [layer.module for layer in layers]
    # Up to the next layer of which a level is known: what branches off beside `before` comes after it in the forward.
    end = names.index(rows[first - 2].module) if first > 1 else len(layers)
    within = [layers[k] for k in range(names.index(here.module), max(end, names.index(before.module) + 1))]
    grown = sign * (here.log - before.log) / 2
    explain = [gain for gain in gains(within, exploding) if _grows(gain, sign) >= grown]
    note = f"against their usual level the gradients are {before} and from there on {here}"
    if len(explain) == 1:
        (only,) = explain
        note = f"{note}; it is multiplied by {only.factor:.3g} there: {only.said}"
        found = Finding(_phase(exploding), "replay", module=only.module, module_type=only.kind, note=note)
        return found.amended(begins=here.module)
    common = parent(here.module, before.module)
    return Finding(_phase(exploding), "replay", module=common, begins=here.module, note=note)


def _grows(gain: Gain, sign: float) -> float:
    return sign * (math.log(gain.factor) if gain.factor > 0 else -math.inf)


def _rows(layers: Iterable[tuple[Layer, float]]) -> list[Off]:
    """The layers of which a factor is known, from the loss to the inputs; of those called twice the last call."""
    known = {one.module: (one, factor) for one, factor in layers if math.isfinite(factor)}
    return [Off(one.module, one.kind, math.log(factor)) for one, factor in reversed(list(known.values()))]
