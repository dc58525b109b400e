"""The report of a run over HTTP: made by a process of its own, as of a short while ago, and asked for again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gradwatch.endpoint import run_reports
from gradwatch.endpoint.http_protocol import Content, RequestError
from gradwatch.endpoint.run_reports import RunPlace, ServedReports, path_of
from tests.report.runs import recorded, steps

ID = "a run/of <mine>"


def made(reports: ServedReports, path: str, until: Callable[[Content], bool]) -> Content:
    """The page of a path, asked for again and again as a browser does."""
    began = time.monotonic()
    while not until(found := reports.answer(path)):
        assert time.monotonic() - began < 60
        time.sleep(0.05)
    return found


def is_report(content: Content) -> bool:
    return b"report, read at" in content.body


def test_the_report_of_a_run_while_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request does not wait; a page is made anew only where the journal has grown, and served meanwhile."""
    monkeypatch.setattr(run_reports, "LEAST_AGE_SECONDS", 0.0)
    monkeypatch.setattr(run_reports, "AGE_BY_TIME", 0.0)
    folder = recorded(tmp_path, steps(20), run_id=ID)
    reports = ServedReports({path_of(ID): RunPlace(folder, 0, True)}.get)
    first = reports.answer("/run/a%20run%2Fof%20%3Cmine%3E")
    assert reports._making is not None  # under way, and not waited for
    assert b"location.reload(), 1000" in first.body
    page = made(reports, path_of(ID), is_report)
    assert b"a run/of &lt;mine&gt;" in page.body
    assert b"location.reload(), 60000" in page.body
    assert "script-src 'sha256-" in page.policy
    assert reports.answer(path_of(ID)) is page
    assert reports._making is None  # nothing is new
    journal = next(folder.glob("*.gwj"))
    journal.write_bytes(journal.read_bytes())
    assert reports.answer(path_of(ID)) is page
    newer = made(reports, path_of(ID), lambda found: found is not page)
    assert is_report(newer)
    reports.close()


def test_a_page_is_as_old_as_the_journal_was_when_it_was_read(tmp_path: Path) -> None:
    """However late it is asked for; an old one is not shown once the journal has grown, and why none is newer is."""
    folder = recorded(tmp_path, steps(20), run_id=ID)
    reports = ServedReports({path_of(ID): RunPlace(folder, 0, True)}.get)
    reports.answer(path_of(ID))
    making = reports._making
    assert making is not None
    making.process.wait()
    making.began, making.began_at = making.began - 1e4, making.began_at - 1e4
    written = os.fstat(making.out.fileno()).st_mtime - 1e4
    os.utime(making.out.fileno(), (written, written))
    page = reports.answer(path_of(ID))
    read = time.strftime("%H:%M:%S", time.localtime(making.began_at))
    assert f"report, read at {read}" in page.body.decode()
    assert reports._pages[RunPlace(folder, 0, True)].seconds < 1e3
    assert reports.answer(path_of(ID)) is page
    journal = next(folder.glob("*.gwj"))
    journal.write_bytes(b"no journal at all")
    assert not is_report(reports.answer(path_of(ID)))
    with pytest.raises(RequestError, match="could not be made"):
        made(reports, path_of(ID), is_report)
    reports.close()


def test_what_cannot_be_shown(tmp_path: Path) -> None:
    """An unknown name is not found, whatever it spells; a folder without a journal says so; close ends the process."""
    (tmp_path / "empty").mkdir()
    reports = ServedReports({"/run/empty": RunPlace(tmp_path / "empty", 0, False)}.get)
    for path in ("/run/other", "/run/../empty", "/run/"):
        with pytest.raises(RequestError) as refused:
            reports.answer(path)
        assert refused.value.status == 404
    reports.answer("/run/empty")
    with pytest.raises(RequestError, match=r"could not be made: gradwatch: no journal in") as failed:
        made(reports, "/run/empty", is_report)
    assert failed.value.status == 503
    ended = ServedReports({"/run/empty": RunPlace(tmp_path / "empty", 0, False)}.get)
    ended.answer("/run/empty")
    process = ended._making.process if ended._making else None
    ended.close()
    assert process is not None
    assert process.poll() is not None
