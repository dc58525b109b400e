"""Scripts run as by `python`, in processes forked from one that has imported torch already: 0.2 s instead of 3.

For tests of what becomes of a script and its training, bare or under `gradwatch run`. The forked process is a Python's
from there on: environment, working folder, `sitecustomize`, `__main__`, argv, exit status, exit functions, death by
signal. gradwatch is imported anew, from modules whose bodies have run (`tests.support.warm_modules`). Pythons that it
starts are warm, too (`tests.support.warm_children`). What differs: torch, what it compiles with, and the libraries that
gradwatch needs (LIBRARIES) are in `sys.modules` before the script's first line, where the launcher's import hook finds
torch, and modules are not torn down at the end. Tests of the start itself, of imports, of flags of the interpreter and
of what is left at its end start a Python of their own.
"""

from __future__ import annotations

import array
import atexit
import builtins
import gc
import importlib
import json
import locale
import multiprocessing.process
import multiprocessing.util
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from tests.support import warm_children, warm_modules

ROOT = str(Path(__file__).resolve().parent.parent.parent)
SERVER = (
    f"import socket, sys; sys.path.insert(0, {ROOT!r}); from tests.support import warm; "
    "warm.serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))"
)
LIBRARIES = ("pydantic.main", "pydantic.type_adapter", "pydantic.json_schema", "ruamel.yaml", "structlog")
"""What gradwatch would import."""
OF_COMPILATION = (
    "functorch.compile",
    "torch._inductor.select_algorithm",
    "torch._inductor.fx_passes.joint_graph",
)
PLACE = "WARM_PYTHON"
"""In the environment, the path of a server that several processes share (`pytest -n`)."""
ENCODING = locale.getpreferredencoding(False)
"""Of what these processes print: the streams are those of a Python that was started with this locale."""
LONGEST = 1 << 20  # bytes of a request
STARTS = 2  # of a process that imports gradwatch: as the launcher, and as the script that it becomes


class Process:
    """One script under way; like `subprocess.Popen` with both streams piped, as far as tests need it."""

    def __init__(
        self, command: Sequence[str], cwd: str = ROOT, env: Mapping[str, str] = os.environ, stdin: str = ""
    ) -> None:
        words = list(command)
        if words[0] != sys.executable:
            raise ValueError(f"only this Python can be had warm, not {words[0]}")
        self._code: int | None = None
        self._status, status = os.pipe()
        self._streams = [os.pipe(), os.pipe()]
        given, giving = os.pipe()
        request = {"words": words[1:], "cwd": cwd, "env": dict(env)}
        passed = [given, self._streams[0][1], self._streams[1][1], status]
        self.pid = _server().start(request, passed)
        for each in passed:
            os.close(each)
        self._texts = ["", ""]
        self._readers = [
            threading.Thread(target=self._read, args=(number,), daemon=True) for number in range(2)
        ]
        for reader in self._readers:
            reader.start()
        with os.fdopen(giving, "w", encoding=ENCODING) as stream:
            stream.write(stdin)

    def _read(self, number: int) -> None:
        with os.fdopen(self._streams[number][0], encoding=ENCODING, errors="replace") as stream:
            self._texts[number] = stream.read()

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        if self._code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[int, str, str]:
        """(exit status as subprocess gives it, stdout, stderr) when the process has ended and nobody writes any more.

        Raises:
            TimeoutError: after `timeout` seconds; the process is killed then.
        """
        if self._code is None:
            clock = threading.Timer(timeout, self.kill)
            clock.start()
            with os.fdopen(self._status) as stream:
                self._code = int(stream.read())
            late = not clock.is_alive()
            clock.cancel()
            clock.join()
            for reader in self._readers:
                reader.join(timeout)
            if late:
                raise TimeoutError(f"{timeout} s are over; stderr: {self._texts[1]}")
        return self._code, self._texts[0], self._texts[1]


