"""A step that does not come again is called irreproducible, and only where all that it reads was restored."""

from __future__ import annotations

import itertools
import os
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.incidents.explanation import fields, page, sentence
from gradwatch.incidents.suggestions import suggestion_for
from gradwatch.records.finding import Finding
from gradwatch.rules.files import parse_rules
from gradwatch.sinks.prometheus.sink import PrometheusSink
from tests.localise.replay import faulty_processor
from tests.support.kept import Kept

RULES = "version: 1\nrules: {r: {detect: {kind: nonfinite}, do: [skip_step, localise]}}\n"
BAD_STEP = 3
ROWS = torch.tensor([[1.0]] * 4 + [[torch.nan]])
COUNT = itertools.count()


class Net(nn.Module):
    """Two layers with dropout between them, and what a subclass does there."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave, self.dropout = nn.Linear(4, 6), nn.Linear(6, 3), nn.Dropout(0.3)
        self.bad, self.calls = False, 0
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        """Rows that know nothing of each other."""
        h = self.dropout(torch.tanh(self.enter(x) - self.mean))
        out: Tensor = self.leave(self.body(h))
        return out

    def body(self, h: Tensor) -> Tensor:
        """To be overridden."""
        raise NotImplementedError


Body = Callable[[Net, Tensor], Tensor]


def with_buffer(model: Net, h: Tensor) -> Tensor:
    """A forward that changes a buffer, which is restored."""
    with torch.no_grad():
        model.mean.lerp_(h.mean(0), 0.1)
    return faulty_processor.relu(h)


def counting(_: Net, h: Tensor) -> Tensor:
    """A count of calls in the globals decides."""
    return h * ROWS if next(COUNT) == BAD_STEP else h


def counting_in_the_module(model: Net, h: Tensor) -> Tensor:
    """The same in an attribute."""
    model.calls += 1
    return h * ROWS if model.calls == BAD_STEP + 1 else h


def of_the_system(model: Net, h: Tensor) -> Tensor:
    """Numbers of the system."""
    odd = os.urandom(1)[0] % 2
    return h * (ROWS if model.bad and faulty_processor.once() else 1.0 + odd)


def of_a_clock(model: Net, h: Tensor) -> Tensor:
    """The time of day."""
    now = time.time()
    return h * ROWS if model.bad and faulty_processor.once() and now else h


def of_a_new_generator(model: Net, h: Tensor) -> Tensor:
    """A generator that the system seeds."""
    drawn = float(np.random.default_rng().random())
    return h * (ROWS if model.bad and faulty_processor.once() else drawn)


def drawing_late(model: Net, h: Tensor) -> Tensor:
    """A draw from a generator that no forward has drawn from before."""
    return h * (ROWS if faulty_processor.once() else random.random()) if model.bad else h


def not_deterministic(_: Net, h: Tensor) -> Tensor:
    """One of the few operators that are not deterministic on a CPU."""
    return faulty_processor.relu(h.clone().put_(torch.tensor([0, 0]), h.sum().expand(2)))


def everywhere(_: Net, h: Tensor) -> Tensor:
    """A fault in all rows: weights may have been others."""
    return faulty_processor.relu(h, rows=slice(None))


FAULTS: dict[str, Body] = {
    "nan": lambda _, h: faulty_processor.relu(h),
    "large": lambda _, h: faulty_processor.relu(h, value=1e30),
    "with-a-buffer": with_buffer,
}
UNKNOWN: dict[str, tuple[Body, str]] = {
    "counting": (counting, "COUNT"),
    "counting-in-the-module": (counting_in_the_module, "changes calls"),
    "of-the-system": (of_the_system, "calls urandom"),
    "of-a-clock": (of_a_clock, "calls time"),
    "of-a-new-generator": (of_a_new_generator, "calls urandom"),
    "drawing-late": (drawing_late, "draws from a generator"),
    "not-deterministic": (not_deterministic, "put_"),
    "everywhere": (everywhere, "nearly all else"),
}


def trained(body: Body, *sinks: object, run_dir: Path) -> list[Finding]:
    """Five steps of a model with that body, of which the one at `BAD_STEP` goes wrong."""
    global COUNT
    COUNT = itertools.count()
    torch.manual_seed(0)
    faulty_processor.disarm()
    model, kept = type("Net", (Net,), {"body": body})(), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = gradwatch.watch(
        model, optimizer, rules=parse_rules(RULES), sinks=[kept, *sinks], run_dir=run_dir, strict=True
    )
    for step in range(5):
        model.bad = step == BAD_STEP
        if model.bad:
            faulty_processor.arm()
        loss = model(torch.randn(5, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    watch.close()
    return [finding for record in kept.records for finding in record.findings]


@pytest.mark.parametrize("fault", FAULTS)
def test_what_was_computed_wrongly_once_is_irreproducible(fault: str, tmp_path: Path) -> None:
    """With the output, the device and the host, although dropout draws and a buffer changes."""
    (finding,) = trained(FAULTS[fault], run_dir=tmp_path)
    assert finding.phase == "irreproducible", finding
    assert (finding.device, finding.host, finding.rank) == ("cpu", socket.gethostname(), 0)
    assert "output 0 of Net" in sentence(finding)
    assert "irreproducible" in dict(fields(finding))["cause"]
    assert any(finding.host in line for line in page(finding))
    assert not finding.deterministic
    suggestion = suggestion_for(finding)
    assert suggestion is not None
    assert suggestion.id == "irreproducible"


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_may_have_another_reason_is_not_called_irreproducible(case: str, tmp_path: Path) -> None:
    """State that is not restored is named, and so are operators that are not deterministic; outputs are not called
    finite that were not."""
    body, why = UNKNOWN[case]
    finding = trained(body, run_dir=tmp_path)[0]
    assert finding.phase == "unknown", finding
    assert why in finding.note, finding.note


class Settings:
    """What a loop may change between a forward and the step."""

    number = 0


class Rows(Net):
    """Of which the last is NaN where something says so."""

    def forward(self, x: Tensor) -> Tensor:
        """Finite otherwise."""
        out = self.leave(torch.tanh(self.enter(x)))
        return out * ROWS if self.says() else out

    def says(self) -> bool:
        """To be overridden."""
        return False


class BySetting(Rows):
    """A setting does."""

    def says(self) -> bool:
        """That of the loop's."""
        return Settings.number == BAD_STEP


