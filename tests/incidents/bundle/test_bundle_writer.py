"""Bundles on their way to the disk: faults, full and hanging disks, names, modes, links, forks, restarts."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.errors import TrainingStopped
from gradwatch.incidents.bundle import bundle_writer
from gradwatch.incidents.bundle.background_jobs import Background
from gradwatch.incidents.bundle.bundle_reader import read_document
from gradwatch.localise.replay import bundle_evidence
from gradwatch.rules.files import parse_rules
from gradwatch.session.actions import snapshot_action
from tests.incidents.bundle.cases import Fragile, Run, batch, rules


def test_only_its_owner_can_read_it(tmp_path: Path) -> None:
    """Folders 0700, files 0600, whatever the umask of the job."""
    before = os.umask(0)
    try:
        run = Run(tmp_path / "runs", rules())
    finally:
        os.umask(before)
    for path in (run.directory, run.directory / "bundles", run.only):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    assert {path.name for path in run.only.iterdir()} == {
        "incident.json",
        "incident.md",
        "tensors.safetensors",
    }
    for path in run.only.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_a_second_attempt_counts_those_of_the_first_and_overwrites_none(tmp_path: Path) -> None:
    """A restart in the same folder: its own names, and the same limit."""
    first = Run(tmp_path, rules("keep: 3"), run_id="job")
    again = Run(tmp_path, rules("keep: 3"), run_id="job")
    assert [path.name for path in again.bundles] == ["non-finite-0-4", "non-finite-0-4.2"]
    assert first.directory == again.directory
    third = Run(tmp_path, rules("keep: 2"), run_id="job")
    assert len(third.bundles) == 2


FAULTS: dict[str, tuple[Any, str]] = {
    "gather": (snapshot_action, "gather"),
    "copied": (bundle_evidence, "copied"),
    "fingerprint": (bundle_evidence, "fingerprint"),
    "encode": (snapshot_action.Document, "encode"),
    "save": (snapshot_action, "_save"),
    "write": (bundle_writer, "_write"),
    "rename": (bundle_writer.os, "rename"),
    "mkdir": (bundle_writer, "make_directory"),
    "incident": (snapshot_action.Bundles, "_incident"),
    "submit": (Background, "submit"),
    "norms": (snapshot_action, "norms_of"),
    "take": (snapshot_action, "incident_of"),
}


@pytest.fixture(scope="module")
def works(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The training with a bundle that is kept."""
    return Run(tmp_path_factory.mktemp("works"), rules())


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "full"),
        MemoryError(),
        RecursionError("deep"),
        torch.OutOfMemoryError("gpu"),
        ValueError(),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("place", FAULTS)
def test_a_fault_of_ours_is_counted_and_training_goes_on(
    place: str, error: Exception, works: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it happens: weights as with a bundle that works, counted under `bundle`, no half bundle left behind."""
    owner, name = FAULTS[place]

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        got = Run(tmp_path / "fails", rules(), strict=False)
    assert got.errors.get("bundle", 0) >= 1, got.errors
    assert set(got.errors) == {"bundle"}
    for one, other in zip(got.model.parameters(), works.model.parameters(), strict=True):
        assert torch.equal(one, other)
    place_of = got.directory / "bundles"
    assert not place_of.exists() or not list(place_of.glob(".*"))
    if place in ("gather", "copied", "fingerprint"):
        assert type(error).__name__ in got.document.obstacle  # the page is kept all the same
    else:
        assert got.bundles == []


def test_after_a_full_disk_the_next_incident_has_its_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundle that could not be written does not count against `keep`."""
    real, failed = bundle_writer._write, []

    def once(path: Path, content: bytes) -> None:
        if not failed:
            failed.append(path)
            raise OSError(errno.ENOSPC, "full")
        real(path, content)

    monkeypatch.setattr(bundle_writer, "_write", once)
    run = Run(
        tmp_path, rules("keep: 1"), bad=(2, 6), steps=9, strict=False, after=lambda gw, step: gw.flush(30)
    )
    assert [path.name for path in run.bundles] == ["non-finite-0-6"]
    assert run.errors == {"bundle": 1}


def test_a_disk_that_hangs_stalls_no_step_and_loses_what_comes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two bundles wait at most; the third is counted as lost, and training has long gone on."""
    answer = threading.Event()
    real = snapshot_action._save
    monkeypatch.setattr(
        snapshot_action, "_save", lambda tensors, path: (answer.wait(60), real(tensors, path))
    )
    steps: list[int] = []

    def after(gw: Any, step: int) -> None:
        steps.append(step)
        if step == 11:
            assert not gw.flush(0.05)
            assert threading.active_count() - threads == 1
            answer.set()

    threads = threading.active_count()
    run = Run(tmp_path, rules("keep: 9"), bad=(2, 5, 8), steps=12, after=after, strict=False)
    assert steps == list(range(12))
    assert [path.name for path in run.bundles] == ["non-finite-0-2", "non-finite-0-5"]
    assert run.errors == {"bundle": 1}
    assert threading.active_count() == threads


def test_there_is_no_thread_until_there_is_an_incident(tmp_path: Path) -> None:
    """And none is left when the bundle is written."""
    threads = threading.active_count()
    seen: list[int] = []

    def after(gw: Any, step: int) -> None:
        gw.flush(30)
        seen.append(threading.active_count() - threads)

    Run(tmp_path, rules(), after=after)
    deadline = time.monotonic() + 120
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == threads
    assert seen[:4] == [0, 0, 0, 0]


def stopped(folder: Path) -> tuple[gradwatch.Watch, float]:
    """A watch whose rule kept a bundle and stopped training, and the seconds that its step took."""
    text = "version: 1\nrules: {r: {detect: {kind: nonfinite}, do: [snapshot, stop]}}\n"
    model = Fragile()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    gw = gradwatch.watch(model, optimizer, rules=parse_rules(text), run_dir=folder, sinks=[])
    model(batch(0, bad=True)).square().mean().backward()
    began = time.monotonic()
    with pytest.raises(TrainingStopped):
        optimizer.step()
    return gw, time.monotonic() - began


@pytest.mark.parametrize("seconds", [0.0, 0.6], ids=["fast disk", "slow disk"])
def test_a_bundle_is_written_before_a_stop_ends_training(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`do: [snapshot, stop]`: it is on the disk when TrainingStopped arrives, also where each sync takes 0.6 s."""
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (time.sleep(seconds), real(descriptor)))
    gw, _ = stopped(tmp_path)
    document = read_document(Path(gw.run.directory) / "bundles" / "r-0-0")
    assert {order.action for order in document.incident.done} == {"snapshot", "stop"}
    gw.close()
    assert gw.health.errors() == {}


