"""Sentences for the log that are no internal errors, each said once: what is not watched, not judged, or off."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gradwatch.capture.coverage import NO_VALUES
from gradwatch.engine.unmatched_rules import described
from gradwatch.errors import AttachError
from gradwatch.records.snapshot import Sites
from gradwatch.rules.rule_set import RuleSet
from gradwatch.runtime.internal_errors import Health
from gradwatch.runtime.printable import shortened
from gradwatch.session.binding.refused_rules import Fitting
from gradwatch.sinks.circuit_breaker import Breaker

IN_GRAPH = "a step captured in a CUDA graph is not watched: no hook runs when the graph is replayed"
BLIND = (
    "parameters were added to the model and belong to no watched optimizer, so their gradients are not measured; "
    "give them to the optimizer (add_param_group, or a new one)"
)
VALUELESS = "nothing is measured of parameters without values: {}; give the model a device (`to_empty`) before training"
OFF = (
    "{}: switched off, because they match nothing in this model; all other rules stay active; `optional: true` "
    "in the rule "
    "file silences this, --strict-rules (strict_rules=True) refuses it"
)
NO_OPTIMIZER = "no optimizer steps {}: gradients are observed only, and no action is carried out"
UNOWNED = (
    "{} receive gradients and belong to no optimizer, so that nothing trains them: give them to the optimizer, or "
    "freeze them with requires_grad_(False), which also saves computing these gradients"
)
UNCLEARED = (
    "gradients of {} are never cleared: each step begins with those of the step before and adds to them; call "
    "optimizer.zero_grad() between a step and the next backward"
)
UNDECIDED = (
    "models whose parameters have the same names and shapes ({}) were gone at the same time, and gradwatch cannot tell "
    "which new model replaces which: they get names and baselines in their order, so a baseline may be another model's"
)
UNSEEN = 4  # once is what a sharpness-aware optimizer does before its first step
UNSEEN_STEPS = (
    "weights are changed and no step of their {0} is seen: its `step` was replaced by one that does not call the "
    "original, or the script updates the weights itself. Nothing is judged, and no action is carried out; have the new "
    "`step` call the original one, or make it a subclass of {0}"
)
NO_LOSS = "rules on the loss have no value for such a step: {}; give them one with observe(loss=…)"


class Notices:
    """Tells the sinks that take sentences (the log) what a session has to say beside its Records."""

    def __init__(self, sinks: Sequence[Breaker], health: Health) -> None:
        self._sinks = sinks
        self._health = health
        self._incomplete = self._captured = self._no_loss = self._no_optimizer = self._unowned = False
        self._uncleared = self._undecided = False
        self._unseen_steps = 0

    def say(self, component: str, error: BaseException) -> None:
        """Give this sentence to every sink that takes one."""
        for breaker in self._sinks:
            say = getattr(breaker.sink, "internal_error", None)
            if say is not None:
                say(component, error)

    def captured(self) -> None:
        """Report that a step was captured in a CUDA graph, and nothing of it was touched."""
        if not self._captured:
            self._captured = True
            self._health.report("capture", AttachError(IN_GRAPH))

    def without_optimizer(self, names: Sequence[str]) -> None:
        """Report that no torch optimizer steps these parameters."""
        if not self._no_optimizer:
            self._no_optimizer = True
            self.say("capture", AttachError(NO_OPTIMIZER.format(shortened(names))))

    def unowned(self, names: Sequence[str]) -> None:
        """Report parameters that receive gradients, do not move and belong to no optimizer."""
        if not self._unowned:
            self._unowned = True
            self.say("coverage", AttachError(UNOWNED.format(shortened(names))))

    def uncleared(self, names: Sequence[str]) -> None:
        """Report parameters whose gradients are not cleared between steps."""
        if not self._uncleared:
            self._uncleared = True
            self.say("capture", AttachError(UNCLEARED.format(shortened(names))))

    def undecided(self, prefixes: Sequence[str]) -> None:
        """Models that went at one time had parameters that these prefixes told apart, and others succeed them."""
        if not self._undecided:
            self._undecided = True
            named = shortened([prefix.rstrip(".") or "the first" for prefix in prefixes])
            self.say("capture", AttachError(UNDECIDED.format(named)))

    def unmeasured(self, missing: Sequence[str]) -> None:
        """The parameters that nothing measures as of this step; said again only after there were none."""
        if missing and not self._incomplete:
            unowned = [name for name in missing if not name.endswith(NO_VALUES)]
            said = f"{BLIND}: {shortened(unowned)}" if unowned else VALUELESS.format(shortened(missing))
            self.say("coverage", AttachError(said))
        self._incomplete = bool(missing)

    def no_loss(self, reason: str) -> None:
        """Report that the root of a backward is no loss, and a rule needs one."""
        if not self._no_loss:
            self._no_loss = True
            self.say("loss", AttachError(NO_LOSS.format(reason)))

    def unseen_steps(self, optimizer: str) -> None:
        """Report that weights move, again, while no step of their optimizer, of this class, has been seen."""
        self._unseen_steps += 1
        if self._unseen_steps == UNSEEN:
            self.say("capture", AttachError(UNSEEN_STEPS.format(optimizer)))

    def inactive(
        self,
        fitting: Fitting,
        ruleset: RuleSet,
        found: Callable[[Callable[[], Sites]], Mapping[str, str]],
        sites: Callable[[], Sites],
    ) -> None:
        """Note which rules judge nothing of the model as it is now; say what is new."""
        before = self._health.inactive()
        now = {**fitting.off, **found(sites)}
        if now == before:
            return
        self._health.set_inactive(now)
        news = fitting.news()
        if news:
            self.say("rules", AttachError(news))
        new = {key: reason for key, reason in now.items() if key not in {*before, *fitting.off}}
        if new:
            self.say("rules", AttachError(OFF.format("; ".join(described(new, ruleset)))))
