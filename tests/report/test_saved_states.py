"""Saved states in the report: in words, in the timeline, of several ranks and processes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gradwatch.journal import SavedStatesEntry
from gradwatch.journal.writer import Recorder
from gradwatch.records.record import CheckpointHealth, Record
from gradwatch.records.saved_optimizer_state import SavedState, TakenState
from gradwatch.report import html_page, json_document, markdown_page, read_run
from gradwatch.report.saved_states import SavedStateCollector, of_ranks, sentence
from tests.report.runs import finished, steps
from tests.support.chromium import Chromium
from tests.support.sink_records import make_run

ILL = CheckpointHealth(False, 29, ("weights are not finite: a",))


def state(number: int, step: int, healthy: bool = True, looked: bool = True, **fields: object) -> SavedState:
    reasons = () if healthy else ("ill",)
    return SavedState(number, ((0, step),), 0.0, healthy, looked and healthy, reasons=reasons, **fields)  # type: ignore[arg-type]


def collected(
    rank: int, *processes: Sequence[SavedState], taken: int | None = None, healthy: int | None = None
) -> SavedStateCollector:
    found = SavedStateCollector(rank)
    for process, states in enumerate(processes):
        fit = sum(one.healthy for one in states)
        entry = SavedStatesEntry(
            len(states) if taken is None else taken, fit if healthy is None else healthy, tuple(states)
        )
        found.take(process, entry)
    return found


@pytest.mark.parametrize(
    ("processes", "said"),
    [
        ([], ""),
        ([[state(0, 99)]], "state saved 1 time, after step 99"),
        ([[state(0, 9), state(1, 1900)]], "state saved 2 times, the last one after step 1,900"),
        (
            [[state(0, 9), state(1, 19), state(2, 29, False)]],
            "state saved 3 times, the last healthy one after step 19",
        ),
        ([[state(0, 9, False)]], "state saved 1 time, and none of these states is healthy"),
        (
            [[state(0, 9), state(1, 19, looked=False, weights_step=12)]],
            "state saved 2 times, the last one after step 19 (no look at its weights since step 12)",
        ),
        (
            [[state(0, 9)], [state(0, 19), state(1, 29, False)]],
            "state saved 3 times, the last healthy one after step 19, process 1",
        ),
    ],
)
def test_in_words(processes: list[list[SavedState]], said: str) -> None:
    """How many, and the last one that can be gone back to, as far as that is known."""
    assert sentence(of_ranks(collected(0, *processes), ())) == said


def test_of_one_number_the_last_counts() -> None:
    """A later entry knows more of the same state; the counts are those of the last entry."""
    found = SavedStateCollector(0)
    found.take(0, SavedStatesEntry(1, 1, (state(0, 9, looked=False),)))
    found.take(0, SavedStatesEntry(2, 1, (state(0, 9), state(1, 19, False))))
    states = found.states()
    assert (states.taken, states.healthy) == (2, 1)
    assert [one.condition for one in states.shown] == ["healthy", "not healthy"]


def test_the_worst_rank_counts() -> None:
    """A state is as healthy as on the rank whose part of it is worst; of a rank without any, another's are shown."""
    first, second = (
        collected(0, [state(0, 9), state(1, 19)]),
        collected(1, [state(0, 9), state(1, 19, False)]),
    )
    joined = of_ranks(first, [second])
    assert (joined.taken, joined.healthy, joined.rank) == (2, 1, 0)
    assert [one.condition for one in joined.shown] == ["healthy", "not healthy"]
    assert joined.shown[1].state.reasons == ("on another rank than 0: ill",)
    assert of_ranks(collected(0), [second]).rank == 1
    assert of_ranks(collected(0), []).taken == 0


