"""The Prometheus sink from Record to scrape: true to prometheus_client, whatever parameters are called."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gradwatch.endpoint.address import Address, rank_address
from gradwatch.endpoint.http_server import THREAD_NAME
from gradwatch.errors import AttachError
from gradwatch.records.run_info import RuleInfo
from gradwatch.runtime.internal_errors import Health
from gradwatch.runtime.printable import LONGEST_LABEL, distinct, printable
from gradwatch.sinks.prometheus.sink import PrometheusSink
from tests.sinks.prometheus.test_exposition import read, same
from tests.support.binaries import require
from tests.support.ports import free_port
from tests.support.sink_records import make_event, make_record, make_run, make_sites, serving, skip, sockets

NASTY = [
    "a\x1b[31mred\x1b[0m",
    "line\nbreak\r\n",
    "nul\0",
    "\ud800lone",
    "../../etc/passwd",
    "<script>alert(1)</script>",
    'quote"back\\slash',
    "x" * 100_000,
    "x" * 100_001,
    "\u202eright to left",
    "",
    " ",
    '{a="b"} 1\n# TYPE evil gauge',
]
NAMES = st.lists(st.text(st.characters(), max_size=40) | st.sampled_from(NASTY), max_size=60, unique=True)


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as response:
        return bytes(response.read())


def eventful(sink: PrometheusSink, sites_count: int = 12, optimizers: int = 1) -> None:
    """A run in which a bit of everything happens."""
    sites, chance = make_sites(sites_count), np.random.default_rng(3)
    for step in range(20 * optimizers):
        norm = chance.lognormal(-2, 3, sites_count).astype(np.float32)
        bad = step == 7
        norm[0] = np.nan if bad else norm[0]
        sink.write(
            make_record(
                sites,
                norm,
                step=step,
                optimizer=step % optimizers,
                calls=chance.integers(0, 3, sites_count),
                applied=0.5 if step % 3 == 0 else 1.0,
                events=(make_event(step=step, sites=(sites.names[0],)),) if bad else (),
                firing=["non-finite"] if step > 15 else [],
                decision=skip() if bad else None,
                loss_scale=65536.0,
            )
        )


# -- the text --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizers", [1, 3])
def test_the_text_says_what_prometheus_client_would_say(optimizers: int, tmp_path: Path) -> None:
    """Our renderer and `generate_latest` over the Collector give the same series and the same metadata."""
    sink, registry = PrometheusSink(None, params="all"), CollectorRegistry()
    sink.open(make_run(tmp_path), Health())
    sink._health.mark("engine", False)
    eventful(sink, optimizers=optimizers)
    registry.register(sink.collector())
    ours, theirs = sink.render(), generate_latest(registry)
    left, right = read(ours), read(theirs)
    assert left.keys() == right.keys()
    for key, value in left.items():
        # Per-parameter values are float32; theirs are printed with the digits of the float64 they become.
        assert same(value, right[key]) or np.float32(value) == np.float32(right[key]), key
    assert len(left) > 80 * optimizers
    comments = [{line for line in text.splitlines() if line.startswith(b"#")} for text in (ours, theirs)]
    assert comments[0] == comments[1]


def test_no_sample_has_a_timestamp(tmp_path: Path) -> None:
    """A timestamp would switch Prometheus's staleness handling off."""
    sink = PrometheusSink(None)
    sink.open(make_run(tmp_path), Health())
    eventful(sink)
    families = text_string_to_metric_families(sink.render().decode())
    samples = [sample for family in families for sample in family.samples]
    assert len(samples) > 80
    assert {sample.timestamp for sample in samples} == {None}


def test_promtool_finds_nothing_to_say(tmp_path: Path) -> None:
    """The linter of the Prometheus project, on a scrape of everything."""
    promtool = require("promtool")
    with serving(tmp_path, params="all") as sink:
        sink._health.mark("engine", True)
        eventful(sink, optimizers=2)
        assert sink.url is not None
        checked = subprocess.run(
            [promtool, "check", "metrics"], input=fetch(sink.url), capture_output=True, check=False
        )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_a_registry_of_ones_own(tmp_path: Path) -> None:
    """The Collector stands beside a program's own metrics; registered twice, it is refused."""
    sink, registry = PrometheusSink(None), CollectorRegistry()
    sink.open(make_run(tmp_path), Health())
    Counter("samples_seen", "The program's own.", registry=registry).inc(5)
    registry.register(sink.collector())
    eventful(sink)
    assert registry.get_sample_value("gradwatch_steps_total") == 20
    assert registry.get_sample_value("samples_seen_total") == 5
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(sink.collector())


