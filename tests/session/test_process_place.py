"""Places of watches of one run and rank: distinct, dense, freed by any end, and every output has its own."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradwatch
from gradwatch.records.run_info import RunInfo
from gradwatch.runtime.internal_errors import Health
from gradwatch.serve.responses import sd
from gradwatch.session import process_place
from gradwatch.session.process_place import ProcessPlace
from gradwatch.session.watch import Watch
from gradwatch.sinks import Sink, make_sink
from gradwatch.sinks.prometheus.sink import PrometheusSink
from gradwatch.sinks.prometheus.textfile import TextfileSink
from tests.deploy.run_folders import scan
from tests.support.kept import Kept

LOCK, SECOND = "place-rank0-0.lock", "place-rank0-1.lock"


class Named(Kept):
    """A sink whose output names the process."""

    needs_place = True


@pytest.fixture(autouse=True)
def _nothing_held() -> Iterator[None]:
    """Release what a test has claimed and not released."""
    yield
    for place in list(process_place._HELD.values()):
        place.release()


def claimed(folder: Path, rank: int = 0) -> ProcessPlace:
    """A place of that rank of the run whose folder this is."""
    place = ProcessPlace()
    assert place.claim(RunInfo("r", str(folder), rank), [Named()]).place == place.number
    return place


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".gitignore")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@given(ends=st.lists(st.one_of(st.none(), st.integers(0, 30)), max_size=30))
def test_those_at_work_have_distinct_places_and_each_begins_in_the_first_free(
    ends: list[int | None], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In any order of beginnings (None) and ends (of the one so far down the list); at the end nothing is left."""
    folder, before = tmp_path_factory.mktemp("run"), descriptors()
    held: list[ProcessPlace] = []
    for end in ends:
        if end is None:
            free = min(set(range(len(held) + 1)) - {place.number for place in held})
            held.append(claimed(folder))
            assert held[-1].number == free
        elif held:
            held.pop(end % len(held)).release()
        assert len({place.number for place in held}) == len(held)
    for place in held:
        place.release()
        place.release()
    assert (files(folder), descriptors()) == ([], before)


def test_ranks_have_places_of_their_own(tmp_path: Path) -> None:
    """Each of four ranks is the only process of its rank."""
    places = [claimed(tmp_path, rank) for rank in range(4)]
    assert [place.number for place in places] == [0, 0, 0, 0]
    for place in places:
        place.release()


@pytest.mark.parametrize(
    ("sink", "needs"),
    [
        (Kept(), False),
        (make_sink("log"), False),
        (make_sink("journal"), True),
        (PrometheusSink(None), False),
        (PrometheusSink("127.0.0.1:0"), True),
        (TextfileSink("."), True),
        (make_sink("alertmanager"), True),
    ],
    ids=lambda each: type(each).__name__ if not isinstance(each, bool) else "",
)
def test_the_folder_is_touched_only_for_what_names_the_process(
    sink: Sink, needs: bool, tmp_path: Path
) -> None:
    """A log, or a registry of the user's, leaves no trace on disk."""
    place = ProcessPlace()
    assert place.claim(RunInfo("r", str(tmp_path / "r")), [sink]).place == 0
    assert (tmp_path / "r").exists() is needs
    place.release()


