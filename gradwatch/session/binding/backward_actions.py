"""Actions of a rule file inside the backward: where it is refused, and how it is attached to a capture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from torch import Tensor, nn

from gradwatch.actions.backward.clipper import BackwardClipper
from gradwatch.actions.backward.module_bounds import ModuleBounds
from gradwatch.actions.drop_micro import MicroDrop
from gradwatch.actions.elementwise_clip import Elementwise
from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.capture.parameter_shards import is_shard
from gradwatch.engine import BoundEngine
from gradwatch.engine.actions.backward_clips import (
    asks_backward,
    asks_of_modules,
    clips_in_backward,
    drop_micro_rules,
    drops_micro,
    drops_micro_from,
)
from gradwatch.engine.unsupported_rules import Refusal
from gradwatch.errors import AttachError
from gradwatch.rules.impossible_actions import clip_places
from gradwatch.rules.rule_set import RuleSet

AT_STEP = (
    "use `at: step`, or force it with `local: true`: then each rank bounds what it has before the reduction"
)
DROP = frozenset({"drop_micro"})


def refused_in_backward(ruleset: RuleSet, models: Iterable[nn.Module], world_size: int) -> list[Refusal]:
    """Refusals of actions inside the backward that would not do there what the rule file says.

    Allowed all the same by `local: true`, but for `drop_micro`. What shows only later (accumulation, a GradScaler, a
    process group) switches the hooks off when it shows.
    """
    reasons = "; ".join(_reasons(models, world_size))
    if not reasons:
        return []
    moved = f"`at: backward` would not do what it says here: {reasons}"
    found = [
        Refusal(f"`drop_micro` works in one process only: {reasons}", "use `skip_step`", rule, "", DROP)
        for rule in drop_micro_rules(ruleset)
    ]
    found += [
        Refusal(moved, AT_STEP, rule, "", frozenset({"clip"}))
        for rule, local in clips_in_backward(ruleset)
        if not local
    ]
    clip = ruleset.clip
    if clip is not None and clip.at == "backward" and not clip.local:
        found += [Refusal(moved, AT_STEP, clip=place) for place in clip_places(clip)]
    return found


def _reasons(models: Iterable[nn.Module], world_size: int) -> list[str]:
    reasons = []
    if world_size > 1:
        reasons.append(f"gradients are reduced over {world_size} ranks after the hooks have run")
    if any(is_shard(param) for model in models for param in model.parameters()):
        reasons.append("parameters are sharded, and a hook sees a gradient of one rank, if any at all")
    return reasons


def micro_drop_of(
    ruleset: RuleSet,
    captured: OptimizerCapture,
    failed: Callable[[str, BaseException], None],
    report: Callable[[str, BaseException], None],
    cleared: Callable[[OptimizerCapture], None],
) -> MicroDrop | None:
    """The hooks that separate the micro-batches of a capture; None where no rule asks for it."""
    if not drops_micro(ruleset):
        return None
    first = drops_micro_from(ruleset)
    return MicroDrop(captured, failed, lambda why: report("action", AttachError(why)), cleared, first)


def clipper_of(
    ruleset: RuleSet,
    bound: BoundEngine,
    captured: OptimizerCapture,
    taps: Sequence[Tensor | None],
    failed: Callable[[str, BaseException], None],
    report: Callable[[str, BaseException], None],
    before: BackwardClipper | None,
) -> BackwardClipper | None:
    """The hooks that act inside the backward for one capture; None where the rule file asks for none."""
    asked = bound.asked
    if not asked:
        return None
    own = own_sites(bound, captured)
    elementwise = None
    if asked.elementwise:
        policies = [(policy, mask[own]) for policy, mask in asked.elementwise]
        elementwise = Elementwise(policies, captured.sites.names)
    local = all(insists for _, insists in asks_backward(ruleset))
    covered = asked.covered[own].tolist()  # sync: numpy

    def refused(why: str) -> None:
        report("action", AttachError(why))

    return BackwardClipper(captured, taps, covered, elementwise, local, failed, refused, before)


def module_bounds_of(
    ruleset: RuleSet,
    failed: Callable[[str, BaseException], None],
    report: Callable[[str, BaseException], None],
) -> ModuleBounds | None:
    """The hooks that bound the gradient between modules; None where no rule asks for it."""
    if not asks_of_modules(ruleset):
        return None
    local = all(insists for _, insists in asks_backward(ruleset))
    return ModuleBounds(local, failed, lambda why: report("action", AttachError(why)))


def own_sites(bound: BoundEngine, captured: OptimizerCapture) -> np.ndarray:
    """The sites of a capture's own parameters among those its rules are bound to, which may be all ranks'."""
    if bound.sites.names[: len(captured.sites.names)] == captured.sites.names:
        return np.arange(len(captured.sites.names))
    place = {name: s for s, name in enumerate(bound.sites.names)}
    return np.array([place[name] for name in captured.sites.names], np.intp)
