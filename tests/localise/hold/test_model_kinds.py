"""Models of one kind, one after another: what is presumed of the next, and what is found out of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from gradwatch.localise.hold.model_recorder import MAX_BYTES
from gradwatch.localise.hold.recorded_call import Call
from gradwatch.localise.hold.step_recorder import StepRecorder


def failed(component: str, error: BaseException) -> None:
    """A fault fails the test."""
    raise error


@pytest.fixture
def recorder() -> Iterator[StepRecorder]:
    """A recorder of steps; its faults fail the test."""
    made = StepRecorder(failed, MAX_BYTES)
    yield made
    made.close()


def trained(recorder: StepRecorder, loss: Callable[[Tensor], Tensor], steps: int = 3) -> list[Call]:
    """The calls of the last step of a new model, of one kind and from one line each time."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder.add(model)
    for number in range(steps):
        if number:
            optimizer.step()
            recorder.step_taken(optimizer)
        loss(model(torch.ones(2, 4))).backward()
    return [call for held, call in recorder.calls() if held is model]


def operations(call: Call) -> list[str]:
    """Operations of the loss that is known of a call."""
    return [] if call.losses.last is None else [name for _, name, *_ in call.losses.last.nodes]


def test_a_loss_is_known_of_the_next_model_of_its_kind(recorder: StepRecorder) -> None:
    """The loss of a model that is called from the same line, and of the same operations, is not looked at again."""
    (first,) = trained(recorder, lambda out: out.square().mean())
    (second,) = trained(recorder, lambda out: out.square().mean())
    assert operations(first) == ["PowBackward0", "MeanBackward0"]
    assert second.losses is first.losses


def test_another_loss_of_a_model_of_the_same_kind_is_its_own(recorder: StepRecorder) -> None:
    """Where the loss is another one, what the models before had is neither told of this one nor mixed up with it."""
    (first,) = trained(recorder, lambda out: out.square().mean())
    (second,) = trained(recorder, lambda out: out.exp().log().sum())
    assert operations(second) == ["ExpBackward0", "LogBackward0", "SumBackward0"]
    assert operations(first) == ["PowBackward0", "MeanBackward0"]
    assert not first.losses.varied
    assert not second.losses.varied
