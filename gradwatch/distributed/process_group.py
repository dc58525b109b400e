"""gradwatch's own process group: the meeting of the ranks of a run, and the one collective of a step.

Never torch's default group: a collective of gradwatch's among the user's could be matched with one of theirs. The
meeting goes through the store that `init_process_group` made. Every rank leaves a card there; rank 0 reads
them and one verdict is written, by compare-and-set, so that all ranks hold the same: a rank that came too
late, or not at all, cannot leave some of them waiting for it. Whatever fails later closes this rank's
connections, at which the others' collective raises at once, and every rank goes on alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from gradwatch.errors import GradwatchError
from gradwatch.runtime.process_identity import group_rank

MEET_SECONDS = 30.0
"""How long the first step waits, once, for a rank that does not watch. Ranks of one training come together."""
FIRST_PAUSE, LONGEST_PAUSE = 1e-4, 0.02
"""Seconds between two looks for a rank: at first, and once it is late."""
WAIT_SECONDS = 60.0
"""How long a step waits for a rank that stays away before every rank goes on alone."""


_c10d: Any = dist  # its stubs do not export what is used here


class AloneError(GradwatchError):
    """This rank goes on without the others; the message says why."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """The agreement of the ranks. `hellos[world]`: the message that each of them sent."""

    rank: int
    world: int
    hellos: tuple[Mapping[str, Any], ...]
    store: Any

    def read(self, key: str) -> Any:
        """Read the value that some rank published under `key` before the meeting."""
        return json.loads(self.store.get(key))


def place() -> tuple[int, int]:
    """(rank, world size) of this process: torch.distributed's where it is initialised, else (0, 1)."""
    if group_rank() is not None and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def meet(name: str, hello: Mapping[str, Any], published: Mapping[str, Any]) -> Meeting:
    """Meet the other ranks under `name`; all of them get the same cards, or all of them `AloneError`.

    `hello` says what this rank is about; `published` is laid down under keys of its own, to be `read` later.
    Waits at most `MEET_SECONDS` (and a little for a verdict under way), once.
    """
    rank, world = place()
    if dist.get_backend() == "fake":
        raise AloneError("torch.distributed runs on its fake backend, whose ranks do not exist")
    store = prefix_store(name)
    for key, value in published.items():
        store.set(key, json.dumps(value))
    store.set(f"hello/{rank}", json.dumps(hello))
    verdict = _agree(store, _collect(store, world)) if rank == 0 else _await(store)
    if "alone" in verdict:
        raise AloneError(str(verdict["alone"]))
    return Meeting(rank, world, tuple(verdict["hellos"]), store)


def announce(name: str) -> None:
    """Say that this rank does not want to meet, so that one that does need not wait for it."""
    rank, _ = place()
    store = prefix_store(name)
    store.set(f"hello/{rank}", json.dumps(None))
    if rank == 0:
        _agree(store, {"alone": "rank 0 has no rule that needs the other ranks"})


def default_store() -> Any:
    """The store of the default process group. Raises where torch no longer shows it."""
    return _c10d.distributed_c10d._get_default_store()


def prefix_store(name: str) -> Any:
    """The part of it that is ours under this name."""
    return _c10d.PrefixStore(f"gradwatch/{name}", default_store())


def _collect(store: Any, world: int) -> dict[str, Any]:
    """Rank 0's proposal: the hellos of all ranks, or which are missing."""
    deadline = time.monotonic() + MEET_SECONDS
    hellos = []
    for rank in range(world):
        left = max(0.0, deadline - time.monotonic())
        if not _comes(store, f"hello/{rank}", left):
            return {
                "alone": f"rank {rank} does not run gradwatch on this model, or joined more than {left:.0f} s late"
            }
        hello = json.loads(store.get(f"hello/{rank}"))
        if hello is None:
            return {"alone": f"rank {rank} has no rule that needs the other ranks"}
        hellos.append(hello)
    return {"hellos": hellos}


def _comes(store: Any, key: str, seconds: float) -> bool:
    """True if a key is there within so many seconds. Asked again and again: a `wait` in vain prints C++ warnings."""
    deadline, pause = time.monotonic() + seconds, FIRST_PAUSE
    while not store.check([key]):
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return True


def _await(store: Any) -> dict[str, Any]:
    """The verdict, or the proposal to go without one where rank 0 never came."""
    if not _comes(store, "verdict", MEET_SECONDS * 1.2):
        return _agree(store, {"alone": "rank 0 does not run gradwatch on this model"})
    found: dict[str, Any] = json.loads(store.get("verdict"))
    return found


def _agree(store: Any, proposal: Mapping[str, Any]) -> dict[str, Any]:
    """Agree on the first proposal that is written: every rank gets that one."""
    agreed: dict[str, Any] = json.loads(store.compare_set("verdict", "", json.dumps(proposal)))
    return agreed


class Group:
    """All ranks of a meeting, connected; `total` is their one collective.

    gloo over host memory, whatever the training uses: only a collective that can be given up may wait for
    other ranks inside the training (one of NCCL's would keep the device's stream for ever).
    """

    def __init__(self, meeting: Meeting) -> None:
        gloo = _c10d.ProcessGroupGloo
        timeout = timedelta(seconds=WAIT_SECONDS)
        options = gloo._Options()
        options._timeout, options._threads = timeout, 1
        options._devices = [gloo.create_default_device()]
        store = _c10d.PrefixStore("group", meeting.store)
        store.set_timeout(timeout)
        self._gloo: Any = gloo(store, meeting.rank, meeting.world, options)
        _GROUPS.add(self)

    def total(self, vector: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum of all ranks' vectors, the same bits on each. They must be equally long on all of them.

        Raises `AloneError` when a rank has left or stays away; the group is closed then.
        """
        return self.start(vector)()

    def start(self, vector: NDArray[np.float64]) -> Callable[[], NDArray[np.float64]]:
        """Begin what `total` does, in a thread of gloo's, without waiting: what is returned waits, and raises."""
        tensor = torch.from_numpy(vector.copy())
        with self._closed_on_failure():
            work = self._gloo.allreduce([tensor])

        def wait() -> NDArray[np.float64]:
            with self._closed_on_failure():
                work.wait()
            summed: NDArray[np.float64] = tensor.numpy()  # sync: a CPU tensor
            return summed

        return wait

    @contextlib.contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.close()
            said = str(error).split("] ", 1)[-1].splitlines()[0][:120]
            raise AloneError(f"a rank exited, failed or did not join in time: {said}") from error

    def close(self) -> None:
        """Drop the connections; the others' next collective raises at once."""
        self._gloo = None

    def outlast_process(self) -> None:
        """Never drop the connections: in a forked child that would wait for threads that its parent has, or abort."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))


_GROUPS: WeakSet[Group] = WeakSet()


def _after_fork_in_child() -> None:
    for group in _GROUPS:
        group.outlast_process()


os.register_at_fork(after_in_child=_after_fork_in_child)
