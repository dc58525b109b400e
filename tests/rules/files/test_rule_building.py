"""What a rule file resolves to: precedence, merging, overrides, origins, the shipped packs."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import pytest
from pydantic import Field

from gradwatch.detectors import DETECTORS, Detector, register_detector
from gradwatch.engine import Engine
from gradwatch.errors import RuleFileError
from gradwatch.records.snapshot import Column, Sites, Snapshot
from gradwatch.rules.files import canonical, json_schema, load_rules, parse_rules
from gradwatch.rules.files.annotations import PLACEHOLDERS
from gradwatch.rules.files.rule_building import BUILT_IN
from gradwatch.rules.packs import pack_names
from gradwatch.rules.problem_codes import CODES
from gradwatch.rules.rule_set import (
    NOT_BUILT,
    Action,
    Clip,
    ClipPolicy,
    Group,
    Histograms,
    Modules,
    RuleSet,
    SinkSpec,
)
from gradwatch.rules.sink_kinds import SINKS, SinkKind

SPIKE = "version: 1\nrules:\n  r:\n    detect: {kind: spike}\n"


def write(folder: Path, name: str, text: str) -> Path:
    """A rule file in a folder."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refusals(text: str) -> list[tuple[str, int]]:
    """(code, line) of everything wrong."""
    with pytest.raises(RuleFileError) as refused:
        parse_rules(text)
    return [(problem.code, problem.line) for problem in refused.value.problems]


def test_nothing_written_means_the_kinds_own_defaults() -> None:
    """With neither rule key nor `defaults`, `for`, `warmup` and `half_life` are the detector's."""
    for kind in ("spike", "drop", "nonfinite"):
        found = parse_rules(f"version: 1\nrules: {{r: {{detect: {{kind: {kind}}}}}}}").rule("r")
        cls = DETECTORS[kind]
        assert found.detect == cls()
        assert found.for_ == cls.default_for
        assert (found.warmup, found.half_life) == (
            getattr(cls(), "warmup", 0),
            getattr(cls(), "half_life", 0),
        )
        assert (found.every, found.cooldown, found.severity) == (1, BUILT_IN["cooldown"], "warning")


def test_rule_over_defaults_over_kind() -> None:
    """A rule's own key wins over `defaults`, and that over the kind."""
    text = """
version: 1
defaults: {warmup: 7, half_life: 50, for: 4, cooldown: 9, severity: info, mode: shadow, on_error: stop}
rules:
  a: {detect: {kind: spike}, warmup: 3, for: 2, severity: critical}
  b: {detect: {kind: spike}}
"""
    rules = parse_rules(text)
    a, b = rules.rule("a"), rules.rule("b")
    assert (a.warmup, a.detect.warmup, a.half_life, a.detect.half_life) == (3, 3, 50, 50)
    assert (a.for_, a.cooldown, a.severity, a.mode, a.on_error) == (2, 9, "critical", "shadow", "stop")
    assert (b.warmup, b.detect.warmup, b.for_, b.severity) == (7, 7, 4, "info")


def test_default_warmup_is_ignored_without_a_baseline() -> None:
    """`defaults: {warmup}` does not reach a kind that has none, so it cannot delay a NaN."""
    rules = parse_rules("version: 1\ndefaults: {warmup: 500}\nrules: {r: {detect: {kind: nonfinite}}}")
    assert rules.rule("r").warmup == 0


def test_a_start_delay_is_from_step() -> None:
    """Where a kind has no warm-up, advice and explanation name the key that delays its start, and not `for`."""
    with pytest.raises(RuleFileError) as refused:
        parse_rules("version: 1\nrules: {r: {detect: {kind: nonfinite}, warmup: 200}}\n")
    assert "`from_step: N` begins to judge at step N" in str(refused.value)
    assert "`from_step: N` begins to judge at step N" in CODES["GW207"].fix
    assert "is no start delay" in CODES["GW207"].fix


