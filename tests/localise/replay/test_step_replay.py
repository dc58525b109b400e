"""A step run again: the same gradients to the bit, and no trace of it, also when it raises."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwatch.localise.diagnosis.diagnose import DERIVATIVE, MAYBE, NOT_AGAIN, diagnose, of_loss_alone
from gradwatch.localise.held_calls.model_recorder import ModelRecorder
from gradwatch.localise.held_calls.module_attributes import Refused
from gradwatch.localise.replay.step_replay import Trace, replay
from gradwatch.records.finding import Finding
from gradwatch.taps import module_calls
from tests.localise.jobs import KINDS, Job, train
from tests.localise.models import BAD, Faulty, SqrtAtZero
from tests.localise.suite import MODELS
from tests.localise.trial import trial


def failed(*error: object) -> None:
    """No fault of ours is expected."""
    raise AssertionError(error)


def again(model: nn.Module, holding: ModelRecorder) -> list[Trace]:
    """The held calls of a model, run again."""
    return replay([(model, call) for call in holding.calls], [model], failed)


class Replaying:
    """Replays some steps of a job; keeps the gradients that autograd gave the stand-ins."""

    def __init__(self, steps: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = steps
        self.grads: list[list[Tensor]] = []
        self.holding: ModelRecorder | None = None
        inner = torch.autograd.grad

        def grad(roots: Any, leaves: Any, *args: Any, **kwargs: Any) -> Any:
            found = inner(roots, leaves, *args, **kwargs)
            self.grads.append([*found])
            self.leaves = leaves
            return found

        monkeypatch.setattr(torch.autograd, "grad", grad)

    def __call__(self, model: Job, step: int) -> None:
        if step < 0:
            self.holding = ModelRecorder(model, failed)
            return
        assert self.holding is not None
        if step in self.steps:
            before = [
                (param.grad, param.grad.clone()) for param in model.parameters() if param.grad is not None
            ]
            self.grads.clear()
            traces = again(model, self.holding)
            assert diagnose(traces).phase == "unknown"
            for param, (grad, copy) in zip(model.parameters(), before, strict=True):
                assert param.grad is grad
                assert torch.equal(grad, copy)
            self.same(model)
        self.holding.drop()

    def same(self, model: Job) -> None:
        """The gradients of the replayed calls add up to those of the step."""
        found = {}
        for grads in self.grads:
            for grad in grads:
                found.setdefault(grad.shape, []).append(grad)
        weight = model.leave.weight.grad
        assert weight is not None
        total = torch.zeros_like(weight)
        for grad in found[weight.shape]:
            total += grad
        assert torch.equal(total, weight)


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_bit_identical_with_and_without_replays(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, buffers, losses, generators and the model's own attributes are the same; `.grad` is not touched."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch, of reentrant checkpoints and of autocast
        bare, losses, generators = train(kind, lambda model, step: None)
        watched, same_losses, same_generators = train(kind, Replaying((1, 2, 4), monkeypatch))
    assert losses == same_losses
    assert generators == same_generators
    for name, tensor in bare.state_dict().items():
        assert torch.equal(tensor, watched.state_dict()[name]), name
    assert (bare.calls, bare.seen) == (watched.calls, watched.seen)


class RaisesAgain(nn.Module):
    """Raises in the middle of its second call, with everything changed that a forward may change."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.armed = False
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.layer(torch.nn.functional.dropout(x)))
        self.seen.append(1)
        self.late = 1
        if self.armed:
            raise RuntimeError("not again")
        return h


def test_a_replay_that_raises_leaves_no_trace() -> None:
    """Generators, buffers, anomaly flags, grad mode, attributes and `.grad` are as before."""
    torch.manual_seed(0)
    model = RaisesAgain()
    holding = ModelRecorder(model, failed)
    model(torch.randn(4, 3)).square().sum().backward()
    model.armed = True
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    grads = [param.grad for param in model.parameters()]
    generator, seen = torch.get_rng_state(), list(model.seen)
    attributes = dict(model.__dict__)
    with torch.autograd.set_detect_anomaly(True, check_nan=True), torch.no_grad():
        with pytest.raises(RuntimeError, match="not again"):
            again(model, holding)
        assert torch.is_anomaly_enabled()
        assert torch.is_anomaly_check_nan_enabled()
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.seen == seen
    assert model.__dict__ == attributes
    assert all(param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True))
    for name, tensor in state.items():
        assert torch.equal(tensor, model.state_dict()[name])
    holding.close()


