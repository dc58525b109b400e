"""Calls of chosen modules, noticed although nothing stands on a module: no hook, no attribute, no other class.

A hook in `module._forward_hooks` is a part of the module: it is pickled by `torch.save(model)`, copied by `deepcopy`,
compiled by `torch.jit.script`, guarded on by `torch.compile`, and code that looks for hooks takes another path (the
fast path of `nn.TransformerEncoderLayer`). To strip it at `__getstate__` or `__reduce_ex__` covers neither classes that
define their own nor a look at `__dict__`. A global forward hook is worse: all modules pay for it, and `torch.compile`
warns about it.

`Module.__call__` looks `_call_impl` up on the module. On the classes of modules that have listeners that name is a
descriptor (on `nn.Module` itself the lookup of every part of a model would cost 0.2 us more). For a module that has
listeners it gives a rebuilt copy of torch's function: the same code object, with globals in which the global
hooks are those of torch and one of gradwatch. All others, and every lookup from elsewhere, get torch's own function. So
the listeners run where torch's global hooks do, no frame of gradwatch stands in the traceback of a forward that
raises, and `torch.nn.modules.module._has_any_global_hook()` stays False.

Not noticed: `module.forward(...)` called directly, calls inside a compiled region, and `module.compile()`, which
replaces the lookup.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from gradwatch.runtime import guard
from gradwatch.runtime.locks import ForkSafeLock
from gradwatch.taps import dispatch_modes
from gradwatch.taps.dynamo import untraced
from gradwatch.taps.patch import Layer, Patch

Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], "tuple[Any, ...] | None"]
"""Called with (module, args, kwargs) before the module's own pre-hooks; what is not None replaces `args`."""
After = Callable[[nn.Module, tuple[Any, ...], Any], Any]
"""Called with (module, args, output) before the module's own forward hooks; what is not None replaces `output`."""

_NAME = "_call_impl"
_CALLER = nn.Module._wrapped_call_impl.__code__
_REPLACED = {"_global_forward_pre_hooks", "_global_forward_hooks"}  # globals that torch's function reads
_frame = sys._getframe
_tracing = torch.compiler.is_dynamo_compiling
_listening: Callable[[], object]
try:
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    _listening = get_eval_frame_callback
except ImportError:
    _listening = _tracing


class _Listened:
    """The listeners of one module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.before: list[Before] = []
        self.after: list[After] = []
        self.release = _nothing  # of the class of the module: its lookup need not be noticed for this one


class _AndOurs:
    """torch's dict of global hooks of one kind and one hook behind them, as far as torch's function reads it.

    It is true, as an object is that defines neither `__bool__` nor `__len__`.
    """

    def __init__(self, torch_has: dict[int, Any], hook: Callable[..., Any]) -> None:
        self._torch_has = torch_has
        self._ours = self, hook
        self._alone = (self._ours,)

    def items(self) -> tuple[tuple[Any, Any], ...]:
        """(id, hook) of each; gradwatch's has an id that no handle of torch has."""
        try:
            return (*self._torch_has.items(), self._ours) if self._torch_has else self._alone
        except Exception as error:
            guard.fault("localise", error)
        return tuple(self._torch_has.items())


class _Noticed:
    """In the place of `nn.Module._call_impl`: gives the twin to calls of modules that have listeners."""

    def __init__(self, patch: Patch[type], layer: Layer[type]) -> None:
        self.patch = patch
        self.original = original = layer.original
        seen = dict(original.__globals__)
        for name, hook in (("_global_forward_pre_hooks", _before), ("_global_forward_hooks", _after)):
            seen[name] = _AndOurs(seen[name], hook)
        self.rebuilt = FunctionType(original.__code__, seen, original.__name__, original.__defaults__)

    def __reduce__(self) -> tuple[Any, ...]:
        """Of a class that is pickled by value (cloudpickle, in scripts): torch's own, in the process that reads it."""
        return getattr, (nn.Module, _NAME)

    @untraced
    def __get__(self, instance: nn.Module | None, owner: type[nn.Module] | None = None) -> Any:
        try:
            if (
                _tracing() or instance is None
            ):  # dynamo inlines this, and shall depend on nothing of gradwatch
                return self.original.__get__(instance, owner)
            listened = _listened.get(id(instance))
            if listened is None:  # the path of almost every call of a module: as short as can be
                return MethodType(self.original, instance)
            # Where dynamo listens, it would compile the listeners.
            if listened.module() is instance and _frame(1).f_code is _CALLER and not _listening():
                return self.rebuilt.__get__(instance, owner)
            return self.original.__get__(instance, owner)
        except Exception as error:
            guard.fault("localise", error)
        return self.original.__get__(instance, owner)


