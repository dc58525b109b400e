"""`gw.rebaseline(reason)`: after a change made on purpose nothing is taken for a fault, and everybody is told."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.account.account import Account
from gradwatch.account.session_counts import MOST_REASONS, OTHER_REASONS, SessionCounts
from gradwatch.errors import GradwatchError
from gradwatch.journal.reader import read_journal
from gradwatch.sinks.log import LogSink
from tests.support.kept import Kept

REASON = "the loss is summed now"


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that hardly moves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), 1e-7)


def trained(
    gw: Any, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, scale: float = 1.0
) -> None:
    """Steps whose loss is `scale` times as large."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(torch.randn(64, 4)) - 1).square().mean() * scale
        loss.backward()
        optimizer.step()


def events_of(sink: Kept, kind: str) -> list[Any]:
    """The events of a kind, in order."""
    return [event for one in sink.records for event in one.verdict.events if event.kind == kind]


def test_what_was_changed_on_purpose_is_no_fault(tmp_path: Path) -> None:
    """A loss a hundred times as large: the pack says nothing once told so, and `healthy` stays true."""
    model, optimizer = build()
    sink, text = Kept(), io.StringIO()
    with gradwatch.watch(
        model, optimizer, sinks=[sink, LogSink(stream=text)], run_dir=tmp_path, strict=True
    ) as gw:
        trained(gw, model, optimizer, 120)
        gw.rebaseline(REASON)
        for _ in range(120):
            trained(gw, model, optimizer, 1, 100.0)
            assert gw.healthy
        account = gw.status()["account"]
    told = events_of(sink, "rebaselined")
    assert [(event.step, event.summary, event.count, event.severity) for event in told] == [
        (120, REASON, 4, "info")
    ]
    assert "norm-spike" in told[0].description.split(", ")
    assert events_of(sink, "firing") == []
    assert account["rebaselined"] == {REASON: 1}
    assert "gradwatch rebaselined" in text.getvalue()
    assert text.getvalue().count(REASON) == 2  # with the step, and in the account
    assert Account.from_dict(account).rebaselined == {REASON: 1}


def test_without_it_the_same_change_is_told_as_a_fault(tmp_path: Path) -> None:
    """The control of the test above."""
    model, optimizer = build()
    sink = Kept()
    with gradwatch.watch(model, optimizer, sinks=[sink], run_dir=tmp_path, strict=True) as gw:
        trained(gw, model, optimizer, 120)
        trained(gw, model, optimizer, 20, 100.0)
    assert {"total-norm-spike-severe", "norm-spike"} <= {event.rule for event in events_of(sink, "firing")}


def test_only_the_rules_named_begin_anew(tmp_path: Path) -> None:
    """Others go on to judge by what they have learned."""
    model, optimizer = build()
    sink = Kept()
    with gradwatch.watch(model, optimizer, sinks=[sink], run_dir=tmp_path, strict=True) as gw:
        trained(gw, model, optimizer, 120)
        gw.rebaseline(REASON, rules=["norm-spike", "norm-growth"])
        trained(gw, model, optimizer, 5, 100.0)
    fired = {event.rule for event in events_of(sink, "firing")}
    assert "total-norm-spike-severe" in fired
    assert not {"norm-spike", "norm-growth"} & fired
    assert events_of(sink, "rebaselined")[0].description == "norm-growth, norm-spike"


def test_what_was_firing_is_resolved(tmp_path: Path) -> None:
    """Else it would fire on through a warm-up in which nobody looks."""
    model, optimizer = build()
    sink = Kept()
    with gradwatch.watch(model, optimizer, sinks=[sink], run_dir=tmp_path, strict=True) as gw:
        trained(gw, model, optimizer, 120)
        trained(gw, model, optimizer, 1, 100.0)
        firing = set(gw.status()["firing"])
        assert "total-norm-spike-severe" in firing
        gw.rebaseline(REASON)
        trained(gw, model, optimizer, 1, 100.0)
        assert gw.status()["firing"] == []
    resolved = {event.rule: event.step for event in events_of(sink, "resolved")}
    assert resolved["total-norm-spike-severe"] == 121


def test_a_fault_after_the_new_warm_up_is_told(tmp_path: Path) -> None:
    """Blind for the warm-up, and no longer."""
    model, optimizer = build()
    sink = Kept()
    with gradwatch.watch(model, optimizer, sinks=[sink], run_dir=tmp_path, strict=True) as gw:
        trained(gw, model, optimizer, 60)
        gw.rebaseline(REASON)
        trained(gw, model, optimizer, 60, 100.0)
        trained(gw, model, optimizer, 1, 1e5)
    assert {event.step for event in events_of(sink, "firing")} == {120}


def test_the_journal_keeps_it(tmp_path: Path) -> None:
    """With its step and its reason, to be read by any process."""
    model, optimizer = build()
    with gradwatch.watch(model, optimizer, run_dir=tmp_path, listen=None, strict=True) as gw:
        trained(gw, model, optimizer, 30)
        gw.rebaseline(REASON)
        trained(gw, model, optimizer, 2)
        assert gw.flush()
        directory = gw.run.directory
    (journal,) = read_journal(directory)
    told = [event for event in journal.events() if event.kind == "rebaselined"]
    assert [(event.step, event.summary) for event in told] == [(30, REASON)]


