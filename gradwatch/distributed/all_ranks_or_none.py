"""A step after which all ranks do the same thing, or none of them: agreed through the store of the process group.

No collective, and no rank waits for another one in its training. Ranks that train together count their steps alike.
Rank 0 plans a step that lies ahead of all; every other rank is ready for it if that is still ahead when it reads of it.
The decision is written once, by compare-and-set: for it by rank 0 when all are ready, against it by any rank
that comes to that step before it knows of one. So all ranks read the same decision, whenever they read it.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from typing import Any

from gradwatch.distributed.process_group import prefix_store
from gradwatch.records.run_info import RunInfo

_FOR, _AGAINST = "for", "against"
_numbers = itertools.count()  # of these objects: ranks that run one script count alike


class CommonStep:
    """The part of one rank. `steps` are those that it has counted; one round is under way at a time.

    Raises whatever the store raises, of which the other end may be gone.
    """

    def __init__(self, run: RunInfo) -> None:
        self.rank, self.world = run.rank, run.world_size
        self._store = prefix_store(f"common-step/{run.attempt}/{next(_numbers)}")
        self._lock = threading.Lock()
        self._planned: tuple[str, int] | None = None  # the round, and its step
        self._decided: bool | None = None
        self.steps = 0
        self._began = time.monotonic()

    # -- the training thread -----------------------------------------------------------------------------

    def stepped(self) -> bool:
        """Count one more step; True if all ranks act after this one."""
        with self._lock:
            self.steps += 1
            if self._planned is None or self.steps < self._planned[1]:
                return False
            name, _ = self._planned
            decided, self._planned = self._decided, None
        return self._decide(name, _AGAINST) if decided is None else decided

    # -- other threads -----------------------------------------------------------------------------------

    def post(self, key: str, what: Any) -> None:
        """Tell the other ranks."""
        self._store.set(key, json.dumps(what))

    def read(self, key: str) -> Any:
        """Read what some rank has posted under this key; None where none has yet."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def read_all(self, key: str) -> list[Any] | None:
        """Read what each rank has posted under `key/RANK`; None until all have."""
        keys = [f"{key}/{rank}" for rank in range(self.world)]
        return [json.loads(self._store.get(each)) for each in keys] if self._store.check(keys) else None

    def ahead(self, counted: list[int], seconds: float) -> int:
        """A step that every rank, of which these are the steps so far, comes to in so many seconds at the earliest."""
        rate = self.steps / max(time.monotonic() - self._began, 1e-3)
        return max(counted) + 2 + int(rate * seconds)

    def plan(self, name: str, step: int) -> bool:
        """Be ready to act after this step; False if it has come already."""
        with self._lock:
            if self.steps >= step:
                return False
            self._planned, self._decided = (name, step), None
            return True

    def decide_for(self, name: str) -> bool:
        """Decide that all act, if none has decided against it; called by rank 0 once all are ready."""
        return self._decide(name, _FOR)

    def decide_against(self, name: str) -> None:
        """Decide that none acts."""
        self._decide(name, _AGAINST)

    def decision(self, name: str) -> bool | None:
        """The decision of this round; None while there is none."""
        if not self._store.check([name]):
            return None
        return self._know(name, self._store.get(name))

    def _decide(self, name: str, proposal: str) -> bool:
        return self._know(name, self._store.compare_set(name, "", proposal))

    def _know(self, name: str, decision: bytes) -> bool:
        acts = decision.decode() == _FOR
        with self._lock:
            if self._planned is not None and self._planned[0] == name:
                self._decided = acts
        return acts
