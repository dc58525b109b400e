"""Faults for `gradwatch selftest`, injected into the gradients of a script that `gradwatch run` has started.

They enter by tensor hooks, inside the backward and before anything reads a gradient, as real ones do. After each fault
weights, buffers and optimizer state are put back, so that the next one meets a healthy training.
"""

from __future__ import annotations

import atexit
import json
import os
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradwatch.launch.selftest_faults import FAULTS, RESULTS, VARIABLE, Fault, Plan
from gradwatch.runtime.atomic_files import write_whole
from gradwatch.taps.hook_ids import own_ids

if TYPE_CHECKING:
    from gradwatch.session.session import Session

BEFORE_NEXT = 4
"""Steps between the end of a fault and the next one, at least: until no rule is firing any more, at most MOST_QUIET."""
MOST_QUIET = 60
_METRICS_SECONDS = 5.0
_FIRINGS, _RULE = "gradwatch_rule_firings_total{", 'rule="'


@dataclass(slots=True)
class Result:
    """One fault: the step at which it began, the parameter ("" = all), and what it caused.

    `fired` and `actions` are counts of rules and actions since it began, `scraped` the rules whose counter in /metrics
    went up; None: this process serves none. `ended`: it is over; else the process ended meanwhile.
    """

    fault: str
    step: int
    parameter: str = ""
    fired: dict[str, int] = field(default_factory=dict)
    actions: dict[str, int] = field(default_factory=dict)
    scraped: list[str] | None = None
    ended: bool = False
    first_fired: int | None = None


def begin(session: Session) -> None:
    """Inject the faults of the environment's plan into this process; called once its watch has begun."""
    plan = Plan(**json.loads(os.environ[VARIABLE]))
    optimizers = session.optimizers()
    if optimizers:
        _Injection(session, plan, optimizers[0])


