"""What is held of one forward, however it was made."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

import pytest
import torch
from torch import nn

from gradwatch.localise.hold.model_recorder import ModelRecorder
from gradwatch.localise.hold.recorded_call import Call


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
