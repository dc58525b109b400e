"""An optimizer after another under `gradwatch run`: each costs the same, and what is held of them does not grow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradwatch.account import Account
from gradwatch.journal import EndEntry, read_journal
from tests.launch.test_auto_watch import NET, ended
from tests.launch.test_training import run

# Python calls inside gradwatch beyond those of the second step, which others hold (tests/session/test_step_calls.py);
# times: `python -m tests.benchmarks.adoption`.
EACH = 209  # a model of four parameters, copied, its optimizer, one step; 185 at the 10th when written, 118 at 50
# 12 since then ask whether the weights are to be looked at before others may replace them
SAME = 96  # the same where only the optimizer is new; 86 when written, 90 while the second step made more

SCRIPT = (
    NET
    + """
import json, os, urllib.request
import gradwatch
from gradwatch.taps import module_calls
from gradwatch.session.session import live_sessions

OURS = os.path.dirname(gradwatch.__file__) + os.sep  # wherever that is: a clone is named gradwatch, too
net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
meta = torch.optim.SGD(net.parameters(), 0.1)
other, calls, sizes = [], {}, {}
# The fewest of some: what is due by the clock falls into any of them.
EARLY, LATE, AGAIN = range(7, 10), range(47, 50), range(60, 64)

def size(gw):
    at = gw.attached; capture, causes = at.capture, at.causes
    gw.flush()
    with urllib.request.urlopen(gw.url) as page:
        series = {line.split()[0] for line in page.read().decode().splitlines() if line[0] != "#"}
    return {
        "slots": len(capture.params), "names": len(capture.names), "places": len(capture.coverage.places._of),
        "marks": len(capture.slots.hooks._marked_as), "captures": len(capture.captures),
        "courses": len(list(at.rule_bindings)),
        "weights": len(at.weights._reference), "families": len(causes._localiser._recordings._families),
        "series": len(series), "called": len(module_calls._listened),
    }

def count(frame, event, arg):
    if event == "call" and frame.f_code.co_filename.startswith(OURS):
        counted[0] += 1

def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()

def judged():
    # What waits to be judged is not counted with a step.
    for gw in live_sessions():
        gw.catch_up()

for k in range(60):
    judged()
    counted = [0]
    if k in (*EARLY, *LATE):
        sys.setprofile(count)
    copied = copy.deepcopy(net)
    inner = torch.optim.SGD(copied.parameters(), 0.05)
    step(copied, inner)
    sys.setprofile(None)
    calls[k], counted = counted[0], [0]
    if k in (*EARLY, *LATE):
        sys.setprofile(count)
    step(copied, inner)
    sys.setprofile(None)
    calls[k] -= counted[0]
    for p, q in zip(net.parameters(), copied.parameters()):
        p.grad = p.detach() - q.detach()
    meta.step()
    # As many parameters, other shapes: what was learned of a slot is not another parameter's.
    odd = nn.Sequential(nn.Linear(8, 3 + k % 2), nn.Linear(3 + k % 2, 1))
    step(odd, torch.optim.AdamW(odd.parameters(), 1e-3))
    if k in (10, 59):
        sizes[k] = size(*live_sessions())
for k in AGAIN:  # the model that the last one trained
    judged()
    counted = [0]
    inner = torch.optim.SGD(copied.parameters(), 0.05)
    sys.setprofile(count)
    step(copied, inner)
    sys.setprofile(None)
    calls[k], counted = counted[0], [0]
    sys.setprofile(count)
    step(copied, inner)  # else every first step makes up for columns that had no value at the one before
    sys.setprofile(None)
    calls[k] -= counted[0]
fewest = [min(calls[k] for k in some) for some in (EARLY, LATE, AGAIN)]
print(json.dumps({"calls": fewest[:2], "again": fewest[2], "sizes": [sizes[10], sizes[59]]}))
"""
)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What the script counted, and the folder it ran in."""
    folder = tmp_path_factory.mktemp("many")
    return json.loads(ended(run(folder, SCRIPT))), folder


