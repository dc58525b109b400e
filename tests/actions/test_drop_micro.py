"""`drop_micro`: a step that lost a poisoned micro-batch is the step of a loop that never saw it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.errors import AttachError, RuleFileError
from gradwatch.rules.files import parse_rules
from tests.actions.skip.test_skip import digest
from tests.support.kept import Kept

RULES = parse_rules("version: 1\nrules: {n: {detect: {kind: nonfinite}, do: [drop_micro]}}")
G = torch.Generator().manual_seed(5)
BATCHES = [torch.randn(6, 3, generator=G) for _ in range(40)]


class Job:
    """An accumulating loop; `poison` names the micro-batches of the run that go wrong."""

    def __init__(self, poison: dict[int, float] | None = None, clip: float | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.05)
        self.poison = poison or {}
        self.clip = clip
        self.seen = 0

    def micro(self, weight: float) -> None:
        loss = self.model(BATCHES[self.seen % len(BATCHES)]).pow(2).mean() * weight
        (loss * self.poison.get(self.seen, 1.0)).backward()
        self.seen += 1

    def step(self, count: int, weight: float | None = None) -> None:
        self.optimizer.zero_grad()
        for _ in range(count):
            self.micro(1 / count if weight is None else weight)
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()

    def digest(self) -> str:
        return digest(list(self.model.parameters()), self.optimizer.state_dict()["state"])


def watch(job: Job, sink: Kept, **options: Any) -> gradwatch.Watch:
    return gradwatch.watch(job.model, job.optimizer, rules=RULES, sinks=[sink], **{"strict": True, **options})


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_step_without_its_poisoned_micro_batch(at: int, clip: float | None, bad: float) -> None:
    """As the loop that takes the mean over the three others, also where it clips; the other steps to the bit."""
    job, reference, sink = Job({8 + at: bad}, clip), Job(clip=clip), Kept()
    with watch(job, sink) as gw:
        for step in range(5):
            job.step(4)
            if step != 2:
                reference.step(4)
                if step < 2:
                    assert job.digest() == reference.digest()
                continue
            reference.optimizer.zero_grad()
            for micro in range(4):
                if micro == at:
                    reference.seen += 1
                else:
                    reference.micro(1 / 3)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(reference.model.parameters(), clip)
            reference.optimizer.step()
            for one, other in zip(job.model.parameters(), reference.model.parameters(), strict=True):
                assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)
            record = sink.records[-1]
            assert [event.kind for event in record.verdict.events] == ["firing"]
            assert "drop_micro" in {order.action for order in record.decision.orders}
            assert not record.decision.skip
            assert math.isfinite(record.snapshot.total_norm_applied)
        for one, other in zip(job.model.parameters(), reference.model.parameters(), strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
        assert [r.snapshot.micro for r in sink.records] == [4] * 5
        assert gw.health.errors() == {}


def test_exact_to_the_bit_where_the_correction_is_a_power_of_two() -> None:
    """Two of four dropped: the correction is 2, which rounds nothing."""
    job, reference, sink = Job({1: math.nan, 2: math.inf}), Job(), Kept()
    with watch(job, sink):
        job.step(4)
        reference.micro(0.5)
        reference.seen += 2
        reference.micro(0.5)
        reference.optimizer.step()
        assert job.digest() == reference.digest()


def test_without_poison_no_bit_changes() -> None:
    """Moving gradients aside and adding them back is what autograd does."""
    job, bare, sink = Job(), Job(), Kept()
    with watch(job, sink):
        for count in (1, 4, 4, 2, 3, 1):
            job.step(count)
            bare.step(count)
            assert job.digest() == bare.digest()
    assert all(not param._backward_hooks for param in job.model.parameters())


def test_a_step_that_lost_all_its_micro_batches_is_skipped() -> None:
    """Nothing is left to step by: weights and state as before, and it is told."""
    job, sink = Job({4: math.nan, 5: math.nan}), Kept()
    with watch(job, sink):
        for _ in range(2):
            job.step(2)
        before = job.digest()
        job.step(2)
        assert job.digest() == before
        assert sink.records[-1].decision.skip
        job.step(2)
        assert job.digest() != before


def test_a_window_that_was_cleared_counts_for_nothing() -> None:
    """Micro-batches given up with `zero_grad()` are no part of the correction."""
    job, reference, sink = Job({0: math.nan, 3: math.nan}), Job(), Kept()
    with watch(job, sink):
        job.micro(0.25)
        job.micro(0.25)
        job.optimizer.zero_grad()
        for _ in range(4):
            job.micro(0.25)
        job.optimizer.step()
        reference.seen = 2
        for at in range(4):
            if at == 1:
                reference.seen += 1
            else:
                reference.micro(1 / 3)
        reference.optimizer.step()
    for one, other in zip(job.model.parameters(), reference.model.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)


def test_gradients_taken_in_between_are_nobodys_micro_batch() -> None:
    """`autograd.grad` in the midst of a window moves nothing, and gets its gradients."""
    job, bare, sink = Job(), Job(), Kept()
    with watch(job, sink):
        for each in (job, bare):
            each.optimizer.zero_grad()
            each.micro(0.5)
            penalty = torch.autograd.grad(
                each.model(BATCHES[0]).sum(), list(each.model.parameters()), create_graph=True
            )
            sum((grad.pow(2).sum() for grad in penalty), torch.zeros(())).backward()
            each.micro(0.5)
            each.optimizer.step()
    assert job.digest() == bare.digest()


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise RuntimeError("the user's own")


@pytest.mark.parametrize("clears", [False, True])
def test_a_backward_that_raises_leaves_what_it_would_leave_without_us(clears: bool) -> None:
    """Whether the loop goes on with the partial gradients or clears them: as the unwatched one."""
    job, bare, sink = Job(), Job(), Kept()
    with watch(job, sink):
        for each in (job, bare):
            each.optimizer.zero_grad()
            each.micro(0.5)
            middle = Raises.apply(each.model[:2](BATCHES[0]))  # type: ignore[no-untyped-call]
            with pytest.raises(RuntimeError, match="the user's own"):
                each.model[2](middle).sum().backward()
            if clears:
                each.optimizer.zero_grad()
            each.micro(0.5)
            each.optimizer.step()
        assert job.digest() == bare.digest()


def test_a_grad_scaler_switches_it_off_loudly() -> None:
    """Else its scale would never fall: one report, and gradients as without us."""
    job, sink = Job({1: math.inf}), Kept()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with watch(job, sink, strict=False) as gw:
        for _ in range(2):
            job.optimizer.zero_grad()
            loss = job.model(BATCHES[0]).pow(2).mean() * job.poison.get(job.seen, 1.0)
            scaler.scale(loss).backward()
            job.seen += 1
            scaler.step(job.optimizer)
            scaler.update()
        assert scaler.get_scale() == 128.0
        assert gw.health.errors() == {"action": 1}


def test_several_ranks_and_other_rules_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can have no meaning is refused at attach, with the alternative."""
    job = Job()
    with pytest.raises(RuleFileError, match="kind: nonfinite"):
        parse_rules("version: 1\nrules: {n: {detect: {kind: spike, of: norm}, do: [drop_micro]}}")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(AttachError, match="skip_step"):
        watch(job, Kept())


def test_a_model_that_is_watched_so_is_copied_without_us() -> None:
    """The hooks are no part of a copy."""
    job, sink = Job(), Kept()
    with watch(job, sink):
        job.step(2)
        twin = copy.deepcopy(job.model)
        assert all(not param._backward_hooks for param in twin.parameters())