# -- names (P33) -----------------------------------------------------------------------------------------


def _scrape_of(names: list[str], tmp_path: Path) -> None:
    """Every name gets one series of its own, the scrape parses, and the page holds no markup of theirs."""
    sink = PrometheusSink(None, params="all", max_series=len(names))
    rules = tuple(RuleInfo(name, "above", "info", (name,)) for name in dict.fromkeys(names[:5]))
    sink.open(make_run(tmp_path, rules=rules, script=names[0] if names else "", host="\x1b"), Health())
    sink._health.mark(names[0] if names else "engine", True)
    sink.write(make_record(make_sites(names=names, groups=names), np.arange(len(names))))
    text = sink.render()
    series = read(text)
    params = [labels for name, labels in series if name == "gradwatch_param_grad_norm"]
    assert len(params) == len(names)
    for labels in params:
        for _, value in labels:
            assert value.isprintable()
            assert len(value) <= LONGEST_LABEL + 8
    page = sink._page(False).body.decode()
    assert "<script" not in page
    assert "\x1b" not in page + text.decode()


def test_hostile_names_in_full(tmp_path: Path) -> None:
    """10,000 names at once: random text over all of Unicode, surrogates included, and the worst we know."""
    chance = np.random.default_rng(33)
    names = list(dict.fromkeys(NASTY))
    while len(names) < 10_000:
        codes = chance.integers(0, 0x110000 if chance.random() < 0.5 else 0xA0, chance.integers(0, 30))
        names.append("".join(map(chr, codes)) + str(len(names)))
    _scrape_of(names, tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(names=NAMES)
def test_hostile_names(names: list[str], tmp_path: Path) -> None:
    """Names found by hypothesis."""
    _scrape_of(names, tmp_path)


@given(st.text(st.characters(), max_size=400))
def test_printable_keeps_what_is_harmless_and_tells_the_rest_apart(name: str) -> None:
    """A name that can be shown is shown; any other becomes one that can, different from its neighbours."""
    shown = printable(name)
    assert shown.isprintable()
    assert len(shown) <= LONGEST_LABEL
    assert printable(shown) == shown
    if name.isprintable() and len(name) <= LONGEST_LABEL:
        assert shown == name
    else:
        assert shown != printable(name + "\0")
    shown.encode()


@given(st.lists(st.sampled_from(["a", "b", "a#2", "a\0", printable("a\0"), "a#3"]), max_size=12))
def test_labels_are_distinct_even_where_names_are_not(names: list[str]) -> None:
    """One pair of equal label sets would void the whole scrape."""
    shown = distinct(names)
    assert len(set(shown)) == len(names)
    assert len(shown) == len(names)


# -- the endpoint ----------------------------------------------------------------------------------------


def test_what_the_endpoint_serves(tmp_path: Path) -> None:
    """/metrics for Prometheus, /healthz for a probe, / for a person; each step is on the next scrape."""
    with serving(tmp_path) as sink:
        assert sink.url is not None
        root = sink.url.removesuffix("/metrics")
        assert b"waiting for the first step" in fetch(f"{root}/")
        sites = make_sites()
        for step in range(5):
            sink.write(make_record(sites, step=step))
            assert f"gradwatch_steps_total {step + 1}\n".encode() in fetch(sink.url)
        sink.write(make_record(sites, step=5, firing=["exploding"]))
        assert fetch(f"{root}/healthz") == b"ok\n"
        page = fetch(f"{root}/").decode()
        for text in ("run-1", "firing: exploding", "6 · non-finite 0", 'href="/metrics"'):
            assert text in page
        assert "http" not in page.replace("http-equiv", "")  # nothing from elsewhere
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetch(f"{root}/debug")


def test_a_scrape_changes_nothing(tmp_path: Path) -> None:
    """Two scrapes without a step in between are the same bytes; a fault of ours is seen without a step."""
    with serving(tmp_path) as sink:
        eventful(sink)
        assert sink.url is not None
        first = fetch(sink.url)
        assert fetch(sink.url) == first
        sink._health.report("engine", ValueError())
        assert b'gradwatch_internal_errors_total{component="engine"} 1' in fetch(sink.url)


def test_scraping_while_training_writes(tmp_path: Path) -> None:
    """Every scrape is one moment of the run: steps, histogram and norm agree while both threads are busy."""
    stop, sites = threading.Event(), make_sites(30)
    with serving(tmp_path, params="all") as sink:

        def train() -> None:
            for step in range(1_000_000):
                if stop.is_set():
                    return
                sink.write(make_record(sites, float(step + 1), step=step))

        trainer = threading.Thread(target=train)
        trainer.start()
        try:
            for _ in range(40):
                plain = [item for item in read(sink.render()).items() if not item[0][1]]
                series = {name: value for (name, _), value in plain}
                if series["gradwatch_steps_total"]:
                    assert series["gradwatch_step_grad_norm_count"] == series["gradwatch_steps_total"]
                    steps = series["gradwatch_grad_norm"] / np.sqrt(30)
                    assert steps == pytest.approx(series["gradwatch_steps_total"])
        finally:
            stop.set()
            trainer.join()


def test_the_endpoint_file(tmp_path: Path) -> None:
    """The endpoint is found by a file only we can read, in a folder only we can enter; it goes when we go."""
    with serving(tmp_path) as sink:
        path = tmp_path / "run-1" / "endpoint-rank0.json"
        says = json.loads(path.read_text(encoding="utf-8"))
        assert says["url"] == sink.url
        assert (says["host"], says["pid"], says["run_id"], says["rank"]) == (
            "127.0.0.1",
            os.getpid(),
            "run-1",
            0,
        )
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert not list(path.parent.glob("*.tmp"))
    assert not path.exists()


def test_the_endpoint_file_of_a_restart_is_left_alone(tmp_path: Path) -> None:
    """An old process that closes late does not take the new one's file away."""
    with serving(tmp_path):
        path = tmp_path / "run-1" / "endpoint-rank0.json"
        path.write_text(json.dumps({"pid": os.getpid() + 1}))
    assert path.exists()


def test_the_endpoint_file_of_another_watch_is_left_alone(tmp_path: Path) -> None:
    """One of the same process that has no place of its own (no locks there) has written over the file of the first."""
    path = tmp_path / "run-1" / "endpoint-rank0.json"
    with serving(tmp_path) as second:
        with serving(tmp_path) as first:
            assert first.url is not None
        assert not path.exists()
        with serving(tmp_path):
            second.close()
            assert path.exists()


def test_a_link_in_the_way_is_not_followed(tmp_path: Path) -> None:
    """What somebody planted under the file's name is replaced, not written through."""
    (tmp_path / "run-1").mkdir()
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "run-1" / "endpoint-rank0.json").symlink_to(precious)
    with serving(tmp_path):
        assert precious.read_text(encoding="utf-8") == "precious"


