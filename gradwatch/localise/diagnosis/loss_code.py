"""Diagnosis of a loss function written in the loop itself, which no replay reaches.

Its backward is over, but the tensors that the loop still holds know the nodes of the graph they came from. Those made
after the model's outputs are the loss side; where one operation among them is the only one whose result or slope can
be infinite, it is named, with the line that assigned what came of it. That is a conclusion, not something seen: it is
not drawn where the loss is not finite and the loop holds a NaN or Inf (a label, a mask) that may have made it.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

from torch import Tensor, nn
from torch.autograd.graph import Node

from gradwatch.localise.diagnosis.operation_names import of_node
from gradwatch.localise.diagnosis.python_frames import frame_of, is_of_user, locals_of
from gradwatch.localise.diagnosis.tensor_values import describe, state, tensors
from gradwatch.records.finding import Finding, Frame

OUTWARD = 3  # functions of the user's, from `optimizer.step()` outwards
MOST = 64  # nodes on the loss side; a graph that has more is another model
_SINGULAR = (
    "acos asin atan2 atanh acosh cosh div erfinv exp exp2 expm1 hypot lgamma linalg_vector_norm log "
    "log10 log1p log2 logit logsumexp norm nll_loss pow prod reciprocal rsqrt sinh sqrt std tan var "
    "xlogy ctc_loss linalg_slogdet cdist"
)
SINGULAR = frozenset(_SINGULAR.split())
"""Operations whose result or whose slope is infinite or NaN for some finite input (`pow`: below the power of one)."""
NEVER_NAN = frozenset({"linalg_vector_norm", "norm", "hypot", "cdist"})
"""Those of them whose result is not NaN for any finite input: only the slope at 0 is."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor that the loop holds by a name, and the nodes of the loss side that it came of, the oldest first."""

    name: str
    tensor: Tensor
    nodes: tuple[Node, ...]
    frame: FrameType


def amended(finding: Finding, since: int) -> Finding:
    """The finding, with what the loop's own tensors tell of the loss side: nodes numbered `since` and later."""
    held = [one for frame in _frames() for one in _of_loss(frame, since)]
    if not held:
        return finding
    last = max(held, key=lambda one: len(one.nodes))
    operations = [of_node(node.name()) for node in last.nodes]
    value = describe(last.name, last.tensor)
    note = f"{finding.note}; `{last.name}` ({value}) was computed by {', '.join(operations)}"
    suspects = [node for node in last.nodes if singular(node)]
    if len({node.name() for node in suspects}) != 1:
        return finding.amended(note=note)
    # A NaN or Inf among the constants shows in the value: of a finite one only a slope was infinite.
    if value.nan + value.inf and any(map(takes_constant, last.nodes)) and (name := nonfinite_constant()):
        return finding.amended(note=f"{note}; `{name}`, which no gradient flows to, was not finite")
    op = of_node(suspects[-1].name())
    if value.nan and op in NEVER_NAN:
        return finding.amended(
            note=f"{note}; {op} makes no NaN from finite inputs, so the NaN comes from another operation"
        )
    note += f"; of these only {op} can be infinite, or have an infinite slope"
    nearest = min((one for one in held if suspects[-1] in one.nodes), key=lambda one: len(one.nodes))
    return finding.amended(
        op=op, node=suspects[-1].name(), frames=_assigned(nearest) or finding.frames, note=note
    )


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    looked = 0
    while frame is not None and looked < OUTWARD:
        if is_of_user(frame):
            looked += 1
            yield frame
        frame = frame.f_back


def _of_loss(frame: FrameType, since: int) -> Iterator[_Held]:
    for name, value in locals_of(frame).items():
        if isinstance(value, Tensor) and value.grad_fn is not None:
            nodes = _nodes(value.grad_fn, since)
            if nodes:
                yield _Held(name, value, nodes, frame)


def _nodes(root: Node, since: int) -> tuple[Node, ...]:
    """Those after `since` that lead to the root; () where none is, or where none comes of an older one."""
    found: dict[Node, int] = {}
    waiting, joined = [root], False
    while waiting:
        node = waiting.pop()
        number = node._sequence_nr()
        if hasattr(node, "variable") or node in found:
            continue
        if number < since:
            joined = True
            continue
        found[node] = number
        if len(found) > MOST:
            return ()
        waiting += [following for following, _ in node.next_functions if following is not None]
    return tuple(sorted(found, key=found.__getitem__)) if joined else ()


def singular(node: Node) -> bool:
    """True if it can make something that is not finite of finite numbers, forward or backward."""
    op = of_node(node.name())
    if op == "div" and node.next_functions[-1][0] is None:
        return False  # by a constant: as far as the graph tells, a multiplication
    if node.name() == "PowBackward0":
        # The exponent is a number. A tensor's may have been freed with the graph, and is not asked for.
        exponent = node._saved_exponent  # type: ignore[attr-defined]
        if isinstance(exponent, (int, float)):
            return exponent < 1
    return op in SINGULAR


def nonfinite_constant() -> str:
    """The name by which the loop holds a tensor that is not finite and has no gradient; "" = none.

    Numbers are not looked at: many a loop holds `best = float("inf")`.
    """
    for frame in _frames():
        for name, value in locals_of(frame).items():
            if not isinstance(value, nn.Module) and any(
                not (each.requires_grad or state(each).finite) for each in tensors(value)
            ):
                return name
    return ""


def takes_constant(node: Node) -> bool:
    """True if it has an operand that no gradient flows to: a label, a mask, a factor; its value is not known here."""
    return None in dict(node.next_functions)


def _assigned(held: _Held) -> tuple[Frame, ...]:
    """The line that made it: of the last assignment to its name above the line under way; () where there is none."""
    code, now = held.frame.f_code, held.frame.f_lineno
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except (SyntaxError, ValueError):
        return ()
    lines = [
        node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt) and _assigns(node, held.name)
    ]
    above = [line for line in lines if code.co_firstlineno <= line <= now]
    return frame_of((code, max(above))) if above else ()


def _assigns(node: ast.stmt, name: str) -> bool:
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return any(
        isinstance(each, ast.Name) and each.id == name for target in targets for each in ast.walk(target)
    )
