"""The public face of a live watch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.rules.files import parse_rules
from gradwatch.session.watch import Watch
from tests.support.kept import Kept

PUBLIC = {
    *("observe", "batch", "step", "about_to_clip", "add", "rebaseline", "flush", "close", "status"),
    *(
        "state_dict",
        "load_state_dict",
        "healthy",
        "last_healthy_step",
        "coverage",
        "url",
        "run",
        "health",
        "ruleset",
    ),
}
RULES = parse_rules(
    "version: 1\nrules: {r: {detect: {kind: spike, above: 6}, warmup: 20, severity: warning}}"
)


def test_a_watch_shows_its_public_names_and_nothing_else() -> None:
    """What only parts of gradwatch call is the session's."""
    with gradwatch.watch(nn.Linear(2, 1), sinks=[]) as gw:
        assert {name for name in dir(gw) if not name.startswith("_")} == PUBLIC
    assert set(vars(gw)) == {"_session"}


@pytest.mark.parametrize("glob", ["", "*", "0.*"])
def test_rebaseline_starts_matching_parameters_afresh(glob: str) -> None:
    """Gradients a hundred times as large fire for the parameters whose baseline was kept, and for no others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    kept = Kept()
    with gradwatch.watch(model, optimizer, rules=RULES, sinks=[kept], strict=True) as gw:
        trained(gw, model, optimizer, 1.0, 60)
        if glob:
            gw.rebaseline("a change on purpose", params=glob)
        trained(gw, model, optimizer, 100.0, 4)
    events = [event for record in kept.records for event in record.verdict.events if event.kind == "firing"]
    fired = {site for event in events for site in event.sites}
    names = {name for name, _ in model.named_parameters()}
    assert fired == {name for name in names if not glob or (glob == "0.*" and not name.startswith("0."))}


def trained(gw: Watch, model: nn.Module, optimizer: torch.optim.Optimizer, scale: float, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.randn(64, 4)).square().mean() * scale).backward()
        optimizer.step()