def test_what_is_held_of_optimizers_that_are_gone_is_bounded(told: tuple[dict[str, Any], Path]) -> None:
    """Slots, names, places, marks, captures, families, weights and series are as many after 60 as after 10."""
    early, late = told[0]["sizes"]
    weights = [sizes.pop("weights") for sizes in (early, late)]  # remembered when they are next looked at
    assert max(weights) <= 24
    assert late == early
    assert late["slots"] <= 16
    assert max(late["captures"], late["families"]) <= 4


def test_each_optimizer_costs_the_same(told: tuple[dict[str, Any], Path]) -> None:
    """Beyond its steps: the 50th costs no more calls than the 10th, and few; fewer for a model trained before."""
    tenth, fiftieth = told[0]["calls"]
    assert tenth <= EACH
    assert fiftieth <= tenth
    assert told[0]["again"] <= SAME


def test_every_optimizer_counts_once(told: tuple[dict[str, Any], Path]) -> None:
    """The account has all 125, whatever took over the place of another, and the parameters there were at one time."""
    ((*_, end),) = [list(journal.entries()) for journal in read_journal(told[1] / "runs" / "r")]
    assert isinstance(end, EndEntry)
    account = Account.from_dict(end.account)
    assert (account.watched.optimizers, account.taken.stepped) == (125, 125)
    assert account.watched.parameters == 12


def test_a_slot_taken_again_is_of_its_new_parameter(told: tuple[dict[str, Any], Path]) -> None:
    """Names, sizes and norms in the journal are the model's that was trained, whatever had its slot before."""
    (journal,) = read_journal(told[1] / "runs" / "r")
    records = [one.record.snapshot for one in journal.records()]
    assert len(records) == 60 * 4 + 2 * 4
    found = {}
    for one in records:
        sizes = dict(zip([name[-8:] for name in one.sites.names], one.sites.numels.tolist(), strict=True))
        assert len(sizes) == 4
        assert np.isfinite(one.norm).all()
        found[tuple(sorted(sizes.values()))] = sizes
    assert sorted(found) == [(1, 3, 3, 24), (1, 4, 4, 32), (1, 32, 32, 256)]
    assert all(sizes["0.weight"] == inputs for (*_, inputs), sizes in found.items())


def test_what_outlives_its_model_and_optimizer_is_named_by_what_is_left(tmp_path: Path) -> None:
    """A backbone trained on by itself: its names are its own from the first step on, each of 12 times."""
    script = """
for _ in range(12):
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 4), nn.Tanh()), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    backbone = model[0]
    del model, optimizer
    optimizer = torch.optim.SGD(backbone.parameters(), 0.1)
    backbone(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    del backbone, optimizer
"""
    ended(run(tmp_path, NET + script))
    (journal,) = read_journal(tmp_path / "runs" / "r")
    records = [one.record.snapshot for one in journal.records()]
    assert [record.sites.names for record in records[1::2]] == [("0.weight", "0.bias")] * 12
    assert not any(record.provisional for record in records)


def test_a_list_of_layers_is_freed_with_its_optimizer(tmp_path: Path) -> None:
    """A ModuleList that is the model itself: not held, and of the next one nothing is missing."""
    script = """
for _ in range(3):
    layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 1)])
    optimizer = torch.optim.SGD(layers.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        layers[1](torch.tanh(layers[0](torch.randn(8, 4)))).square().mean().backward()
        optimizer.step()
    alive = [weakref.ref(layers), *map(weakref.ref, layers.parameters())]
    del layers, optimizer
    print(sum(one() is not None for one in alive))
"""
    assert ended(run(tmp_path, NET + script)) == "0\n" * 3
    (journal,) = read_journal(tmp_path / "runs" / "r")
    records = [one.record.snapshot for one in journal.records()]
    assert {record.sites.names for record in records} == {("0.weight", "0.bias", "1.weight", "1.bias")}
