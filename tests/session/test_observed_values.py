"""Values that a script gives to `observe`, judged by rules: every kind that takes them, and the reasons for silence."""

from __future__ import annotations

import gc
import math
import tracemalloc
from pathlib import Path

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.account.rules_without_data import RulesWithoutData
from gradwatch.detectors import DETECTORS
from gradwatch.engine import Engine
from gradwatch.records.record import Record
from gradwatch.rules.files import parse_rules
from gradwatch.rules.files.key_validation import TAKEN_BY
from gradwatch.rules.files.pydantic_models import detector_model
from gradwatch.rules.rule_set import Rule, RuleSet
from gradwatch.session.binding.unread_columns import reads_of
from gradwatch.session.pipeline import extra_columns
from gradwatch.session.watch import session_of
from gradwatch.sinks.alert_names import FALLBACK, alert_name
from tests.engine.cases import make_sites, make_snapshot
from tests.support.kept import Kept


def rules(**detect: str) -> RuleSet:
    """Rules by id, each by what stands in its `detect:`, and beside it after a semicolon."""
    lines = []
    for name, said in detect.items():
        inner, _, beside = said.partition(";")
        lines.append(f"  {name}: {{detect: {{{inner}}}{', ' + beside if beside else ''}}}\n")
    return parse_rules("version: 1\nrules:\n" + "".join(lines))


def train(
    ruleset: RuleSet, given: list[dict[str, float | torch.Tensor]], tmp_path: Path
) -> tuple[Kept, dict[str, str]]:
    """A step after each of the values given; what came of it, and the rules without data."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer, sink = torch.optim.SGD(model.parameters(), 0.01), Kept()
    with gradwatch.watch(model, optimizer, rules=ruleset, run_dir=tmp_path, sinks=[sink]) as gw:
        for values in given:
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            gw.observe(**values)
            optimizer.step()
        reasons = dict(session_of(gw).account().no_data)
    return sink, reasons


def fired(sink: Kept) -> dict[str, list[int]]:
    """The steps at which each rule began to fire."""
    found: dict[str, list[int]] = {}
    for record in sink.records:
        for event in record.verdict.events:
            if event.kind == "firing":
                found.setdefault(event.rule, []).append(record.snapshot.step)
    return found


def test_each_kind_finds_its_fault(tmp_path: Path) -> None:
    """A fall, a rise, spikes of positive values and of any sign, a drift, a NaN: each at its step, and no other."""
    given: list[dict[str, float | torch.Tensor]] = []
    for step in range(60):
        accuracy = 0.2 if step >= 50 else 0.9
        reward = 500.0 if step == 40 else -3.0 + 0.1 * math.sin(step)
        perplexity = 1e4 if step == 30 else 20.0
        given.append(
            {
                "accuracy": torch.tensor(accuracy),
                "reward": reward,
                "perplexity": perplexity,
                "growing": 1.2 ** max(0, step - 25),
                "bleu": math.nan if step == 45 else 30.0,
            }
        )
    ruleset = rules(
        low="kind: below, of: observed.accuracy, threshold: 0.5; for: 3",
        high="kind: above, of: observed.reward, threshold: 400",
        jumped="kind: spike, of: observed.perplexity",
        signed="kind: loss_spike, of: observed.reward",
        growing="kind: drift, of: observed.growing, above: 3, window: 20, lag: 20; warmup: 40",
        broken="kind: loss_nonfinite, of: observed.bleu",
    )
    sink, reasons = train(ruleset, given, tmp_path)
    assert reasons == {}
    found = fired(sink)
    assert found.pop("growing")[0] < 60
    assert found == {"low": [52], "high": [40], "jumped": [30], "signed": [40], "broken": [45]}


def test_samples_are_the_steps_with_a_value(tmp_path: Path) -> None:
    """A value that comes every third step: `for` counts values, and steps without one change nothing."""
    given: list[dict[str, float | torch.Tensor]] = [
        {"accuracy": 0.1} if step % 3 == 0 else {} for step in range(12)
    ]
    sink, _ = train(rules(low="kind: below, of: observed.accuracy, threshold: 0.5; for: 3"), given, tmp_path)
    assert fired(sink) == {"low": [6]}


def test_a_rule_that_is_silent_says_why(tmp_path: Path) -> None:
    """A misspelt name, a value off the rule's steps, a value without a logarithm."""
    ruleset = rules(
        misspelt="kind: below, of: observed.acuracy, threshold: 0.5",
        off="kind: below, of: observed.accuracy, threshold: 0.5; every: 10",
        negative="kind: spike, of: observed.reward",
    )
    given: list[dict[str, float | torch.Tensor]] = [
        {"accuracy": 0.9, "reward": -1.0} if step else {} for step in range(6)
    ]
    _, reasons = train(ruleset, given, tmp_path)
    assert reasons == {
        "misspelt": "`gw.observe(acuracy=…)` gave no number before a step; observed: accuracy, reward",
        "off": "none was observed for a step at which it is evaluated (every: 10)",
        "negative": "observed.reward was not positive at any step of the rule, and `spike` takes logarithms; "
        "`loss_spike` does not",
    }


