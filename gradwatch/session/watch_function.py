"""The way in: `gradwatch.watch` checks what it is given, finds the rules, and makes room for the new watch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradwatch.errors import AttachError
from gradwatch.records.event import Event
from gradwatch.rules.resolved_packs import resolved_pack
from gradwatch.rules.rule_set import RuleSet
from gradwatch.session.session import Session, live_sessions
from gradwatch.session.settings import Settings, enabled
from gradwatch.session.watch import Watch
from gradwatch.sinks import Sink


def watch(
    model: nn.Module | Iterable[nn.Module],
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    rules: str | os.PathLike[str] | RuleSet | None = None,
    sinks: Sequence[Sink] | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    listen: str | None = None,
    run_id: str | None = None,
    strict: bool = False,
    strict_rules: bool = False,
    origin: str = "user",
    on_escalate: Callable[[Event], object] | None = None,
) -> Watch:
    """Watch the gradients of a model (or several) until `close()`; use it as a context manager.

    A watch ends with its models, but for a ModuleList or ModuleDict, which it keeps until `close()`: it may have been
    made for this call.
    `optimizer` may be left out: every optimizer that owns a watched parameter is adopted at its first step.
    `rules` is a shipped pack's name, a path, or a RuleSet (default: `GRADWATCH_RULES`, else "default").
    `sinks` replaces those of the rule file. `listen` is host:port of the Prometheus endpoint, `run_dir` the
    folder that receives one folder per run. `strict` lets gradwatch's own faults raise (for tests and CI).
    A rule or group that matches nothing of the model is off by itself, which the log, `status()["inactive"]` and the
    metric `gradwatch_rule_inactive` say; `strict_rules` raises `UnmatchedRulesError` instead. An action that cannot be
    carried out on this model, or with these ranks, raises `UnfitRulesError`; under `gradwatch run` it too is off by
    itself.
    `on_escalate(event)` is called when a rung of a rule's ladder (`escalate:`) is reached, on the training thread, just
    before the optimizer steps: the place to lower the learning rate or to go back to a checkpoint. What it raises is
    counted and kept out of training, but for `TrainingStopped`, which stops it.
    With `GRADWATCH=0` nothing is attached at all.

    Raises:
        AttachError: not a module, no parameters that want a gradient, watched already, an action
            that is not available, with `strict_rules` a rule that matches nothing; the message says what to do.
        RuleFileError: the rule file was refused; all problems at once.
    """
    began = perf_counter()
    models = _models(model)
    optimizers = _optimizers(optimizer)
    sinks = None if sinks is None else list(sinks)
    _check_sinks(sinks or ())
    settings = Settings.resolve(
        rules=None if rules is None or isinstance(rules, RuleSet) else os.fspath(rules),
        listen=listen,
        run_dir=None if run_dir is None else os.fspath(run_dir),
        run_id=run_id,
        strict=strict,
        strict_rules=strict_rules,
    )
    if not enabled():
        return Watch(Session(models, optimizers, RuleSet(), settings, (), origin, active=False))
    ruleset = rules if isinstance(rules, RuleSet) else _rules_of(settings)
    _make_room(models, origin)
    session = Session(models, optimizers, ruleset, settings, sinks, origin, on_escalate=on_escalate)
    session.count_attaching(perf_counter() - began)
    return Watch(session)


def watch_optimizers(
    models: list[nn.Module], optimizers: list[Optimizer], loose: Sequence[tuple[str, nn.Parameter]]
) -> Session:
    """A launcher's session for optimizers whose parameters `models` name, and `loose` where no module holds them.

    It lives until `close()`, whatever becomes of the models. Settings and rules are those of the environment.

    Raises:
        AttachError, RuleFileError: as `watch`.
    """
    settings = Settings.resolve()
    ruleset = _rules_of(settings)
    return Session(models, optimizers, ruleset, settings, None, "launcher", loose=loose)


def _rules_of(settings: Settings) -> RuleSet:
    """The rules that the settings name: a shipped pack as it is known to resolve, any other file read."""
    resolved = resolved_pack(settings.rules)
    if resolved is not None:
        return resolved
    from gradwatch.rules.files import load_rules  # pydantic and ruamel: 0.2 s, which a pack does not need

    return load_rules(settings.rules, run=settings.run_id or "")


def _models(model: nn.Module | Iterable[nn.Module]) -> list[nn.Module]:
    models = _listed(model)
    for one in models:
        if not isinstance(one, nn.Module):
            raise AttachError(
                f"watch() takes a torch.nn.Module or a list of them, not {type(one).__name__}; "
                "for a wrapped model pass the wrapper or its .module"
            )
    if not models:
        raise AttachError("watch() was given no model")
    return models


def _check_sinks(sinks: Iterable[Sink]) -> None:
    """Refuse what is no sink, such as the name of one."""
    for sink in sinks:
        if not isinstance(sink, Sink):
            raise AttachError(
                f"watch(sinks=…) takes objects with open, write, flush and close, not {type(sink).__name__}; "
                "sinks by their names stand in a rule file: `sinks: [journal, tensorboard]`"
            )


def _listed(given: Any) -> list[Any]:
    """One object, or what an iterable holds; `nn.Sequential` can be iterated over, and is one object."""
    return (
        list(given)
        if isinstance(given, Iterable) and not isinstance(given, (nn.Module, Optimizer))
        else [given]
    )


def _optimizers(optimizer: Optimizer | Iterable[Optimizer] | None) -> list[Optimizer]:
    if optimizer is None:
        return []
    optimizers = _listed(optimizer)
    for one in optimizers:
        if not isinstance(one, Optimizer):
            raise AttachError(
                f"optimizer must be a torch.optim.Optimizer, not {type(one).__name__}; "
                "leave it out and every optimizer is adopted at its first step"
            )
    return [innermost(one) for one in optimizers]


def innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer that really steps, inside the wrappers of Accelerate and Lightning.

    Those are Optimizers by class only: they have no parameters of their own, and no step hook ever sees them.
    """
    while "param_groups" not in vars(optimizer):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer):
            break
        optimizer = inner
    return optimizer


def _make_room(models: list[nn.Module], origin: str) -> None:
    """One watch per parameter: the launcher's gives way to the script's own, anything else is an error."""
    params = {id(param) for model in models for param in model.parameters()}
    for other in live_sessions():
        if other.run.pid != os.getpid():  # inherited by a fork: inert here, so not in the way
            continue
        if not any(map(other.knows, params)):
            continue
        if other.origin == "launcher" and origin != "launcher":
            other.close()
            continue
        raise AttachError(
            "this model is watched already; close() the first watch, or use it: it is the object that "
            "gradwatch.watch(...) returned"
        )
