"""The benchmark itself: it times what it says, computes what it says, and leaves nothing behind.

No test here decides anything by a time it measured.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.pool import ThreadPool
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from tests.benchmarks import ablations, adoption, memory, overhead, ranks, reading, small, start, versions
from tests.benchmarks.interleave import Sample, Timings, Turns, added_ratio, compare, interleave, pooled
from tests.benchmarks.loops import Handover, in_turn, training_step
from tests.benchmarks.peers import (
    CONTENDERS,
    NOBODY,
    Contender,
    Floor,
    Gradwatch,
    GradwatchClipBites,
    step_listeners,
)
from tests.benchmarks.tables import report
from tests.benchmarks.targets import parameter_targets, targets
from tests.benchmarks.workloads import WORKLOADS, Batch, Task, Workload
from tests.support import warm

QUICK = [name for name, contender in CONTENDERS.items() if contender.package in ("torch", "gradwatch")]
MILLISECOND = 1e-3


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.Linear(5, 3))


def _batch(rows: int) -> Batch:
    return torch.randn(rows, 6), torch.randint(0, 3, (rows,))


SMALL = Workload(
    "mlp", "small", True, _model, lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), _batch, rows=8, few=4
)


def _hooks(task: Task) -> int:
    """How many hooks hang on a task, its modules, and torch's optimizers at large."""
    owners: list[object] = [*task.model.modules(), *task.model.parameters(), task.optimizer]
    names = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_post_accumulate_grad_hooks",
        "_optimizer_step_pre_hooks",
        "_optimizer_step_post_hooks",
    )
    local = sum(len(getattr(owner, name, None) or ()) for owner in owners for name in names)
    everywhere = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
    return local + sum(len(hooks) for hooks in everywhere)


@pytest.fixture
def task() -> Iterator[Task]:
    """A small task, and a check that torch's global switches were put back."""
    yield SMALL.task()
    assert not torch.is_anomaly_enabled()


def _weights(task: Task) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in task.parameters]


@pytest.mark.parametrize("name", QUICK)
def test_contender_leaves_no_hooks(name: str, task: Task) -> None:
    """After detach the model, the optimizer and torch carry as many hooks as before."""
    before = _hooks(task)
    contender = CONTENDERS[name]()
    contender.attach(task)
    for _ in range(3):
        training_step(task, contender)
    contender.detach()
    assert _hooks(task) == before


def test_hooks_are_counted(task: Task) -> None:
    """The count behind the test above sees a contender that does hook."""
    before = _hooks(task)
    contender = CONTENDERS["item-hooks"]()
    contender.attach(task)
    assert _hooks(task) == before + len(task.parameters)
    contender.detach()


@pytest.mark.parametrize("name", [name for name in QUICK if name != GradwatchClipBites.name])
def test_contender_leaves_training_as_it_is(name: str) -> None:
    """A loop watched by a contender ends in the very weights of a bare one."""
    watched, bare, contender = SMALL.task(), SMALL.task(), CONTENDERS[name]()
    contender.attach(watched)
    for _ in range(5):
        training_step(watched, contender)
        bare.step()
    contender.detach()
    assert all(map(torch.equal, _weights(watched), _weights(bare)))


