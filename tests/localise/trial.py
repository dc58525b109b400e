"""One faulty model trained until it breaks, the broken step localised, the answer compared with the truth."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass

import torch
from torch import nn

from gradwatch.localise.diagnosis.diagnose import diagnose
from gradwatch.localise.held_calls.model_recorder import ModelRecorder
from gradwatch.localise.replay.step_replay import replay
from gradwatch.records.finding import Finding
from tests.localise.models import BAD, Faulty

STEPS = 3


@dataclass(frozen=True)
class Trial:
    """What was found, beside what is so."""

    case: type[Faulty]
    finding: Finding
    line: int
    file: str

    @property
    def module(self) -> bool:
        """The right module."""
        at = self.case.__name__ if self.case.at == "Faulty" else self.case.at
        return self.finding.module == at

    @property
    def op(self) -> bool:
        """The right operation."""
        return self.finding.op in self.case.ops

    @property
    def at_line(self) -> bool:
        """The right line of the right file."""
        return self.finding.where == f"{self.file}:{self.line}"


def truth(case: type[Faulty]) -> tuple[str, int]:
    """File and line of the `# fault` of a case."""
    holder = getattr(case, "faulty", case)
    lines, start = inspect.getsourcelines(holder)
    at = [start + n for n, line in enumerate(lines) if line.rstrip().endswith("# fault")]
    assert len(at) == 1, (case, at)
    return inspect.getsourcefile(holder) or "", at[0]


def trial(case: type[Faulty]) -> Trial:
    """Train it for three steps; at the third it goes wrong."""
    torch.manual_seed(0)
    model = case()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    faults: list[tuple[str, BaseException]] = []
    holding = ModelRecorder(model, lambda component, error: faults.append((component, error)))
    finding = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about the very faults these models have
        for step in range(STEPS):
            x = torch.randn(5, 4)
            if step == STEPS - 1:
                x[0, 0] = BAD
            loss = nn.functional.cross_entropy(model(x), torch.arange(5) % 3)
            optimizer.zero_grad()
            loss.backward()
            broken = any(
                not bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None
            )
            assert broken == (step == STEPS - 1), (case, step)
            if broken:
                held = [(model, call) for call in holding.calls]
                finding = diagnose(replay(held, [model], lambda error: faults.append(("", error))))
                break
            optimizer.step()
            holding.drop()
    holding.close()
    assert not faults, faults
    assert finding is not None
    file, line = truth(case)
    return Trial(case, finding, line, file)
