"""The account as data and in words: what it says of numbers, and that it says something wherever they differ."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradwatch
from gradwatch.account import Account, Taken, Watched, gaps, lines, merged
from gradwatch.account.account_line import nothing_seen
from tests.support.alphabet import UNICODE

counts = st.integers(0, 50)
takens = st.builds(Taken, *[counts] * 8)
watcheds = st.builds(Watched, counts, counts, counts, counts, counts, counts, counts, counts)
texts = st.dictionaries(st.sampled_from("abc"), st.text(UNICODE, max_size=5), max_size=3)
totals_by_index = st.dictionaries(st.sampled_from("abc"), counts, max_size=3)
accounts = st.builds(
    Account,
    takens,
    watcheds,
    st.sampled_from(["", "finished", "stopped", "failed"]),
    totals_by_index,
    totals_by_index,
    texts,
    texts,
    rebaselined=totals_by_index,
    replaced_unfit=totals_by_index,
    unfit=st.lists(st.text(UNICODE, max_size=5), max_size=3).map(tuple),
    ranks=st.integers(1, 9),
)


def test_a_watched_run_is_one_line() -> None:
    """Steps, optimizers, parameters, coverage, rules, actions, rules without data, cost, folder and next command."""
    account = Account(
        Taken(backwards=30, steps=30, optimizers=1),
        Watched(steps=30, optimizers=1, parameters=4, own_seconds=0.01, seconds=1.0),
        fired={"non-finite": 2},
        actions={"skip_step": 2},
        no_data={"spike": "no loss was observed", "jump": "no loss was observed"},
        rules=9,
    )
    assert lines(account, "runs/r") == [
        "gradwatch: 30 of 30 steps watched · 1 optimizer, 4 parameters, coverage 100% · fired: non-finite ×2 · "
        "done: skip_step ×2 · no data for 2 of 9 rules (no loss was observed) · own cost 1.0% · "
        "next: gradwatch explain --run runs/r"
    ]


def test_weights_that_are_not_healthy_at_the_end_are_told() -> None:
    """Also where no rule fired, as of a last step that ruined them: the first reason, and how many more there are."""
    account = Account(Taken(steps=30), Watched(steps=30), unfit=("weights are not finite: fc", "another"))
    (line,) = lines(account)
    assert "no rule fired · not healthy at the end: weights are not finite: fc (and 1 more reason)" in line
    assert Account.from_dict(json.loads(json.dumps(account.to_dict()))) == account


@pytest.mark.parametrize(("ranks", "processes"), [(1, 1), (2, 1), (2, 2)])
def test_of_one_rank_no_more_is_said_than_it_knows(ranks: int, processes: int) -> None:
    """The loss is each rank's own: that no rule fired is said of this rank, where the account is of it alone."""
    (line, *_) = lines(Account(Taken(steps=30), Watched(steps=30), ranks=ranks, processes=processes))
    assert ("no rule fired on rank 0 of 2" in line) == (ranks > processes)
    assert "no rule fired" in line


def test_optimizers_are_told_of_those_that_were_stepped() -> None:
    """All of them: one number; else both; none, as in a loop without one: not a word."""
    watched = Watched(steps=9, optimizers=200, parameters=4)
    some = lines(Account(Taken(steps=9, optimizers=300, stepped=201), watched))[0]
    every = lines(Account(Taken(steps=9, optimizers=300, stepped=200), watched))[0]
    none = lines(Account(Taken(backwards=3), Watched(unowned=3, parameters=4)))[0]
    assert "· 200 of 201 optimizers, 4 parameters, coverage" in some
    assert "· 200 optimizers, 4 parameters, coverage" in every
    assert "· 4 parameters, coverage" in none


def test_missing_steps_are_a_second_line_with_the_reason() -> None:
    """Of ten steps six were watched, and what is known of the others is said."""
    account = Account(
        Taken(backwards=10, steps=10), Watched(steps=6), reasons=("the watch failed to start: no disk",)
    )
    told, missed = lines(account)
    assert told.startswith("gradwatch: 6 of 10 steps watched")
    assert missed == (
        "gradwatch: not seen: 4 of 10 optimizer steps not watched: the watch failed to start: no disk"
    )


def test_a_step_ended_by_its_closure_is_told_as_that(tmp_path: Path) -> None:
    """A closure that raises leaves nothing to watch: the reason is no guess, and the next step counts as ever."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def closure(fails: bool = False) -> torch.Tensor:
        if fails:
            raise ValueError("the script's")
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    with gradwatch.watch(model, optimizer, run_dir=tmp_path, listen=None) as gw:
        optimizer.step(closure)
        with pytest.raises(ValueError):
            optimizer.step(lambda: closure(fails=True))
        optimizer.step(closure)
        account = Account.from_dict(gw.status()["account"])
    assert (account.taken.steps, account.taken.raised, account.watched.steps) == (3, 1, 2)
    assert gaps(account) == ("1 of 3 optimizer steps not watched: 1 step ended by an exception, or os._exit",)


def test_a_step_that_an_exception_ended_before_the_watch_is_not_counted_in_it(tmp_path: Path) -> None:
    """Noticed as the thread steps again: the watch that began between has all its steps, and says nothing of it."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def fails() -> float:
        raise ValueError("the script's")

    for _ in range(2):
        with gradwatch.watch(model, optimizer, run_dir=tmp_path, listen=None) as gw:
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
            account = Account.from_dict(gw.status()["account"])
            with pytest.raises(ValueError):
                optimizer.step(fails)  # type: ignore[arg-type]
    assert (account.taken.steps, account.taken.raised, account.watched.steps) == (2, 0, 2)
    assert gaps(account) == ()


