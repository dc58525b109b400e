"""The endpoint over real sockets: correct for a scraper, harmless under load, gone when closed."""

from __future__ import annotations

import errno
import os
import random
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from gradwatch.endpoint.address import Address
from gradwatch.endpoint.http_protocol import Content, plain
from gradwatch.endpoint.http_server import LOST, THREAD_NAME, Allowance, Endpoint, Limits, Route
from gradwatch.endpoint.listening_port import listening_socket
from tests.support.sink_records import sockets

BODY = b"gradwatch_steps_total 7\n"
GET = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
UNLIMITED = Limits(cpu_share=1.0, cpu_burst_seconds=10.0)


@contextmanager
def endpoint(
    metrics: Route = lambda hurried: Content("text/plain", BODY),
    *,
    limits: Limits | None = None,
    host: str = "127.0.0.1",
    errors: list[BaseException] | None = None,
) -> Iterator[Endpoint]:
    seen: list[BaseException] = [] if errors is None else errors
    served = Endpoint(
        listening_socket(Address(host, 0)),
        {"/metrics": metrics, "/healthz": lambda hurried: plain("ok")},
        seen.append,
        limits,
    )
    served.start()
    try:
        yield served
    finally:
        assert served.close()
    if errors is None:
        assert seen == []


def connect(served: Endpoint, timeout: float = 6.0) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.address.port), timeout)


def ask(served: Endpoint, request: bytes = GET, timeout: float = 6.0) -> bytes:
    """Everything the endpoint answers to these bytes."""
    with connect(served, timeout) as peer:
        peer.sendall(request)
        return read_all(peer)


def read_all(peer: socket.socket) -> bytes:
    received = bytearray()
    while data := peer.recv(65536):
        received += data
    return bytes(received)


def status(response: bytes) -> int:
    return int(response.split(b" ", 2)[1])


def body(response: bytes) -> bytes:
    return response.partition(b"\r\n\r\n")[2]


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.005)
    return condition()


# -- what a scraper sees ---------------------------------------------------------------------------------


def test_get_and_head() -> None:
    """GET answers with the body, HEAD with the same head and nothing else."""
    with endpoint() as served:
        got, head = ask(served), ask(served, GET.replace(b"GET", b"HEAD"))
    assert status(got) == 200
    assert body(got) == BODY
    assert head + BODY == got


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (GET.replace(b"GET", b"POST"), 405),
        (GET.replace(b"/metrics", b"/metrics/../etc/passwd"), 404),
        (GET.replace(b"/metrics", b"/%6detrics"), 404),
        (GET.replace(b"localhost", b"evil.example"), 403),
        (GET.replace(b"Host: localhost\r\n", b""), 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET /" + b"a" * 9000, 431),
        (
            GET.replace(b"GET", b"POST").replace(b"\r\n\r\n", b"\r\nContent-Length: 20000\r\n\r\n")
            + b"x" * 20000,
            405,
        ),
        (GET + GET, 200),
        (GET.replace(b"\r\n", b"\n"), 200),
        (GET.replace(b"/metrics", b"/metrics?a=b"), 200),
        (GET.replace(b"localhost", b"127.0.0.1:8080"), 200),
        (b"GET /metrics HTTP/1.0\r\n\r\n", 200),
    ],
)
def test_statuses(request_: bytes, expected: int) -> None:
    """Each request gets its status, even while its own bytes are still on the way."""
    with endpoint() as served:
        assert status(ask(served, request_)) == expected


def test_405_names_the_allowed_methods() -> None:
    """As HTTP asks of a 405."""
    with endpoint() as served:
        assert b"\r\nAllow: GET, HEAD\r\n" in ask(served, GET.replace(b"GET", b"PUT"))


def test_any_host_is_welcome_where_the_endpoint_is_open() -> None:
    """An endpoint opened to the network is asked for by names it cannot know."""
    with endpoint(host="0.0.0.0") as served:
        assert status(ask(served, GET.replace(b"localhost", b"gpu-17.cluster:29440"))) == 200


def test_a_request_in_pieces() -> None:
    """One byte at a time is slow but legal."""
    with endpoint(limits=UNLIMITED) as served, connect(served) as peer:
        for i in range(len(GET)):
            peer.sendall(GET[i : i + 1])
        assert body(read_all(peer)) == BODY


def test_a_large_body_to_a_slow_reader() -> None:
    """A body that fits no socket buffer arrives whole."""
    large = os.urandom(2 << 20)
    with endpoint(lambda hurried: Content("text/plain", large)) as served, connect(served) as peer:
        peer.sendall(GET)
        time.sleep(0.05)
        assert body(read_all(peer)) == large


