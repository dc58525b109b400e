"""A slice of the benchmark: what is found stays found, healthy steps stay silent, recordings and rivals are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from random import Random

import numpy as np
import pytest

from gradwatch.records.record import Record
from gradwatch.records.snapshot import Sites, Snapshot
from gradwatch.rules.files import load_rules
from tests.benchmarks.detection import rivals
from tests.benchmarks.detection.__main__ import main
from tests.benchmarks.detection.converging import LATE, alarms_of, least_squares, noise_floor
from tests.benchmarks.detection.faults import LIVE
from tests.benchmarks.detection.judging import RuleFile, alarms, judged
from tests.benchmarks.detection.live import UnfitError
from tests.benchmarks.detection.recording import Key, Memory, Recording, load, record, save
from tests.benchmarks.detection.replayed import REPLAYED, placed
from tests.benchmarks.detection.scores import healthy, is_alarm, live, plan, replayed, row
from tests.benchmarks.detection.split import HALVES, PART, PARTS, TRAININGS, names_of

SLICE = {"flow": 150, "vae_summed": 360}
"""Trainings, and steps of each; the longer one has room for faults past the warm-up."""
FOUND = (
    *("layer spike × 100", "total spike × 100", "layer falls × 0.0001", "layer falls × 0"),
    *("NaN in a layer", "Inf in a layer"),
)
"""Faults of which the default pack finds every one that is replayed on a VAE."""
FOUND_LIVE = ("nan-gradient", "layer-x100", "frozen", "lr-0", "no-zero-grad")
"""Faults that it finds in the loop too."""


@cache
def slice_of(training: str) -> Recording:
    """A healthy recording."""
    return record(Key(training, 0), SLICE[training])


def default_pack() -> RuleFile:
    """The rules of the default pack."""
    return RuleFile(load_rules("default"))


def test_each_half_has_some_of_every_subject() -> None:
    """No training is in both halves, and neither half lacks vision, language, generation, reinforcement or others."""
    assert len(TRAININGS) >= 24
    subjects = {half: {TRAININGS[name].__module__ for name in names_of(half)} for half in HALVES}
    assert len(subjects["tuning"]) == 5
    assert subjects["tuning"] == subjects["reporting"]
    assert len(PART) == sum(len(names_of(part)) for part in PARTS)


@pytest.mark.parametrize("training", SLICE)
def test_a_healthy_slice_is_silent(training: str) -> None:
    """The default pack gives no warning and nothing critical."""
    scores, _ = healthy(default_pack, slice_of(training))
    assert scores.per_thousand() == 0, scores.false_alarms


def test_recall_does_not_fall() -> None:
    """The default pack finds these faults wherever they are replayed."""
    recording = slice_of("vae_summed")
    faults = plan(recording, [REPLAYED[name] for name in FOUND])
    scores = replayed(default_pack, recording, faults, alarms(load_rules("default"), recording))
    missed = [one for one in scores.outcomes if one.delay is None]
    assert len(scores.outcomes) >= len(FOUND)
    assert missed == []


# Of each kind there is one in every run: a value, a size, a parameter that moves no more.
@pytest.mark.parametrize(
    "fault",
    [pytest.param(one, marks=[pytest.mark.soak] * (one in ("lr-0", "no-zero-grad"))) for one in FOUND_LIVE],
)
def test_live_recall_does_not_fall(fault: str) -> None:
    """The default pack finds these faults in a loop, and names a parameter at fault where some are."""
    made = LIVE[fault](Random(fault))
    made.onset = min(made.onset, 60)
    recording = record(Key("vae_summed", 0, fault), made.onset + 40, made, lambda: made.culprits)
    (outcome,) = live(default_pack, recording).outcomes
    assert outcome.delay is not None
    assert outcome.right in (True, None)


def test_a_nan_has_an_effect_under_a_scaler_too() -> None:
    """It is written where the GradScaler no longer looks: the step is not rejected, and the layer is named."""
    made = LIVE["nan-gradient"](Random(0))
    made.onset = 40
    recording = record(Key("amp_scaler", 0, "nan-gradient"), 45, made, lambda: made.culprits)
    assert recording.snapshots[40].scalars["scaler_skip"] == 0
    (outcome,) = live(default_pack, recording).outcomes
    assert (outcome.delay, outcome.rule, outcome.right) == (0, "non-finite", True)


@pytest.mark.parametrize("fault", ["frozen", "detached"])
def test_a_fault_that_torch_itself_refuses_is_none_of_the_benchmark(fault: str) -> None:
    """A parameter without a gradient in DistributedDataParallel: its next step is an error of torch's."""
    with pytest.raises(UnfitError, match="DistributedDataParallel"):
        record(Key("ddp", 0, fault), 2, LIVE[fault](Random(0)))


