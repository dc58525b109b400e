"""Parameters that a staggered rule never judged: named once in the account, and none where all were judged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.account import Account, unwatched_reasons
from gradwatch.account.account import merged
from gradwatch.rules.files import load_rules, parse_rules
from gradwatch.rules.rule_set import RuleSet
from gradwatch.session.watch import session_of
from tests.support.kept import Kept

RULES = parse_rules("""version: 1
rules:
  dead: {detect: {kind: above, of: zero_fraction, threshold: 0.99}, every: 5}
  big: {detect: {kind: above, of: max_abs, threshold: 1e9}, every: 5}
  total: {detect: {kind: above, of: weight_norm, threshold: 1e9}, scope: total, every: 5}
""")


def gaps(account: Account) -> tuple[str, ...]:
    """But for the first step of the second optimizer, of which the watch was not told before it: provisional."""
    provisional = "1 step judged for NaN and Inf alone"
    return tuple(one for one in unwatched_reasons.gaps(account) if not one.startswith(provisional))


class Heads(nn.Module):
    """A trunk and two heads, of which the second is used from one step on."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)
        self.both = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        trunk = self.trunk(x)
        found: torch.Tensor = self.first(trunk) + self.second(trunk) if self.both else self.first(trunk)
        return found


def trained(steps: int, both_from: int, path: Path, rules: RuleSet = RULES) -> Account:
    """The account of a training of `Heads`, with another optimizer from the seventh step on."""
    torch.manual_seed(0)
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with gradwatch.watch(model, optimizer, rules=rules, run_dir=path, sinks=[Kept()], strict=True) as gw:
        for step in range(steps):
            if step == 7:
                optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
            model.both = step >= both_from
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        gw.flush()
        return session_of(gw).account()


def test_a_head_that_no_step_used_is_named(tmp_path: Path) -> None:
    """Once, with the rules that have a value of it at no step; also after the account was written and read."""
    account = trained(20, 20, tmp_path)
    assert account.never_judged == dict.fromkeys(("dead", "big"), ("second.weight", "second.bias"))
    (gap,) = gaps(account)
    assert gap.startswith("second.weight, second.bias never judged by big, dead: no value")
    assert Account.from_dict(account.to_dict()).never_judged == account.never_judged


def test_several_processes_name_what_any_of_them_left_out() -> None:
    """Each name once, of each rule; of many the first few are shown."""
    names = tuple(f"p{k}" for k in range(6))
    one, other = (
        Account(never_judged={"dead": names[:2]}),
        Account(never_judged={"dead": names[1:], "big": ("q",)}),
    )
    both = merged([one, other])
    assert both.never_judged == {"dead": names, "big": ("q",)}
    first, second = gaps(both)
    assert first.startswith("p0, p1, p2, p3 and 2 more never judged by dead:")
    assert second.startswith("q never judged by big:")


@pytest.mark.parametrize(("steps", "both_from"), [(20, 0), (20, 15), (3, 3), (20, 6)])
def test_nothing_is_named_that_was_judged_or_whose_turn_has_hardly_come(
    steps: int, both_from: int, tmp_path: Path
) -> None:
    """Also where it was judged under the optimizer before, late, or the training ended within the first period."""
    assert not gaps(trained(steps, both_from, tmp_path))


def test_the_default_pack_names_nothing_in_a_healthy_training(tmp_path: Path) -> None:
    """Every parameter of every staggered rule has its value within a period."""
    assert not gaps(trained(40, 0, tmp_path, load_rules("default")))
