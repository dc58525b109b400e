"""The files of the stack, checked by the tools that will read them; every checker shown to fail as well."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gradwatch.cli import main
from gradwatch.rulefile.files import pack_names
from tests.binaries import require

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def check(*command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a checker; its output joined."""
    return subprocess.run(
        [require(command[0]), *command[1:]],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    """A copy to break."""
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    return tmp_path / "deploy"


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, f"{path} does not say {old}"
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize("pack", pack_names())
def test_promtool_accepts_the_rules_of_every_pack(pack: str, tmp_path: Path) -> None:
    """Alerts made from each shipped pack parse, and no two are the same."""
    assert main(["deploy", "export", str(tmp_path), "--rules", pack]) == 0
    for name in ("alerts", "recording"):
        done = check(
            "promtool",
            "check",
            "rules",
            "--lint=all",
            "--lint-fatal",
            f"prometheus/rules/{name}.yml",
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stdout


def test_promtool_refuses_a_broken_rule(stack: Path) -> None:
    """The check above can fail: an unbalanced expression, and a duplicate."""
    alerts = stack / "prometheus" / "rules" / "alerts.yml"
    good = alerts.read_text()
    replace(alerts, "gradwatch_coverage_ratio < 1", "gradwatch_coverage_ratio < (1")
    assert check("promtool", "check", "rules", str(alerts)).returncode != 0
    alerts.write_text(
        good.replace("rule: norm-overflow\n", "rule: non-finite\n", 1).replace(
            "kind: norm_overflow", "kind: nonfinite"
        )
    )
    done = check("promtool", "check", "rules", "--lint=all", "--lint-fatal", str(alerts))
    assert done.returncode != 0, done.stdout


def test_promtool_accepts_the_configuration_and_refuses_a_broken_one(stack: Path) -> None:
    """prometheus.yml with the rule files it names."""
    config = stack / "prometheus" / "prometheus.yml"
    done = check("promtool", "check", "config", "prometheus.yml", cwd=config.parent)
    assert done.returncode == 0, done.stdout
    assert "2 rule files found" in done.stdout
    replace(config, "scrape_interval: 15s", "scrape_interval: 15")
    assert check("promtool", "check", "config", "prometheus.yml", cwd=config.parent).returncode != 0


def test_promtool_runs_the_alerts(stack: Path) -> None:
    """The unit tests of the alerts pass, and find an alert that has changed its mind."""
    folder = stack / "prometheus"
    done = check("promtool", "test", "rules", "alerts_test.yml", cwd=folder)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('gradwatch_rule_active{rule="vanishing"} == 1', 'gradwatch_rule_active{rule="vanishing"} == 2'),
        (
            "unless sum without (kind, severity) (last_over_time("
            'gradwatch_rule_firings_total{rule="non-finite"}[6h] offset 1m))',
            "",
        ),
        (
            'increase(gradwatch_rule_firings_total{rule="non-finite"}[1m])',
            'increase(gradwatch_rule_firings_total{rule="no"}[1m])',
        ),
        (
            "max without (optimizer) (gradwatch_last_step_timestamp_seconds)",
            "gradwatch_last_step_timestamp_seconds",
        ),
        ('up{job="gradwatch"} == 0', "up == 0"),
        ("> 0.9", "> 0.8"),
        ("gradwatch_coverage_ratio < 1", "gradwatch_coverage_ratio < 0.5"),
    ],
)
def test_the_unit_tests_of_the_alerts_can_fail(old: str, new: str, stack: Path) -> None:
    """Each of these changes to an alert is noticed."""
    replace(stack / "prometheus" / "rules" / "alerts.yml", old, new)
    done = check("promtool", "test", "rules", "alerts_test.yml", cwd=stack / "prometheus")
    assert done.returncode != 0, done.stdout


CONFIGS = sorted((DEPLOY / "alertmanager").rglob("*.yml"))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_amtool_accepts_every_configuration(config: Path) -> None:
    """alertmanager.yml, and each example as a file of its own."""
    done = check("amtool", "check-config", str(config))
    assert done.returncode == 0, done.stdout


def test_amtool_refuses_a_receiver_that_is_not_there(stack: Path) -> None:
    """The check above can fail."""
    config = stack / "alertmanager" / "alertmanager.yml"
    replace(config, "- name: nobody", "- name: somebody")
    assert check("amtool", "check-config", str(config)).returncode != 0


@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        (("alertname=GradwatchNonFiniteGradients", "severity=critical"), "pagerduty"),
        (("alertname=GradwatchDeadParameters", "severity=info"), "nobody"),
    ],
)
def test_pagerduty_is_called_for_what_is_critical(labels: tuple[str, ...], receiver: str) -> None:
    """Alertmanager itself says where an alert would go."""
    config = DEPLOY / "alertmanager" / "examples" / "pagerduty.yml"
    done = check("amtool", "config", "routes", "test", f"--config.file={config}", *labels)
    assert (done.returncode, done.stdout.split()[-1]) == (0, receiver)
