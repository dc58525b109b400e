"""The page in a real Chromium: drawn without an error or a request, whatever the run and its names."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from gradwatch.cli import main
from gradwatch.endpoint.address import Address
from gradwatch.endpoint.http_server import Endpoint
from gradwatch.endpoint.listening_port import listening_socket
from gradwatch.endpoint.run_reports import PREFIX, RunPlace, ServedReports
from gradwatch.records.snapshot import Column
from gradwatch.report import html_page, json_document, markdown_page, read_run
from gradwatch.report.run_report import RunReport
from tests.report.runs import HOSTILE, SITES, broken, finished, recorded, steps
from tests.support.chromium import Chromium
from tests.support.sink_records import make_event, make_record, make_sites

SHIPPED = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
"""uPlot 1.6.32 as its package on npm has it."""
DRAWN = "document.documentElement.dataset.drawn"
NAMES = ["embed.weight", HOSTILE, "b\ud800", "y" * 3000, "blocks.1.mlp.0.weight", "head.bias"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """One browser for all tests of this file."""
    with Chromium(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    """A run in which everything has a name that is an attack, or too long."""
    records = broken(sites=make_sites(names=NAMES), name=HOSTILE)
    account = finished(60, fired={"non-finite": 1}, no_data={HOSTILE: HOSTILE})
    run = recorded(tmp_path_factory.mktemp("runs"), records, account=account, script=HOSTILE)
    return read_run(run)


def shown(
    browser: Chromium, folder: Path, *reports: RunReport, width: int = 1200, dark: bool = False
) -> None:
    """The page of these, open in the browser, which has nothing to complain of."""
    file = folder / "page.html"
    file.write_text(html_page.page(reports), encoding="utf-8")
    browser.open(file, width=width, dark=dark)
    assert browser.value(DRAWN) == "yes"
    assert (browser.complaints, browser.requests) == ([], [])


def test_what_is_shipped_is_what_was_published() -> None:
    """The library's files are unchanged; its licence comes along."""
    folder = files("gradwatch.report") / "assets"
    found = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in SHIPPED}
    assert found == SHIPPED


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (400, True)])
def test_drawn_whatever_things_are_called(
    browser: Chromium, report: RunReport, tmp_path: Path, width: int, dark: bool
) -> None:
    """Names are text: no element is made of one, no handler has run; and nothing is wider than the window."""
    shown(browser, tmp_path, report, width=width, dark=dark)
    assert browser.value("document.title").endswith("gradwatch report")
    assert browser.value("document.images.length + document.scripts.length") == 2
    assert "<img src=x" in browser.value("document.body.innerText")
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value("gw.made.length") == 6
    assert browser.value("gw.made.every(one => one.ctx.canvas.width > 200)")


def test_no_script_but_its_own_runs(browser: Chromium, report: RunReport, tmp_path: Path) -> None:
    """Even where markup got into the page, the policy refuses the script and the request."""
    page = html_page.page([report]).replace(
        "<header>",
        "<script>document.title='owned'</script><img src='http://127.0.0.1:9/x'><object data='http://127.0.0.1:9/y'></object><header>",
    )
    (tmp_path / "owned.html").write_text(page, encoding="utf-8")
    browser.open(tmp_path / "owned.html")
    assert browser.value("document.title") != "owned"
    assert len([text for text in browser.complaints if "Content Security Policy" in text]) == 3


def test_search_sort_and_choose(browser: Chromium, report: RunReport, tmp_path: Path) -> None:
    """The table finds and sorts; a row that is chosen is drawn; a button shows the step of the incident."""
    shown(browser, tmp_path, report)
    rows = "[...document.querySelectorAll('.tall tbody tr')].map(row => row.cells[1].textContent)"
    assert len(browser.value(rows)) == 6
    typed = "box => { box.value = 'MLP w'; box.dispatchEvent(new Event('input')); }"
    browser.value(f"({typed})(document.querySelector('input[type=search]'))")
    assert browser.value(rows) == ["blocks.1.mlp.0.weight"]
    browser.value("document.querySelector('.tall tbody tr').click()")
    assert browser.value("document.querySelector('.one h3').textContent") == "blocks.1.mlp.0.weight"
    assert browser.value("gw.made.length") == 7
    assert "step 40" in browser.value("document.querySelector('output').textContent")
    assert "Not finite at this step: 1 of 6" in browser.value("document.querySelector('.flow').innerText")
    browser.value("document.querySelector('input[type=search]').value = ''")
    browser.value(
        "[...document.querySelectorAll('.tall th button')].find(one => one.textContent === 'not finite').click()"
    )
    assert browser.value(f"{rows}[0]").startswith("y" * 100)  # the one with the NaN
    assert browser.complaints == []


