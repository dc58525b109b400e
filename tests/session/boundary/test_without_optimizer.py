"""Loops that move their weights without an optimizer of torch's: observed from their backwards, never acted on."""

from __future__ import annotations

import copy
import gc
import io
import math
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.session.watch import session_of
from gradwatch.sinks.log import LogSink
from gradwatch.sinks.prometheus.sink import PrometheusSink
from tests.support.kept import Kept

STEPS = 8


class Trained:
    """One training by hand, bare or watched."""

    def __init__(self, *, clip: bool, micros: int, in_place: bool, watched: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.kept, self.norms, self.applied, self.losses = Kept(), [], [], []
        gw = gradwatch.watch(self.model, sinks=[self.kept], strict=True) if watched else None
        for step in range(STEPS):
            self.step(step, clip, micros, in_place)
        if gw is not None:
            self.status = gw.status()
            gw.close()
            self.account = session_of(gw).account()

    def step(self, step: int, clip: bool, micros: int, in_place: bool) -> None:
        """Backwards, perhaps a clip, and the move; gradients are not finite in the last step but one."""
        params = list(self.model.parameters())
        self.model.zero_grad()
        loss = 0.0
        for _ in range(micros):
            part: Tensor = self.model(torch.randn(3, 4)).square().mean()
            if step == STEPS - 2:
                part = part * float("inf")
            part.backward()
            loss += part.item()
        self.losses.append(loss)
        self.norms.append(total(params))
        if clip:
            nn.utils.clip_grad_norm_(params, 0.1)
        self.applied.append(total(params))
        with torch.no_grad():
            for param in params:
                assert param.grad is not None
                step_of = param.grad.nan_to_num(0, 0, 0) * -0.05
                if in_place:
                    param.add_(step_of)
                else:
                    param.data.add_(step_of)


def total(params: list[nn.Parameter]) -> float:
    """The total norm of the gradients there are."""
    return float(nn.utils.get_total_norm([param.grad for param in params if param.grad is not None]))


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "data"])
@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("clip", [False, True], ids=["bare", "clipped"])
def test_every_step_is_recorded_and_none_is_touched(clip: bool, micros: int, in_place: bool) -> None:
    """Counted steps are real steps, with norms before and after the clip, losses and labels; weights are as bare."""
    bare = Trained(clip=clip, micros=micros, in_place=in_place, watched=False)
    seen = Trained(clip=clip, micros=micros, in_place=in_place, watched=True)
    for left, right in zip(bare.model.parameters(), seen.model.parameters(), strict=True):
        assert torch.equal(left, right)
    found = [record.snapshot for record in seen.kept.records]
    assert [one.step for one in found] == list(range(STEPS))
    assert [one.micro for one in found] == [micros] * STEPS
    assert [one.total_norm for one in found] == pytest.approx(seen.norms, rel=1e-5, nan_ok=True)
    if clip:
        assert [one.total_norm_applied for one in found] == pytest.approx(seen.applied, rel=1e-4, nan_ok=True)
    assert [one.scalars["loss"] for one in found] == pytest.approx(seen.losses, rel=1e-6)
    assert all(one.scalars["observed_only"] for one in found)
    assert seen.status["observed_only"]
    assert (seen.account.watched.unowned, seen.account.watched.steps) == (STEPS, 0)
    assert "non-finite" in seen.kept.records[STEPS - 2].verdict.firing
    assert not any(record.decision.acts for record in seen.kept.records)


