"""Calls of `optimizer.state_dict()`, noticed: after they returned, by whatever way, and with nothing left behind."""

from __future__ import annotations

import copy
import io
import pickle
import traceback
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from gradwatch.runtime import guard
from gradwatch.taps.optimizers import state_dict_calls


class OwnPickle(torch.optim.SGD):
    """Pickles all that is on it, as torch's own do not."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()


class Fails(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        super().state_dict()
        raise KeyError("no state today")


def made(kind: type[Optimizer] = torch.optim.SGD) -> Optimizer:
    return kind(nn.Linear(2, 1).parameters(), lr=0.1)  # type: ignore[call-arg]


def test_each_call_is_noticed_until_the_listener_leaves() -> None:
    """By the instance, by the class, by a subclass that calls torch's; and torch's own method is back then."""
    before = Optimizer.__dict__["state_dict"]
    seen: list[Optimizer] = []
    remove = state_dict_calls.listen(seen.append)
    one, other = made(), made(torch.optim.Adam)
    assert one.state_dict().keys() == {"state", "param_groups"}
    Optimizer.state_dict(other)
    hasattr(one, "state_dict")
    assert seen == [one, other]
    remove()
    one.state_dict()
    assert len(seen) == 2
    assert Optimizer.__dict__["state_dict"] is before


def test_nothing_of_it_is_on_an_optimizer() -> None:
    """Its attributes, its pickle (of all that is on it, too), its copies and its state are as without a listener."""
    optimizer = made(OwnPickle)
    bare = pickle.dumps(optimizer.state_dict()), pickle.dumps(optimizer), set(vars(optimizer))
    remove = state_dict_calls.listen(lambda one: None)
    try:
        assert (pickle.dumps(optimizer.state_dict()), pickle.dumps(optimizer), set(vars(optimizer))) == bare
        assert vars(copy.deepcopy(optimizer)).keys() == vars(optimizer).keys()
        torch.save(optimizer, io.BytesIO())
        assert pickle.loads(pickle.dumps(optimizer.state_dict))() == optimizer.state_dict()
    finally:
        remove()


def test_what_it_raises_is_as_without_a_listener() -> None:
    """No frame of gradwatch in the traceback, and a state that was not taken is not noticed."""
    seen: list[Optimizer] = []
    remove = state_dict_calls.listen(seen.append)
    optimizer = made()
    optimizer.register_state_dict_pre_hook(lambda one: 1 / 0)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError) as error:
        optimizer.state_dict()
    remove()
    assert not seen
    assert "gradwatch/taps" not in "".join(traceback.format_tb(error.value.__traceback__))


def test_a_fault_of_the_listener_does_not_reach_the_script() -> None:
    """It is counted; the state is given all the same."""

    def fails(optimizer: Optimizer) -> None:
        raise ValueError("of gradwatch")

    faults: list[tuple[str, str]] = []
    removes = [
        state_dict_calls.listen(fails),
        guard.listen(lambda component, error: faults.append((component, str(error)))),
    ]
    assert made().state_dict()["param_groups"]
    with pytest.raises(KeyError):
        made(Fails).state_dict()
    for remove in removes:
        remove()
    assert faults == [("checkpoint", "of gradwatch")] * 2