def test_a_recording_is_read_back_as_it_was(tmp_path: Path) -> None:
    """Of two optimizers and a scaler, bit for bit; so are the alarms."""
    for training in ("gan_ring", "amp_scaler"):
        recording = record(Key(training, 0), 25)
        save(recording, tmp_path)
        again = load(recording.key.path(tmp_path))
        assert len(again.snapshots) == len(recording.snapshots)
        for before, after in zip(recording.snapshots, again.snapshots, strict=True):
            assert after.sites.alike(before.sites)
            assert (after.optimizer, after.step, after.loss_scale) == (
                before.optimizer,
                before.step,
                before.loss_scale,
            )
            assert after.norm.tobytes() == before.norm.tobytes()
            assert after.scalars == before.scalars
            for name, column in before.columns.items():
                here = column.present
                if not here.any():  # such a column is left out
                    continue
                assert np.array_equal(after.columns[name].present, here)
                assert np.array_equal(after.columns[name].values[here], column.values[here], equal_nan=True)
        assert alarms(load_rules("default"), again) == alarms(load_rules("default"), recording)


class WithEvents(Memory):
    """Keeps what the live session said too."""

    def __init__(self) -> None:
        super().__init__()
        self.firing: list[tuple[int, str, tuple[str, ...]]] = []

    def write(self, record: Record) -> None:
        """Keep the rules that begin to fire."""
        super().write(record)
        events = record.verdict.events
        self.firing += [
            (one.step, one.rule, one.sites) for one in events if one.kind == "firing" and one.notify
        ]


@pytest.mark.parametrize("fault", ["layer-x100", "frozen"])
def test_judging_a_recording_says_what_the_live_watch_said(fault: str) -> None:
    """The same rules at the same steps, naming the same parameters."""
    made, memory = LIVE[fault](Random(0)), WithEvents()
    made.onset = 40
    rules = load_rules("default")
    recording = record(Key("recommender", 0, fault), 60, made, lambda: made.culprits, rules, memory)
    again = [(one.step, one.rule, one.sites) for one in alarms(rules, recording)]
    assert memory.firing
    assert again == memory.firing


def test_a_fault_judged_from_its_place_on_is_judged_as_in_the_whole() -> None:
    """A copied judge knows what the whole recording before the fault has taught it."""
    recording = slice_of("vae_summed")
    fault = placed(REPLAYED["layer spike × 100"], recording.snapshots, Random(0))
    assert fault is not None
    changed = [*recording.snapshots]
    part = fault.snapshots(recording.snapshots)
    changed[fault.place : fault.place + len(part)] = part
    judge = default_pack()
    judged(judge, recording.snapshots[: fault.place])
    copied = judged(judge.copy(), part, fault.place)
    whole = [one for one in judged(default_pack(), changed) if one.place == fault.place]
    assert copied == whole
    assert any(is_alarm(one) for one in whole)


def test_the_numbers_of_a_fault() -> None:
    """Recall over all, delays and culprits over those found."""
    from tests.benchmarks.detection.scores import Outcome

    outcomes = [
        Outcome("f", "t", 0, "r", "a", True),
        Outcome("f", "t", 10, "r", "b", False),
        Outcome("f", "t", None),
    ]
    found = row(outcomes)
    assert (found.count, round(found.recall, 2), found.median_delay, found.right) == (3, 0.67, 5, 0.5)


