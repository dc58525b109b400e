"""The one operation that multiplies a gradient which explodes, where its gain explains by how much that is off.

An operation may multiply by a thousand at every step: a loss scale, a square root of small numbers that a square
follows. So one is named only where it alone multiplies by about as much as the gradients are off their usual level, by
far more than on any day or in few rows, and where what it made is still there at the end of the way.

What multiplies may also stand between the model's last layer and its outputs, or in the loop behind these: the gradient
at the outputs shows it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from gradwatch.localise.diagnosis.deviation import Deviation
from gradwatch.localise.diagnosis.usual_layer_norms import NO_EVERYDAY_GAIN, with_levels
from gradwatch.localise.replay.first_nonfinite_in_backward import Multiplier
from gradwatch.localise.replay.step_replay import Trace
from gradwatch.records.finding import Finding, Frame, Layer

ALIKE = 10.0
"""Factor between the gain of an operation and how far the gradients are off: what is left is the gain of any day."""

ALIKE_OF_FEW = 100.0
"""The same where it multiplies few rows, and so not at every step."""

LOST = 30.0
"""Factor by which what an operation made may have shrunk on its way, if it is what made the gradient large."""


def with_operation(
    finding: Finding, layers: Sequence[Layer], traces: Sequence[Trace], off: Deviation
) -> Finding:
    """The finding with the operation that multiplies; on the loss side only what came so to the model's outputs."""
    ran = [trace for trace in traces if not trace.skipped]
    if finding.at_outputs:
        behind = _behind_last_layer(layers, ran, off)
        if behind is None:
            return finding.amended(loss_moved=off.loss)
        module, came, arrived = behind
        said = f"between the model's outputs and {module} it goes from {came:.3g} to {arrived:.3g}"
        finding = finding.amended(at_outputs=False, note=f"{said}; {finding.note}")
    elif finding.module or finding.begins:
        here = finding.begins or finding.module
        arrived = max((one.at_output for one in layers if one.module == here), default=0.0)
    else:
        return finding
    if finding.phase != "exploding":
        return finding
    inside = finding.module and f"{finding.module}."
    found = only_multiplier(
        (one for trace in ran for one in trace.multipliers if _is_in(one, inside)), off.furthest, arrived
    )
    if found is None:
        return finding
    caller = next((trace.caller for trace in ran if found in trace.multipliers), ())
    return naming(finding, found, caller, off.furthest)


def _is_in(one: Multiplier, inside: str) -> bool:
    return f"{one.node.module[0]}.".startswith(inside)


def _behind_last_layer(
    layers: Sequence[Layer], traces: Sequence[Trace], off: Deviation
) -> tuple[str, float, float] | None:
    """(last layer, norm at the outputs, norm at that layer) where the gradient became too large between the two."""
    known = [one for one in with_levels(layers, off.norms) if math.isfinite(one.moved)]
    last = [one for one in known if one.module == known[-1].module]
    if not last or len(last) != len(traces):
        return None
    grown = max(abs(math.log(last[-1].moved)) / 2, math.log(ALIKE))
    sign = 1.0 if last[-1].moved > 1 else -1.0
    for layer, trace in zip(last, traces, strict=True):
        if layer.at_output > 0 and trace.came > 0 and sign * math.log(layer.at_output / trace.came) >= grown:
            return layer.module, trace.came, layer.at_output
    return None


def only_multiplier(multipliers: Iterable[Multiplier], factor: float, arrived: float) -> Multiplier | None:
    """The operation whose gain explains that gradients are off by `factor`; None where there is none, or several.

    `arrived` is the norm of the gradient at the end of the way that is looked at.
    """
    near = [one for one in multipliers if _explains(one, factor) and arrived >= one.passage.made / LOST]
    places = {(one.node.frames[:1], one.node.op) for one in near}
    return near[0] if len(places) == 1 and near[0].node.frames else None


def _explains(one: Multiplier, factor: float) -> bool:
    gain, few_rows = one.passage.gain, one.passage.few_rows
    alike = ALIKE_OF_FEW if few_rows else ALIKE
    return (few_rows or gain >= NO_EVERYDAY_GAIN) and factor / alike <= gain <= factor * alike


def naming(finding: Finding, one: Multiplier, caller: Sequence[Frame], factor: float) -> Finding:
    """The finding with this operation as the place."""
    node = one.node
    note = (
        f"its backward multiplies the gradient by {one.passage.gain:.3g} (from {one.passage.given:.3g} to "
        f"{one.passage.made:.3g}), and gradients are at up to ×{factor:.3g} of their usual levels"
    )
    return finding.amended(
        at_outputs=False,
        begins="",
        module=node.module[0],
        module_type=node.module[1],
        op=node.op,
        node=node.node,
        function=node.function,
        frames=(*node.frames, *caller),
        operands=node.operands,
        note="; ".join(filter(None, (note, finding.note))),
    )