def test_a_failing_route_is_a_500_and_is_reported() -> None:
    """A fault of ours is told to the scraper and to `on_error`, and the next scrape works."""
    errors: list[BaseException] = []
    faults: list[Exception] = [MemoryError(), ValueError("no")]

    def metrics(hurried: bool) -> Content:
        if faults:
            raise faults.pop()
        return Content("text/plain", BODY)

    with endpoint(metrics, errors=errors) as served:
        assert [status(ask(served)) for _ in range(3)] == [500, 500, 200]
    assert [type(error) for error in errors] == [ValueError, MemoryError]


def test_a_fault_in_the_thread_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory in the middle of a turn: reported, and a second later scrapes are served again."""
    errors: list[BaseException] = []
    with endpoint(errors=errors) as served:
        faults = [MemoryError()]
        accept = served._accept

        def failing(now: float) -> None:
            if faults:
                raise faults.pop()
            accept(now)

        monkeypatch.setattr(served, "_accept", failing)
        assert body(ask(served)) == BODY
    assert [type(error) for error in errors] == [MemoryError]


# -- what peers cannot do --------------------------------------------------------------------------------


def test_no_more_connections_than_allowed_and_the_oldest_goes_first() -> None:
    """Idle peers are evicted in the order they came, and an honest one is served in between."""
    with endpoint(limits=Limits(connections=8, cpu_share=1.0)) as served, ExitStack() as stack:
        idle = []
        for _ in range(20):
            idle.append(stack.enter_context(connect(served)))
            # One after the other, so that "oldest" has a meaning.
            assert wait_until(lambda: len(served._connections) == min(len(idle), 8))
        assert [peer.recv(1) for peer in idle[:12]] == [b""] * 12
        assert status(ask(served)) == 200
        assert len(served._connections) == 7  # the honest one took the place of one more
        idle[-1].sendall(GET)
        assert body(read_all(idle[-1])) == BODY


@pytest.mark.parametrize("sent", [b"", b"GET /met", GET + GET[:10]], ids=["silent", "half", "lingering"])
def test_the_deadline_is_total(sent: bytes) -> None:
    """A peer that never finishes is gone after the deadline, whatever it has sent."""
    with endpoint(limits=Limits(deadline_seconds=0.2)) as served, connect(served) as peer:
        peer.sendall(sent)
        read_all(peer)
        assert wait_until(lambda: not served._connections)


def test_an_allowance_is_a_token_bucket() -> None:
    """Over any time, no more is spent than the share of it plus the burst and one turn."""
    chance, now, spent = random.Random(1), 0.0, 0.0
    allowance = Allowance(0.03, 0.1, now)
    for _ in range(10_000):
        cost = chance.uniform(0, 0.01)
        spent += cost
        allowance.spend(cost, now := now + chance.uniform(0, 0.001))
        now += allowance.debt_seconds
        assert spent <= 0.03 * now + 0.1 + 0.01
    assert spent > 0.02 * now
    assert allowance.is_short


@contextmanager
def load(served: Endpoint, threads: int, attack: Callable[[socket.socket], None]) -> Iterator[list[int]]:
    """`threads` peers that connect and attack over and over; yields the count of attacks so far."""
    stop, count = threading.Event(), [0]

    def attacker() -> None:
        while not stop.is_set():
            try:
                with connect(served, 2.0) as peer:
                    attack(peer)
                    count[0] += 1
            except OSError:
                continue

    attackers = [threading.Thread(target=attacker, daemon=True) for _ in range(threads)]
    for each in attackers:
        each.start()
    try:
        yield count
    finally:
        stop.set()
        for each in attackers:
            each.join(60)


def _flood(peer: socket.socket) -> None:
    peer.sendall(GET)
    read_all(peer)


def _reset(peer: socket.socket) -> None:
    peer.sendall(GET)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def _malformed(peer: socket.socket) -> None:
    peer.sendall(b"\x00\xffGET\r\n\r\n")
    read_all(peer)


def _drip(peer: socket.socket) -> None:
    for i in range(20):
        peer.sendall(GET[i : i + 1])
        time.sleep(0.001)


def _reset_now_and_then(peer: socket.socket) -> None:
    _reset(peer)
    time.sleep(0.02)


@pytest.mark.parametrize("attack", [_flood, _reset_now_and_then, _malformed, _drip])
def test_an_honest_scrape_is_served_under_load(attack: Callable[[socket.socket], None]) -> None:
    """Within 6 s (P13), by the one thread there is."""
    with endpoint() as served, load(served, 12, attack) as count:
        assert wait_until(lambda: count[0] > 12)
        for _ in range(3):
            assert body(ask(served, timeout=6.0)) == BODY
        assert _endpoint_threads() == 1


@pytest.mark.parametrize("attack", [_flood, _reset, _malformed, _drip])
def test_load_takes_a_small_share_of_one_core(attack: Callable[[socket.socket], None]) -> None:
    """Whatever peers do, even if they wait for nothing: the thread stays within its CPU share."""
    with endpoint(limits=Limits(cpu_burst_seconds=0.01)) as served, load(served, 12, attack):
        clock = time.pthread_getcpuclockid(served._thread.ident or 0)
        time.sleep(0.1)
        started, used = time.monotonic(), time.clock_gettime(clock)
        time.sleep(1.0)
        used, elapsed = time.clock_gettime(clock) - used, time.monotonic() - started
    # The share, the burst and one turn; tripled, because the clocks of a busy machine are no ruler. Without
    # the allowance this is ten times as much.
    assert used < 3 * (Limits().cpu_share * elapsed + 0.04)


@pytest.mark.parametrize(("sent", "large"), [(b"", False), (b"GET /metrics HT", False), (GET, True)])
def test_an_honest_scrape_is_served_beside_500_that_hold_on(sent: bytes, large: bool) -> None:
    """Silent peers, slowloris, and readers that do not read: all are let in, none keeps the place."""
    shown = b"x" * (1 << 20) if large else BODY  # 10,000 series
    before = sockets()
    with endpoint(lambda hurried: Content("text/plain", shown)) as served, ExitStack() as stack:
        for _ in range(500):
            peer = stack.enter_context(connect(served))
            try:
                peer.sendall(sent)
            except OSError:
                continue  # evicted already
        assert body(ask(served, timeout=6.0)) == shown
        assert len(served._connections) <= served.limits.connections
        assert _endpoint_threads() == 1
    assert wait_until(lambda: sockets() == before)


def _endpoint_threads() -> int:
    return sum(thread.name == THREAD_NAME for thread in threading.enumerate())


FEW_FILES = """
    import resource, socket, sys, time
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    from gradwatch.endpoint.http_protocol import plain
    from gradwatch.endpoint.address import Address
    from gradwatch.endpoint.listening_port import listening_socket
    from gradwatch.endpoint.http_server import Endpoint
    served = Endpoint(listening_socket(Address("127.0.0.1", 0)), {"/": lambda hurried: plain("ok")}, print)
    served.start()
    print(served.address.port, flush=True)
    sys.stdin.readline()                    # 200 peers are connected now
    files = [open("/dev/null") for _ in range(30)]        # torch.save, a data loader, others
    print("saved", flush=True)
    try:
        while True: files.append(open("/dev/null"))       # now nothing is left at all
    except OSError: print("exhausted", flush=True)
    sys.stdin.readline()
    del files
    print("freed", flush=True)
    sys.stdin.readline()
    print(served.close(), flush=True)
