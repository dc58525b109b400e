"""Unit tests of rule files: the notation, what is refused and where, and that a simulated step is a real one."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradwatch
from gradwatch.cli import main
from gradwatch.errors import RuleFileError
from gradwatch.records.decision import Order
from gradwatch.records.record import Record
from gradwatch.rule_tests import Case, compared, load_tests, simulate
from gradwatch.rule_tests.load_test_file import sites_of
from gradwatch.rule_tests.series_notation import MOST_STEPS, NotationError, expand
from gradwatch.rules.files import load_rules, parse_rules
from gradwatch.rules.packs import pack_directory, pack_names
from gradwatch.rules.problem_codes import CODES
from gradwatch.rules.rule_set import RuleSet
from gradwatch.rules.yaml.nodes import Mark, Source
from tests.support.kept import Kept

HERE = Path(__file__).parent
PACK_TESTS = sorted(pack_directory().glob("*.test.yaml"))
NOWHERE = Mark(Source("<test>", ""), 1, 1)


# -- the packs -------------------------------------------------------------------------------------------


def test_every_pack_has_tests() -> None:
    """Each shipped pack has a `*.test.yaml` beside it, and each of those is of a pack."""
    assert [path.name.removesuffix(".test.yaml") for path in PACK_TESTS] == pack_names()


@pytest.mark.parametrize("path", PACK_TESTS, ids=lambda path: path.stem)
def test_packs_pass_their_tests(path: Path) -> None:
    """What the packs are said to do, they do."""
    tests = load_tests(str(path))
    for case in tests.cases:
        outcome = compared(case, simulate(tests.ruleset, case))
        assert outcome.passed, (case.name, outcome)


def without(ruleset: RuleSet, rule_id: str) -> RuleSet:
    rules = tuple(one for one in ruleset.rules if one.id != rule_id)
    return dataclasses.replace(ruleset, rules=rules)


@pytest.mark.parametrize("path", PACK_TESTS, ids=lambda path: path.stem)
def test_a_rule_that_is_missing_fails_its_test(path: Path) -> None:
    """Take out any rule that some test expects something of, or the clip section: that test fails.

    Each rule once, and each test by one of its rules at least.
    """
    tests, tried = load_tests(str(path)), set[str]()
    for case in tests.cases:
        named = {item.fields["rule"] for item in (*(case.events or ()), *(case.actions or ()))}
        rules = sorted(named - {"clip:"})
        chosen = [rule_id for rule_id in rules if rule_id not in tried] or rules[:1]
        tried.update(chosen)
        for rule_id in chosen:
            assert not compared(case, simulate(without(tests.ruleset, rule_id), case)).passed
        if "clip:" in named:
            unclipped = dataclasses.replace(tests.ruleset, clip=None)
            assert not compared(case, simulate(unclipped, case)).passed


# -- the notation ----------------------------------------------------------------------------------------


def test_the_notation_is_promtools() -> None:
    """The examples of promtool's own documentation."""
    assert expand("-2+4x3") == [-2, 2, 6, 10]
    assert expand("1-2x4") == [1, -1, -3, -5, -7]
    assert expand("1x4") == [1, 1, 1, 1, 1]
    assert expand("4 _x3 5") == [4, None, None, None, 5]
    nan, inf, minus, one = expand("NaN Inf -Inf 1e-3")
    assert math.isnan(nan or 0)
    assert (inf, minus, one) == (math.inf, -math.inf, 1e-3)
    assert expand("  ") == []


number = st.integers(-1000, 1000).map(lambda n: n / 8)
words = st.one_of(
    number.map(lambda a: (f"{a}", [a])),
    st.tuples(number, st.integers(0, 9)).map(lambda p: (f"{p[0]}x{p[1]}", [p[0]] * (p[1] + 1))),
    st.tuples(number, number, st.integers(0, 9)).map(
        lambda p: (f"{p[0]}{p[1]:+}x{p[2]}", [p[0] + p[1] * k for k in range(p[2] + 1)])
    ),
    st.integers(0, 9).map(lambda n: (f"_x{n}", [None] * n)),
)


