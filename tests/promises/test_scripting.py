"""TorchScript and a watched model: compiled as if nobody watched, with the model's own hooks and none of ours."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.taps import module_calls

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def doubled(self: nn.Module, given: tuple[Tensor], out: Tensor) -> Tensor:
    """A hook of the user's that TorchScript compiles."""
    return out * 2


class Net(nn.Module):
    """Two layers and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.first.register_forward_hook(doubled)

    def forward(self, x: Tensor) -> Tensor:
        """A plain network."""
        return self.last(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def test_a_watched_model_can_be_scripted() -> None:
    """Same numbers, the user's hook kept; nothing of ours in the file; the watch hears on."""
    model, x = Net(), torch.randn(3, 4)
    bare = torch.jit.script(model)
    gw = gradwatch.watch(model, sinks=[])
    noticed = [module_calls.noticed(one) for one in model.modules()]
    assert any(noticed)
    for before_any_call in (True, False):
        scripted = torch.jit.script(model)
        assert torch.equal(scripted(x), bare(x))
        assert len(scripted.first._forward_hooks) == 1
        buffer = io.BytesIO()
        torch.jit.save(scripted, buffer)
        assert b"gradwatch" not in buffer.getvalue()
        if before_any_call:
            assert [module_calls.noticed(one) for one in model.modules()] == noticed
            assert torch.equal(model(x), bare(x))
    gw.close()


def test_what_cannot_be_scripted_still_says_so() -> None:
    """The error for a hook of the user's that does not compile, or for a module half made, is torch's own."""

    class Half(nn.Module):
        def __init__(self) -> None:
            pass

    model = Net()
    model.register_forward_hook(lambda *args: print(*args))
    with gradwatch.watch(model, sinks=[]):
        with pytest.raises(Exception, match="Expected a single top-level function"):
            torch.jit.script(model)
        with pytest.raises(RuntimeError, match="has not been initialized"):
            torch.jit.script(Half())
