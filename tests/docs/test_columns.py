"""gradwatch/docs/columns.md against the catalogue, and the catalogue against those who measure and name columns."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import get_args

from gradwatch.capture.columns import column_reader, module_taps
from gradwatch.detectors.detector import Column, NormColumn
from gradwatch.records.columns import CATALOGUE, COSTLY_COLUMNS, MODULE_COLUMNS, OTHER_RULES
from gradwatch.rules.files import load_rules
from gradwatch.rules.packs import pack_names

PAGE = Path(__file__).parents[2] / "gradwatch" / "docs" / "columns.md"
BEGIN, END = "<!-- columns: begin -->\n", "<!-- columns: end -->\n"


def table() -> str:
    """The catalogue as the page shows it."""
    rows = [
        "| `of:` | of each | unit | what it is | of a group or total | of parts | reads |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in CATALOGUE:
        if one.name in get_args(Column):
            cells = (f"`{one.name}`", one.of, one.unit, one.means, one.grouped, one.sharded, one.reads)
            rows.append("| " + " | ".join(cell.replace("|g|", "abs g") or "–" for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def test_the_page_shows_the_catalogue() -> None:
    """The table of the page is that of the code; what to paste where it is not stands in the message."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    shown, after = rest.split(END)
    assert shown == table(), f"replace it by:\n{table()}"
    assert before
    assert after


def test_every_name_of_a_column_is_in_the_catalogue_once() -> None:
    """What a rule file can name, what readers read, and what packs ask for."""
    names = [one.name for one in CATALOGUE]
    assert len(set(names)) == len(names)
    assert set(names) >= {*get_args(Column), *get_args(NormColumn)}
    assert set(names) >= column_reader.COLUMNS == COSTLY_COLUMNS - MODULE_COLUMNS
    assert module_taps.COLUMNS == MODULE_COLUMNS
    asked = {
        column for pack in pack_names() for rule in load_rules(pack).rules for column in rule.detect.columns
    }
    assert set(names) >= asked - {OTHER_RULES}


def test_whoever_measures_a_column_is_there() -> None:
    """`measured` names modules of gradwatch."""
    assert all(find_spec(f"gradwatch.{one.measured}") is not None for one in CATALOGUE)
