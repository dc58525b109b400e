"""The calls of models before a Watch is attached, so that the first step of a training can be run again too.

Held like those of a watched model, with one difference: no hook on a parameter says when gradients are thrown away, so
that is read off the parameters when a backward reaches the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradwatch.localise.held_calls.inner_model import inner
from gradwatch.localise.held_calls.model_recorder import MAX_BYTES, ModelRecorder
from gradwatch.localise.held_calls.step_recorder import Family, Inherited, StepRecorder
from gradwatch.localise.sharded.whole_parameters import is_spread
from gradwatch.taps import backward_end, module_calls, module_tree


class PreAttachCalls(ModelRecorder):
    """Knows by its model's parameters which backwards have led to the gradients in them: `tasks`, None = not known."""

    unwatched = True
    tasks: set[int] | None = None
    _filled = False  # whether one of them left gradients in the parameters; `autograd.grad` leaves none

    def _reached(self) -> None:
        """A backward reaches an output, and perhaps the parameters."""
        model, task = self.model(), backward_end.current()
        if model is None or task in (self.tasks or ()):
            return
        trained = [param for param in module_tree.parameters(model) if param.requires_grad]
        if not trained or is_spread(model):
            return
        if self._filled and all(param.grad is None for param in trained):
            self.tasks, self._filled = None, False  # thrown away
        self.tasks = {task, *(self.tasks or ())}
        self._filled = self._filled or any(map(backward_end.reaches, trained))

    def belongs_to(self, *owner: Any) -> None:
        """Give it to a Watch from now on, which knows when gradients are thrown away."""
        self.unwatched = False
        super().belongs_to(*owner)

    def keep(self, tasks: set[int]) -> None:
        """Discard the calls whose gradients have been thrown away: none of these graph tasks reached them."""
        for call in [one for one in list(self.calls) if one.tasks and one.tasks.isdisjoint(tasks)]:
            self._discard(call)


class PreAttachRecorder(StepRecorder):
    """Holds the calls of models from now on; `handed_over` to a Watch, or closed."""

    def __init__(self, failed: Callable[[str, BaseException], None]) -> None:
        super().__init__(failed, MAX_BYTES)
        self._wrappers: list[Callable[[], None]] = []

    def add(self, model: nn.Module, modules: Sequence[nn.Module] | None = None) -> None:
        """Hold the calls of one more model, of these `modules`, which may contain others that were held."""
        if self._families:
            inside = {
                id(None),
                *map(id, module_tree.modules(model)),
                *map(id, module_tree.modules(inner(model))),
            }
            self._close([one for one in self._families if id(one.recordings[0].model()) in inside])
        self._families.append(Family(model, self._model, self.kinds, modules))

    def wraps(self, outer: nn.Module, module: nn.Module) -> None:
        """`outer` is being made around `module`, which is to be compiled: no hook may go from it once it is.

        If that is a model that was added, `outer` is held in its place from the first call on: yet it wraps nothing.
        """
        if not self.holds(module):
            inside = set(map(id, module_tree.modules(module)))
            for recording in self:
                if id(recording.model()) in inside:
                    recording.unhook()
            return

        def called(module: nn.Module, args: Any, kwargs: Any) -> None:
            try:
                ignore()
                self.add(module)
                self._families[-1].recordings[0].begins(module, args, kwargs)
            except Exception as error:
                self._failed("localise", error)

        ignore = module_calls.listen(outer, before=called)
        self._wrappers.append(ignore)

    def close(self) -> None:
        """Record no further call and release everything."""
        super().close()
        for ignore in self._wrappers:
            ignore()
        self._wrappers.clear()

    @property
    def empty(self) -> bool:
        """True if nothing is held, and no call of a wrapper is awaited."""
        return not (self._wrappers or self._families or self._criteria or self._former)

    def without(self, optimizer: Optimizer) -> None:
        """Release the models that this optimizer trains: another recorder holds them."""
        self._close([one for one in self._families if one.recordings[0].moves(optimizer)])

    def handed_over(
        self, models: Iterable[nn.Module], further: Callable[[], Iterable[nn.Module]] = tuple
    ) -> Inherited:
        """Recordings of `models`, which go on, and recorded calls of their parts, wrappers and criteria.

        So of `further` models, asked for where more is held than `models`. The rest is released, and its hooks removed.
        """
        roots = list(models)
        if self._nothing_but(roots):
            families = self._families.copy()
            self._families.clear()
            return Inherited(families, (), ())
        roots += further()
        watched = {id(module) for model in roots for module in module_tree.modules(inner(model))}
        held = [one for one in self if isinstance(one, PreAttachCalls) and self._is_of(one, watched)]
        known = [one.tasks for one in held if one.tasks is not None]
        for recording in held:
            if known:
                recording.keep(set().union(*known) if recording.tasks is None else recording.tasks)
        going_on = [one for one in self._families if any(one.model() is root for root in roots)]
        criteria = [one for one in self._criteria if one in held and one.was_called]
        staying = {*criteria, *(recording for family in going_on for recording in family.recordings)}
        leaving = [recording for recording in held if recording not in staying]
        for recording in leaving:
            recording.unhook()
        self._families[:] = [one for one in self._families if one not in going_on]
        for family in self._families:
            family.discard(held)
        self._criteria[:] = [one for one in self._criteria if one not in held]
        self.close()
        return Inherited(going_on, criteria, [recording for recording in leaving if recording.was_called])

    def _nothing_but(self, roots: Sequence[nn.Module]) -> bool:
        """True if whole models among these are held and nothing else, which no backward has reached."""
        if self._criteria or self._former or self._wrappers:
            return False
        known = set(map(id, roots))
        for family in self._families:
            if id(family.model()) not in known:
                return False
            for recording in family.recordings:
                if isinstance(recording, PreAttachCalls) and recording.tasks is not None:
                    return False
        return True

    def _is_of(self, recording: ModelRecorder, watched: set[int]) -> bool:
        model = recording.model()
        if model is None or not watched:
            return False
        return recording in self._criteria or id(inner(model)) in watched

    def _close(self, families: list[Family]) -> None:
        for family in families:
            for recording in family.recordings:
                recording.close()
            self._families.remove(family)

    def _recorder_of(self, module: nn.Module, **options: Any) -> ModelRecorder:
        return PreAttachCalls(module, self._failed, self._max_bytes, **options)
