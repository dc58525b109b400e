"""What a rule file asks of hooks inside the backward: where it is refused, and how it is attached to a lane."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from torch import Tensor, nn

from gradwatch.engine import BoundEngine, Engine
from gradwatch.engine.backward import asks_backward, asks_of_modules, drops_micro
from gradwatch.errors import AttachError
from gradwatch.hooks.elementwise import Elementwise
from gradwatch.hooks.lane import Lane
from gradwatch.hooks.limiter import Limiter
from gradwatch.hooks.micro import MicroDrop
from gradwatch.hooks.module_bounds import ModuleBounds
from gradwatch.hooks.shards import is_shard
from gradwatch.rules import RuleSet


def check_backward(engine: Engine, models: Iterable[nn.Module], world_size: int) -> None:
    """Raise `AttachError` where acting inside the backward would mean something else than the rule file says.

    Allowed all the same by `local: true`. What shows only later (accumulation, a GradScaler, a process group)
    switches the hooks off when it shows.
    """
    reasons = _reasons(models, world_size)
    if reasons and drops_micro(engine.ruleset):
        raise AttachError(f"`drop_micro` works in one process only: {'; '.join(reasons)}. Use `skip_step`")
    asking = [what for what, local in asks_backward(engine.ruleset) if not local]
    if asking and reasons:
        raise AttachError(
            f"`at: backward` of {', '.join(asking)} would not do what it says here: {'; '.join(reasons)}. "
            "Use `at: step`, or insist with `local: true`: then each rank bounds what it has before the reduction"
        )


def _reasons(models: Iterable[nn.Module], world_size: int) -> list[str]:
    reasons = []
    if world_size > 1:
        reasons.append(f"gradients are reduced over {world_size} ranks after the hooks have seen them")
    if any(is_shard(param) for model in models for param in model.parameters()):
        reasons.append("parameters are sharded, and a hook sees a gradient of one rank, if any at all")
    return reasons


def micro_drop_of(
    ruleset: RuleSet,
    lane: Lane,
    failed: Callable[[str, BaseException], None],
    report: Callable[[str, BaseException], None],
    cleared: Callable[[Lane], None],
) -> MicroDrop | None:
    """What tells the micro-batches of a lane apart; None where no rule asks for it."""
    if not drops_micro(ruleset):
        return None
    return MicroDrop(lane, failed, lambda why: report("action", AttachError(why)), cleared)


def limiter_of(
    ruleset: RuleSet,
    bound: BoundEngine,
    lane: Lane,
    taps: Sequence[Tensor | None],
    failed: Callable[[str, BaseException], None],
    report: Callable[[str, BaseException], None],
    before: Limiter | None,
) -> Limiter | None:
    """The hooks that act inside the backward for one lane; None where the rule file asks for none."""
    asked = bound.asked
    if not asked:
        return None
    own = own_sites(bound, lane)
    elementwise = None
    if asked.elementwise:
        policies = [(policy, mask[own]) for policy, mask in asked.elementwise]
        elementwise = Elementwise(policies, lane.sites.names)
    local = all(insists for _, insists in asks_backward(ruleset))
    covered = asked.covered[own].tolist()  # sync: numpy

    def refused(why: str) -> None:
        report("action", AttachError(why))

    return Limiter(lane, taps, covered, elementwise, local, failed, refused, before)


def module_bounds_of(
    ruleset: RuleSet,
    failed: Callable[[str, BaseException], None],
    report: Callable[[str, BaseException], None],
) -> ModuleBounds | None:
    """What bounds the gradient between modules; None where no rule asks for it."""
    if not asks_of_modules(ruleset):
        return None
    local = all(insists for _, insists in asks_backward(ruleset))
    return ModuleBounds(local, failed, lambda why: report("action", AttachError(why)))


def own_sites(bound: BoundEngine, lane: Lane) -> np.ndarray:
    """The sites of a lane's own parameters among those its rules are bound to, which may be all ranks'."""
    place = {name: s for s, name in enumerate(bound.sites.names)}
    return np.array([place[name] for name in lane.sites.names], np.intp)