class _Injection:
    """Goes through the plan, step by step of one optimizer; ends the process after the last fault."""

    def __init__(self, session: Session, plan: Plan, optimizer: Optimizer) -> None:
        self._session, self._plan, self._optimizer = session, plan, optimizer
        self._faults = [fault for fault in FAULTS if fault.name in plan.faults]
        self._names = {
            id(param): name for model in session.models() for name, param in model.named_parameters()
        }
        self._params: list[Tensor] = [
            param for group in optimizer.param_groups for param in group["params"] if param.requires_grad
        ]
        self._chosen = self._middle_matrix()
        self._step = 0
        self._began: float | None = None
        self._due = 0
        self._active: Fault | None = None
        self._result: Result | None = None
        self._results: list[Result] = []
        self._before: Mapping[str, Any] = {}
        self._saved: SavedState | None = None
        with own_ids:
            for param in self._params:
                param.register_hook(self._hook(param))
            register_optimizer_step_post_hook(self._after_step)
        atexit.register(self._write)  # where the script ends before the plan does

    def _middle_matrix(self) -> Tensor:
        matrices = [param for param in self._params if param.ndim >= 2] or self._params
        return matrices[len(matrices) // 2]

    # -- in the backward -------------------------------------------------------------------------------------

    def _hook(self, param: Tensor) -> Any:
        chosen = param is self._chosen

        def changed(gradient: Tensor) -> Tensor | None:
            fault = self._active
            if fault is None or not (chosen or fault.name in ("spike", "rank")):
                return None
            return self._faulty(fault.name, gradient)

        return changed

    def _faulty(self, fault: str, gradient: Tensor) -> Tensor | None:
        if fault in ("nan", "inf"):
            wrong = gradient.clone()
            wrong.view(-1)[0] = torch.nan if fault == "nan" else torch.inf
            return wrong
        factor = {"spike": 1e4, "vanishing": 1e-9, "freeze": 0.0, "rank": 1e3}[fault]
        if fault == "rank" and self._session.run.rank != 1:
            return None
        return gradient * factor

    # -- after a step ----------------------------------------------------------------------------------------

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer is not self._optimizer:
            return
        if self._began is None:
            self._began = time.monotonic()
        self._step += 1
        if self._active is not None and self._result is not None:
            self._during(self._active, self._result)
        elif not self._faults or self._time_is_up():
            self._leave()
        elif self._step >= self._due and self._may_begin(self._faults[0]):
            self._inject(self._faults.pop(0))

    def _time_is_up(self) -> bool:
        """Never with ranks, which have to agree: there the command that started them looks at the clock."""
        if self._session.run.world_size > 1 or self._began is None:
            return False
        return time.monotonic() - self._began > self._plan.seconds

    def _may_begin(self, fault: Fault) -> bool:
        if self._step < fault.warmup * self._plan.warmup:
            return False
        quiet = not any(record.verdict.firing for record in self._session.records())
        return quiet or self._step >= self._due + MOST_QUIET

    def _inject(self, fault: Fault) -> None:
        if fault.name == "rank" and self._session.run.world_size < 2:
            return
        account = self._session.account()
        self._before = {
            "fired": dict(account.fired),
            "actions": dict(account.actions),
            "scraped": self._scraped(),
        }
        self._saved = SavedState(self._session, self._optimizer)
        named = "" if fault.name in ("spike", "rank") else self._names.get(id(self._chosen), "?")
        self._result = Result(fault.name, self._step, named)
        self._results.append(self._result)
        self._write()
        self._active = fault

    def _during(self, fault: Fault, result: Result) -> None:
        account = self._session.account()
        result.fired = _more(account.fired, self._before["fired"])
        result.actions = _more(account.actions, self._before["actions"])
        if result.fired and result.first_fired is None:
            result.first_fired = self._step
        lasted = self._step - result.step
        # Every rank goes on for as many steps; alone, until a rule has fired.
        fired = bool(result.fired) and self._session.run.world_size == 1
        if not fired and lasted < fault.steps * (self._plan.warmup if fault.steps > 3 else 1):
            return
        self._active = None
        if self._saved is not None:
            self._saved.restore()
            self._saved = None
        result.scraped = self._newly_scraped(result.fired)
        result.ended = True
        self._result = None
        self._due = self._step + BEFORE_NEXT
        self._write()

    def _newly_scraped(self, fired: Mapping[str, int]) -> list[str] | None:
        """The rules whose counter has gone up in /metrics, which is rendered a moment after the step."""
        before = self._before["scraped"]
        if before is None:
            return None
        deadline = time.monotonic() + _METRICS_SECONDS
        while True:
            now = self._scraped() or {}
            found = [rule for rule in fired if now.get(rule, 0.0) > before.get(rule, 0.0)]
            if len(found) == len(fired) or time.monotonic() > deadline:
                return found
            time.sleep(0.1)

    def _scraped(self) -> dict[str, float] | None:
        """The firings by rule that /metrics of this process shows; None without an endpoint, or an answer."""
        if self._session.url is None:
            return None
        with suppress(OSError, ValueError):
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(self._session.url, timeout=_METRICS_SECONDS) as answer:
                lines = answer.read().decode("utf-8", "replace").splitlines()
            found: dict[str, float] = {}
            for line in lines:
                if line.startswith(_FIRINGS):
                    rule = line.partition(_RULE)[2].partition('"')[0]
                    found[rule] = found.get(rule, 0.0) + float(line.rpartition(" ")[2])
            return found
        return None

    def _write(self, done: bool = False) -> None:
        account = self._session.account()
        seconds = 0.0 if self._began is None else time.monotonic() - self._began
        document = {
            "steps": self._step,
            "seconds": seconds,
            "done": done,
            "world_size": self._session.run.world_size,
            "no_data": dict(account.no_data),
            "results": [asdict(result) for result in self._results],
        }
        path = Path(self._plan.directory) / RESULTS.format(self._session.run.rank)
        write_whole(path, json.dumps(document).encode(), 0o600)

    def _leave(self) -> None:
        """End the process here: none of the script's code runs on what the faults have left, nothing is saved."""
        self._session.flush()
        self._write(done=True)
        os._exit(0)


def _more(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in now.items() if count > before.get(name, 0)}


class SavedState:
    """Copies, on the host, of the weights and buffers of a session's models and the state of an optimizer."""

    def __init__(self, session: Session, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        params = [param for group in optimizer.param_groups for param in group["params"]]
        buffers = [buffer for model in session.models() for buffer in model.buffers()]
        self._tensors = [(tensor, _copied(tensor)) for tensor in (*params, *buffers)]
        self._state = {
            param: {
                key: (value, _copied(value)) if isinstance(value, Tensor) else (None, value)
                for key, value in optimizer.state.get(param, {}).items()
            }
            for param in params
        }

    def restore(self) -> None:
        """Put everything back where it was."""
        with torch.no_grad():
            for tensor, copy in self._tensors:
                tensor.copy_(copy)
            for param, entries in self._state.items():
                now = self._optimizer.state.get(param)
                if now is None:
                    continue
                for key, (tensor, copy) in entries.items():
                    if tensor is None:
                        now[key] = copy
                    else:
                        tensor.copy_(copy)
                        now[key] = tensor


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)  # on a device there may be no room for a second model
