"""Hooks as context managers: a function of your own is called with what flows through a module or a tensor.

Calls of modules are noticed without anything standing on the module (`gradwatch.taps.module_calls`), so a hooked model
is pickled, copied and saved as if no hook were there. What cannot be seen there cannot be seen here: calls inside a
region that `torch.compile` has compiled, and `module.forward(...)` called directly.
"""

from __future__ import annotations

import fnmatch
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from gradwatch.errors import AttachError, HookError
from gradwatch.taps import module_calls, nested_containers
from gradwatch.taps.graph.full_backward import FullBackward, preflight
from gradwatch.taps.hook_ids import own_ids
from gradwatch.taps.muted_forwards import is_muted

Kind: TypeAlias = Literal["forward", "forward_pre", "full_backward", "tensor"]
Modules: TypeAlias = "nn.Module | Mapping[str, nn.Module] | Iterable[nn.Module]"
_KEPT = {"forward": 2, "forward_pre": 1, "full_backward": 2, "tensor": 1}  # position in what `fn` is given
_INSTEAD = (
    'Hook the output instead, which is safe with in-place operations: hook_output(module, grad=True), or kind="tensor" '
    "on a tensor."
)


T = TypeVar("T", bound="UntilRemoved")


class UntilRemoved(ABC):
    """Hooks that stand from their making on, and are removed when their `with` ends, whatever happens in it."""

    @abstractmethod
    def remove(self) -> None:
        """Remove them; what they found stays. Idempotent."""

    def awaiting(self) -> Iterable[Hook]:
        """The hooks that a `with` in which nothing reached them warns of."""
        return ()

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()
        if error is None:
            warn_uncalled(self.awaiting())


