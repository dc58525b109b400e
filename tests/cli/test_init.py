"""`gradwatch init`: a rule file that is right, every example in it too, with groups of the model's own names."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gradwatch.cli import main
from gradwatch.rules.files import load_rules, parse_rules
from gradwatch.rules.packs import pack_names
from gradwatch.rules.rule_set import RuleSet
from tests.report.runs import recorded, steps
from tests.support.sink_records import make_sites

NAMES = ["wte.weight", "h.0.attn.weight", "h.0.ln_1.weight", "h.0.mlp.weight", "h.1.attn.weight"]
MODEL = """
import torch
def build():
    model = torch.nn.Module()
    model.actor, model.critic = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    model.critic.bias.requires_grad_(False)
    return model
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GRADWATCH_DIR", raising=False)
    return tmp_path


def written(file: str = "my.gradwatch.yaml") -> RuleSet:
    return parse_rules(Path(file).read_text(encoding="utf-8"), file)


def commented_out(text: str) -> str:
    """The file with every example in force: comments that are keys, and what is below them."""
    head, extends, rest = text.partition("\nextends:")
    return head + extends + re.sub(r"^( *)# ((?:[a-z-]+: |[a-z-]+:$|  +|- ).*)$", r"\1\2", rest, flags=re.M)


def test_the_newest_run_gives_the_names(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without an option; the groups have what they say, and stdout says what to type next."""
    recorded(folder / "gradwatch-runs", steps(3, make_sites(names=NAMES)))
    assert main(["init"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("my.gradwatch.yaml: extends default, groups by 5 parameters of run run-1\n")
    assert "gradwatch run --rules my.gradwatch.yaml -- python train.py" in out
    own = {group.name: group.params for group in written().groups}
    assert own["attention"] == ("*attn*",)
    assert "# `embeddings` (1 parameter: wte.weight) is a group of the pack already." in Path(
        "my.gradwatch.yaml"
    ).read_text(encoding="utf-8")


def test_a_function_gives_the_names(folder: Path) -> None:
    """Those of its model that are trained."""
    (folder / "built.py").write_text(MODEL)
    assert main(["init", "--model", "built:build"]) == 0
    assert [group.name for group in written().groups][:2] == ["actor", "critic"]
    assert "1 parameter: critic.weight\n" in Path("my.gradwatch.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("pack", pack_names())
def test_every_example_works_as_it_stands(folder: Path, pack: str) -> None:
    """On each pack, with and without names: the comments that are rules, taken in, make a file that is accepted."""
    recorded(folder / "runs", steps(3, make_sites(names=NAMES)))
    for file, options in (("a.yaml", ["--dir", "runs"]), ("b.yaml", [])):
        assert main(["init", file, "--extends", pack, *options]) == 0
        as_it_stands = written(file)
        text = commented_out(Path(file).read_text(encoding="utf-8"))
        all_in = parse_rules(text, file)
        added = {rule.id for rule in all_in.rules} - {rule.id for rule in as_it_stands.rules}
        assert added == {"norms-of-one-group", "total-norm-too-large", "learning-rate-too-large"}
        assert [sink.kind for sink in all_in.sinks or ()] == ["journal", "log", "prometheus", "slack"]
        assert all_in.clip is not None


@pytest.mark.parametrize(
    ("name", "pack"), [("h.0.mlp.experts.0.weight", "moe"), ("q.lora_A.weight", "finetune"), ("x", "default")]
)
def test_the_names_choose_the_pack(folder: Path, name: str, pack: str) -> None:
    """Experts and adapters have packs of their own."""
    recorded(folder / "gradwatch-runs", steps(3, make_sites(names=[name, "a", "b"])))
    assert main(["init"]) == 0
    assert f"extends: [{pack}]" in Path("my.gradwatch.yaml").read_text(encoding="utf-8")


def test_a_file_that_is_there_is_left_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unless --force is given; stdout needs none."""
    Path("my.gradwatch.yaml").write_text("mine")
    assert main(["init"]) == 2
    assert "my.gradwatch.yaml is there already" in capsys.readouterr().err
    assert Path("my.gradwatch.yaml").read_text() == "mine"
    assert main(["init", "-"]) == 0
    assert parse_rules(capsys.readouterr().out, "-").rules
    assert main(["init", "--force"]) == 0
    assert written().rules


@pytest.mark.parametrize("options", [[], ["--force"]])
def test_nothing_but_a_file_is_replaced(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    """Neither a link, to nothing or to a file, nor a pipe, whatever is said."""
    (folder / "mine").write_text("mine")
    for name, target in (("a", "nowhere"), ("b", "mine")):
        (folder / name).symlink_to(target)
    os.mkfifo("pipe")
    for name, what in (("a", "a link"), ("b", "a link"), ("pipe", "a pipe (FIFO)")):
        assert main(["init", name, *options]) == 2
        assert f"cannot write {name}: it is {what}" in capsys.readouterr().err
    assert sorted(os.listdir()) == ["a", "b", "mine", "pipe"]
    assert (folder / "mine").read_text() == "mine"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))", "the modules at the top are numbered"),
        ("nn.ModuleDict({'body': nn.Linear(1, 1)})", "all of them are in one module"),
        ("nn.ModuleDict({f'p{n}': nn.Linear(1, 1) for n in range(9)})", "more than 8 modules at the top"),
        (
            "nn.ModuleDict({'norm1': nn.Linear(1, 1), 'norm2': nn.Linear(1, 1)})",
            "all of them would be in one, norms",
        ),
    ],
)
def test_where_no_group_is_made_that_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str], model: str, said: str
) -> None:
    """On stdout and in the file, with the reason."""
    (folder / "built_so.py").write_text(f"from torch import nn\ndef build():\n    return {model}\n")
    sys.modules.pop("built_so", None)
    assert main(["init", "--model", "built_so:build"]) == 0
    assert re.search(
        rf"no groups by the names of \d+ parameters of built_so:build: .*{said}", capsys.readouterr().out
    )
    text = Path("my.gradwatch.yaml").read_text(encoding="utf-8")
    assert re.search(rf"# No groups by the names of the \d+ parameters of built_so:build: .*{said}", text)
    assert "# Groups by the names" not in text


