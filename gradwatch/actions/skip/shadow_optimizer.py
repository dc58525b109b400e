"""A stand-in that takes a withheld step in an optimizer's place: a deep copy which shares nothing with it.

However a step reaches its parameters, and wherever it keeps what it counts, it finds copies: attributes, groups,
state and models are copied with one memo, so that they refer to each other as before. What it cannot be rid of are
ways around its attributes (a weak reference, a dict keyed by `id(param)`), and a step that is lost among copies may
raise. So it is tried on a stand-in of its own first, unheard by anybody's hooks (what it prints, it prints twice);
where that raises or moves a weight, or the copy cannot be made, there is no stand-in.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwatch.actions.skip.copies import Copy, params_of
from gradwatch.taps import step_hooks
from gradwatch.taps.optimizers.inner import with_inner

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def stand_in_for(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], ours: set[int]
) -> Optimizer | None:
    """One that can take the step called with these arguments; `ours`: ids of the hooks that it shall not call."""
    if any(value is not None for value in (*args[1:], *kwargs.values())):
        return None  # a closure, a scaler: they know the real one
    if len(with_inner(optimizer)) > 1:
        return None  # the one it wraps has steps of its own, which are watched
    random = RandomNumbers(optimizer)
    try:
        if not _steps_among_copies(optimizer, args, kwargs):
            return None
        found = _copied(optimizer)
    except Exception:  # it cannot be copied, or not within the memory: the caller has another way
        return None
    finally:
        random.restore()
    for name in HOOKS:
        hooks = {number: hook for number, hook in vars(optimizer)[name].items() if number not in ours}
        vars(found)[name].update({number: _as_of(optimizer, hook) for number, hook in hooks.items()})
    return found


class RandomNumbers:
    """Where the generators of an optimizer's devices stand, to be brought back: a skipped step draws nothing."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._host = torch.get_rng_state()
        devices = {param.device for param in params_of(optimizer) if param.is_cuda}
        self._devices = [(device, torch.cuda.get_rng_state(device)) for device in devices]

    def restore(self) -> None:
        """Bring them back to where they stood."""
        torch.set_rng_state(self._host)
        for device, state in self._devices:
            torch.cuda.set_rng_state(state, device)


def unhooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """A class's step without torch's wrapper around it, which runs the hooks; decorators of its own stay."""
    found: Callable[..., Any] = inspect.unwrap(step, stop=lambda each: not getattr(each, "hooked", False))
    return found


def _steps_among_copies(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the step raises nothing on a stand-in and leaves every weight alone; what it moved is put back."""
    stand_in, before = _copied(optimizer), Copy(optimizer, whole=True)
    fine = False
    with step_hooks.global_hooks_silenced(), contextlib.suppress(Exception):
        unhooked(type(optimizer).step)(stand_in, *args[1:], **kwargs)
        fine = not before.moved()
    if not fine:
        before.restore()
    return fine


def _copied(optimizer: Optimizer) -> Optimizer:
    """The optimizer once more, without hooks, with gradients."""
    found: Optimizer = object.__new__(type(optimizer))
    step_hooks.ignore(found)
    memo: dict[int, Any] = {id(optimizer): found}
    mine = {name: value for name, value in vars(optimizer).items() if not name.startswith("_optimizer_")}
    mine.pop("step", None)  # an LR scheduler puts it there, around the real one
    vars(found).update(copy.deepcopy(mine, memo))
    vars(found).update(
        {name: collections.OrderedDict() for name in vars(optimizer) if name.startswith("_optimizer_")}
    )
    _give_gradients(memo)
    return found


def _give_gradients(memo: dict[int, Any]) -> None:
    """Copies of the gradients, which `Parameter.__deepcopy__` leaves out; as views of one buffer where they were."""
    for one in list(memo.get(id(memo), ())):  # where `copy` keeps what it has copied
        if isinstance(one, Tensor) and one.is_leaf and one.grad is not None:
            grad = one.grad if one.grad.is_leaf else one.grad.detach()
            memo[id(one)].grad = copy.deepcopy(grad, memo)


def _as_of(real: Optimizer, hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of the user's that is called with the optimizer it was registered on."""

    @functools.wraps(hook)
    def call(_: Optimizer, args: Any, kwargs: Any) -> Any:
        return hook(real, args, kwargs)

    return call