def test_accumulation_for_an_optimizer_not_known_yet_is_no_step_by_hand() -> None:
    """Until weights have moved nothing is claimed: the optimizer that steps at last has the first step."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = Kept()
    with gradwatch.watch(model, sinks=[kept], strict=True) as gw:
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(3):
                model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
        assert not gw.status()["observed_only"]
    assert [record.snapshot.step for record in kept.records] == [0, 1, 2]
    assert not any("observed_only" in record.snapshot.scalars for record in kept.records)


def test_an_optimizer_that_turns_up_takes_over() -> None:
    """Its steps go on from those observed, with a learning rate, and are acted on again."""
    model = nn.Linear(4, 1)
    kept = Kept()
    with gradwatch.watch(model, sinks=[kept], strict=True) as gw:
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            for param in model.parameters():
                assert param.grad is not None
                param.data.add_(param.grad, alpha=-0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
        assert not gw.status()["observed_only"]
    found = [record.snapshot for record in kept.records]
    assert [one.step for one in found] == list(range(6))
    assert [one.scalars.get("lr") for one in found] == [None, None, None, 0.5, 0.5, 0.5]


def by_hand(model: nn.Module, loss: Tensor, change: Callable[[Tensor], None] | None = None) -> float:
    """One step of SGD written by hand; `change` is done to each gradient first. The norm that was applied."""
    params = list(model.parameters())
    loss.backward()
    for param in params:
        assert param.grad is not None
        if change is not None:
            change(param.grad)
        param.data.add_(param.grad, alpha=-0.05)
    return total(params)


@pytest.mark.parametrize(
    "change",
    [
        lambda grad: grad.clamp_(-0.01, 0.01),
        lambda grad: grad.data.mul_(0.1),
        lambda grad: grad.mul_(0.1),
        lambda grad: None,
    ],
    ids=["value", "scaled in data", "scaled", "untouched"],
)
@pytest.mark.parametrize("zeroed", [False, True], ids=["dropped", "zeroed"])
def test_the_norm_applied_is_the_one_that_moved_the_weights_or_unknown(
    change: Callable[[Tensor], None], zeroed: bool
) -> None:
    """Whoever changes the gradients, and however: where they are gone when the step is judged nothing is claimed."""
    torch.manual_seed(0)
    model, kept, applied = nn.Linear(4, 1), Kept(), []
    with gradwatch.watch(model, sinks=[kept], strict=True):
        for _ in range(4):
            model.zero_grad(set_to_none=not zeroed)
            applied.append(by_hand(model, model(torch.randn(3, 4)).square().mean(), change))
    found = [record.snapshot for record in kept.records]
    assert len(found) == len(applied)
    known = [one.applied_known for one in found]
    assert known == ([False] * 3 + [True] if zeroed else [True] * 4)
    for one, norm in zip(found, applied, strict=True):
        column = one.column("norm_applied")
        assert column is not None
        assert column.present.all() == one.applied_known
        if one.applied_known:
            assert one.total_norm_applied == pytest.approx(norm, rel=1e-5)
        else:
            assert math.isnan(one.total_norm_applied)


def test_what_is_observed_only_is_labelled_so_wherever_it_is_shown() -> None:
    """The label of each series, the field of each log line, and the status name the capture that no optimizer moves."""
    torch.manual_seed(0)
    first, second, told = nn.Linear(4, 1), nn.Linear(4, 1), io.StringIO()
    metrics = PrometheusSink(listen=None)
    optimizer = torch.optim.SGD(first.parameters(), 0.05)
    with gradwatch.watch(
        [first, second], optimizer, sinks=[metrics, LogSink(stream=told)], strict=True
    ) as gw:
        for step in range(3):
            optimizer.zero_grad()
            second.zero_grad()
            first(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            by_hand(second, second(torch.randn(3, 4)).square().mean() * (math.nan if step == 2 else 1))
        assert gw.status()["observed_only"] == [1]
        shown = metrics.render().decode()
    assert 'gradwatch_steps_total{optimizer="0"} 3\n' in shown
    assert 'gradwatch_steps_total{optimizer="none"} 3\n' in shown
    assert 'gradwatch_nonfinite_steps_total{optimizer="none"} 1\n' in shown
    assert "rule=non-finite severity=critical step=2 optimizer=none " in told.getvalue()
    alone, metrics = nn.Linear(4, 1), PrometheusSink(listen=None)
    with gradwatch.watch(alone, sinks=[metrics], strict=True) as gw:
        for _ in range(2):
            alone.zero_grad()
            by_hand(alone, alone(torch.randn(3, 4)).square().mean())
        session_of(gw).account()
        assert 'gradwatch_steps_total{optimizer="none"} 2\n' in metrics.render().decode()


def test_weights_that_are_not_finite_and_never_move_are_no_loop() -> None:
    """NaN is other than itself; a part that nobody trains is claimed by none all the same."""
    backbone, head = nn.Linear(4, 4), nn.Linear(4, 1)
    nn.init.constant_(backbone.weight, math.nan)
    optimizer, kept = torch.optim.SGD(head.parameters(), 0.05), Kept()
    with gradwatch.watch([backbone, head], optimizer, rules="observe-only", sinks=[kept], strict=True) as gw:
        for _ in range(4):
            optimizer.zero_grad()
            head(backbone(torch.randn(3, 4))).square().mean().backward()
            optimizer.step()
    assert session_of(gw).account().watched.unowned == 0


def test_one_side_of_a_pair_may_be_trained_by_hand() -> None:
    """Both sides of a GAN are counted, the one with an optimizer is acted on, and neither takes the other's place."""
    torch.manual_seed(0)
    made, judge, kept = nn.Linear(4, 4), nn.Linear(4, 1), Kept()
    with gradwatch.watch([made, judge], sinks=[kept], strict=True) as gw:
        for epoch in range(2):
            optimizer = torch.optim.SGD(judge.parameters(), 0.05)  # a new one takes over from the old one
            for _ in range(4):
                optimizer.zero_grad()
                judge(made(torch.randn(3, 4)).detach()).mean().backward()
                optimizer.step()
                made.zero_grad()
                by_hand(made, judge(made(torch.randn(3, 4))).square().mean())
            assert gw.status()["observed_only"], epoch
    observed = [one.snapshot for one in kept.records if "observed_only" in one.snapshot.scalars]
    stepped = [one.snapshot for one in kept.records if "observed_only" not in one.snapshot.scalars]
    assert [one.step for one in observed] == [one.step for one in stepped] == list(range(8))
    assert {one.optimizer for one in observed} == {1}
    assert {int(one.sites.numels.sum()) for one in observed} == {20}  # made, and nothing of judge
    assert (session_of(gw).account().watched.unowned, session_of(gw).account().watched.steps) == (8, 8)


