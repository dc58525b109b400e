"""`gradwatch rules list` and `rules check` show all that a file does: rules, clip groups in their order, sinks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradwatch.cli import main

Captured = pytest.CaptureFixture[str]

ONLY_CLIPS = """version: 1
groups:
  head: {params: ["head.*"], min_ndim: 2}
  rest: {params: ["*"]}
clip:
  total: {method: norm, max_norm: 2.0}
  groups:
    rest: {method: autoclip, percentile: 10}
    head: {method: norm, max_norm: 0.1}
sinks:
  - journal: {params: full, max_bytes: 0}
  - log
  - webhook: {url: "https://hooks.example.org/T0/hidden-path", token: "${TOKEN}", body: {routing_key: hidden-key}}
"""


@pytest.fixture
def only_clips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file without rules."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clips.gradwatch.yaml").write_text(ONLY_CLIPS)
    return "clips.gradwatch.yaml"


@pytest.mark.parametrize("words", [[], ["--resolved"], ["--origin"]])
def test_clip_groups_are_listed_in_the_order_in_which_they_are_tried(
    words: list[str], only_clips: str, capsys: Captured
) -> None:
    """That is the order of `groups:`, not of `clip: groups:`; with what each takes, its method and all its keys."""
    assert main(["rules", "list", "--rules", only_clips, *words]) == 0
    listed = capsys.readouterr().out
    head = next(line for line in listed.splitlines() if "1. head" in line)
    rest = next(line for line in listed.splitlines() if "2. rest" in line)
    total = next(line for line in listed.splitlines() if line.startswith("  total"))
    assert listed.index(head) < listed.index(rest) < listed.index(total)
    assert '["head.*"] of 2 dimensions at least  norm' in head
    assert 'max_norm: 0.1, scope: "group"' in head
    assert '["*"]' in rest
    assert "autoclip  percentile: 10" in rest
    assert "max_norm: 2.0" in total
    assert "the first of these groups that it matches, in the order of `groups:`" in listed
    assert "no rules" in listed


def test_sinks_are_listed_without_their_secrets(only_clips: str, capsys: Captured) -> None:
    """With their options; a variable is named, what may be a token is masked, in the text and as JSON."""
    for words in ([], ["--resolved"], ["--json"]):
        assert main(["rules", "list", "--rules", only_clips, *words]) == 0
        listed = capsys.readouterr().out
        assert "hidden" not in listed
        assert "https://hooks.example.org/***" in listed
        assert "${TOKEN}" in listed
        assert "max_bytes" in listed


def test_origins_of_clips_and_sinks(only_clips: str, capsys: Captured) -> None:
    """Each has the line that set it."""
    assert main(["rules", "list", "--rules", only_clips, "--origin"]) == 0
    listed = capsys.readouterr().out.splitlines()
    for word, line in (("1. head", 9), ("2. rest", 8), ("  total", 6), ("  journal", 11), ("  log", 12)):
        said = next(one for one in listed if one.startswith(f"  {word.strip()}"))
        assert said.endswith(f"{only_clips}:{line}")


def test_machines_get_the_same(only_clips: str, capsys: Captured) -> None:
    """Groups, policies, their order, sinks and actions in `--json`."""
    assert main(["rules", "list", "--rules", only_clips, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["clip_order"] == ["head", "rest"]
    assert document["clip"]["groups"]["head"]["params"] == {"max_norm": 0.1, "scope": "group"}
    assert document["clip"]["total"]["method"] == "norm"
    assert document["groups"]["head"]["params"] == ["head.*"]
    assert [next(iter(one)) for one in document["sinks"]] == ["journal", "log", "webhook"]
    assert main(["rules", "list", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["sinks"] is None
    assert document["clip"] is None
    assert "localise" in json.dumps(document["rules"]["non-finite"]["do"])


def test_check_counts_what_a_file_has(only_clips: str, capsys: Captured) -> None:
    """Not its rules alone."""
    assert main(["rules", "check", only_clips]) == 0
    assert "0 rules, a clip of the total, 2 clip groups, 3 sinks, digest" in capsys.readouterr().out
    assert main(["rules", "check", only_clips, "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["files"]
    assert (report["clips_total"], report["clip_groups"], report["sinks"]) == (True, 2, 3)


def test_a_file_that_names_no_sinks_has_the_default_ones(capsys: Captured) -> None:
    """Listed in full it says so."""
    assert main(["rules", "list", "--resolved"]) == 0
    assert "the file does not say: prometheus, journal and log" in capsys.readouterr().out


def test_first_steps_are_listed(tmp_path: Path, capsys: Captured) -> None:
    """Of a rule, and of all that is clipped."""
    path = tmp_path / "late.gradwatch.yaml"
    path.write_text(
        "version: 1\nrules: {late: {detect: {kind: above, of: total_norm, threshold: 5}, from_step: 500}}\n"
        "clip: {total: {method: norm, max_norm: 1.0}, from_step: 1000}\n"
    )
    assert main(["rules", "list", "--rules", str(path)]) == 0
    listed = capsys.readouterr().out
    assert "total_norm (from step 500)" in listed
    assert "clip at: step, from step 1,000 on" in listed
