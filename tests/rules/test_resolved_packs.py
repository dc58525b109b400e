"""The resolved packs are what the YAML says, and an edited pack is read anew."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from gradwatch.errors import RuleFileError
from gradwatch.rules import packs
from gradwatch.rules.files import canonical, load_rules, parse_rules
from gradwatch.rules.files.rules_digest import digest
from gradwatch.rules.packs import SUFFIX, pack_directory, pack_names
from gradwatch.rules.resolved_packs import RESOLVED, resolved_pack, rule_set
from tests.docs.test_pages import ROOT, fences
from tests.rules.write_resolved_packs import resolved_text


@pytest.mark.parametrize("name", pack_names())
def test_a_resolved_pack_is_what_its_text_says(name: str) -> None:
    """To the type of each number; else `python -m tests.rules.write_resolved_packs` was forgotten."""
    loaded = load_rules(name)
    assert (pack_directory() / (name + RESOLVED)).read_text(encoding="utf-8") == resolved_text(name)
    assert resolved_pack(name) == loaded
    assert repr(resolved_pack(name)) == repr(loaded)


def rule_files() -> list[str]:
    """The rule files of the documentation."""
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "gradwatch" / "docs").rglob("*.md")]
    return sorted({text for page in pages for text in fences(page, "yaml") if "version: 1" in text})


def test_rules_come_out_of_json_as_they_went_in() -> None:
    """To the type of each number: so rank 0 hands a rule file to the others."""
    read = [*map(load_rules, pack_names())]
    for text in rule_files():
        with suppress(RuleFileError):  # it shows an error, or needs a policy of the reader's own
            read.append(parse_rules(text))
    assert len(read) >= 30
    for loaded in read:
        document = json.loads(json.dumps({"rules": canonical(loaded), "origins": loaded.origins}))
        made = rule_set(**document, digest=loaded.digest)
        assert made == loaded
        assert repr(made) == repr(loaded)
        assert digest(made) == loaded.digest


@pytest.mark.parametrize("name", pack_names())
def test_packs_are_the_same_for_every_run(name: str) -> None:
    """A pack that resolved differently by run id could not be resolved beforehand."""
    assert "\noverrides:" not in (pack_directory() / (name + SUFFIX)).read_text(encoding="utf-8")


def test_a_pack_that_was_edited_is_not_taken_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither it nor a pack that extends it."""
    folder = tmp_path / "rules"
    shutil.copytree(pack_directory(), folder)
    monkeypatch.setattr(packs, "pack_directory", lambda: folder)
    monkeypatch.setattr("gradwatch.rules.resolved_packs.pack_directory", lambda: folder)
    edited = folder / f"default{SUFFIX}"
    assert resolved_pack("moe") is not None
    edited.write_text(edited.read_text(encoding="utf-8") + "# edited\n")
    assert resolved_pack("default") is resolved_pack("moe") is None


@pytest.mark.parametrize("name", ["no-such-pack", "rules.yaml", "../default"])
def test_what_is_no_pack_is_not_resolved(name: str) -> None:
    """A path, or a name of nothing, is the business of whoever reads rule files."""
    assert resolved_pack(name) is None
