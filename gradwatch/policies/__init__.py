"""Clip policies: how a norm becomes the multiplier of a gradient. numpy only; the hooks apply it."""

from __future__ import annotations

from gradwatch.policies.norm import ClipByNorm, clip_coefficient
from gradwatch.policies.policy import POLICIES, Policy, find_policy, register_policy

__all__ = ["POLICIES", "ClipByNorm", "Policy", "clip_coefficient", "find_policy", "register_policy"]