def test_everything_a_rule_can_say() -> None:
    """Each key of the rule table arrives in the Rule."""
    text = """
version: 1
groups:
  embeddings: {params: ["*embed*", "wte.*"], optional: true}
  matrices: {params: ["*"], min_ndim: 2}
rules:
  r:
    detect: {kind: above, of: rms, threshold: 1e3, clear_below: 10}
    scope: group
    groups: [matrices]
    exclude: ["*.bias"]
    every: 5
    for: 3
    keep_firing_for: 20
    cooldown: 30
    severity: critical
    labels: {team: vision}
    annotations: {summary: "{param} at {step}"}
    do: [stop, localise: {by: record}]
    mode: shadow
    on_error: skip_step
    enabled: false
    optional: true
"""
    rules = parse_rules(text)
    assert rules.groups == (
        Group("embeddings", ("*embed*", "wte.*"), optional=True),
        Group("matrices", ("*",), min_ndim=2),
    )
    found = rules.rule("r")
    assert (found.kind, found.detect.of, found.detect.threshold, found.detect.clear_below) == (
        "above",
        "rms",
        1000,
        10,
    )
    assert (found.scope, found.groups, found.exclude) == ("group", ("matrices",), ("*.bias",))
    assert (found.every, found.for_, found.keep_firing_for, found.cooldown) == (5, 3, 20, 30)
    assert (found.severity, found.labels, found.mode) == ("critical", {"team": "vision"}, "shadow")
    assert (found.on_error, found.enabled, found.optional, found.acts) == ("skip_step", False, True, False)
    recording = {"by": "record", "else_record_steps": 2, "max_bytes": 64 << 20, "keep": None}
    assert found.do == (Action("stop"), Action("localise", recording))


def test_actions_are_complete() -> None:
    """A bare name, a name with nothing after the colon and one with parameters resolve alike."""
    do = parse_rules(SPIKE + "    do: [skip_step]\n").rule("r").do
    assert do == (Action("skip_step", {"max_consecutive": 10, "then": "continue"}),)
    assert parse_rules(SPIKE + "    do:\n      - skip_step:\n").rule("r").do == do
    chosen = parse_rules(SPIKE + "    do: [skip_step: {max_consecutive: 3, then: stop}]\n").rule("r").do
    assert chosen == (Action("skip_step", {"max_consecutive": 3, "then": "stop"}),)


def test_clip_modules_and_sinks() -> None:
    """The standing policies, the taps and the sinks resolve; sinks keep only what was written."""
    text = """
version: 1
groups: {embeddings: {params: ["*"]}}
clip:
  total: {method: norm}
  groups: {embeddings: {method: agc, ratio: 0.02}}
modules: {tap: full_backward}
sinks: [log, prometheus: {listen: "0.0.0.0:29440"}]
"""
    rules = parse_rules(text)
    assert rules.clip == Clip(
        ClipPolicy("norm", {"max_norm": 1.0, "scope": "total"}),
        {"embeddings": ClipPolicy("agc", {"ratio": 0.02, "eps": 1e-3, "last_layer": False})},
    )
    assert rules.modules == Modules("full_backward", ("*",))
    assert rules.sinks == (SinkSpec("log"), SinkSpec("prometheus", {"listen": "0.0.0.0:29440"}))
    assert parse_rules("version: 1").sinks is None
    assert parse_rules("version: 1\nsinks: []").sinks == ()


def test_extends_merges_by_id(tmp_path: Path) -> None:
    """Later wins, key by key; `detect` is merged unless its kind changes; lists are replaced."""
    write(
        tmp_path,
        "base.yaml",
        """
version: 1
groups: {all: {params: ["*"]}}
rules:
  a: {detect: {kind: spike, above: 6, clear_below: 2}, do: [skip_step, stop], labels: {x: "1"}, for: 9}
  b: {detect: {kind: spike, above: 6}}
""",
    )
    top = write(
        tmp_path,
        "top.yaml",
        """
version: 1
extends: [base.yaml]
groups: {mine: {params: ["m*"]}}
rules:
  a: {detect: {above: 8}, do: [stop], labels: {y: "2"}}
  b: {detect: {kind: above, threshold: 3}}
  c: {detect: {kind: dead}}
""",
    )
    rules = load_rules(top)
    a, b = rules.rule("a"), rules.rule("b")
    assert (a.detect.above, a.detect.clear_below, a.for_) == (8, 2, 9)
    assert (a.do, a.labels) == ((Action("stop"),), {"x": "1", "y": "2"})
    assert (b.kind, b.detect.threshold) == ("above", 3)
    assert [rule.id for rule in rules.rules] == ["a", "b", "c"]
    assert [group.name for group in rules.groups] == ["mine", "all"], "the later file's groups match first"


