"""The alerts of a rule file, evaluated by promtool on the counters of rules that fired: would Prometheus alert?"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from gradwatch.rules.rule_set import RuleSet

_SECONDS = 60


def alert_of(ruleset: RuleSet, rule: str) -> str:
    """The name of the alert of a rule."""
    from gradwatch.sinks.alert_names import alert_name

    found = ruleset.rule(rule)
    return alert_name(found.kind, str(getattr(found.detect, "of", "")))


def alerting(ruleset: RuleSet, rules: Collection[str], folder: Path) -> Mapping[str, bool] | None:
    """For each of `rules` whether its alert fires where its counter goes from 0 to 1; None without promtool.

    The alerts are those that `gradwatch deploy export` writes; `folder` is for promtool's files.
    """
    promtool = shutil.which("promtool")
    if promtool is None:
        return None
    from gradwatch.monitoring.prometheus_rule_files import Links, alerts_text
    from gradwatch.monitoring.scrape_interval import Pace
    from gradwatch.monitoring.yaml_text import to_yaml

    (folder / "alerts.yml").write_text(alerts_text(ruleset, Pace(), Links(), "selftest"), encoding="utf-8")
    found = {}
    for rule in rules:
        test = folder / "alerts_test.yml"
        test.write_text(to_yaml(_test(ruleset, rule)), encoding="utf-8")
        done = subprocess.run(
            [promtool, "test", "rules", test.name],
            cwd=folder,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
        found[rule] = done.returncode == 0
    return found


def _test(ruleset: RuleSet, rule: str) -> dict[str, Any]:
    known = ruleset.rule(rule)
    run = 'run_id="a",rank="0"'
    kind = f'rule="{rule}",kind="{known.kind}",severity="{known.severity}"'
    alert = f'{{alertname="{alert_of(ruleset, rule)}",rule="{rule}"}}'
    return {
        "rule_files": ["alerts.yml"],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": [
                    {"series": f"gradwatch_rule_firings_total{{{run},{kind}}}", "values": "0x9 1x20"},
                    {"series": f'gradwatch_rule_active{{{run},rule="{rule}"}}', "values": "0x9 1x4 0x16"},
                ],
                "promql_expr_test": [
                    {
                        "expr": f'count by (alertname, rule) (ALERTS{{alertstate="firing",rule="{rule}"}})',
                        "eval_time": "3m",
                        "exp_samples": [{"labels": alert, "value": 1}],
                    }
                ],
            }
        ],
    }
