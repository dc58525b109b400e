"""Rules that order `localise`, in loops as people write them: the cause is told, training goes on as it would."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.journal import read_journal
from gradwatch.localise.replay import diagnosed_replay, live_recording, step_replay
from gradwatch.records.finding import Finding
from gradwatch.rules.files import parse_rules
from gradwatch.session.watch import Watch
from gradwatch.sinks.log import LogSink
from tests.localise.models import BAD, SqrtAtZero
from tests.support import warm
from tests.support.kept import Kept
from tests.support.launch_cases import GRADWATCH
from tests.support.one_rank import one_rank

RULES = """
version: 1
rules:
  non-finite:
    detect: {kind: nonfinite, of: norm}
    do: [skip_step, localise: {LOCALISE}]
"""
SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 16), nn.Linear(16, 1)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        if x[0, 0] > 100:
            h = h + torch.sqrt((h - h).square())  # here
        return self.b(h)


net = Net()
optimizer = torch.optim.Adam(net.parameters(), 2e-2)
for step in range(120):
    x = torch.randn(32, 4)
    y = x.sum(-1, keepdim=True)
    if step == 40:
        x[0, 0] = 101.0
    loss = nn.functional.mse_loss(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f}")
"""


def rules(localise: str = "by: replay") -> Any:
    """Skip non-finite steps, and localise in this way."""
    return parse_rules(RULES.replace("LOCALISE", localise))


def broken(x: Tensor) -> Tensor:
    """The batch that makes a Faulty model fail."""
    x[0, 0] = BAD
    return x


class Loop:
    """A watched training of one model; `bad` are the steps at which it fails, `findings` what was told."""

    def __init__(
        self,
        model: nn.Module,
        bad: tuple[int, ...],
        localise: str = "by: replay",
        loss: Callable[[Tensor], Tensor] = torch.sum,
        steps: int = 6,
        watched: bool = True,
        meanwhile: Callable[[int], None] = lambda step: None,
        **options: Any,
    ) -> None:
        torch.manual_seed(1)
        self.model = model
        self.kept = Kept()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        gw: Watch | None = None
        if watched:
            sinks = [self.kept, *options.pop("sinks", [])]
            gw = gradwatch.watch(model, optimizer, rules=rules(localise), sinks=sinks, strict=True, **options)
        for step in range(steps):
            x = torch.randn(5, 4)
            out = model(broken(x) if step in bad else x)
            loss(out).backward()
            meanwhile(step)
            if watched or step not in bad:
                optimizer.step()
            optimizer.zero_grad()
        if gw is not None:
            gw.close()

    @property
    def findings(self) -> list[Finding]:
        return [finding for record in self.kept.records for finding in record.findings]


def test_unmodified_script(tmp_path: Path) -> None:
    """NaN at step 40: skipped, its cause printed with the script's own line, and training converges."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    line = next(n for n, text in enumerate(SCRIPT.splitlines(), 1) if text.endswith("# here"))
    command = [*GRADWATCH, "run", "--", sys.executable, str(script)]
    done = warm.run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[1]) < 0.2, done.stdout
    told = next(text for text in done.stderr.splitlines() if "gradwatch cause" in text)
    assert f"{script}:{line}" in told
    assert "the backward of sqrt in Net" in told
    assert "Put the epsilon inside" in told
    (head,) = (tmp_path / "gradwatch-runs").rglob("*.gwj")
    (journal,) = read_journal(head)
    (finding,) = journal.findings()
    assert (finding.step, finding.op, finding.where) == (40, "sqrt", f"{script}:{line}")
    assert finding.frame is not None
    assert finding.frame.source == "h = h + torch.sqrt((h - h).square())  # here"
    (told_again,) = [one for step in journal.records() for one in step.record.findings]
    assert told_again.to_dict() == finding.to_dict()


def test_the_watch_tells_the_cause_and_trains_on() -> None:
    """The finding is in the Record of the step; the weights end where skipping by hand ends."""
    torch.manual_seed(0)
    loop = Loop(SqrtAtZero(), bad=(3,))
    (finding,) = loop.findings
    assert (finding.phase, finding.op, finding.by, finding.step) == ("backward", "sqrt", "replay", 3)
    assert finding.rule == "non-finite"
    assert finding.first_parameter == "enter.bias"
    torch.manual_seed(0)
    bare = Loop(SqrtAtZero(), bad=(3,), watched=False)
    for one, other in zip(loop.model.parameters(), bare.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_one_localisation_per_incident(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that stays is localised once, not at every step."""
    runs = []
    monkeypatch.setattr(diagnosed_replay, "replay", lambda *args: runs.append(1) or step_replay.replay(*args))
    loop = Loop(SqrtAtZero(), bad=(2, 3, 4, 5), steps=7)
    assert len(loop.findings) == len(runs) == 1


