"""Surroundings that several test modules ask for by name."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.examples import register_profiles

if "PYTEST_XDIST_WORKER" in os.environ:  # at least one worker per core: more threads only wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Of the C++ compiler's time two thirds: few kernels are compiled here, and what they compute is to be fast nowhere.
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every script that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

register_profiles()

# What is imported and collected stays to the end: looked at by no collection of garbage, not now and not in a test.
gc.disable()


def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: one more than there are cores, since many tests wait for processes, servers and ranks."""
    return len(os.sched_getaffinity(0)) + 1


# Files whose tests start processes, servers and ranks, or compile: minutes that begin first, and so end in time.
LONG = (
    *(
        "situations",
        "ranks",
        "launch",
        "deploy",
        "serve",
        "account",
        "benchmarks",
        "integrations",
        "docs",
        "demo",
    ),
    *(
        "promises/test_compile",
        "promises/test_bounded",
        "promises/test_reported_scripts",
        "sinks/prometheus/test_real",
    ),
)


TOGETHER = {
    "the frameworks are imported": ("integrations/",),
    "torch compiles": (
        *(
            "situations/test_situations",
            "promises/test_compile.",
            "actions/skip/test_skip.",
            "inspect/test_hooks.",
        ),
        *("taps/test_closure_calls.", "taps/test_step_hooks.", "capture/test_read_before_user_clip."),
    ),
    "the package is parsed": (
        *("test_layers.", "test_private_fields.", "test_words.", "docs/test_architecture."),
        *("taps/test_hook_ids.", "runtime/test_encodings."),
    ),
}
"""Files that one worker runs, one after the other: what the first of them has to wait for, the others find done."""


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, but for files that are TOGETHER."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name = nodeid.partition("::")[0].removeprefix("tests/")
            return next((why for why, names in TOGETHER.items() if name.startswith(names)), name)

    return Scheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """`--dist loadfile` hands files out in the order of collection, not the one with the most tests first.

    Each worker begins to collect at another folder: assertions are rewritten once, by the worker that comes first, and
    read from its bytecode by the others.
    """
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    worker = getattr(config, "workerinput", None)
    if worker is None and getattr(config.option, "numprocesses", None):
        shared = warm.Server()
        os.environ[warm.PLACE] = shared.path  # before the workers are started
        config.add_cleanup(shared.close)
    if worker and config.args == ["tests"]:
        sys.dont_write_bytecode = False
        places = sorted(str(path) for path in Path(__file__).parent.iterdir() if path.stem != "__pycache__")
        first = int(worker["workerid"].removeprefix("gw")) * len(places) // worker["workercount"]
        config.args = places[first:] + places[:first]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files before short ones, then by name; the order within a file stays."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        names = {item.path: item.nodeid.partition("::")[0].removeprefix("tests/") for item in items}
        items.sort(key=lambda item: (not names[item.path].startswith(LONG), names[item.path]))


def pytest_collection_finish() -> None:
    """Collections of garbage begin with the tests, and look only at what tests make."""
    gc.freeze()
    gc.enable()


_file: list[Path] = []


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What earlier files have imported stays, too: without its garbage, it is not looked at again."""
    if _file != [item.path]:
        _file[:] = [item.path]
        gc.collect()
        gc.freeze()


@pytest.fixture
def framework_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Frameworks write into the working folder, and warn about their own and each other's habits."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """Some things are refused in a process that has compiled anything; a test before this one may have."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        dynamo.counters.clear()


@pytest.fixture
def dead_pid() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    return gone.pid


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns after 10 µs of Python, not after 5 ms: what one does in several calls is seen half done."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)