def test_extends_in_order_and_once(tmp_path: Path) -> None:
    """Of several bases the last wins, and one that is reached twice counts once."""
    write(tmp_path, "root.yaml", SPIKE)
    for name, above in (("one", 1), ("two", 2)):
        text = f"version: 1\nextends: [root.yaml]\nrules: {{r: {{detect: {{above: {above}}}}}}}"
        write(tmp_path, f"{name}.yaml", text)
    top = write(tmp_path, "top.yaml", "version: 1\nextends: [one.yaml, two.yaml, one.yaml]")
    assert load_rules(top).rule("r").detect.above == 2


def test_extends_cycle_is_found(tmp_path: Path) -> None:
    """Two files that extend each other are refused where the circle closes."""
    write(tmp_path, "a.yaml", "version: 1\nextends: [b.yaml]")
    write(tmp_path, "b.yaml", "version: 1\nextends: [./a.yaml]")
    with pytest.raises(RuleFileError) as refused:
        load_rules(tmp_path / "a.yaml")
    (problem,) = refused.value.problems
    assert (problem.code, Path(problem.path).name, problem.line) == ("GW213", "b.yaml", 2)


def test_too_many_files(tmp_path: Path) -> None:
    """A chain of files ends with an error rather than never."""
    for i in range(40):
        write(tmp_path, f"{i}.yaml", f"version: 1\nextends: [{i + 1}.yaml]")
    with pytest.raises(RuleFileError) as refused:
        load_rules(tmp_path / "0.yaml")
    assert [problem.code for problem in refused.value.problems] == ["GW213"]


def test_overrides_apply_in_order_where_the_run_matches() -> None:
    """Matching overrides are laid on top one after the other; the others change nothing."""
    text = (
        SPIKE
        + """
overrides:
  - match: {run: "*-debug"}
    rules: {r: {detect: {above: 2}, enabled: false}}
  - match: {run: "x-*"}
    rules: {r: {detect: {above: 3}}}
  - match: {run: "other"}
    rules: {r: {detect: {above: 4}}}
"""
    )
    assert parse_rules(text).rule("r").detect.above == 10
    both = parse_rules(text, run="x-debug").rule("r")
    assert (both.detect.above, both.enabled) == (3, False)
    assert parse_rules(text, run="other").rule("r").detect.above == 4


def test_errors_in_overrides_do_not_wait_for_their_run() -> None:
    """An override for another run is judged now."""
    text = SPIKE + "overrides:\n  - match: {run: later}\n    rules: {r: {detect: {above: -1}}}\n"
    assert refusals(text) == [("GW105", 7)]


def test_histograms_are_merged_key_by_key(tmp_path: Path) -> None:
    """A file keeps what it does not say of the section of the file it extends; left out, there are none."""
    assert parse_rules(SPIKE).histograms is None
    assert parse_rules(f"{SPIKE}histograms: {{}}\n").histograms == Histograms(100, ("*",))
    write(tmp_path, "base.yaml", f"{SPIKE}histograms: {{every: 7, params: ['a.*']}}\n")
    top = write(tmp_path, "top.yaml", "version: 1\nextends: [./base.yaml]\nhistograms: {every: 9}\n")
    assert load_rules(top).histograms == Histograms(9, ("a.*",))
    assert refusals(f"{SPIKE}histograms: {{evry: 9}}\n") == [("GW101", 5)]


