"""Which checkpoint is one to go back to: judged at every step, and written beside the run for whoever saves.

A checkpoint taken now is *healthy* unless
- a rule of severity critical is firing;
- a gradient of the last step was not finite, even if that step was skipped: the next one is looked at first;
- training was stopped by a rule;
- a fault of gradwatch's own kept the last step from being judged, or has paused the watch;
- running statistics of a normalisation layer are not finite: a skipped step does not take them back;
- some earlier step gave a non-finite gradient to the optimizer (nobody skipped it, zeroed it, or rejected it as a
  GradScaler does). Weights or optimizer state may then hold NaN for ever, in a row of an embedding that no later batch
  touches, so this holds until a state saved before it is loaded (`Watch.load_state_dict`).
A step that the GradScaler rejected says nothing. Parameters that nobody can measure (`Watch.coverage` below 1) are not
vouched for.

    if gw.healthy:                                 # or, from another process: read_tag(run_directory).healthy
        torch.save({"model": model.state_dict(), "gradwatch": gw.state_dict()}, "last-good.pt")
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

from gradwatch.snapshot import CheckpointHealth, Decision, Snapshot, Verdict

FORMAT = 1
_NAME = re.compile(r"checkpoint-health-rank\d+\.json")


class Vitals:
    """Follows one optimizer's steps; `critical` are the rules whose firing makes a checkpoint unfit."""

    __slots__ = ("critical", "now", "poisoned_at", "spoilt")

    def __init__(self, critical: frozenset[str]) -> None:
        self.critical = critical
        self.now = CheckpointHealth()
        self.poisoned_at: int | None = None
        self.spoilt: tuple[
            str, ...
        ] = ()  # running statistics that are not finite; whoever looks at them sets it

    def after(self, snapshot: Snapshot, verdict: Verdict, decision: Decision) -> CheckpointHealth:
        """The health of a checkpoint saved after this step, which is also kept as `now`."""
        if snapshot.scalars.get("scaler_skip"):
            return self.now
        if (
            self.poisoned_at is None
            and not (verdict.firing or decision.stop)
            and isfinite(snapshot.total_norm)
            and not self.spoilt
        ):
            self.now = CheckpointHealth(True, snapshot.step)  # what follows, on a healthy step
            return self.now
        broken = snapshot.nonfinite()
        passed = broken if decision.zero is None else broken & ~decision.zero
        if passed.any() and not (decision.skip or decision.stop):
            self.poisoned_at = snapshot.step if self.poisoned_at is None else self.poisoned_at
        reasons = [f"rule {rule} is firing" for rule in sorted(self.critical.intersection(verdict.firing))]
        if broken.any():
            reasons.append(f"a gradient was not finite at step {snapshot.step}")
        if decision.stop:
            reasons.append("training was stopped")
        if self.spoilt:
            reasons.append(f"running statistics are not finite: {', '.join(self.spoilt[:3])}")
        if self.poisoned_at is not None:
            reasons.append(f"a non-finite gradient reached the optimizer at step {self.poisoned_at}")
        last = self.now.last_healthy_step if reasons else snapshot.step
        self.now = CheckpointHealth(not reasons, last, tuple(reasons))
        return self.now

    def unjudged(self, step: int) -> None:
        """A fault of ours kept this step from being judged: nobody can say that it was a healthy one."""
        self.now = CheckpointHealth(False, self.now.last_healthy_step, (f"step {step} could not be judged",))

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint remembers of it, JSON-safe."""
        return {"last_healthy_step": self.now.last_healthy_step, "poisoned_at": self.poisoned_at}

    def load(self, saved: Mapping[str, Any] | None) -> None:
        """Go on from `to_dict()`; None (an earlier version wrote it) starts afresh."""
        saved = saved or {}
        last, poisoned = saved.get("last_healthy_step"), saved.get("poisoned_at")
        self.poisoned_at = None if poisoned is None else int(poisoned)
        why = () if poisoned is None else (f"a non-finite gradient reached the optimizer at step {poisoned}",)
        self.now = CheckpointHealth(not why, None if last is None else int(last), why)


def joined(parts: Iterable[CheckpointHealth]) -> CheckpointHealth:
    """The health of several optimizers or ranks together: that of the worst, at the step all had reached."""
    found = list(parts)
    steps = [one.last_healthy_step for one in found]
    known = [step for step in steps if step is not None]
    return CheckpointHealth(
        all(one.healthy for one in found),
        min(known) if known and len(known) == len(steps) else None,
        tuple(dict.fromkeys(reason for one in found for reason in one.reasons)),
    )


def tag_name(rank: int) -> str:
    """The file of one rank, in the run's own folder."""
    return f"checkpoint-health-rank{rank}.json"


def write_tag(directory: str | os.PathLike[str], rank: int, step: int, health: CheckpointHealth) -> None:
    """Replace this rank's tag in one piece: a reader sees the old one or the new one. Raises `OSError`."""
    # As strings: pathlib interns each part of a path, and CPython's table of interned strings keeps a place for every
    # one that is gone until it doubles, to 8 MB: a file written each second would see to that.
    name = tag_name(rank)
    path = os.path.join(directory, name)
    fresh = os.path.join(directory, f"{name.removesuffix('.json')}.{os.getpid()}.new")
    document = {
        "format": FORMAT,
        "rank": rank,
        "step": step,
        "healthy": health.healthy,
        "last_healthy_step": health.last_healthy_step,
        "reasons": list(health.reasons),
    }
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(fresh, flags, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(document, file, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(fresh)
        raise


def read_tag(directory: str | os.PathLike[str]) -> CheckpointHealth:
    """What the tags of all ranks in a run's folder say together; for savers and scripts outside the training.

    The journal sink writes them in its own thread: within a second or so of a change, and of a change for the worse
    together with its incident. Raises `FileNotFoundError` where no rank wrote one, `ValueError` for a file that is
    none of ours.
    """
    paths = sorted(path for path in Path(directory).iterdir() if _NAME.fullmatch(path.name))
    if not paths:
        raise FileNotFoundError(f"no checkpoint-health-rank*.json in {directory}")
    return joined(map(_read, paths))


def _read(path: Path) -> CheckpointHealth:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        last = found["last_healthy_step"]
        if found["format"] != FORMAT or not isinstance(found["healthy"], bool):
            raise ValueError(f"format {found['format']!r}")
        return CheckpointHealth(
            found["healthy"], None if last is None else int(last), tuple(map(str, found["reasons"]))
        )
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no checkpoint tag of this version: {error}") from error
