"""Objects of the Prometheus operator and of Kubeflow Trainer against the types their projects publish.

The types are pydantic models made from the CRDs: `cloudcoil.models.prometheus_operator` (the operator's 0.80.1) and
`kubeflow-trainer-api` (Kubeflow's own, 2.3.0). An object is accepted where it parses and comes back unchanged: a
field that the type does not have is lost on the way, as an API server prunes it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from ruamel.yaml import YAML

from gradwatch.cli import main
from gradwatch.rules.packs import pack_names

K8S = Path(__file__).resolve().parents[2] / "deploy" / "k8s"

Object = dict[str, Any]


def objects(path: Path) -> list[Object]:
    return [each for each in YAML(typ="safe", pure=True).load_all(path.read_text(encoding="utf-8")) if each]


def come_back(each: Object) -> Object:
    """The object as its type understands it; ValidationError where it is not one of that type."""
    from cloudcoil.models.prometheus_operator import v1 as operator  # seconds: not for all who collect this
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

    if each["kind"] == "TrainJob":
        job = TrainerV1alpha1TrainJob.from_dict(each)
        assert job is not None
        return dict(job.to_dict())
    model = getattr(operator, each["kind"]).model_validate(each)
    return dict(model.model_dump(mode="json", by_alias=True, exclude_unset=True))


def is_accepted(each: Object) -> bool:
    try:
        return come_back(each) == each
    except ValidationError:
        return False


@pytest.mark.parametrize(
    ("file", "kinds"),
    [
        ("podmonitor.yaml", ["PodMonitor", "ServiceMonitor"]),
        ("prometheusrule.yaml", ["PrometheusRule"]),
        ("trainjob.yaml", ["TrainJob"]),
    ],
)
def test_the_manifests_are_what_the_crds_describe(file: str, kinds: list[str]) -> None:
    """Every field is one of the type's, and none is changed on the way."""
    found = objects(K8S / file)
    assert [each["kind"] for each in found] == kinds
    for each in found:
        assert come_back(each) == each


@pytest.mark.parametrize("pack", pack_names())
def test_the_rules_of_every_pack_are_a_prometheusrule(pack: str, tmp_path: Path) -> None:
    """What `gradwatch deploy export --rules` writes, for each shipped pack."""
    assert main(["deploy", "export", str(tmp_path), "--rules", pack]) == 0
    (rule,) = objects(tmp_path / "k8s" / "prometheusrule.yaml")
    assert come_back(rule) == rule


def misspell(holder: Object, name: str) -> None:
    holder[f"{name}x"] = holder.pop(name)


BROKEN: list[tuple[str, str, Callable[[Object], object]]] = [
    ("podmonitor.yaml", "PodMonitor", lambda spec: misspell(spec, "podMetricsEndpoints")),
    ("podmonitor.yaml", "PodMonitor", lambda spec: spec.pop("selector")),
    ("podmonitor.yaml", "PodMonitor", lambda spec: misspell(spec["podMetricsEndpoints"][0], "honorLabels")),
    ("podmonitor.yaml", "PodMonitor", lambda spec: spec["podMetricsEndpoints"][0].update(interval="15 sec")),
    ("podmonitor.yaml", "PodMonitor", lambda spec: spec["podMetricsEndpoints"][0].update(port=29440)),
    (
        "podmonitor.yaml",
        "PodMonitor",
        lambda spec: spec["podMetricsEndpoints"][0]["relabelings"][0].update(action="replaces"),
    ),
    ("podmonitor.yaml", "ServiceMonitor", lambda spec: misspell(spec["endpoints"][0], "path")),
    ("prometheusrule.yaml", "PrometheusRule", lambda spec: misspell(spec["groups"][0]["rules"][0], "alert")),
    ("prometheusrule.yaml", "PrometheusRule", lambda spec: spec["groups"][0]["rules"][0].pop("expr")),
    ("prometheusrule.yaml", "PrometheusRule", lambda spec: spec["groups"][0]["rules"][0].update({"for": 60})),
    ("trainjob.yaml", "TrainJob", lambda spec: misspell(spec["trainer"], "numNodes")),
    ("trainjob.yaml", "TrainJob", lambda spec: spec["trainer"].update(numNodes="two")),
    ("trainjob.yaml", "TrainJob", lambda spec: spec["trainer"]["env"][0].pop("name")),
    ("trainjob.yaml", "TrainJob", lambda spec: spec.pop("runtimeRef")),
]


@pytest.mark.parametrize(("file", "kind", "damage"), BROKEN)
def test_a_broken_copy_is_refused(file: str, kind: str, damage: Callable[[Object], object]) -> None:
    """The check above can fail: unknown fields, missing ones, wrong types, a duration that is none."""
    (good,) = [each for each in objects(K8S / file) if each["kind"] == kind]
    broken = copy.deepcopy(good)
    damage(broken["spec"])
    assert is_accepted(good)
    assert not is_accepted(broken)