def test_a_folder_that_cannot_be_written_costs_only_the_file(tmp_path: Path) -> None:
    """The endpoint works, the fault is counted."""
    (tmp_path / "run-1").write_text("a file where the folder should be")
    health = Health()
    with serving(tmp_path, health) as sink:
        assert sink.url is not None
        assert b"gradwatch_internal_errors_total" in fetch(sink.url)
    assert health.errors() == {"prometheus": 1}


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody else listens on."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def test_a_port_in_use_gives_way_to_a_free_one(taken: int, tmp_path: Path) -> None:
    """20 of 20 starts (P15), each with its port in the endpoint's file."""
    before = sockets()
    for _ in range(20):
        with serving(tmp_path, listen=f"127.0.0.1:{taken}") as sink:
            says = json.loads((tmp_path / "run-1" / "endpoint-rank0.json").read_text(encoding="utf-8"))
            assert says["port"] != taken
            assert str(says["port"]) in str(sink.url)
            assert fetch(says["url"]).startswith(b"# HELP")
    assert sockets() == before
    assert not [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


def test_the_port_is_the_base_plus_the_local_rank() -> None:
    """Ranks of one machine do not collide; beyond the last port, any free one."""
    base = Address("127.0.0.1", 29440)
    assert PrometheusSink().listen == base
    assert [rank_address(base, rank).port for rank in (0, 1, 7)] == [29440, 29441, 29447]
    assert rank_address(base._replace(port=65535), 1).port == 0
    assert rank_address(base._replace(port=0), 5).port == 0


def test_a_host_that_is_not_ours_raises_and_leaks_nothing(tmp_path: Path) -> None:
    """The Breaker counts it and tries again later; training has no endpoint until then."""
    before, sink = sockets(), PrometheusSink("192.0.2.1:29440")
    with pytest.raises(OSError, match="is no address of this machine"):
        sink.open(make_run(tmp_path), Health())
    sink.write(make_record(make_sites()))
    sink.close()
    assert sink.url is None
    assert sockets() == before


def test_names_are_not_resolved() -> None:
    """Looking a host name up can take seconds; only numbers are taken."""
    with pytest.raises((ValueError, AttachError), match=r"0\.0\.0\.0:PORT"):
        PrometheusSink("my-host:29440")


KILLED = """
    import os, sys, time
    from pathlib import Path
    from gradwatch.runtime.internal_errors import Health
    from gradwatch.sinks.prometheus.sink import PrometheusSink
    from tests.support.sink_records import make_run
    sink = PrometheusSink(f"127.0.0.1:{sys.argv[1]}")
    sink.open(make_run(Path(sys.argv[2])), Health())
    if not os.fork():
        print(sink.url, flush=True)          # what runs at a fork has run
        time.sleep(60)                       # a data loader's worker that outlives its parent
        os._exit(0)
    time.sleep(60)
"""


def test_a_restart_after_sigkill_gets_its_port_back(tmp_path: Path) -> None:
    """Though a forked worker of the killed process is still alive, and a connection is in TIME_WAIT (P15)."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(port), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert str(port) in url
        fetch(url)
        process.kill()
        process.wait()
        with serving(tmp_path, listen=f"127.0.0.1:{port}") as sink:
            assert sink.url == url
            assert fetch(url).startswith(b"# HELP")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


FORKED = """
    import os, sys, threading
    from pathlib import Path
    from gradwatch.runtime.internal_errors import Health
    from gradwatch.sinks.prometheus.sink import PrometheusSink
    from tests.support.sink_records import make_record, make_run, make_sites, sockets
    sink = PrometheusSink("127.0.0.1:0")
    sink.open(make_run(Path(sys.argv[1])), Health())
    held, done = threading.Event(), threading.Event()

    def reader():                            # a thread of somebody's registry, in the middle of a scrape
        with sink._lock:
            held.set()
            done.wait()

    threading.Thread(target=reader, daemon=True).start()
    held.wait()
    child = os.fork()
    if not child:
        sink.write(make_record(make_sites()))
        sink.close()
        os._exit(sockets())
    status = os.waitpid(child, 0)[1]
    done.set()
    print(status, os.path.exists(sys.argv[1] + "/run-1/endpoint-rank0.json"), len(sink.render()) > 0)
    sink.close()
"""


def test_a_forked_child_neither_hangs_nor_takes_the_endpoint_away(tmp_path: Path) -> None:
    """Forked while another thread holds the lock: the child goes on, the parent keeps its file (P7)."""
    said = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORKED), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
    )
    assert said.stdout.split() == ["0", "True", "True"]


def test_the_report_of_the_run_is_linked(tmp_path: Path) -> None:
    """The start page leads to it; the first request says that it is made, for it is read from the journal."""
    with serving(tmp_path) as sink:
        assert sink.url is not None
        base = sink.url.removesuffix("/metrics")
        with urllib.request.urlopen(f"{base}/", timeout=10) as answer:
            assert '<a href="/run/run-1">' in answer.read().decode()
        with urllib.request.urlopen(f"{base}/run/run-1", timeout=10) as answer:
            assert "The journal is being read" in answer.read().decode()