class ByEnvironment(Rows):
    """The environment does."""

    def says(self) -> bool:
        """One variable of it."""
        return os.environ.get("OF_A_TEST") == "BAD"


def advanced(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The loop counts its steps where the forward reads them."""
    for _ in range(5):
        loss = model(torch.randn(5, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        Settings.number += 1
        optimizer.step()


def by_environment(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A variable of the environment, for one forward."""
    for step in range(5):
        os.environ["OF_A_TEST"] = "BAD" if step == BAD_STEP else ""
        loss = model(torch.randn(5, 4)).square().mean()
        os.environ["OF_A_TEST"] = ""
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def cleaned(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A batch in memory of numpy, cleaned after the backward."""
    for step in range(5):
        batch = np.ones((5, 4), dtype=np.float32) * np.arange(1, 6, dtype=np.float32)[:, None]
        batch[4, 0] = np.nan if step == BAD_STEP else 0
        loss = model(torch.from_numpy(batch)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        np.nan_to_num(batch, copy=False)
        optimizer.step()


def repaired(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Weights that only some rows lead to, repaired by `.data` after the backward."""
    table = model.get_parameter("0.weight")
    for step in range(5):
        rows = torch.arange(5)
        if step == BAD_STEP:
            table.data[4] = torch.nan
        loss = model(rows).square().mean()
        optimizer.zero_grad()
        loss.backward()
        table.data.nan_to_num_()
        optimizer.step()


LOOPS: dict[str, tuple[Callable[..., None], Callable[[], nn.Module], str]] = {
    "setting": (advanced, BySetting, "writes `number`"),
    "environment": (by_environment, ByEnvironment, "reads the environment"),
    "numpy": (cleaned, Rows, "memory that is not torch's"),
    "data": (repaired, lambda: nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 3)), "`.data`"),
}


@pytest.mark.parametrize("case", LOOPS)
def test_what_the_loop_changes_before_the_step_is_no_fault_of_the_hardware(case: str, tmp_path: Path) -> None:
    """Something that the forward has read is another at the step: that it may be is said."""
    torch.manual_seed(0)
    Settings.number = 0
    loop, made, why = LOOPS[case]
    model, kept = made(), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = gradwatch.watch(
        model, optimizer, rules=parse_rules(RULES), sinks=[kept], run_dir=tmp_path, strict=True
    )
    loop(model, optimizer)
    watch.close()
    found = next(finding for record in kept.records for finding in record.findings)
    assert found.phase == "unknown", found
    assert why in found.note, found.note


def test_the_input_of_a_second_model_is_not_blamed_for_the_output_of_the_first(tmp_path: Path) -> None:
    """The first is irreproducible; what it gave to the second is no batch."""
    torch.manual_seed(0)
    faulty_processor.disarm()
    first = type("Net", (Net,), {"body": FAULTS["nan"]})()
    second, kept = nn.Linear(3, 2), Kept()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    watch = gradwatch.watch(
        [first, second], optimizer, rules=parse_rules(RULES), sinks=[kept], run_dir=tmp_path, strict=True
    )
    for step in range(5):
        if step == BAD_STEP:
            faulty_processor.arm()
        loss = second(first(torch.randn(5, 4))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    watch.close()
    (found,) = [finding for record in kept.records for finding in record.findings]
    assert (found.phase, found.call) == ("irreproducible", 0), found


def test_what_comes_again_is_deterministic(tmp_path: Path) -> None:
    """The outputs of the step with a NaN that its code makes came again, bit for bit."""
    (finding,) = trained(lambda model, h: torch.log(h) if model.bad else h, run_dir=tmp_path)
    assert (finding.phase, finding.op, finding.deterministic) == ("forward", "log", True), finding
    assert any("deterministic" in line for line in page(finding))


def test_it_is_counted(tmp_path: Path) -> None:
    """`gradwatch_irreproducible_steps_total` is 1 after such a step, and 0 after another one."""
    for body, count in ((FAULTS["nan"], 1), (UNKNOWN["counting"][0], 0)):
        sink = PrometheusSink(None)
        trained(body, sink, run_dir=tmp_path / str(count))
        lines = sink.render().decode().splitlines()
        (line,) = (one for one in lines if one.startswith("gradwatch_irreproducible_steps_total"))
        assert float(line.split()[-1]) == count
