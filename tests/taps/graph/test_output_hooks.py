"""A hook on an output is called as torch's own would be, whatever the script does to that output afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gradwatch.taps.graph.output_hooks import on_gradient

Uses = Callable[[Tensor, list[str]], Tensor]


def scales(out: Tensor, seen: list[str]) -> Tensor:
    """A hook of the script's that replaces the gradient comes later, and leaves with its handle."""
    removed = out.register_hook(lambda grad: seen.append("removed"))
    out.register_hook(lambda grad: (seen.append("script"), grad * 2)[1])
    removed.remove()
    return out.sum()


def in_place(out: Tensor, seen: list[str]) -> Tensor:
    """What is written into the output afterwards is no part of the output that was hooked."""
    return out.mul_(3).sum()


def kept(out: Tensor, seen: list[str]) -> Tensor:
    """The script has torch keep the gradient, too."""
    out.retain_grad()
    return (out * out).sum()


@pytest.mark.parametrize("uses", [scales, in_place, kept])
def test_it_is_called_as_torch_would(uses: Uses) -> None:
    """The same gradients reach the hook and the leaf, in the same order beside the script's own hooks."""

    def run(
        put: Callable[[Tensor, Callable[[Tensor], None]], object],
    ) -> tuple[list[str], list[float], list[float]]:
        leaf, seen, got = nn.Parameter(torch.tensor([1.0, 2.0])), list[str](), list[float]()
        out = leaf * 5

        def hook(grad: Tensor) -> None:
            seen.append("hook")
            got.extend(grad.tolist())

        put(out, hook)
        uses(out, seen).backward()
        assert leaf.grad is not None
        return seen, got, leaf.grad.tolist()

    assert run(on_gradient) == run(lambda out, hook: out.register_hook(hook))


def test_a_tensor_that_has_a_hook_keeps_it() -> None:
    """The script's own hook, put there inside the forward, is called first."""
    leaf, seen = torch.ones(2, requires_grad=True), list[str]()
    out = leaf * 2
    out.register_hook(lambda grad: seen.append("script"))
    on_gradient(out, lambda grad: seen.append("hook"))
    out.sum().backward()
    assert seen == ["script", "hook"]


def test_many_outputs_of_one_operation_are_told_apart() -> None:
    """Each output of an operation gets the gradient that is its own."""
    leaf, got = torch.arange(4.0, requires_grad=True), dict[int, list[float]]()
    first, second = leaf.split(2)
    on_gradient(first, lambda grad: got.update({0: grad.tolist()}))
    on_gradient(second, lambda grad: got.update({1: grad.tolist()}))
    (first + second * 2).sum().backward()
    assert got == {0: [1.0, 1.0], 1: [2.0, 2.0]}