def test_a_wrapper_is_not_in_the_names(folder: Path) -> None:
    """A watch leaves it out of them, so that a group with it would match nothing."""
    source = "from torch import nn\ndef build():\n    return nn.DataParallel(nn.ModuleDict({%s}))\n"
    (folder / "wrapped.py").write_text(source % "'enc': nn.Linear(1, 1), 'dec': nn.Linear(1, 1)")
    assert main(["init", "--model", "wrapped:build"]) == 0
    assert {group.name: group.params for group in written().groups}["enc"] == ("enc.*",)


@pytest.mark.parametrize("pack", pack_names())
def test_the_rule_that_is_no_comment_changes_something(folder: Path, pack: str) -> None:
    """As it says: one setting of one rule of the pack."""
    assert main(["init", "--extends", pack]) == 0
    base = {rule.id: rule for rule in load_rules(pack).rules}
    (changed,) = (rule for rule in written().rules if rule != base[rule.id])
    assert changed == replace(base[changed.id], cooldown=changed.cooldown)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--extends", "defualt"], "did you mean"),
        (["--run", "none"], "none"),
        (["--dir", "none"], "no runs in none"),
        (["--model", "nowhere:build"], "nowhere"),
        (["no/folder/x.yaml"], "cannot write no/folder/x.yaml"),
    ],
)
def test_what_cannot_be_had_is_said(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2, with what was named and the way out; nothing is written."""
    assert main(["init", *words]) == 2
    assert said in capsys.readouterr().err
    assert not Path("my.gradwatch.yaml").exists()


def test_names_cannot_leave_their_comment(folder: Path) -> None:
    """A parameter or a run may be called anything."""
    names = ["a.norm\nrules: {}\n", "b.norm.weight", "c", "d"]
    run = recorded(folder / "runs", steps(3, make_sites(names=names)))
    run.rename(folder / "runs" / "x\nrules: {}")
    assert main(["init", "--dir", "runs"]) == 0
    assert "norms" in {group.name for group in written().groups}
