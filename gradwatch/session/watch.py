"""A live watch, as its user sees it: what `gradwatch.watch` returns."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from gradwatch.account import NOTHING_TAKEN, Account, Ending, Taken, merged
from gradwatch.account.ending import ended_by, how_it_ends, printed_at_exit
from gradwatch.capture.optimizer import Lane
from gradwatch.errors import AttachError
from gradwatch.localise.hold.pre_attach import Early
from gradwatch.records.snapshot import CheckpointHealth
from gradwatch.runtime.numbers import json_number
from gradwatch.runtime.process import here
from gradwatch.session.lifetimes import Lifetimes
from gradwatch.session.session import Loop
from gradwatch.session.settings import Settings, quiet_asked, told_by
from gradwatch.sinks import Sink
from gradwatch.taps.process_totals import TOTALS, count_backwards, settle

T = TypeVar("T")
PAUSED = "watching was paused {} × after internal errors"

_live: Lifetimes[Watch] = Lifetimes()
_concluded: list[Account] = []  # of the watches closed so far, put together in one


def account_of_process() -> Account:
    """What this process did, beside what all its watches, closed or not, have seen of it."""
    here_now = [one for one in _live.all() if one.run.pid == here[0]]
    found = [*_concluded, *(one.account() for one in here_now if not one._concluding)]
    return merged(found, TOTALS.taken()) if found else Account(TOTALS.taken(), told_by=told_by())


def _forget_accounts() -> None:
    """In a forked child: what the parent watched is told there."""
    _concluded.clear()


os.register_at_fork(after_in_child=_forget_accounts)


def live_watches() -> list[Watch]:
    """Every Watch of this process that has not been closed."""
    _live.close_orphans()
    return list(_live.all())


class Watch(Loop):
    """A live watch; see `watch`. Attributes: `run` (identity), `health` (our own faults), `ruleset`."""

    _ended: Ending = ""
    _before: Taken | None = None  # None: nothing was ever attached
    _steps_elsewhere = 0
    _concluding = False
    _final: Account | None = None  # what it came to, once it is closed
    _last_state: Mapping[str, Any] = {"version": 1, "lanes": {}}

    def _attach(
        self,
        models: list[nn.Module],
        optimizers: list[Optimizer],
        settings: Settings,
        sinks: Sequence[Sink] | None,
    ) -> None:
        super()._attach(models, optimizers, settings, sinks)
        # A launcher's watch answers for all that the process does, any other one from here on.
        self._before = NOTHING_TAKEN if self.origin == "launcher" else TOTALS.taken()
        self._steps_elsewhere = self._elsewhere()
        self.health.counts(lambda: asdict(TOTALS.taken()), self._unfed)
        _live.close_orphans()
        _live.add(self)
        self._uncount = (
            count_backwards()
        )  # after: the backward that finds the models gone is none of this watch's
        self._containers: list[nn.Module] = []
        self._open = list(self._sinks)
        _at_exit()
        self._keep_containers(models)
        self._bind_early()

    # -- for users ---------------------------------------------------------------------------------------

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: object = None, *exc_info: object) -> None:
        self._ended = ended_by(kind)
        self.close()

    def knows(self, identity: int) -> bool:
        """Whether the parameter with this `id()` is watched here."""
        return not self._closed and self._capture.covers_id(identity)

    @property
    def backwards(self) -> int:
        """How many backwards have reached a parameter that is watched here."""
        return 0 if self._before is None else self._capture.backwards

    def let_go_of_dead(self) -> None:
        """Free the parameters of optimizers and models that are gone, before the next step would."""
        if self._closed or not self._boundary.is_here():
            return
        if self.orphaned():
            self._capture.release()
        else:
            self._capture.let_go_of_dead()

    def orphaned(self) -> bool:
        """Whether all models are gone that it was to watch; `gradwatch run` watches what comes, too."""
        return self.origin != "launcher" and not self._closed and self._capture.childless()

    def observe(self, **scalars: float | torch.Tensor) -> None:
        """Give one-per-step values to the rules, e.g. `observe(accuracy=0.9)`; changes and raises nothing.

        The loss needs no call: it is the sum of the values that the step's backwards started from, with a loss scale
        taken out. `observe(loss=…)` replaces it for that step: for a loop whose backward starts from a tensor of
        several elements, or from another number than the one to be judged.

        A name of something that gradwatch measures itself (`lr`, `loss_scale`, `scaler_skip`, `norm` …) is not used,
        which the log says once.

        Seen by the next `optimizer.step()` of every watched optimizer. A tensor is detached; one on a device
        is read without waiting when the step is judged.
        """
        if self._closed:
            return
        for name, value in scalars.items():
            try:
                self._judging.observe(name, value)
            except AttachError as error:  # the value is not used
                self.health.notice("observe", str(error))
            except Exception as error:
                self.failed("observe", error)

    def batch(self, indices: Iterable[int] | torch.Tensor) -> None:
        """Tell which samples of the dataset make the forward calls that follow; changes and raises nothing.

        Positions in the dataset (or other numbers that find a sample), for the cause of an incident and its bundle: no
        DataLoader can be asked which samples it has just given. Have the dataset return them with the sample:

            for indices, x, y in loader:
                gw.batch(indices)

        Holds until the next `optimizer.step()`, or until it is told again (per micro-batch). Do not write into
        `indices` before the step is taken; they are read only if something goes wrong. Without them a batch is known
        by its hash (`gradwatch.batch_hash`).
        """
        if self._closed or self._causes is None:
            return
        try:
            self._causes.tell(indices)
        except Exception as error:
            self.failed("localise", error)

    def step(self, closure: Callable[[], T]) -> T:
        """Run `closure`, which computes the loss and its gradients, then step every watched optimizer; its result.

        For a rule that orders `localise` this is the exact path: should the gradients not be finite, the closure
        is run once more, loss function and all, with the generators and buffers it began with, and without a
        trace on the models. So it must be fit to run twice on the same data: fetch the batch outside it.

            loss = gw.step(lambda: compute_and_backward(batch))

        Raises AttachError where no optimizer is known yet: name it at `gradwatch.watch(model, optimizer)`.
        """
        optimizers = self._optimizers()
        if not optimizers:
            raise AttachError("step() needs the optimizer: name it at gradwatch.watch(model, optimizer)")
        around = contextlib.nullcontext() if self._causes is None else self._causes.closure(closure)
        with around:
            result = closure()
            for optimizer in optimizers:
                optimizer.step()
        return result

    def _optimizers(self) -> list[Optimizer]:
        """Those named at attach, in that order, then those adopted since."""
        lanes = [] if self._closed else self._capture.lanes
        refs = [*self._given, *(lane.optimizer for lane in lanes if lane.optimizer is not None)]
        found = {id(one): one for ref in refs if (one := ref()) is not None}
        return list(found.values())

    def about_to_clip(self) -> None:
        """Have the gradients read now, before code of your own clips them; changes and raises nothing.

        torch's `clip_grad_*` functions do this by themselves. Other code needs it for the window of an
        accumulating loop that ends early: without it that step is flagged provisional, its norm read too late.
        """
        if not self._closed:
            self._before_clip.read()

    @property
    def url(self) -> str | None:
        """Where /metrics is served, None without an endpoint."""
        for breaker in self._sinks:
            address = getattr(breaker.sink, "url", None)
            if address:
                return str(address)
        return None

    @property
    def coverage(self) -> float:
        """Parameters that can be measured over parameters that want a gradient, 0..1."""
        return 0.0 if self._closed else self._capture.count_coverage()

    @property
    def healthy(self) -> bool:
        """Whether a checkpoint saved now is one to go back to; see `gradwatch.checkpoint` for what that means.

        Looks at the weights, at the price of about one read of a step's gradients; waits for a device. Without a
        collective: any rank may ask alone, and answers for what it holds of sharded weights. What cannot be known is
        False; `status()["unhealthy_because"]` says why. In another thread than the one that trains: as of the last
        step judged. After `close()`: as it was then.
        """
        return self._checkpoint().healthy

    def _checkpoint(self) -> CheckpointHealth:
        if self._closed:
            return self._judging.checkpoint()
        self._catch_up()
        found = self._judging.look()
        if self._pausing():
            why = (*found.reasons, "watching is paused after faults of gradwatch's own")
            return replace(found, healthy=False, reasons=why)
        return found

    @property
    def last_healthy_step(self) -> int | None:
        """The last optimizer step after which `healthy` was true (the earliest of several optimizers'); None = none."""
        return self._checkpoint().last_healthy_step

    def inactive(self) -> dict[str, str]:
        """Why a rule (by id) or a group (`group:NAME`) of the rule file judges nothing of the model as it is now.

        Those with `optional: true` are not listed. A reason that begins with "not armed: " is of a rule that judges,
        but whose actions `gradwatch run` has switched off since they cannot be carried out here; or of a place of the
        rule file's clip (`clip:total`, `clip:groups.NAME`), or its taps (`modules:TAP`).
        """
        return self.health.inactive()

    def status(self) -> dict[str, Any]:
        """The present state, JSON-safe: run, steps, what is firing, our own errors."""
        checkpoint = self._checkpoint()
        records = self._judging.records()
        return {
            "run_id": self.run.run_id,
            "directory": self.run.directory,
            "url": self.url,
            "active": not self._closed,
            "steps": sum(record.snapshot.step + 1 for record in records),
            "total_norm": [json_number(record.snapshot.total_norm) for record in records],
            "inactive": self.inactive(),
            "firing": sorted({rule for record in records for rule in record.verdict.firing}),
            "coverage": self.coverage,
            "observed_only": []
            if self._closed
            else [one.index for one in self._capture.lanes if one.without_optimizer],
            "healthy": checkpoint.healthy,
            "unhealthy_because": list(checkpoint.reasons),
            "account": self.account().to_dict(),
            "last_healthy_step": checkpoint.last_healthy_step,
            "internal_errors": self.health.errors(),
            "components_up": self.health.up(),
        }

    def account(self) -> Account:
        """What the process did since the attach, beside what was watched of it; see `gradwatch.account`.

        After `close()`: as it was then.
        """
        if self._before is None:
            return Account()
        if self._final is not None:
            return self._final
        self._catch_up()
        totals, courses, boundary = self._publishing.totals, self._courses, self._boundary
        after = TOTALS.taken()
        waiting = courses.warming_up() if totals.judged else {}
        return Account(
            taken=after.since(self._before, self._elsewhere() - self._steps_elsewhere),
            before=self._before,
            after=after,
            watched=totals.watched(
                boundary.steps, self.backwards, boundary.optimizers.count, courses.most_parameters
            ),
            ended="stopped" if totals.stopped else self._ended,
            fired=dict(totals.fired),
            actions=dict(totals.actions),
            inactive=self.health.inactive(),
            no_data={**waiting, **self._unfed()},
            rules=len(self.run.rules),
            reasons=(PAUSED.format(self.pauses),) if self.pauses else (),
            directory=self.run.directory if os.path.isdir(self.run.directory) else "",
            rank=self.run.rank,
            told_by=self.run.told_by,
        )

    def _unfed(self) -> dict[str, str]:
        """Why a rule has had no data so far; also asked by the endpoint's thread."""
        totals = self._publishing.totals
        return totals.unfed.reasons() if totals.judged else {}

    def _elsewhere(self) -> int:
        """Optimizer steps that other watches of this process have watched."""
        others = (one._boundary.steps for one in _live.all() if one is not self and not one._concluding)
        return sum(others) + sum(one.watched.steps for one in _concluded)

    def add(self, models: Iterable[nn.Module]) -> None:
        """Watch further models in the same run; their optimizers are adopted at their first step."""
        added = list(models)
        self._capture.add_models(added)
        if self._causes is not None:
            self._causes.add(added)
        self._keep_containers(added)

    def join(
        self,
        models: Iterable[nn.Module],
        optimizers: Iterable[Optimizer],
        loose: Iterable[tuple[str, nn.Parameter]] = (),
    ) -> None:
        """Watch further optimizers, from the next backward on; `models` name their parameters, all but the `loose`."""
        mark = self._capture.spent.begin()
        known = {id(model) for model in self.models()}
        if added := [model for model in models if id(model) not in known]:
            self.add(added)
        self._capture.join(optimizers, loose)
        self._wanted += map(weakref.ref, optimizers)
        self._capture.spent.end(mark)

    def lanes(self) -> list[Lane]:
        """What is known of every optimizer watched, those that are gone included; for launchers."""
        return [] if self._closed else list(self._capture.lanes)

    def lane_of(self, optimizer: Optimizer) -> Lane | None:
        """What is known of this optimizer, None where it is not watched yet; for launchers."""
        return None if self._closed else self._capture.lane_of(optimizer)

    def inherit(self, early: Early, joining: Iterable[nn.Module] = ()) -> None:
        """Localise this step too, by calls held before its models were watched, or `join`; for launchers."""
        if self._causes is not None and not self._closed:
            self._causes.inherit(early, joining)

    def _keep_containers(self, models: Iterable[nn.Module]) -> None:
        # One may have been made for the call, and would be gone after it, and the Watch with it.
        self._containers += [one for one in models if isinstance(one, nn.ModuleList | nn.ModuleDict)]

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until everything seen so far is where it belongs (journal on disk); False if it is not."""
        if self._closed:
            return True
        self._catch_up()
        deadline = time.monotonic() + timeout
        done = [sink.flush(max(0.0, deadline - time.monotonic())) for sink in self._sinks]
        return all(done)

    def state_dict(self) -> dict[str, Any]:
        """Baselines, streaks and step counts, to be saved beside the model's checkpoint."""
        if self._closed:
            return dict(self._last_state)
        self._catch_up()
        lanes = self._courses.saved(self._capture.lanes)
        return {"version": 1, "lanes": lanes, "weights": self.weights.to_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict()`; parameters that are new start afresh, by name."""
        if state.get("version") != 1:
            raise AttachError(
                f"this state was saved by another version: {state.get('version')!r}, expected 1"
            )
        self._catch_up()
        self._courses.load(state["lanes"], [] if self._closed else self._capture.lanes)
        self.weights.load(state.get("weights"))

    def close(self) -> None:
        """Remove every hook, flush and close every sink; model and optimizer are as found. Idempotent."""
        if self._closed:
            return
        if os.getpid() != self.run.pid:  # forked: what is open is the parent's
            self._sinks.clear()
        try:
            self._last_state = self.state_dict()
            self._checkpoint()
        except Exception as error:  # a watch that cannot tell its state must still let go
            self.health.report("close", error)
        self._conclude()
        taps = [self._stages, self._taps, self._flat, self._causes]
        parts = [self._ranks, self._before_clip, self._boundary, *taps, self._courses, self._capture]
        for part in parts:
            try:
                if part is not None:
                    part.close()
            except Exception as error:  # the others must be given back all the same
                self.health.report("close", error)
        self._uncount()
        self._closed, self._serving = True, 0
        self._containers.clear()
        self._close_sinks()
        _live.discard(self)

    def _conclude(self) -> None:
        """Tell the sinks what this watch comes to; once."""
        if self._concluding or self.run.pid != here[0]:  # forked: the account is the parent's
            return
        self._concluding = True
        try:
            account = self.account()
        except Exception as error:
            self.health.report("close", error)
            return
        self._final = account
        _concluded[:] = [merged([*_concluded, account])]
        quiet = not account.told or printed_at_exit[0] or quiet_asked()
        for sink in self._sinks:
            if not (quiet and sink.name == "log"):
                sink.conclude(account)

    def _close_sinks(self) -> None:
        """At `close` or at exit, once; never in a forked child, where they are the parent's."""
        while self._open and os.getpid() == self.run.pid:
            self._open.pop(0).close()


@functools.cache
def _at_exit() -> None:
    atexit.register(_process_ends)


def _process_ends() -> None:
    """Judge what was put off, give the account, close the sinks; models and optimizers are left as they are."""
    conclude_all()
    for watch in _live.all():
        watch._close_sinks()


def conclude_all() -> None:
    """The process ends: every live watch judges what it put off, and gives its account."""
    settle()
    for watch in live_watches():
        if watch.run.pid == here[0]:
            watch._ended = how_it_ends()
            watch._catch_up()
            watch._conclude()
