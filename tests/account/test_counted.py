"""Steps within steps, optimizers that wrap others, watches that are over or paused: what the account says of them."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import gradwatch
from gradwatch.account import NOTHING_TAKEN, Account, Watched, gaps, lines, merged
from gradwatch.account.launch_total import Part, launch_total
from gradwatch.rules.files import parse_rules
from gradwatch.session.watch import session_of
from tests.support.kept import Kept


def closure_of(model: nn.Module, optimizer: Optimizer, before: Callable[[], Any] = lambda: None) -> Any:
    """A closure of the usual kind that does something else first."""

    def closure() -> Tensor:
        before()
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(2, 3)).square().mean()
        loss.backward()
        return loss

    return closure


def test_a_watch_that_took_the_place_of_another_counts_nothing_twice() -> None:
    """Optimizers and parameters of its account are those of both, also where the account before it is lost."""
    first = Account(watched=Watched(optimizers=1, parameters=4))
    second = Account(watched=Watched(optimizers=2, parameters=6, optimizers_before=1, parameters_before=4))
    beside = Account(watched=Watched(optimizers=1, parameters=3))
    for accounts, expected in (
        ([first, second], (2, 6)),
        ([second], (2, 6)),
        ([merged([first, second]), beside], (3, 9)),
        ([first, beside, second], (3, 9)),
    ):
        found = merged(accounts).watched
        assert (found.optimizers, found.parameters) == expected


def test_what_a_closure_trains_beside_its_own_model_is_steps_of_their_own() -> None:
    """Inside an optimizer's closure another one steps on another model: counted, and watched, each."""
    outer, inner = nn.Linear(3, 1), nn.Linear(3, 1)
    around, within = SGD(outer.parameters(), 0.1), SGD(inner.parameters(), 0.1)
    kept = Kept()
    with gradwatch.watch([outer, inner], [around, within], sinks=[kept], strict=True) as gw:
        for _ in range(4):
            around.step(closure_of(outer, around, before=lambda: within.step(closure_of(inner, within))))
    account = session_of(gw).account()
    assert (account.taken.steps, account.taken.nested, account.watched.steps) == (8, 0, 8)
    assert sorted(record.snapshot.optimizer for record in kept.records) == [0] * 4 + [1] * 4


@pytest.mark.parametrize("given", [True, False])
def test_a_closure_may_step_the_optimizer_that_called_it(given: bool) -> None:
    """Each of these steps counts, is judged by its own gradients and skipped alone; weights are as bare."""

    def train(model: nn.Linear, poisoned: bool = False) -> None:
        optimizer = SGD(model.parameters(), 0.1)

        def inside() -> None:
            closure = closure_of(model, optimizer)
            if given:
                optimizer.step(closure_of(model, optimizer))
            else:
                closure()
                if poisoned and len(kept.records) == 4:
                    model.weight.grad.fill_(float("nan"))  # type: ignore[union-attr]
                optimizer.step()

        for _ in range(4):
            optimizer.step(closure_of(model, optimizer, before=inside))

    bare, model, kept = nn.Linear(3, 1), nn.Linear(3, 1), Kept()
    model.load_state_dict(bare.state_dict())
    train(bare)
    with gradwatch.watch(model, sinks=[kept], rules="default", strict=True) as gw:
        train(model)
    account = session_of(gw).account()
    assert (account.taken.steps, account.taken.nested, account.watched.steps) == (8, 0, 8)
    assert gaps(account) == ()
    totals = [record.snapshot.total_norm for record in kept.records]
    assert len(totals) == 8
    assert totals == sorted(totals, reverse=True)
    assert min(totals) > 0
    assert torch.equal(bare.weight, model.weight)
    if not given:
        kept = Kept()
        with gradwatch.watch(model, sinks=[kept], rules="default", strict=True):
            train(model, poisoned=True)
        assert [record.decision.skip for record in kept.records] == [place == 4 for place in range(8)]
        assert bool(model.weight.isfinite().all())


