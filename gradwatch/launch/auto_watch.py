"""The part of `gradwatch run` that runs in the script's process, armed by the import of torch.

Modules and optimizers are known by torch's events (`taps.module_registry`, `taps.optimizers.creation`;
`noticed_optimizers` keeps those). Until one is made nothing else is done: DataLoader workers, compile workers and git
helpers start no thread, open no socket and print nothing. Before the first `backward`, `scaler.scale`, clip or step,
whichever comes first, every optimizer made since is watched, by one session that lives as long as the process, or until
one by other rules takes its place. The calls of the forward before that are recorded from the making of the optimizer
on (`first_forwards`).
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import threading
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradwatch.account import Account, Taken
from gradwatch.errors import GradwatchError, UnfitRulesError
from gradwatch.launch import exit_summary, os_exit, strict_rules
from gradwatch.launch.first_forwards import FirstForwards
from gradwatch.launch.model_discovery import Found, discover, steps_through, trains
from gradwatch.launch.models_without_optimizer import ModelsWithoutOptimizer
from gradwatch.launch.noticed_optimizers import NoticedOptimizers
from gradwatch.launch.selftest_faults import OWN_WATCH
from gradwatch.launch.selftest_faults import VARIABLE as SELFTEST
from gradwatch.runtime import guard
from gradwatch.runtime.fork_safe_locks import ForkSafeLock
from gradwatch.runtime.interruption import as_sent, not_ours
from gradwatch.runtime.process_identity import group_rank, prints
from gradwatch.runtime.standard_streams import stderr
from gradwatch.runtime.warning_filters import filters_kept
from gradwatch.taps import backward_entry, clip_functions, grad_scaler, step_hooks
from gradwatch.taps.clip_functions import Clip
from gradwatch.taps.module_registry import ModuleRegistry
from gradwatch.taps.optimizers import creation
from gradwatch.taps.optimizers.param_groups import params_of
from gradwatch.taps.process_totals import TOTALS

if TYPE_CHECKING:
    from gradwatch.launch.resumed_baselines import Baselines
    from gradwatch.launch.rules_reload import RulesReload
    from gradwatch.rules.rule_set import RuleSet
    from gradwatch.session.session import Session
    from gradwatch.taps.backward_entry import BackwardCall

NOTHING = Found([], [])
NO_LEAVES = (
    "the parameters of a differentiable optimizer are results of operations: no backward fills their .grad"
)

_watches: list[Session] = []
_agents: list[Agent] = []


def arm() -> None:
    """Notice modules and optimizers from now on. Called after torch has been imported; further calls do nothing."""
    if not _agents:
        exit_summary.arm()
        backward_entry.count_backwards()
        _agents.append(Agent())
        os_exit.listen(_leave)
        if _is_selftest():
            from gradwatch.launch import fault_injection

            fault_injection.arm()


class Agent:
    """Attaches a session to every optimizer before its first gradient is computed, scaled, clipped or used."""

    def __init__(self) -> None:
        self.registered = ModuleRegistry()
        self._lock = ForkSafeLock()
        self._optimizers = NoticedOptimizers(self.registered)
        # Held while one thread attaches: what it took out of those that wait is not watched yet. A lock, not a flag: no
        # exception that is sent can keep it from being released.
        self._attaching = threading.Lock()
        self._inherited: list[Session] = []  # of the process that this one was forked from
        self._numbered = 0  # optimizers in made-up names
        self._named_at = -1  # registrations in modules when names were looked for last
        self._printed: set[str] = set()  # why nothing is watched
        self._reached = 0  # backwards that reached something watched, when the last one began
        self._baselines: Baselines | None = None
        self._reload: RulesReload | None = None
        self._new_rules: RuleSet | None = None  # of a rule file that has changed, to be taken up
        self._forwards = FirstForwards(self.registered, self._lock, _calls_wanted)
        self._without_optimizer = ModelsWithoutOptimizer(self.registered)
        creation.listen(self._made)
        creation.listen_filled(self._optimizers.filled)
        backward_entry.listen(self._about_to_run)
        clip_functions.listen(self._about_to_clip)
        grad_scaler.listen_scale(self._scaled)
        step_hooks.listen(self.before_step, self.after_step)
        guard.listen(_strictly)
        os.register_at_fork(after_in_child=self._forked)

    # -- called by taps ----------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Attach to an optimizer of which no event of torch was seen. Raises only with `--strict`."""
        if self._attaching.locked() or not self._optimizers.knows(optimizer):
            self.attach_waiting(optimizer)
        if self._new_rules is not None:
            self._take_up_rules()
        if self._baselines is not None:
            self._baselines.before_step(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """Save the baselines if the last time was long enough ago, and look whether the rule file has changed."""
        if self._baselines is not None:
            self._baselines.after_step()
        if self._reload is not None and self._new_rules is None:
            self._new_rules = self._reload.new_rules(optimizer)

    def _made(self, optimizer: Optimizer | None) -> None:
        for watch in _watches:
            watch.before_another_optimizer()  # the one before still holds its parameters
            watch.release_freed()
        self._forwards.hold_new()
        if optimizer is not None:  # else known at its first step
            self._optimizers.made(optimizer)

    def _about_to_run(self, call: BackwardCall) -> None:
        if not call.accumulates or call.nested:
            return
        before, self._reached = self._reached, 0
        for watch in _watches:
            self._reached += watch.backwards
        look = self._without_optimizer.due(self._reached > before)
        if look or self._optimizers.waiting or self._attaching.locked():
            self.attach_waiting(before=call if look else None)
        if self._reload is not None:
            self._look_between_windows(self._reload)
            if self._new_rules is not None:
                self._take_up_rules()

    def _look_between_windows(self, reload: RulesReload) -> None:
        """Look whether the rule file has changed, in loops that take no step of an optimizer."""
        if self._new_rules is None and reload.due() and reload.session.between_windows():
            self._new_rules = reload.new_rules()

    def _about_to_clip(self, clip: Clip) -> None:
        attaching = self._attaching.locked()
        copy = self._optimizers.copy_of(clip) if self._optimizers.copies else None
        if not (self._optimizers.waiting or attaching or copy):
            return
        watch = self.attach_waiting(copy)
        if watch is None and attaching:  # it has waited for another thread's
            watch = next(iter(_watches), None)
        if watch is not None:
            watch.read_before_clip(clip.grads)

    def _scaled(self, scale: torch.Tensor) -> None:
        if self._optimizers.waiting or self._attaching.locked():
            self.attach_waiting()

    def _forked(self) -> None:
        """In a forked child nothing is watched until it trains; then it is an attempt of its own."""
        self._inherited += _watches
        _watches.clear()
        if self._baselines is not None:
            self._baselines.leave_to_parent()
        self._baselines = self._reload = self._new_rules = None
        self._optimizers.all_wait()
        self._reached = 0
        self._without_optimizer.begin()
        self._attaching = threading.Lock()

    def _take_up_rules(self) -> None:
        """Have a session by the rules that have changed take the place of the one before, between two steps."""
        with self._lock.held:
            new, self._new_rules = self._new_rules, None
            if new is None or self._reload is None or self._attaching.locked():
                return
            with self._attaching:
                try:
                    self._succeed(self._reload, new)
                except Exception as error:
                    if not_ours(error) or _strict():
                        raise
                    self._say_not_watching(error)

    def _succeed(self, reload: RulesReload, rules: RuleSet) -> None:
        began, former = perf_counter(), reload.session
        try:
            with filters_kept():
                made = reload.take_up(rules)
        finally:
            if former.closed and former in _watches:
                _watches.remove(former)
        if made is None:
            return
        _watches.append(made)
        if self._baselines is not None:
            self._baselines.go_on(made)
        self._forwards.handed_over(made)
        made.count_attaching(perf_counter() - began)

    def close_former(self) -> None:
        """Close the sessions of the parent, in a forked child that watches by its own."""
        while self._inherited:
            self._inherited.pop().close()

    def save(self) -> None:
        """Save the baselines, for the job that is started again after this one."""
        if self._baselines is not None:
            self._baselines.save()

    # -- attaching ---------------------------------------------------------------------------------------

    def attach_waiting(
        self, stepping: Optimizer | None = None, before: BackwardCall | None = None
    ) -> Session | None:
        """Watch the optimizers made since the last call, and `stepping`; the session, or None if there is none.

        With `before`, a backward that is about to run, models and tensors that it reaches are watched too, although no
        optimizer has them. Of several threads that train their own models one attaches, and the others wait. A failure
        costs the script one line on stderr; with `--strict` it raises.
        """
        with self._lock.held:
            if self._attaching.locked():  # by this thread: other threads wait above
                return None
            with self._attaching:
                first, began = not _watches, perf_counter()
                session = self._attach_to(stepping, before)
                if first and session is not None:  # later ones import nothing
                    session.count_attaching(perf_counter() - began)
                return session

    def _attach_to(self, stepping: Optimizer | None, before: BackwardCall | None) -> Session | None:
        ready = self._ready(stepping)
        watch = self._try(ready, NOTHING) if ready else None
        found = (
            NOTHING
            if before is None
            else self._without_optimizer.found(before, _is_watched, _has_no_optimizer)
        )
        return self._try([], found) if any(found) else watch

    def _try(self, ready: list[tuple[Optimizer, int]], found: Found) -> Session | None:
        """Attach, or say on one line why not."""
        try:
            return self._attach(ready, found)
        except UnfitRulesError as error:  # only with --strict-rules: no step is taken
            exit_summary.not_watched("the rules do not fit, and --strict-rules refuses them")
            sentence = strict_rules.words(str(error))
            if sentence:
                stderr.say(f"gradwatch: {sentence}")
            raise SystemExit(2) from None
        except Exception as error:
            if not_ours(error):
                raise as_sent(error) from None
            if _strict():
                raise
            self._say_not_watching(error)
            return None
        finally:
            if self._forwards.has_calls:
                for optimizer, _ in ready:
                    self._forwards.close(optimizer)

    def _say_not_watching(self, error: Exception) -> None:
        """One line: the script goes on unwatched, and the one who started it should know why.

        Once: what fails for one optimizer, or backward, fails for the next as well.
        """
        kind = "" if isinstance(error, GradwatchError) else f"{type(error).__name__}: "
        exit_summary.not_watched(f"the watch failed to start: {kind}{error}")
        line = f"gradwatch: not watching this run: {kind}{error}"
        if line not in self._printed:
            self._printed.add(line)
            stderr.say(line)

    def _ready(self, stepping: Optimizer | None) -> list[tuple[Optimizer, int]]:
        if stepping is not None and not trains(stepping) and steps_through(stepping):
            exit_summary.not_watched(NO_LEAVES)
        return self._optimizers.ready(stepping)

    def _attach(self, ready: list[tuple[Optimizer, int]], found: Found) -> Session | None:
        # Here, not at the top: pydantic, structlog and the sinks are for processes that train.
        if not _watches:
            with filters_kept():
                importlib.import_module("gradwatch.session.live_sessions")
        from gradwatch.session.live_sessions import LIVE

        if self._inherited:
            self.close_former()
        own, others = None, []
        for watch in LIVE.all():
            if watch.idle():
                continue
            if own is None and watch in _watches:
                own = watch
            else:
                others.append(watch)
        if others:
            unowned = [pair for pair in ready if not any(other.owns(pair[0]) for other in others)]
            if _is_selftest() and len(unowned) < len(ready):
                from gradwatch.launch import fault_injection

                fault_injection.not_injected(OWN_WATCH)
            ready = unowned
        if not (ready or any(found)):
            return None
        if own is not None and ready:
            # First: what comes takes up the places of what is gone, and what outlives the model that named it is named
            # by another. Without an optimizer it may be the successor of what is gone.
            own.drop_dead()
        roots, loose = found
        if ready and not self._are_named(own, ready):
            roots, loose = discover(self.registered, ready, self._numbered, self._forwards.root_of)
            self._named_at = self.registered.registrations
        self._numbered += len(ready)
        optimizers = [optimizer for optimizer, _ in ready]
        if own is not None:  # one run, one port and one journal per process, however many models it trains
            # First: what is held of these models need not be held anew.
            self._forwards.handed_over(own, roots)
            own.join(roots, optimizers, loose)
        else:
            own = self._begin(roots, optimizers, loose)
        return own

    def _begin(
        self, roots: list[nn.Module], optimizers: list[Optimizer], loose: list[tuple[str, nn.Parameter]]
    ) -> Session:
        """Make the session of this process; none stays where that fails in part."""
        made: Session | None = None
        try:
            with filters_kept():
                from gradwatch.launch.resumed_baselines import Baselines
                from gradwatch.session.watch_function import watch_optimizers

                made = watch_optimizers(roots, optimizers, loose)
                self._reload = _reload_of(made)
            _watches.append(made)
            _close_at_exit()
            self._baselines = Baselines(made)
            _greet(made, optimizers)
            self._forwards.handed_over(made)
            if _is_selftest():
                from gradwatch.launch import fault_injection

                fault_injection.begin(made)
            return made
        except BaseException:
            if made in _watches:
                _watches.remove(made)
            self._baselines = self._reload = None
            if made is not None:
                made.close()
            raise

    def _are_named(self, own: Session | None, ready: list[tuple[Optimizer, int]]) -> bool:
        """True if all parameters of these optimizers are watched, and no module was given anything since."""
        if own is None or self._named_at != self.registered.registrations:
            return False
        return all(own.knows_all(map(id, params_of(optimizer))) for optimizer, _ in ready)


def _reload_of(session: Session) -> RulesReload | None:
    """A look at the session's rule file now and then, where that was asked for; packs do not change."""
    source = os.environ.get("GRADWATCH_RULES", "")
    if os.environ.get("GRADWATCH_RELOAD", "0") in ("", "0") or not os.path.isfile(source):
        return None
    if session.run.world_size > 1 and group_rank() is not None:
        from gradwatch.launch.ranks_reload import RanksReload

        return RanksReload(session, source)
    from gradwatch.launch.rules_reload import RulesReload

    return RulesReload(session, source)


def _is_selftest() -> bool:
    return SELFTEST in os.environ


def _calls_wanted() -> bool:
    """True if calls may have to be run again: where a watch localises, and before the first, whose rules decide."""
    return not _watches or any(watch.records_calls for watch in _watches)


def _has_no_optimizer(identity: int) -> bool:
    """True if the script's own code trains the parameter with this `id()`, as was seen."""
    return any(
        captured.without_optimizer and identity in captured.param_ids
        for watch in _watches
        for captured in watch.captures()
    )


def _is_watched(identity: int) -> bool:
    """True if some watch of this process has the parameter with this `id()`."""
    watching = sys.modules.get("gradwatch.session.session")
    return watching is not None and any(watch.knows(identity) for watch in watching.live_sessions())


def _close_at_exit() -> None:
    """The processes of `multiprocessing` that are forked end without Python's own exit handlers."""
    atexit.register(close_all, os.getpid())
    if _is_worker():
        from multiprocessing.util import Finalize

        Finalize(None, close_all, args=(os.getpid(),), exitpriority=1)
        Finalize(None, exit_summary.say, exitpriority=0)


def _is_worker() -> bool:
    """True if `multiprocessing` started this process."""
    processes = sys.modules.get("multiprocessing.process")
    return processes is not None and processes.parent_process() is not None


def close_all(pid: int) -> None:
    """Close every session at the exit of process `pid`; does nothing in a forked child, whose parent owns the files."""
    if os.getpid() == pid:
        from gradwatch.session.live_sessions import conclude_all

        conclude_all()
        for agent in _agents:
            agent.save()
            agent.close_former()
        while _watches:
            _watches.pop().close()


def _leave(at_rest: bool) -> None:
    """The process ends by `os._exit`: its account, as at exit; hooks and models are left as they are."""
    try:
        before = TOTALS.taken()
        ending = sys.modules.get("gradwatch.session.live_sessions")
        if ending is not None:
            ending.conclude_all()
        account = _as_it_left(exit_summary.account_of_process(), before)
        if at_rest:  # else a step may be half learned
            for agent in _agents:
                agent.save()
        if ending is not None:
            ending.close_all_sinks()
        exit_summary.say(account, stderr.say_past_buffers)
    except Exception as error:
        stderr.say_past_buffers(f"gradwatch: the summary of this process failed: {error!r}")


def _as_it_left(account: Account, before: Taken) -> Account:
    """The account without what a thread that trains on has taken, unwatched, since the totals were `before`."""
    taken, seen = account.taken, account.watched
    steps = min(taken.steps, max(before.steps, seen.steps))
    backwards = min(taken.backwards, max(before.backwards, seen.backwards))
    return replace(account, taken=replace(taken, steps=steps, backwards=backwards))


def _greet(watch: Session, optimizers: list[Optimizer]) -> None:
    """One line for a person at a terminal; nothing into a pipe or a log file, nothing from other ranks."""
    if not prints() or not _on_terminal():
        return
    names = ", ".join(type(model).__name__ for model in watch.models()[:3]) or "no module"
    count = len(set(map(id, params_of(*optimizers))))
    missing = watch.missing_sinks
    folder = "" if "journal" in missing else exit_summary.shown(watch.run.directory)
    without = f"no {', no '.join(missing)}: not in the rule file's `sinks:`" if missing else ""
    parts = (f"gradwatch: watching {count} parameters of {names}", watch.url, folder, without)
    stderr.say(" · ".join(part for part in parts if part))


def _strict() -> bool:
    return os.environ.get("GRADWATCH_STRICT", "0") not in ("", "0")


def _strictly(component: str, error: BaseException) -> None:
    """With `--strict` a fault stops the script, also where no watch could be made."""
    if _strict():
        raise error


def _on_terminal() -> bool:
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # closed by the script
        return False
