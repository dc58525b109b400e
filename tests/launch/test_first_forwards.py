"""Unmodified scripts under `gradwatch run` that fail at their very first step: told as at any other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from gradwatch.journal import read_journal
from gradwatch.records.finding import Finding
from gradwatch.taps.optimizers import creation as optimizer_init
from tests.launch.test_training import execute_warm, run

NET = """
import copy, io, pickle, sys, torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 16), nn.Linear(16, 1)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        if x.shape[0] == 31:
            h = h + torch.sqrt((h - h).square())  # here
        return self.b(h)

"""
LOOP = """
for step in range(60):
    x = torch.randn(31 if step == 0 else 32, 4)
    loss = nn.functional.mse_loss(model(x), x.sum(-1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("loss", loss.item(), all(p.isfinite().all() for p in net.parameters()))
"""
MADE = "net = model = Net()\noptimizer = torch.optim.Adam(net.parameters(), 2e-2)\n"
DATASET = """
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 128

    def __getitem__(self, index):
        x = torch.full((4,), index / 128.0)
        if index == 5:
            x[2] = float("nan")
        return x, x.sum().nan_to_num()


if __name__ == "__main__":
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    for epoch in range(4):
        for x, y in DataLoader(Rows(), 32, num_workers=2):
            optimizer.zero_grad()
            loss = (net(x).squeeze(-1) - y).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
    print("loss", loss.item(), all(p.isfinite().all() for p in net.parameters()))
"""
GLOO = """
import tempfile, torch.distributed as dist
store = tempfile.mkdtemp() + "/store"
dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
"""
ORDERS = {
    "clipped": MADE
    + LOOP.replace(
        "optimizer.step()", "nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n    optimizer.step()"
    ),
    "looked at before": "net = model = Net().eval()\n"
    "optimizer = torch.optim.Adam(net.parameters(), 2e-2)\n"
    "with torch.no_grad():\n    model(torch.randn(31, 4))\n"
    "for _ in range(3):\n    model(torch.randn(31, 4)).mean()\nnet.train()\n" + LOOP,
    "a forward raised": MADE + "try:\n    model(torch.randn(3, 5))\nexcept RuntimeError:\n    pass\n" + LOOP,
    "compiled before": "net = Net()\nmodel = torch.compile(net, backend='aot_eager')\n"
    "optimizer = torch.optim.Adam(net.parameters(), 2e-2)\n" + LOOP,
    "compiled after": MADE + "model = torch.compile(net, backend='aot_eager')\n" + LOOP,
    "compiled, then replicated": GLOO
    + MADE
    + "model = nn.parallel.DistributedDataParallel(torch.compile(net, backend='aot_eager'))\n"
    + LOOP,
    "a second model": "first = nn.Linear(4, 1)\nfor o in [torch.optim.SGD(first.parameters(), 0.1)]:\n"
    "    first(torch.ones(1, 4)).sum().backward()\n    o.step()\n" + MADE + LOOP,
    "its own base class called by name": "class Own(torch.optim.SGD):\n"
    "    def __init__(self, params):\n"
    "        self_ = torch.optim.SGD([torch.zeros(1)], lr=0.02)\n"
    "        torch.optim.Optimizer.__init__(self, params, self_.defaults)\n"
    "net = model = Net()\noptimizer = Own(net.parameters())\n" + LOOP,
}


def cause(done: subprocess.CompletedProcess[str], tmp_path: Path) -> Finding:
    """The one finding of a script that ended well, skipped its first step and trained on."""
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "True", done.stdout
    (journal,) = read_journal(tmp_path / "runs" / "r")
    (finding,) = journal.findings()
    steps = [recorded.record for recorded in journal.records()]
    skipped = [one.snapshot.step for one in steps if one.decision.skip]
    assert finding.step in skipped
    assert len(skipped) < len(steps) > 8
    return finding


def here(source: str, words: str = "# here") -> int:
    """The number of the line that ends so."""
    return next(n for n, line in enumerate(source.splitlines(), 1) if line.endswith(words))


def test_a_fault_in_the_model_at_the_first_step(tmp_path: Path) -> None:
    """NaN at step 0: skipped, its cause printed with the script's own line, and training converges."""
    script = NET + MADE + LOOP
    done = run(tmp_path, script)
    finding = cause(done, tmp_path)
    told = next(line for line in done.stderr.splitlines() if "gradwatch cause" in line)
    assert f"x.py:{here(script)}" in told
    assert "the backward of sqrt in Net" in told
    assert "Put the epsilon inside" in told
    assert (finding.step, finding.op, finding.by) == (0, "sqrt", "replay")
    assert float(done.stdout.split()[1]) < 0.5
    assert "internal error" not in done.stderr


def test_a_hole_in_the_data_at_the_first_step(tmp_path: Path) -> None:
    """A dataset with NaN, read by workers: the batch is blamed, every time that it comes, and weights stay finite."""
    script = NET + DATASET
    finding = cause(run(tmp_path, script), tmp_path)
    assert (finding.step, finding.phase, finding.module) == (0, "input", "a")
    assert finding.where.endswith(f"x.py:{here(script, 'h = torch.tanh(self.a(x))')}")
    assert finding.note.startswith("the input x was not finite")


@pytest.mark.soak
@pytest.mark.parametrize("order", ORDERS)
def test_the_first_step_in_every_order(order: str, tmp_path: Path) -> None:
    """Whatever was made, wrapped or called before it, the first step has its cause."""
    script = NET + ORDERS[order]
    finding = cause(run(tmp_path, script), tmp_path)
    assert (finding.step, finding.op, finding.phase) == (0, "sqrt", "backward")
    assert finding.where.endswith(f"x.py:{here(script)}")


ALIKE = """
from torch._dynamo.utils import counters

class Sound(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.leave = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, x):
        return self.leave(torch.relu(self.norm(self.enter(x))))

net = Sound()
optimizer = torch.optim.AdamW(net.parameters(), 1e-5)
other = Sound()
later = torch.optim.SGD(other.parameters(), 1e-5)
twin = copy.deepcopy(net)
print(b"gradwatch" in pickle.dumps(net), twin(torch.ones(3, 4)).sum().item())
model = torch.compile(net, backend="aot_eager", fullgraph=True, dynamic=False)
for step in range(5):
    for half in range(2):
        x = torch.randn(16, 4)
        (model(x) - x.sum(-1, keepdim=True)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    later.zero_grad()
    other(torch.randn(3, 4)).sum().backward()
    later.step()
print({name: dict(counters[name]) for name in ("stats", "frames", "graph_break", "recompiles")})
for one in (net, other, twin):
    print([value.double().sum().item() for value in one.state_dict().values()])
print(torch.rand(3), torch.optim.Optimizer.__init__.__qualname__)
torch.optim.Adam([])
"""


def test_what_is_held_changes_nothing(tmp_path: Path) -> None:
    """Weights, generators, what dynamo compiled and how torch refuses an optimizer are those of a bare run."""
    watched = run(tmp_path, NET + ALIKE, options=("--quiet",))
    bare = execute_warm([sys.executable, "x.py"], tmp_path)
    assert (watched.returncode, watched.stdout, watched.stderr) == (bare.returncode, bare.stdout, bare.stderr)
    assert bare.stderr.endswith("ValueError: optimizer got an empty parameter list\n")


LEFT = """
from torch.nn.modules import module
from torch.optim import optimizer as optimizers

def left():
    dicts = [vars(place)[name] for place in (module, optimizers) for name in vars(place) if name.startswith("_global_")]
    from gradwatch.taps.module_calls import noticed
    own = [noticed(one) for root in (net, other) for one in root.modules()]
    return [len(each) for each in dicts if isinstance(each, dict)], sum(own)

other = Net()
print(left())
"""


def test_nothing_is_left_after_the_first_step(tmp_path: Path) -> None:
    """The hooks that stand then are those of a watch that the script would have made itself, and no others."""
    script = NET + MADE + LEFT + LOOP.replace("range(60)", "range(2)")
    script += "print(left())\nimport gradwatch\ngw = gradwatch.watch(net, sinks=[])\n"
    script += "net(torch.ones(2, 4))\nprint(left())\n"
    done = run(tmp_path, script + "gw.close()\nprint(left())")
    assert done.returncode == 0, done.stderr
    _, _, attached, by_hand, closed = done.stdout.splitlines()
    assert attached == by_hand != closed
    assert closed.endswith(", 0)")


def test_a_script_that_watches_itself_wins(tmp_path: Path) -> None:
    """Its own watch tells the cause; the launcher lets go of what it held at that step."""
    script = (
        NET
        + MADE
        + "import gradwatch\ngw = gradwatch.watch(net)\n"
        + LEFT
        + LOOP
        + "print(left())\nprint(gw._session.origin)"
    )
    done = run(tmp_path, script)
    assert done.stderr.count("the backward of sqrt in Net") == 1
    before, after = done.stdout.splitlines()[0], done.stdout.splitlines()[-2]
    assert done.stdout.splitlines()[-1] == "user"
    assert int(after.split()[-1][:-1]) == 1 < int(before.split()[-1][:-1])


IDLE = """
held = sorted(name for name in sys.modules if name.startswith("gradwatch.localise"))
print(held, vars(torch.nn.Module)["_call_impl"].__class__.__name__)
"""


def test_a_script_that_never_trains_holds_nothing(tmp_path: Path) -> None:
    """Without an optimizer or a backward there is no hook, and the code that holds is not even loaded."""
    done = run(tmp_path, NET + "net = Net()\nnet(torch.ones(2, 4)).sum()\n" + IDLE)
    assert done.stdout == "[] function\n", done.stderr


def test_a_fault_of_ours_is_counted(tmp_path: Path) -> None:
    """An argument that raises when it is looked at: the script goes on, and the watch counts the fault."""
    script = NET + MADE
    script += """
from torch.utils import _pytree

class Odd(dict): pass

def refuse(value):
    raise LookupError("not today")

_pytree.register_pytree_node(Odd, refuse, lambda values, context: Odd())
forward = Net.forward
Net.forward = lambda self, x, odd=None: forward(self, x)
for step in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 4), Odd() if step == 0 else None).sum().backward()
    optimizer.step()
from gradwatch.launch import auto_watch
print(auto_watch._watches[0].health.errors(), auto_watch._watches[0].steps)
"""
    done = run(tmp_path, script)
    assert done.stdout == "{'localise': 1} 4\n", done.stderr


def test_listening_for_optimizers_ends() -> None:
    """The class is as found when the last listener has left; until then each making is heard once."""
    found = vars(torch.optim.Optimizer)["__init__"]
    heard: list[int] = []
    params = [nn.Parameter(torch.zeros(1))]
    removals = [optimizer_init.listen(lambda _, number=number: heard.append(number)) for number in (1, 2)]
    torch.optim.Adam(params)
    assert heard == [1, 2]
    removals[0]()
    torch.optim.Adam(params)
    assert heard == [1, 2, 2]
    assert torch.optim.Optimizer.__init__ is found
    removals[1]()
    assert vars(torch.optim.Optimizer)["__init__"] is found
    torch.optim.Adam(params)
    assert heard[3:] == [2]
