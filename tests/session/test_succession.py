"""A session that takes the place of another one by other rules: what it goes on with."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from gradwatch.account import merged
from gradwatch.errors import UnmatchedRulesError
from gradwatch.records.run_info import RunInfo
from gradwatch.rules.files import parse_rules
from gradwatch.rules.rule_set import RuleSet
from gradwatch.runtime.internal_errors import Health
from gradwatch.session.session import Session
from gradwatch.session.settings import Settings
from gradwatch.session.succession import Handover
from tests.support.kept import Kept

OLD = parse_rules("version: 1\nrules: {old: {detect: {kind: spike, of: norm, above: 50}, warmup: 10}}")
NEW = parse_rules(
    "version: 1\n"
    "rules: {old: {detect: {kind: spike, of: norm, above: 50}, warmup: 10}, new: {detect: {kind: nonfinite}}}"
)
UNFIT = parse_rules(
    "version: 1\ngroups: {none: {params: [nothing.*]}}\n"
    "rules: {new: {detect: {kind: above, of: norm, threshold: 1}, groups: [none]}}"
)


def begun(models: list[nn.Module], optimizers: list[Optimizer], kept: Kept, folder: Path) -> Session:
    """A launcher's session of these by the old rules."""
    return Session(models, optimizers, OLD, Settings.resolve(run_dir=str(folder)), [kept], "launcher")


@contextmanager
def succeeded(session: Session, kept: Kept, folder: Path) -> Iterator[Session]:
    """The session by the new rules that takes its place."""
    before = session.hand_over()
    assert before is not None
    watching, settings = before.watching, Settings.resolve(run_dir=str(folder))
    made = Session(
        watching.models,
        watching.optimizers,
        NEW,
        settings,
        [kept],
        "launcher",
        loose=watching.loose,
        before=before,
    )
    del before, watching
    with closing(made):
        yield made


def train(pairs: Sequence[tuple[nn.Module, Optimizer]], steps: int, times: float = 1.0) -> None:
    """Steps of each in turn."""
    for _ in range(steps):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            (model(torch.ones(2, 3)).sum() * times).backward()
            optimizer.step()


def test_names_numbers_steps_and_baselines_go_on(tmp_path: Path) -> None:
    """Of a model that was watched first and of one that joined it: also prefixes, and what is counted once."""
    models = [nn.Linear(3, 1), nn.Linear(3, 1)]
    pairs = [(model, SGD(model.parameters(), 1e-4, momentum=0.9)) for model in models]
    old, new = Kept(), Kept()
    session = begun(models[:1], [pairs[0][1]], old, tmp_path)
    train(pairs[:1], 2)
    session.join(models[1:], [pairs[1][1]])
    train(pairs, 20)
    with succeeded(session, new, tmp_path) as made:
        train(pairs, 1, 1e6)
        train(pairs, 1)
        made.catch_up()
        by_optimizer = [[one for one in new.records if one.snapshot.optimizer == number] for number in (0, 1)]
        assert [[one.snapshot.step for one in each] for each in by_optimizer] == [[22, 23], [20, 21]]
        assert by_optimizer[0][0].snapshot.sites.names[:2] == ("weight", "bias")
        assert by_optimizer[1][0].snapshot.sites.names[:2] == ("Linear1.weight", "Linear1.bias")
        assert all({event.rule for event in each[0].verdict.events} == {"old"} for each in by_optimizer)
        found = merged([session.account(), made.account()]).watched
        assert (found.optimizers, found.parameters, found.steps) == (2, 4, 46)
        assert (made.account().watched.optimizers_before, made.account().unrecorded) == (2, 42)


def test_an_optimizer_that_is_gone_leaves_its_baselines_to_the_next_one(tmp_path: Path) -> None:
    """A script that makes an optimizer for each phase: the next of the same parameters counts on from it."""
    model, old, new = nn.Linear(3, 1), Kept(), Kept()
    session = begun([model], [first := SGD(model.parameters(), 1e-4)], old, tmp_path)
    train([(model, first)], 20)
    session.catch_up()
    del first
    gc.collect()
    with succeeded(session, new, tmp_path) as made:
        pair = model, SGD(model.parameters(), 1e-4)
        train([pair], 1)  # its first step is provisional: it is known by that step
        train([pair], 1, 1e6)
        made.catch_up()
        assert [one.snapshot.step for one in new.records] == [20, 21]
        assert {event.rule for event in new.records[1].verdict.events} == {"old"}


def test_rules_are_checked_without_a_trace(tmp_path: Path) -> None:
    """What does not fit raises, and the session watches on as before."""
    model, kept = nn.Linear(3, 1), Kept()
    pair = model, SGD(model.parameters(), 1e-4)
    with closing(begun([model], [pair[1]], kept, tmp_path)) as session:
        train([pair], 2)
        strict = replace_strict(Settings.resolve(run_dir=str(tmp_path)))
        with pytest.raises(UnmatchedRulesError, match="nothing"):
            session.check(UNFIT, strict)
        session.check(NEW, strict)
        train([pair], 2)
        session.catch_up()
        assert [one.snapshot.step for one in kept.records] == [0, 1, 2, 3]
        assert all(math.isfinite(one.snapshot.total_norm) for one in kept.records)


class Named(Kept):
    """A sink whose output names the process."""

    needs_place = True


def test_the_place_is_held_on_from_one_session_to_the_next(tmp_path: Path) -> None:
    """Also where the rules that come first do not fit: nobody else gets it meanwhile, and it is free at the end."""
    model, settings = nn.Linear(3, 1), Settings.resolve(run_dir=str(tmp_path), run_id="r", strict_rules=True)
    optimizer, sinks = SGD(model.parameters(), 1e-4), [Named()]

    def made(rules: RuleSet, before: Handover | None = None) -> Session:
        return Session([model], [optimizer], rules, settings, sinks, "launcher", before=before)

    session = made(OLD)
    before = session.hand_over()
    assert before is not None
    with closing(made(OLD)) as other:
        assert (session.run.place, other.run.place) == (0, 1)
        with pytest.raises(UnmatchedRulesError):
            made(UNFIT, before)
        with pytest.raises(KeyboardInterrupt):
            Session([model], [optimizer], NEW, settings, [Refusing()], "launcher", before=before)
        with closing(made(OLD)) as third, closing(made(NEW, before)) as next_one:
            assert (third.run.place, next_one.run.place) == (2, 0)
    assert not list((tmp_path / "r").glob("place-*"))


class Refusing(Named):
    """Ends the attach, when the place is claimed already."""

    def open(self, run: RunInfo, health: Health) -> None:
        """Refuse the run."""
        raise KeyboardInterrupt


def replace_strict(settings: Settings) -> Settings:
    """The settings with `strict_rules`."""
    return settings._replace(strict_rules=True)