def test_a_rule_that_there_is_none_of_is_told(tmp_path: Path) -> None:
    """The others begin anew all the same; only `strict` raises."""
    model, optimizer = build()
    sink = Kept()
    with gradwatch.watch(model, optimizer, sinks=[sink], run_dir=tmp_path) as gw:
        trained(gw, model, optimizer, 5)
        gw.rebaseline(REASON, rules=["norm-spik", "norm-growth"])
        gw.rebaseline(REASON, rules="norm-spik")
        trained(gw, model, optimizer, 1)
        assert gw.status()["internal_errors"]["rebaseline"] == 2
    assert [event.description for event in events_of(sink, "rebaselined")] == ["norm-growth"]
    with (
        gradwatch.watch(model, optimizer, sinks=[], run_dir=tmp_path, strict=True) as gw,
        pytest.raises(GradwatchError, match="no rule 'norm-spik'; did you mean 'norm-spike'"),
    ):
        gw.rebaseline(REASON, rules=["norm-spik"])


class Frozen(nn.Module):
    """A backbone whose gradients are a hundred times those of its head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone, self.head = nn.Linear(4, 4), nn.Linear(4, 1, bias=False)
        nn.init.constant_(self.head.weight, 1.0)
        for (
            parameter
        ) in self.backbone.parameters():  # the head's gradients are as small as what comes out of it
            nn.init.constant_(parameter, 0.005)
        self.backbone.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One value a sample."""
        output: torch.Tensor = self.head(self.backbone(x))
        return output


def unfrozen(model: Frozen, optimizer: torch.optim.Optimizer, grouped: bool) -> None:
    """Train the backbone too; `grouped`: as a group that the optimizer did not have."""
    model.backbone.requires_grad_(True)
    if grouped:
        optimizer.add_param_group({"params": list(model.backbone.parameters())})


@pytest.mark.parametrize("grouped", [True, False])
def test_unfrozen_parameters_are_no_fault(tmp_path: Path, grouped: bool) -> None:
    """The total of more parameters than before begins anew by itself, and is told; what others learned is kept."""
    model = Frozen()
    given = model.head.parameters() if grouped else model.parameters()
    optimizer = torch.optim.SGD(given, 1e-4)
    sink = Kept()
    with gradwatch.watch(model, optimizer, sinks=[sink], run_dir=tmp_path, strict=True) as gw:
        trained(gw, model, optimizer, 120)
        unfrozen(model, optimizer, grouped)
        for _ in range(60):
            trained(gw, model, optimizer, 1)
            assert gw.healthy
        assert [event.rule for event in events_of(sink, "firing")] == []
        trained(gw, model, optimizer, 1, 1e3)
        account = gw.status()["account"]
    (told,) = events_of(sink, "rebaselined")
    reason = "2 parameters joined the optimizer: backbone.weight, backbone.bias"
    assert (told.step, told.summary) == (120, reason)
    assert {"total-norm-spike", "jump"} <= set(told.description.split(", "))
    assert not {"norm-spike", "loss-spike", "lr-jump"} & set(told.description.split(", "))
    assert account["rebaselined"] == {reason: 1}
    fired = {(event.step, event.rule) for event in events_of(sink, "firing")}
    assert {(180, "norm-spike"), (180, "total-norm-spike")} <= fired


def test_frozen_parameters_are_no_fall(tmp_path: Path) -> None:
    """The total of fewer parameters than before is another total."""
    model = Frozen()
    model.backbone.requires_grad_(True)
    optimizer = torch.optim.SGD(
        [{"params": model.head.parameters()}, {"params": model.backbone.parameters()}], 1e-4
    )
    sink = Kept()
    with gradwatch.watch(model, optimizer, sinks=[sink], run_dir=tmp_path, strict=True) as gw:
        trained(gw, model, optimizer, 250)
        del optimizer.param_groups[1]
        model.backbone.requires_grad_(False)
        trained(gw, model, optimizer, 60)
    assert events_of(sink, "firing") == []
    assert [event.summary for event in events_of(sink, "rebaselined")] == [
        "2 parameters left the optimizer: backbone.weight, backbone.bias"
    ]


def test_another_optimizer_in_the_place_of_one_that_is_gone_has_other_parameters(tmp_path: Path) -> None:
    """Nothing has joined or left an optimizer: the one of a model that lives on is gone, and another model came."""
    (model, optimizer), (other, _), sink = build(), build(), Kept()
    with gradwatch.watch(model, optimizer, sinks=[sink], run_dir=tmp_path, strict=True) as gw:
        trained(gw, model, optimizer, 60)
        del optimizer
        gw.add([other])
        trained(gw, other, torch.optim.SGD(other.parameters(), 1e-7), 10)
    (told,) = events_of(sink, "rebaselined")
    count = len(list(other.parameters()))
    assert told.summary.startswith(
        f"the optimizer trains other parameters, {count} in the place of {count}: "
    )


def test_an_optimizer_made_anew_over_the_same_parameters_begins_nothing_anew(tmp_path: Path) -> None:
    """Nothing that is judged is made of others than before."""
    model, optimizer = build()
    sink = Kept()
    with gradwatch.watch(model, optimizer, sinks=[sink], run_dir=tmp_path, strict=True) as gw:
        trained(gw, model, optimizer, 60)
        del optimizer
        again = torch.optim.SGD(model.parameters(), 1e-7)
        trained(gw, model, again, 10)
    assert events_of(sink, "rebaselined") == []


def test_reasons_without_end_are_counted_together() -> None:
    """A script that gives a reason of its own each time keeps no more of them than some."""
    counts = SessionCounts()
    for number in range(MOST_REASONS + 10):
        counts.begun_anew(f"reason {number}")
    counts.begun_anew("reason 0")
    assert len(counts.rebaselined) == MOST_REASONS + 1
    assert (counts.rebaselined["reason 0"], counts.rebaselined[OTHER_REASONS]) == (2, 10)
