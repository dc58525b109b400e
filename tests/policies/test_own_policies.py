"""A clip policy of the user's own, registered by the name that `import gradwatch` gives."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support import warm

SCRIPT = '''
from dataclasses import dataclass
from importlib import metadata
from typing import ClassVar

import gradwatch

assert gradwatch.__version__ == metadata.version("gradwatch")
register = gradwatch.register_policy  # before anything else of gradwatch is imported

import numpy as np
import torch

from gradwatch.policies import Policy
from gradwatch.testing import check_policy


@register
@dataclass(frozen=True, slots=True)
class Times(Policy):
    """Each finite gradient times a constant."""

    method: ClassVar[str] = "times"
    factor: float = 1.0

    def coefficients(self, state, norms, present):
        return np.where(present & np.isfinite(norms), np.float32(self.factor), np.float32(1.0))


check_policy(Times(0.5))
model = torch.nn.Linear(2, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
with gradwatch.watch(model, optimizer, rules=gradwatch.load_rules("own.yaml"), sinks=[], strict=True):
    model(torch.tensor([[3.0, 4.0]])).sum().backward()
    optimizer.step()
print(model.weight.tolist())
'''
RULES = """
version: 1
groups: {all: {params: ["*"]}}
clip: {groups: {all: {method: times, factor: 0.25}}}
"""


def test_a_rule_file_uses_a_policy_registered_by_the_script(tmp_path: Path) -> None:
    """By `gradwatch.register_policy`, before anything else of gradwatch is imported: the step is a quarter."""
    (tmp_path / "own.yaml").write_text(RULES)
    (tmp_path / "train.py").write_text(SCRIPT)
    done = warm.run([sys.executable, "train.py"], tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[[-0.75, -1.0]]\n"
