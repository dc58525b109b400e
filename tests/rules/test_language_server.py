"""Rule files in an editor: yaml-language-server itself, given the schema, completes them and finds the same errors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gradwatch.cli import main
from gradwatch.detectors import DETECTORS
from gradwatch.errors import RuleFileError
from gradwatch.policies import POLICIES
from gradwatch.rules.action_kinds import ACTIONS
from gradwatch.rules.files import load_rules
from gradwatch.rules.packs import pack_directory
from gradwatch.rules.sink_kinds import SINKS
from tests.docs.test_pages import ROOT, fences
from tests.rules.files.test_pydantic_models import SHAPE
from tests.rules.language_server import LanguageServer
from tests.rules.test_refusals import FIXTURES, HERE
from tests.support.binaries import require

NOT_IN_THE_SCHEMA = {
    "beyond-float32.bad.yaml": {4, 6, 8, 9},  # JSON has no float32
    "empty.bad.yaml": {1},  # an empty document has no errors for an editor
    "error-in-base.bad.yaml": {6},  # what the base says
    "out-of-range.bad.yaml": {9, 12, 13},  # JSON has no infinity; 0 or 1,048,576
    "override-of-another-run.bad.yaml": {6, 7},  # what the base says
    "wrong-types.bad.yaml": {8},  # `010` is the number 10 to the server
}
"""Lines whose problems of shape the server does not see."""

OF_THE_SERVER = {
    "tab.bad.yaml": {2},
    "too-deep.bad.yaml": {3},  # its parser stops earlier
    "wrong-types.bad.yaml": {18},  # follows from the one above it
}
"""Lines of which only the server says something, in files that both refuse."""

RULE = "version: 1\nrules:\n  mine:\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LanguageServer]:
    """The server with what `gradwatch rules schema` prints."""
    program = require("yaml-language-server")
    folder = tmp_path_factory.mktemp("editor")
    with pytest.MonkeyPatch.context() as patch, (folder / "gradwatch.schema.json").open("w+") as schema:
        patch.setattr("sys.stdout", schema)
        assert main(["rules", "schema"]) == 0
    with LanguageServer(program, folder / "gradwatch.schema.json", folder) as running:
        yield running


def test_the_same_files_are_refused_at_the_same_lines(
    server: LanguageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All problems of shape that `rules check` finds, and no others, in every file that is wrong on purpose."""
    monkeypatch.chdir(HERE)
    names = [name for name in FIXTURES if name != "not-utf8.bad.yaml"]
    texts = [(HERE / name).read_text(encoding="utf-8") for name in names]
    for name, found in zip(names, server.problems(*texts), strict=True):
        with pytest.raises(RuleFileError) as refused:
            load_rules(f"./{name}")
        here = [one for one in refused.value.problems if one.path.endswith(name)]
        lines = {one["range"]["start"]["line"] + 1 for one in found}
        of_shape = {one.line for one in here if one.code in SHAPE} - NOT_IN_THE_SCHEMA.get(name, set())
        assert of_shape <= lines, name
        assert lines - OF_THE_SERVER.get(name, set()) <= {one.line for one in here}, (name, found)


def test_a_column_is_that_of_the_key_which_is_wrong(server: LanguageServer) -> None:
    """Unknown keys are underlined where `rules check` puts its caret, and named."""
    path = HERE / "unknown-keys.bad.yaml"
    (found,) = server.problems(path.read_text(encoding="utf-8"))
    with pytest.raises(RuleFileError) as refused:
        load_rules(path)
    places = {
        (one["range"]["start"]["line"] + 1, one["range"]["start"]["character"] + 1, one["message"])
        for one in found
        if "not allowed" in one["message"]
    }
    unknown = [one for one in refused.value.problems if one.code == "GW101"]
    names = [one.message.split("'")[1] for one in unknown]
    assert places == {
        (one.line, one.column, f"Property {name} is not allowed.")
        for one, name in zip(unknown, names, strict=True)
    }


def test_what_is_right_has_no_error(server: LanguageServer) -> None:
    """The packs that ship, and each rule file that README and docs show."""
    packs = [path.read_text(encoding="utf-8") for path in sorted(pack_directory().glob("*.gradwatch.yaml"))]
    pages = [ROOT / "README.md", *sorted((ROOT / "gradwatch" / "docs").glob("*.md"))]
    shown = [
        text
        for page in pages
        if page.name != "extending.md"  # of kinds that the page adds
        for text in fences(page.read_text(encoding="utf-8"), "yaml")
    ]
    assert len(packs) > 5
    assert len(shown) > 5
    assert [one for found in server.problems(*packs, *shown) for one in found] == []


@pytest.mark.parametrize(
    ("text", "offered"),
    [
        (
            "|\n",
            {"version", "extends", "defaults", "groups", "rules", "clip", "modules", "sinks", "overrides"},
        ),
        (
            f"{RULE}    |\n",
            {"detect", "when", "do", "for", "from_step", "severity", "groups", "exclude", "unless"},
        ),
        (f"{RULE}    detect:\n      kind: |\n", set(DETECTORS)),
        (f"{RULE}    detect:\n      kind: spike\n      |\n", {"of", "above", "clear_below", "factor"}),
        (f"{RULE}    severity: |\n", {"info", "warning", "critical"}),
        (f"{RULE}    do:\n      - |\n", set(ACTIONS)),
        (f"{RULE}    do:\n      - clip:\n          |\n", {"to"}),
        (f"{RULE}    do:\n      - localise:\n          |\n", {"keep", "by"}),
        ("version: 1\nclip:\n  |\n", {"total", "groups", "at", "from_step"}),
        ("version: 1\nclip:\n  total:\n    method: |\n", set(POLICIES)),
        ("version: 1\nsinks:\n  - |\n", set(SINKS)),
    ],
    ids=[
        "file",
        "rule",
        "kind",
        "keys of a kind",
        "severity",
        "actions",
        "an action",
        "localise",
        "clip",
        "policies",
        "sinks",
    ],
)
def test_completion_offers_what_is_registered(server: LanguageServer, text: str, offered: set[str]) -> None:
    """Keys, kinds, columns, actions, policies and sinks, at the place where they belong."""
    assert set(server.completions(text)) >= offered


def test_a_key_is_explained(server: LanguageServer) -> None:
    """By the sentence that `gradwatch rules explain` prints."""
    said = server.hover(f"{RULE}    detect:\n      kind: spike\n      abo|ve: 5\n")
    assert "Deviations above the usual level from which it fires." in said


def test_a_comment_names_the_schema(server: LanguageServer) -> None:
    """The first line that rules.md shows works in any file, without settings of the editor."""
    (head,) = fences((ROOT / "gradwatch/docs/rules.md").read_text(encoding="utf-8"), "text")
    assert head.startswith("# yaml-language-server: ")
    (found,) = server.problems(f"{head}version: 1\nrule: {{}}\n", suffix=".yaml")
    assert [one["message"] for one in found] == ["Property rule is not allowed."]
