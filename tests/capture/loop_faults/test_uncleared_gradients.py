"""The column `uncleared`: gradients of the last step are said to be there only where they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gradwatch
from tests.capture.loop_faults.loops import loss, model
from tests.support.examples import examples
from tests.support.kept import Kept


def _keep(param: nn.Parameter) -> None:
    pass


def _none(param: nn.Parameter) -> None:
    param.grad = None


def _with(change: Callable[[Tensor], object]) -> Callable[[nn.Parameter], None]:
    def clear(param: nn.Parameter) -> None:
        if param.grad is not None:
            change(param.grad)

    return clear


def _another(param: nn.Parameter) -> None:
    if param.grad is not None:
        param.grad = param.grad.clone()


CLEARS: Mapping[str, Callable[[nn.Parameter], None]] = {
    "keep": _keep,
    "none": _none,
    "zero": _with(lambda grad: grad.zero_()),
    "data": _with(lambda grad: grad.data.zero_()),
    "decay": _with(lambda grad: grad.mul_(0.5)),
    "another": _another,
}


def uncleared(ways: Sequence[str], micros: int = 1, layers: int = 2) -> list[float | None]:
    """The column at each step of a loop that clears in these ways before it."""
    net = model(layers)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    kept = Kept()
    with gradwatch.watch(net, optimizer, rules="default", sinks=[kept], strict=True):
        for way in ways:
            for param in net.parameters():
                CLEARS[way](param)
            for _ in range(micros):
                loss(net).backward()
            optimizer.step()
    return [record.snapshot.scalars.get("uncleared") for record in kept.records]


@given(st.lists(st.sampled_from(sorted(CLEARS)), min_size=1, max_size=20), st.integers(1, 2))
@settings(max_examples=examples(40), deadline=None)
def test_they_are_found_only_where_the_loop_left_them_alone(ways: list[str], micros: int) -> None:
    """A law: whatever ways of clearing follow each other, only `keep` is told, and then of all parameters."""
    for way, found in zip(ways, uncleared(ways, micros), strict=True):
        assert found in ((None, 0.0, 4.0) if way == "keep" else (None, 0.0))


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("layers", [2, 20])
def test_a_loop_that_ceases_to_clear_is_told_at_every_step_from_the_second_on(
    micros: int, layers: int
) -> None:
    """Of the first step nothing is known; with many layers a step is lost to hooks that were removed."""
    found = uncleared(["none"] * 12 + ["keep"] * 8, micros, layers)
    assert found[:13] == [None] * 13
    assert found[14:] == [2.0 * layers] * 6


def test_a_loop_that_has_cleared_in_place_is_told_in_time() -> None:
    """It is looked at every 64 steps, not at each; from the first time on at each."""
    found = uncleared(["zero"] * 100 + ["keep"] * 80)
    assert set(found[:101]) <= {None}
    first = next(step for step, value in enumerate(found) if value)
    assert first <= 100 + 64 + 1
    assert found[first:] == [4.0] * (180 - first)


def test_only_the_parameters_that_are_left_out_are_counted() -> None:
    """A `zero_grad()` of another model: its own parameters are cleared, these are not."""
    first, second = model(), model()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 1e-3)
    kept = Kept()
    with gradwatch.watch([first, second], optimizer, rules="default", sinks=[kept], strict=True):
        for _ in range(10):
            first.zero_grad()
            (loss(first) + loss(second)).backward()
            optimizer.step()
    assert [record.snapshot.scalars.get("uncleared") for record in kept.records] == [None] * 2 + [4.0] * 8
