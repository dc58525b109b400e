"""The files of the stack, checked by the tools that will read them; every checker shown to fail as well."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from gradwatch.cli import main
from gradwatch.monitoring.alerts import health_alerts, run_alerts
from gradwatch.monitoring.scrape_interval import Pace
from gradwatch.rules.packs import pack_names
from gradwatch.sinks.alert_names import RULE_ALERTS
from gradwatch.sinks.prometheus.metric_catalogue import METRICS
from tests.support.binaries import require

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def check(*command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a checker; its output joined."""
    return subprocess.run(
        [require(command[0]), *command[1:]],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        check=False,
        env={
            **os.environ,
            "LC_ALL": "C.UTF-8",  # systemd-analyze prints no table under an ISO-8859 locale
            "GOGC": "400",  # Go's collector takes a third of promtool's time
            "GOMAXPROCS": "1",
        },
    )


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    """A copy to break."""
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    return tmp_path / "deploy"


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text, f"{path} does not say {old}"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


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
    good = alerts.read_text(encoding="utf-8")
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


@cache
def parsed(text: str) -> Any:
    """A YAML text as plain data, which is not to be changed: the same texts are asked for again and again."""
    return YAML(typ="safe", pure=True).load(text)


def unit_tests_of(folder: Path, *names: str) -> subprocess.CompletedProcess[str]:
    """promtool over these groups of alerts_test.yml, each with the alerts that it names; with all where it names none.

    Every alert of a file takes its time, at each instant of a group.
    """
    document = parsed((folder / "alerts_test.yml").read_text(encoding="utf-8"))
    groups = parsed((folder / "rules" / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    files = []
    for number, tests in enumerate(each for each in document["tests"] if each["name"] in names):
        some = [
            each | {"rules": [rule for rule in each["rules"] if rule["alert"] in str(tests)]}
            for each in groups
        ]
        named = any(each["rules"] for each in some)
        (folder / f"alerts{number}.yml").write_text(json.dumps({"groups": some}))  # JSON is YAML
        rule_files = [f"alerts{number}.yml"] if named else document["rule_files"]
        files.append(f"test{number}.yml")
        (folder / files[-1]).write_text(json.dumps(document | {"rule_files": rule_files, "tests": [tests]}))
    assert len(files) == len(names)
    return check("promtool", "test", "rules", *files, cwd=folder)


FIRED_BEFORE = (
    # What the first scrape finds, grows, and goes on under the labels of `gradwatch serve`: two firings in all.
    ({"instance": "a/0"}, "_x7 1x20 2x20 stale"),
    ({"instance": "serve"}, "_x50 2x60"),
    # A second optimizer makes a label appear: of three the second is in the last ten minutes.
    ({"instance": "b/0", "run_id": "b"}, "0x10 1x15 stale"),
    ({"instance": "b/0", "run_id": "b", "optimizer": "0"}, "_x27 1x43 2x60"),
)


@pytest.mark.parametrize(("board", "minutes", "counted"), [("run", 20, 2), ("run", 5, 0), ("fleet", 10, 0)])
def test_what_fired_before_the_first_scrape_counts(
    board: str, minutes: int, counted: int, tmp_path: Path
) -> None:
    """The figure that is looked at first: of a run that fired at its first steps, and of no run twice."""
    panels = json.loads((DEPLOY / "grafana" / "dashboards" / f"{board}.json").read_text())["panels"]
    (asked,) = {
        target["expr"]
        for panel in panels
        for target in panel.get("targets", ())
        if "round(sum" in target["expr"] and "gradwatch_rule_firings_total" in target["expr"]
    }
    expr = (
        asked.replace("$__range", f"{minutes}m")
        .replace("$job", "j")
        .replace("$rank", "0")
        .replace("$run_id", "a")
    )
    series = [
        {
            "series": labelled({"job": "j", "rank": "0", "rule": "r", "run_id": "a", **labels}),
            "values": values,
        }
        for labels, values in FIRED_BEFORE
    ]
    labels = '{job="j",run_id="a"}' if board == "fleet" else "{}"
    expected: list[dict[str, object]] = [{"labels": labels, "value": counted}]
    if board == "fleet":
        expected.append({"labels": '{job="j",run_id="b"}', "value": 1})
    test = {"expr": expr, "eval_time": "20m", "exp_samples": expected}
    document = {"tests": [{"interval": "15s", "input_series": series, "promql_expr_test": [test]}]}
    (tmp_path / "test.yml").write_text(json.dumps(document))
    done = check("promtool", "test", "rules", "test.yml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout


def labelled(labels: Mapping[str, str]) -> str:
    """The counter of firings with these labels."""
    pairs = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"gradwatch_rule_firings_total{{{pairs}}}"


def test_promtool_runs_the_alerts(stack: Path) -> None:
    """The unit tests of the alerts pass, in all groups; that they find what is wrong is the next test."""
    folder = stack / "prometheus"
    groups = parsed((folder / "alerts_test.yml").read_text(encoding="utf-8"))["tests"]
    done = unit_tests_of(folder, *(each["name"] for each in groups))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("old", "new", "noticed_by"),
    [
        (
            'gradwatch_rule_active{rule="vanishing"} == 1',
            'gradwatch_rule_active{rule="vanishing"} == 2',
            "a rule that goes on firing goes on alerting",
        ),
        (
            "max by (run_id, process) (last_over_time("
            'gradwatch_rule_firings_total{rule="non-finite"}[1h] offset 1m)) or ',
            "",
            "a run that has ended, seen again after a restart of `gradwatch serve`, does not alert again",
        ),
        (
            "or 0 * max by (run_id, process, component) (gradwatch_internal_errors_total)",
            "",
            "a fault of a part that had no counter before it, and of one that failed before the first scrape",
        ),
        (
            "> on (run_id, process) group_left () (max by (run_id, process) (last_over_time("
            'gradwatch_rule_firings_total{rule="non-finite"}[1h] offset 1m)) or 0 * max by (run_id, process)',
            "> on (run_id) group_left () (max by (run_id) (last_over_time("
            'gradwatch_rule_firings_total{rule="non-finite"}[1h] offset 1m)) or 0 * max by (run_id)',
            "a second process of a rank is another training, with news and a stall of its own",
        ),
        (
            "> 3 * max without",
            "> 5 * max without",
            "a job that hangs before its first step; one that has ended and is shown by serve is no such job",
        ),
        (
            'increase(gradwatch_rule_firings_total{rule="norm-overflow"}[1m])',
            'increase(gradwatch_rule_firings_total{rule="no"}[1m])',
            "a rank that fires for the first time where another has fired before",
        ),
        (
            "max without (optimizer) (gradwatch_last_step_timestamp_seconds)",
            "gradwatch_last_step_timestamp_seconds",
            "no step for longer than the run itself says is normal",
        ),
        ('up{job="gradwatch"} == 0', "up == 0", "two failed scrapes are not a dead job, a minute of them is"),
        ("> 0.9", "> 0.8", "clipping is news only when it lasts"),
        ("gradwatch_coverage_ratio < 1", "gradwatch_coverage_ratio < 0.5", "gradwatch's own trouble"),
    ],
)
def test_the_unit_tests_of_the_alerts_can_fail(old: str, new: str, noticed_by: str, stack: Path) -> None:
    """Each of these changes to an alert is noticed, by the group of that name, which passes without it."""
    folder = stack / "prometheus"
    done = unit_tests_of(folder, noticed_by)
    assert done.returncode == 0, done.stdout
    replace(folder / "rules" / "alerts.yml", old, new)
    done = unit_tests_of(folder, noticed_by)
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


# -- images, Kubernetes, Slurm, systemd -----------------------------------------------------------------------


def in_venv(program: str) -> str:
    """A checker that pip installs beside the interpreter of the tests."""
    beside = Path(sys.executable).parent / program
    return str(beside) if beside.exists() else program


def accepts(*command: str, cwd: Path | None = None) -> None:
    done = check(*command, cwd=cwd)
    assert done.returncode == 0, done.stdout


def refuses(*command: str, cwd: Path | None = None) -> None:
    done = check(*command, cwd=cwd)
    assert done.returncode != 0, done.stdout


def test_hadolint(stack: Path) -> None:
    """The Dockerfile; an unpinned `apt-get install` after a `cd` is refused."""
    hadolint, dockerfile = in_venv("hadolint"), stack / "Dockerfile"
    accepts(hadolint, str(dockerfile))
    replace(dockerfile, "USER 65532:65532", "RUN cd /tmp && apt-get install curl")
    refuses(hadolint, str(dockerfile))


def test_the_image_runs_as_nobody_and_without_torch() -> None:
    """A numeric user (Kubernetes cannot check a name), a base one can choose, requirements less torch."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    assert "ARG BASE=" in text
    assert re.search(r"^USER [1-9]\d*:\d+$", text, re.M)
    assert "--no-deps ." in text
    listed = re.search(
        r"^dependencies = \[\n(.*?)^\]",
        (DEPLOY.parent / "pyproject.toml").read_text(encoding="utf-8"),
        re.M | re.S,
    )
    assert listed is not None
    wanted = [each for each in re.findall(r'"(.*)"', listed[1]) if not each.startswith("torch")]
    assert len(wanted) >= 4
    lines = (DEPLOY / "requirements-serve.txt").read_text(encoding="utf-8").splitlines()
    assert sorted(line for line in lines if not line.startswith("#")) == sorted(wanted)


def test_the_compose_schema(stack: Path) -> None:
    """compose.yaml follows the Compose specification; a misspelt key does not."""
    command = (in_venv("check-jsonschema"), "--builtin-schema", "vendor.compose-spec")
    accepts(*command, str(stack / "compose.yaml"))
    replace(stack / "compose.yaml", "read_only: true", "readonly: true")
    refuses(*command, str(stack / "compose.yaml"))


def test_compose_mounts_what_exists_and_opens_nothing_to_the_world() -> None:
    """Every relative path of a volume is in the stack; every port is bound to loopback."""
    services = YAML(typ="safe", pure=True).load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))[
        "services"
    ]
    for service in services.values():
        assert all(str(port).startswith("127.0.0.1:") for port in service["ports"])
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith("./") or (DEPLOY / source).exists(), volume


def test_compose_mounts_nothing_inside_a_read_only_mount() -> None:
    """A container whose mount point has to be made on a read-only file system does not start."""
    services = YAML(typ="safe", pure=True).load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))[
        "services"
    ]
    for name, service in services.items():
        mounts = [re.fullmatch(r".*:(/[^:]*)(:ro)?", each) for each in service.get("volumes", [])]
        read_only = [mount[1] for mount in mounts if mount and mount[2]]
        inside = [
            mount[0] for mount in mounts for outer in read_only if mount and mount[1].startswith(outer + "/")
        ]
        assert len(mounts) == len([mount for mount in mounts if mount])
        assert not inside, f"{name}: {inside}"


def test_the_aggregator_of_compose_has_the_name_of_its_machine() -> None:
    """Numbers of processes are looked up where they belong; a shell's HOSTNAME is in nobody's environment."""
    serve = YAML(typ="safe", pure=True).load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))[
        "services"
    ]["serve"]
    assert (serve["pid"], serve["uts"]) == ("host", "host")
    assert "hostname" not in serve


@pytest.mark.parametrize("name", ["serve.yaml", "job.yaml"])
def test_the_schemas_of_kubernetes(name: str, stack: Path) -> None:
    """Objects of Kubernetes itself, unknown fields refused."""
    validate, path = in_venv("kubernetes-validate"), stack / "k8s" / name
    accepts(validate, "--strict", str(path))
    replace(path, "automountServiceAccountToken", "automountServiceAccountTokens")
    refuses(validate, "--strict", str(path))


def test_kustomize_builds(stack: Path) -> None:
    """`kubectl kustomize` puts all of it into one namespace; a missing file is noticed."""
    done = check("kubectl", "kustomize", str(stack / "k8s"))
    assert done.returncode == 0, done.stdout
    objects = [each for each in YAML(typ="safe", pure=True).load_all(done.stdout) if each]
    kinds = {each["kind"] for each in objects}
    assert kinds == {
        "PersistentVolumeClaim",
        "Deployment",
        "Service",
        "PodMonitor",
        "ServiceMonitor",
        "PrometheusRule",
    }
    assert {each["metadata"]["namespace"] for each in objects} == {"training"}
    (stack / "k8s" / "serve.yaml").unlink()
    refuses("kubectl", "kustomize", str(stack / "k8s"))


def test_pods_run_as_nobody_and_can_do_nothing_else() -> None:
    """The restricted profile of Kubernetes' pod security standards, in the aggregator and in the example job."""
    for name in ("serve.yaml", "job.yaml"):
        objects = list(
            YAML(typ="safe", pure=True).load_all((DEPLOY / "k8s" / name).read_text(encoding="utf-8"))
        )
        (pod,) = [each["spec"]["template"]["spec"] for each in objects if "template" in each["spec"]]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_aggregator_keeps_what_it_has_read() -> None:
    """Its system is read-only; where it writes nothing down, every restart reads thousands of journals again."""
    objects = list(
        YAML(typ="safe", pure=True).load_all((DEPLOY / "k8s/serve.yaml").read_text(encoding="utf-8"))
    )
    (pod,) = [each["spec"]["template"]["spec"] for each in objects if each["kind"] == "Deployment"]
    (container,) = pod["containers"]
    state = container["args"][container["args"].index("--state") + 1]
    (mount,) = [each for each in container["volumeMounts"] if each["mountPath"] == state]
    assert not mount.get("readOnly")
    assert {"name": mount["name"], "emptyDir": {}} in pod["volumes"]
    unit = (DEPLOY / "systemd/gradwatch-serve.service").read_text(encoding="utf-8")
    found = re.search(r"^CacheDirectory=(\S+)$", unit, re.M)
    assert found is not None
    assert f" --state /var/cache/{found[1]}\n" in unit


def test_shellcheck(stack: Path) -> None:
    """The Slurm script; an unquoted variable is refused."""
    script = stack / "slurm" / "train.sbatch"
    accepts("shellcheck", str(script))
    replace(script, '"${SLURM_JOB_NODELIST}"', "$SLURM_JOB_NODELIST")
    refuses("shellcheck", str(script))


def test_systemd_accepts_the_unit(stack: Path) -> None:
    """It parses, its exposure is low; a misspelt key is noticed, and so is one that opens it."""
    unit = stack / "systemd" / "gradwatch-serve.service"
    replace(unit, "/opt/gradwatch/bin/gradwatch", shutil.which("true") or "/bin/true")
    done = check("systemd-analyze", "verify", "--man=no", str(unit))
    assert (done.returncode, done.stdout) == (0, "")
    security = ("systemd-analyze", "security", "--offline=true", "--threshold=25", str(unit))
    accepts(*security)
    good = unit.read_text(encoding="utf-8")
    replace(unit, "ProtectClock=yes", "ProtectClocks=yes")
    assert "ProtectClocks" in check("systemd-analyze", "verify", "--man=no", str(unit)).stdout
    unit.write_text(good)
    replace(unit, "CapabilityBoundingSet=\n", "")
    replace(unit, "NoNewPrivileges=yes\n", "")
    refuses(*security)


@pytest.mark.parametrize("unit", sorted((DEPLOY / "runbooks").glob("*.md")), ids=lambda path: path.stem)
def test_a_runbook_says_what_how_and_what_to_do(unit: Path) -> None:
    """Three sections in order, and no metric that does not exist."""
    text = unit.read_text(encoding="utf-8")
    assert re.findall(r"^#+ (.*)$", text, re.M) == [unit.stem, "What it means", "How to look", "What to do"]
    assert set(re.findall(r"\bgradwatch_[a-z_]+", text)) <= {metric.name for metric in METRICS}


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    """Also those that rules of one's own can give rise to."""
    others = (*run_alerts(Pace()), *health_alerts(Pace()))
    pages = {path.stem for path in (DEPLOY / "runbooks").glob("*.md")}
    assert pages == {*RULE_ALERTS, *(alert.name for alert in others)}