def test_histograms_of_activations_need_taps(tmp_path: Path) -> None:
    """Refused at their place without `modules:`, which another file may bring; `modules` without `of` says nothing."""
    base = f"{SPIKE}histograms: {{every: 7, of: [gradients, activations], modules: ['a.*']}}\n"
    assert refusals(base) == [("GW215", 5)]
    assert refusals(f"{SPIKE}modules: {{}}\nhistograms: {{modules: ['a.*']}}\n") == [("GW208", 6)]
    write(tmp_path, "base.yaml", f"{base}modules: {{tap: full_backward}}\n")
    top = write(tmp_path, "top.yaml", "version: 1\nextends: [./base.yaml]\nhistograms: {modules: ['b']}\n")
    assert load_rules(top).histograms == Histograms(7, ("*",), ("gradients", "activations"), ("b",))
    top = write(tmp_path, "top.yaml", "version: 1\nextends: [./base.yaml]\nhistograms: {of: [gradients]}\n")
    assert load_rules(top).histograms == Histograms(7, ("*",), ("gradients",), ("a.*",))


def test_an_override_with_histograms_does_not_wait_for_its_run_with_its_errors() -> None:
    """Histograms of activations without taps are refused although the override is for another run."""
    override = "overrides:\n- {match: {run: other}, histograms: {of: [activations]}}\n"
    assert refusals(SPIKE + override) == [("GW215", 6)]


def test_origins(tmp_path: Path) -> None:
    """Every resolved value says which line of which file set it, or that nothing did."""
    base = write(tmp_path, "base.yaml", "version: 1\nrules:\n  r:\n    detect: {kind: spike}\n    for: 2\n")
    text = "version: 1\nextends: [base.yaml]\ndefaults: {cooldown: 3}\nrules:\n  r:\n    detect: {above: 4}\n"
    top = write(tmp_path, "top.yaml", text)
    origins = load_rules(top).origins
    assert origins["r.for"] == f"{base}:5"
    assert origins["r.detect.kind"] == f"{base}:4"
    assert origins["r.detect.above"] == f"{top}:6"
    assert origins["r.cooldown"] == f"{top}:3"
    assert origins["r.severity"] == origins["r.warmup"] == "default"


def test_known_kinds_that_are_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a rule is an error, unless it is optional or disabled: then it is kept as inactive."""
    monkeypatch.setattr("gradwatch.rules.files.detect_section.KNOWN_NOT_BUILT", frozenset({"planned"}))
    text = "version: 1\nrules:\n  r:\n    detect: {{kind: planned}}\n    {}\n"
    assert refusals(text.format("for: 1")) == [("GW202", 4)]
    for key in ("optional: true", "enabled: false"):
        rules = parse_rules(text.format(key))
        assert rules.rules == ()
        assert "not built yet" in rules.inactive["r"]


def test_digest_depends_on_meaning_only() -> None:
    """Comments, order of keys and spelling of numbers leave it; any change of meaning changes it."""
    one = parse_rules("version: 1\nrules: {r: {detect: {kind: above, threshold: 1e3}, for: 1}}")
    same = parse_rules(
        "rules: # !\n  r:\n    for: 1\n    detect: {threshold: 1000.0, kind: above}\nversion: 1"
    )
    other = parse_rules("version: 1\nrules: {r: {detect: {kind: above, threshold: 1e3}, for: 2}}")
    assert one.digest == same.digest != other.digest
    assert len(one.digest) == 64
    assert canonical(one)["rules"][0]["detect"]["kind"] == "above"


def test_rule_sets_are_values() -> None:
    """A RuleSet is frozen, pickles to an equal one, and says KeyError for a rule it does not have."""
    rules = load_rules("default")
    assert pickle.loads(pickle.dumps(rules)) == rules
    with pytest.raises(dataclasses.FrozenInstanceError):
        rules.digest = ""  # type: ignore[misc]
    with pytest.raises(KeyError):
        rules.rule("nothing")
    assert RuleSet().rules == ()


def test_hash_seed_does_not_matter() -> None:
    """P27: the default pack resolves to the same digest and order whatever the hash seed."""
    load = "from gradwatch.rules.files import load_rules; r = load_rules('default')"
    code = f"{load}; print(r.digest, [rule.id for rule in r.rules])"
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[3])},
        ).stdout
        for seed in ("0", "1")
    }
    assert len(runs) == 1


@dataclass(frozen=True, slots=True)
class Louder(Detector):
    """A kind somebody else wrote."""

    kind: ClassVar[str] = "louder"
    default_for: ClassVar[int] = 7
    has_baseline: ClassVar[bool] = True

    of: str = "norm"
    by: Annotated[float, Field(gt=1)] = 2.0
    half_life: int = dataclasses.field(default=33, metadata={"rule_key": True})

    def __post_init__(self) -> None:
        if self.half_life == 13:
            raise RuntimeError("half_life must not be 13")


@pytest.fixture
def louder() -> Iterator[None]:
    """The third-party kind, registered for one test."""
    register_detector(Louder)
    yield
    del DETECTORS["louder"]


@pytest.mark.usefixtures("louder")
def test_third_party_kinds_are_validated_by_existing() -> None:
    """A registered dataclass is resolved, checked and in the schema without any further code."""
    text = "version: 1\nrules:\n  r:\n    detect: {{kind: louder, by: {}}}\n    {}\n"
    found = parse_rules(text.format(3, "half_life: 5")).rule("r")
    assert (found.detect, found.for_, found.half_life, found.warmup) == (Louder(by=3.0, half_life=5), 7, 5, 0)
    assert refusals(text.format(1, "for: 1")) == [("GW105", 4)]
    assert refusals(text.format(3, "warmup: 5")) == [("GW207", 5)]
    assert refusals(text.format(3, "half_life: 13")) == [("GW208", 4)]
    assert "louder" in str(json_schema()["definitions"]["Detect"])


def test_a_kind_that_does_not_load_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken third-party package is a problem of the rule that names it, not a traceback."""

    def broken(kind: str) -> None:
        raise ImportError(kind)

    monkeypatch.setattr("gradwatch.rules.files.detect_section.find_detector", broken)
    assert refusals("version: 1\nrules: {r: {detect: {kind: theirs}}}") == [("GW201", 2)]


