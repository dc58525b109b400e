"""What is held of one forward, however it was made."""

from __future__ import annotations

import gc
import weakref
from dataclasses import MISSING, fields
from typing import Any

import pytest
import torch
from torch import nn

from gradwatch.localise.held_calls.model_recorder import ModelRecorder
from gradwatch.localise.held_calls.recorded_call import Call


def failed(component: str, error: BaseException) -> None:
    raise error


class Flexible(nn.Module):
    """Takes anything."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Any, scale: float = 1.0, **more: Any) -> torch.Tensor:
        return self.layer(x["x"] if isinstance(x, dict) else x) * scale


@pytest.mark.parametrize("given", ["data", "computed", "dict", "keyword", "nothing learned"])
def test_a_call_is_whole(given: str) -> None:
    """A call is made without its `__init__`: each field that has no plain default is set all the same."""
    model, x = Flexible(), torch.randn(4, 3)
    recorder = ModelRecorder(model, failed)
    for _ in range(1 if given == "nothing learned" else 9):
        if given == "computed":
            model(x.clone().requires_grad_() * 2)
        elif given == "dict":
            model({"x": x})
        elif given == "keyword":
            model(x, scale=2.0)
        else:
            model(x)
    call = recorder.calls[-1]
    needed = {one.name for one in fields(Call) if one.default is MISSING}
    assert needed <= vars(call).keys()
    recorder.close()


def test_what_it_held_is_freed_without_the_garbage_collector() -> None:
    """A model that the script deletes gives its memory back at once, whichever call of it was the last."""
    for calls in range(1, 5):
        model = Flexible()
        recorder = ModelRecorder(model, failed)
        gc.collect()
        gc.disable()
        try:
            for _ in range(calls):
                model(torch.randn(4, 3)).sum().backward()
            recorder.close()
            gone = weakref.ref(model.layer.weight)
            del model, recorder
            assert gone() is None, calls
        finally:
            gc.enable()
