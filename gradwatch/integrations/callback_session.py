"""The watches of one callback: one per fit, the state carried from each to the next and to checkpoints."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import nn
from torch.optim import Optimizer

from gradwatch.session.watch import Watch, session_of
from gradwatch.session.watch_function import watch

if TYPE_CHECKING:
    import os

    from gradwatch.rules.rule_set import RuleSet
    from gradwatch.sinks import Sink


class Options(TypedDict, total=False):
    """Options that every integration passes on to `gradwatch.watch`, under the same names."""

    rules: str | os.PathLike[str] | RuleSet | None
    sinks: Sequence[Sink] | None
    run_dir: str | os.PathLike[str] | None
    listen: str | None
    run_id: str | None
    strict: bool


class Session:
    """Opens and closes the watches of a framework's callback; `gw` is the present or the last one.

    What it is asked during training never raises: a fault is counted by the watch it concerns.
    """

    def __init__(self, options: Options) -> None:
        unknown = sorted(options.keys() - Options.__annotations__.keys())
        if unknown:
            raise TypeError(f"unknown option {unknown[0]!r}; there are: {', '.join(Options.__annotations__)}")
        self.options = options
        self.gw: Watch | None = None
        self._open = False
        self._model: weakref.ref[nn.Module] | None = None
        self._loaded: Mapping[str, Any] = {}

    def __reduce__(self) -> tuple[type[Session], tuple[Options]]:
        return Session, (self.options,)  # a copy, or the callback of a spawned rank, watches for itself

    def open(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> Watch:
        """Watch a model; baselines go on where the checkpoint or the same model's last fit left off.

        Raises what `gradwatch.watch` raises: a wrong configuration stops the job before it trains.
        """
        self.close()
        same = self._model is not None and self._model() is model
        state = self._loaded or (self._state() if same else {})
        self.gw = gw = watch(model, list(optimizers), **self.options)
        self._model, self._open, self._loaded = weakref.ref(model), True, {}
        self.load(state)
        return gw

    def close(self) -> None:
        """End the present watch, if there is one. Idempotent."""
        if self.gw is not None:
            self.gw.close()
        self._open = False

    def about_to_clip(self) -> None:
        """Have the gradients read before the framework clips them."""
        if self.gw is not None:
            self.gw.about_to_clip()

    def state_dict(self) -> dict[str, Any]:
        """The state of the present or last watch, for a checkpoint: numbers, strings, lists and dicts."""
        if self.gw is not None:
            session_of(self.gw).take_state()
        return self._state()

    def _state(self) -> dict[str, Any]:
        if self.gw is None:
            return {}
        try:
            return session_of(self.gw).state_dict()
        except Exception as error:
            session_of(self.gw).failed("checkpoint", error)
            return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's state, now or, between two fits, at the start of the next.

        A state that cannot be used is a fault of the watch: counted, and baselines start afresh.
        """
        if not self._open or self.gw is None:
            self._loaded = dict(state)
        elif state:
            resume(self.gw, state)


def observe_number(gw: Watch, loss: Any) -> None:
    """`gw.observe(loss=loss)` where it is one number, a tensor of one element included."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        gw.observe(loss=loss.detach())
    elif isinstance(loss, (int, float)):
        gw.observe(loss=loss)


def resume(gw: Watch, state: Mapping[str, Any]) -> None:
    """`gw.load_state_dict(state)`, a fault in it counted instead of raised into the training."""
    try:
        gw.load_state_dict(state)
    except Exception as error:
        session_of(gw).failed("resume", error)