def test_third_party_sinks_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink kind that was registered may be named; its options are its own business."""
    text = "version: 1\nsinks: [{carrier_pigeon: {loft: 3}}]\n"
    assert refusals(text) == [("GW204", 2)]
    monkeypatch.setitem(SINKS, "carrier_pigeon", SinkKind("aviary:Pigeon"))
    assert parse_rules(text).sinks == (SinkSpec("carrier_pigeon", {"loft": 3}),)


def test_every_placeholder_is_filled_in() -> None:
    """What the loader lets through, the engine replaces: no brace reaches a person."""
    summary = " ".join(f"{name}={{{name}}}" for name in PLACEHOLDERS)
    rules = parse_rules(
        "version: 1\nrules: {r: {detect: {kind: nonfinite}, annotations: {summary: '" + summary + "'}}}"
    )
    one = np.ones(1, np.int64)
    sites = Sites(("layer.weight",), ("param",), one * 6, one * 2, one * 0)
    norm = np.array([np.nan], np.float32)
    broken = {"nonfinite": Column(np.array([2.0], np.float32), np.array([True]))}
    snapshot = Snapshot(0, 4, sites, norm, one.astype(np.int32), norm, np.nan, np.nan, columns=broken)
    bound = Engine(rules).bind(sites)
    verdict, _ = bound.evaluate(bound.init(), snapshot)
    (event,) = [event for event in verdict.events if event.kind == "firing"]
    assert "param=layer.weight" in event.summary
    assert "nonfinite=2" in event.summary
    assert not set("{}") & set(event.summary)


# --- the shipped packs -------------------------------------------------------------------------------------


def test_packs_are_found_by_name_and_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`default` works in any folder; a file is found by its path."""
    monkeypatch.chdir(tmp_path)
    assert {"default", "observe-only"} <= set(pack_names())
    mine = write(tmp_path, "default.yaml", "version: 1\n")
    assert load_rules("default").rules
    assert load_rules("default.yaml").rules == load_rules(mine).rules == ()


