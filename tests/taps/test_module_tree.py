"""The modules and parameters below a module, as torch lists them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradwatch.taps import module_tree


class Hiding(nn.Linear):
    """Calls its parameters by other names, as FSDP does."""

    def named_parameters(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        for name, param in super().named_parameters(*args, **kwargs):
            yield f"other.{name}", param


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    """Modules within modules: some of them, and some parameters, in several places; names of None; a cycle."""
    params = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    found: list[nn.Module] = [nn.Module()]
    for kind in draw(st.lists(st.sampled_from([nn.Module, Hiding]), min_size=1, max_size=6)):
        found.append(kind() if kind is nn.Module else Hiding(1, 1))
    for k, module in enumerate(found):
        for n, param in enumerate(draw(st.lists(st.sampled_from([*params, None]), max_size=3))):
            module.register_parameter(f"p{n}", param)
        for n, child in enumerate(draw(st.lists(st.sampled_from([*found[k + 1 :], None]), max_size=4))):
            module.add_module(f"m{n}", child)
    if draw(st.booleans()):
        found[-1].add_module("back", found[0])
    return draw(st.sampled_from(found))


@given(models())
def test_modules_and_parameters_are_those_of_torch_in_its_order(model: nn.Module) -> None:
    """Each once, shared ones where torch meets them first, names as the class of the root gives them."""
    assert list(map(id, module_tree.modules(model))) == list(map(id, model.modules()))
    assert list(map(id, module_tree.parameters(model))) == list(map(id, model.parameters()))
    wanted = [(name, id(param)) for name, param in model.named_parameters()]
    assert [(name, id(param)) for name, param in module_tree.named_parameters(model)] == wanted