# -- rivals -------------------------------------------------------------------------------------------------------

SITES = Sites(
    ("a.weight", "b.weight"), ("param", "param"), np.array([4, 4]), np.array([2, 2]), np.array([0, 1])
)


def snapshots(steps: int, last_norm: float = 1.0, last_loss: float = 1.0) -> list[Snapshot]:
    """Steps of which the last is otherwise; norms and losses wobble by 1 %."""
    made = []
    for step in range(steps):
        end = step == steps - 1
        wobble = 1 + 0.01 * (-1) ** step
        norm = np.array([wobble, last_norm if end else wobble], np.float32)
        loss = last_loss if end else wobble
        total = float(np.sqrt((norm.astype(np.float64) ** 2).sum()))
        made.append(
            Snapshot(
                0,
                step,
                SITES,
                norm,
                np.ones(2, np.int32),
                np.ones(2, np.float32),
                total,
                total,
                scalars={"loss": loss},
            )
        )
    return made


@pytest.mark.parametrize(
    ("check", "norm", "loss"),
    [
        (rivals.NotFinite, float("nan"), 1.0),
        (rivals.NotFinite, 1.0, float("inf")),
        (rivals.TotalAbove, 101.0, 1.0),
        (rivals.TotalAboveMean, 15.0, 1.0),
        (rivals.ParameterAboveMean, 10.5, 1.0),
        (rivals.Turbulence, 1.6, 1.0),
        (rivals.ZClipCheck, 1.2, 1.0),
        (rivals.MegatronLoss, 1.0, 10.2),
        (rivals.SkipStep, 1.2, 1.0),
        (rivals.SkipStep, 1.0, 1.1),
        (rivals.VanishingGradient, 1e-8, 1.0),
    ],
)
def test_a_rival_finds_what_its_formula_says(
    check: Callable[[], rivals.Check], norm: float, loss: float
) -> None:
    """One alarm at the last step of 150, and none where that is as those before."""
    rival = partial(rivals.Rival, (check,))
    assert [one.step for one in judged(rival(), snapshots(150, norm, loss))] == [149]
    assert judged(rival(), snapshots(150, 1.01)) == []


def test_a_rival_names_the_parameter() -> None:
    """A check by parameter says of which it holds."""
    (alarm,) = judged(rivals.Rival((rivals.ParameterAboveMean,)), snapshots(150, 20.0))
    assert alarm.sites == ("b.weight",)


def test_the_command_records_and_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second run records nothing anew, and prints the same table."""
    save(slice_of("vae_summed"), _made(tmp_path / "tuning"))
    arguments = ["--dir", str(tmp_path), "--only", "vae_summed", "--seeds", "1", "--width", "0"]
    assert main([*arguments, "--no-replay"]) == 0
    first = capsys.readouterr().out
    assert "| default | 360 | 0.00 |" in first
    assert main([*arguments, "--no-replay", "--judge-only"]) == 0
    assert capsys.readouterr().out == first


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_a_fit_that_is_down_to_rounding_is_not_sick() -> None:
    """Least squares by SGD: no alarm once the loss is next to nothing; judged all the same it would have many."""
    free = load_rules("default")
    free = replace(free, rules=tuple(replace(one, unless=()) for one in free.rules))
    late = []
    for rules in ("default", free):
        told = (alarm.split("@") for alarm in alarms_of(least_squares, 0, rules, 800))
        late.append({name for name, step in told if int(step) > 200})
    assert late[0] == set()
    assert {"stuck", "vanishing"} <= late[1]


def test_a_fault_on_a_floor_of_noise_is_told() -> None:
    """Targets that are not normalised: the loss falls by eight orders of magnitude, and is steady from there on."""
    told = alarms_of(noise_floor, 0, "default", 640)
    assert not [alarm for alarm in told if 140 <= int(alarm.split("@")[1]) < LATE]
    assert {f"total-norm-fall@{LATE + 19}"} <= set(told)
