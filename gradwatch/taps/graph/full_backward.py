"""Full-backward hooks without anything standing on a module, and the models that any full-backward hook breaks."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.utils.hooks import BackwardHook

from gradwatch.errors import AttachError
from gradwatch.taps.muted_forwards import is_muted


class FullBackward:
    """`register_full_backward_hook` for one module, as torch does it, without anything standing on the module.

    `before` and `after` are listeners for `module_calls.listen`; `failed` counts an internal error.
    """

    def __init__(self, hook: Callable[..., Any], failed: Callable[[str, BaseException], None]) -> None:
        self._hook = hook
        self._failed = failed
        self._open: list[tuple[int, BackwardHook]] = []  # of calls under way, each by the id of torch's frame

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, ...] | None:
        """The module's arguments, by way of torch's node that sees their gradients."""
        try:
            if is_muted():
                return None
            around = BackwardHook(module, [self._hook], [])
            given: tuple[Any, ...] = around.setup_input_hook(args)
            self._open.append((_call_number(), around))
            return given
        except Exception as error:
            self._failed("modules", error)
            return None

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The module's output, by way of the node that sees its gradient."""
        try:
            number = _call_number()
            while self._open:  # a forward that raised has left its own
                opened, around = self._open.pop()
                if opened == number:
                    if around.input_tensors_index is None:
                        self._without_inputs(around)
                    return around.setup_output_hook(output)
        except Exception as error:
            self._failed("modules", error)
        return None

    def _without_inputs(self, around: BackwardHook) -> None:
        """Call the hook where no input wants a gradient when the output's arrives: so does torch, with a warning."""
        none = (None,) * around.n_inputs

        def arrives(module: nn.Module, grad_output: Any) -> None:
            self._hook(module, none, grad_output)

        around.user_pre_hooks.append(arrives)
        around.input_tensors_index = []  # type: ignore[assignment]  # torch sets it to None or a list


def _call_number() -> int:
    """Number of torch's call that a listener is called from: listener, tap, torch."""
    return id(sys._getframe(3))


def preflight(modules: Iterable[tuple[str, nn.Module]], instead: str) -> None:
    """Refuse models that `register_full_backward_hook` would break; `instead` says what to do.

    It turns inputs and outputs into views of a custom Function; modifying one in place then raises inside the
    user's forward. Looked for: `inplace=True` modules, and in-place statements in the source of `forward`.

    Raises:
        AttachError: naming every offending module and line.
    """
    found = []
    for name, module in modules:
        for child_name, child in module.named_modules():
            where = f"{name}.{child_name}" if child_name else name
            if getattr(child, "inplace", False):
                found.append(f"{where}: {type(child).__name__}(inplace=True)")
            found += [f"{where}: {line}" for line in _in_place(type(child))]
    if found:
        listed = "\n  ".join(dict.fromkeys(found))
        raise AttachError(
            "a full-backward hook would break this model: it turns outputs "
            f"into views that must not be modified in place:\n  {listed}\n{instead}"
        )


def _in_place(kind: type[nn.Module]) -> list[str]:
    """`file:line code` of in-place statements in the forward of a user's module class."""
    if kind.__module__.startswith("torch."):
        return []
    try:
        lines, start = inspect.getsourcelines(kind.forward)
        path = inspect.getsourcefile(kind.forward)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return []
    hits = []
    for node in ast.walk(tree):
        augmented = isinstance(node, ast.AugAssign) and not isinstance(node.value, ast.Constant)
        method = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
        if augmented or (method.endswith("_") and not method.endswith("__")):
            line = node.lineno  # type: ignore[attr-defined]
            hits.append(f"{path}:{start + line - 1} {lines[line - 1].strip()}")
    return hits