def test_models_are_given_back_as_found() -> None:
    """No hook of ours is left on a model, and a copy of a held model carries none."""
    import copy

    model = nn.Sequential(nn.Linear(2, 2))
    holding = ModelRecorder(model, failed)
    model(torch.ones(1, 2)).sum().backward()
    twin = copy.deepcopy(model)
    twin(torch.ones(1, 2))
    assert len(holding.calls) == 1
    again(model, holding)
    holding.close()
    assert not module_calls.noticed(model)
    assert not any("_call_impl" in vars(kind) for kind in (nn.Sequential, nn.Linear))
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert "apply" not in torch.utils.checkpoint.CheckpointFunction.__dict__


def stepped(model: nn.Module, x: Tensor) -> ModelRecorder:
    """One forward and backward, held."""
    holding = ModelRecorder(model, failed)
    model(x).sum().backward()
    return holding


def test_refused_where_the_input_was_written_into() -> None:
    """A batch that was changed since is not the batch of the step."""
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    holding = stepped(model, x)
    x.mul_(2)
    with pytest.raises(Refused, match="an input was written into"):
        again(model, holding)


def test_refused_where_the_mode_was_switched() -> None:
    """eval() between forward and step would make another forward of it."""
    model = nn.Linear(2, 2)
    holding = stepped(model, torch.ones(1, 2))
    model.eval()
    with pytest.raises(Refused, match="train"):
        again(model, holding)


def test_refused_where_other_ranks_would_be_asked() -> None:
    """A forward with a collective in it cannot be run by one rank: it is not even held."""
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    holding = ModelRecorder(model, failed)
    assert "SyncBatchNorm communicates with other ranks" in holding.refused
    assert not module_calls.noticed(model)


def test_a_model_that_is_held_can_go() -> None:
    """Nothing that is held keeps a model alive, its buffers included."""
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("table", torch.zeros(3))
    holding = ModelRecorder(model, failed)
    model(torch.ones(1, 2)).sum().backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert holding.model() is None


def test_large_gradients_at_the_outputs_are_let_go() -> None:
    """What exceeds the cap is not held, and the refusal says so."""
    model = nn.Linear(2, 1000)
    holding = ModelRecorder(model, failed, max_bytes=1000)
    model(torch.ones(1, 2)).sum().backward()
    assert not holding.calls[0].gradients
    assert not holding.calls[0].args
    with pytest.raises(Refused, match="max_bytes"):
        again(model, holding)


def test_earlier_micro_batches_are_held_as_far_as_the_cap_allows() -> None:
    """Their arguments are let go of first; the latest call is held whatever its size."""
    model = nn.Linear(100, 1)
    holding = ModelRecorder(model, failed, max_bytes=3000)
    for _ in range(20):
        model(torch.ones(2, 100)).sum().backward()
    assert 1 < len(holding.calls) <= 5
    assert holding.dropped == 20 - len(holding.calls)
    assert sum(call.nbytes for call in holding.calls) - holding.calls[-1].nbytes <= 3000


def test_a_forward_that_writes_into_its_parameters_is_not_replayed() -> None:
    """It would do so twice."""

    class Clamped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
            return super().forward(x)

    holding = ModelRecorder(model := Clamped(2, 2), failed)
    model(torch.ones(1, 2))
    assert "writes into its own parameters" in holding.refused


def test_hooks_of_the_user_on_parameters_do_not_hear_a_replay() -> None:
    """Neither tensor hooks nor post-accumulate hooks fire again: autograd works on stand-ins."""
    model, heard = nn.Linear(2, 2), []
    model.weight.register_hook(lambda grad: heard.append("tensor"))
    model.weight.register_post_accumulate_grad_hook(lambda param: heard.append("accumulated"))
    holding = stepped(model, torch.ones(1, 2))
    before = list(heard)
    again(model, holding)
    assert before == heard == ["tensor", "accumulated"]


