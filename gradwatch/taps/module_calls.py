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
raises, and `torch.nn.modules.module._has_any_global_hook()` stays False. A listener that only looks at what a call is
given is called during the lookup, which saves torch a hook.

Not noticed: `module.forward(...)` called directly, calls inside a compiled region, and `module.compile()`, which
replaces the lookup.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from gradwatch.runtime import guard
from gradwatch.runtime.fork_safe_locks import ForkSafeLock
from gradwatch.taps import dispatch_modes
from gradwatch.taps.dispatch_modes import dispatching, functions
from gradwatch.taps.dynamo import untraced_itself
from gradwatch.taps.patch import Layer, Patch

Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], "tuple[Any, ...] | None"]
"""Called with (module, args, kwargs) before the module's own pre-hooks; what is not None replaces `args`."""
Begins = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
"""Called with (module, args, kwargs) before any hook; it replaces nothing."""
After = Callable[[nn.Module, tuple[Any, ...], Any], Any]
"""Called with (module, args, output) before the module's own forward hooks; what is not None replaces `output`."""

_NAME = "_call_impl"
_CALLER = nn.Module._wrapped_call_impl.__code__
_BEFORE, _AFTER = "_global_forward_pre_hooks", "_global_forward_hooks"  # globals that torch's function reads
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

    __slots__ = ("after", "before", "begins", "module", "release")

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        # Replaced, never changed: a listener may come or go while they are called.
        self.begins: tuple[Begins, ...] = ()
        self.before: tuple[Before, ...] = ()
        self.after: tuple[After, ...] = ()
        self.release = _nothing  # of the class of the module: its lookup need not be noticed for this one


class _AndOurs:
    """torch's dict of global hooks of one kind and one hook behind them, as far as torch's function reads it.

    `items()` gives (id, hook) of each; gradwatch's has an id that no handle of torch has. It is true, as an object is
    that defines neither `__bool__` nor `__len__`.
    """

    __slots__ = ("items",)

    def __init__(self, torch_has: dict[int, Any], hook: Callable[..., Any]) -> None:
        # Not a Python function, which would be called in cold caches; the view shows what torch has by then.
        self.items: Callable[[], Iterable[tuple[Any, Any]]] = partial(
            chain, torch_has.items(), ((self, hook),)
        )


class _Noticed:
    """Stand-in for `nn.Module._call_impl`: gives the twin to calls of modules that have listeners."""

    def __init__(self, patch: Patch[type], layer: Layer[type]) -> None:
        self.patch = patch
        self.original = layer.original
        self.with_after = _rebuilt(layer.original, {_AFTER: _after})
        self.with_both = _rebuilt(layer.original, {_BEFORE: _before, _AFTER: _after})

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle torch's own, for a class that is pickled by value (cloudpickle, in scripts)."""
        return getattr, (nn.Module, _NAME)

    @untraced_itself  # not what it calls too: while `untraced` code runs, `_listening` says that dynamo does not listen
    def __get__(self, instance: nn.Module | None, owner: type[nn.Module] | None = None) -> Any:
        try:
            if (
                _tracing() or instance is None
            ):  # dynamo inlines this, and shall depend on nothing of gradwatch
                return self.original.__get__(instance, owner)
            listened = _listened.get(id(instance))
            if listened is None:  # the path of almost every call of a module: as short as can be
                return MethodType(self.original, instance)
            caller = _frame(1)
            # Where dynamo listens, it would compile the listeners.
            if listened.module() is not instance or caller.f_code is not _CALLER or _listening():
                return MethodType(self.original, instance)
            if listened.begins:
                given = caller.f_locals
                args, kwargs = given["args"], given["kwargs"]
                if dispatching() or functions():
                    dispatch_modes.unseen(_begin, listened, instance, args, kwargs)
                else:
                    for begins in listened.begins:
                        begins(instance, args, kwargs)
            return MethodType(self.with_both if listened.before else self.with_after, instance)
        except Exception as error:
            guard.fault("localise", error)
        return self.original.__get__(instance, owner)


_listened: dict[int, _Listened] = {}  # by id of the module


def _begin(listened: _Listened, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for begins in listened.begins:
        begins(module, args, kwargs)


def _rebuilt(function: Any, hooks: dict[str, Callable[..., Any]]) -> FunctionType:
    """A copy of torch's function that finds these global hooks behind torch's own, by the name of their dict."""
    seen = dict(function.__globals__)
    seen.update((name, _AndOurs(seen[name], hook)) for name, hook in hooks.items())
    return FunctionType(function.__code__, seen, function.__name__, function.__defaults__)


def listen(
    module: nn.Module,
    before: Before | None = None,
    after: After | None = None,
    begins: Begins | None = None,
) -> Callable[[], None]:
    """Call these before and after every call of the module; the returned call ends that.

    None may raise. Where torch's function is not what it was (a later version, another library's), nothing is
    noticed. The last listener of a class gives it its function back.
    """
    releases = []
    for known, one in list(_listened.items()):
        if one.module() is None:
            releases.append(_listened.pop(known).release)
    listened = _listened.setdefault(id(module), _Listened(module))
    if begins is not None:
        listened.begins += (begins,)
    if before is not None:
        listened.before += (before,)
    if after is not None:
        listened.after += (after,)
    if listened.release is _nothing:
        listened.release = _install(type(module))
    for (
        release
    ) in releases:  # after it: a class that still has a listener is not given its function back for a moment
        release()

    def remove() -> None:
        if listened.module() is None:
            listened.begins = listened.before = listened.after = ()
        else:
            listened.begins = _without(listened.begins, begins)
            listened.before = _without(listened.before, before)
            listened.after = _without(listened.after, after)
        left = listened.begins or listened.before or listened.after
        if not left and _listened.get(identity) is listened:
            del _listened[identity]
            release, listened.release = listened.release, _nothing  # it leads back here
            release()

    identity = id(module)
    return remove


def _without(listeners: tuple[Any, ...], listener: Any) -> tuple[Any, ...]:
    """Listeners without the first place of one among them, if it has one."""
    at = listeners.index(listener) if listener in listeners else len(listeners)
    return listeners[:at] + listeners[at + 1 :]


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
    if not (
        isinstance(found, FunctionType) and found is _torchs() and _names(found.__code__) >= {_BEFORE, _AFTER}
    ):
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
            aside = dispatch_modes.Aside() if dispatching() or functions() else None
            try:
                for listener in listened.before:
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
            aside = dispatch_modes.Aside() if dispatching() or functions() else None
            try:
                for listener in listened.after:
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
