"""What `gradwatch run` refuses, before the script starts; `gradwatch rules check` refuses it at the same place."""

from __future__ import annotations

import io
import socket
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.__main__ import main
from gradwatch.errors import AttachError, RuleFileError
from gradwatch.rules.files import parse_rules
from gradwatch.sinks.log import LogSink
from gradwatch.sinks.prometheus.sink import PrometheusSink
from tests.support.kept import Kept

HEAD = "version: 1\nrules: {r: {detect: {kind: nonfinite}}}\n"
BAD = {
    "zclap": ("version: 1\nclip: {total: {method: zclap}}\n", "GW104", ":2:"),
    "below float32": ("version: 1\nclip: {total: {method: norm, max_norm: 1e-46}}\n", "GW105", ":2:40"),
    "beyond float32": (
        "version: 1\nrules: {r: {detect: {kind: above, of: norm, threshold: 1e39}}}\n",
        "GW105",
        ":2:",
    ),
    "on ranks": (
        "version: 1\nrules: {r: {detect: {kind: rank_outlier}, do: [clip: {to: 1.0}]}}\n",
        "GW215",
        ":2:43",
    ),
    "sink option": (HEAD + "sinks: [log, prometheus: {params: match}]\n", "GW215", ":3:14"),
    "sink address": (HEAD + "sinks: [prometheus: {listen: 'example.org:80'}]\n", "GW215", ":3:9"),
}


@pytest.mark.parametrize("name", BAD)
def test_check_refuses_what_run_refuses(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Code and place from both; `run` starts nothing and ends with 2."""
    text, code, place = BAD[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.gradwatch.yaml").write_text(text)
    assert main(["rules", "check", "bad.gradwatch.yaml"]) == 1
    checked = capsys.readouterr().err
    command = ["run", "--rules", "bad.gradwatch.yaml", "--", sys.executable, "-c", "print('started')"]
    assert main(command) == 2
    ran = capsys.readouterr()
    assert ran.out == ""
    for said in (checked, ran.err):
        assert code in said
        assert f"bad.gradwatch.yaml{place}" in said


def test_a_bundle_without_its_library_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`rules check` names what to install, at the rule that asks for `snapshot`; where it is there, nothing is said."""
    path = tmp_path / "bundles.gradwatch.yaml"
    path.write_text("version: 1\nrules:\n  r:\n    detect: {kind: nonfinite}\n    do: [snapshot]\n")
    monkeypatch.setattr("gradwatch.runtime.optional_dependencies._installed", lambda module: True)
    assert main(["rules", "check", str(path)]) == 0
    monkeypatch.setattr("gradwatch.runtime.optional_dependencies._installed", lambda module: False)
    assert main(["rules", "check", str(path)]) == 1
    said = capsys.readouterr().err
    assert "GW215" in said
    assert "bundles.gradwatch.yaml:5:" in said
    assert "pip install 'gradwatch[bundle]'" in said


def test_a_file_for_a_folder_and_a_bad_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--dir` at a file, or where no folder can be made, and a listen address that is none: one sentence, exit 2."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    script = ["--", sys.executable, "-c", "print('started')"]
    for place in ("taken", "taken/runs"):
        assert main(["run", "--dir", place, *script]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert f"{tmp_path / 'taken'} is not a folder" in said.err
    assert main(["run", "--dir", "/proc/runs", *script]) == 2  # where nothing can be made, also by root
    said = capsys.readouterr()
    assert said.out == ""
    assert "the run folder cannot be made: /proc/runs: " in said.err
    monkeypatch.setenv("GRADWATCH_LISTEN", "nowhere")
    assert main(["run", *script]) == 2
    assert "not HOST:PORT" in capsys.readouterr().err
    monkeypatch.delenv("GRADWATCH_LISTEN")
    with pytest.raises(AttachError, match="is not a folder"):
        gradwatch.watch(nn.Linear(2, 1), run_dir=tmp_path / "taken", listen="127.0.0.1:0")


def test_a_name_that_gradwatch_measures_is_not_observed(tmp_path: Path) -> None:
    """`observe(scaler_skip=1.0)` switched the skip off: it is not used, said once, and the NaN is skipped."""
    said = io.StringIO()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with gradwatch.watch(
        model, optimizer, rules="default", run_dir=tmp_path, sinks=[LogSink(stream=said)]
    ) as gw:
        for step in range(3):
            gw.observe(scaler_skip=1.0, lr=5.0, total_norm=0.0)
            optimizer.zero_grad()
            (model(torch.ones(8, 4)).mean() * (float("nan") if step == 2 else 1)).backward()
            optimizer.step()
        assert "non-finite" in gw.status()["firing"]
        assert gw.status()["internal_errors"] == {}
    assert bool(model.weight.isfinite().all())
    for name in ("scaler_skip", "lr", "total_norm"):
        assert said.getvalue().count(f"observe({name}=…) is not used") == 1
    assert "internal error" not in said.getvalue()


def test_a_value_may_have_the_name_of_a_column_of_parameters(tmp_path: Path) -> None:
    """`observe(mean=…)` stands in nothing's place and is kept; `observed_only` made steps uncounted: refused."""
    said = io.StringIO()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    kept = Kept()
    with gradwatch.watch(
        model, optimizer, rules="default", run_dir=tmp_path, sinks=[LogSink(stream=said), kept]
    ) as gw:
        for _ in range(3):
            gw.observe(mean=2.0, observed_only=1.0)
            optimizer.zero_grad()
            model(torch.ones(8, 4)).mean().backward()
            optimizer.step()
        assert gw.status()["steps"] == 3
    assert [record.snapshot.scalars.get("mean") for record in kept.records] == [2.0] * 3
    assert all("observed_only" not in record.snapshot.scalars for record in kept.records)
    assert said.getvalue().count("observe(observed_only=…) is not used") == 1


def test_a_taken_port_is_one_line_with_the_new_address(tmp_path: Path) -> None:
    """The endpoint moves to a free port; the log says so, and where."""
    said = io.StringIO()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        model = nn.Linear(4, 1)
        endpoint = PrometheusSink(listen=f"127.0.0.1:{port}")
        with gradwatch.watch(model, run_dir=tmp_path, sinks=[endpoint, LogSink(stream=said)]) as gw:
            url = gw.url
    assert url is not None
    lines = [line for line in said.getvalue().splitlines() if f"127.0.0.1:{port} is taken" in line]
    assert len(lines) == 1
    assert url in lines[0]


def test_bounds_at_the_edge_of_float32() -> None:
    """The largest and smallest normal numbers, 0 and negative thresholds are fine."""
    for number in ("3.4e38", "1.2e-38", "0", "-1e30"):
        parse_rules(f"version: 1\nrules: {{r: {{detect: {{kind: above, of: loss, threshold: {number}}}}}}}")
    with pytest.raises(RuleFileError, match="GW105"):
        parse_rules("version: 1\nrules: {r: {detect: {kind: above, of: loss, threshold: -1e39}}}")
