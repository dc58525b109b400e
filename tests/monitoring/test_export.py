"""`gradwatch deploy export`: one source for everything, and a second run that changes nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from gradwatch.cli import main
from gradwatch.detectors import DETECTORS
from gradwatch.monitoring import Options, files
from gradwatch.monitoring.alerts import alerts, health_alerts, rule_alerts, run_alerts
from gradwatch.monitoring.export import stack_directory
from gradwatch.monitoring.scrape_interval import Pace, duration
from gradwatch.rules.files import load_rules, parse_rules
from gradwatch.rules.packs import pack_names
from gradwatch.sinks.alert_names import FALLBACK, RULE_ALERTS, alert_name
from gradwatch.sinks.prometheus.metric_catalogue import METRICS, SERVE_METRICS

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def load(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


@pytest.fixture(scope="module")
def shipped() -> Options:
    return Options(load_rules("default"))


def test_what_is_committed_is_what_the_tables_say(shipped: Options) -> None:
    """Regenerating the stack is a no-op: nobody edited a generated file, nobody forgot to export."""
    assert stack_directory() == DEPLOY
    for name, content in files(shipped).items():
        assert (DEPLOY / name).read_text(encoding="utf-8") == content, (
            f"run: gradwatch deploy export deploy ({name})"
        )


def test_a_second_export_touches_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same bytes again: no file is written, so no Prometheus reloads for nothing."""
    assert main(["deploy", "export", str(tmp_path), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)["written"]
    assert str(tmp_path / "prometheus" / "rules" / "alerts.yml") in written
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert len(stamps) == len(written)
    assert main(["deploy", "export", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written"] == []
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps


def test_files_of_others_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that differs stops the export before anything is written, unless --force."""
    mine = tmp_path / "prometheus" / "prometheus.yml"
    mine.parent.mkdir()
    mine.write_text("# mine\n")
    assert main(["deploy", "export", str(tmp_path)]) == 2
    assert str(mine) in capsys.readouterr().err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [mine]
    assert main(["deploy", "export", str(tmp_path), "--force"]) == 0
    assert mine.read_text(encoding="utf-8") == (DEPLOY / "prometheus" / "prometheus.yml").read_text(
        encoding="utf-8"
    )


def test_what_is_no_file_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A link or a pipe in the place of a file stops the export before anything is written, with --force too."""
    folder = tmp_path / "stack"
    folder.joinpath("prometheus").mkdir(parents=True)
    link, pipe = folder / "prometheus" / "prometheus.yml", folder / "prometheus" / "rules"
    link.symlink_to(tmp_path / "elsewhere")
    pipe.mkdir()
    pipe = pipe / "alerts.yml"
    os.mkfifo(pipe)
    assert main(["deploy", "export", str(folder), "--force"]) == 2
    said = capsys.readouterr().err
    assert f"{link}: it is a link" in said
    assert f"{pipe}: it is a pipe (FIFO)" in said
    assert link.is_symlink()
    assert pipe.is_fifo()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("pack", pack_names())
def test_every_enabled_rule_has_its_alert(pack: str) -> None:
    """One alert per rule, with its severity, its id, and a runbook that exists."""
    ruleset = load_rules(pack)
    made = list(rule_alerts(ruleset, Pace()))
    enabled = [rule for rule in ruleset.rules if rule.enabled]
    assert [(each.labels["rule"], each.severity) for each in made] == [
        (rule.id, rule.severity) for rule in enabled
    ]
    assert {each.name for each in made} <= set(RULE_ALERTS)


def test_every_kind_of_detector_has_a_name_of_its_own() -> None:
    """Only thresholds on unknown quantities, kinds of third parties, and what is no trouble at all fall back."""
    kinds = [kind for kind in DETECTORS if alert_name(kind) == FALLBACK]
    assert kinds == ["converged"]
    assert alert_name("above", "lr") == FALLBACK
    assert alert_name("above", "scaler_skip") == "GradwatchLossScale"
    assert alert_name("nonfinite", "running_mean_norm") == FALLBACK  # its runbook would speak of gradients
    assert alert_name("nonfinite", "norm") == "GradwatchNonFiniteGradients"
    assert alert_name("somebody-elses") == FALLBACK


def test_a_rule_of_ones_own(tmp_path: Path) -> None:
    """Labels and texts of the file arrive; text that Prometheus would run as a template does not."""
    ruleset = parse_rules(
        "version: 1\nrules:\n  hot:\n    detect: {kind: above, of: total_norm, threshold: 3}\n    severity: critical\n"
        "    labels: {team: '{{ vision }}'}\n    annotations: {summary: '{rule} is hot'}\n    do: [stop]\n"
        "    mode: shadow\n  off: {enabled: false, detect: {kind: nonfinite}}\n"
        "  told: {detect: {kind: below, of: rms, threshold: 1}, annotations: {summary: '{param} is low'}}\n",
    )
    hot, told = rule_alerts(ruleset, Pace())
    assert (hot.name, dict(hot.labels)) == (
        "GradwatchExplodingGradients",
        {"team": '{{ "{{" }} vision }}', "rule": "hot", "kind": "above"},
    )
    assert hot.summary == "hot is hot"
    assert "shadow mode it would: stop" in hot.description
    assert told.summary == "Rule told is firing."


def test_alerts_and_dashboards_name_only_metrics_that_exist(shipped: Options) -> None:
    """Every gradwatch_ word of every expression is in the catalogue, or is recorded by a rule of ours."""
    recorded = re.findall(r"record: (\S+)", files(shipped)["prometheus/rules/recording.yml"])
    names = [metric.name for metric in (*METRICS, *SERVE_METRICS)]
    texts = {
        name: text for name, text in files(shipped).items() if name.startswith(("prometheus/", "grafana/"))
    }
    for name, text in texts.items():
        for word in set(re.findall(r"(?:run_id:)?gradwatch_[a-z_]+(?::[a-z]+)?", text)):
            base = re.sub(r"_(bucket|sum|count)$", "", word)
            assert {word, base} & {*names, *recorded}, f"{name}: {word}"


def test_help_documentation_and_scrape_are_one_table(shipped: Options) -> None:
    """metrics.md has a row for every metric, with its HELP text."""
    page = files(shipped)["metrics.md"]
    for metric in (*METRICS, *SERVE_METRICS):
        assert f"| `{metric.name}` | {metric.kind} |" in page
        assert metric.help in page


def test_alerts_are_complete(shipped: Options) -> None:
    """Every alert: CamelCase, a severity, a one-sentence summary, a description, two links."""
    groups = load(files(shipped)["prometheus/rules/alerts.yml"])["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == len(alerts(shipped.ruleset, shipped.pace))
    for rule in rules:
        assert re.fullmatch(r"Gradwatch([A-Z][a-z]+)+", rule["alert"])
        assert rule["labels"]["severity"] in ("info", "warning", "critical", "{{ $labels.severity }}")
        notes = rule["annotations"]
        assert notes["summary"].endswith(".")
        assert len(notes["description"]) > len(notes["summary"])
        assert notes["runbook_url"].endswith(f"/runbooks/{rule['alert']}")
        assert "/d/gradwatch-" in notes["dashboard_url"]
    keys = [(rule["alert"], tuple(sorted(rule["labels"].items()))) for rule in rules]
    assert len(set(keys)) == len(keys)


def test_the_operators_object_holds_the_same_rules(shipped: Options) -> None:
    """k8s/prometheusrule.yaml and rules/*.yml say the same."""
    made = files(shipped)
    groups = [
        each
        for name in ("alerts", "recording")
        for each in load(made[f"prometheus/rules/{name}.yml"])["groups"]
    ]
    assert load(made["k8s/prometheusrule.yaml"])["spec"]["groups"] == groups


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (1, "1s"), (60, "1m"), (90, "1m30s"), (3600, "1h")])
def test_durations_are_those_of_prometheus(seconds: int, text: str) -> None:
    """Units from large to small, none of them zero."""
    assert duration(seconds) == text


@pytest.mark.parametrize("seconds", [0, 301, -1])
def test_a_pace_that_hides_everything_is_refused(seconds: int, tmp_path: Path) -> None:
    """Prometheus forgets a series after 5 minutes."""
    assert main(["deploy", "export", str(tmp_path), "--scrape-interval", str(seconds)]) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--serve-url", "--grafana-url", "--alertmanager", "--serve"])
def test_a_password_is_not_exported(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An address with one is refused, and not repeated."""
    folder = tmp_path / "stack"
    assert main(["deploy", "export", str(folder), option, "me:hunter@host:9093"]) == 2
    assert "hunter" not in "".join(capsys.readouterr())
    assert not folder.exists()


def test_a_bad_rule_file_is_shown_where_it_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written from a rule file that would not run."""
    (tmp_path / "bad.yaml").write_text("version: 1\nrules: {a: {detect: {kind: nonfinit}}}\n")
    assert main(["deploy", "export", str(tmp_path / "out"), "--rules", str(tmp_path / "bad.yaml")]) == 2
    assert "bad.yaml:2" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_an_error_not_a_traceback(tmp_path: Path) -> None:
    """Exit 2 and one line."""
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "gradwatch", "deploy", "export", str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "cannot write" in done.stderr


def test_no_two_groups_of_alerts_share_a_name() -> None:
    """Rule alerts have names for kinds of trouble; those about runs and about us have their own."""
    others = [each.name for each in (*run_alerts(Pace()), *health_alerts(Pace()))]
    assert len(set(others)) == len(others)
    assert not set(others) & set(RULE_ALERTS)