class Elsewhere(SGD):
    """Runs its closure in a thread of its own."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        def evaluate() -> None:
            with torch.enable_grad():
                closure()

        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join()
        return super().step()


def test_a_closure_run_in_another_thread_is_of_the_step_that_waits_for_it() -> None:
    """Its gradients are judged there, and count as the one step that they are."""
    model = nn.Linear(3, 1)
    optimizer, kept = Elsewhere(model.parameters(), 0.1), Kept()
    with gradwatch.watch(model, optimizer, sinks=[kept], strict=True) as gw:
        for _ in range(4):
            optimizer.step(closure_of(model, optimizer))
    assert (
        session_of(gw).account().taken.steps,
        session_of(gw).account().watched.steps,
        len(kept.records),
    ) == (4, 4, 4)


def test_a_step_that_an_exception_ends_inside_a_closure_is_not_the_one_around_it() -> None:
    """The inner step of another model raises and is counted as such; the outer one goes on and is watched."""
    outer, inner = nn.Linear(3, 1), nn.Linear(3, 1)
    around, within = SGD(outer.parameters(), 0.1), SGD(inner.parameters(), 0.1)

    def fails() -> None:
        raise ValueError("the closure's own")

    def tried() -> None:
        with pytest.raises(ValueError, match="own"):
            within.step(closure_of(inner, within, before=fails))

    with gradwatch.watch([outer, inner], [around, within], sinks=[Kept()], strict=True) as gw:
        for _ in range(3):
            around.step(closure_of(outer, around, before=tried))
    account = session_of(gw).account()
    assert (account.taken.steps, account.taken.raised, account.watched.steps) == (6, 3, 3)


class Around(Optimizer):
    """Wraps an optimizer, as SAM and Lookahead do, sharing its parameters; its own `step` may never be called."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


@pytest.mark.parametrize("own", [True, False], ids=["step of the wrapper", "step of what it wraps"])
def test_an_optimizer_that_wraps_another_one_counts_once_and_holds_nothing_back(own: bool) -> None:
    """One step each, healthy as of the last one, whichever of the two is called."""
    model = nn.Linear(3, 1)
    optimizer = Around(SGD(model.parameters(), 0.1))
    with gradwatch.watch(model, optimizer, sinks=[Kept()], strict=True) as gw:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().mean().backward()
            (optimizer if own else optimizer.base).step()
        assert gw.healthy
        assert gw.last_healthy_step == 4
        assert (session_of(gw).account().taken.steps, session_of(gw).account().watched.steps) == (5, 5)


def test_the_account_of_a_watch_that_is_over_is_the_one_it_gave() -> None:
    """Asked after `close`, while the process trains on: as it was then."""
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), 0.1)
    gw = gradwatch.watch(model, optimizer, sinks=[Kept()], strict=True)
    for step in range(5):
        if step == 3:
            told = session_of(gw).account()
            gw.close()
            assert session_of(gw).account().taken == told.taken
        optimizer.step(closure_of(model, optimizer))
    assert (session_of(gw).account().taken.steps, session_of(gw).account().watched.steps) == (3, 3)
    assert not gaps(session_of(gw).account())


