"""The place where finite gradients began to explode or vanish, by the norms of one step alone: none is run again.

The gradient of a bias is the sum of what came to the output of its layer; that of the weights beside it is that times
the layer's inputs. So biases say how far the gradient is off its usual level on its way from the loss
(`usual_layer_norms`), and weights that are off where their bias is not say so of activations: these were made before
any gradient, and come first.

Layers are taken in the order of the forward, as their first gradients arrived. Where branches run beside each other,
layers that are off may lie between others that are not, and no place is told.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Mapping, Sequence

from gradwatch.localise.diagnosis.deviation import Deviation
from gradwatch.localise.diagnosis.usual_layer_norms import (
    OFF,
    SHOWN,
    is_bias,
    of_weights,
    off_level,
    with_levels,
)
from gradwatch.records.finding import Finding, Layer, Phase

INPUTS_OFF = 10.0
"""Weights that are off by this factor more than the bias beside them: what enters the layer is off.

The gradient of a bias is a sum that cancels, and so scatters: of healthy steps by 5.
"""

PLACED = 10.0
"""Factor of the layer that is furthest off below which no place is named: healthy layers scatter by 5."""

INPUTS_PART = 1 / 3
"""Part of the logarithm by which weights are off that their inputs make at least, if these are what is off."""


def of_norms(
    names: Sequence[str], moved: Mapping[str, float], exploding: bool, few: Collection[str] = ()
) -> Finding | None:
    """The place where it began, as far as norms show it; None where no gradient is off its usual level.

    `names` are those of the parameters in the order of the forward, `moved` the factors by which their norms are off,
    of those whose usual level is known. `few` are the names of those with one or two elements: by how much such a bias
    is off says nothing of inputs, for its sum may cancel.
    """
    modules = dict.fromkeys(name.rpartition(".")[0] for name in names)
    layers = with_levels([Layer(module, "", math.nan, math.nan) for module in modules], moved)
    paired = {
        name.rpartition(".")[0]
        for name in moved
        if is_bias(_own(name)) and _weight(name) in moved and name not in few
    }
    found = _inputs(layers, paired, exploding) or _by_level(layers, exploding)
    return None if found is None else found.amended(by="norms", profile=tuple(layers[:SHOWN]))


def with_activations(finding: Finding, off: Deviation, exploding: bool) -> Finding:
    """The finding, or in place of one without a module that activations are off, which come before any gradient."""
    if finding.phase not in ("exploding", "vanishing") or finding.op or finding.module:
        return finding
    found = of_norms(off.names, off.norms, exploding, off.few)
    if found is None or found.phase != "activations":
        return finding
    return finding.amended(
        phase="activations", module=found.module, module_type="", at_outputs=False, begins=""
    ).amended(note="; ".join((found.note, finding.note)))


def beyond_the_rest(found: Finding, name: str, off: Deviation, exploding: bool) -> Finding:
    """The finding, or one about the gradient of `name` where this is off much further than all layers alike.

    That all layers are off alike is no cause of one that is zero, nor of one that is far off where they hardly are.
    """
    sign = 1.0 if exploding else -1.0
    logs = {one: sign * _log(factor) for one, factor in off.norms.items() if factor >= 0}
    if found.module or name not in logs or len(logs) < 2:
        return found
    others = sorted(log for one, log in logs.items() if one != name)
    median = others[len(others) // 2]
    beside = math.isfinite(median) and (abs(median) < math.log(OFF) or not off.norms[name])
    if not beside or logs[name] - median < math.log(PLACED):
        return found
    beyond = [one for one, log in logs.items() if one != name and log - median >= math.log(PLACED)]
    module = name.rpartition(".")[0]
    alone = all(one.rpartition(".")[0] == module for one in beyond)
    note = (
        f"the gradient of {name} is ×{off.norms[name]:.3g} of its usual level, the median of the others' "
        f"×{math.exp(sign * median):.3g}"
    )
    more = f"; {len(beyond)} more are off as far" if beyond and not alone else ""
    phase: Phase = "exploding" if exploding else "vanishing"
    return Finding(phase, "norms", module=module if alone else "", profile=found.profile, note=note + more)


def _log(factor: float) -> float:
    return math.log(factor) if factor > 0 else -math.inf


def _by_level(layers: Sequence[Layer], exploding: bool) -> Finding | None:
    """Finding by how far the layers are off, where no inputs are."""
    found = off_level(layers, exploding) or of_weights(layers, exploding)
    if found is None:
        return None
    sign = 1.0 if exploding else -1.0
    furthest = max(_off(layer, sign) for layer in layers)
    if found.at_outputs and any(_off(layer, sign) < furthest / 2 for layer in layers):
        # A layer of which no level is known, or whose weights are less off, may be the one that multiplies.
        return found.amended(at_outputs=False)
    return found.amended(module="", at_outputs=False) if furthest < math.log(PLACED) else found


def _off(layer: Layer, sign: float) -> float:
    """Logarithm of the factor by which a layer is off, by its bias where that has a level; 0 where none has."""
    factor = layer.weights_moved if math.isnan(layer.moved) else layer.moved
    return sign * math.log(factor) if 0 < factor < math.inf else 0.0


def _own(name: str) -> str:
    return name.rpartition(".")[2]


def _weight(bias: str) -> str:
    """Name of the parameter that is multiplied where this bias is added."""
    module, dot, own = bias.rpartition(".")
    return f"{module}{dot}{own.replace('bias', 'weight')}"


def _inputs(layers: Sequence[Layer], paired: Container[str], exploding: bool) -> Finding | None:
    """The first layer whose inputs are off, or the only one whose weights are off while its bias is not.

    `paired` are the modules that have a bias and the weight that belongs to it.
    """
    sign = 1.0 if exploding else -1.0
    off = [(layer, _of_inputs(layer, sign)) for layer in layers if layer.module in paired]
    certain = [
        log for layer, log in off if log > 0 and log >= INPUTS_PART * sign * math.log(layer.weights_moved)
    ]
    most = max(certain, default=0.0)
    if most < math.log(INPUTS_OFF):
        return None
    first, log = next((layer, log) for layer, log in off if log >= max(most / 2, math.log(INPUTS_OFF)))
    note = (
        f"the gradient of its weights is ×{first.weights_moved:.3g} of its usual level, that of its bias "
        f"×{first.moved:.3g}"
    )
    if _is_alone(first, layers, log / 2, sign):
        # What enters a layer goes on from there, or comes back as gradients: this may be of its weights alone.
        phase: Phase = "exploding" if exploding else "vanishing"
        return Finding(phase, "norms", module=first.module, note=f"{note}, and of no other layer is it off")
    note = f"{note}: what enters it is some ×{math.exp(sign * log):.3g}"
    before = [
        one.module
        for one in layers[: layers.index(first)]
        if one.module not in paired
        and one.weights_moved > 0
        and sign * math.log(one.weights_moved) >= log / 2
    ]
    if before:
        more = f" and {len(before) - 1} more" if before[1:] else ""
        note = f"{note}; whether it entered {before[0]}{more} before, without biases, norms do not show"
    return Finding("activations", "norms", module=first.module, note=note)


def _of_inputs(layer: Layer, sign: float) -> float:
    """Logarithm of the factor by which weights are off beyond their bias."""
    if not (0 < layer.weights_moved < math.inf and 0 < layer.moved < math.inf):
        return -math.inf
    # A bias that moved the other way scatters.
    return sign * math.log(layer.weights_moved) - max(sign * math.log(layer.moved), 0.0)


def _is_alone(one: Layer, layers: Sequence[Layer], log: float, sign: float) -> bool:
    """True if no other layer is off by `log`."""
    factors = [
        factor for other in layers if other is not one for factor in (other.moved, other.weights_moved)
    ]
    return not any(0 < factor < math.inf and sign * math.log(factor) >= log for factor in factors)