@given(st.lists(words))
def test_every_series_reads_as_written(parts: list[tuple[str, list[float | None]]]) -> None:
    """Word by word, whatever the words: eighths add up exactly."""
    assert expand(" ".join(text for text, _ in parts)) == [one for _, values in parts for one in values]


@given(st.text(alphabet="0123456789.+-_xeNaInf ", max_size=30))
def test_any_text_is_a_series_or_is_refused(text: str) -> None:
    """Nothing but NotationError comes out, with a place inside the text; the work is bounded."""
    try:
        samples = expand(text)
    except NotationError as error:
        samples = []
        word = text[error.offset : error.offset + error.length]
    else:
        word = "none"
    assert len(samples) <= MOST_STEPS
    assert word.split() == [word]


# -- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(HERE.glob("*.bad.test.yaml")), ids=lambda path: path.stem)
def test_refused_as_expected(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each *.bad.test.yaml is refused with exactly the text beside it: every problem, place, caret and advice."""
    monkeypatch.chdir(HERE)
    with pytest.raises(RuleFileError) as refused:
        load_tests(path.name)
    assert f"{refused.value}\n" == path.with_suffix(".txt").read_text(encoding="utf-8")


def test_every_code_of_test_files_is_raised() -> None:
    """GW3xx: the catalogue, and the codes that the fixtures and the misfit below raise, are the same."""
    raised = {
        code
        for path in HERE.glob("*.bad.test.txt")
        for code in re.findall(r"^GW3\d\d", path.read_text(encoding="utf-8"), re.M)
    }
    assert raised | {"GW305"} == {code for code in CODES if code.startswith("GW3")}


def written(folder: Path, text: str) -> str:
    path = folder / "a.test.yaml"
    path.write_text(f"version: 1\n{text}")
    return str(path)


RULES = "version: 1\nrules: {big: {detect: {kind: above, of: norm, threshold: 2}, groups: [here]}}\n"
RULES += 'groups: {here: {params: ["w"]}}\n'


def test_rules_that_do_not_fit_are_told_at_the_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A group that matches none of the parameters: as in training, refused, here with exit status 2 and the place."""
    (tmp_path / "r.gradwatch.yaml").write_text(RULES)
    case = (
        "rules: r.gradwatch.yaml\ntests: [{name: misfit, params: {v: [4]}, input: {norm: 1}, events: []}]\n"
    )
    assert main(["rules", "test", written(tmp_path, case)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("GW305 the rules do not fit")
    assert "a.test.yaml:3:16" in said


# -- a simulated step is a real one ----------------------------------------------------------------------

CLIPS = {
    "total": "clip: {total: {method: baseline, above: 6}}",
    "cap and groups": "clip: {total: {method: norm, max_norm: 2.0}, groups: {all: {method: adagc, warmup: 5}}}",
    "backward": "clip: {total: {method: baseline, above: 6, scope: param}, at: backward}",
    "rules": "clip: {total: {method: norm, max_norm: 50.0}}",
}
REAL = """
version: 1
extends: [default]
groups: {{all: {{params: ["*"]}}}}
{clip}
rules:
  norm-spike: {{do: [{{clip: {{to: baseline}}}}], warmup: 20}}
  exploded: {{detect: {{threshold: 90}}, for: 2, do: [{{rescale: {{factor: 0.5}}}}]}}
"""


class Weighted(nn.Module):
    """Two parameters whose gradients are what the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(6, 4))
        self.second = nn.Parameter(torch.ones(4))


def trained(ruleset: RuleSet, norms: list[tuple[float, float]]) -> list[Record]:
    """A real loop, watched: gradients of these norms."""
    model, sink = Weighted(), Kept()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with gradwatch.watch(model, optimizer, rules=ruleset, sinks=[sink], strict=True):
        for first, second in norms:
            optimizer.zero_grad()
            loss = model.first.sum() * (first / math.sqrt(24)) + model.second.sum() * (second / 2)
            loss.backward()
            optimizer.step()
    return sink.records


def norms_of(seed: int) -> list[tuple[float, float]]:
    """Seventy steps with a spike, a burst, a NaN and an Inf among them."""
    chance = np.random.default_rng(seed)
    pairs = [(float(np.exp(0.1 * a)), float(np.exp(0.1 * b))) for a, b in chance.normal(size=(70, 2))]
    for step, pair in {30: (40.0, 1.0), 41: (math.nan, 1.0), 50: (90.0, 95.0), 51: (95.0, 90.0)}.items():
        pairs[step] = pair
    pairs[60] = (1.0, math.inf)
    return pairs


def told(done: tuple[int, Order]) -> tuple[Any, ...]:
    """What can be compared: float32 norms of real gradients end in other digits, which decide a tie of coefficients."""
    step, order = done
    rounded = [
        -1.0 if x is None else float(f"{x:.4g}") for x in (order.before, order.after, order.coefficient)
    ]
    here = ("", -1.0, -1.0) if rounded[-1] == 1 else (order.site, *rounded[:2])
    return step, order.rule, order.action, order.shadow, order.count, rounded[-1], *here


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("clip", CLIPS)
def test_simulated_steps_are_real_ones(clip: str, seed: int) -> None:
    """The norms of a real, watched loop put through a test give the events and the actions of that loop."""
    ruleset = parse_rules(REAL.format(clip=CLIPS[clip]))
    norms = norms_of(seed)
    records = trained(ruleset, norms)
    columns = {"norm": {k: tuple(pair[k] for pair in norms) for k in (0, 1)}}
    for name in ("update_ratio", "weight_norm", "max_abs", "zero_fraction"):
        columns[name] = {k: tuple(sampled(record, name, k) for record in records) for k in (0, 1)}
    losses = tuple(record.snapshot.scalars.get("loss") for record in records)
    scalars = {"lr": (1e-4,) * len(norms), "loss": losses}
    sites = sites_of({"first": [6, 4], "second": [4]}, (), 0)
    case = Case("real", NOWHERE, sites, columns, scalars, len(norms), None, (), ())
    bound_rules = simulate(ruleset, case)
    real = [event for record in records for event in record.verdict.events]
    assert [(e.step, e.rule, e.kind, e.sites) for e in bound_rules.events] == [
        (e.step, e.rule, e.kind, e.sites) for e in real
    ]
    orders = [(record.snapshot.step, order) for record in records for order in record.decision.orders]
    assert sorted(map(told, bound_rules.actions)) == sorted(map(told, orders))
    assert len({order.rule for _, order in orders}) >= 2, "the loop gives something to compare"


def sampled(record: Record, name: str, k: int) -> float | None:
    column = record.snapshot.columns.get(name)
    return float(column.values[k]) if column is not None and column.present[k] else None


# -- the command -----------------------------------------------------------------------------------------

FAILING = """rules: default
tests:
  - name: wrong about everything
    params: {w: [4, 4]}
    input: {norm: "1x30 NaN 1x3"}
    events: [{step: 30, rule: non-finite}, {step: 32, rule: non-finite, kind: resolved, severity: info}]
    actions: []
  - name: right
    params: {w: [4, 4]}
    input: {norm: "1x30"}
    events: []
"""


def test_a_failure_shows_what_was_expected_and_what_came(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 1, the place of the test, and a diff by step; no colour in a pipe."""
    path = written(tmp_path, FAILING)
    assert main(["rules", "test", path]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"FAILED  {path}:4:11  wrong about everything",
        "    - step 30  non-finite  firing  (line 7)",
        "    + step 31  non-finite  firing critical sites=['w'] count=1 value=1",
        "    + step 31  non-finite  localise site=w count=1",
        "    + step 31  non-finite  skip_step site=w count=1",
        "    - step 32  non-finite  resolved info  (line 7)",
        "    + step 32  non-finite  resolved critical sites=['w'] count=1",
        f"{path}: 1 of 2 tests failed",
    ]


def test_one_test_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--run` picks tests by a part of their name; a name that no test has is a mistake, not a success."""
    path = written(tmp_path, FAILING)
    assert main(["rules", "test", path, "--run", "right"]) == 0
    assert "1 test" in capsys.readouterr().out
    assert main(["rules", "test", path, "--run", "nobody"]) == 2
    assert "'nobody'" in capsys.readouterr().err


def test_for_a_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` is JSON without NaN, one entry a test, with the places of what is missing."""
    path = written(tmp_path, FAILING)
    assert main(["rules", "test", path, str(tmp_path / "none.yaml"), "--json"]) == 2

    def refuse(word: str) -> None:
        raise AssertionError(word)

    document = json.loads(capsys.readouterr().out, parse_constant=refuse)
    first, second = document["files"]
    assert document["failed"] == 1
    assert [one["ok"] for one in first["tests"]] == [False, True]
    missing = [each for each in first["tests"][0]["differences"] if each["expected"]]
    assert [(each["what"], each["step"], each["line"]) for each in missing] == [
        ("event", 30, 7),
        ("event", 32, 7),
    ]
    assert second["problems"][0]["code"] == "GW001"


def test_shadow_is_told_apart(tmp_path: Path) -> None:
    """An action in `mode: shadow` is expected as `shadow: true`."""
    (tmp_path / "r.gradwatch.yaml").write_text(
        "version: 1\nextends: [default]\nrules: {non-finite: {mode: shadow}}\n"
    )
    case = (
        "rules: r.gradwatch.yaml\ntests:\n  - {name: s, params: {w: [4]}, input: {norm: 1 NaN}, only: [non-finite],"
        " actions: [{step: 1, rule: non-finite, action: skip_step, shadow: true},"
        " {step: 1, rule: non-finite, action: localise, shadow: true}]}\n"
    )
    path = written(tmp_path, case)
    assert main(["rules", "test", path]) == 0
    Path(path).write_text(
        Path(path).read_text(encoding="utf-8").replace("shadow: true", "shadow: false"), encoding="utf-8"
    )
    assert main(["rules", "test", path]) == 1


def test_an_observed_value_is_an_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is given by the name that the rule has for it; a step without a value changes nothing."""
    (tmp_path / "r.gradwatch.yaml").write_text(
        "version: 1\nrules: {low: {detect: {kind: below, of: observed.accuracy, threshold: 0.5}, for: 2}}\n"
    )
    case = (
        "rules: r.gradwatch.yaml\ntests:\n  - {name: s, params: {w: [4]},"
        " input: {observed.accuracy: 0.9 0.1 _ 0.2 0.9}, events: [{step: 1, rule: low, kind: pending},"
        " {step: 3, rule: low, value: 0.2}, {step: 4, rule: low, kind: resolved}]}\n"
    )
    assert main(["rules", "test", written(tmp_path, case)]) == 0, capsys.readouterr().out
    assert main(["rules", "test", written(tmp_path, case.replace("step: 3", "step: 2"))]) == 1


def test_a_stop_ends_the_test(tmp_path: Path) -> None:
    """Nothing is judged after a rule has stopped training."""
    (tmp_path / "r.gradwatch.yaml").write_text(
        "version: 1\nrules: {big: {detect: {kind: above, of: total_norm, threshold: 2}, do: [stop], for: 1}}\n"
    )
    case = (
        "rules: r.gradwatch.yaml\ntests:\n  - {name: s, params: {w: [4]}, input: {norm: 1 3 1 3 1},"
        " events: [{step: 1, rule: big}], actions: [{step: 1, rule: big, action: stop, before: 3}]}\n"
    )
    assert main(["rules", "test", written(tmp_path, case)]) == 0


def test_it_needs_no_torch() -> None:
    """The packs load and are simulated where torch cannot be imported: a check for CI machines."""
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from gradwatch.cli import main\n"
        f"sys.exit(main(['rules', 'test', {str(PACK_TESTS[0])!r}]))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_packs_are_listed_without_their_tests() -> None:
    """A test file is no pack."""
    assert all(load_rules(name).rules for name in pack_names())