def test_a_pause_is_the_reason_why_steps_were_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults in a row pause the watch, and the account says so instead of guessing."""
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), 0.1)
    with gradwatch.watch(model, optimizer, sinks=[Kept()]) as gw:

        def broken(*_: object) -> None:
            raise RuntimeError("ours")

        monkeypatch.setattr(session_of(gw).attached.pipeline, "measure", broken)
        for _ in range(6):
            optimizer.step(closure_of(model, optimizer))
    (missed,) = gaps(session_of(gw).account())
    assert missed == "6 of 6 optimizer steps not watched: watching was paused 1 × after internal errors"


def trained_by_two(step_by: Callable[[int, SGD, SGD], object]) -> Account:
    """Eight backwards of one model with two optimizers; `step_by(number, one, other)` takes the steps."""
    model = nn.Linear(3, 1)
    one, other = SGD(model.parameters(), 0.1), SGD(model.parameters(), 0.1)
    with gradwatch.watch(model, [one, other], sinks=[Kept()], strict=True) as gw:
        for number in range(8):
            model.zero_grad()
            model(torch.ones(2, 3)).square().mean().backward()
            step_by(number, one, other)
    return session_of(gw).account()


@pytest.mark.parametrize(
    "step_by",
    [
        pytest.param(lambda number, one, other: (one if number % 2 else other).step(), id="in turn"),
        pytest.param(lambda number, one, other: one.step(), id="one steps"),
        pytest.param(lambda number, one, other: (one.step(), other.step()), id="together"),
    ],
)
def test_gradients_that_an_optimizer_with_the_same_parameters_has_used_are_not_discarded(
    step_by: Callable[[int, SGD, SGD], object],
) -> None:
    """Two optimizers of one model, whichever of them steps: every gradient was used, and nothing is said."""
    account = trained_by_two(step_by)
    assert account.watched.cleared == 0
    assert not gaps(account)


def test_gradients_cleared_before_any_step_are_counted_once() -> None:
    """Every second backward is thrown away, under two optimizers that share the parameters."""
    account = trained_by_two(lambda number, one, other: one.step() if number % 2 else None)
    assert (account.watched.cleared, account.watched.cleared_last) == (4, 0)


def test_gradients_cleared_after_the_last_step_are_counted_apart() -> None:
    """A loop that goes on without its steps; of the last backward it is not known what comes of it."""
    account = trained_by_two(lambda number, one, other: one.step() if number < 3 else None)
    assert (account.watched.cleared, account.watched.cleared_last) == (4, 4)


@pytest.mark.parametrize("first", [0.0, 1e-30, 1.0], ids=["zeros", "tiny", "ordinary"])
def test_of_gradients_thrown_away_those_that_are_not_finite_are_told(first: float) -> None:
    """A loop that looks at the clip's norm itself and goes on to the next batch: no rule has seen a step of these."""
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), 0.1)
    with gradwatch.watch(model, optimizer, sinks=[Kept()], strict=True) as gw:
        for number in range(8):
            optimizer.zero_grad()
            factor = {3: math.nan, 5: math.inf, 6: first}.get(number, 1.0)
            (model(torch.ones(2, 3)).square().mean() * factor).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if number != 6 and norm.isfinite():
                optimizer.step()
        account = session_of(gw).account()
    assert (account.watched.cleared, account.watched.cleared_nonfinite) == (3, 2)
    assert "gradients were cleared 3 times (2 of them NaN or Inf)" in " ".join(gaps(account))


def test_closures_of_one_optimizer_are_not_thrown_away_by_another() -> None:
    """Adam first and LBFGS then, of the same parameters: every gradient is one of a step's."""
    model = nn.Linear(3, 1)
    adam = torch.optim.Adam(model.parameters())
    lbfgs = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=4, tolerance_grad=0, tolerance_change=0)
    with gradwatch.watch(model, [adam, lbfgs], sinks=[Kept()], strict=True) as gw:
        for _ in range(6):
            adam.step(closure_of(model, adam))
        for _ in range(4):
            lbfgs.step(closure_of(model, lbfgs))
        account = session_of(gw).account()
    assert account.taken.backwards > 14
    assert account.watched.cleared == 0


