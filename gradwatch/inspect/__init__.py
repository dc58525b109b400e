"""Hooks, statistics and pictures for people: `gradwatch.inspect`, in a notebook or a script, with or without a watch.

    with gradwatch.inspect.ActivationStats(model) as stats:
        train(model)
    gradwatch.inspect.activation_histograms(stats).savefig("activations.png")

Nothing here is used by a watch, and nothing stays on a model: every hook is removed when its `with` ends.
"""

from __future__ import annotations

from gradwatch.inspect.activation_stats import Activation, ActivationStats
from gradwatch.inspect.hooks import Hook, Hooks, hook_gradients, hook_output, hook_outputs
from gradwatch.inspect.model_summary import (
    LayerInfo,
    ModelSummary,
    ParamCount,
    layer_info,
    model_sizes,
    module_summary,
    total_params,
)
from gradwatch.inspect.pictures import (
    activation_histograms,
    activation_lines,
    feature_maps,
    gradient_flow,
    phase_bars,
    update_ratios,
)
from gradwatch.inspect.step_profile import StepProfile, profile_step
from gradwatch.inspect.update_ratios import UpdateRatios

__all__ = [
    "Activation",
    "ActivationStats",
    "Hook",
    "Hooks",
    "LayerInfo",
    "ModelSummary",
    "ParamCount",
    "StepProfile",
    "UpdateRatios",
    "activation_histograms",
    "activation_lines",
    "feature_maps",
    "gradient_flow",
    "hook_gradients",
    "hook_output",
    "hook_outputs",
    "layer_info",
    "model_sizes",
    "module_summary",
    "phase_bars",
    "profile_step",
    "total_params",
    "update_ratios",
]