def test_the_clip_that_bites_is_torchs() -> None:
    """What is timed as clipping really clips: gradients reach the optimizer as `clip_grad_norm_` leaves them."""
    watched, wanted, contender = SMALL.task(), SMALL.task(), GradwatchClipBites()
    contender.attach(watched)
    for _ in range(5):
        training_step(watched, contender)
        wanted.forward().backward()
        torch.nn.utils.clip_grad_norm_(wanted.parameters, GradwatchClipBites.max_norm)
        wanted.optimizer.step()
        wanted.optimizer.zero_grad()
    contender.detach()
    for mine, other in zip(_weights(watched), _weights(wanted), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_twins_share_memory_and_nothing_else(workload: Workload) -> None:
    """A twin has Parameters of its own over the same storage, optimizer state included."""
    task = workload.task()
    twin = workload.twin(task)
    for mine, theirs in zip(twin.parameters, task.parameters, strict=True):
        assert mine is not theirs
        assert mine.data_ptr() == theirs.data_ptr()
        states = twin.optimizer.state[mine], task.optimizer.state[theirs]
        assert states[0] is not states[1]
        assert all(states[0][key] is states[1][key] for key in states[1])


def test_workloads_are_what_their_names_say() -> None:
    """10 to 30 million parameters for the GPT, 2,000 tiny tensors, one tensor of 16 million elements."""
    sizes = {
        name: [p.numel() for p in WORKLOADS[name].model().parameters()]
        for name in ("gpt", "tiny", "embedding")
    }
    assert 10e6 <= sum(sizes["gpt"]) <= 30e6
    assert len(sizes["tiny"]) >= 2000
    assert max(sizes["tiny"]) <= 256
    assert max(sizes["embedding"]) == 16_000_000


def test_handover_delivers_the_gradients_of_the_backward(task: Task) -> None:
    """The watched parameters get the carrier's very gradients, uncopied, and the optimizer applies them."""
    seen: list[list[tuple[int, int]]] = []
    carrier = SMALL.carrier(task)

    class Look(Contender):
        def after_backward(self, task: Task) -> None:
            made, got = carrier.gradients(), task.gradients()
            seen.append([(g.data_ptr(), m.data_ptr()) for g, m in zip(got, made, strict=True)])

    watched = SMALL.twin(task)
    handover = Handover(carrier, watched, Look())
    before = _weights(task)
    sample = handover()
    handover.close()
    assert len(seen[0]) == len(task.parameters)
    assert all(got == made for got, made in seen[0])
    # A bias in front of a BatchNorm has no gradient to speak of; matrices have.
    assert not any(torch.equal(b, a) for b, a in zip(before, _weights(task), strict=True) if b.ndim == 2)
    assert sample.wall > 0
    assert watched.gradients() == []
    assert _hooks(watched) == 0


def test_accumulation_is_several_arrivals_and_one_step() -> None:
    """With four micro-batches gradients arrive four times and add up; a monitor is told of one step."""
    small = replace(SMALL, micros=4)
    task, told, arrived = small.task(), [], [torch.zeros(())]

    class Look(Contender):
        def after_backward(self, task: Task) -> None:
            told.append(task.parameters[0].grad.clone())

    watched = small.twin(task)
    watched.parameters[0].register_hook(arrived.append)
    handover = Handover(small.carrier(task), watched, Look())
    assert handover().wall > 0
    training_step(watched, Contender())
    handover.close()
    assert len(arrived) == 1 + 2 * 4
    assert len(told) == 1
    assert torch.allclose(told[0], sum(arrived[1:5], arrived[0]))


def test_handover_leaves_out_the_optimizers_arithmetic(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time that passes inside the optimizer's own step is not counted; time in a contender is."""
    clock = [0.0]
    monkeypatch.setattr("tests.benchmarks.loops._now", lambda: Sample(clock[0], clock[0]))

    class Slow(Contender):
        def after_backward(self, task: Task) -> None:
            clock[0] += 5.0

        def after_step(self, task: Task) -> None:
            clock[0] += 2.0

    class SlowSGD(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            clock[0] += 100.0

    watched = SMALL.twin(task)
    watched.optimizer = SlowSGD(watched.parameters, lr=0.1)
    assert Handover(SMALL.carrier(task), watched, Slow())() == Sample(7.0, 7.0)


def test_watches_taking_turns_hear_only_their_own_steps() -> None:
    """A suspended watch of gradwatch is not run by the steps of others, and works on when resumed."""
    original = SMALL.task()
    turns = {name: (CONTENDERS[name](), SMALL.twin(original)) for name in ("gradwatch", "gradwatch-observe")}
    for contender, task in turns.values():
        contender.attach(task)
        contender.suspend()
    assert step_listeners() == ([NOBODY], [NOBODY])
    for steps, (contender, task) in enumerate(turns.values(), 2):
        for _ in range(steps):
            in_turn(contender, lambda task=task, contender=contender: training_step(task, contender))()  # type: ignore[misc]
    original.step()
    for steps, (contender, _) in enumerate(turns.values(), 2):
        assert isinstance(contender, Gradwatch)
        assert contender.watch.status()["steps"] == steps
        assert contender.complaint() == ""
        contender.resume()
        contender.detach()
    assert step_listeners() == ([], [])


def test_every_contender_has_a_place() -> None:
    """Every contender is measured, beside bare, and no recorder takes turns with anything quick."""
    members = [panel.members for panel in overhead.panels([kind() for kind in CONTENDERS.values()], 100)]
    slow = {name for name, kind in CONTENDERS.items() if kind.slow}
    assert {name for names in members for name in names} == set(CONTENDERS)
    assert all("bare" in names for names in members)
    assert all(not slow & set(names) or slow | {"bare"} == set(names) for names in members)


def test_floor_reads_every_gradient_once(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """The elements reduced, stacked or one by one, are as many as the model has."""
    floor = Floor()
    floor.attach(task)
    floor._read = torch.sum
    read: list[int] = []
    real = torch.Tensor.sum
    monkeypatch.setattr(torch.Tensor, "sum", lambda t: read.append(t.numel()) or real(t))  # type: ignore[func-returns-value]
    floor._read = lambda g: read.append(g.numel()) or real(g)  # type: ignore[func-returns-value]
    task.forward().backward()
    floor.after_backward(task)
    assert sum(read) == sum(p.numel() for p in task.parameters)


def test_everyone_takes_equal_turns_in_changing_order() -> None:
    """Each contender gets settle + steps calls a round; only the last are recorded; orders differ."""
    calls: list[str] = []
    counts = dict.fromkeys("abc", 0)

    def contender(name: str) -> Sample:
        calls.append(name)
        counts[name] += 1
        return Sample(float(counts[name]), 0.0)

    timings = interleave(
        {name: (lambda name=name: contender(name)) for name in "abc"},  # type: ignore[misc]
        Turns(rounds=8, settle=1, steps=2),
    )
    assert counts == dict.fromkeys("abc", 24)
    assert timings.wall["a"].tolist() == [[3.0 * n + 2, 3.0 * n + 3] for n in range(8)]
    assert len({"".join(calls[start : start + 9]) for start in range(0, 72, 9)}) > 1


def test_added_time_survives_a_machine_that_slows_down() -> None:
    """Bare steps drifting from 10 to 30 ms do not hide the 100 µs added in every round."""
    bare = np.linspace(10, 30, 60)[:, None] * MILLISECOND + np.zeros((60, 3))
    compared = compare({"bare": bare, "watched": bare + 0.1 * MILLISECOND})["watched"]
    assert compared.added.value == pytest.approx(100)
    assert compared.added.low == pytest.approx(100)
    assert compared.ratio == pytest.approx(20.1 / 20)


def test_mean_sees_what_the_median_does_not() -> None:
    """A cost of 1 ms every hundredth step adds nothing to the median and 10 µs to the mean."""
    bare = np.full((100, 2), 10 * MILLISECOND)
    sampled = bare.copy()
    sampled[[7, 93], 0] += MILLISECOND
    compared = compare({"bare": bare, "sampled": sampled})["sampled"]
    assert compared.added.value == pytest.approx(0, abs=1e-9)
    assert compared.added_mean.value == pytest.approx(10)


def test_interval_covers_the_truth() -> None:
    """The 95 % interval of an added 50 µs in noise holds the true value in about 95 of 100 repetitions."""
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(100):
        bare, watched = rng.normal(10e-3, 100e-6, (2, 80, 1))
        added = compare({"bare": bare, "watched": watched + 50e-6})["watched"].added
        held += added.low <= 50 <= added.high
    assert 88 <= held <= 100


def test_ratios_of_added_time() -> None:
    """Ratios compare what is added, not whole steps, and can use a baseline of their own."""
    bare = np.full((10, 1), 10 * MILLISECOND)
    seconds = {"bare": bare, "floor": bare + 2e-3, "watch": bare + 3e-3, "clip": bare + 1e-3}
    assert added_ratio(seconds, "watch", "floor").value == pytest.approx(1.5)
    assert added_ratio(seconds, "watch", "floor", above_baseline="clip").value == pytest.approx(1.0)


def test_targets_pass_and_fail() -> None:
    """A target is reached at its limit and not above; where a contender is missing there is no verdict."""
    bare = np.full((10, 1), 10 * MILLISECOND)
    names = ("floor", "clip_grad_norm", "get_total_norm", "gradwatch", "gradwatch-user-clip")
    seconds = {
        name: bare + added * 1e-6 for name, added in zip(names, (1000, 2000, 1200, 1340, 4400), strict=True)
    }
    verdicts = {t.what: (t.reached, t.clear) for t in targets(WORKLOADS["mlp"], seconds | {"bare": bare})}
    assert verdicts == {
        "gradwatch ÷ floor": (True, True),
        "gradwatch ÷ get_total_norm": (False, True),
        "what gradwatch adds to a clipping loop ÷ floor": (False, True),
    }
    assert targets(WORKLOADS["mlp"], {"bare": bare, "floor": bare}) == []


def test_room_for_a_bound_in_the_backward() -> None:
    """By parameter, less what observing adds: the watch alone, with bare hooks beside it, with hooks of its own."""
    tiny = WORKLOADS["tiny"]
    assert tiny.parameters == sum(1 for _ in tiny.model().parameters())
    bare, each = np.full((10, 1), 50 * MILLISECOND), tiny.parameters * 1e-6
    added = {
        "bare": 0.0,
        "gradwatch": 1.0,
        "norm-hooks": 3.0,
        "gradwatch-local": 8.0,
        "gradwatch-backward": 5.0,
    }
    seconds = {name: bare + more * each for name, more in added.items()}
    found = {
        t.what.partition("beyond ")[2]: (t.ratio.value, t.reached) for t in parameter_targets(tiny, seconds)
    }
    assert found == {
        "the plain watch": (pytest.approx(4.0), False),
        "the watch and bare tensor hooks that read the norm": (pytest.approx(1.0), True),
        "the watch that observes by tensor hooks": (pytest.approx(-3.0), True),
    }
    del seconds["norm-hooks"]
    assert len(parameter_targets(tiny, seconds)) == 2


def test_absent_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer whose library cannot be imported stands in the report with the reason."""
    monkeypatch.setattr(CONTENDERS["wandb"], "package", "no_such_library")
    result = overhead.run_workload(SMALL, ["bare", "floor", "wandb"], rounds=3, clock="wall")
    assert "no_such_library not installed" in report([result], "here", markdown=True)


def test_rounds_are_divided_among_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What several processes measured is put together round by round, and nobody's rounds are lost."""
    # Where times do not matter, a thread does for a Python of its own.
    threads = SimpleNamespace(Pool=ThreadPool)
    monkeypatch.setattr(overhead.multiprocessing, "get_context", lambda method: threads)
    monkeypatch.setitem(WORKLOADS, SMALL.name, SMALL)
    panel = overhead.Panel("handover", Turns(rounds=3, settle=0, steps=2), 1, ["bare", "floor"])
    timings, complaints = overhead.measure_apart(SMALL.name, panel, 2)
    assert {name: seconds.shape for name, seconds in timings.wall.items()} == {
        "bare": (4, 2),
        "floor": (4, 2),
    }
    assert not complaints
    halves = [
        Timings(*({name: each[k : k + 2] for name, each in clock.items()} for clock in timings))
        for k in (0, 2)
    ]
    whole = pooled(halves)
    for clock, before in zip(whole, timings, strict=True):
        assert {name: each.tolist() for name, each in clock.items()} == {
            name: each.tolist() for name, each in before.items()
        }


def test_growth_is_between_medians() -> None:
    """One stray reading is not growth; a steady rise is."""
    assert memory.growth([100] * 20 + [900] + [100] * 19) == 0
    assert memory.growth(list(range(40))) == 35


@pytest.mark.bench
@pytest.mark.timeout(1200)
def test_overhead_end_to_end(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    """The command measures every contender on every workload and prints a table that names each."""
    assert overhead.main(["--rounds", "9", "--markdown"]) == 0
    printed = capsys.readouterr().out
    assert all(contender.title in printed for name, contender in CONTENDERS.items() if name != "bare")


@pytest.mark.bench
def test_memory_end_to_end() -> None:
    """The default watch does not grow over 20,000 steps of a tiny model."""
    assert memory.main(["--steps", "20000"]) == 0


@pytest.fixture
def warm_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that take turns are forked from a Python that has imported torch: their times do not matter here."""
    pipes = SimpleNamespace(Popen=warm.Worker, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(versions, "subprocess", pipes)
    monkeypatch.setattr(versions, "TURN", 0.02)


@pytest.mark.usefixtures("warm_workers")
def test_a_checkout_is_compared_with_another() -> None:
    """Both step the same training in turns, each with its own gradwatch; here with itself: all three have times."""
    row = versions.compared(versions.SMALL, str(versions.ROOT), starts=1, rounds=2)
    assert min(row.bare, row.old, row.new) > 0
    assert row.wall.low <= row.wall.value <= row.wall.high


def test_a_fast_path_is_switched_off() -> None:
    """Each of them is there to be switched off, all at once here, and a training without it is watched as before."""
    script = (
        "import gradwatch; from tests.benchmarks import ablations, versions; "
        "[one.switch_off() for one in ablations.ABLATIONS.values()]; task = versions.small(1e-3); "
        "gw = gradwatch.watch(task.model, task.optimizer, sinks=[]); [task.step() for _ in range(80)]; "
        "assert gw.health.errors() == {}, gw.health.errors(); print(gw.status()['account']['watched']['steps'])"
    )
    done = warm.run([sys.executable, "-c", script], versions.ROOT)
    assert done.stdout.split() == ["80"], done.stderr


@pytest.mark.usefixtures("warm_workers")
def test_what_a_fast_path_saves_is_measured() -> None:
    """A process without it takes turns with one that has it."""
    row = ablations.compared("deferral", versions.CLIPPED, starts=1, rounds=2)
    for saved in (row.wall, row.cpu):
        assert saved.low <= saved.value <= saved.high


def test_what_small_steps_cost_is_measured() -> None:
    """Each of the three has a time, and the rule that is to fire fires."""
    found = small.measured(8, firing=True, rounds=3, turn=2, settle=30)
    assert found.shape == (3, 3)
    assert (found > 0).all()
    assert small.added(np.array([[1.0, 2.0, 4.0]] * 5)) == (1.0, 3.0, (3.0, 3.0, 3.0))
    found = small.measured(8, firing=False, rounds=2, turn=2, settle=30, max_norm=small.usual_norm(8))
    assert found.shape == (2, 3)
    assert small.whole(np.array([[1.0, 2.0, 3.0]] * 5)) == (1.5, 1.5, 1.5)


def test_what_a_new_optimizer_costs_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watched process of its own answers with a number of microseconds."""
    run = SimpleNamespace(run=lambda command, cwd, env, **_: warm.run(command, cwd, env, check=True))
    monkeypatch.setattr(adoption, "subprocess", run)
    assert math.isfinite(adoption.measured(adoption.COPIED, watched=True, tasks=6, first=2))


def test_turns_among_ranks_are_compared() -> None:
    """The ratio of medians, and a table that says what each row is, with what went wrong."""
    numbers = ranks.compared(np.array([[0.010, 0.011]] * 5))
    assert numbers == pytest.approx((10.0, 11.0, 1.1, 1.1, 1.1))
    row = ranks.Row("DDP", 4, "default", *numbers, "{'ranks': 1}")
    told = ranks.table(ranks.Found(1000, 5, 170.0, [row]), markdown=True)
    assert "| DDP | 4 | default | 10.00 | 11.00 | 1.100 | 1.100 to 1.100 |" in told
    assert "internal errors: {'ranks': 1}" in told


@pytest.mark.soak
@pytest.mark.parametrize("loop", ranks.LOOPS)
def test_ranks_are_measured(loop: tuple[str, int]) -> None:
    """Two real ranks of each loop, both packs, without an internal error."""
    found = ranks.measure(1, 8, 1, turn=2, loops=(loop,))
    assert [(row.loop, row.pack, row.errors) for row in found.rows] == [
        (loop[0], pack, "") for pack in ranks.PACKS
    ]


def test_what_a_start_costs_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script by itself and one that is watched have a time each, and so have `watch` and `close`."""
    run = SimpleNamespace(run=lambda command, cwd, env, **_: warm.run(command, cwd, env, check=True))
    monkeypatch.setattr(start, "subprocess", run)
    assert start.starts(rounds=2).shape == (2, 2, 2)
    assert (start.attaching(times=2, parameters=10) > 0).all()
    assert start.interval(np.array([1.0, 2.0, 2.0, 3.0])).startswith("2 (")


def test_ways_of_reading_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command that the pages name runs, and has a line for each way."""
    monkeypatch.setattr(reading, "ELEMENTS", 1 << 16)
    threads = torch.get_num_threads()
    try:
        assert reading.main(["--rounds", "1"]) == 0
    finally:
        torch.set_num_threads(threads)
    said = capsys.readouterr().out
    assert said.count("of torch._foreach_norm's") == len(reading.ways(torch.randn(1 << 16)))
