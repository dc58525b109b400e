"""Clip and rescale policies: how a norm becomes the multiplier of a gradient. numpy only; the hooks apply it.

One file a method; those on elements and rows (`value`, `agc`, `centralize`) import torch when they are applied.
"""

from __future__ import annotations

from gradwatch.policies.adagc import AdaGC
from gradwatch.policies.agc import AdaptiveGradientClip
from gradwatch.policies.autoclip import AutoClip
from gradwatch.policies.baseline import Baseline
from gradwatch.policies.block_rms import BlockRMS
from gradwatch.policies.centralize import Centralize
from gradwatch.policies.norm import ClipByNorm, clip_coefficient
from gradwatch.policies.normalize import Normalize
from gradwatch.policies.policy import (
    POLICIES,
    AnyPolicy,
    ElementwisePolicy,
    Policy,
    State,
    find_policy,
    register_policy,
)
from gradwatch.policies.value import ClipByValue
from gradwatch.policies.zclip import ZClip

__all__ = [
    "POLICIES",
    "AdaGC",
    "AdaptiveGradientClip",
    "AnyPolicy",
    "AutoClip",
    "Baseline",
    "BlockRMS",
    "Centralize",
    "ClipByNorm",
    "ClipByValue",
    "ElementwisePolicy",
    "Normalize",
    "Policy",
    "State",
    "ZClip",
    "clip_coefficient",
    "find_policy",
    "register_policy",
]
