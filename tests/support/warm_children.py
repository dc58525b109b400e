"""Children of a warm script that are warm themselves: what it starts as a Python of its own is forked instead.

Beside each warm script stands a nursery, forked before the script's first line and so as fresh as the script was. It
forks what `subprocess` and `multiprocessing` would start (by `_posixsubprocess.fork_exec`), as children of the script:
their parent in the nursery ends at once, and the script adopts its orphans. What cannot be had warm is started cold:
another program, flags of the interpreter other than `-u`, functions before the exec, other users.
"""

from __future__ import annotations

import _posixsubprocess
import array
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

LONGEST = 1 << 20  # bytes of a request
FREE = 1000  # no descriptor that a script gives its children has so high a number
ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER

BePython = Callable[[Mapping[str, Any], Sequence[int]], NoReturn]


def set_up(be_python: BePython) -> None:
    """Fork the nursery of this process, which has not begun to be a script, and have children asked from it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST)
    if os.fork() == 0:
        ours.close()
        _nurse(theirs, be_python)
    theirs.close()
    ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1, 0, 0, 0)
    cold = _posixsubprocess.fork_exec

    def fork_exec(
        args: Any, executables: Any, close_fds: bool, kept: Any, cwd: Any, env: Any, *rest: Any
    ) -> int:
        to, _, _, out, _, err, _, told, _, session, group = rest[:11]
        request = _asked(args, cwd, env)
        if (
            request is None
            or not close_fds
            or group != -1
            or any(one not in (None, -1) for one in rest[11:-1])
        ):
            return cold(args, executables, close_fds, kept, cwd, env, *rest)
        streams = [stream if stream != -1 else place for place, stream in enumerate((to, out, err))]
        passed = [number for number in kept if number != told]
        request |= {"passed": passed, "session": bool(session)}
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [*streams, *passed]))
        ours.sendmsg([json.dumps(request).encode()], [rights])
        return int(ours.recv(64))

    _posixsubprocess.fork_exec = subprocess._fork_exec = fork_exec


def _asked(args: Sequence[Any], cwd: Any, env: Sequence[bytes] | None) -> dict[str, Any] | None:
    """The command as a request; None where it is not one that can be had warm."""
    program, *words = map(os.fsdecode, args)
    unbuffered = words[:1] == ["-u"]
    words = words[unbuffered:]
    if program != sys.executable or (
        words and words[0].startswith("-") and words[0] not in ("-", "-c", "-m")
    ):
        return None
    pairs = os.environ.items() if env is None else (os.fsdecode(one).split("=", 1) for one in env)
    cwd = os.getcwd() if cwd is None else os.fsdecode(cwd)
    return {"words": words, "cwd": cwd, "env": dict(pairs), "unbuffered": unbuffered}


def _nurse(asked: socket.socket, be_python: BePython) -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Blocked too: one that comes to a child before it has its own handlers waits for them, and is not ignored.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    silent = os.open(os.devnull, os.O_RDWR)
    for place in range(3):
        os.dup2(silent, place)
    while True:
        text, descriptors, _, _ = socket.recv_fds(asked, LONGEST, 32)
        if not text:
            os._exit(0)
        born, birth = os.pipe()
        middle = os.fork()
        if middle == 0:
            if child := os.fork():
                os.write(birth, b"%d" % child)
                os._exit(0)
            asked.close()
            os.close(born)
            os.close(birth)
            _leave_the_nursery(json.loads(text), descriptors, be_python)
        os.waitpid(middle, 0)
        asked.send(os.read(born, 64))
        for each in (born, birth, *descriptors):
            os.close(each)


def _leave_the_nursery(request: dict[str, Any], descriptors: list[int], be_python: BePython) -> NoReturn:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    if request["session"]:
        os.setsid()
    high = [FREE + place for place in range(len(descriptors))]
    for number, descriptor in zip(high, descriptors, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for number, place in zip(high[3:], request["passed"], strict=True):
        os.dup2(number, place)  # inheritable, as in a process that has been started so
        os.close(number)
    be_python(request, high[:3])
