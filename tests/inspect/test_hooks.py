"""Hooks for people: what torch's own hooks see, never a trace on the module, never a broken training."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwatch.errors import AttachError
from gradwatch.inspect import Hook, Hooks, hook_gradients, hook_output, hook_outputs
from gradwatch.taps import module_calls
from tests.support.one_rank import one_rank

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(3))


class Pair(nn.Module):
    """Puts out a dict with a tuple in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"a": self.inner(x), "rest": (x * 2, "word")}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def trained(model: nn.Module, steps: int = 3) -> list[Tensor]:
    """The weights after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).pow(2).sum().backward()
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def flat(value: Any) -> list[Tensor]:
    """The tensors in nested containers."""
    if isinstance(value, Tensor):
        return [value.detach().clone()]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [found for each in value for found in flat(each)] if isinstance(value, (tuple, list)) else []


def torchs(module: nn.Module, kind: str, fn: Callable[..., Any]) -> Any:
    """torch's own hook of that kind."""
    if kind == "forward":
        return module.register_forward_hook(fn)
    if kind == "forward_pre":
        return module.register_forward_pre_hook(fn)
    return module.register_full_backward_hook(fn)


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        *itertools.product(("forward", "forward_pre"), (net, Pair)),
        ("full_backward", net),  # torch calls no full-backward hook where a module puts out a dict
    ],
)
def test_a_hook_sees_what_torchs_own_hook_sees(kind: str, make: Callable[[], nn.Module]) -> None:
    """Arguments, outputs and gradients are those that torch gives a hook of the same kind, tensor by tensor."""
    torch.manual_seed(1)
    ours, theirs = make(), make()
    theirs.load_state_dict(ours.state_dict())
    seen: list[list[Tensor]] = []
    torchs(theirs, kind, lambda *given: seen.append(flat(given[1:])))
    with Hook(ours, lambda *given: seen.append(flat(given[1:])), kind=kind) as hook:  # type: ignore[arg-type]
        for model in (ours, theirs):
            x = X.clone().requires_grad_()
            torch.stack([tensor.sum() for tensor in leaves(model(x))]).sum().backward()
    assert hook.calls == 1
    assert len(seen) == 2
    assert seen[0]
    assert same(*seen)


