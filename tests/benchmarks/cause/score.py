"""One fault run under `gradwatch run`, and what its log says beside what is so."""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.cause.fault import STEP, Fault
from tests.support import warm
from tests.support.launch_cases import GRADWATCH

SCRIPT = "train.py"
_OPERATION = re.compile(
    r"(?:the forward of|the backward of|most likely|not finite when) (?P<op>\w+)(?: \(in (?P<function>\w+)\))?"
)
_LINE = re.compile(rf"\S*{SCRIPT}:(?P<line>\d+)")


@dataclass(frozen=True, slots=True)
class Score:
    """What the log said of one fault: `causes` are its lines on causes, as fields."""

    fault: Fault
    fired: bool
    causes: tuple[Mapping[str, str], ...]

    @property
    def cause(self) -> str:
        """The sentence that was said first."""
        return self.causes[0]["cause"] if self.causes else ""

    @property
    def op(self) -> bool:
        """The operation is told, or the tensor; where none is at fault, none."""
        if not self.causes or self.causes[0]["step"] != str(STEP):
            return False
        if "none" in self.fault.ops:
            return not self.wrong
        return _is_right(self.fault, self.causes[0]) and not self.wrong

    @property
    def line(self) -> bool:
        """The right line is told, and no other."""
        told = _claimed_line(self.causes[0]) if self.causes else None
        if "none" in self.fault.ops:
            return self.op
        return told is not None and told in self.fault.lines and not self.wrong

    @property
    def wrong(self) -> bool:
        """Some line of the log claims another operation, tensor or line, or another step."""
        return any(_is_wrong(self.fault, one) for one in self.causes)

    def row(self) -> str:
        """A row of the table."""
        marks = " | ".join("yes" if ok else "**no**" for ok in (self.op, self.line))
        said = " // ".join(_short(one) for one in self.causes) or ("nothing" if self.fired else "NOT FIRED")
        return f"| {self.fault.name} | {marks} | {'**wrong**' if self.wrong else ''} | {said} |"


def run(fault: Fault) -> Score:
    """Run the script, unmodified, with the default pack."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / SCRIPT
        script.write_text(fault.source)
        done = warm.run([*GRADWATCH, "run", "--", sys.executable, str(script)], folder)
    if done.returncode:
        raise RuntimeError(f"{fault.name} failed:\n{done.stderr}")
    lines = done.stderr.splitlines()
    causes = tuple(fields_of(one) for one in lines if "gradwatch cause" in one)
    return Score(fault, any("gradwatch firing rule=non-finite" in one for one in lines), causes)


def totals(scores: Sequence[Score]) -> dict[str, int]:
    """How many operations and lines are right, and how many claims wrong."""
    return {
        "operation": sum(one.op for one in scores),
        "line": sum(one.line for one in scores),
        "wrong": sum(one.wrong for one in scores),
    }


def fields_of(line: str) -> dict[str, str]:
    """The fields of a line of the log on a cause."""
    words = shlex.split(line.partition("gradwatch cause ")[2])
    return dict(word.partition("=")[::2] for word in words if "=" in word)


def _claimed_op(said: Mapping[str, str]) -> set[str]:
    found = _OPERATION.search(said["cause"])
    return set() if found is None else {one for one in found.groups() if one}


def _claimed_line(said: Mapping[str, str]) -> int | None:
    """The line at fault, where one is claimed: neither that of the model's call, nor one of several candidates."""
    cause = said["cause"]
    lines = _LINE.findall(cause)
    if "of the model called" in cause or len(lines) != 1:
        return None
    return int(lines[0])


def _is_of_tensor(said: Mapping[str, str]) -> str:
    """`data` or `weight` where the cause is a tensor that was not finite before."""
    if said["cause"].startswith("a weight"):
        return "weight"
    return "data" if said["cause"].startswith(("the batch", "the tensor")) else ""


def _is_right(fault: Fault, said: Mapping[str, str]) -> bool:
    tensor = _is_of_tensor(said)
    if tensor or fault.ops & {"data", "weight"}:
        named = " ".join((said["cause"], said.get("note", "")))
        return tensor in fault.ops and (not fault.names or any(name in named for name in fault.names))
    return bool(_claimed_op(said) & fault.ops)


def _is_wrong(fault: Fault, said: Mapping[str, str]) -> bool:
    claims = bool(_is_of_tensor(said) or _claimed_op(said))
    line = _claimed_line(said)
    if line is not None and claims and line not in fault.lines:
        return True
    return (claims and not _is_right(fault, said)) or (claims and said["step"] != str(STEP))


def _short(said: Mapping[str, str]) -> str:
    note = said.get("note", "")
    return f"{_LINE.sub(lambda m: 'line ' + m['line'], said['cause'])} [{note[-260:]}]"