class Hook(UntilRemoved):
    """Calls `fn` with what flows through one module, or with the gradient of one tensor, until it is removed.

    By `kind`, `fn` is called as torch would: `forward` with (module, args, output), `forward_pre` with (module, args),
    `full_backward` with (module, grad_input, grad_output), `tensor` with (tensor, gradient). What it returns is kept
    as `stored`; without `fn` the output, the args, grad_output or the gradient itself is.

    Args:
        target: a module, or with `kind="tensor"` a tensor that wants a gradient.
        replace: put what `fn` returns, unless it is None, in the place of the output, args, grad_input or gradient;
            it must have the same tensors' shapes and dtypes.
        detach: give `fn` tensors cut from the graph; by default unless `replace`. They share memory with the model's:
            an in-place operation behind the module changes what was stored.
        cpu: give `fn` copies in host memory; waits for a device.
        gather: store the tensors of all ranks, stacked [world, …]; a collective of the default process group, so
            every rank must run the same hooks in the same order. Without a process group, [1, …].
        name: how messages name the target.

    An exception in `fn`, or a replacement that does not fit, removes the hook, is kept as `error`, and is told by one
    warning; the training goes on as without the hook.

    Raises:
        AttachError: the target is not of that kind, or `full_backward` would break the module (in-place operations).
    """

    def __init__(
        self,
        target: nn.Module | Tensor,
        fn: Callable[..., Any] | None = None,
        *,
        kind: Kind = "forward",
        replace: bool = False,
        detach: bool | None = None,
        cpu: bool = False,
        gather: bool = False,
        name: str = "",
    ) -> None:
        self.name = name or type(target).__name__
        self.kind = kind
        self.stored: Any = None
        self.calls = 0
        self.error: Exception | None = None
        self._fn = fn
        self._replace = replace
        self._detach = not replace if detach is None else detach
        self._cpu = cpu
        self._gather = gather
        self._remove: Callable[[], None] | None = self._install(target)

    def _install(self, target: nn.Module | Tensor) -> Callable[[], None]:
        if self.kind not in get_args(Kind):
            raise AttachError(f"a hook of kind {self.kind!r}; there are {', '.join(get_args(Kind))}")
        wanted = Tensor if self.kind == "tensor" else nn.Module
        if not isinstance(target, wanted):
            raise AttachError(
                f'kind="{self.kind}" hooks a {wanted.__name__}, and {self.name} is a {type(target).__name__}'
            )
        if isinstance(target, Tensor):
            return self._on_tensor(target)
        if self.kind == "forward":
            return module_calls.listen(target, after=self._forward)
        if self.kind == "forward_pre":
            return module_calls.listen(target, before=self._forward_pre)
        preflight([(self.name, target)], _INSTEAD)
        around = FullBackward(self._full_backward, self._failed)
        return module_calls.listen(target, around.before, around.after)

    def remove(self) -> None:
        """Call `fn` no more; `stored` stays. Idempotent."""
        remove, self._remove = self._remove, None
        if remove is not None:
            remove()

    def awaiting(self) -> Iterable[Hook]:
        """This hook."""
        return (self,)

    # -- called by torch ---------------------------------------------------------------------------------

    def _forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return None if is_muted() else self._called(output, module, args, output)

    def _forward_pre(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, ...] | None:
        if is_muted():
            return None
        replaced = self._called(args, module, args)
        return replaced if replaced is None or isinstance(replaced, tuple) else (replaced,)

    def _full_backward(self, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        return self._called(grad_input, module, grad_input, grad_output)

    def _on_tensor(self, tensor: Tensor) -> Callable[[], None]:
        if not tensor.requires_grad:
            raise AttachError(f"{self.name} wants no gradient, so no hook on it is ever called")

        @unserializable_hook  # type: ignore[untyped-decorator]  # torch leaves it without a warning out of pickles
        def arrived(grad: Tensor) -> Tensor | None:
            replaced: Tensor | None = self._called(grad, tensor, grad)
            return replaced

        with own_ids:
            handle = tensor.register_hook(arrived)
        return lambda: handle.remove()

    # -- inside ------------------------------------------------------------------------------------------

    def _called(self, value: Any, *given: Any) -> Any:
        """Call `fn`; what is to stand in the place of `value`, None where that stays."""
        try:
            if self._remove is None:
                return None
            seen = tuple(self._shown(one) for one in given)
            self.calls += 1
            returned = seen[_KEPT[self.kind]] if self._fn is None else self._fn(*seen)
            replaced = returned if self._replace and returned is not None else None
            if replaced is not None:
                self._check(replaced, value)
            self.stored = gathered(returned) if self._gather else returned
            return replaced
        except Exception as error:
            self._failed("inspect", error)
            return None

    def _shown(self, given: Any) -> Any:
        if isinstance(given, nn.Module) or not (self._detach or self._cpu):
            return given
        if type(given) is Tensor:  # most outputs: a tenth of the time
            return self._ready(given)
        return nested_containers.tensors_replaced(self._ready, given)

    def _ready(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach() if self._detach else tensor
        return tensor.cpu() if self._cpu else tensor

    def _check(self, replaced: Any, value: Any) -> None:
        """Raises HookError unless both hold tensors of the same shapes and dtypes."""
        if self.kind == "forward_pre" and not isinstance(replaced, tuple):
            replaced = (replaced,)
        now, before = (list(map(_described, nested_containers.leaves(one))) for one in (replaced, value))
        if now != before:
            raise HookError(
                f"what stands in the place of {', '.join(before) or 'nothing'} must be of the same shape and dtype, "
                f"and is {', '.join(now) or 'nothing'}"
            )

    def _failed(self, component: str, error: BaseException) -> None:
        self.remove()
        self.error = error if isinstance(error, Exception) else None
        warnings.warn(
            f"gradwatch: the hook on {self.name} is removed, its function raised {type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )


class OutputGradient(Hook):
    """Keeps the gradient with respect to a module's output; its function is called with (module, output, gradient)."""

    def _forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not is_muted():
            for leaf in nested_containers.leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    with own_ids:
                        leaf.register_hook(self._noting(module, leaf.detach()))
        return None

    def _noting(self, module: nn.Module, output: Tensor) -> Callable[[Tensor], Tensor | None]:
        def arrived(grad: Tensor) -> Tensor | None:
            replaced: Tensor | None = self._called(grad, module, output, grad)
            return replaced

        return arrived


def _described(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return type(leaf).__name__


def gathered(value: Any) -> Any:
    """Each tensor as all ranks have it, stacked [world, …]."""
    if not (dist.is_available() and dist.is_initialized()):
        return nested_containers.tensors_replaced(lambda tensor: tensor.detach().unsqueeze(0), value)

    def all_of(tensor: Tensor) -> Tensor:
        mine = tensor.detach().contiguous()
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        return torch.stack(parts)

    return nested_containers.tensors_replaced(all_of, value)


def warn_uncalled(hooks: Iterable[Hook]) -> None:
    """One warning for hooks that nothing was seen by, and were not meant to be."""
    idle = [hook.name for hook in hooks if not hook.calls and hook.error is None]
    if idle:
        listed = ", ".join(idle[:5]) + (f" and {len(idle) - 5} more" if len(idle) > 5 else "")
        warnings.warn(
            f"gradwatch: nothing was seen by the hook on {listed}: was it used at all, replaced by another module, "
            "called by its forward() directly, or is it inside a compiled region or a transform of torch.func?",
            RuntimeWarning,
            stacklevel=3,
        )


class Hooks(UntilRemoved, Mapping[str, Hook]):
    """One `Hook` on each of some modules, by name; `stored` is what each has kept.

    `modules`: a model, of which those below it count that have no parts of their own, or (with `names`) those whose
    name matches one of the patterns; or a mapping of names to modules, or modules. `fn` and `options` as in `Hook`.
    """

    def __init__(
        self,
        modules: Modules,
        fn: Callable[..., Any] | None = None,
        *,
        names: str | Iterable[str] = (),
        hook: Callable[..., Hook] = Hook,
        **options: Any,
    ) -> None:
        self._hooks: dict[str, Hook] = {}
        try:
            for name, module in chosen(modules, names).items():
                self._hooks[name] = hook(module, fn, name=name, **options)
        except BaseException:
            self.remove()
            raise

    @property
    def stored(self) -> dict[str, Any]:
        """The last value that each hook has kept, by name."""
        return {name: hook.stored for name, hook in self._hooks.items()}

    def remove(self) -> None:
        """Remove every hook; what they stored stays. Idempotent."""
        for hook in self._hooks.values():
            hook.remove()

    def awaiting(self) -> Iterable[Hook]:
        """Each of these hooks."""
        return self._hooks.values()

    def __getitem__(self, name: str) -> Hook:
        return self._hooks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._hooks)

    def __len__(self) -> int:
        return len(self._hooks)


def chosen(modules: Modules, names: str | Iterable[str] = ()) -> dict[str, nn.Module]:
    """The modules to hook, by name; see `Hooks`.

    Raises:
        AttachError: a pattern matches no module.
    """
    if isinstance(modules, nn.Module):
        named = dict(modules.named_modules())
        patterns = [names] if isinstance(names, str) else list(names)
        if patterns:
            for pattern in patterns:
                if not fnmatch.filter(named, pattern):
                    raise AttachError(
                        f"no module's name matches {pattern!r}; there are {', '.join(filter(None, named))}"
                    )
            chosen = {n: m for n, m in named.items() if any(fnmatch.fnmatchcase(n, p) for p in patterns)}
            return {name or f"({type(modules).__name__})": module for name, module in chosen.items()}
        kind = type(modules).__name__
        return {name or kind: module for name, module in named.items() if not any(module.children())}
    if isinstance(modules, Mapping):
        return dict(modules)
    return {f"{k}: {type(module).__name__}": module for k, module in enumerate(modules)}


def hook_output(
    module: nn.Module, fn: Callable[..., Any] | None = None, *, grad: bool = False, **options: Any
) -> Hook:
    """Keep the output of a module's last call as `stored`, or (`grad`) the gradient that has arrived at it.

    `fn` and `options` as in `Hook`; with `grad`, `fn` is called with (module, output, gradient). The gradient is that
    of the loss with respect to the output, taken by a tensor hook on it, so it is safe with in-place operations behind
    the module; where the output holds several tensors, of the last of them that a gradient has arrived at.
    """
    return (OutputGradient if grad else Hook)(module, fn, **options)


def hook_outputs(
    modules: Modules,
    fn: Callable[..., Any] | None = None,
    *,
    grad: bool = False,
    names: str | Iterable[str] = (),
    **options: Any,
) -> Hooks:
    """`hook_output` on each of some modules, chosen as in `Hooks`."""
    return Hooks(modules, fn, names=names, hook=OutputGradient if grad else Hook, **options)


def hook_gradients(
    tensors: nn.Module | Mapping[str, Tensor], fn: Callable[..., Any] | None = None, **options: Any
) -> Hooks:
    """One hook on each tensor, or on each parameter of a model that wants a gradient: `fn(tensor, gradient)`.

    The gradient is that of one backward, before it is added to `.grad`. `options` as in `Hook`; with `replace=True`
    what `fn` returns is added in its place.
    """
    if isinstance(tensors, nn.Module):
        tensors = {name: param for name, param in tensors.named_parameters() if param.requires_grad}
    return Hooks(tensors, fn, kind="tensor", **options)  # type: ignore[arg-type]  # tensors by name
