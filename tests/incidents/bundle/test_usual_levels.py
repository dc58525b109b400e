"""What is usual of each gradient, in a bundle: beside its norm, in the tensors and on the page."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

import gradwatch
from gradwatch.incidents.bundle.bundle_folders import FOLDER
from gradwatch.incidents.incident_page import usual_levels
from gradwatch.rules.files import parse_rules

RULES = """
version: 1
rules:
  usual: {detect: {kind: spike, of: norm, above: 1e6}, warmup: 10}
  off: {detect: {kind: above, of: total_norm, threshold: 1e3}, for: 1, do: [snapshot]}
"""


def test_a_bundle_has_norms_and_their_usual_levels(tmp_path: Path) -> None:
    """A loss that is multiplied by 1e5 at one step: all are off by about that."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    with gradwatch.watch(model, optimizer, rules=parse_rules(RULES), run_dir=tmp_path / "run", strict=True):
        for step in range(40):
            optimizer.zero_grad()
            (model(torch.randn(32, 8)).square().mean() * (1e5 if step == 35 else 1.0)).backward()
            optimizer.step()
    (bundle,) = tmp_path.glob(f"run/*/{FOLDER}/*")
    tensors = load_file(bundle / "tensors.safetensors")
    factors = tensors["site.norm"] / tensors["site.usual"]
    assert factors.shape == (4,)
    assert bool(((factors > 1e4) & (factors < 1e6)).all()), factors
    page = next(one for one in bundle.iterdir() if one.suffix == ".md").read_text(encoding="utf-8")
    assert "## Gradient norms and their usual levels" in page
    assert page.count("| 0.weight | ") == 1


def test_the_furthest_come_first_and_the_rest_is_counted() -> None:
    """A norm that is not finite before all others; nothing is shown where nothing is known."""
    norms = {f"p{k}": 1.0 + k for k in range(25)} | {"p3": float("nan")}
    lines = list(usual_levels(norms, dict.fromkeys(norms, 1.0)))
    rows = [line for line in lines if line.startswith("| p") and "parameter" not in line]
    assert rows[0].startswith("| p3 | nan ")
    assert rows[1].startswith("| p24 | ")
    assert lines[-2].startswith("5 more")
    assert not list(usual_levels(norms, {}))
