"""Recorded calls of a step: the calls of the models, or of their parts where a loop calls those, and of the criteria.

A loop may never call the model that is watched (`training_step` of a LightningModule calls `self.encoder(x)`). So its
parts are held beside it until it is called; where they are many, or none is called, its children are held instead,
level by level, until some of them turn out to be what the loop calls. What was held
before a watch began (`gradwatch.localise.held_calls.calls_before_attach`) counts until the step it led to is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

from torch import nn
from torch.optim import Optimizer

from gradwatch.localise.held_calls.criterion import beside
from gradwatch.localise.held_calls.model_recorder import ModelRecorder, Outermost
from gradwatch.localise.held_calls.recorded_call import Call
from gradwatch.localise.held_calls.similar_models import Kind, Kinds, kind_of
from gradwatch.localise.sharded.fsdp1 import has_wrappers
from gradwatch.taps import module_tree
from gradwatch.taps.dynamo import anything_compiled, compiles

UNCALLED = 2  # steps after which a model that was not called is looked for in its children
LEVELS = 3  # of children
OLD = 8  # optimizer steps after which a forward without a backward is released
WIDEST = 64  # parts of one model
FEW = 16  # parts held beside their model: each call of one costs 4 us


Hold: TypeAlias = Callable[[nn.Module, Outermost, Kind, Sequence[nn.Module] | None], ModelRecorder]


class Family:
    """One watched model: held itself, or as the parts that are called in its place; at first both, if they are few."""

    def __init__(
        self, model: nn.Module, hold: Hold, kinds: Kinds, modules: Sequence[nn.Module] | None = None
    ) -> None:
        """`modules` are those of the model, where they are known."""
        self._hold = hold
        self.outermost = Outermost()
        self.sought = True  # which of these the loop calls
        self._level = 0
        self._waited = 0
        modules = module_tree.modules(model) if modules is None else modules
        self._kind = kind_of(modules, kinds)
        self._whole = hold(model, self.outermost, self._kind, modules)
        self.model = self._whole.model  # gives the watched model, None once it has been freed
        # What FSDP1 has put a wrapper around has its parameters within that alone.
        self._flat = has_wrappers(modules)
        if not (self._kind.whole or self._whole.refused or self._flat or anything_compiled()):
            parts = [hold(part, self.outermost, Kind(), None) for part in _within(model)]
            # One whose parameters FSDP2 gathers with those of its parent cannot be run without it, nor be called so.
            self._whole.hold_beside([part for part in parts if not part.refused])
        self.recordings = [self._whole, *self._whole.parts]

    def belongs_to(self, hold: Hold, adopt: Callable[[ModelRecorder], None]) -> None:
        """Go on under another owner: `hold` makes further holdings, `adopt` is called for each that there is."""
        self._hold = hold
        for recording in {*self.recordings, self._whole, *self._whole.parts}:
            adopt(recording)

    def discard(self, held: Container[ModelRecorder]) -> None:
        """Go on without these."""
        self.recordings = [one for one in self.recordings if one not in held]

    def step_taken(self, optimizer: Optimizer) -> None:
        """Note, after a step, if any of these was called before it, while it is sought what the loop calls."""
        for recording in self.recordings:
            if recording.moves(optimizer):
                break
        else:
            return
        for recording in self.recordings:
            if recording.was_called:
                self._found()
                return
        self._waited += 1
        if self._waited == UNCALLED:
            self._descend()

    def _found(self) -> None:
        """Seek no longer: the loop calls some of these, and the rest need not be held."""
        self.sought = False
        if self._kind.whole and len(self.recordings) == 1:
            return
        if self._whole.was_called and not any(part.was_called for part in self._whole.parts):
            # The parts of the next model of this kind are held only where it is not called itself.
            self._kind.called_whole()
        self.recordings = [recording for recording in self.recordings if not recording.is_over]

    def _descend(self) -> None:
        level = [self._whole] if self._level == 0 else self.recordings
        parts = [
            part for recording in level if (model := recording.model()) is not None for part in _parts(model)
        ]
        self._level += 1
        self.sought = self._level < LEVELS
        refused = any(recording.refused for recording in self.recordings)
        if (
            not parts or len(parts) > WIDEST or refused or self._flat or anything_compiled()
        ):  # whose calls no hook sees
            self.sought = False
            return
        for recording in self.recordings:
            recording.close()
        self.recordings = [self._hold(part, self.outermost, Kind(), None) for part in parts]
        self._waited = 0


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """Children of a module; those of a list of modules, which is never called, in its place."""
    for child in dict.fromkeys(model._modules.values()):
        if child is None:
            continue
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _parts(child)
        else:
            yield child


def _within(model: nn.Module) -> list[nn.Module]:
    """Parts of a module, level by level, as far as they may be held beside it unnoticed by the script."""
    found: dict[int, nn.Module] = {}
    level = [model]
    for _ in range(LEVELS):
        level = [part for one in level if not compiles(one) for part in _parts(one) if part is not model]
        if len(found) + len(level) > FEW:
            break
        found.update((id(part), part) for part in level)
    return list(found.values())


class Inherited(NamedTuple):
    """Calls recorded before a watch began: whole models that go on, the criteria beside them, and calls of others."""

    families: list[Family]
    criteria: Sequence[ModelRecorder]
    former: Sequence[ModelRecorder]


class StepRecorder:
    """The calls since the last step, of all models and criteria. Never raises into a forward.

    `failed` counts an internal error; `max_bytes` caps what is held per model, and per call of a criterion.
    """

    def __init__(self, failed: Callable[[str, BaseException], None], max_bytes: int) -> None:
        self._failed = failed
        self._max_bytes = max_bytes
        self._families: list[Family] = []
        self.kinds: Kinds = {}
        self._criteria: list[ModelRecorder] = []
        self._former: list[ModelRecorder] = []  # that record no further call
        self._steps = [0]  # taken by optimizers: one place for all that is held, to set it at every step

    def share_kinds(self, other: StepRecorder) -> None:
        """Learn of kinds of models together with another one from now on."""
        if self.kinds is not other.kinds:
            other.kinds |= self.kinds
            self.kinds = other.kinds

    def add(self, model: nn.Module) -> None:
        """Hold the calls of one more model, unless they are held."""
        if not self.holds(model):
            self._release(model)
            self._families.append(Family(model, self._model, self.kinds))

    def holds(self, model: nn.Module) -> bool:
        """True if the calls of this very model are held."""
        return model in [family.model() for family in self._families]

    @property
    def empty(self) -> bool:
        """True if no model and no criterion is held, and no call."""
        return not (self._families or self._criteria or self._former)

    def inherit(self, before: Inherited) -> None:
        """Go on with what was held before this began."""
        for family in before.families:
            if self._families:
                self._release(family.model())
            family.belongs_to(self._model, self._adopt)
            self._families.append(family)
        for recording in (*before.criteria, *before.former):
            self._adopt(recording)
        held = {id(recording.model()) for recording in self._criteria} if before.criteria else ()
        for criterion in before.criteria:
            if id(criterion.model()) in held:
                criterion.unhook()
                self._former.append(criterion)
            else:
                self._criteria.append(criterion)
        self._former += before.former

    def _adopt(self, recording: ModelRecorder) -> None:
        recording.belongs_to(self._failed, self._max_bytes, self._steps, self._met)

    def _release(self, model: nn.Module | None) -> None:
        """Close the family of this model, and those of models that have been freed."""
        for family in tuple(self._families):
            held = family.model()
            if held is not None and held is not model:
                continue
            for recording in family.recordings:
                recording.close()
            self._families.remove(family)

    def close(self) -> None:
        """Remove every hook and release everything."""
        if self.empty:
            return
        for recording in self:
            recording.close()
        self._families.clear()
        self._criteria.clear()
        self._former.clear()

    def drop(self) -> None:
        """Release the calls: they belong to no step."""
        for recording in self:
            recording.drop()

    def cleared(self, optimizer: Optimizer | None) -> None:
        """The gradients that this optimizer was to step by (None = not known) were thrown away: they are of no step."""
        over: set[int] = set()
        for recording in self._of_models():
            if optimizer is None or recording.moves(optimizer):
                over |= recording.cleared()
        for criterion in self._criteria:
            criterion.cleared(over)

    @property
    def steps(self) -> int:
        """Steps taken by any optimizer since this began."""
        return self._steps[0]

    def step_taken(self, optimizer: Optimizer) -> None:
        """One more step has been taken: its calls are discarded, and those made too many steps ago in any case."""
        try:
            self._steps[0] = number = self._steps[0] + 1
            held = self._former + self._criteria
            for family in self._families:
                held += family.recordings  # `self`, without its Python calls in cold caches
            for recording in held:
                if recording.calls or recording.indices is not None:
                    recording.taken(optimizer, number - OLD)
            for family in self._families:
                if family.outermost.now is not None:  # a forward that raised has left it set
                    family.outermost.reset()
                if family.sought:
                    family.step_taken(optimizer)
            if self._former:
                self._former = [recording for recording in self._former if recording.calls]
        except Exception as error:
            self._failed("localise", error)

    def calls(self) -> list[tuple[nn.Module, Call]]:
        """(module, call) of those that a gradient has reached, in the order they were made."""
        held = []
        for recording in self:
            module = recording.model()
            if module is not None:
                held += [(module, call) for call in list(recording.calls) if call.gradients or call.reason]
        return sorted(held, key=lambda pair: pair[1].order)

    @property
    def twice(self) -> bool:
        """True if a gradient of one of these has ever been kept with its graph, to be differentiated again."""
        return any(recording.twice for recording in self)

    @property
    def refused(self) -> str:
        """The reason why a watched model cannot be run again at all; "" where it can."""
        return next((recording.refused for recording in self._of_models() if recording.refused), "")

    @property
    def dropped(self) -> int:
        """Calls of this step that were released for their size."""
        return sum(recording.dropped for recording in self)

    def __iter__(self) -> Iterator[ModelRecorder]:
        return iter(self._of_models() + self._criteria)

    def _of_models(self) -> list[ModelRecorder]:
        found: list[ModelRecorder] = []
        for family in self._families:
            found += family.recordings
        return found + self._former

    def _model(
        self, module: nn.Module, outermost: Outermost, kind: Kind, modules: Sequence[nn.Module] | None
    ) -> ModelRecorder:
        return self._recorder_of(module, outermost=outermost, kind=kind, met=self._met, modules=modules)

    def _recorder_of(self, module: nn.Module, **options: Any) -> ModelRecorder:
        return ModelRecorder(module, self._failed, self._max_bytes, steps=self._steps, **options)

    def _met(self, frame: FrameType | None) -> bool:
        """Look beside the line that calls a model; True if something stands there."""
        known: set[int] = set()
        for recording in self:
            model = recording.model()
            if model is not None:
                known.update(map(id, module_tree.modules(model)))
        found = beside(frame, known)
        for criterion in found:
            recording = self._recorder_of(criterion, light=True)
            if recording.refused:
                recording.close()
            else:
                self._criteria.append(recording)
        return bool(found)