@pytest.mark.parametrize("width", [1400, 1200, 800, 400])
def test_what_matters_most_is_in_sight(
    browser: Chromium, report: RunReport, tmp_path: Path, width: int
) -> None:
    """The count of what is not finite is never cut off, nor a column on a wide screen, nor the heatmap's label."""
    shown(browser, tmp_path, report, width=width)
    edge = "Math.max(...[...document.querySelectorAll('.tall {}')].map(one => one.getBoundingClientRect().right))"
    room = browser.value("document.querySelector('.tall').getBoundingClientRect().right")
    assert 0 < browser.value(edge.format("td.bad")) <= room
    assert width < 1200 or browser.value(edge.format("th")) <= room
    label = """(() => { const c = gw.made[3].ctx; c.save(); c.font = gw.made[3].axes[1].labelFont[0];
        const wide = c.measureText("parameter: input → output").width; c.restore(); return wide; })()"""
    assert 60 < browser.value(label) <= browser.value("gw.made[3].bbox.height")


def test_cells_are_where_they_belong(browser: Chromium, report: RunReport, tmp_path: Path) -> None:
    """The pixel of the NaN is magenta, its neighbours are not; pointing at it says what it is."""
    shown(browser, tmp_path, report)
    pixel = """(step, row) => { const u = gw.made[3];
        const x = Math.round(u.valToPos(step + 0.5, "x", true)), y = Math.round(u.valToPos(row + 0.5, "y", true));
        return [...u.ctx.getImageData(x, y, 1, 1).data].slice(0, 3); }"""
    assert browser.value(f"({pixel})(40, 3)") == [255, 0, 200]
    assert browser.value(f"({pixel})(39, 3)") != [255, 0, 200]
    assert browser.value(f"({pixel})(40, 2)") != [255, 0, 200]
    said = browser.value(
        "(() => { const u = gw.made[3]; u.setCursor({left: u.valToPos(40.5, 'x'), top: u.valToPos(3.5, 'y')});"
        " return document.querySelector('.heatmap .reading').textContent; })()"
    )
    assert said.endswith("· step 40 · not finite")


def test_zoom_of_all_charts(browser: Chromium, report: RunReport, tmp_path: Path) -> None:
    """A stretch chosen in one chart is that of all of them."""
    shown(browser, tmp_path, report)
    browser.value(
        "(() => { const u = gw.made[0], from = u.valToPos(20, 'x'), to = u.valToPos(40, 'x');"
        " u.setSelect({left: from, width: to - from, top: 0, height: 10}); })()"
    )
    ranges = browser.value(
        "[0, 1, 2, 3].map(at => [gw.made[at].scales.x.min, gw.made[at].scales.x.max].map(Math.round))"
    )
    assert ranges == [[20, 40]] * 4


def test_other_runs(browser: Chromium, report: RunReport, tmp_path: Path) -> None:
    """Two runs side by side; one without a step; one without norms of parameters; two optimizers; the theme changes."""
    empty = read_run(recorded(tmp_path / "empty", []))
    two = [make_record(make_sites(2), 1.0, step=step, optimizer=1) for step in range(3)]
    other = read_run(recorded(tmp_path / "two", [*steps(20), *two], account=finished(20)))
    shown(browser, tmp_path, report, other, empty)
    assert browser.value("document.querySelectorAll('.compare .uplot').length") == 2
    buttons = "[...document.querySelectorAll('article.run')[1].querySelectorAll('.tracks button')]"
    assert browser.value(f"{buttons}.map(one => one.textContent)") == ["optimizer 0", "optimizer 1"]
    browser.value(f"{buttons}[1].click()")
    assert browser.value(f"{buttons}[1].ariaPressed") == "true"
    browser.theme(True)
    assert browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
    assert (browser.complaints, browser.requests) == ([], [])


