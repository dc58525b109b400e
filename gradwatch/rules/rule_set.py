"""The nouns a rule file resolves to: frozen, complete, with every default filled in.

Nothing here knows YAML: `gradwatch.rules.files` builds these objects, the engine and the sinks read them. A
`RuleSet` is a value: two files that mean the same have the same `digest`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from gradwatch.records.columns import COSTLY_COLUMNS, RANK_COLUMNS, is_scalar

if TYPE_CHECKING:  # numpy, which `gradwatch run` does without
    from gradwatch.records.decision import OnError
    from gradwatch.records.event import Severity

Scope = Literal["param", "group", "total"]
Mode = Literal["act", "shadow"]
ClipAt = Literal["step", "backward"]
Tap = Literal["output", "full_backward"]
HistogramOf = Literal["gradients", "activations"]

NOT_BUILT: frozenset[str] = frozenset()
"""Actions that parse and validate but that this version cannot carry out: refused by name at attach."""

COSTLY_EVERY = 10
"""`every` of a rule on a costly column that does not say it and has no `do`; see `is_costly`."""


@dataclass(frozen=True, slots=True)
class Group:
    """A named set of sites: those whose name matches one of `params` and that have `min_ndim` dimensions.

    `params` are case-sensitive shell globs on torch FQNs (`*` crosses dots); `min_ndim` None = any;
    `optional` True = no error when nothing matches. The order of groups matters only for the *label* group of
    a site: the first that matches. A rule that lists a group gets every site of it.
    """

    name: str
    params: tuple[str, ...]
    min_ndim: int | None = None
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Action:
    """One item of `do:`; `params` are validated and complete.

    `gradwatch.rules.action_kinds` has every name and its parameters.
    """

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def does(self) -> str:
        """The action that is carried out: itself, or the one that a rung of `escalate` leads to."""
        return str(self.params["to"]) if self.name == "escalate" else self.name


@dataclass(frozen=True, slots=True)
class ClipPolicy:
    """One clipping method with its parameters complete, e.g. `norm` {max_norm: 1.0, scope: "total"}."""

    method: str
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Clip:
    """Standing clip policies: `total` over all parameters, `groups` by group name.

    A parameter has the policy of the first of these groups that matches it, in the order of `RuleSet.groups`; the
    stricter of that and the total's holds.

    `at` "step" applies them at the optimizer step, "backward" through the tensor hook's return value
    (local to one process; `local` True forces it where gradients are sharded or accumulated). Before the step
    `from_step` they learn, and change no gradient.
    """

    total: ClipPolicy | None = None
    groups: Mapping[str, ClipPolicy] = field(default_factory=dict)
    at: ClipAt = "step"
    local: bool = False
    from_step: int = 0


@dataclass(frozen=True, slots=True)
class Modules:
    """Opt-in module taps: which `tap`, on modules whose name matches one of the globs `names`."""

    tap: Tap = "output"
    names: tuple[str, ...] = ("*",)


@dataclass(frozen=True, slots=True)
class Histograms:
    """Histograms, each every `every` steps, of what `of` lists.

    That is gradients of the parameters whose name matches one of `params`, and activations of the tapped modules whose
    name matches one of `modules`.
    """

    every: int = 100
    params: tuple[str, ...] = ("*",)
    of: tuple[HistogramOf, ...] = ("gradients",)
    modules: tuple[str, ...] = ("*",)


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """One item of `sinks:`; `options` holds only what was written, so a sink's own defaults apply."""

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule, resolved: rule key over file `defaults` over the kind's own default.

    `detect` is the detector (its `warmup`/`half_life` are the rule's). `groups` empty = every parameter;
    `exclude` are globs on names. `from_step` is the first step, by the number in Events, at which it is judged; it
    learns before. `every`, `keep_firing_for` and `cooldown` count optimizer steps; `for_`,
    `warmup` and `half_life` count samples of the series (0 where the kind has no baseline). `inhibited_by` are ids of
    rules: while one of them fires for the same reason, this one gives no alarm of its own. `unless` are ids of rules:
    while one of them fires, this one judges nothing, unless it acts.
    """

    id: str
    detect: Any
    scope: Scope = "param"
    groups: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    every: int = 1
    from_step: int = 0
    for_: int = 1
    keep_firing_for: int = 0
    cooldown: int = 0
    warmup: int = 0
    half_life: int = 0
    severity: Severity = "warning"
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    do: tuple[Action, ...] = ()
    mode: Mode = "act"
    on_error: OnError = "pass"
    enabled: bool = True
    optional: bool = False
    inhibited_by: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The detector's kind, as the file spells it."""
        return str(self.detect.kind)

    @property
    def acts(self) -> bool:
        """True if this rule may change training: it is enabled, has actions, and is not in shadow mode."""
        return self.enabled and bool(self.do) and self.mode == "act"

    @property
    def staggered(self) -> bool:
        """True if each site is read and judged every `every` steps at a phase of its own, not all at step % every == 0.

        So where a column costs a read of whole tensors, each site is judged by itself, and no action waits for it.
        """
        alone = self.scope == "param" and self.detect.elementwise
        return is_costly(self.detect) and self.every > 1 and alone and not self.do

    @property
    def judged_every(self) -> int:
        """The steps at which something of it may be judged: multiples of this.

        Of a rule on ranks its series say which (`Series.every`): a step of theirs is judged as cheaply as any other.
        """
        return 1 if self.staggered or self.detect.columns[0] in RANK_COLUMNS else self.every


@dataclass(frozen=True, slots=True)
class RuleSet:
    """Everything a rule file says, after `extends`, `defaults` and `overrides`.

    `groups` and `rules` are in file order; `rules` holds disabled ones too (`enabled` False). `inactive` maps
    the id of a rule that cannot run in this version to the reason; such a rule is not in `rules`. `sinks`
    None = the file does not say. `digest` is the sha256 of the canonical resolved form. `origins` maps
    "rule-id.key" (and "rule-id.detect.key") to "file:line", or to "default" where nothing was written; "group:NAME",
    "clip:total", "clip:groups.NAME" and "sinks:NAME" to where these stand.
    """

    version: int = 1
    groups: tuple[Group, ...] = ()
    rules: tuple[Rule, ...] = ()
    clip: Clip | None = None
    modules: Modules | None = None
    histograms: Histograms | None = None
    sinks: tuple[SinkSpec, ...] | None = None
    digest: str = ""
    origins: Mapping[str, str] = field(default_factory=dict)
    inactive: Mapping[str, str] = field(default_factory=dict)

    def rule(self, rule_id: str) -> Rule:
        """The rule of that id; KeyError when there is none."""
        for rule in self.rules:
            if rule.id == rule_id:
                return rule
        raise KeyError(rule_id)


def is_costly(detect: Any) -> bool:
    """True if a detector judges a column that costs a read of whole tensors."""
    return detect.columns[0] in COSTLY_COLUMNS


def whole_optimizer(column: str) -> bool:
    """True if a column has one value per step, so that `scope`, `groups` and `exclude` mean nothing for
    it.
    """
    return is_scalar(column)
