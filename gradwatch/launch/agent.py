"""The part of `gradwatch run` that lives in the script's process, armed by the import of torch.

Until an optimizer steps it is one entry in a dict: DataLoader workers, compile workers and git helpers start
no thread, open no socket and print nothing. At the first step of an optimizer that nobody watches it finds
the models and calls `gradwatch.watch`, exactly as the script could have done itself. A loop that clips is met
a moment earlier, at its first `clip_grad_norm_`: after it the first step's norm could not be known any more.
What the forward of that step was like is held from the making of the optimizer on (`first_forwards`).
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from gradwatch.errors import GradwatchError, UnmatchedRulesError
from gradwatch.hooks import clipping, step_hooks
from gradwatch.interruption import not_ours
from gradwatch.launch import ending
from gradwatch.launch.first_forwards import FirstForwards

if TYPE_CHECKING:
    from gradwatch.launch.discovery import LooseParameters
    from gradwatch.watching import Watch

_seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_watches: list[Watch] = []
_stand_ins: list[LooseParameters] = []
_forwards: list[FirstForwards] = []
_armed = False
_attaching = threading.RLock()


def _unlocked() -> None:
    """In a forked child: the thread that attached in the parent is not here to unlock."""
    global _attaching
    _attaching = threading.RLock()


os.register_at_fork(after_in_child=_unlocked)


def arm() -> None:
    """Start waiting for the first optimizer step; called once torch has been imported. Idempotent."""
    global _armed
    if not _armed:
        _armed = True
        ending.arm()
        step_hooks.listen(FirstStep())
        FirstClip()
        _forwards.append(FirstForwards(lambda: _attaching))


class FirstStep:
    """Listens to every optimizer step of the process and attaches at an optimizer's first one, once."""

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Attach; never raises into the script unless `--strict` asks for that."""
        _attach_once(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """Nothing: the watch, once attached, listens itself."""


class FirstClip:
    """Listens for torch's gradient clipping until an optimizer with gradients was found, then never again."""

    def __init__(self) -> None:
        self._tries = 4  # two clips: a look at all objects costs up to 0.2 s, and this may be no training
        self._ignore = clipping.listen(self.about_to_clip)

    def about_to_clip(self, clip: object = None) -> None:
        """Attach, and have the gradients read before they are clipped; raises only with `--strict`."""
        from gradwatch.launch.discovery import stepping

        self._tries -= 1
        found = [optimizer for optimizer in stepping() if optimizer not in _seen]
        if found or _seen or not self._tries:
            self._ignore()
        for optimizer in found:
            watch = _attach_once(optimizer)
            if watch is not None:
                watch.about_to_clip()


def _attach_once(optimizer: Optimizer) -> Watch | None:
    """`attach`, the first time this optimizer is met; a failure costs the script nothing but a line.

    Threads that train models of their own come here together: one attaches, the others wait, so that there is one
    watch and no step is met by half of one.
    """
    with _attaching:
        return _attached(optimizer)


def _attached(optimizer: Optimizer) -> Watch | None:
    if optimizer in _seen:
        return None
    _seen.add(optimizer)
    try:
        return attach(optimizer)
    except UnmatchedRulesError as error:  # only with --strict-rules: no step is taken
        print(f"gradwatch: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    except Exception as error:
        if not_ours(error) or os.environ.get("GRADWATCH_STRICT", "0") not in ("", "0"):
            raise
        _say_not_watching(error)
        return None
    finally:
        for forwards in _forwards:
            forwards.close(optimizer)


def attach(optimizer: Optimizer) -> Watch | None:
    """Watch the models that `optimizer` trains; None where a live Watch covers it already."""
    # Here, not at the top: pydantic, structlog and the sinks are for processes that train. And ruamel.yaml
    # installs warning filters when imported: the script keeps its own.
    with warnings.catch_warnings():
        import gradwatch
        from gradwatch.attach import covers
        from gradwatch.launch.discovery import LooseParameters, discover

    if covers(optimizer):
        return None
    models, optimizers = discover(optimizer, covers)
    _seen.update(optimizers)
    # Nobody else holds a stand-in, and a Watch holds models weakly.
    _stand_ins.extend(model for model in models if isinstance(model, LooseParameters))
    running = [watch for watch in _watches if watch.run.pid == os.getpid() and watch.models()]
    if running:  # one run, one port and one journal per process, however many models it trains
        running[-1].add(models)
        _hand_over(running[-1])
        return running[-1]
    watch = gradwatch.watch(models, optimizers, origin="launcher")
    if not _watches:
        atexit.register(close_all, os.getpid())
    _watches.append(watch)
    _hand_over(watch)
    _greet(watch, models)
    return watch


def _hand_over(watch: Watch) -> None:
    for forwards in _forwards:
        forwards.handed_over(watch)


def close_all(pid: int) -> None:
    """At exit of the process that attached (a forked child must not close its parent's files)."""
    if os.getpid() == pid:
        from gradwatch.watching import conclude_all

        conclude_all()
        while _watches:
            _watches.pop().close()


def _greet(watch: Watch, models: list[torch.nn.Module]) -> None:
    """One line for a person at a terminal; nothing into a pipe or a log file, nothing from other ranks."""
    if watch.run.rank != 0 or not _on_terminal():
        return
    names = ", ".join(type(model).__name__ for model in models[:3]) + (", …" if len(models) > 3 else "")
    count = sum(1 for model in models for _ in model.parameters())
    where = " · ".join(part for part in (watch.url, os.path.relpath(watch.run.directory)) if part)
    print(f"gradwatch: watching {count} parameters of {names} · {where}", file=sys.stderr, flush=True)


def _say_not_watching(error: Exception) -> None:
    """One line: the script goes on unwatched, and the one who started it should know why."""
    kind = "" if isinstance(error, GradwatchError) else f"{type(error).__name__}: "
    ending.not_watched(f"the watch failed to start: {kind}{error}")
    print(f"gradwatch: not watching this run: {kind}{error}", file=sys.stderr, flush=True)


def _on_terminal() -> bool:
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # closed by the script
        return False
