"""The patch of one attribute: what is called meanwhile, what stands afterwards, and what other patches do to it."""

from __future__ import annotations

import functools
import inspect
import pickle
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

import gradwatch
from gradwatch.taps import clip_functions, grad_scaler
from gradwatch.taps.module_registry import ModuleRegistry
from gradwatch.taps.optimizers import creation
from gradwatch.taps.patch import Layer, OnLookup, Patch

Listener = Callable[[], object]


def calling(layer: Layer[Listener]) -> Any:
    """A wrapper as the taps make them."""
    original = layer.original

    @functools.wraps(original)
    def wrapped(*args: Any) -> Any:
        for listener in layer.listeners:
            listener()
        return original(*args)

    return wrapped


def of_class() -> Any:
    """A class with a method of its own."""
    return type("Own", (), {"name": lambda *args: "bare"})


def of_subclass() -> Any:
    """A class that inherits the method."""
    return type("Inheriting", (of_class(),), {})


def of_module() -> Any:
    """A module with a function."""
    module = ModuleType("scratch")
    module.name = lambda *args: "bare"  # type: ignore[attr-defined]
    return module


class Foreign:
    """Patches of another library on an owner: each wraps what it finds, and puts that back when it leaves."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self._found: list[Any] = []

    def wrap(self) -> None:
        """One more wrapper, which passes every call on."""
        found, level = self.owner.name, len(self._found)
        self._found.append(found)
        self.owner.name = lambda *args: f"{level}({found(*args)})"

    def unwrap(self) -> None:
        """The last wrapper leaves, blindly."""
        if self._found:
            self.owner.name = self._found.pop()


STEPS = st.lists(st.sampled_from(["listen", "remove", "wrap", "unwrap"]) | st.integers(0, 5), max_size=14)


@given(st.sampled_from([of_class, of_subclass, of_module]), STEPS)
def test_calls_are_those_of_bare_code(make: Callable[[], Any], steps: list[str | int]) -> None:
    """Whoever listens, leaves and patches in whatever order: results as bare, each listener once, the gone never."""
    owner, bare = make(), make()
    patch: Patch[Listener] = Patch(owner, "name", calling)
    foreign, twin = Foreign(owner), Foreign(bare)
    heard: list[int] = []
    there: dict[int, Callable[[], None]] = {}
    for number, step in enumerate([*steps, "all"]):
        if step == "listen":
            there[number] = patch.listen(functools.partial(heard.append, number))
        elif step == "wrap":
            foreign.wrap()
            twin.wrap()
        elif step == "unwrap":
            foreign.unwrap()
            twin.unwrap()
        elif there and step != "remove":
            keys = list(there) if step == "all" else [list(there)[int(step) % len(there)]]
            for key in keys:
                remove = there.pop(key)
                remove()
                remove()
        heard.clear()
        assert owner.name() == bare.name()
        assert sorted(heard) == sorted(set(heard))
        assert set(heard) <= there.keys()
        if "unwrap" not in steps:
            assert set(heard) == there.keys()
    if not {"wrap", "unwrap"} & set(steps):
        again = make()
        assert vars(owner).keys() == vars(again).keys()


@pytest.mark.parametrize("make", [of_class, of_module, of_subclass])
def test_the_last_listener_restores_the_very_object(make: Callable[[], Any]) -> None:
    """The attribute is the object that was found, and none where there was none."""
    owner = make()
    found = dict(vars(owner))
    patch: Patch[Listener] = Patch(owner, "name", calling)
    first, second = patch.listen(list), patch.listen(list)
    first()
    assert dict(vars(owner)) != found
    second()
    assert dict(vars(owner)) == found


def test_a_patch_above_is_left_alone_and_below_it_nothing_is_called() -> None:
    """Another library's patch stays, with one of gradwatch's at most above it, whoever comes and goes."""
    owner = of_class()
    patch: Patch[Listener] = Patch(owner, "name", calling)
    heard: list[str] = []
    remove = patch.listen(lambda: heard.append("first"))
    below = owner.name
    theirs = owner.name = lambda *args: f"theirs({below(*args)})"
    remove()
    assert owner.name is theirs
    assert owner.name() == "theirs(bare)"
    assert heard == []
    remove = patch.listen(lambda: heard.append("second"))
    assert owner.name() == "theirs(bare)"
    assert heard == ["second"]
    remove()
    assert owner.name is theirs


def test_a_patch_that_calls_nothing_below_it_hides_no_later_listener() -> None:
    """What listens after the other library's patch stands above it."""
    owner = of_class()
    patch: Patch[Listener] = Patch(owner, "name", calling)
    heard: list[str] = []
    remove = patch.listen(list)
    theirs = owner.name = lambda *args: "theirs"
    remove()
    remove = patch.listen(lambda: heard.append("later"))
    assert (owner.name(), heard) == ("theirs", ["later"])
    remove()
    assert owner.name is theirs