def run(
    command: Sequence[str],
    cwd: str | Path = ROOT,
    env: Mapping[str, str] = os.environ,
    stdin: str = "",
    timeout: float = 250,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run(command, capture_output=True, text=True, …)` for a command of this Python."""
    status, stdout, stderr = Process(command, str(cwd), env, stdin).communicate(timeout)
    done = subprocess.CompletedProcess(list(command), status, stdout, stderr)
    if check and status:
        raise AssertionError(f"exit status {status}\n{stderr}")
    return done


class Worker:
    """One command under way that is talked to, like `subprocess.Popen` with text pipes for stdin and stdout."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], **_: Any) -> None:
        (given, giving), (taken, taking), (self._ended, ends) = (os.pipe() for _ in range(3))
        silent = os.open(os.devnull, os.O_WRONLY)
        request = {"words": list(command)[1:], "cwd": ROOT, "env": dict(env)}
        passed = [given, taking, silent, ends]
        self.pid = _server().start(request, passed)
        for each in passed:
            os.close(each)
        self.stdin = os.fdopen(giving, "w", encoding=ENCODING)
        self.stdout = os.fdopen(taken, encoding=ENCODING)

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def communicate(self) -> int:
        """Wait for its end, and close the pipes; its exit status as subprocess gives it."""
        with self.stdin, self.stdout, os.fdopen(self._ended) as ended:
            return int(ended.read())


_made: list[warm_modules.MadeModules] = []


class Server:
    """The process that is forked, at `path`; it imports nothing before it is asked, and does not outlive this one."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        self.path = str(Path(self._folder.name) / "socket")
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("GRADWATCH", "PYTHON", "PYTEST"))
        }
        ended, self._alive = os.pipe()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(self.path)
            listening.listen()
            passed = [listening.fileno(), ended]
            self._process = subprocess.Popen(
                [sys.executable, "-c", SERVER, *map(str, passed)],
                env={**kept, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # as those of the scripts are: a stream remembers whether it could seek
                pass_fds=passed,
            )
        os.close(ended)

    def close(self) -> None:
        """End the server; scripts under way go on."""
        os.close(self._alive)
        self._process.communicate()
        self._folder.cleanup()


class Connection:
    """What asks a server for scripts."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST)
        self._socket.connect(path)
        self._lock = threading.Lock()
        atexit.register(self._socket.close)

    def start(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """The process id of a script that has been started."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        with self._lock:
            self._socket.sendmsg([json.dumps(request).encode()], [rights])
            return int(self._socket.recv(64))


_connections: list[Connection] = []
_starting = threading.Lock()


def _server() -> Connection:
    with _starting:
        if not _connections:
            path = os.environ.get(PLACE)
            if path is None:
                server = Server()
                atexit.register(server.close)
                path = server.path
            _connections.append(Connection(path))
        return _connections[0]


# -- in the process that is forked ---------------------------------------------------------------------------------


class Replaced(BaseException):
    """`os.exec` was called: the process is to become another command of this Python."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str]) -> None:
        self.words, self.env = list(words), dict(env)


def serve(listening: socket.socket, alive: int) -> NoReturn:
    """Fork a process for every request, from the first one on, until the other end of `alive` is closed."""
    ended = selectors.DefaultSelector()
    ended.register(alive, selectors.EVENT_READ)
    ended.register(listening, selectors.EVENT_READ)
    ended.select()
    path = sys.path[2:]  # less what SERVER and `-c` put there
    _import_all()
    asking: dict[int, socket.socket] = {}
    statuses: dict[int, tuple[int, int]] = {}
    while True:
        for key, _ in ended.select():
            if key.fd == alive:
                os._exit(0)
            if key.fileobj is listening:
                asked, _ = listening.accept()
                asking[asked.fileno()] = asked
                ended.register(asked, selectors.EVENT_READ)
                continue
            if key.fd in statuses:
                pid, status = statuses.pop(key.fd)
                ended.unregister(key.fd)
                os.close(key.fd)
                os.write(status, b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                os.close(status)
                continue
            asked = asking[key.fd]
            text, descriptors, _, _ = socket.recv_fds(asked, LONGEST, 4)
            if not text:
                ended.unregister(asked)
                asking.pop(key.fd).close()
                continue
            pid = os.fork()
            if pid == 0:
                ended.close()
                os.close(alive)
                for each in (listening, *asking.values()):
                    each.close()
                for handle, (_, status) in statuses.items():
                    os.close(handle)
                    os.close(status)
                os.close(descriptors[3])
                _be_python(json.loads(text), descriptors[:3], path)
            asked.send(b"%d" % pid)
            handle = os.pidfd_open(pid)
            statuses[handle] = (pid, descriptors[3])
            ended.register(handle, selectors.EVENT_READ)
            for number in descriptors[:3]:
                os.close(number)


def _import_all() -> None:
    gc.disable()
    # torch itself, and what the first optimizer and the first compilation would import: each takes as long.
    for name in ("torch._dynamo", *OF_COMPILATION):
        importlib.import_module(name)
    with warnings.catch_warnings():  # a script whose gradwatch imports nothing has none of their filters
        for name in LIBRARIES:
            importlib.import_module(name)
        _made.extend(warm_modules.MadeModules() for _ in range(STARTS))
    _forget_modules()  # here, so that no forked process looks at each name and copies its page
    sys.path_importer_cache.clear()
    for each in weakref.finalize._registry:  # type: ignore[attr-defined]
        each.atexit = False  # torch's libraries of operators: their end is half of the time of a short script
    gc.freeze()  # a collection in a process forked from this one looks at what that one has made, and copies no page
    gc.enable()


def _be_python(request: Mapping[str, Any], streams: Sequence[int], path: Sequence[str]) -> NoReturn:
    warm_children.set_up(lambda request, streams: _be_python(request, streams, path))
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    os.chdir(request["cwd"])
    words, env = request["words"], request["env"]
    sys.stdout.reconfigure(write_through=request.get("unbuffered", False))  # type: ignore[union-attr]
    os.execvpe = _replace
    while True:
        try:
            _start(words, env, path)
            _end(0)
        except Replaced as replaced:
            _forget_modules()
            words, env = replaced.words, replaced.env
        except SystemExit as end:
            if not isinstance(end.code, int | None):
                print(end.code, file=sys.stderr)
            _end(end.code if isinstance(end.code, int) else int(end.code is not None))
        except BaseException as error:
            error.__traceback__ = _of_the_script(error.__traceback__)
            sys.last_type, sys.last_value = type(error), error
            sys.last_traceback = _from_the_outermost(error.__traceback__)
            sys.excepthook(type(error), error, error.__traceback__)
            _end(-signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)


def _of_the_script(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    return traceback


def _from_the_outermost(traceback: TracebackType | None) -> TracebackType:
    """What Python notes of an exception that nothing caught begins at the frame that no other called."""
    outermost = sys._getframe()
    while outermost.f_back is not None:
        outermost = outermost.f_back
    return TracebackType(traceback, outermost, 0, 1)


def _end(status: int) -> NoReturn:
    """The end of an interpreter but for the teardown of its modules, which takes a second where torch is loaded."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


def _replace(file: str, words: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    first = words[1] if len(words) > 1 else "-"
    if file != sys.executable or (first.startswith("-") and first not in ("-", "-c", "-m")):
        os.execve(file, list(words), dict(env))
    raise Replaced(words[1:], env)


def _forget_modules() -> None:
    fresh = {"gradwatch", "tests", "sitecustomize"}
    for name in [name for name in sys.modules if name.partition(".")[0] in fresh]:
        del sys.modules[name]


def _start(words: Sequence[str], env: Mapping[str, str], path: Sequence[str]) -> None:
    """What an interpreter does from its start to the end of its script."""
    sys.meta_path[:] = [one for one in sys.meta_path if not isinstance(one, warm_modules.MadeModules)]
    if _made:
        sys.meta_path.insert(0, _made.pop())
    for name in set(os.environ) - set(env):
        del os.environ[name]
    os.environ.update(env)
    sys.path[:] = [*map(os.path.abspath, filter(None, env.get("PYTHONPATH", "").split(os.pathsep))), *path]
    sys.path_importer_cache.clear()
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    # ModuleRegistry again after what a sitecustomize registers, as in a script that imports multiprocessing.
    joins = multiprocessing.util._exit_function  # type: ignore[attr-defined]
    atexit.unregister(joins)
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    atexit.register(joins)
    main = sys.modules["__main__"].__dict__
    main.clear()
    main.update(__name__="__main__", __doc__=None, __package__=None, __spec__=None, __builtins__=builtins)
    sys.path.insert(0, "")
    sys.orig_argv = [sys.executable, *words]
    if words and words[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words and words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec", dont_inherit=True), main)
    elif not words or words[0] == "-":
        sys.argv = words or [""]
        exec(compile(sys.stdin.read(), "<stdin>", "exec", dont_inherit=True), main)
    else:
        script = os.path.abspath(words[0])
        sys.argv, sys.path[0] = words, os.path.dirname(os.path.realpath(script))
        main.update(__file__=script, __cached__=None)
        exec(compile(Path(script).read_bytes(), script, "exec", dont_inherit=True), main)
