"""The baselines of a run, kept in its folder for the job that is started again under the same run id.

`state-rank0.json` holds `Session.state_dict()` and, for every optimizer, the names and shapes of its parameters and the
number of steps that the optimizer itself had counted. The baselines are loaded if these fit. An optimizer that counts
no steps cannot tell a training that goes on from one that begins; one that has counted none is taken to begin. Of
several processes with the same rank, one does all this (`state_lock`).
"""

from __future__ import annotations

import json
import operator
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from gradwatch.checkpoint import health_tracker
from gradwatch.launch.state_lock import StateLock, command, of_another_command
from gradwatch.runtime.atomic_files import write_whole
from gradwatch.runtime.process_identity import prints
from gradwatch.runtime.standard_streams import stderr

if TYPE_CHECKING:
    from gradwatch.capture.optimizer_capture import OptimizerCapture
    from gradwatch.session.session import Session

EVERY_SECONDS = 60.0
SHARE = 200  # the time between two savings is at least so many times what one took
MAX_BYTES = 256 << 20
_MANY = 64  # optimizers met before those that are gone are forgotten
_shape: Callable[[Tensor], Sequence[int]] = operator.attrgetter("shape")


class _Known(NamedTuple):
    """An optimizer when its capture was at `step`; `counted` is the number of steps it had counted itself by then."""

    names: Sequence[str]
    shapes: Sequence[Sequence[int]]
    counted: int | None
    step: int


class Baselines:
    """Loads, saves and replaces the state of the session of `gradwatch run`."""

    def __init__(self, watch: Session) -> None:
        self._watch = watch
        self._state_lock = StateLock(watch.run)
        self._path = os.path.join(watch.run.directory, f"state-rank{watch.run.rank}.json")
        self._loaded: dict[str, Any] | None = None
        self._met: dict[int, weakref.ref[Optimizer]] = {}
        self._prune_at = _MANY
        # The optimizer of each capture; scripts let go of it before they end.
        self._known: dict[int, _Known] = {}
        self._due = time.monotonic() + EVERY_SECONDS
        self._failed = False
        self._said = False

    def before_step(self, optimizer: Optimizer) -> None:
        """Load what was saved of an optimizer, before its first step. Never raises."""
        ref = self._met.get(id(optimizer))
        if ref is not None and ref() is optimizer:
            return
        self._met[id(optimizer)] = weakref.ref(optimizer)
        if len(self._met) > self._prune_at:
            self._met = {key: ref for key, ref in self._met.items() if ref() is not None}
            self._prune_at = max(_MANY, 2 * len(self._met))
        try:
            captured = self._watch.capture_of(optimizer)
            if captured is not None:
                if self._state_lock.keeps():
                    if self._loaded is None or self._loaded.get("lanes"):
                        self._take_up(optimizer, captured)
                elif self._state_lock.refusal and _counted(optimizer):
                    self._say(f"this process neither loads nor saves baselines: {self._state_lock.refusal}")
                self._know(optimizer, captured)
        except Exception as error:
            self._watch.health.report("state", error)

    def after_step(self) -> None:
        """Save, if the last time was long enough ago. Never raises."""
        if time.monotonic() >= self._due:
            self.save()

    def save(self) -> None:
        """Write the state beside the journal, atomically; a failure is counted, and training goes on."""
        watch = self._watch
        started = time.monotonic()
        try:
            if watch.idle() or not os.path.isdir(watch.run.directory) or not self._state_lock.keeps():
                return
            captures = {
                str(captured.index): entry
                for captured in watch.captures()
                if (entry := self._entry(captured)) is not None
            }
            state = {"version": 1, "command": command(), "lanes": captures, "state": watch.state_dict()}
            write_whole(self._path, json.dumps(state) + "\n")
        except OSError as error:
            self._say(f"baselines are not saved for a job that is started again: {error}")
        except Exception as error:
            if not self._failed:
                self._failed = True
                watch.health.report("state", error)
        now = time.monotonic()
        self._due = now + max(EVERY_SECONDS, SHARE * (now - started))

    def go_on(self, watch: Session) -> None:
        """Save the state of another session from now on: it has taken the place of the one before, with its state."""
        self._watch = watch
        self._known.clear()
        path = os.path.join(watch.run.directory, f"state-rank{watch.run.rank}.json")
        if path != self._path:  # other rules may name another folder
            self._state_lock.release()
            self._state_lock, self._path = StateLock(watch.run), path

    def leave_to_parent(self) -> None:
        """Save nothing any more: the process is a forked child, and the state is its parent's."""
        self._state_lock.release()

    def _take_up(self, optimizer: Optimizer, captured: OptimizerCapture) -> None:
        if self._loaded is None:
            self._loaded = _load(self._path)
        saved = self._loaded.get("lanes", {}).pop(str(captured.index), None)
        if saved is None:
            if taken := _counted(optimizer):
                self._say(
                    f"rules learn anew: the optimizer has taken {taken} steps, and no baselines of it are saved in "
                    f"{os.path.dirname(self._path)} (the --dir and --run-id of an earlier run name its folder)"
                )
            return
        refusal = _refusal(saved, captured, optimizer)
        if of_another_command(self._loaded.get("command")):
            refusal = "another command of this run saved them" if _counted(optimizer) else ""
        elif not refusal:
            state, counted, now = self._loaded["state"], saved["counted"], _counted(optimizer)
            behind = 0 if counted is None or now is None else max(0, counted - now)
            learned = _rolled_back(state["lanes"][str(captured.index)], behind)
            self._watch.load_state_dict({**state, "lanes": {str(captured.index): learned}})
            if behind:
                self._say(
                    f"the baselines were saved at step {counted} and the optimizer has taken {now} steps: steps are "
                    f"counted on from {counted}"
                )
        if refusal:
            self._say(f"baselines saved in the folder of the run are not used: {refusal}")

    def _say(self, sentence: str) -> None:
        if prints() and not self._said:
            self._said = True
            stderr.say(f"gradwatch: {sentence}")

    def _know(self, optimizer: Optimizer, captured: OptimizerCapture) -> None:
        shapes = list(map(_shape, captured.params))
        self._known[captured.index] = _Known(captured.sites.names, shapes, _counted(optimizer), captured.step)

    def _entry(self, captured: OptimizerCapture) -> dict[str, Any] | None:
        """The entry saved for an optimizer beside its state; of one that is gone, with the steps watched since."""
        optimizer = None if captured.optimizer is None else captured.optimizer()
        if optimizer is not None:
            self._know(optimizer, captured)
        known = self._known.get(captured.index)
        if known is None:
            return None
        counted = None if known.counted is None else known.counted + captured.step - known.step
        return {"names": list(known.names), "shapes": list(map(list, known.shapes)), "counted": counted}