def test_a_value_with_the_name_of_a_column_of_parameters(tmp_path: Path) -> None:
    """Rules on `mean` and on `observed.mean` judge what each of them names."""
    ruleset = rules(
        column="kind: above, of: mean, threshold: 1e6; every: 1",
        value="kind: above, of: observed.mean, threshold: 1e6",
    )
    sink, reasons = train(ruleset, [{"mean": 1e7}, {}, {"mean": 1.0}], tmp_path)
    assert fired(sink) == {"value": [0]}
    assert reasons == {}
    engine, without_data = Engine(ruleset).bind(make_sites(2)), RulesWithoutData()
    without_data.bind(0, reads_of(engine))
    without_data.observe(make_snapshot(engine.sites, 0, [1.0, 1.0], scalars={"mean": 1.0}), {})
    assert without_data.reasons() == {"column": "mean was never measured"}


def test_a_nan_in_the_gradients_hides_none_in_an_observed_value() -> None:
    """They are two facts: both are told, at the same step."""
    engine = Engine(
        rules(
            gradient="kind: nonfinite",
            value="kind: loss_nonfinite, of: observed.x",
            after="kind: loss_nonfinite",
        )
    ).bind(make_sites(2))
    snapshot = make_snapshot(engine.sites, 0, [math.nan, 1.0], scalars={"x": math.nan, "loss": math.nan})
    verdict, _ = engine.evaluate(engine.init(), snapshot)
    assert {event.rule for event in verdict.events} == {"gradient", "value"}
    snapshot = make_snapshot(engine.sites, 0, [1.0, 1.0], scalars={"x": math.nan, "loss": math.nan})
    verdict, _ = engine.evaluate(engine.init(), snapshot)
    assert {event.rule for event in verdict.events} == {"value", "after"}


def test_a_jump_of_the_learning_rate_leaves_its_baseline() -> None:
    """It is not made of gradients: a rule on it still judges at the step of the jump."""
    engine = Engine(rules(r="kind: spike, of: observed.x; warmup: 3")).bind(make_sites(2))
    state = engine.init()
    for step in range(30):
        lr, x = (0.1, 1.0) if step < 29 else (1.0, 1e6)
        snapshot = make_snapshot(engine.sites, step, [1.0, 1.0], scalars={"x": x, "lr": lr})
        verdict, state = engine.evaluate(state, snapshot)
    assert [event.rule for event in verdict.events] == ["r"]


def takes_observed(kind: str) -> bool:
    """True if `of:` of a detector may name an observed value."""
    return "observed" in str(detector_model(DETECTORS[kind]).model_json_schema()["properties"].get("of"))


def test_the_advice_names_the_kinds_that_take_one() -> None:
    """The hint for a kind that takes none lists all that do."""
    kinds = {
        kind
        for kind in DETECTORS
        if DETECTORS[kind].__module__.startswith("gradwatch.") and takes_observed(kind)
    }
    assert kinds == {word.strip(",") for word in TAKEN_BY.split() if word.strip(",") in DETECTORS}


@pytest.mark.parametrize(
    "kind",
    [
        "above",
        "below",
        "above_recent_max",
        "spike",
        "drift",
        "loss_spike",
        "loss_nonfinite",
    ],
)
def test_its_alert_claims_nothing_of_gradients(kind: str) -> None:
    """The alert of such a rule is the general one, as is its runbook."""
    assert alert_name(kind, "observed.accuracy") == FALLBACK


def test_one_form() -> None:
    """The rule keeps the name as it is written, as one value for the whole optimizer."""
    rule: Rule = rules(r="kind: above, of: observed.val/acc, threshold: 1").rule("r")
    assert (rule.detect.of, rule.scope) == ("observed.val/acc", "total")


def test_names_without_end_take_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of its own at each step: what is kept of them is bounded, and a rule on a late one has its value."""
    monkeypatch.setattr(extra_columns, "MOST_KEPT", 100)
    ruleset = rules(known="kind: below, of: observed.last, threshold: 0.5")
    model, sink = nn.Linear(4, 1), Last()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(**values: float) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        gw.observe(**values)
        optimizer.step()

    with gradwatch.watch(model, optimizer, rules=ruleset, sinks=[sink]) as gw:
        for number in range(700):
            step(**{f"value {number}": number})
        assert "observed: value 0, value 1, " in session_of(gw).account().no_data["known"]
        tracemalloc.start()
        taken = []
        for end in (1000, 1300):  # what is kept has been replaced once by the first end
            for number in range(end - 300, end):
                step(**{f"value {number}": number})
            gw.flush()
            gc.collect()
            taken.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert taken[1] - taken[0] < 300 * 50, taken  # one that is kept takes more than 100
        step(last=0.1)
        gw.flush()
        assert session_of(gw).account().no_data == {}
        assert sink.firing == ["known"]


class Last(Kept):
    """Keeps which rules fire at the last step, and no Record."""

    def write(self, record: Record) -> None:
        """Take the rules that fire."""
        self.firing = list(record.verdict.firing)