@pytest.mark.parametrize("same", [True, False], ids=["same model", "another"])
def test_a_loop_by_hand_after_one_with_an_optimizer_is_seen(same: bool) -> None:
    """The optimizer is gone, or has another model: what moves the weights now is the loop's own code."""
    first, second = nn.Linear(4, 1), nn.Linear(4, 1)
    kept = Kept()
    with gradwatch.watch([first, second], sinks=[kept], strict=True):
        optimizer = torch.optim.SGD(first.parameters(), 0.05)
        for _ in range(3):
            optimizer.zero_grad()
            first(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
        if same:
            del optimizer
        model = first if same else second
        for _ in range(5):
            model.zero_grad()
            by_hand(model, model(torch.randn(3, 4)).square().mean())
    assert len(kept.records) == 8
    assert sum("observed_only" in one.snapshot.scalars for one in kept.records) == 5


def test_weights_that_never_move_are_claimed_by_none_and_soon_read_no_more() -> None:
    """A backbone that was neither frozen nor given to the optimizer costs no reads, and is seen when it is trained."""
    torch.manual_seed(0)
    backbone, head, kept = nn.Linear(4, 4), nn.Linear(4, 1), Kept()
    optimizer = torch.optim.SGD(head.parameters(), 0.05)
    with gradwatch.watch([backbone, head], sinks=[kept], strict=True) as gw:
        for step in range(100):
            optimizer.zero_grad()
            backbone.zero_grad()
            head(backbone(torch.randn(3, 4))).square().mean().backward()
            optimizer.step()
            if step >= 90:
                for param in backbone.parameters():
                    assert param.grad is not None
                    param.data.add_(param.grad, alpha=-0.05)
    observed = [one.snapshot for one in kept.records if "observed_only" in one.snapshot.scalars]
    assert [one.step for one in observed] == list(
        range(9)
    )  # the first was not read, and is said to be missing
    assert session_of(gw).account().watched.cleared == 1


@pytest.mark.parametrize("sparse", [False, True])
def test_an_embedding_of_which_few_rows_move_is_seen(sparse: bool) -> None:
    """Beside an optimizer: rows far from the first, of which a few are used."""
    torch.manual_seed(0)
    table, other, kept = nn.Embedding(5000, 16, sparse=sparse), nn.Linear(4, 1), Kept()
    optimizer = torch.optim.SGD(other.parameters(), 0.05)
    with gradwatch.watch([other, table], sinks=[kept], strict=True) as gw:
        for _ in range(6):
            optimizer.zero_grad()
            other(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            table.zero_grad()
            table(torch.randint(2000, 2010, (4,))).square().mean().backward()
            assert table.weight.grad is not None
            table.weight.data.add_(table.weight.grad, alpha=-0.05)
    assert (session_of(gw).account().watched.unowned, session_of(gw).account().watched.steps) == (6, 6)


def test_weights_moved_inside_the_backward_are_told() -> None:
    """A hook moves them and drops the gradient, so that nothing is left to be read: counted, beside an optimizer."""
    model, other = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(other.parameters(), 0.05)

    def moved(param: Tensor) -> None:
        assert param.grad is not None
        param.data.add_(param.grad, alpha=-0.05)
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(moved)
    with gradwatch.watch([other, model], optimizer, sinks=[Kept()], strict=True) as gw:
        for _ in range(6):
            optimizer.zero_grad()
            other(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            model(torch.randn(3, 4)).square().mean().backward()
    assert session_of(gw).account().watched.cleared == 6


def test_loops_by_hand_in_threads_are_counted_each() -> None:
    """Each thread trains a model of its own: every step once, whichever thread notices it."""
    torch.manual_seed(0)
    models, batch, kept = [nn.Linear(4, 4) for _ in range(3)], torch.randn(3, 4), Kept()

    def train(model: nn.Module) -> None:
        for _ in range(20):
            model.zero_grad()
            by_hand(model, model(batch).square().mean())

    with gradwatch.watch(models, sinks=[kept]) as gw:
        threads = [threading.Thread(target=train, args=(model,)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert session_of(gw).account().watched.unowned == 60
    assert not gw.status()["internal_errors"]
    for captured in range(3):
        steps = [one.snapshot.step for one in kept.records if one.snapshot.optimizer == captured]
        assert steps == list(range(20))


def test_a_model_made_anew_for_each_task_takes_the_place_of_the_one_before() -> None:
    """Inner loops by hand on copies that are thrown away: the captures do not grow, and every step is counted."""
    torch.manual_seed(0)
    outer, kept = nn.Linear(4, 4), Kept()
    with gradwatch.watch(outer, sinks=[kept], strict=True) as gw:
        for _ in range(12):
            inner = copy.deepcopy(outer)
            session_of(gw).join([inner], [])
            for _ in range(3):
                inner.zero_grad()
                by_hand(inner, inner(torch.randn(3, 4)).square().mean())
        assert len(session_of(gw).captures()) <= 2
    assert session_of(gw).account().watched.unowned == 36


def test_a_model_trained_by_hand_is_freed_when_another_one_is_built() -> None:
    """Nothing holds its weights once the script does not: no backward has to come first."""
    kept, other = Kept(), nn.Linear(2, 2)
    with gradwatch.watch([other], sinks=[kept], strict=True) as gw:
        model = nn.Linear(4, 4)
        session_of(gw).join([model], [])
        for _ in range(3):
            model.zero_grad()
            by_hand(model, model(torch.randn(3, 4)).square().mean())
        storages = [part.untyped_storage().data_ptr() for part in model.parameters()]
        del model
        gc.collect()
        nn.Linear(2, 2)
        gc.collect()
        held = {part.untyped_storage().data_ptr() for part in gc.get_objects() if type(part) is nn.Parameter}
        assert held.isdisjoint(storages)
    assert len(kept.records) == 3


def test_what_a_thread_has_trained_is_settled_by_others_once_it_has_ended() -> None:
    """The thread that took the steps is gone, so nothing can race with it: the last step by hand is counted too."""
    first, second = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(first.parameters(), 0.05)

    def train() -> None:
        first(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()

    with gradwatch.watch([first, second], optimizer, sinks=[Kept()], strict=True) as gw:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        for _ in range(3):
            second.zero_grad()
            by_hand(second, second(torch.randn(3, 4)).square().mean())
        assert session_of(gw).account().watched.unowned == 3
