"""The numbers that the page's script gets."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest

from gradwatch.report import chart_data, read_run
from tests.report.runs import HOSTILE, broken, recorded, steps
from tests.support.sink_records import make_record, make_sites


def decoded(text: str) -> np.ndarray:  # type: ignore[type-arg]
    return np.frombuffer(b64decode(text), "<u2")


def test_cells_hold_every_float32_to_a_third_of_a_per_cent() -> None:
    """From the smallest subnormal to the largest; zero, nothing and not finite have codes of their own."""
    values = np.array([1.4e-45, 1e-30, 0.123, 1.0, 5e6, 3.4e38], np.float32)
    codes = chart_data.cells(values, np.zeros(6, bool)).astype(float)
    assert 10 ** ((codes - 2) / 65532 * 85 - 46) == pytest.approx(values, rel=3e-3)
    special = chart_data.cells(np.array([0.0, np.nan, np.nan]), np.array([False, False, True]))
    assert special.tolist() == [chart_data.ZERO, chart_data.MISSING, chart_data.NOT_FINITE]


def test_no_name_ends_the_script(tmp_path: Path) -> None:
    """Whatever parameters and causes are called, there is no `<` in the data, and it reads back as JSON."""
    sites = make_sites(names=["a", HOSTILE, "c\ud800", "x" * 5000])
    text = chart_data.script_data([read_run(recorded(tmp_path, broken(sites=sites, name=HOSTILE)))])
    assert "<" not in text
    (run,) = json.loads(text)
    names = run["tracks"][0]["parameters"]["table"]["name"]
    assert names[1].startswith("</script>")
    assert all(name.isprintable() and len(name) <= 300 for name in names)


def test_the_table_of_a_run(tmp_path: Path) -> None:
    """Usual, smallest and largest norm with its step, and how far these are apart; NaN counted."""
    records = [make_record(make_sites(2), [2.0, 4.0], step=step) for step in range(9)]
    records[5] = make_record(records[0].snapshot.sites, [20.0, np.nan], step=5)
    (track,) = read_run(recorded(tmp_path, records)).tracks
    shown = chart_data.table(track.parameters)
    assert (shown["usual"], shown["high"], shown["high_step"]) == ([2.0, 4.0], [20.0, 4.0], [5, 0])
    assert (shown["rise"], shown["fall"], shown["bad"]) == ([10.0, 1.0], [1.0, 1.0], [0, 1])


def test_many_parameters_share_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the most rows neighbours are one row, which has the largest of them and any NaN."""
    monkeypatch.setattr(chart_data, "MOST_ROWS", 3)
    records = broken(4, at=2, sites=make_sites(8))
    (track,) = read_run(recorded(tmp_path, records)).tracks
    document = chart_data._parameters(track.parameters)
    high = decoded(document["grids"]["norm"]["high"]).reshape(4, 3)
    assert document["together"] == 3
    assert (high == chart_data.NOT_FINITE).tolist() == [[False] * 3] * 2 + [[False, True, False]] + [
        [False] * 3
    ]
    assert (
        high[0].tolist()
        == chart_data.cells(np.fmax.reduceat(records[0].snapshot.norm, [0, 3, 6]), np.zeros(3, bool)).tolist()
    )


def test_equal_bounds_are_sent_once(tmp_path: Path) -> None:
    """A short run has one step in a bucket."""
    (run,) = json.loads(chart_data.script_data([read_run(recorded(tmp_path, steps(5)))]))
    track = run["tracks"][0]
    assert set(track["curves"]["loss"]) == {"high", "bad"}
    assert set(track["parameters"]["grids"]["norm"]) == {"high"}
