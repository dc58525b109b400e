"""Calls of modules in loss code that is run again: made as they were recorded, and the gradients that come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn

from gradwatch.localise.diagnosis.interpreted_lines import InterpretedLines
from gradwatch.localise.diagnosis.python_frames import frame_of
from gradwatch.localise.diagnosis.tensor_values import tensors
from gradwatch.localise.held_calls.inner_model import inner
from gradwatch.localise.held_calls.module_attributes import Refused
from gradwatch.localise.held_calls.recorded_call import Call
from gradwatch.localise.loss.interpreter import purity
from gradwatch.localise.loss.interpreter.calls import Arguments
from gradwatch.localise.loss.same_values import same_values
from gradwatch.localise.replay.step_replay import refuse, within
from gradwatch.taps import module_calls
from gradwatch.taps.hook_ids import own_ids

Held: TypeAlias = Sequence[tuple[nn.Module, Call]]


@dataclass(slots=True, eq=False)
class ModelCalls:
    """One run of loss code: the calls of models it has made, and the gradients that reached them."""

    models: Sequence[nn.Module]
    held: Held
    lines: InterpretedLines
    made: list[Call] = field(default_factory=list)
    gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def call(self, module: nn.Module, arguments: Callable[[], Arguments]) -> Any:
        """Make the call of a module as it was recorded, else as it is if it is torch's or a part of the models."""
        base = inner(module)
        call = self._recorded(base)
        return self._not_recorded(module, arguments) if call is None else self._again(base, call, arguments)

    def _not_recorded(self, module: nn.Module, arguments: Callable[[], Arguments]) -> Any:
        base = inner(module)
        own = within(base, self.models)
        if not own and not type(base).__module__.startswith("torch.nn.modules"):
            return NotImplemented
        purity.check_module(base, stands_in=own)
        args, kwargs = arguments()
        return module(*args, **kwargs)

    def _again(self, base: nn.Module, call: Call, arguments: Callable[[], Arguments]) -> Any:
        refuse(base, call)
        self.made.append(call)
        # What was computed of other tensors is held without the graph behind it.
        graded = any(one.requires_grad for one in tensors((call.args, call.kwargs)))
        args, kwargs = arguments() if graded else (call.args, call.kwargs)
        call.generators.restore()
        with call.recorded_modes():
            return self._outputs(base, call, args, kwargs)

    def _recorded(self, base: nn.Module) -> Call | None:
        """The recorded call that comes next of this module; of several the one from the line under way."""
        calls = [call for model, call in self.held if inner(model) is base and call not in self.made]
        now = next(iter(self.lines.now), None)
        called = [(frame_of(one.caller), one) for one in calls]
        here = [(at, one) for at, one in called if now is not None and at and at[0].file == now.file]
        near = [(at, one) for at, one in here if now is not None and at[0].line == now.line]
        return next((one for _, one in near or here or called), None)

    def _outputs(self, base: nn.Module, call: Call, args: Any, kwargs: Any) -> Any:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            for position, tensor in enumerate(tensors(output)):
                if tensor.requires_grad and tensor.grad_fn is not None:
                    with own_ids:
                        tensor.register_hook(self._reached(call, position))

        ignore = module_calls.listen(base, after=after)
        try:
            return base(*args, **kwargs)
        finally:
            ignore()

    def _reached(self, call: Call, position: int) -> Callable[[Tensor], None]:
        def reached(grad: Tensor) -> None:
            key, kept = (call.order, position), grad.detach()
            self.gradients[key] = self.gradients[key] + kept if key in self.gradients else kept

        return reached

    def verify(self) -> None:
        """Raise `Refused` where the gradients at the outputs are not those of the step."""
        if not self.made:
            raise Refused("the loss code calls no model whose call was recorded")
        compared = 0
        for call in self.made:
            for position, grad in call.gradients.items():
                again = self.gradients.get((call.order, position))
                if again is None or not same_values(again, grad):
                    raise Refused("run again, the loss code brings other gradients to the model's outputs")
                compared += 1
        if not compared:
            raise Refused("no gradient at the model's outputs was kept to compare with")