def test_a_class_that_cannot_be_changed_is_refused_and_nothing_is_left() -> None:
    """`TypeError`, as often as it is tried."""
    patch: Patch[Listener] = Patch(dict, "get", calling)
    for _ in range(2):
        with pytest.raises(TypeError):
            patch.listen(list)
    assert patch.listeners == ()


def test_threads_that_come_at_once_share_one_replacement() -> None:
    """A thread that listens while another one is putting the replacement in place waits for it."""
    owner, heard = of_class(), []
    second = threading.Thread(target=lambda: patch.listen(lambda: heard.append("second")))

    def made(layer: Layer[Listener]) -> Any:
        if second.ident is None:
            second.start()
            second.join(0.1)  # it cannot end: it waits for this
        return calling(layer)

    patch: Patch[Listener] = Patch(owner, "name", made)
    patch.listen(lambda: heard.append("first"))
    second.join()
    owner.name()
    assert heard == ["first", "second"]


def test_what_is_looked_up_is_the_method_itself() -> None:
    """`OnLookup` is told of each instance, gives torch's function, and is pickled by the name of its place."""
    found, bare = vars(Optimizer)["__init__"], nn.Module.__setstate__
    made: list[Optimizer | None] = []
    remove, registered = creation.listen(made.append), ModuleRegistry()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    assert made == [optimizer]
    assert Optimizer.__init__ is found
    assert nn.Module.__setstate__ is bare
    assert inspect.signature(Optimizer.__init__) == inspect.signature(found)
    standing = vars(nn.Module)["__setstate__"]
    assert isinstance(standing, OnLookup)
    assert pickle.loads(pickle.dumps(standing)) is bare
    remove()
    registered.close()
    assert vars(Optimizer)["__init__"] is found
    assert vars(nn.Module)["__setstate__"] is bare


def test_functions_keep_their_names_and_signatures() -> None:
    """What a watch wraps is found, shown and pickled under the name of what it replaces."""
    places = [(torch.amp.GradScaler, name) for name in ("_unscale_grads_", "step", "update")]
    found = [getattr(owner, name) for owner, name in [*places, (clip_grad, clip_functions.SORTER)]]
    with gradwatch.watch(nn.Linear(2, 2), sinks=[]):
        now = [getattr(owner, name) for owner, name in [*places, (clip_grad, clip_functions.SORTER)]]
        for bare, wrapped in zip(found, now, strict=True):
            assert wrapped is not bare
            assert wrapped.__wrapped__ is bare
            assert inspect.signature(wrapped) == inspect.signature(bare)
            assert (wrapped.__qualname__, wrapped.__module__) == (bare.__qualname__, bare.__module__)
            # The sorter is torch's under another module's name, which it is pickled by.
            assert bare is found[-1] or pickle.loads(pickle.dumps(wrapped)) is wrapped
    assert [getattr(owner, name) for owner, name in [*places, (clip_grad, clip_functions.SORTER)]] == found
    assert not grad_scaler._patched
