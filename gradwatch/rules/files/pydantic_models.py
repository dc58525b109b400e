"""The shape of a rule file as pydantic models: which keys there are, of what type, in what range.

The models are flat (one per map of the file); what a word *means* (is there such a group? does this kind
have a baseline?) is checked in `gradwatch.rules.files.rule_building`. Everything is strict: no text becomes a
number, no number a truth value.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, Field, create_model

from gradwatch.detectors.detector import Detector
from gradwatch.policies import AnyPolicy, Policy
from gradwatch.records.decision import OnError
from gradwatch.records.event import Severity
from gradwatch.rules.field_types import Count, Glob, Globs, Names, Steps, Words
from gradwatch.rules.files.model_base import CONFIG, Model, unset
from gradwatch.rules.key_descriptions import described
from gradwatch.rules.rule_set import ClipAt, HistogramOf, Mode, Scope, Tap

HistogramsOf = Annotated[list[HistogramOf], Field(min_length=1)]
Parts = Annotated[list[Any], Field(min_length=1)]
MOST_FILES = 16
MOST_OVERRIDES = 32


class Document(Model):
    """A gradwatch rule file: which gradients to watch, what counts as unhealthy, what to do then."""

    version: Annotated[int, Field(ge=1, le=1)] = Field(description="Version of the rule language.")
    extends: list[Annotated[str, Field(min_length=1, max_length=1_000)]] = unset(
        max_length=MOST_FILES,
        description="Shipped packs by name, or paths relative to this file; later wins, merged by rule id.",
    )
    defaults: dict[str, Any] = unset("Applies to every rule that does not say otherwise.")
    groups: dict[str, Any] = unset(
        "Named sets of parameters; the first match gives a parameter its label group."
    )
    rules: dict[str, Any] = unset("Rules by id.")
    clip: dict[str, Any] = unset("Clipping policies applied at every step; the strictest wins, applied once.")
    modules: dict[str, Any] = unset("Opt-in taps on modules.")
    histograms: dict[str, Any] = unset(
        "Opt-in histograms of gradients and activations, for experiment trackers."
    )
    sinks: list[Any] = unset("Where results go.")
    overrides: list[dict[str, Any]] = unset(
        "Changes for some runs, in order, on top of everything else.", max_length=MOST_OVERRIDES
    )


class Override(Model):
    """Changes that apply where `match` does."""

    match: dict[str, Any] = Field(description="Which runs.")
    defaults: dict[str, Any] = unset("Changed defaults.")
    groups: dict[str, Any] = unset("Changed or further groups.")
    rules: dict[str, Any] = unset("Changed or further rules.")
    clip: dict[str, Any] = unset("Changed clipping policies.")
    modules: dict[str, Any] = unset("Changed module taps.")
    histograms: dict[str, Any] = unset("Changed histograms.")
    sinks: list[Any] = unset("Replaces the sinks.")


class Match(Model):
    """Selection of the runs that an override is for."""

    run: Glob = Field(description="Shell glob on the run id.")


class Timing(Model):
    """The keys that `defaults` and a rule share."""

    every: Count = unset(
        "Evaluated at steps with step % every = 0; with scope param on a column that costs a read of whole "
        "tensors, each parameter at a step of its own out of every so many. Left out: 1; 10 for a rule without "
        "`do` on such a column (see gradwatch/docs/columns.md)."
    )
    from_step: Steps = unset(
        "The first step at which it is judged (0), by the number that events show; before it nothing of it is pending, "
        "fires or acts, and baselines learn."
    )
    warmup: Count = unset(
        "Samples of a series before it may fire, or (`plateau`) before it begins to count; only kinds with a baseline."
    )
    half_life: Count = unset("Half-life of the baseline in samples; only kinds with a baseline.")
    for_: Count = unset(
        "Breaching samples before it fires; an action on NaN or Inf does not wait. Actions are for the steps that "
        "breach, not for all while it fires.",
        alias="for",
    )
    keep_firing_for: Steps = unset("Quiet steps before it is resolved.")
    cooldown: Steps = unset(
        "Steps after the resolve in which the rule, firing again, joins the same incident and is not logged or sent, "
        "whichever parameter it is about."
    )
    severity: Severity = unset("info, warning or critical.")
    mode: Mode = unset("act, or shadow: report what would have been done and do nothing.")
    on_error: OnError = unset("What happens to the gradient when an action fails.")


class Defaults(Timing):
    """Applies to every rule that does not say otherwise."""


class GroupEntry(Model):
    """A named set of parameters."""

    params: Globs = unset("Case-sensitive shell globs on torch parameter names; * crosses dots.")
    min_ndim: Annotated[int, Field(ge=0, le=64)] = unset("Only tensors with at least so many dimensions.")
    optional: bool = unset("No warning when it matches nothing, and no refusal by --strict-rules.")


class RuleEntry(Timing):
    """A rule: its detector, its series, its timing and its actions."""

    detect: dict[str, Any] = unset("The detector: its kind and its thresholds.")
    when: dict[str, Any] = unset("Instead of a detector: a condition on other rules.")
    scope: Scope | Literal["module"] = unset(
        "param: each parameter; group: one value for each group, made as gradwatch/docs/columns.md says of the "
        "column; total: over all selected; module: each tapped module, of the columns that are measured there."
    )
    groups: Names = unset("Only the parameters of these groups.")
    exclude: Globs = unset("Not the parameters whose names match these globs.")
    inhibited_by: Names = unset(
        "Ids of rules: where one of them, as grave or graver, fires for the same reason (the same parameter, or the "
        "whole), this rule gives no alarm of its own, and its events belong to the other's incident."
    )
    unless: Names = unset(
        "Ids of rules: on a step on which one of them fires this rule judges nothing, as if the step had no value; "
        "what it learns goes on. A rule that acts judges every step all the same. Not for one on what is not finite."
    )
    labels: Words = unset("Further labels of its events.")
    annotations: Words = unset("Texts for people: summary, description, runbook_url …")
    do: list[Any] = unset("Actions.")
    enabled: bool = unset("False switches the rule off.")
    optional: bool = unset("No warning when it matches nothing, and no refusal by --strict-rules.")


class ConditionEntry(Model):
    """A condition on rules, by their ids: exactly one of all, any and not; judged at every step, after them."""

    all_: Parts = unset("Holds where each of these does.", alias="all")
    any_: Parts = unset("Holds where at least one of these does.", alias="any")
    not_: Any = unset(
        "Holds where this does not; not known, and so no reason to fire, as long as its rule has had no data.",
        alias="not",
    )
    within: Count = unset(
        "A rule holds where it is firing, or was at one of so many last steps, this one included (as around it; 1)."
    )


class ModulesEntry(Model):
    """Opt-in taps on modules."""

    tap: Tap = unset(
        "output (safe), or full_backward (real backward hooks; refused where they break a model)."
    )
    names: Globs = unset("Case-sensitive shell globs on module names.")


class HistogramsEntry(Model):
    """Opt-in histograms of gradients and activations over octaves of magnitude, for experiment trackers."""

    of: HistogramsOf = unset(
        "gradients (left out: only these), activations (of the modules that are tapped)."
    )
    every: Count = unset("Each parameter or module every N steps (100), in turns.")
    params: Globs = unset("Gradients of the parameters whose names match these case-sensitive shell globs.")
    modules: Globs = unset("Activations of the tapped modules whose names match these globs.")


class ClipEntry(Model):
    """Standing clipping policies."""

    total: dict[str, Any] = unset("Over all parameters.")
    groups: dict[str, Any] = unset(
        "By group name; a parameter has the policy of the first that matches it, in the order of `groups:` of the file."
    )
    at: ClipAt = unset("step (right everywhere), or backward (through the hook's return value).")
    local: bool = unset("Force `at: backward` where gradients are sharded or accumulated.")
    from_step: Steps = unset(
        "The first step that is clipped (0); before it the policies learn and change nothing."
    )


# --- clipping methods --------------------------------------------------------------------------------------


_POLICY_MODELS: dict[type, type[BaseModel]] = {}


def policy_model(cls: type[AnyPolicy]) -> type[BaseModel]:
    """The keys of a policy, less `method`: its dataclass fields, and `scope` where it has a choice.

    Works for any frozen dataclass, so a third-party method is validated by being registered.
    """
    model = _POLICY_MODELS.get(cls)
    if model is None:
        extra: dict[str, Any] = {}
        if issubclass(cls, Policy) and cls.scoped:
            extra["scope"] = (Scope, unset("param, group or total; by default the place it is written in."))
        model = _POLICY_MODELS[cls] = create_model(
            cls.__name__, __config__=CONFIG, __doc__=cls.__doc__, **_keys(cls), **extra
        )
    return model


# --- detectors ---------------------------------------------------------------------------------------------


_DETECTOR_MODELS: dict[type, type[BaseModel]] = {}


def detector_model(cls: type[Detector]) -> type[BaseModel]:
    """The keys of `detect:` for a kind, less `kind`: its dataclass fields but those that the rule sets.

    Works for any frozen dataclass, so a third-party kind is validated by being registered.
    """
    model = _DETECTOR_MODELS.get(cls)
    if model is None:
        model = _DETECTOR_MODELS[cls] = _detector_model(cls)
    return model


def _detector_model(cls: type[Detector]) -> type[BaseModel]:
    return create_model(cls.__name__, __config__=CONFIG, __doc__=cls.__doc__, **_keys(cls))


def _keys(cls: type) -> dict[str, Any]:
    """Fields of a dataclass for `create_model`, less those that the rule sets."""
    hints = get_type_hints(cls, include_extras=True)
    keys: dict[str, Any] = {}
    sentences = described(cls)
    for each in fields(cls):  # every registered kind is a dataclass
        if each.metadata.get("rule_key"):
            continue
        default: Any = ... if each.default is MISSING else each.default
        if each.default_factory is not MISSING:
            default = Field(default_factory=each.default_factory)
        sentence = Field(description=sentences[each.name] or None)
        keys[each.name] = (Annotated[hints[each.name], sentence], default)
    return keys