def _rolled_back(learned: Mapping[str, Any], behind: int) -> Mapping[str, Any]:
    """The state of an optimizer that has taken `behind` steps less than when it was saved.

    What later steps did to the weights is not in these. A step that was skipped is not counted by the optimizer, so its
    last one was this or an earlier one.
    """
    if not behind or not learned.get("checkpoint"):
        return learned
    last = int(learned["step"]) - 1 - behind
    return {**learned, "checkpoint": health_tracker.as_of(learned["checkpoint"], last)}


def _refusal(saved: Mapping[str, Any], captured: OptimizerCapture, optimizer: Optimizer) -> str:
    """The reason why what was saved is not of this training; "" where it is."""
    if list(saved["names"]) != list(captured.sites.names):
        return "the parameters have other names"
    if saved["shapes"] != _shapes(captured):
        return "the parameters have other shapes"
    counted, now = saved["counted"], _counted(optimizer)
    if counted is None or now is None:
        return (
            f"{type(optimizer).__name__} has no step count, so gradwatch cannot tell whether this training was "
            "resumed"
        )
    if now == 0:
        return "the optimizer has taken no step, so this training was not resumed"
    if now > counted:
        return f"the optimizer has taken {now} steps, and the baselines were saved at step {counted}"
    return ""


def _shapes(captured: OptimizerCapture) -> list[list[int]]:
    return [list(param.shape) for param in captured.params]


def _counted(optimizer: Optimizer) -> int | None:
    """The steps that the optimizer says it has taken: 0 where it has no state yet, None where it counts none."""
    if not optimizer.state:
        return None if type(optimizer).__name__ == "SGD" else 0  # plain SGD never has one
    counts = [state.get("step") for state in optimizer.state.values()]
    known = [int(count) for count in counts if count is not None]
    return max(known) if known else None


def _load(path: str) -> dict[str, Any]:
    """Load the saved state; empty where there is no such file, or none of this version."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(path, flags), encoding="utf-8") as file:
            found = json.loads(file.read(MAX_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        stderr.say(f"gradwatch: the state saved by the previous run cannot be read: {error}")
        return {}
    whole = isinstance(found, dict) and found.get("version") == 1
    return found if whole and isinstance(found.get("lanes"), dict) else {}
