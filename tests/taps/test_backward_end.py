"""The end of a backward, while other threads run theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradwatch.taps import backward_end


class Interrupted(dict[int, Any]):
    """A dict during each `pop` of which another thread gets its turn, just before or just after."""

    def __init__(self, turn: Callable[[], None], *, after: bool) -> None:
        super().__init__()
        self.turn, self.after = turn, after

    def pop(self, *args: Any) -> Any:
        """As a dict's."""
        if not self.after:
            self.turn()
        found = super().pop(*args)
        if self.after:
            self.turn()
        return found


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("of", ["ready", "_threads"])
def test_what_a_thread_is_ending_is_left_over_for_no_other(of: str, after: bool) -> None:
    """Its gradients would be counted with the loss of the other's backward."""
    ended: list[list[int]] = []
    taken: list[int] = []
    ends = backward_end.Ends(ended.append, lambda: None)

    def turn() -> None:
        with monkey.context() as patch:
            patch.setattr(backward_end, "current", lambda: backward_end.NONE)  # it is outside a backward
            taken.extend(ends.left_over(2))

    monkey = pytest.MonkeyPatch()
    setattr(ends, of, Interrupted(turn, after=after))
    leaf = torch.ones(2, requires_grad=True)

    def arrived(_: torch.Tensor) -> None:
        ends.arm(1)
        ends.ready[backward_end.current()].append(7)

    leaf.register_post_accumulate_grad_hook(arrived)
    leaf.sum().backward()
    assert taken == []
    assert ended == [[7]]