def test_tied_weights_and_inputs_that_want_a_gradient() -> None:
    """A parameter with two names stays one, and the user's input gets no gradient from a replay."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)
            self.b = nn.Linear(3, 3)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    model, x = Tied(), torch.ones(2, 3, requires_grad=True)
    holding = stepped(model, x)
    grad = x.grad
    assert grad is not None
    copy = grad.clone()
    assert diagnose(again(model, holding)).phase == "unknown"
    assert x.grad is grad
    assert torch.equal(grad, copy)


def test_outputs_made_of_each_other_are_not_counted_twice() -> None:
    """A model that returns its loss beside its logits is run again with the gradients that were."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            logits = self.layer(x)
            return {"loss": logits.square().sum(), "logits": logits}

    model, found = WithLoss(), []
    holding = ModelRecorder(model, failed)
    model(torch.ones(2, 2))["loss"].backward()
    inner = torch.autograd.grad

    def grad(*args: Any, **kwargs: Any) -> Any:
        found.append(inner(*args, **kwargs))
        return found[-1]

    torch.autograd.grad = grad
    try:
        again(model, holding)
    finally:
        torch.autograd.grad = inner
    weight = model.layer.weight.grad
    assert weight is not None
    assert any(torch.equal(one, weight) for one in found[0] if one.shape == weight.shape)


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.__name__)
def test_fault_is_found(case: type[Faulty]) -> None:
    """The right phase, module, operation and line, on one replayed step."""
    one = trial(case)
    found = one.finding.phase, one.finding.module, one.finding.op, one.finding.where
    assert one.module, found
    assert one.op, found
    assert one.at_line, found
    assert one.finding.phase == case.phase, found


def test_the_micro_nonfinite_rows_is_told() -> None:
    """Of several forward calls of a step, the one that went wrong."""
    torch.manual_seed(0)
    model = SqrtAtZero()
    holding = ModelRecorder(model, failed)
    for number in range(4):
        x = torch.randn(3, 4)
        if number == 2:
            x[0, 0] = BAD
        model(x).sum().backward()
    finding = diagnose(again(model, holding))
    assert (finding.call, finding.op, finding.others) == (2, "sqrt", 0)


def test_the_loss_side_is_told_apart() -> None:
    """Finite outputs with a non-finite gradient: the model is not blamed, the line of its call is shown."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    holding = ModelRecorder(model, failed)
    out = model(torch.ones(1, 2))
    (out - out.detach()).square().sum().sqrt().backward()
    finding = diagnose(again(model, holding))
    assert finding.phase == "loss"
    assert finding.frame is not None
    assert finding.frame.source == "out = model(torch.ones(1, 2))"
    assert finding.result is not None
    assert finding.result.nan == 2


class Masked(nn.Module):
    """Gives a number and, beside it, what is NaN at every step and left out by the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), torch.log(self.layer(x) - 100)


def test_an_output_that_the_loss_leaves_out_is_not_blamed() -> None:
    """NaN gradients come to the finite output, finite ones to that which is NaN: the fault is on the loss side."""
    torch.manual_seed(0)
    model = Masked()
    holding = ModelRecorder(model, failed)
    out, odd = model(torch.randn(8, 4))
    goal = torch.zeros(8, 1)
    goal[3] = torch.nan
    loss = nn.functional.mse_loss(out, goal) + torch.where(torch.isfinite(odd), odd, 0 * out).mean()
    loss.backward()
    finding = diagnose(again(model, holding))
    assert (finding.phase, finding.op) == ("loss", "")


@pytest.mark.parametrize("phase", ["forward", "unknown", "loss"])
def test_of_a_loss_whose_gradients_are_finite_less_is_sure(phase: Any) -> None:
    """An operation that is not finite may have been left out of the loss; no note says that gradients became so."""
    note = NOT_AGAIN if phase == "unknown" else "seen"
    told = of_loss_alone(Finding(phase, "replay", op="log" if phase == "forward" else "", note=note))
    assert {"forward": f"seen; {MAYBE}", "unknown": DERIVATIVE, "loss": "seen"}[phase] == told.note


def test_the_network_that_feeds_another_is_blamed_where_it_is_at_fault() -> None:
    """Two watched models in a row: the backward of the second is innocent, that of the first is not."""
    torch.manual_seed(0)
    first, second = SqrtAtZero(), nn.Linear(3, 1)
    holdings = [ModelRecorder(first, failed), ModelRecorder(second, failed)]
    x = torch.randn(3, 4)
    x[0, 0] = BAD
    second(first(x)).sum().backward()
    held = [(first, holdings[0].calls[0]), (second, holdings[1].calls[0])]
    finding = diagnose(replay(held, [first, second], failed))
    assert (finding.phase, finding.op, finding.call) == ("backward", "sqrt", 0)
    assert finding.module == "SqrtAtZero"
