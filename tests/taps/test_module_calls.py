"""Calls of a module, noticed at the lookup: what a listener is given, and that torch's own hooks go on as ever."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gradwatch.taps import module_calls


class Adds(nn.Module):
    """A module with an argument by keyword."""

    def forward(self, x: Tensor, *, by: float = 0.0) -> Tensor:
        return x + by


def test_what_begins_is_told_with_all_its_arguments() -> None:
    """Before any hook, and only for this module: not for another one of its class."""
    module, other, found = Adds(), Adds(), list[Any]()
    module.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    remove = module_calls.listen(module, begins=lambda *given: found.append(given))
    x = torch.ones(2)
    assert module(x, by=1.0).tolist() == [3.0, 3.0]
    assert other(x, by=1.0).tolist() == [2.0, 2.0]
    remove()
    module(x)
    assert len(found) == 1
    assert found[0][0] is module
    assert found[0][1][0] is x
    assert found[0][2] == {"by": 1.0}
    assert not module_calls.noticed(module)


def test_a_global_hook_that_comes_during_a_forward_is_called_at_its_end() -> None:
    """As without a listener: torch looks at its hooks when the forward has ended."""

    def run(listens: bool) -> list[str]:
        module, seen, handles = Adds(), list[str](), list[Any]()
        remove = module_calls.listen(module, after=lambda *_: None) if listens else None

        def comes(*_: object) -> None:
            seen.append("comes")
            hook = nn.modules.module.register_module_forward_hook(lambda *_: seen.append("called"))
            handles.append(hook)

        module.register_forward_pre_hook(comes)
        try:
            module(torch.ones(2))
        finally:
            for handle in handles:
                handle.remove()
            if remove is not None:
                remove()
        return seen

    assert run(listens=True) == run(listens=False) == ["comes", "called"]
