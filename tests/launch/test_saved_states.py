"""Scripts that save as they train, unchanged, under `gradwatch run`: which of their saved states were healthy."""

from __future__ import annotations

import json
from pathlib import Path

from gradwatch.journal import SavedStatesEntry, read_journal
from gradwatch.report import json_document, read_run
from tests.launch.test_training import run

SAVES = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
def save():
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
for step in range(100):
    x = torch.randn(16, 8)
    loss = nn.functional.mse_loss(model(x * float("nan") if step == 50 else x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        save()
save()
"""


def test_a_script_that_saves_every_20_steps_and_meets_nan(tmp_path: Path) -> None:
    """Where the step is taken all the same: states before it are healthy, those after it are not, nor is the last."""
    run(tmp_path, SAVES, options=("--rules", "observe-only"))
    report = read_run(tmp_path / "runs" / "r")
    (found,) = json.loads(json_document.text([report]))["runs"]
    saved = found["saved_states"]
    conditions = {one["step"]: one["condition"] for one in saved["states"]}
    assert {step: condition != "not healthy" for step, condition in conditions.items()} == {
        **dict.fromkeys((0, 20, 40), True),
        **dict.fromkeys((60, 80, 99), False),
    }
    assert (saved["taken"], saved["healthy"], saved["last_healthy_step"]) == (6, 3, 40)
    assert "state saved 6 times, the last healthy one after step 40" in report.verdict.sentence
    assert "a gradient was not finite at step 60" in saved["states"][3]["reasons"]


def test_what_gradwatch_saves_itself_is_none(tmp_path: Path) -> None:
    """The baselines that it keeps for a job that is started again are taken without the script."""
    run(tmp_path, SAVES.replace("    torch.save", "    return\n    torch.save"))
    assert (tmp_path / "runs" / "r" / "state-rank0.json").exists()
    (journal,) = read_journal(tmp_path / "runs" / "r")
    assert not [entry for entry in journal.entries() if isinstance(entry, SavedStatesEntry)]


def test_the_file_that_it_saves_is_byte_identical(tmp_path: Path) -> None:
    """What is noticed of the call is not in what is saved."""
    found = []
    for watched in ("0", "1"):
        (tmp_path / watched).mkdir()
        script = SAVES.replace("step == 50", "False")
        run(tmp_path / watched, script, options=("--rules", "observe-only"), GRADWATCH=watched)
        found.append((tmp_path / watched / "checkpoint.pt").read_bytes())
    assert found[0] == found[1]