def test_two_watches_of_one_process_do_not_count_it_twice() -> None:
    """What one process did stands once in the sum over its journals, though each of its watches counted all of it."""
    models = [nn.Linear(3, 1), nn.Linear(3, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in models]
    with contextlib.ExitStack() as stack:
        watches = []
        for model, optimizer in zip(models, optimizers, strict=True):
            watches.append(stack.enter_context(gradwatch.watch(model, optimizer, sinks=[])))
            for _ in range(5):
                for one, its in zip(models, optimizers, strict=True):
                    its.zero_grad()
                    one(torch.ones(2, 3)).sum().backward()
                    its.step()
        accounts = [
            Account.from_dict(json.loads(json.dumps(session_of(watch).account().to_dict())))
            for watch in watches
        ]
    parts = [Part(7, "here", float(at), account, True) for at, account in enumerate(accounts)]
    summed = launch_total(parts, lambda _: None)
    assert (summed.taken.steps, summed.taken.backwards, summed.taken.stepped) == (20, 20, 2)
    assert summed.watched.optimizers == 2
    assert (summed.watched.steps, summed.watched.backwards) == (15, 15)
    old = [replace(part, account=replace(part.account, after=NOTHING_TAKEN)) for part in parts]
    assert (
        launch_total(old, lambda _: None).taken.backwards == 30
    )  # an earlier version's: all that can be had


@pytest.mark.parametrize(
    ("rules", "unjudged"),
    [
        ("version: 1\nclip: {total: {method: norm, max_norm: 1.0}}\n", 2),
        ("version: 1\nrules: {n: {detect: {kind: loss_nonfinite}}}\n", 1),
        ("version: 1\nrules: {n: {detect: {kind: nonfinite}, for: 9, mode: shadow, do: [skip_step]}}\n", 0),
        ("version: 1\nrules: {n: {detect: {kind: above, of: total_norm, threshold: 1e9}}}\n", 0),
    ],
)
def test_gradients_that_are_not_finite_and_that_no_rule_judges_are_told(rules: str, unjudged: int) -> None:
    """A file that only clips has no rule on NaN, and ruined weights are no clean end; the first loss is finite."""
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), 0.0)
    with gradwatch.watch(model, optimizer, rules=parse_rules(rules), sinks=[Kept()], strict=True) as gw:
        for number in range(8):
            optimizer.zero_grad()
            out = model(torch.ones(2, 3))
            ((out * 0).sqrt().mean() if number == 6 else out.square().mean()).backward()
            optimizer.step()
        account = session_of(gw).account()
    assert account.watched.nonfinite_unjudged == unjudged
    assert any("no rule of the file judges" in gap for gap in gaps(account)) == bool(unjudged)


def test_gradients_made_nan_after_the_backward_are_told_where_no_rule_judges_them() -> None:
    """The norm that rules get is the backward's, which is finite; the optimizer's is not."""
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), 0.1)
    rules = parse_rules("version: 1\nclip: {total: {method: norm, max_norm: 1.0}}\n")
    with gradwatch.watch(model, optimizer, rules=rules, sinks=[Kept()], strict=True) as gw:
        for number in range(8):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().mean().backward()
            if number == 7:
                assert model.bias.grad is not None
                model.bias.grad.fill_(math.nan)
            optimizer.step()
        assert session_of(gw).account().watched.nonfinite_unjudged == 1


def test_gradients_cleared_unused_are_no_gap_unless_they_were_not_finite() -> None:
    """The generator's backward leaves some at the discriminator, in every GAN: everything was watched there."""
    account = trained_by_two(lambda number, one, other: one.step() if number % 2 else None)
    assert (account.watched.cleared, account.watched.cleared_last) == (4, 0)
    assert not any("cleared" in gap for gap in gaps(account))
    (line, *_) = lines(account, "")
    assert "gradients cleared unused 4 ×" in line


def test_what_attaching_took_is_told_and_is_no_part_of_the_loops_cost() -> None:
    """From `watch` to the second recorded step: at least what `watch` itself took."""
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), 0.1)
    began = time.perf_counter()
    with gradwatch.watch(model, optimizer, sinks=[Kept()], strict=True) as gw:
        took = time.perf_counter() - began
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
        watched = session_of(gw).account().watched
    assert 0.5 * took < watched.attach_seconds < time.perf_counter() - began
    assert watched.seconds < time.perf_counter() - began - took
    (line, *_) = lines(Account(watched=replace(watched, attach_seconds=0.7)), "")
    assert " · attached in 0.7 s" in line
