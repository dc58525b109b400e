"""Loss code evaluated expression by expression, so that each call is looked at before it is made.

Operators, torch's functions and methods are torch's own, called for real. Functions of the user's are interpreted in
turn. Attributes that they set are set beside their objects, what they write into lists and dicts of the script is left
out, and what would change anything else raises `Refused` before it has.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from gradwatch.localise.diagnosis.interpreted_lines import InterpretedLines
from gradwatch.localise.diagnosis.tensor_values import tensors
from gradwatch.localise.hold.module_attributes import Refused
from gradwatch.localise.loss import purity
from gradwatch.localise.loss.custom_functions import check_custom_function
from gradwatch.localise.loss.own_graph import check_graph, newest_node
from gradwatch.localise.loss.source_tree import tree_of
from gradwatch.localise.replay.forward_operations import key_of
from gradwatch.records.finding import Frame
from gradwatch.taps.graph.torch_functions import is_of_torch

WRITES = "loss code writes in place into a tensor that it did not make"
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
ModuleCall = Callable[[nn.Module, Callable[[], Arguments]], Any]
MOST = 20_000  # expressions evaluated: some seconds under a recorder
DEEPEST = 40  # calls within calls
UNARY: dict[type, Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Invert: operator.invert,
}
BINARY: dict[type, tuple[Callable[..., Any], Callable[..., Any]]] = {
    ast.Add: (operator.add, operator.iadd),
    ast.Sub: (operator.sub, operator.isub),
    ast.Mult: (operator.mul, operator.imul),
    ast.Div: (operator.truediv, operator.itruediv),
    ast.FloorDiv: (operator.floordiv, operator.ifloordiv),
    ast.Mod: (operator.mod, operator.imod),
    ast.Pow: (operator.pow, operator.ipow),
    ast.MatMult: (operator.matmul, operator.imatmul),
    ast.BitAnd: (operator.and_, operator.iand),
    ast.BitOr: (operator.or_, operator.ior),
    ast.BitXor: (operator.xor, operator.ixor),
    ast.LShift: (operator.lshift, operator.ilshift),
    ast.RShift: (operator.rshift, operator.irshift),
}
COMPARED: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}


class TooLongError(Refused):
    """Loss code that takes too many operations, wherever it is begun."""


class _ReturnError(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class _BreakError(Exception):
    pass


class _ContinueError(Exception):
    pass


class Scope:
    """Names that one function under way can see: its own, and those of its module."""

    def __init__(
        self,
        file: str,
        function: str,
        values: dict[str, Any],
        around: Mapping[str, Any],
        outer: tuple[Frame, ...] = (),
    ) -> None:
        self.file, self.function, self.values, self.around, self.outer = file, function, values, around, outer

    def get(self, name: str) -> Any:
        """The value of a name. Raises Refused where it has none."""
        for names in (self.values, self.around, vars(builtins)):
            if name in names:
                return names[name]
        raise Refused(f"`{name}` has no value any more")


class Interpreter:
    """Evaluates statements in a Scope; `module_call(module, arguments)` makes the calls of modules that it allows.

    `arguments()` evaluates those of the call. It returns NotImplemented for others, whose forward is interpreted.
    """

    def __init__(self, lines: InterpretedLines, module_call: ModuleCall) -> None:
        self.lines = lines
        self._module_call = module_call
        self._left = MOST
        self.begun = newest_node()
        self._depth = 0
        self._fresh: dict[int, Tensor] = {}  # tensors made here, by the key of their memory
        self._made: dict[int, Any] = {}  # containers made here
        self._incomplete: dict[int, Any] = {}  # containers of the script's that lack what was written here
        self._set: dict[tuple[int, str], tuple[Any, Any]] = {}  # attributes set here

    # -- statements --------------------------------------------------------------------------------------

    def run(self, statements: list[ast.stmt], scope: Scope) -> None:
        """Execute statements in their order."""
        for statement in statements:
            self._statement(statement, scope)

    def _statement(self, node: ast.stmt, scope: Scope) -> None:
        handler = getattr(self, f"_run_{type(node).__name__}", None)
        if handler is None:
            raise Refused(f"line {node.lineno} of {scope.file} is not run again: {type(node).__name__}")
        handler(node, scope)

    def _run_Pass(self, node: ast.Pass, scope: Scope) -> None:  # noqa: N802
        pass

    def _run_Expr(self, node: ast.Expr, scope: Scope) -> None:  # noqa: N802
        if not isinstance(node.value, ast.Constant):
            self.value(node.value, scope)

    def _run_Assign(self, node: ast.Assign, scope: Scope) -> None:  # noqa: N802
        value = self.value(node.value, scope)
        for target in node.targets:
            self._assign(target, value, scope)

    def _run_AnnAssign(self, node: ast.AnnAssign, scope: Scope) -> None:  # noqa: N802
        if node.value is not None:
            self._assign(node.target, self.value(node.value, scope), scope)

    def _run_AugAssign(self, node: ast.AugAssign, scope: Scope) -> None:  # noqa: N802
        load = ast.copy_location(_as_load(node.target), node)
        before, value = self.value(load, scope), self.value(node.value, scope)
        plain, in_place = BINARY[type(node.op)]
        self._at(node, scope)
        if isinstance(before, Tensor) or id(before) in self._made:
            result = self._operate(in_place, before, value) if self._writable(before) else before
        elif isinstance(before, (list, dict, set)):
            raise Refused("loss code adds to a container of the script's")
        else:
            result = self._operate(plain, before, value)
        self._assign(node.target, result, scope)

    def _run_If(self, node: ast.If, scope: Scope) -> None:  # noqa: N802
        self.run(node.body if self._truth(node.test, scope) else node.orelse, scope)

    def _run_For(self, node: ast.For, scope: Scope) -> None:  # noqa: N802
        for value in self._iterated(node.iter, scope):
            self._assign(node.target, value, scope)
            try:
                self.run(node.body, scope)
            except _BreakError:
                return
            except _ContinueError:
                continue
        self.run(node.orelse, scope)

    def _run_While(self, node: ast.While, scope: Scope) -> None:  # noqa: N802
        while self._truth(node.test, scope):
            try:
                self.run(node.body, scope)
            except _BreakError:
                return
            except _ContinueError:
                continue

    def _run_With(self, node: ast.With, scope: Scope) -> None:  # noqa: N802
        with contextlib.ExitStack() as stack:
            self.enter(node, scope, stack)
            self.run(node.body, scope)

    def enter(self, node: ast.With, scope: Scope, stack: contextlib.ExitStack) -> None:
        """Enter the contexts of a `with`, as far as they are torch's switches."""
        for item in node.items:
            context: Any = self.value(item.context_expr, scope)
            if (
                not isinstance(context, contextlib.AbstractContextManager)
                or type(context) not in purity.CONTEXTS
            ):
                raise Refused(f"line {node.lineno} of {scope.file} enters {type(context).__name__}")
            stack.enter_context(context)
            if item.optional_vars is not None:
                raise Refused(f"line {node.lineno} of {scope.file} names what it enters")

    def _run_Assert(self, node: ast.Assert, scope: Scope) -> None:  # noqa: N802
        if not self._truth(node.test, scope):
            raise Refused("an assertion of the loss code fails when it is run again")

    def _run_Return(self, node: ast.Return, scope: Scope) -> None:  # noqa: N802
        raise _ReturnError(None if node.value is None else self.value(node.value, scope))

    def _run_Break(self, node: ast.Break, scope: Scope) -> None:  # noqa: N802
        raise _BreakError

    def _run_Continue(self, node: ast.Continue, scope: Scope) -> None:  # noqa: N802
        raise _ContinueError

    def _assign(self, target: ast.expr, value: Any, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            scope.values[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            self._unpack(target.elts, value, scope)
        elif isinstance(target, ast.Subscript):
            self._put(self.value(target.value, scope), self.value(target.slice, scope), value)
        elif isinstance(target, ast.Attribute):
            owner = self.value(target.value, scope)
            if isinstance(owner, Tensor):
                raise Refused("loss code sets an attribute of a tensor")
            self._set[id(owner), target.attr] = owner, value
        else:
            raise Refused(f"line {target.lineno} of {scope.file} is not run again")

    def _unpack(self, targets: list[ast.expr], value: Any, scope: Scope) -> None:
        if not purity.is_plain(value):
            raise Refused(f"loss code unpacks {type(value).__name__}")
        self._check_iterators((value,))
        values = list(value)
        star = next((k for k, one in enumerate(targets) if isinstance(one, ast.Starred)), None)
        if star is not None:
            after = len(targets) - star - 1
            middle = values[star : len(values) - after]
            values = [*values[:star], middle, *values[len(values) - after :]]
            targets = [one.value if isinstance(one, ast.Starred) else one for one in targets]
        if len(values) != len(targets):
            raise Refused("loss code unpacks another number of values than before")
        for one, each in zip(targets, values, strict=True):
            self._assign(one, each, scope)

    def _put(self, owner: Any, place: Any, value: Any) -> None:
        """`owner[place] = value`, on what was made here; left out where it is a container of the script's."""
        if isinstance(owner, Tensor):
            purity.checked_arguments((owner, value), {})
            if self._writable(owner):
                owner[place] = value
        elif id(owner) in self._made:
            owner[place] = value
        elif type(owner) in (list, dict):
            self._incomplete[id(owner)] = owner
        else:
            raise Refused(f"loss code writes into {type(owner).__name__}")

    # -- expressions -------------------------------------------------------------------------------------

    def value(self, node: ast.expr, scope: Scope) -> Any:
        """The value of an expression."""
        self._left -= 1
        if self._left < 0:
            raise TooLongError("the loss code takes too many operations")
        handler = getattr(self, f"_of_{type(node).__name__}", None)
        if handler is None:
            raise Refused(f"line {node.lineno} of {scope.file} is not run again: {type(node).__name__}")
        return self._new(node, handler(node, scope))

    def _new(self, node: ast.expr, value: Any) -> Any:
        if isinstance(node, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)):
            self._made[id(value)] = value
        return value

    def _at(self, node: ast.expr | ast.stmt, scope: Scope) -> None:
        self.lines.enter(scope.file, node.lineno, scope.function, scope.outer)

    def _truth(self, node: ast.expr, scope: Scope) -> bool:
        value = self.value(node, scope)
        if not purity.is_plain(value):
            raise Refused(f"loss code tests {type(value).__name__}")
        return bool(value)

    def _of_Constant(self, node: ast.Constant, scope: Scope) -> Any:  # noqa: N802
        return node.value

    def _of_Name(self, node: ast.Name, scope: Scope) -> Any:  # noqa: N802
        value = scope.get(node.id)
        if id(value) in self._incomplete:
            raise Refused(f"loss code reads `{node.id}`, which it has written into")
        return value

    def _of_NamedExpr(self, node: ast.NamedExpr, scope: Scope) -> Any:  # noqa: N802
        value = self.value(node.value, scope)
        self._assign(node.target, value, scope)
        return value

    def _of_Attribute(self, node: ast.Attribute, scope: Scope) -> Any:  # noqa: N802
        owner = self.value(node.value, scope)
        if (id(owner), node.attr) in self._set:
            return self._set[id(owner), node.attr][1]
        self._at(node, scope)
        found = purity.attribute(owner, node.attr)
        if isinstance(found, property):
            if not isinstance(found.fget, FunctionType):
                raise Refused(f"loss code reads `{node.attr}` of {type(owner).__name__}")
            return self.call(found.fget, (owner,), {})
        if id(found) in self._incomplete:
            raise Refused(f"loss code reads `{node.attr}`, which it has written into")
        return found

    def _of_Subscript(self, node: ast.Subscript, scope: Scope) -> Any:  # noqa: N802
        owner, place = self.value(node.value, scope), self.value(node.slice, scope)
        self._at(node, scope)
        return purity.item(owner, place)

    def _of_Slice(self, node: ast.Slice, scope: Scope) -> slice:  # noqa: N802
        parts = (node.lower, node.upper, node.step)
        return slice(*(None if one is None else self.value(one, scope) for one in parts))

    def _of_UnaryOp(self, node: ast.UnaryOp, scope: Scope) -> Any:  # noqa: N802
        value = self.value(node.operand, scope)
        self._at(node, scope)
        return self._operate(UNARY[type(node.op)], value)

    def _of_BinOp(self, node: ast.BinOp, scope: Scope) -> Any:  # noqa: N802
        left, right = self.value(node.left, scope), self.value(node.right, scope)
        self._at(node, scope)
        return self._operate(BINARY[type(node.op)][0], left, right)

    def _of_BoolOp(self, node: ast.BoolOp, scope: Scope) -> Any:  # noqa: N802
        value: Any = None
        for one in node.values:
            value = self.value(one, scope)
            if not purity.is_plain(value):
                raise Refused(f"loss code tests {type(value).__name__}")
            if bool(value) is isinstance(node.op, ast.Or):
                return value
        return value

    def _of_Compare(self, node: ast.Compare, scope: Scope) -> Any:  # noqa: N802
        left, result = self.value(node.left, scope), None
        for kind, other in zip(node.ops, node.comparators, strict=True):
            right = self.value(other, scope)
            self._at(node, scope)
            self._check_iterators((right,) if isinstance(kind, (ast.In, ast.NotIn)) else ())
            if isinstance(kind, (ast.Is, ast.IsNot)):
                result = COMPARED[type(kind)](left, right)
            elif isinstance(kind, (ast.In, ast.NotIn)):
                purity.check_elements(((left,),))
                result = self._operate(COMPARED[type(kind)], left, right)
            else:
                result = self._operate(COMPARED[type(kind)], left, right)
            if len(node.ops) > 1 and not result:
                return result
            left = right
        return result

    def _of_IfExp(self, node: ast.IfExp, scope: Scope) -> Any:  # noqa: N802
        return self.value(node.body if self._truth(node.test, scope) else node.orelse, scope)

    def _of_Tuple(self, node: ast.Tuple, scope: Scope) -> tuple[Any, ...]:  # noqa: N802
        return tuple(self._elements(node.elts, scope))

    def _of_List(self, node: ast.List, scope: Scope) -> list[Any]:  # noqa: N802
        return list(self._elements(node.elts, scope))

    def _of_Set(self, node: ast.Set, scope: Scope) -> set[Any]:  # noqa: N802
        elements = list(self._elements(node.elts, scope))
        purity.check_elements((elements,))
        return set(elements)

    def _of_Dict(self, node: ast.Dict, scope: Scope) -> dict[Any, Any]:  # noqa: N802
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                found |= self._mapping(self.value(value, scope))
            else:
                name = self.value(key, scope)
                purity.check_elements(((name,),))
                found[name] = self.value(value, scope)
        return found

    def _of_JoinedStr(self, node: ast.JoinedStr, scope: Scope) -> str:  # noqa: N802
        return "…"  # a message, which no number is made of

    def _of_ListComp(self, node: ast.ListComp, scope: Scope) -> list[Any]:  # noqa: N802
        return [self.value(node.elt, inner) for inner in self._each(node.generators, scope)]

    def _of_SetComp(self, node: ast.SetComp, scope: Scope) -> set[Any]:  # noqa: N802
        elements = self._of_ListComp(ast.ListComp(node.elt, node.generators), scope)
        purity.check_elements((elements,))
        return set(elements)

    def _of_GeneratorExp(self, node: ast.GeneratorExp, scope: Scope) -> list[Any]:  # noqa: N802
        return [self.value(node.elt, inner) for inner in self._each(node.generators, scope)]

    def _of_DictComp(self, node: ast.DictComp, scope: Scope) -> dict[Any, Any]:  # noqa: N802
        found: dict[Any, Any] = {}
        for inner in self._each(node.generators, scope):
            name = self.value(node.key, inner)
            purity.check_elements(((name,),))
            found[name] = self.value(node.value, inner)
        return found

    def _each(self, loops: list[ast.comprehension], scope: Scope) -> Iterator[Scope]:
        if not loops:
            yield scope
            return
        first, *rest = loops
        for value in self._iterated(first.iter, scope):
            inner = Scope(scope.file, scope.function, dict(scope.values), scope.around, scope.outer)
            self._assign(first.target, value, inner)
            if all(self._truth(test, inner) for test in first.ifs):
                yield from self._each(rest, inner)

    def _iterated(self, node: ast.expr, scope: Scope) -> Iterable[Any]:
        value: Iterable[Any] = self.value(node, scope)
        if type(value) not in purity.MODULE_LISTS and not purity.is_plain(value):
            raise Refused(f"loss code iterates over {type(value).__name__}")
        self._check_iterators((value,))
        return value  # not as a list: a loop may leave a long range early

    def _elements(self, nodes: list[ast.expr], scope: Scope) -> Iterator[Any]:
        for node in nodes:
            if isinstance(node, ast.Starred):
                yield from self._iterated(node.value, scope)
            else:
                yield self.value(node, scope)

    def _mapping(self, value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise Refused(f"loss code unpacks {type(value).__name__}")
        return value

    def _operate(self, operation: Callable[..., Any], *values: Any) -> Any:
        for value in values:
            if not purity.is_plain(value):
                raise Refused(f"loss code computes with {type(value).__name__}")
        if operation not in (operator.is_, operator.is_not, operator.not_):
            purity.check_elements(values)
        return self._remember(operation(*values), values)

    # -- calls -------------------------------------------------------------------------------------------

    def _of_Call(self, node: ast.Call, scope: Scope) -> Any:  # noqa: N802
        if isinstance(node.func, ast.Name) and node.func.id == "print" and scope.get("print") is print:
            return None
        if isinstance(node.func, ast.Name) and node.func.id == "super":
            raise Refused("loss code calls `super()`")
        func = self.value(node.func, scope)

        def arguments() -> Arguments:
            args = tuple(self._elements(node.args, scope))
            kwargs: dict[str, Any] = {}
            for keyword in node.keywords:
                value = self.value(keyword.value, scope)
                kwargs.update(self._mapping(value) if keyword.arg is None else {keyword.arg: value})
            self._at(node, scope)
            return args, kwargs

        self._at(node, scope)
        lines = self.lines.now
        try:
            if isinstance(func, nn.Module):
                return self._module(func, arguments)
            return self.call(func, *arguments())
        finally:
            self.lines.put(lines)

    def _module(self, module: nn.Module, arguments: Callable[[], Arguments]) -> Any:
        given = functools.lru_cache(maxsize=1)(arguments)
        result = self._module_call(module, given)
        if result is NotImplemented:
            args, kwargs = given()
            return self._interpreted(type(module).forward, (module, *args), kwargs)
        if given.cache_info().currsize:
            return self._remember(result, given())
        # Made with the arguments that were recorded, of which no gradient is asked: without one it may be one of them.
        self._remember([one for one in tensors(result) if one.grad_fn is not None], ())
        return result

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function that only computes, interpret one of the user's; raises Refused for any other."""
        if isinstance(func, partial):
            return self.call(func.func, (*func.args, *args), {**func.keywords, **kwargs})
        if isinstance(func, nn.Module):
            return self._module(func, lambda: (args, kwargs))
        if purity.is_context(func):
            return func(*args, **kwargs)
        owner = getattr(func, "__self__", None)
        if isinstance(owner, Tensor):
            return self._method(func, owner, args, kwargs)
        if purity.is_custom_function(func):
            check_custom_function(owner)
            purity.checked_arguments(args, kwargs)
            return self._remember(func(*args, **kwargs), (args, kwargs))
        if func in purity.BUILTINS or is_of_torch(func) or purity.is_of_known_library(func):
            if func is isinstance:
                purity.check_instance_of(args)
                return isinstance(*args)
            purity.checked_arguments(args, kwargs, deep=func not in purity.STRUCTURAL)
            purity.check_writes(func, args, kwargs)
            self._check_iterators((*args, *kwargs.values()))
            if func is torch.autograd.grad:
                self._check_hooks(tensors((args, kwargs)))
                check_graph(tensors((args[:1], kwargs.get("outputs"))), self.begun)
            self._checked_in_place(func, args, kwargs)
            result = func(*args, **kwargs)
            if func in (max, min) or getattr(func, "__name__", "") in purity.SHARING:
                return result
            return self._container(self._remember(result, (args, kwargs)))
        if isinstance(func, MethodType) and isinstance(func.__func__, FunctionType):
            if func.__func__ in purity.LISTS_OF_MODULES:
                return self._container(list(func(*args, **kwargs)))
            if purity.is_of_library(type(owner)):
                return self._of_library(func, owner, args, kwargs)
            return self._interpreted(func.__func__, (owner, *args), kwargs)
        if isinstance(func, FunctionType):
            return self._interpreted(func, args, kwargs)
        called = None if isinstance(func, type) else vars(type(func)).get("__call__")
        if isinstance(called, FunctionType) and not purity.is_of_library(type(func)):
            return self._interpreted(called, (func, *args), kwargs)
        return self._of_library(func, owner, args, kwargs)

    def _method(self, func: Any, owner: Tensor, args: Any, kwargs: Any) -> Any:
        name = func.__name__
        if name in purity.FORBIDDEN_METHODS or type(owner) not in (Tensor, nn.Parameter):
            raise Refused(f"loss code calls `{name}` of a tensor")
        purity.checked_arguments(args, kwargs)
        if (purity.writes(name) or name == "__setitem__") and not self._writable(owner):
            return owner
        return self._container(self._remember(func(*args, **kwargs), (owner, args, kwargs)))

    def _of_library(self, func: Any, owner: Any, args: Any, kwargs: Any) -> Any:
        """A method of a string or a container, of one of torch's distributions, of a scaler."""
        name = getattr(func, "__name__", "")
        purity.checked_arguments(args, kwargs)
        kind = type(owner)
        if name in ("sort", "index", "count", "remove"):
            purity.check_elements((owner,))
        if kind in (str, bytes, tuple, int, float, complex) or (
            kind in (dict, list, set) and name in ("get", "items", "keys", "values", "index", "count", "copy")
        ):
            return func(*args, **kwargs)
        if kind in (list, dict, set):
            if id(owner) in self._made:
                return func(*args, **kwargs)
            self._incomplete[id(owner)] = owner
            return None
        if str(kind.__module__).startswith("torch.distributions") or (
            kind.__name__ == "GradScaler" and name == "scale"
        ):
            return self._remember(func(*args, **kwargs), (args, kwargs))
        raise Refused(f"loss code calls {getattr(func, '__qualname__', type(func).__name__)}")

    def _interpreted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        switch = purity.switched_by(func)
        if switch is not None:
            with switch():
                return self._interpreted(func.__wrapped__, args, kwargs)
        if not isinstance(func, FunctionType) or not purity.has_source(func):
            raise Refused(f"loss code calls {getattr(func, '__qualname__', type(func).__name__)}")
        code = func.__code__
        tree = tree_of(code)
        if (
            isinstance(tree, ast.Module)
            or inspect.isgeneratorfunction(func)
            or isinstance(tree, ast.AsyncFunctionDef)
        ):
            raise Refused(f"loss code calls {func.__qualname__}")
        if self._depth >= DEEPEST:
            raise Refused("loss code calls itself too deeply")
        try:
            bound = inspect.signature(func, follow_wrapped=False).bind(*args, **kwargs)
        except TypeError as error:
            raise Refused(f"{func.__qualname__} takes other arguments: {error}") from None
        bound.apply_defaults()
        cells = zip(code.co_freevars, func.__closure__ or (), strict=True)
        enclosed = {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}
        around = {**func.__globals__, **enclosed} if enclosed else func.__globals__
        scope = Scope(code.co_filename, code.co_name, dict(bound.arguments), around, self.lines.now)
        self._depth += 1
        try:
            if isinstance(tree, ast.Lambda):
                return self.value(tree.body, scope)
            self.run(tree.body, scope)
        except _ReturnError as returned:
            return returned.value
        finally:
            self._depth -= 1
        return None

    # -- what may be written into ------------------------------------------------------------------------

    def _remember(self, result: Any, given: Any) -> Any:
        """Note tensors whose memory is their own: those may be written into."""
        made = tensors(result)
        if made:
            held = {key_of(tensor) for tensor in tensors(given)} - self._fresh.keys()
            self._fresh.update((key_of(one), one) for one in made if key_of(one) not in held)
        return result

    def _container(self, value: Any) -> Any:
        if type(value) in (list, dict, set) or hasattr(value, "__next__"):
            self._made[id(value)] = value
        return value

    def _check_iterators(self, values: Iterable[Any]) -> None:
        """Raise `Refused` for an iterator of the script's: to look into it would use it up."""
        if any(hasattr(value, "__next__") and id(value) not in self._made for value in values):
            raise Refused("loss code iterates over an iterator of the script's")

    def _check_hooks(self, given: Iterable[Tensor]) -> None:
        """Raise `Refused` where a hook of the script's would be called once more."""
        if any(one._backward_hooks and key_of(one) not in self._fresh for one in given):
            raise Refused("loss code differentiates a tensor with a hook")

    def _checked_in_place(self, func: Any, args: Any, kwargs: Any) -> None:
        if not purity.is_in_place(func, args, kwargs):
            return
        # `_foreach_mul_([…], 2)` writes into all of its first argument; what is given by name is not told apart.
        written = tensors(args[0]) if args else tensors(kwargs)
        if any(not self._writable(one) for one in written):
            raise Refused(WRITES)

    def _writable(self, value: Any) -> bool:
        """True for what was made here. What the loop itself wrote into a tensor of its own is in it already."""
        if not isinstance(value, Tensor) or key_of(value) in self._fresh:
            return True
        if self._depth:
            raise Refused(WRITES)
        return False


def _as_load(target: ast.expr) -> ast.expr:
    """The same place, read."""
    if isinstance(target, ast.Name):
        return ast.Name(target.id, ast.Load())
    if isinstance(target, ast.Attribute):
        return ast.Attribute(target.value, target.attr, ast.Load(), lineno=target.lineno)
    if isinstance(target, ast.Subscript):
        return ast.Subscript(target.value, target.slice, ast.Load(), lineno=target.lineno)
    raise Refused("loss code assigns to what cannot be read")


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not Ellipsis
    except ValueError:
        return False