def saving(root: Path, records: Iterable[Record], after: Sequence[int]) -> Path:
    """The folder of a run of these Records, whose script took the state after some steps."""
    info = make_run(root, pid=2**22 - 1, host="another")
    Path(info.directory).mkdir(parents=True)
    recorder = Recorder(info, "full", 0, lambda error: None, lambda events: None)
    recorder.begin()
    for record in records:
        recorder.record([record])
        if record.snapshot.step in after:
            number = list(after).index(record.snapshot.step)
            recorder.take_state(TakenState(number, ((0, record.snapshot.step),), 1e9))
    account = finished(60)
    recorder.end = replace(recorder.end, ended=account.ended, account=account.to_dict())
    recorder.close()
    return Path(info.directory)


def health(step: int) -> CheckpointHealth:
    """Healthy until step 29, and a look at the weights at step 20 was the last that found nothing."""
    looked = 20 if step >= 20 else None
    return CheckpointHealth(True, step, (), looked) if step < 30 else replace(ILL, weights_step=looked)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose weights are ruined at step 30; its state is taken five times."""
    records = [replace(record, checkpoint=health(record.snapshot.step)) for record in steps(60)]
    return saving(tmp_path_factory.mktemp("runs"), records, (9, 19, 25, 39, 59))


def test_in_every_form(run: Path) -> None:
    """The verdict, Markdown and JSON answer which one to go back to."""
    report = read_run(run)
    said = "state saved 5 times, the last healthy one after step 25 (no look at its weights since step 20)"
    assert said in report.verdict.sentence
    text = markdown_page.page([report])
    assert "## Saved states: 5" in text
    assert (
        "| 19 | healthy |  |\n| 25 | not looked at |  |\n| 39 | not healthy | weights are not finite: a |"
        in text
    )
    (found,) = json.loads(json_document.text([report]))["runs"]
    saved = found["saved_states"]
    assert (saved["taken"], saved["healthy"], saved["last_healthy_step"]) == (5, 3, 25)
    assert [one["condition"] for one in saved["states"]] == [
        *("healthy", "healthy", "not looked at"),
        *("not healthy", "not healthy"),
    ]
    page = html_page.page([report])
    assert "<h2>Saved states</h2>" in page
    assert f"<p>{said[0].upper()}{said[1:]}." in page


def test_a_run_without_any_says_nothing_of_it(tmp_path: Path) -> None:
    """A script that saves its weights alone is not told that it has saved nothing."""
    report = read_run(saving(tmp_path, steps(5), ()))
    assert "saved" not in report.verdict.sentence
    assert "Saved states" not in markdown_page.page([report]) + html_page.page([report])


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """One browser for all tests of this file."""
    with Chromium(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.mark.parametrize(("dark", "width"), [(False, 1200), (True, 400)])
def test_in_the_timeline(browser: Chromium, run: Path, tmp_path: Path, dark: bool, width: int) -> None:
    """A disc, a ring and a cross, told apart without their colours: by what is drawn in their middle and beside it."""
    file = tmp_path / "page.html"
    file.write_text(html_page.page([read_run(run)]), encoding="utf-8")
    browser.open(file, dark=dark, width=width)
    assert (browser.complaints, browser.requests) == ([], [])
    # True if the pixel of the last lane so far to the right of the place of a step is drawn on.
    drawn = """((step, right) => { const u = gw.made[2], size = 4 * devicePixelRatio;
        const x = Math.round(u.valToPos(step, "x", true)), y = Math.round(u.bbox.top + 20.5 * devicePixelRatio);
        const at = dx => [...u.ctx.getImageData(Math.round(x + dx), y, 1, 1).data].join();
        return at(right * size) !== at(2.5 * size); })"""
    shapes = {
        step: tuple(browser.value(f"{drawn}({step}, {right})") for right in (0, 0.75))
        for step in (9, 19, 25, 39)
    }
    disc, ring, cross = (True, True), (False, True), (True, False)
    assert shapes == {9: disc, 19: disc, 25: ring, 39: cross}
    (label,) = browser.value(
        "gw.savedLane(JSON.parse(document.getElementById('data').textContent)[0].tracks[0].saved)"
    )
    assert label["label"] == "saved: ● healthy  ○ not looked at  ✕ not healthy"
