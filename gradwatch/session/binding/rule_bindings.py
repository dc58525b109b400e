"""The rules bound to every optimizer of one session, and what they have learned."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from gradwatch.account.session_counts import SessionCounts
from gradwatch.actions.clip_section import ClipSection
from gradwatch.capture.columns import column_reader
from gradwatch.capture.columns.column_reader import ColumnReader
from gradwatch.capture.columns.histograms import HistogramReader, HistogramTurns
from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.capture.parameter_shards import is_shard
from gradwatch.capture.snapshot_assembly import with_modules
from gradwatch.checkpoint.health_tracker import CheckpointHealthTracker
from gradwatch.distributed.ranks import Ranks
from gradwatch.engine import BoundEngine, Engine
from gradwatch.engine.actions.backward_clips import at_step
from gradwatch.engine.changed_parameters import changed_parameters
from gradwatch.engine.engine_state import EngineState
from gradwatch.engine.selected_parameters import matching
from gradwatch.errors import AttachError
from gradwatch.records.columns import RANK_COLUMNS
from gradwatch.records.snapshot import Sites
from gradwatch.session.active_or_paused import Activity
from gradwatch.session.binding.backward_actions import own_sites
from gradwatch.session.binding.optimizer_rules import OptimizerRules, clip_section_of
from gradwatch.session.binding.rank_requirements import WHOLE_ROWS, sharded_rows
from gradwatch.session.binding.tensor_hooks import TensorHooks
from gradwatch.session.binding.unread_columns import (
    NOTHING_CHOSEN,
    OF_PARTS,
    of_histograms,
    of_ranks,
    reads_of,
    staggered,
    unread_columns,
)
from gradwatch.session.optimizer_context import Contexts, OptimizerContext
from gradwatch.session.saved_state import OptimizerStates


class RuleBindings:
    """Binds rules to contexts, and goes through those that have some."""

    def __init__(
        self, engine: Engine, ranks: Ranks, activity: Activity, contexts: Contexts, totals: SessionCounts
    ) -> None:
        self._engine = engine
        self._ranks = ranks
        self._activity = activity
        self._contexts = contexts
        self._totals = totals
        self.saved_states = OptimizerStates(contexts)
        self.hooks = TensorHooks(engine, ranks, activity, contexts)
        self.most_parameters = 0  # named in the captures at one time, each counted once
        self.parameters_before = 0  # of these, counted by the session before

    def __iter__(self) -> Iterator[OptimizerRules]:
        return iter(self._contexts.bound())

    def context(self, captured: OptimizerCapture) -> OptimizerContext:
        """The context that a capture's rules are bound in."""
        return self._contexts.of(captured)

    # -- binding -----------------------------------------------------------------------------------------

    def bind(
        self, captured: OptimizerCapture, modules: tuple[str, ...], taps: Sequence[Tensor | None]
    ) -> OptimizerContext:
        """Bind the rules to a capture and its tapped modules, baselines by name; the context they are bound in."""
        ctx = self._contexts.of(captured)
        sites = with_modules(self._ranks.sites(captured, ctx.membership), modules)
        sites = self._ranks.with_ranks(ctx.membership, sites)
        before, moved = ctx.bound_rules, ctx.clips_at_step_instead
        alike = before is not None and sites.alike(before.bound.sites)
        if before is not None and alike and not moved:  # an optimizer after another
            bound, state = before.bound, before.state
        else:
            bound = (self._at_step if moved else self._engine).bind(sites)
            state = bound.init() if before is None else bound.adopt(before.state, before.bound)
        if before is not None and (
            before.begins_anew
            or captured.succeeds
            or _optimizer_of(before.captured) is not _optimizer_of(captured)
        ):
            state = bound.restarts.for_another_optimizer(state)
        if before is not None and not alike and before.record is not None:
            state = self._with_other_parameters(before, bound, state)
        local = self.hooks.local_norms(bound, taps, before)
        own = own_sites(bound, captured)
        unread = unread_columns(ctx)
        needs = bound.needs.only(column_reader.COLUMNS - unread.keys())
        reader = ColumnReader(needs, bound.plan.staggering, own)
        histograms, no_histograms = self._histograms(captured, bound, own, unread)
        critical = frozenset(one.rule.id for one in bound.plan.rules if one.rule.severity == "critical")
        health_tracker = CheckpointHealthTracker(critical)
        if before is not None:
            health_tracker.carry_on(before.health_tracker)
            if state.begun_anew:
                health_tracker.begin_anew()
        bound_rules = OptimizerRules(
            bound,
            state,
            bound.sites,
            reader,
            local,
            health_tracker,
            captured,
            clip_section=self._clip_section(captured, bound) if bound.clipping else None,
            histograms=histograms,
        )
        ctx.bind(bound_rules)
        if not alike:
            self._count_parameters()
        if not captured.without_optimizer:
            self.hooks.act_in_backward(bound_rules, captured, taps, before)
        if before is None or bound is not before.bound or unread:
            self._expect_data(captured, bound, modules, unread, no_histograms)
        self.saved_states.take_up(captured, bound_rules)
        self.hooks.publish_bounds(bound_rules, bound_rules.captured.step)
        return ctx

    def _expect_data(
        self,
        captured: OptimizerCapture,
        bound: BoundEngine,
        modules: tuple[str, ...],
        unread: Mapping[str, str],
        no_histograms: str,
    ) -> None:
        """Note what each rule and histogram reads: until it has come, they are without data, for these reasons."""
        reads = reads_of(bound, unread)
        if captured.without_optimizer and self._ranks.several:
            reads = {**of_ranks(self._engine), **reads}
        asked = self._engine.ruleset.histograms
        if asked is not None and "gradients" in asked.of:
            reads |= of_histograms("gradients", no_histograms)
        if asked is not None and "activations" in asked.of and not captured.index:
            chosen = any(fnmatch.fnmatchcase(name, glob) for name in modules for glob in asked.modules)
            reads |= of_histograms("activations", "" if chosen else NOTHING_CHOSEN["activations"])
        self._totals.without_data.bind(captured.index, reads)
        self._totals.never_judged.bind(captured.index, staggered(bound, unread))

    def _with_other_parameters(
        self, before: OptimizerRules, bound: BoundEngine, state: EngineState
    ) -> EngineState:
        """The state without the baselines of what is made of other parameters than before; told with the next step."""
        reason = changed_parameters(before.bound.sites, bound.sites)
        if not reason:
            return state
        after = bound.restarts.with_other_parameters(state, before.bound.plan, reason)
        if after is not state:
            self._totals.begun_anew(reason)
        return after

    def go_on(self, ctx: OptimizerContext) -> bool:
        """Go on with the rules of a context for another optimizer of the same sites; False where they need binding."""
        bound_rules, saved = ctx.rules, self.saved_states
        if self.hooks.acts or saved.waiting or saved.handed_over or bound_rules.local is not None:
            return False
        bound_rules.begin_anew(ctx.captured)
        return True

    def _histograms(
        self,
        captured: OptimizerCapture,
        bound: BoundEngine,
        own: NDArray[np.intp],
        unread: Mapping[str, str],
    ) -> tuple[HistogramReader | None, str]:
        """The reader of histograms of gradients where they are asked for, or the reason why there is none."""
        asked = self._engine.ruleset.histograms
        if asked is None or "gradients" not in asked.of:
            return None, ""
        if captured.inside_backward or captured.without_optimizer:
            return None, next(iter(unread.values()))  # the same of all columns
        if unread or any(map(is_shard, captured.params)):
            return None, OF_PARTS
        chosen = matching(captured.sites, asked.params)
        if not chosen.any():
            return None, NOTHING_CHOSEN["gradients"]
        phases = bound.plan.staggering.phases(asked.every)[own]
        return HistogramReader(HistogramTurns(asked.every, phases, chosen)), ""

    def _clip_section(self, captured: OptimizerCapture, bound: BoundEngine) -> ClipSection | None:
        """The `clip:` section for this capture, without policies on rows that were sharded since the attach."""
        clipping, names = bound.clipping, captured.sites.names
        place = {name: site for site, name in enumerate(bound.sites.names)}
        sharded = [k for k, param in enumerate(captured.params) if clipping.elementwise and is_shard(param)]
        refused = sharded_rows(clipping, bound.sites, [place[names[k]] for k in sharded])
        if refused:
            self._activity.failed("action", AttachError(f"{refused}; {WHOLE_ROWS}"))
        return clip_section_of(clipping, [place[name] for name in names], names, sharded)

    @functools.cached_property
    def _at_step(self) -> Engine:
        """The rules with nothing left to do in the backward but between modules."""
        return Engine(at_step(self._engine.ruleset), self._engine.rank)

    def move_to_step(self, ctx: OptimizerContext) -> None:
        """Move to the step, from this one on, what hooks in the backward no longer do."""
        bound_rules = ctx.rules
        bound = self._at_step.bind(bound_rules.bound.sites)
        bound_rules.go_by(bound, self._clip_section(ctx.captured, bound) if bound.clipping else None)

    def inactive(self, everything: Callable[[], Sites]) -> dict[str, str]:
        """The reason why a rule (by id) or a group (`group:NAME`) judges nothing; not those that are `optional`.

        `everything` gives the sites of the whole model. Rules about ranks are known once a capture is bound.
        """
        if not self._engine.may_miss:
            return {}
        found = self._engine.unmatched(everything())
        captures = [bound_rules.bound.inactive for bound_rules in self]
        for rule in self._engine.ruleset.rules:
            if rule.enabled and not rule.optional and RANK_COLUMNS.intersection(rule.detect.columns):
                reasons = [inactive.get(rule.id, "") for inactive in captures]
                if reasons and all(reasons):
                    found[rule.id] = reasons[0]
        return found

    def begun(self) -> list[OptimizerRules]:
        """Rules of optimizers that have stepped, or that there is something to report of; all where none has.

        An optimizer that another one wraps, and that never steps itself, holds nothing back.
        """
        found = list(self)
        begun = [
            bound_rules
            for bound_rules in found
            if bound_rules.record is not None
            or bound_rules.health_tracker.now.last_healthy_step is not None
            or not bound_rules.health_tracker.now.healthy
        ]
        return begun or found

    def warming_up(self) -> dict[str, str]:
        """The rules that are warming up in every capture that they judge anything of, with how far they are in one."""
        begun, waiting, warm = self.begun(), dict[str, str](), set[str]()
        for bound_rules in begun:
            here = bound_rules.bound.warming_up(bound_rules.state)
            waiting = here | waiting
            warm |= bound_rules.bound.judging.difference(here)
        return {rule: waiting[rule] for rule in sorted(waiting) if rule not in warm}

    def count_on(self, parameters: int) -> None:
        """Count on from the most parameters that the session before has had."""
        self.most_parameters = self.parameters_before = parameters

    def _count_parameters(self) -> None:
        named = (zip(bound_rules.sites.names, bound_rules.sites.kinds, strict=True) for bound_rules in self)
        found = {name for sites in named for name, kind in sites if kind == "param"}
        self.most_parameters = max(self.most_parameters, len(found))

    def rebaseline(self, reason: str, params: str, rules: Sequence[str] = ()) -> None:
        """Start the baselines of parameters whose names match `params` afresh, in every optimizer."""
        self._totals.begun_anew(reason)
        for bound_rules in self:
            bound_rules.rebaseline(reason, params, rules)
            self.hooks.publish_bounds(bound_rules, bound_rules.captured.step)

    def load(self, saved: Mapping[str, Any], captures: Iterable[OptimizerCapture]) -> None:
        """Go on from saved states; captures that do not exist yet take theirs when they are bound."""
        self.saved_states.keep(saved)
        for captured in captures:
            bound_rules = self._contexts.rules_of(captured)
            if bound_rules is not None:
                self.saved_states.take_up(captured, bound_rules)
                self.hooks.publish_bounds(bound_rules, bound_rules.captured.step)


def _optimizer_of(captured: OptimizerCapture) -> Optimizer | None:
    return None if captured.optimizer is None else captured.optimizer()
