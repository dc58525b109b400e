"""The place where finite gradients began to explode or vanish, by the norms of one step alone: none is run again.

The gradient of a bias is the sum of what came to the output of its layer; that of the weights beside it is that times
the layer's inputs. So biases say how far the gradient is off its usual level on its way from the loss
(`gradwatch.localise.diagnosis.usual_levels`), and weights that are off where their bias is not say so of activations:
these were made before any gradient, and come first.

Layers are taken in the order of the forward, as their first gradients arrived. Where branches run beside each other,
layers that are off may lie between others that are not, and no place is told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gradwatch.localise.diagnosis.usual_levels import OFF, SHOWN, of_weights, off_level, with_levels
from gradwatch.records.finding import Finding, Layer

INPUTS_OFF = 5.0
"""Weights that are off by this factor more than the bias beside them: what enters the layer is off."""


def of_norms(names: Sequence[str], moved: Mapping[str, float], exploding: bool) -> Finding | None:
    """The place where it began, as far as norms tell; None where no gradient is off its usual level.

    `names` are those of the parameters in the order of the forward, `moved` the factors by which their norms are off,
    of those whose usual level is known.
    """
    modules = dict.fromkeys(name.rpartition(".")[0] for name in names)
    layers = with_levels([Layer(module, "", math.nan, math.nan) for module in modules], moved)
    found = _activations(layers, exploding) or off_level(layers, exploding) or of_weights(layers, exploding)
    if found is None:
        return None
    if found.at_outputs and not all(_is_off(layer, exploding) for layer in layers):
        # A layer of which no level is known, or whose bias is none, may be the one that multiplies.
        found = found.amended(at_outputs=False)
    return found.amended(by="norms", profile=tuple(layers[:SHOWN]))


def _is_off(layer: Layer, exploding: bool) -> bool:
    factor = layer.weights_moved if math.isnan(layer.moved) else layer.moved
    return (factor if exploding else 1 / factor) >= OFF if factor > 0 else False


def _activations(layers: Sequence[Layer], exploding: bool) -> Finding | None:
    """The first layer whose inputs are off."""
    sign = 1.0 if exploding else -1.0
    ratios = [
        (layer, sign * (math.log(layer.weights_moved) - math.log(layer.moved)))
        for layer in layers
        if 0 < layer.weights_moved < math.inf and 0 < layer.moved < math.inf
    ]
    most = max((log for _, log in ratios), default=-math.inf)
    if most < math.log(INPUTS_OFF):
        return None
    first, log = next((layer, log) for layer, log in ratios if log >= max(most / 2, math.log(INPUTS_OFF)))
    note = (
        f"the gradient of its weights is ×{first.weights_moved:.3g} of its usual level, that of its bias "
        f"×{first.moved:.3g}: what enters it is some ×{math.exp(sign * log):.3g}"
    )
    return Finding("activations", "norms", module=first.module, note=note)
