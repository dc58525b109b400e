"""Gradients that code between backward and step makes non-finite: told as that, with the lines that write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.incidents.explanation import page, sentence
from gradwatch.incidents.suggestions import suggestion_for
from gradwatch.records.finding import Finding
from gradwatch.rules.files import parse_rules
from tests.support.kept import Kept

RULES = "version: 1\nrules: {r: {detect: {kind: nonfinite}, do: [skip_step, localise]}}\n"
BAD_STEP = 3


def found(hooked: Callable[[Tensor], Tensor] | None, count: Callable[[int], int], run_dir: Path) -> Finding:
    """The cause in a loop that divides its gradients by a count, of a model with a hook on its weights."""
    torch.manual_seed(0)
    model, kept = nn.Linear(4, 3), Kept()
    if hooked is not None:
        model.weight.register_hook(hooked)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = gradwatch.watch(
        model, optimizer, rules=parse_rules(RULES), sinks=[kept], run_dir=run_dir, strict=True
    )
    for step in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 4)).square().mean()
        loss.backward()
        for param in model.parameters():
            if param.grad is not None:
                param.grad /= count(step)  # written
        optimizer.step()
    watch.close()
    return next(finding for record in kept.records for finding in record.findings)


def test_the_loop_is_told_with_the_line_that_writes(tmp_path: Path) -> None:
    """A division by a count of 0."""
    finding = found(None, lambda step: 0 if step == BAD_STEP else 1, tmp_path)
    assert (finding.phase, finding.step) == ("after_backward", BAD_STEP), finding
    assert sentence(finding).startswith("code between the backward and the step")
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    written = next(n for n, line in enumerate(lines, 1) if line.endswith("# written"))
    assert finding.note.startswith(f"gradients are written at {__file__}:{written}")
    assert not any("usual levels" in line for line in page(finding))
    suggestion = suggestion_for(finding)
    assert suggestion is not None
    assert suggestion.id == "after-backward"


def test_what_the_backward_made_is_not_blamed_on_the_loop(tmp_path: Path) -> None:
    """The gradient arrives NaN, out of a hook, and the loop divides by 1."""
    factors = iter([1.0] * BAD_STEP + [torch.nan, 1.0])
    finding = found(lambda grad: grad * next(factors), lambda step: 1, tmp_path)
    assert finding.phase != "after_backward", finding