@pytest.mark.parametrize(
    "broken_part",
    ["replay", "diagnose", "Live"],
)
@pytest.mark.parametrize("error", [ValueError, MemoryError, RecursionError, OSError, torch.OutOfMemoryError])
def test_faults_of_ours_never_reach_training(
    broken_part: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails in localising, the step is skipped, the loop goes on, and the finding says it is not known."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error("ours")

    monkeypatch.setattr(live_recording if broken_part == "Live" else diagnosed_replay, broken_part, fail)
    torch.manual_seed(0)
    model = SqrtAtZero()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    kept = Kept()
    asked = rules("by: record" if broken_part == "Live" else "by: replay")
    with gradwatch.watch(model, optimizer, rules=asked, sinks=[kept]):
        for step in range(5):
            optimizer.zero_grad()
            x = torch.randn(5, 4)
            model(broken(x) if step == 2 else x).sum().backward()
            before = [param.detach().clone() for param in model.parameters()]
            optimizer.step()
            moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            assert moved == (step != 2)
    assert [finding.phase for record in kept.records for finding in record.findings][:1] == ["unknown"]
    assert len(kept.records) == 5


def test_two_networks_with_an_optimizer_each() -> None:
    """A generator's fault is found at its own step, through a critic that has stepped before."""
    torch.manual_seed(0)
    generator, critic = SqrtAtZero(), nn.Sequential(nn.Linear(3, 1))
    optimizers = [torch.optim.SGD(each.parameters(), 0.01) for each in (generator, critic)]
    kept = Kept()
    with gradwatch.watch([generator, critic], optimizers, rules=rules(), sinks=[kept], strict=True):
        for step in range(4):
            x = torch.randn(5, 4)
            fake = generator(broken(x) if step == 2 else x)
            optimizers[1].zero_grad()
            (critic(fake.detach()).mean() - critic(torch.randn(5, 3)).mean()).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            critic(fake).mean().backward()
            optimizers[0].step()
    (finding,) = (one for record in kept.records for one in record.findings)
    assert (finding.op, finding.module) == ("sqrt", "SqrtAtZero")


def of_two_optimizers() -> list[Finding]:
    """The findings of a training whose third step is bad, each half of the model with an optimizer.

    Without an `assert`: pytest rewrites functions that have one, and their source is then not used.
    """
    torch.manual_seed(0)
    model = SqrtAtZero()
    optimizers = [torch.optim.SGD(each.parameters(), 0.01) for each in (model.enter, model.leave)]
    kept = Kept()
    with gradwatch.watch(model, optimizers, rules=rules(), sinks=[kept], strict=True):
        for step in range(4):
            for each in optimizers:
                each.zero_grad()
            x = torch.randn(5, 4)
            out = model(broken(x) if step == 2 else x)
            (out * float("nan") if step == 2 else out).sum().backward()
            for each in optimizers:
                each.step()
    return [one for record in kept.records for one in record.findings if one.phase != "unknown"]


def test_two_optimizers_of_one_backward_share_a_finding() -> None:
    """The second of them does not run the step again, nor is it told that it is too late."""
    assert {(one.phase, one.op) for one in of_two_optimizers()} == {("number", "mul")}


@pytest.mark.parametrize("rounds", [False, True], ids=["same", "rounds otherwise"])
def test_compiled_models_are_run_again_as_they_are_written(rounds: bool) -> None:
    """Inside a compiled region the operation and the line are told all the same; that it rounds otherwise is, too."""
    torch.manual_seed(0)
    torch._dynamo.reset()

    class Branchless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            return h + torch.sqrt((h - h) + x[0, 0].abs())  # fault

    model = Branchless()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    compiled = torch.compile(model, backend=rounding_otherwise if rounds else "aot_eager")
    kept = Kept()
    with gradwatch.watch(compiled, optimizer, rules=rules(), sinks=[kept], strict=True):
        for step in range(4):
            optimizer.zero_grad()
            x = torch.rand(5, 4) + 1
            if step == 2:
                x[0, 0] = 0
            compiled(x).sum().backward()
            optimizer.step()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    (finding,) = (one for record in kept.records for one in record.findings)
    assert (finding.phase, finding.op) == ("backward", "sqrt")
    assert finding.frame is not None
    assert finding.frame.source.endswith("# fault")
    assert finding.deterministic is not rounds
    assert ("whether the step comes again is not known: something is compiled" in finding.note) is rounds


def rounding_otherwise(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    """A backend of `torch.compile` whose results are others by a little."""
    return lambda *args: [one * 1.0001 for one in graph(*args)]


def test_one_line_in_the_log() -> None:
    """One line says rule, cause, line, remedy; a second incident within the minute is in the journal only."""
    stream = io.StringIO()
    torch.manual_seed(0)
    Loop(SqrtAtZero(), bad=(1, 4), steps=7, sinks=[LogSink("console", stream)])
    lines = [line for line in stream.getvalue().splitlines() if "gradwatch cause" in line]
    assert len(lines) == 1
    assert "the backward of sqrt in SqrtAtZero" in lines[0]


def test_a_step_that_the_scaler_rejected_is_not_part_of_the_next() -> None:
    """The overflow of a rejected step is the scaler's affair; the NaN after it has its own cause."""
    torch.manual_seed(0)
    model, kept = SqrtAtZero(), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with gradwatch.watch(model, optimizer, rules=rules(), sinks=[kept], strict=True):
        for step in range(5):
            optimizer.zero_grad()
            x = torch.randn(5, 4)
            scaler.scale(model(broken(x) if step in (2, 3) else x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            held = gradwatch.session.session.live_sessions()[-1].attached.causes._localiser._recordings
            assert not held.calls()
    assert not [one for record in kept.records for one in record.findings]


def test_a_loss_of_nan_under_a_scaler_has_its_cause() -> None:
    """No scale makes a loss NaN: the search that `non-finite` orders is made where the scaler has rejected the step."""
    torch.manual_seed(0)
    model, kept = NormalisedRows(), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with gradwatch.watch(model, optimizer, rules="default", sinks=[kept], strict=True):
        for step in range(6):
            optimizer.zero_grad()
            x = torch.randn(5, 4)
            if step in (2, 3):
                x[1] = 0.0
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            held = gradwatch.session.session.live_sessions()[-1].attached.causes._localiser._recordings
            assert not held.calls()
    (finding,) = (one for record in kept.records for one in record.findings)
    assert (finding.rule, finding.step) == ("loss-non-finite", 2)
    assert (finding.phase, finding.op, finding.module) == ("forward", "div", "NormalisedRows")


class NormalisedRows(nn.Module):
    """A blank row is 0/0."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x / x.norm(dim=1, keepdim=True))


def test_data_parallel_replicas_replay_their_own_module() -> None:
    """Under DistributedDataParallel the module inside is run again; its reducer hears nothing."""
    torch.manual_seed(0)
    with one_rank():
        model, kept = SqrtAtZero(), Kept()
        replica = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(replica.parameters(), 0.01)
        with gradwatch.watch(replica, optimizer, rules=rules(), sinks=[kept], strict=True):
            for step in range(5):
                optimizer.zero_grad()
                x = torch.randn(5, 4)
                replica(broken(x) if step == 2 else x).sum().backward()
                optimizer.step()
        (finding,) = (one for record in kept.records for one in record.findings)
        assert (finding.phase, finding.op, finding.module) == ("backward", "sqrt", "SqrtAtZero")
        assert len(kept.records) == 5


def test_a_nan_added_to_the_loss_has_its_cause_though_gradients_are_finite() -> None:
    """What is added to the loss has no gradient: the search is made for the rule on the loss, and once."""
    torch.manual_seed(0)
    model, kept = nn.Linear(4, 2), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with gradwatch.watch(model, optimizer, rules="default", sinks=[kept], strict=True):
        for step in range(6):
            optimizer.zero_grad()
            penalty = torch.tensor(math.nan if step >= 3 else 0.0)
            loss = model(torch.randn(5, 4)).square().mean() + penalty
            loss.backward()
            optimizer.step()
    first, last = (one for record in kept.records for one in record.findings)
    assert (first.rule, first.step, first.phase) == ("loss-non-finite", 3, "unknown")
    assert "the loss is not finite where its derivative is" in first.note
    assert "after autograd" not in first.note
    assert (last.rule, last.phase, last.op, last.by) == ("loss-non-finite", "number", "tensor", "record")


def test_a_nan_loss_of_nan_gradients_is_searched_for_once() -> None:
    """`non-finite` has ordered the search: the rule on the loss orders no second one of the same NaN."""
    (finding,) = findings_of(NormalisedRows(), at=2, row=0.0)
    assert (finding.rule, finding.step, finding.op) == ("non-finite", 2, "div")


def findings_of(model: nn.Module, at: int, row: float) -> list[Finding]:
    """Causes found in eight steps by the default pack, of which one has a batch with a row of this value."""
    torch.manual_seed(0)
    kept = Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with gradwatch.watch(model, optimizer, rules="default", sinks=[kept], strict=True):
        for step in range(8):
            optimizer.zero_grad()
            x = torch.randn(5, 4)
            if step == at:
                x[1] = row
            model(x).square().mean().backward()
            optimizer.step()
    return [one for record in kept.records for one in record.findings]


class Centred(nn.Module):
    """Follows the mean of its batches, as momentum encoders do, within a forward that is not run again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("center", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x) - self.center
        with torch.no_grad():
            self.center.mul_(0.9).add_(self.layer(x).mean(0), alpha=0.1)
            self.layer.weight.mul_(1.0)  # written to in the forward: no replay
        return out


def test_what_an_incident_has_left_behind_is_not_its_cause() -> None:
    """The buffer that is NaN one step later was made so by the batch of this one: the cause stays unknown, and why."""
    findings = findings_of(Centred(), at=4, row=math.nan)
    assert findings
    assert not [one for one in findings if one.phase in ("buffer", "parameter")], findings