_listened: dict[int, _Listened] = {}  # by id of the module


def listen(module: nn.Module, before: Before | None = None, after: After | None = None) -> Callable[[], None]:
    """Call `before` and `after` around every call of the module; the returned call ends that.

    Neither may raise. Where torch's function is not what it was (a later version, another library's), nothing is
    noticed. The last listener of a class gives it its function back.
    """
    releases = []
    for known, one in list(_listened.items()):
        if one.module() is None:
            releases.append(_listened.pop(known).release)
    listened = _listened.setdefault(id(module), _Listened(module))
    if before is not None:
        listened.before.append(before)
    if after is not None:
        listened.after.append(after)
    if listened.release is _nothing:
        listened.release = _install(type(module))
    for (
        release
    ) in releases:  # after it: a class that still has a listener is not given its function back for a moment
        release()

    def remove() -> None:
        for listeners, listener in ((listened.before, before), (listened.after, after)):
            if listener in listeners:
                listeners.remove(listener)  # type: ignore[arg-type]
        if not listened.before and not listened.after and _listened.get(identity) is listened:
            del _listened[identity]
            release, listened.release = listened.release, _nothing  # it leads back here
            release()

    identity = id(module)
    return remove


def noticed(module: nn.Module) -> bool:
    """True if calls of this very module have listeners."""
    listened = _listened.get(id(module))
    return listened is not None and listened.module() is module


class _Kind:
    """A class whose lookup is noticed, for as many modules as have listeners."""

    __slots__ = ("_kind", "_remove", "modules")

    def __init__(self, kind: type[nn.Module], remove: Callable[[], None]) -> None:
        self._kind = kind
        self._remove = remove
        self.modules = 0

    def leave(self) -> None:
        """One of the modules has no listeners any more; the last one gives the class its function back."""
        with _lock.held:
            self.modules -= 1
            if not self.modules:
                del _kinds[self._kind]
                self._remove()


_kinds: dict[type[nn.Module], _Kind] = {}
_lock = ForkSafeLock()


def _install(kind: type[nn.Module]) -> Callable[[], None]:
    """Have the lookup noticed for a module of this class, until what is returned is called."""
    with _lock.held:
        known = _kinds.get(kind)
        if known is None:
            remove = _listen_to(kind)
            if remove is _nothing:
                return _nothing
            known = _kinds[kind] = _Kind(kind, remove)
        known.modules += 1
        return known.leave


def _listen_to(kind: type[nn.Module]) -> Callable[[], None]:
    """Have the lookup go through the descriptor for modules of this class: others would pay for it at every call."""
    for base in kind.__mro__:
        found = vars(base).get(_NAME)
        if found is not None:
            break
    if isinstance(found, _Noticed):  # of this class, or of one that it is derived from
        return found.patch.listen(kind)
    if not (isinstance(found, FunctionType) and found is _torchs() and _names(found.__code__) >= _REPLACED):
        return _nothing
    patch: Patch[type] = Patch(kind, _NAME, lambda layer: _Noticed(patch, layer))
    try:
        return patch.listen(kind)
    except TypeError:  # a class that cannot be changed
        return _nothing


def _nothing() -> None:
    """No-op: no class was changed."""


def _torchs() -> Any:
    """torch's own function, also while it is patched."""
    found = vars(nn.Module)[_NAME]
    return found.original if isinstance(found, _Noticed) else found


def _names(code: CodeType) -> set[str]:
    """The globals that a function and those defined in it read, and more."""
    inside = [_names(one) for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*inside)


def _before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    try:
        changed = None
        listened = _listened.get(id(module))
        if listened is not None and listened.before:
            kwargs = _frame(1).f_locals["kwargs"]  # torch gives them to no global hook
            aside = (
                dispatch_modes.Aside() if dispatch_modes.dispatching() or dispatch_modes.functions() else None
            )
            try:
                for listener in tuple(listened.before):
                    given = listener(module, args, kwargs)
                    if given is not None:
                        args = changed = given
            finally:
                if aside is not None:
                    aside.put_back()
        return changed
    except Exception as error:
        guard.fault("localise", error)
        return None


def _after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    try:
        changed = None
        listened = _listened.get(id(module))
        if listened is not None and listened.after:
            aside = (
                dispatch_modes.Aside() if dispatch_modes.dispatching() or dispatch_modes.functions() else None
            )
            try:
                for listener in tuple(listened.after):
                    made = listener(module, args, output)
                    if made is not None:
                        output = changed = made
            finally:
                if aside is not None:
                    aside.put_back()
        return changed
    except Exception as error:
        guard.fault("localise", error)
        return None
