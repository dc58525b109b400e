"""Modules known by torch's events: those that are copied, whose contents are looked into as late as can be."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
from torch import nn

from gradwatch.taps.module_registry import ModuleRegistry


@pytest.fixture
def registry() -> Iterator[ModuleRegistry]:
    """One that knows what comes from now on."""
    found = ModuleRegistry()
    yield found
    found.close()


def model() -> nn.Module:
    """Two levels."""
    return nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 1))


def test_copies_are_given_once_by_their_root(registry: ModuleRegistry) -> None:
    """Two copies: two roots, and no news after them, also once their contents were looked into."""
    original = model()
    assert registry.fresh_roots() == [original]
    copies = [copy.deepcopy(original) for _ in range(2)]
    assert registry.news
    assert registry.fresh_roots() == copies
    assert not registry.news
    (owner,) = registry.owners([copies[1][0][0].bias])
    assert owner == (copies[1][0][0], "bias")
    assert not registry.news
    assert registry.fresh_roots() == []


def test_what_is_put_into_a_copy_later_leads_to_its_root(registry: ModuleRegistry) -> None:
    """A head added deep inside a copy that was given before: the outermost module around it."""
    copied = copy.deepcopy(model())
    registry.fresh_roots()
    copied[0].append(nn.Linear(2, 2))
    assert registry.fresh_roots() == [copied]
    assert registry.root(copied[0][2], registry.clock) is copied


def test_a_copy_put_into_another_module_is_given_by_that(registry: ModuleRegistry) -> None:
    """An EMA wrapper holds a copy: it is the root."""
    wrapper = nn.Module()
    registry.fresh_roots()
    wrapper.module = copy.deepcopy(model())
    assert registry.fresh_roots() == [wrapper]


def test_copies_that_are_gone_leave_no_gap(registry: ModuleRegistry) -> None:
    """Hundreds are made and freed; those made after the last question are given, and no other."""
    original = model()
    registry.fresh_roots()
    for _ in range(100):
        kept = copy.deepcopy(original)
        assert registry.fresh_roots() == [kept]
    for _ in range(100):
        copy.deepcopy(original)
    last = copy.deepcopy(original)
    assert registry.fresh_roots() == [last]
