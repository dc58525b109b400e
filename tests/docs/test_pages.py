"""README.md and gradwatch/docs: every link, path, command, option, rule file and example in them is there and works."""

from __future__ import annotations

import argparse
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.cli import main
from gradwatch.cli.entry_point import build_parser
from gradwatch.rules.files import parse_rules

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "gradwatch" / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
LONGEST_README = 900
"""Words. What proves a claim stands in gradwatch/docs."""

page = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def fences(text: str, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short() -> None:
    """A path for users; the rest stands in the pages it links to, each of which is linked."""
    text = PAGES[0].read_text(encoding="utf-8")
    assert len(text.split()) <= LONGEST_README
    assert len(PAGES) > 1
    for path in DOCS.glob("*.md"):
        assert f"({path.relative_to(ROOT)})" in text


def test_every_page_of_the_reference_can_be_reached() -> None:
    """From a page of the manual, or from one of the reference that such a page links to."""
    reached = {PAGES[0], *DOCS.glob("*.md")}
    todo = list(reached)
    while todo:
        path = todo.pop()
        links = re.findall(r"\]\(([^)\s#]+\.md)", path.read_text(encoding="utf-8"))
        new = {(path.parent / link).resolve() for link in links} - reached
        todo += new
        reached |= new
    assert set(PAGES) <= reached


@page
def test_links_lead_somewhere(path: Path) -> None:
    """Relative links name files that exist, and headings that these have."""
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        file, _, anchor = target.partition("#")
        assert (path.parent / file).exists(), target
        assert not anchor or anchor in anchors((path.parent / file).read_text(encoding="utf-8")), target


@page
def test_what_is_named_exists(path: Path) -> None:
    """Files of tests, modules run by `python -m`, and commands of gradwatch with their options."""
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"\btests/[\w/]+(?:\.\w+)?", text):
        assert (ROOT / name).exists(), name
    for module in re.findall(r"python -m (tests[\w.]+)", text):
        assert find_spec(module.rstrip(".")) is not None, module
    for words in named_commands(text):
        assert_command(words)


def named_commands(text: str) -> list[str]:
    """What stands after `gradwatch`: in inline code, which may run over lines, and in lines for a shell."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    lines = [line.rpartition("&& ")[2] for block in fences(text, "bash") for line in block.splitlines()]
    found = [re.match(r"(?:\.venv/bin/)?gradwatch (?=[a-z])(.*)", code) for code in (*inline, *lines)]
    return [match[1] for match in found if match]


def assert_command(words: str) -> None:
    """The command exists, with its verb where it has some, and the options named before `--` are its own."""
    parser = build_parser()
    ours, depth = words.split(" -- ")[0].split(), 0
    while (choices := commands(parser)) and depth < len(ours):
        assert ours[depth] in choices, words
        parser, depth = choices[ours[depth]], depth + 1
    for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", " ".join(ours[depth:])):
        assert option in parser._option_string_actions, words


def commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands below a parser; {} where there are none."""
    return next((a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)), {})


@pytest.mark.parametrize(
    "path", [path for path in PAGES if path.name != "extending.md"], ids=lambda path: path.name
)
def test_rule_files_are_valid(path: Path, tmp_path: Path) -> None:
    """Each rule file shown is accepted as it stands; those of extending.md with what the page adds (test_extending)."""
    for number, text in enumerate(fences(path.read_text(encoding="utf-8"), "yaml")):
        file = tmp_path / f"{number}.gradwatch.yaml"
        file.write_text(text)
        assert gradwatch.load_rules(file).rules


def test_the_test_of_a_rule_file_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rule file of rules.md and its tests, as they stand there, by the command below them; a worse rule fails."""
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "rules.md").read_text(encoding="utf-8")
    section = text[text.index("## Tests of rules") : text.index("## In an editor")]
    (rules,), (tests,) = fences(section, "yaml"), fences(section, "yml")
    (command,) = fences(section, "bash")
    (tmp_path / "mine.test.yaml").write_text(tests)
    for file, status in ((rules, 0), (rules.replace("threshold: 10", "threshold: 30"), 1)):
        (tmp_path / "mine.gradwatch.yaml").write_text(file)
        assert main(command.split()[1:]) == status
    assert "1 of 3 tests failed" in capsys.readouterr().out


@page
def test_the_number_of_rules_is_that_of_the_default_pack(path: Path) -> None:
    """Where an account, or a picture, says how many rules there are."""
    found = re.findall(r"(?:no data for \d+ of|^) (\d+) rules\b", path.read_text(encoding="utf-8"), re.M)
    assert set(found) <= {str(sum(rule.enabled for rule in gradwatch.load_rules("default").rules))}


def test_pages_that_say_how_many_rules_there_are_were_found() -> None:
    """So that the test of that number is one."""
    for path in (ROOT / "README.md", DOCS / "concepts.md", DOCS / "using.md"):
        text = path.read_text(encoding="utf-8")
        assert re.search(r"(?:no data for \d+ of|^) \d+ rules\b", text, re.M), path.name


@page
def test_sections_within_sentences_are_valid(path: Path) -> None:
    """A section of a rule file that a sentence spells out in full is accepted as it stands."""
    prose = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    for code in re.findall(r"`((?:sinks|modules|histograms): [^`…]+)`", prose):
        if "..." not in code and not re.search(r"\b[A-Z]{3,}\b", code):
            parse_rules(f"version: 1\n{code}\n", path.name)


@page
def test_the_loop_runs_as_shown(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines that train run word for word, and leave a state to be saved."""
    monkeypatch.chdir(tmp_path)
    for code in fences(path.read_text(encoding="utf-8"), "python"):
        if "in loader" not in code:
            continue
        model = nn.Linear(4, 2)
        names: dict[str, Any] = {
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), 0.1),
            "criterion": nn.functional.cross_entropy,
            "loader": [(torch.randn(8, 4), torch.randint(0, 2, (8,))) for _ in range(3)],
            "checkpoint": {},
        }
        exec(compile(code, path.name, "exec"), names)
        assert names["gw"].status()["account"]["watched"]["steps"] == 3
        assert names["checkpoint"]["gradwatch"]["version"] == 1


def test_the_two_commands_are_marked() -> None:
    """CI runs the second word for word: each marker is followed by one line of bash that makes its own environment."""
    for marker in ("demo-command", "test-command"):
        (command,) = re.findall(
            rf"<!-- {marker} -->\n```bash\n(.*)\n```", PAGES[0].read_text(encoding="utf-8")
        )
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install ")