@pytest.mark.parametrize("name", pack_names())
def test_packs_are_safe_everywhere(name: str) -> None:
    """Every rule of a shipped pack is optional, speaks to people, and uses only what is built."""
    rules = load_rules(name)
    assert rules.rules
    assert not rules.inactive
    assert all(group.optional for group in rules.groups)
    for rule in rules.rules:
        assert rule.optional, rule.id
        assert (rule.every, rules.origins[f"{rule.id}.every"] == "default") in ((1, True), (10, False)), (
            rule.id
        )
        assert rule.enabled or name not in ("default", "observe-only"), rule.id
        assert {"summary", "description"} <= set(rule.annotations), rule.id
        assert not {action.name for action in rule.do} & NOT_BUILT, rule.id
        assert f"{rule.id}.severity" in rules.origins
        assert rules.origins[f"{rule.id}.for"] != "default", "a pack does not hang on other files' defaults"


def test_default_pack_skips_non_finite_steps_and_nothing_else() -> None:
    """The only actions: skip non-finite steps, without end, never stop; and look for what made them so."""
    acting = {rule.id: rule.do for rule in load_rules("default").rules if rule.do}
    skip = Action("skip_step", {"max_consecutive": 10, "then": "continue"})
    look = Action("localise", {"by": "replay", "else_record_steps": 2, "max_bytes": 64 << 20, "keep": None})
    assert acting == {"non-finite": (skip, look)}
    assert load_rules("default").clip is None


def test_default_pack_has_the_documented_thresholds() -> None:
    """The thresholds that were measured are those that are shipped."""
    rules = {rule.id: rule for rule in load_rules("default").rules}
    assert (rules["exploded"].detect.threshold, rules["exploded"].for_) == (1e3, 3)
    assert [rules[f"total-norm-spike{end}"].detect.above for end in ("", "-severe")] == [7, 10]
    assert (rules["norm-spike"].detect.above, rules["norm-spike"].detect.clear_below) == (10, 3)
    factors = [rules[name].detect.factor for name in ("norm-spike", "total-norm-spike", "loss-spike")]
    assert factors == [3.5, 2.5, 4]
    assert (rules["drift"].detect.above, rules["vanishing-by-share"].detect.above) == (5, 8)
    assert (rules["vanishing-by-depth"].detect.below, rules["vanishing-by-depth"].for_) == (1e-3, 20)
    assert (rules["dead"].detect.at_least, rules["dead"].for_) == (0.95, 2)
    assert {rules[name].every for name in ("dead", "stuck", "update-too-big")} == {10}
    assert (rules["all-zero"].for_, rules["all-zero-experts"].for_) == (5, 50)
    assert (rules["stale"].for_, rules["never"].detect.within) == (3, 20)
    assert (rules["stuck"].detect.below, rules["update-too-big"].detect.above) == (1e-9, 0.2)


def test_observe_only_is_default_without_actions() -> None:
    """The same detection rule for rule, and no action at all."""
    default, observing = load_rules("default"), load_rules("observe-only")
    assert not any(rule.do for rule in observing.rules)
    bare = [
        [dataclasses.replace(rule, do=(), annotations={}) for rule in rules.rules]
        for rules in (default, observing)
    ]
    assert bare[0] == bare[1]
    assert default.groups == observing.groups


def test_what_was_read_before_is_read_the_same(tmp_path: Path) -> None:
    """Rules made of a pack leave it as it was; a changed file is read anew; what is wrong is told each time."""
    plain = load_rules("default")
    path = tmp_path / "mine.gradwatch.yaml"
    path.write_text(
        "version: 1\nextends: [default]\nrules: {non-finite: {severity: info, detect: {kind: nonfinite}}}\n"
        "overrides: [{match: {run: x}, defaults: {cooldown: 3}}]\n"
    )
    mine = load_rules(path, run="x")
    assert mine.rule("non-finite").severity == "info"
    assert load_rules("default") == plain
    assert load_rules(path, run="x") == mine
    path.write_text("version: 1\nextends: [default]\n")
    assert load_rules(path).rule("non-finite") == plain.rule("non-finite")
    told = []
    for _ in range(2):
        with pytest.raises(RuleFileError) as caught:
            parse_rules("version: 1\nrules: {a: &b {detect: {kind: nonfinite}}}\n", "bad.yaml")
        told.append(str(caught.value))
    assert "GW007" in told[0]
    assert told[0] == told[1]
