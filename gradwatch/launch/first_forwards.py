"""The forwards before the first backward, recorded until there is a session that takes them over.

The launcher attaches at the first backward, when its forward is over already: the cause of a NaN in it could not be
found. So when an optimizer is made, the calls of every model that may train are recorded from then on, and the session
takes them over. No file, thread or socket is opened, and nothing is printed.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, NamedTuple

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim import Optimizer

from gradwatch.runtime.fork_safe_locks import ForkSafeLock
from gradwatch.runtime.interruption import not_ours
from gradwatch.taps import module_tree
from gradwatch.taps.dynamo import untraced
from gradwatch.taps.hook_ids import own_ids
from gradwatch.taps.module_registry import ModuleRegistry

if TYPE_CHECKING:
    from gradwatch.localise.held_calls.calls_before_attach import PreAttachRecorder
    from gradwatch.session.session import Session

MOST_MODELS = 16
_requires_grad: Callable[[nn.Parameter], bool] = operator.attrgetter("requires_grad")
MOST_FAULTS = 8  # kept, to be counted by the session


class _Held(NamedTuple):
    """A model as it was when the recording of its calls began."""

    root: weakref.ref[nn.Module]
    identities: frozenset[int]
    """Ids of its parameters."""
    registrations: int


class FirstForwards:
    """Records the calls of models from the making of an optimizer until they are `handed_over`; so for later ones too.

    Internal errors never reach the script: the session that takes over counts them. `lock` is held while models are
    looked for, since threads may make optimizers and attach at the same time. Calls are recorded only while `wanting()`
    is true; else it only notes which models there are.
    """

    def __init__(self, registered: ModuleRegistry, lock: ForkSafeLock, wanting: Callable[[], bool]) -> None:
        self._registered = registered
        self._lock = lock
        self._wanting = wanting
        self._pre_attach: PreAttachRecorder | None = None
        self.has_calls = False  # of some model, held
        self._held: list[_Held] = []
        self._faults: list[tuple[str, BaseException]] = []

    def hold_new(self) -> None:
        """Record the calls of the models made since the last optimizer that may train; an optimizer is being made."""
        if self._registered.news:
            try:
                with self._lock.held:
                    self._hold_new()
            except Exception as error:
                self._failed("localise", error)

    def _hold_new(self) -> None:
        fresh = []
        for root in self._registered.fresh_roots():
            modules = module_tree.modules(root)
            params = module_tree.parameters_in(modules)
            if _may_train(params):
                fresh.append((root, modules))
                identities = frozenset(map(id, params))
                self._held.append(_Held(weakref.ref(root), identities, self._registered.registrations))
        if not (fresh and self._wanting()):
            return
        # Here, not at the top: most processes that import torch make no optimizer.
        from gradwatch.localise.held_calls.calls_before_attach import PreAttachRecorder

        if self._pre_attach is None:
            self._pre_attach = PreAttachRecorder(self._failed)
            with own_ids:
                register_module_module_registration_hook(self._wrapped)
        for model, modules in fresh[:MOST_MODELS]:
            if self._pre_attach.empty or not self._pre_attach.holds(model):
                self._pre_attach.add(model, modules)
        self.has_calls = True

    def root_of(self, identities: AbstractSet[int]) -> nn.Module | None:
        """The recorded model that has all parameters with these `id`s; None after any module has been changed since."""
        for held in self._held:
            if identities <= held.identities and held.registrations == self._registered.registrations:
                return held.root()
        return None

    def handed_over(self, watch: Session, joining: Iterable[nn.Module] = ()) -> None:
        """Give a session what was recorded of its models and of those `joining` it next; release the rest."""
        faults, self._faults = self._faults, []
        self._held.clear()
        pre_attach = self._pre_attach
        if pre_attach is not None and self.has_calls:
            try:
                watch.inherit(pre_attach, joining)
            except Exception as error:
                faults.append(("localise", error))
            if not pre_attach.empty:
                pre_attach.close()
            self.has_calls = False
        for fault in faults:
            watch.failed(*fault)

    def close(self, optimizer: Optimizer | None = None) -> None:
        """Release the models that this optimizer trains, watched or never to be; without one, all models."""
        self._held.clear()
        if self._pre_attach is None:
            return
        if optimizer is not None:
            self._pre_attach.without(optimizer)
        if optimizer is None or self._pre_attach.empty:
            self._pre_attach.close()
            self.has_calls = False

    @untraced
    def _wrapped(self, outer: nn.Module, name: str, module: nn.Module | None) -> None:
        """torch.compile(model) after the optimizer was made: only the call of the wrapper can be seen."""
        pre_attach = self._pre_attach
        if name == "_orig_mod" and pre_attach is not None and module is not None:
            try:
                with self._lock.held:
                    pre_attach.wraps(outer, module)
            except Exception as error:
                self._failed("localise", error)

    def _failed(self, component: str, error: BaseException) -> None:
        if not_ours(error):
            raise error
        if len(self._faults) < MOST_FAULTS:
            self._faults.append((component, error))


def _may_train(params: Sequence[nn.Parameter]) -> bool:
    """True if one of these wants a gradient and no live Session has any; nothing is imported to find out."""
    if not any(map(_requires_grad, params)):
        return False
    watching = sys.modules.get("gradwatch.session.live_sessions")
    for watch in () if watching is None else watching.LIVE.all():
        if watch.knows_any(map(id, params)) and not watch.idle():
            return False
    return True