@pytest.mark.parametrize("refused", [errno.ENOLCK, errno.EROFS, errno.EACCES])
def test_a_folder_that_allows_no_locks_is_place_0(
    refused: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read-only, or a file system without locks: the first place for all, and no descriptor stays open."""
    before = descriptors()

    def refuse(*given: Any) -> None:
        raise OSError(refused, os.strerror(refused))

    monkeypatch.setattr(fcntl, "flock", refuse) if refused == errno.ENOLCK else monkeypatch.setattr(
        os, "open", refuse
    )
    places = [claimed(tmp_path) for _ in range(2)]
    monkeypatch.undo()
    assert [place.number for place in places] == [0, 0]
    assert all(f"allows no lock ({os.strerror(refused)})" in place.refusal for place in places)
    (tmp_path / "file").touch()
    assert claimed(tmp_path / "file" / "r").number == 0
    assert descriptors() == before


def test_a_place_whose_file_goes_while_it_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder ends between the opening and the lock: a lock on the file that is gone holds nothing."""
    first, lock = claimed(tmp_path), fcntl.flock

    def slowly(descriptor: int, how: int) -> None:
        first.release()
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", slowly)
    process_place._HELD.clear()  # as in another process
    second = claimed(tmp_path)
    monkeypatch.undo()
    process_place._HELD.clear()
    assert (second.number, claimed(tmp_path).number) == (0, 1)
    assert files(tmp_path) == [LOCK, SECOND]
    second.release()


def test_a_descriptor_that_the_script_has_taken_is_left_alone(tmp_path: Path) -> None:
    """`os.closerange` closed the lock and a file of the script has its number: it is not closed, the place stays."""
    first = claimed(tmp_path / "r")
    number = first._descriptor
    assert number is not None
    os.close(number)
    with open(tmp_path / "mine", "w", encoding="utf-8") as mine:
        assert mine.fileno() == number
        assert claimed(tmp_path / "r").number == 1
        first.release()
        mine.write("mine")
    assert (tmp_path / "mine").read_text(encoding="utf-8") == "mine"


HOLDER = """
import os, sys, time
from pathlib import Path
from tests.session.test_process_place import claimed
place = claimed(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    place.release()  # the parent's
    print(claimed(Path(sys.argv[1])).number, os.getpid(), flush=True)
    time.sleep(300)
time.sleep(300)
"""


def test_a_killed_process_frees_its_place_whatever_it_has_forked(tmp_path: Path) -> None:
    """A child has a place of its own, and does not keep that of a parent that is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        number, child = map(int, parent.stdout.readline().split())
        try:
            assert number == 1
            assert claimed(tmp_path).number == 2
            parent.kill()
            parent.wait()
            assert claimed(tmp_path).number == 0
        finally:
            parent.kill()
            os.kill(child, signal.SIGKILL)


# -- watches -------------------------------------------------------------------------------------------------------


def begun(folder: Path, *more: Sink) -> tuple[Watch, nn.Module, torch.optim.Optimizer]:
    """A watch of a model of its own with an endpoint, an entry for Prometheus and a journal."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    served = PrometheusSink("127.0.0.1:0", file_sd=str(folder / "targets"))
    sinks = [served, make_sink("journal"), *more]
    return (
        gradwatch.watch(model, optimizer, run_dir=folder / "runs", run_id="r", sinks=sinks),
        model,
        optimizer,
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, times: float = 1.0) -> None:
    optimizer.zero_grad()
    (model(torch.ones(4, 3)).sum() * times).backward()
    optimizer.step()


def by_serve(folder: Path) -> dict[str, str]:
    """The address that `gradwatch serve` gives Prometheus for each instance."""
    groups = json.loads(sd(scan(folder / "runs")).body)
    return {group["labels"]["instance"]: group["targets"][0] for group in groups}


def by_file(folder: Path) -> dict[str, str]:
    """The same by the list of files."""
    groups = [json.loads(path.read_text())[0] for path in (folder / "targets").iterdir()]
    return {group["labels"]["instance"]: group["targets"][0] for group in groups}


@pytest.mark.parametrize("first_ends", [0, 1])
def test_two_watches_of_one_process_are_two_targets(first_ends: int, tmp_path: Path) -> None:
    """Whichever ends first takes away its own files alone; one that begins then has the free place."""
    watches = [begun(tmp_path) for _ in range(2)]
    addresses = [str(gw.url).split("/")[2] for gw, _, _ in watches]
    expected = {"r/0": addresses[0], "r/0/1": addresses[1]}
    for gw, model, optimizer in watches:
        step(model, optimizer)
        assert gw.flush()
    assert by_serve(tmp_path) == by_file(tmp_path) == expected
    watches[first_ends][0].close()
    left = {name: at for name, at in expected.items() if at != addresses[first_ends]}
    assert by_serve(tmp_path) == by_file(tmp_path) == left
    third, _, _ = begun(tmp_path)
    assert third.run.place == first_ends
    assert third.flush()
    assert by_serve(tmp_path).keys() == by_file(tmp_path).keys() == expected.keys()
    for gw in (third, watches[1 - first_ends][0]):
        gw.close()
    assert by_serve(tmp_path) == by_file(tmp_path) == {}
    assert not list((tmp_path / "runs" / "r").glob("place-*"))


def test_a_watch_that_cannot_begin_leaves_its_place(tmp_path: Path) -> None:
    """A strict sink that raises ends the attach, and the next watch is the first one."""

    class Broken(Named):
        """Refuses the run."""

        def open(self, run: RunInfo, health: Health) -> None:
            raise OSError("no")

    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(OSError, match="no"):
        gradwatch.watch(model, optimizer, run_dir=tmp_path, run_id="r", sinks=[Broken()], strict=True)
    with gradwatch.watch(model, optimizer, run_dir=tmp_path, run_id="r", sinks=[Named()]) as gw:
        assert gw.run.place == 0