"""


def test_training_keeps_its_file_descriptors() -> None:
    """At `ulimit -n 64` with 200 idle peers it can open files; when none is left we wait, and recover."""
    with script(FEW_FILES) as process, ExitStack() as stack:
        address = ("127.0.0.1", int(line(process)))
        for _ in range(200):
            stack.enter_context(socket.create_connection(address, 6))
        time.sleep(0.2)
        assert tell(process) == "saved"
        assert line(process) == "exhausted"
        late = stack.enter_context(socket.create_connection(address, 6))
        late.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert tell(process) == "freed"
        assert status(read_all(late)) == 200
        assert tell(process) == "True"


# -- fuzzing (P32) ---------------------------------------------------------------------------------------


def _mutated(chance: random.Random) -> bytes:
    """A valid request with a few bytes flipped, cut, repeated or inserted."""
    request = bytearray(chance.choice([GET, GET.replace(b"GET", b"HEAD"), GET.replace(b"/metrics", b"/")]))
    for _ in range(chance.randint(0, 6)):
        at = chance.randrange(len(request) + 1)
        edit = chance.randrange(4)
        if edit == 0:
            request[at : at + 1] = bytes([chance.randrange(256)])
        elif edit == 1:
            del request[at : at + chance.randrange(8)]
        elif edit == 2:
            request[at:at] = request[at : at + chance.randrange(40)] * chance.randrange(4)
        else:
            request[at:at] = chance.choice(
                [b"\r\n", b"\0", b"\r\n\r\n", b" ", b"Host: evil\r\n", b"\xff" * 9]
            )
    return bytes(request)


def _fuzz(requests: int, seed: int) -> None:
    chance = random.Random(seed)
    with endpoint(limits=UNLIMITED) as served:
        for _ in range(requests):
            with connect(served) as peer:
                try:
                    peer.sendall(_mutated(chance))
                    peer.shutdown(socket.SHUT_WR)
                    response = read_all(peer)
                except OSError:
                    continue  # told to go away while still talking
            if response:
                assert status(response) in (200, 400, 403, 404, 405, 431, 505), response
                assert b"Traceback" not in response
        assert body(ask(served)) == BODY


def test_fuzzed_requests_get_an_answer_or_none() -> None:
    """Mutated requests never reach an error handler, never stop the thread (P32, 3 % of the number)."""
    _fuzz(3_000, seed=7)


@pytest.mark.soak
def test_fuzzed_requests_in_full() -> None:
    """P32 in full."""
    _fuzz(100_000, seed=8)


# -- coming and going ------------------------------------------------------------------------------------


def test_closing_leaves_nothing() -> None:
    """No thread, no socket, no selector, with peers connected and in whatever state."""
    before = sockets()
    with ExitStack() as stack:
        for _ in range(20):
            with endpoint() as served:
                peers = [stack.enter_context(connect(served)) for _ in range(3)]
                peers[0].sendall(GET[:9])
                peers[1].sendall(GET)
            assert _endpoint_threads() == 0
            with pytest.raises(OSError, match="refused"):
                connect(served)
    assert sockets() == before


def test_an_idle_endpoint_uses_few_descriptors_and_no_time() -> None:
    """Three descriptors (P11: at most eight), and not one wake-up without a peer for seconds."""
    before = sockets()
    with endpoint() as served:
        clock = time.pthread_getcpuclockid(served._thread.ident or 0)
        assert sockets() - before == 3
        time.sleep(0.05)
        used = time.clock_gettime(clock)
        time.sleep(0.3)
        assert time.clock_gettime(clock) == used


@pytest.mark.parametrize("noticed", [True, False], ids=["in the thread", "at close"])
def test_descriptors_that_the_script_has_taken_are_left_alone(
    noticed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a daemon does, it closes ours and opens files: nothing is read from, written to or closed by us; said once."""
    if noticed:
        monkeypatch.setattr("gradwatch.endpoint.http_server.LOOK_SECONDS", 0.01)
    errors: list[BaseException] = []
    with endpoint(errors=errors) as served, connect(served):
        assert wait_until(lambda: bool(served._connections))
        connections = [each.own for each in served._connections.values()]
        numbers = [each.socket.fileno() for each in (*served._own, *connections)]
        own = [os.dup(number) for number in numbers]  # so that none is given to another thread
        taken = []
        for at, number in enumerate(numbers):
            with (tmp_path / str(at)).open("wb") as file:
                os.dup2(file.fileno(), number)
            taken.append(os.fstat(number))
        if noticed:
            assert wait_until(lambda: not served._thread.is_alive())
        assert served.close()
        assert [os.fstat(number) for number in numbers] == taken
        assert [(tmp_path / str(at)).stat().st_size for at in range(len(numbers))] == [0] * len(numbers)
        for number in (*numbers, *own):
            os.close(number)
    assert [str(error) for error in errors] == [f"[Errno {errno.EBADF}] {LOST}"]


