"""The report as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from gradwatch.report import json_document, read_run
from tests.report.runs import broken, finished, recorded


def test_a_broken_run(tmp_path: Path) -> None:
    """Strict JSON with the verdict, curves by bucket, parameters, the incident with its cause, rules and cost."""
    run = recorded(tmp_path, broken(), account=finished(60, fired={"non-finite": 1}))
    document = json.loads(json_document.text([read_run(run)]), parse_constant=lambda name: 1 / 0)
    (found,) = document["runs"]
    (track,) = found["tracks"]
    assert found["verdict"]["state"] == "critical"
    assert track["bucket_starts"] == list(range(60))
    assert track["curves"]["total_norm"]["largest"][40] is None
    assert track["curves"]["total_norm"]["not_finite"].index(True) == 40
    assert track["counts"]["skipped"][40] == 1
    assert track["parameters"][3] == {
        **track["parameters"][3],
        "parameter": "layers.3.weight",
        "not_finite_buckets": 1,
    }
    assert found["incidents"][0]["where"] == "train.py:11"
    assert {rule["rule"]: rule["state"] for rule in found["rules"]} == {
        "non-finite": "fired",
        "exploding": "silent",
    }
    assert found["cost"]["share"] == 0.05


def test_without_a_step(tmp_path: Path) -> None:
    """Nothing recorded is a document as well."""
    (found,) = json.loads(json_document.text([read_run(recorded(tmp_path, []))]))["runs"]
    assert (found["tracks"], found["cost"], found["verdict"]["state"]) == ([], None, "nothing")