def leaves(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else [output["a"], output["rest"][0]]


REPLACING = {
    "forward": lambda module, args, output: output * 0.5,
    "forward_pre": lambda module, args: (args[0] * 0.5,),
    "full_backward": lambda module, grad_input, grad_output: (grad_input[0] * 0.5,),
}


@pytest.mark.parametrize("kind", REPLACING)
def test_a_replacement_is_what_torchs_own_hook_would_make(kind: str) -> None:
    """With `replace` the training is bit for bit that of torch's hook which returns the same, and not the bare one."""
    bare, ours, theirs = net(), net(), net()
    torchs(theirs[1], kind, REPLACING[kind])
    with Hook(ours[1], REPLACING[kind], kind=kind, replace=True):  # type: ignore[arg-type]
        replaced = trained(ours)
    assert same(replaced, trained(theirs))
    assert not same(replaced, trained(bare))


def test_a_tensors_gradient_is_seen_and_replaced() -> None:
    """`hook_gradients` keeps each parameter's gradient; with `replace` what its function returns is accumulated."""
    model, twin = net(), net()
    with hook_gradients(model) as hooks:
        model(X).sum().backward()
    assert {
        name: param.grad.tolist() for name, param in model.named_parameters() if param.grad is not None
    } == {name: grad.tolist() for name, grad in hooks.stored.items()}
    with hook_gradients({"w": twin[0].weight}, lambda tensor, grad: grad * 0, replace=True):
        twin(X).sum().backward()
    assert not twin[0].weight.grad.any()
    assert torch.equal(twin[2].weight.grad, model[2].weight.grad)


def test_the_gradient_of_an_output() -> None:
    """`hook_output(grad=True)` keeps d loss / d output, also where the next module works in place."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    with hook_output(model[0], grad=True) as hook:
        out = model(X)
        out.sum().backward()
    assert torch.equal(hook.stored, (out > 0).float())


def test_outputs_by_name_and_pattern() -> None:
    """Modules without parts by default, else those that match; an error that lists the names where none does."""
    model = net()
    with hook_outputs(model) as hooks:
        out = model(X)
    assert list(hooks) == ["0", "1", "2"]
    assert torch.equal(hooks.stored["2"], out)
    assert not hooks.stored["2"].requires_grad
    with hook_outputs(model, names=["[01]"]) as hooks:
        model(X)
    assert list(hooks.stored) == ["0", "1"]
    with pytest.raises(AttachError, match=r"matches 'layer\*'; there are 0, 1, 2"):
        hook_outputs(model, names="layer*")
    with Hooks([model[0], model[2]], lambda module, args, output: tuple(output.shape)) as shapes:
        model(X)
    assert shapes.stored == {"0: Linear": (4, 5), "1: Linear": (4, 2)}


def test_nothing_stands_on_the_module_or_in_a_pickle() -> None:
    """While hooked by every kind, pickle, torch.save and deepcopy give the bytes of the bare model."""

    def saved(model: nn.Module) -> list[bytes]:
        files = [io.BytesIO(), io.BytesIO()]
        for one, file in zip((model, copy.deepcopy(model)), files, strict=True):
            torch.save(one, file)
        return [pickle.dumps(model), *(file.getvalue() for file in files)]

    model = net()
    bare = saved(model)
    with (
        warnings.catch_warnings(),
        Hooks(model),
        Hooks(model, kind="forward_pre"),
        Hooks(model, kind="full_backward"),
        hook_gradients(model),
    ):
        warnings.simplefilter("error")
        model(X).sum().backward()
        model.zero_grad()
        assert saved(model) == bare
    assert saved(model) == bare
    assert not any(map(module_calls.noticed, model.modules()))


def test_hooks_go_when_the_body_raises() -> None:
    """An exception in the `with` leaves no hook and passes through unchanged."""
    model = net()
    hooks = Hooks(model)
    with pytest.raises(KeyError, match="mine"), hooks, hook_gradients(model):
        raise KeyError("mine")
    model(X).sum().backward()
    assert [hook.calls for hook in hooks.values()] == [0, 0, 0]
    assert not model[0].weight._backward_hooks


def test_a_hook_that_is_never_removed_keeps_no_model_alive() -> None:
    """The model is freed as if it were not hooked, by whatever kind."""
    model = net()
    hooks = [Hooks(model, kind=kind) for kind in ("forward", "forward_pre", "full_backward")]
    model(X).sum().backward()
    hooks[0]["0"].stored = None
    alive = weakref.ref(model[1])
    del model
    gc.collect()
    assert alive() is None
    for one in hooks:
        one.remove()


def raises(*_: Any) -> None:
    raise ValueError("mine")


WRONG: dict[str, tuple[str, Callable[..., Any]]] = {
    "raises": ("forward", raises),
    "raises before": ("forward_pre", raises),
    "raises in the backward": ("full_backward", raises),
    "shape": ("forward", lambda module, args, output: output[:1]),
    "dtype": ("forward", lambda module, args, output: output.double()),
    "no tensor": ("forward", lambda module, args, output: "word"),
    "gradient's shape": ("full_backward", lambda module, grad_input, grad_output: (grad_input[0].sum(),)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_function_is_warned_of_once_and_breaks_no_training(wrong: str) -> None:
    """One warning that names the module; the hook is gone, its error kept, the weights those of the bare run."""
    kind, fn = WRONG[wrong]
    model = net()
    hook = Hook(model[1], fn, kind=kind, replace=True, name="tanh")  # type: ignore[arg-type]
    with pytest.warns(RuntimeWarning, match="the hook on tanh is removed") as caught:
        weights = trained(model)
    assert len(caught) == 1
    assert hook.error is not None
    assert not module_calls.noticed(model[1])
    assert same(weights, trained(net()))


def test_a_wrong_gradient_of_a_tensor_is_refused() -> None:
    """A tensor hook that returns another shape is removed, where torch would raise in the backward."""
    model = net()
    hook_gradients({"w": model[0].weight}, lambda tensor, grad: grad.sum(), replace=True)
    with pytest.warns(RuntimeWarning, match=r"float32\[5, 3\].*and is float32\[\]"):
        weights = trained(model)
    assert same(weights, trained(net()))


@contextmanager
def uncalled(name: str) -> Iterator[None]:
    with pytest.warns(RuntimeWarning, match=f"nothing was seen by the hook on {name}"):
        yield


def test_a_hook_that_saw_nothing_says_so() -> None:
    """A module that was replaced, or called by its forward() directly: one warning at the end of the `with`."""
    model = net()
    with uncalled("1"), Hooks(model, names="1"):
        model[1] = nn.ReLU()
        model(X)
    with uncalled("Linear"), Hook(model[0]):
        model[0].forward(X)


def test_a_compiled_model_is_right_or_warned_of() -> None:
    """The whole compiled model is seen as torch's own hook sees it; a part inside the compiled region is warned of."""
    model = net()
    compiled = torch.compile(model, backend="eager")
    compiled(X)
    with Hook(compiled) as hook:
        out = compiled(X)
    assert torch.equal(hook.stored, out)
    with uncalled("0"), Hooks(model, names="0"):
        compiled(X)


def test_of_the_wrong_kind() -> None:
    """A tensor for a module, a module for a tensor, a frozen tensor, an unknown kind: each refused by a sentence."""
    model = net()
    with pytest.raises(AttachError, match="hooks a Module, and Parameter is a Parameter"):
        Hook(model[0].weight)
    with pytest.raises(AttachError, match="hooks a Tensor, and Linear is a Linear"):
        Hook(model[0], kind="tensor")
    with pytest.raises(AttachError, match="wants no gradient"):
        Hook(torch.ones(2), kind="tensor")
    with pytest.raises(AttachError, match="there are forward, forward_pre, full_backward, tensor"):
        Hook(model, kind="backward")  # type: ignore[arg-type]
    with pytest.raises(AttachError, match=r"1: ReLU\(inplace=True\)"):
        Hooks(nn.ModuleDict({"1": nn.ReLU(inplace=True)}), kind="full_backward")


def test_detach_and_graph() -> None:
    """What is stored is cut from the graph unless asked otherwise; with `detach=False` gradients flow through it."""
    model = net()
    with Hook(model[0], detach=False) as hook:
        model(X)
    hook.stored.sum().backward()
    assert model[0].weight.grad is not None
    assert model[2].weight.grad is None


def test_ddp_and_gather() -> None:
    """In DistributedDataParallel the inner modules are seen; `gather` stacks what all ranks have."""
    with one_rank():
        model = nn.parallel.DistributedDataParallel(net())
        with Hook(model.module[2], gather=True) as hook:
            out = model(X)
        assert torch.equal(hook.stored, out.detach().unsqueeze(0))
        with hook_gradients(model) as hooks:
            model(X).sum().backward()
    assert set(hooks.stored) == {name for name, _ in model.named_parameters()}