def test_a_stop_does_not_wait_for_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends training when its time is over, and the bundle that is lost is reported at the close."""
    answer = threading.Event()
    monkeypatch.setattr(snapshot_action, "_save", lambda tensors, path: answer.wait(600))
    monkeypatch.setattr(snapshot_action.Bundles, "stop_seconds", 3.0)
    gw, seconds = stopped(tmp_path)
    assert 3.0 <= seconds < 100
    gw.close()
    answer.set()
    assert gw.health.errors() == {"bundle": 1}


def test_an_action_that_failed_is_told_in_the_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundle is written after the deed: it tells what became of it."""
    from gradwatch.actions.skip import skip

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("broken")

    monkeypatch.setattr(skip.StepSkipper, "begin", fail)
    told = Run(tmp_path, rules(), strict=False).document
    assert not told.incident.around[-1].skipped


def test_a_forked_child_writes_nothing_and_waits_for_nothing() -> None:
    """Also where another thread holds the lock at the fork."""
    background = Background(lambda error: None)
    with background._changed:
        child = os.fork()
        if child == 0:
            quiet = not background.submit(lambda: None) and background.wait(60)
            os._exit(0 if quiet else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("name", ["bundles", "bundle"])
def test_a_link_in_the_way_is_not_followed(name: str, tmp_path: Path) -> None:
    """`bundles` that leads elsewhere is refused; a bundle's own name that is a link is passed by."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = tmp_path / "runs" / "job"
    folder.mkdir(parents=True)
    if name == "bundles":
        (folder / "bundles").symlink_to(elsewhere)
    else:
        (folder / "bundles").mkdir()
        (folder / "bundles" / "non-finite-0-4").symlink_to(elsewhere)
    run = Run(tmp_path / "runs", rules(), run_id="job", strict=False)
    assert list(elsewhere.iterdir()) == []
    if name == "bundles":
        assert run.errors == {"bundle": 1}
    else:
        assert [path.name for path in run.bundles] == ["non-finite-0-4", "non-finite-0-4.2"]


@pytest.mark.parametrize(
    "incident", ["../../x", "a/b", "x" * 300, "\x1b[31m", "\ud800", ".hidden", "", "nän"]
)
def test_any_incident_is_one_folder_inside_the_run(incident: str, tmp_path: Path) -> None:
    """Rules made in code may be called anything; two names stay two folders."""
    from gradwatch.incidents.bundle.bundle_folders import bundles_of, folder_name

    name = folder_name(incident)
    found = bundle_writer.write_bundle(tmp_path, name, {}, lambda path: None)
    assert found.parent == tmp_path / "bundles"
    assert not found.name.startswith(".")
    assert bundles_of(tmp_path, incident) == [found]
    assert folder_name(incident + "y") != name


def test_any_parameter_name_is_harmless(tmp_path: Path) -> None:
    """P33: surrogates, escape sequences, newlines, 10,000 letters, paths: a bundle that reads, and tells two apart."""
    names = ["a\ud800", "a\ud801", "\x1b[2J", "x\ny", "l" * 10_000, "<script>", "../up", "ä"]

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in names:
                name = name.replace(".", "·")  # torch refuses dots itself
                self.register_parameter(name, nn.Parameter(torch.ones(3)))
                self.register_buffer(f"b{name}", torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = torch.stack([param.log().sum() for param in self.parameters()]).sum()
            return x * (total.sqrt() if bool(x[0, 0] == 77) else total)

    run = Run(tmp_path, rules(), model=Named())
    told, tensors = run.document, run.tensors
    assert len(told.sites) == len(names)
    assert len([name for name in tensors if name.startswith("parameter.")]) == len(names)
    assert len([name for name in tensors if name.startswith("buffer.")]) == len(names)
    page = (run.only / "incident.md").read_text(encoding="utf-8")
    assert all(line.isprintable() for line in page.splitlines())
    assert not [line for line in page.splitlines() if "<script>" in line and not line.startswith("    ")]
    assert run.errors == {}