def test_each_process_has_its_own_incidents(browser: Chromium, tmp_path: Path) -> None:
    """One was killed while a rule fired, the next is healthy: no incident and no firing on the charts of that one."""
    run = recorded(tmp_path / "first", broken(), closed=False)
    for journal in recorded(tmp_path / "second", steps(80), account=finished(80)).glob("*.gwj"):
        journal.rename(run / journal.name.replace("attempt0", "attempt1"))
    found = read_run(run)
    shown(browser, tmp_path, found)
    drawn = {}
    for at in range(2):
        button = f"document.querySelectorAll('.tracks button')[{at}]"
        browser.value(f"{button}.click()")
        jumps = "[...document.querySelectorAll('.jumps button')].map(one => one.textContent)"
        drawn[browser.value(f"{button}.textContent")] = (
            browser.value(jumps),
            browser.value("document.querySelectorAll('.timeline .uplot').length"),
        )
    assert drawn == {
        "optimizer 0": (["first", "non-finite at 40", "last"], 3),  # the third has the lanes
        "optimizer 0, process 1": (["first", "last"], 2),
    }
    (document,) = json.loads(json_document.text([found]))["runs"]
    assert [(one["rule"], one["process"], one["last"]) for one in document["firing"]] == [
        ("non-finite", 0, None)
    ]


def test_the_optimizer_at_which_something_happened_is_shown_first(browser: Chromium, tmp_path: Path) -> None:
    """Of a GAN whose generator is ill the discriminator is not what is looked at; both have as many steps."""
    event = make_event("firing", rule="other", severity="warning", step=7, optimizer=1, incident="other-1-7")
    records = [
        make_record(SITES, 1.0, step=step, optimizer=number, events=(event,) * (step == 7 and number == 1))
        for step in range(20)
        for number in (1, 0)
    ]
    report = read_run(recorded(tmp_path, records, account=finished(40)))
    assert [track.optimizer for track in report.tracks] == [0, 1]
    shown(browser, tmp_path, report)
    pressed = "[...document.querySelectorAll('.tracks button')].filter(one => one.ariaPressed == 'true')"
    assert browser.value(f"{pressed}.map(one => one.textContent)") == ["optimizer 1"]


@pytest.mark.parametrize("first", [0, 2**61])
def test_odd_numbers(browser: Chromium, tmp_path: Path, first: int) -> None:
    """Extremes of floating point in every number, and step numbers that JavaScript cannot count: drawn all the same."""
    odd = [0.0, 1e-45, 3e38, math.inf, math.nan, -1.0, 1e300, 1.0]
    records = []
    for at in range(24):
        one, other = odd[at % 8], odd[at // 3]
        ratios = Column(np.full(2, other), np.array([True, at % 2 == 0]))
        with np.errstate(all="ignore"):
            made = make_record(
                make_sites(2),
                [one, other],
                step=first + at,
                scalars={"loss": one, "lr": other},
                columns={"update_ratio": ratios},
                overhead=one,
                step_seconds=other,
                wall_time=one,
                loss_scale=other,
            )
        records.append(made)
    report = read_run(recorded(tmp_path, records))
    shown(browser, tmp_path, report)
    markdown_page.page([report])
    json_document.text([report])


def test_a_notebook_draws_it(browser: Chromium, report: RunReport, tmp_path: Path) -> None:
    """The page in a frame, whose script runs there and cannot reach the notebook."""
    (tmp_path / "notebook.html").write_text(
        f"<!doctype html><meta charset=utf-8><body>{report._repr_html_()}", encoding="utf-8"
    )
    browser.open(tmp_path / "notebook.html")
    assert browser.value("document.querySelector('iframe').contentDocument") is None
    assert browser.value("document.querySelector('iframe').clientHeight") == html_page.FRAME_HEIGHT
    assert browser.complaints == []


def test_a_server_shows_it(browser: Chromium, tmp_path: Path) -> None:
    """Under the policy that the server sends: the charts are drawn, and nothing is refused or asked for."""
    folder = recorded(tmp_path, broken(), account=finished(60))
    reports = ServedReports({"/run/run-1": RunPlace(folder, 0, False)}.get)
    listener = listening_socket(Address("127.0.0.1", 0))
    endpoint = Endpoint(listener, {}, lambda error: None, below={PREFIX: reports.answer})
    endpoint.start()
    url = f"http://{endpoint.address}/run/run-1"
    browser.open(f"{url}#incidents")  # made while the browser waits, and then shown at that place
    deadline = time.monotonic() + 60
    while not browser.value("document.querySelector('#incidents')") and time.monotonic() < deadline:
        time.sleep(0.2)
    assert browser.value("document.querySelectorAll('canvas').length") > 2
    assert browser.value("location.hash && document.querySelector('#incidents details').open")
    assert browser.value("document.querySelector('header a').pathname") == "/"
    assert browser.complaints == []
    assert set(browser.requests) <= {url}
    endpoint.close()
    reports.close()


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Into the folder of the run: the file is complete, and stands alone."""
    run = recorded(tmp_path, steps(5), account=finished(5))
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert page.endswith("</html>\n")
    assert "src=" not in page.partition("<script>")[0]
    assert str(run / "report.html") in capsys.readouterr().out