def test_a_close_that_was_never_started_closes() -> None:
    """A failure between bind and start leaks nothing."""
    before = sockets()
    served = Endpoint(listening_socket(Address("127.0.0.1", 0)), {}, print)
    assert served.close()
    assert served.close()
    assert sockets() == before


FORKING = """
    import os, socket, sys, threading, time
    from gradwatch.endpoint.http_protocol import plain
    from gradwatch.endpoint.address import Address
    from gradwatch.endpoint.listening_port import listening_socket
    from gradwatch.endpoint.http_server import Endpoint, Limits
    from tests.support.sink_records import sockets
    routes, limits = {"/": lambda hurried: plain("ok")}, Limits(cpu_share=1.0, cpu_burst_seconds=10.0)
    served = Endpoint(listening_socket(Address("127.0.0.1", 0)), routes, print, limits)
    served.start()
    print(served.address.port, flush=True)
    for _ in range(60):
        child = os.fork()
        if not child:
            os._exit(0 if sockets() == 0 and threading.active_count() == 1 and served.close() else 1)
        if os.waitpid(child, 0)[1]: print("the child owns something", flush=True)
    print("done", flush=True)
    sys.stdin.readline()
"""


def test_a_forked_child_owns_nothing_and_the_parent_goes_on() -> None:
    """Sixty forks amid a flood: no child has a thread or socket of ours, no scrape is disturbed (P7)."""
    with script(FORKING) as process:
        address, failures, stop = ("127.0.0.1", int(line(process))), [], threading.Event()

        def scrape() -> None:
            while not stop.is_set():
                with socket.create_connection(address, 6) as peer:
                    peer.sendall(b"GET / HTTP/1.0\r\n\r\n")
                    if body(read_all(peer)) != b"ok\n":
                        failures.append(peer)

        scrapers = [threading.Thread(target=scrape) for _ in range(4)]
        for each in scrapers:
            each.start()
        said = line(process)
        stop.set()
        for each in scrapers:
            each.join()
        assert said == "done"
        assert not failures


@contextmanager
def script(source: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process of its own, for what cannot be done in this one."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return line(process)