def test_a_watched_step_that_an_exception_ended_is_told(tmp_path: Path) -> None:
    """Its gradients were there and judged; whether the weights moved is unknown. If it ended the run, that is said."""
    torch.manual_seed(0)
    model, fails = torch.nn.Linear(2, 1), [False, True, False]

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if fails.pop(0):
                raise MemoryError
            return super().step(closure)

    optimizer = Failing(model.parameters(), 0.1)
    with gradwatch.watch(model, optimizer, run_dir=tmp_path, listen=None) as gw:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            with contextlib.suppress(MemoryError):
                optimizer.step()
        account = Account.from_dict(gw.status()["account"])
    assert (account.taken.steps, account.taken.raised, account.watched.steps) == (3, 1, 3)
    assert gaps(account) == (
        "whether the weights moved in 1 watched step that an exception, or os._exit, ended",
    )
    assert gaps(replace(account, ended="failed")) == ()


def test_backwards_without_a_step_are_told_by_what_was_made() -> None:
    """No optimizer at all, one that was never stepped, and gradients that never reach `.grad` read differently."""
    alone = gaps(Account(Taken(backwards=5)))
    made = gaps(Account(Taken(backwards=5, optimizers=1)))
    functional = gaps(Account(Taken(grad_calls=5)))
    (refused,) = gaps(Account(Taken(backwards=1, optimizers=1), reasons=("the rules do not fit",)))
    assert refused.endswith("seen: the rules do not fit")
    assert [
        "the script itself updated them" in alone[0],
        "never stepped" in made[0],
        "fill no .grad" in functional[0],
    ] == [True] * 3


def test_a_process_without_training_is_told_in_numbers() -> None:
    """Calls of torch.autograd.grad are named: a loop of torch.func trains all the same."""
    assert nothing_seen(Account()) == "gradwatch: no training seen in this process (0 backwards, 0 steps)"
    assert "7 calls of torch.autograd.grad" in nothing_seen(Account(Taken(grad_calls=7)))


@given(accounts)
def test_an_account_goes_through_json(account: Account) -> None:
    """What a journal keeps of an account is all of it."""
    assert Account.from_dict(json.loads(json.dumps(account.to_dict()))) == account


@given(accounts)
def test_no_step_is_missing_in_silence(account: Account) -> None:
    """Whatever else is counted: steps taken and not watched, and backwards that no step followed, are told."""
    taken, seen = account.taken, account.watched
    told = " ".join(gaps(account))
    if taken.steps > seen.steps:
        assert f"of {account.steps[1]:,} optimizer step" in told
    if taken.backwards and not (taken.steps or taken.rejected):
        assert "no step of a torch optimizer seen" in told
    if seen.cleared and (taken.steps or taken.rejected):
        assert "cleared" in told


@given(st.lists(accounts, min_size=1, max_size=3), takens)
def test_watches_of_one_process_add_up(found: list[Account], taken: Taken) -> None:
    """Steps and firings are sums; a rule was without data only where every watch that has judged a step says so."""
    launch_total = merged(found, taken)
    assert launch_total.taken == taken
    assert launch_total.watched.steps == sum(one.watched.steps for one in found)
    assert sum(launch_total.fired.values()) == sum(sum(one.fired.values()) for one in found)
    judged = [one for one in found if one.has_judged] or found
    assert set(launch_total.no_data) == set.intersection(*(set(one.no_data) for one in judged))


def test_a_process_that_judged_nothing_hides_no_rule_without_data() -> None:
    """A worker that only runs backwards has no rules; one whose every step was judged by none has no data to tell."""
    trained = Account(Taken(steps=9), Watched(steps=9), no_data={"a": "warm-up not over"}, rules=2)
    worker = Account(Taken(backwards=4))
    provisional = Account(Taken(steps=2), Watched(steps=2, provisional=2), rules=2)
    for found in ([trained, worker], [worker, trained], [provisional, trained, worker]):
        assert merged(found).no_data == trained.no_data


def test_a_step_without_a_verdict_is_told_with_what_may_have_ended_it() -> None:
    """Internal errors, or exceptions of the script where steps were ended by any."""
    (internal,) = gaps(Account(Taken(steps=9), Watched(steps=9, unjudged=1)))
    assert internal == "1 watched step could not be judged (internal errors, see the journal)"
    several = gaps(Account(Taken(steps=9, raised=3), Watched(steps=9, unjudged=2)))
    assert (
        "2 watched steps could not be judged (3 steps ended by an exception of the script's; or internal errors, see "
        "the journal)" in several
    )


def test_the_whole_short_reason_is_shown() -> None:
    """Each once, with the groups it names; only what it adds in brackets is left out. A group is no rule."""
    account = Account(
        Taken(steps=9),
        Watched(steps=9),
        inactive={
            "a": "matches no parameter of groups: layer4",
            "b": "matches no parameter of groups: layer4",
            "group:layer4": "matches no parameter",
        },
        no_data={"c": "needs several ranks, all of them watching (DDP, FSDP2)"},
        rules=5,
    )
    line = lines(account)[0]
    assert (
        "no data for 3 of 5 rules and 1 group of parameters (matches no parameter of groups: layer4; " in line
    )
    assert "; needs several ranks, all of them watching; matches no parameter)" in line
