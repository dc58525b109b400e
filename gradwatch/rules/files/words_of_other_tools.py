"""Advice on words that people type from other tools, or by guess: what is written here instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gradwatch.rules.action_kinds import ACTIONS as OUR_ACTIONS
from gradwatch.rules.sink_kinds import SINKS as OUR_SINKS

_NOTHING = (
    "no action is needed: what fires is logged, recorded and exported; `severity:` says how grave it is, and "
    "`sinks:` who is written to (slack, email, webhook, alertmanager)"
)
_GROUP = (
    "name them as a group, `groups: {mine: {params: [...]}}` beside `rules:`, and write `groups: [mine]` here"
)
_DEFAULT_SINKS = "prometheus, journal, log"
_WRITTEN_TO = (
    f"sinks are of the whole file: write `sinks: [{_DEFAULT_SINKS}, slack]` beside `rules:`; `severity:` of a sink is "
    "the least that it writes of"
)
_WITH_AN_ADDRESS = ("email", "webhook")
_REPLACED = "a list, which replaces the default one"
CLIP = "clip: {total: {method: norm, max_norm: 1.0}}"
_NOT_FINITE = "nonfinite: a NaN or Inf"
_LATER = "start_step start_at start_after start begin begin_step after after_step after_steps delay first_step since"
_FROM_STEP = "from_step: the first step that is judged; baselines learn before it"
_TOO_LARGE = (
    "above (a fixed threshold), spike or above_usual (against its own past), "
    "or jump or diverged (before there is a past)"
)
_TOO_SMALL = "below (a fixed threshold), below_usual or drop (against its own past), or all_zero"


def _each(words: str, write: str = "", say: str = "") -> dict[str, str]:
    """One advice for several words: what to `write`, or a sentence of its own."""
    return dict.fromkeys(words.split(), say or f"write {write}")


def _sinks(*names: str) -> str:
    """The section with these sinks beside those that are there without it."""
    further = [
        f"{{{name}: …}}" if name in _WITH_AN_ADDRESS else name
        for name in names
        if name not in _DEFAULT_SINKS.split(", ")
    ]
    return f"sinks: [{', '.join((_DEFAULT_SINKS, *further))}]"


def as_list(key: str, names: Iterable[str]) -> str:
    """Advice on a map in the place of `sinks:` or `do:`, with the keys of it that are known there."""
    if key == "sinks":
        return f"write {_sinks(*(name for name in names if name in OUR_SINKS))}: {_REPLACED}"
    known = ", ".join(name for name in names if name in OUR_ACTIONS)
    return f"write a list, with the parameters of an action in its own map: [{known or 'skip_step'}]"


KINDS: Mapping[str, str] = {
    **_each("nan inf nan_inf naninf isnan non_finite non-finite not_finite infinite", _NOT_FINITE),
    **_each("explode exploding explosion exploding_gradient exploding_gradients overflow", _TOO_LARGE),
    **_each("gt greater greater_than max maximum threshold limit over", "above: a fixed threshold"),
    **_each("vanish vanishing vanishing_gradient vanishing_gradients underflow", _TOO_SMALL),
    **_each("lt less less_than min minimum under", "below: a fixed threshold"),
    **_each(
        "zscore z_score z-score anomaly outlier sigma ewma mean_std",
        "spike: `above:` is in standard deviations",
    ),
    **_each("loss loss_nan loss_explode", "loss_nonfinite, loss_spike, or above with `of: loss`"),
    **_each("lr learning_rate", "lr_jump, or above or below with `of: lr`"),
    **_each("frozen unchanged not_updating", "stuck (weights that do not move) or never (no gradient)"),
    **_each(
        "no_improvement stagnation stagnating early_stopping reduce_on_plateau not_improving patience",
        "plateau: no better by 1 % (`by`) for so many `steps`",
    ),
    **_each("zero zeros zero_grad", "all_zero (every gradient) or dead (one parameter's elements)"),
    **_each("ratio update update_to_weight", "update_ratio"),
}
"""For `kind:` of a detector."""

ACTIONS: Mapping[str, str] = {
    **_each("alert notify warn warning log report print slack email webhook pagerduty page", say=_NOTHING),
    **_each("skip skip_batch skip_update ignore drop", "skip_step"),
    **_each("abort halt raise exit kill terminate fail stop_training", "stop"),
    **_each(
        "clip_norm clip_grad clip_grad_norm clip_value",
        "clip, with `to:` the norm; or the section `clip:` for every step",
    ),
    **_each("checkpoint save dump bundle", "snapshot: the step with all that is needed to run it again"),
    **_each("zero zero_grad zero_nan nan_to_num", "zero_nonfinite"),
    **_each("explain debug detect_anomaly cause locate", "localise: the operation and the line"),
    **_each("scale scale_down", "rescale"),
}
"""For entries of `do:`."""

ACTION_KEYS: Mapping[str, Mapping[str, str]] = {
    "clip": _each("max_norm norm value threshold limit", "to: the norm that is left"),
    "stop": _each(
        "after max_consecutive patience times",
        "`skip_step: {max_consecutive: 10, then: stop}`, or `escalate: {after: 10 in 10, to: stop}`",
    ),
    "localise": _each(
        "most max max_searches times limit at_most count max_consecutive",
        "keep: the incidents of a run whose cause is sought",
    ),
    "skip_step": _each("max times limit patience", "max_consecutive: so many in a row, then `then:`"),
}
"""For parameters of an action."""

SINKS: Mapping[str, str] = {
    **_each("console stdout stderr print terminal", "log"),
    **_each(
        "discord teams msteams ntfy telegram mattermost pagerduty opsgenie http",
        "webhook, with the `body:` it wants",
    ),
    **_each("mail smtp e-mail", "email"),
    **_each("file jsonl csv json disk", "journal: the recording of the run"),
    **_each("grafana metrics", "prometheus: what dashboards read"),
    **_each("opentelemetry otel", "otlp"),
    **_each("tb", "tensorboard"),
    **_each("statsd graphite influx datadog", "otlp: to a collector that passes it on"),
}
"""For entries of `sinks:`."""

_OF_NAMES = "params: globs on the names of parameters, which `gradwatch init --model module:function` lists"
GROUP_KEYS: Mapping[str, str] = {
    **_each("match names name include parameters param layer layers pattern patterns", _OF_NAMES),
    **_each("modules module type types layer_type", _OF_NAMES),
    **_each(
        "exclude except not without ignore",
        say="a group has no exceptions: give these a group of their own before it, for the first group counts "
        "(a rule has `exclude:`)",
    ),
}
"""For keys of a group of parameters."""


CLIP_KEYS: Mapping[str, str] = _each(_LATER, "from_step: the first step that is clipped")
"""For keys of the section `clip:`."""

DEFAULTS_KEYS: Mapping[str, str] = _each(_LATER, _FROM_STEP)
"""For keys of `defaults:`."""

POLICY_KEYS: Mapping[str, str] = {
    **_each(
        "exclude except params parameters names groups modules layers",
        say="a policy is for all (`total:`) or for a group: `groups: {mine: {params: [...]}}` beside `clip:`, and "
        "`clip: {groups: {mine: {method: …}}}`",
    ),
    **_each(
        f"from_step {_LATER}",
        say="all policies begin at one step: `clip: {from_step: 500, total: {method: …}}`",
    ),
}
"""For parameters of a clip policy."""

SINK_KEYS: Mapping[str, str] = _each(
    "rules rule only groups exclude labels",
    say="a sink gets all rules of its `severity:` at least; who is to get which of them is for Alertmanager's routes "
    "(sink `alertmanager`)",
)
"""For parameters of a sink."""

_KEYS_OF_SINK: Mapping[str, Mapping[str, str]] = {
    "pushgateway": _each(
        "every every_seconds interval interval_seconds push_interval frequency",
        say="it pushes once, when the run ends, as a Pushgateway is meant for; to watch a run that goes on, have "
        "Prometheus scrape it (`prometheus: {listen: HOST:PORT}`), or use textfile or otlp, which take `every_seconds`",
    ),
}
"""For parameters of one sink."""

MATCH_KEYS: Mapping[str, str] = _each(
    "group groups param params parameters name names layer layers module modules rule rules",
    say="overrides are for some runs, by the run's name; for some parameters write a rule with `groups:`",
)
"""For keys of `match:` in an override."""

RULE_KEYS: Mapping[str, str] = {
    **_each("params parameters param parameter match names layer modules module include only", say=_GROUP),
    **_each("action actions then", "do: [...]"),
    **_each("level priority", "severity: info, warning or critical"),
    **_each("if condition conditions", "`detect:` for one measurement, `when:` to join rules"),
    **_each("description message summary", 'annotations: {description: "…"}'),
    **_each("id name title", say="the key above is its name"),
    **_each("patience duration consecutive", "for: so many steps in a row"),
    **_each(_LATER, _FROM_STEP),
    **_each("interval frequency freq", "every: so many steps"),
    **_each("disabled", "enabled: false"),
    **_each("expr expression query", "detect: {kind: above, of: COLUMN, threshold: …}"),
    **_each("alert", say="the key above is its name, and it alerts without being told to"),
    **_each("sinks notify notifications notifier receivers", say=_WRITTEN_TO),
    **_each(" ".join(OUR_SINKS), say=_WRITTEN_TO),
    **{name: f"write do: [{name}]" for name in OUR_ACTIONS},
    **_each(
        "clip grad_clip clip_norm clip_grad_norm max_grad_norm gradient_clip_val gradient_clipping",
        f"do: [{{clip: {{to: 1.0}}}}] for the steps at which it breaches, or `{CLIP}` beside `rules:` for every step",
    ),
}
"""For keys of a rule."""

FILE_KEYS: Mapping[str, str] = {
    **_each(
        "max_grad_norm gradient_clip_val gradient_clipping grad_clip clip_grad_norm clip_norm max_norm",
        CLIP,
    ),
    **_each(
        "alert alerts alerting notify notifications notifier receivers", f"{_sinks('slack')}: {_REPLACED}"
    ),
    **{name: f"write {_sinks(name)}: {_REPLACED}" for name in OUR_SINKS},
    **_each("thresholds detectors checks", "rules: {NAME: {detect: {kind: …}}}"),
    **_each("include includes inherit base", "extends: [default]"),
}
"""For keys of a file."""

DETECT_KEYS: Mapping[str, tuple[str, ...]] = {
    "threshold": (
        "above",
        "below",
        "max",
        "min",
        "value",
        "limit",
        "level",
        "gt",
        "lt",
        "greater_than",
        "less_than",
    ),
    "above": (
        "threshold",
        "z",
        "zscore",
        "z_score",
        "sigma",
        "sigmas",
        "std",
        "value",
        "limit",
        "below",
        "factor",
        "ratio",
        "times",
    ),
}
"""For keys inside `detect:` of a kind that has the key in front, whose own sentence says what it means there."""

COLUMNS: Mapping[str, str] = {
    **_each(
        "loss",
        "`kind: loss_spike` for the loss against its own past, `kind: loss_nonfinite` for a NaN or Inf of it; `above` "
        "and `below` take `of: loss`",
    ),
    **_each("lr learning_rate", "`kind: lr_jump`; `above` and `below` take `of: lr`"),
    **_each("grad gradient gradients grad_norm gradient_norm", "norm (of each parameter) or total_norm"),
    **_each("weight weights param", "weight_norm, weight_mean or weight_std"),
    **_each("update updates", "update_norm, or update_ratio for its share of the weight"),
    **_each("activation activations", "activation_std and others, of modules"),
}
"""For `of:` where the detector does not take the word."""


SCOPES: Mapping[str, str] = {
    **_each(
        "layer layers tensor weight weights parameter parameters each",
        "scope: param: each parameter (a weight, a bias) by itself; for several as one, `scope: group` and a group for "
        "each layer",
    ),
    **_each("model global whole all run", "scope: total: all parameters as one"),
}
"""For `scope:`."""


def sink_keys(name: str) -> Mapping[str, str]:
    """Advice by word on parameters of the sink of this name."""
    return {**SINK_KEYS, **_KEYS_OF_SINK.get(name, {})}


def detect_keys(sentences: Mapping[str, str]) -> Mapping[str, str]:
    """Advice by word on keys inside `detect:` of a kind with these keys, each with its sentence."""
    return {
        word: f"write {key}: {sentences[key]}"
        for key, words in DETECT_KEYS.items()
        if key in sentences
        for word in words
        if word not in sentences
    }
