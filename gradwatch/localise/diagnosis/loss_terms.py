"""The parts of the losses of a loop, looked at in the backwards of a few calls: for a loss the script does not keep.

While a backward runs, torch holds the loss it began at, and the hook of an output can find it. That takes some 10 us,
so it is done for calls that are looked at anyway; what a loop computes there is nearly always the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.graph import Node

from gradwatch.localise.diagnosis import loss_code
from gradwatch.localise.diagnosis.operation_names import of_node
from gradwatch.localise.diagnosis.python_frames import NOT_OF_USER, frame_of
from gradwatch.records.finding import Finding
from gradwatch.taps.backward_entry import entry_frame

if TYPE_CHECKING:
    from gradwatch.localise.hold.recorded_call import Call

MOST = 32  # nodes of a loss


def amended_by_loss(finding: Finding, calls: Sequence[Call]) -> Finding:
    """Amend a Finding by the loop's own tensors of a loss computed after all of these calls, else by other losses."""
    since = max(call.ended for call in calls)
    found = loss_code.amended(finding, since)
    return calls[-1].losses.amended(finding, since - calls[-1].ended) if found is finding else found


@dataclass(frozen=True, slots=True)
class Loss:
    """Nodes made after the outputs of a call: how long after, the name, whether something infinite can come of it, and
    whether it has an operand that no gradient flows to.

    `caller` is the line that began the backward.
    """

    nodes: tuple[tuple[int, str, bool, bool], ...]
    caller: tuple[CodeType, int] | None = field(default=None, compare=False)


class Losses:
    """The loss that was seen last; `varied` once two of them differed."""

    def __init__(self) -> None:
        self.last: Loss | None = None
        self.varied = False

    def amended(self, finding: Finding, since: int) -> Finding:
        """The finding, with what the losses seen were made of; of nodes made `since` so long after the call."""
        nodes = (
            [] if self.last is None or self.varied else [one for one in self.last.nodes if one[0] >= since]
        )
        if self.last is None or not nodes:
            return finding
        operations = ", ".join(of_node(name) for _, name, _, _ in nodes)
        note = f"{finding.note}; in the steps recorded, the loss was computed by {operations}"
        suspects = [name for _, name, infinite, _ in nodes if infinite]
        if len(set(suspects)) != 1:
            return finding.amended(note=note)
        if any(constant for *_, constant in nodes) and (held := loss_code.nonfinite_constant()):
            return finding.amended(note=f"{note}; `{held}`, which no gradient flows to, was not finite")
        op = of_node(suspects[-1])
        note += f"; of these only {op} can be infinite, or have an infinite slope"
        frames = frame_of(self.last.caller) or finding.frames
        return finding.amended(op=op, node=suspects[-1], frames=frames, note=note)

    def ends_alike(self, since: int) -> bool:
        """Within a backward: whether it began at an operation like that of the loss seen last, made as long after."""
        node, last = _root(entry_frame()), None if self.last is None else self.last.nodes[-1]
        return last is None or node is None or (node._sequence_nr() - since, node.name()) == last[:2]

    def record(self, since: int) -> None:
        """Within a backward: look at what it began at. `since` numbers the first node after the call."""
        frame = entry_frame()
        root = _root(frame)
        if root is None:
            return
        found = Loss(_nodes(root, since), _caller(frame))
        if found.nodes:
            self.varied = self.varied or self.last not in (None, found)
            self.last = found


def _root(frame: FrameType | None) -> Node | None:
    """The node that a backward began at; None where several are, or on a device, where it runs in another thread."""
    roots: Any = () if frame is None else frame.f_locals.get(frame.f_code.co_varnames[0], ())
    alone = len(roots) == 1 and isinstance(roots[0], Tensor)
    return roots[0].grad_fn if alone else None


def _nodes(root: Node, since: int) -> tuple[tuple[int, str, bool, bool], ...]:
    """Those from the root down to the call's outputs, the oldest first; () where they are many."""
    found: dict[Node, int] = {}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        number = node._sequence_nr()
        if node in found or number < since or hasattr(node, "variable"):
            continue
        found[node] = number
        if len(found) > MOST:
            return ()
        for following, _ in node.next_functions:
            if following is not None:
                waiting.append(following)
    oldest_first = sorted(found, key=found.__getitem__)
    described = []
    for node in oldest_first:
        infinite, constant = loss_code.singular(node), loss_code.takes_constant(node)
        described.append((found[node] - since, node.name(), infinite, constant))
    return tuple(described)


def _caller(frame: FrameType | None) -> tuple[CodeType, int] | None:
    while frame is not None and frame.f_code.co_filename.startswith(NOT_OF_USER):
        frame = frame.f_back
    return None if frame is None else (frame.f_code, frame.f_lineno)
