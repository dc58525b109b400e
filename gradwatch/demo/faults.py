"""Faults that the demo injects, when, and the firings that count as finding them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from gradwatch.records.event import Event

STEPS_PER_SECOND = 9.0  # of train.py on two ordinary cores; fixes the plan, so that a run is reproducible
SHORTEST = 170  # steps: warm-up of the slowest rule, and each fault long enough for its `for`


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: injected at `step`, gone or followed by the next before `until`.

    `kinds` are the detector kinds that name this fault; `where` is the prefix of the parameters it is in (""
    = all). An event counts as finding it when its rule's kind is one of `kinds`, it fires in [step, until),
    and a named parameter lies in `where`. `skipped` True asks for the step itself to have been skipped too.
    """

    name: str
    title: str
    how: str
    step: int
    until: int
    kinds: frozenset[str]
    where: str = ""
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """A demo run: `steps` in all, the script's own arguments, and the faults in order."""

    steps: int
    faults: tuple[Fault, ...]
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the verdict; `event` None = missed, `skipped` whether the step of injection was skipped."""

    fault: Fault
    event: Event | None
    skipped: bool

    @property
    def found(self) -> bool:
        """True if the fault was detected and, where that was due, acted on."""
        return self.event is not None and (self.skipped or not self.fault.skipped)


def make_plan(seconds: float) -> Plan:
    """Faults spread over about `seconds` of training; where that is short, SHORTEST steps of a smaller model."""
    steps = max(SHORTEST, round(seconds * STEPS_PER_SECOND))
    vanish = max(60, round(0.25 * steps))
    restored = vanish + max(40, round(0.1 * steps))
    nan = restored + max(15, round(0.25 * steps))
    explode = max(nan + 15, steps - max(30, round(0.1 * steps)))
    block = "blocks.1.mlp."
    faults = (
        Fault(
            "vanish",
            "vanishing layer",
            f"the MLP branch of blocks.1 is scaled by 1e-9, restored at step {restored}",
            vanish,
            restored,
            frozenset({"below", "drop", "depth_ratio", "all_zero"}),
            where=block,
        ),
        Fault(
            "nan",
            "NaN batch",
            "a batch of nothing but padding: its mean loss is 0/0",
            nan,
            explode,
            frozenset({"nonfinite"}),
            skipped=True,
        ),
        Fault(
            "lr",
            "exploding learning rate",
            "the learning rate is multiplied by 1000, for good",
            explode,
            steps,
            frozenset({"lr_jump", "spike", "above", "drift", "jump", "update_ratio", "nonfinite"}),
        ),
    )
    flags = {"--steps": steps, "--vanish-at": vanish, "--vanish-for": restored - vanish}
    flags |= {"--nan-batch-at": nan, "--explode-lr-at": explode}
    if seconds * STEPS_PER_SECOND < SHORTEST:
        flags |= {"--width": 32, "--layers": 2}
    return Plan(steps, faults, tuple(word for flag, value in flags.items() for word in (flag, str(value))))


def judge(plan: Plan, events: Iterable[Event], skipped: Collection[int]) -> tuple[Finding, ...]:
    """One Finding per fault: the first event that names it. `skipped` are the steps that were skipped."""
    firings = [event for event in events if event.kind == "firing"]
    return tuple(
        Finding(
            fault,
            next((event for event in firings if names(event, fault)), None),
            fault.step in skipped,
        )
        for fault in plan.faults
    )


def names(event: Event, fault: Fault) -> bool:
    """True if a firing counts as finding a fault."""
    places = (*event.sites, event.first_cause)
    return (
        event.detector in fault.kinds
        and fault.step <= event.step < fault.until
        and (not fault.where or any(place.startswith(fault.where) for place in places))
    )


def false_alarms(plan: Plan, events: Sequence[Event]) -> tuple[Event, ...]:
    """Firings while nothing was wrong: before the first fault, or after one had been mended."""
    ill = [(fault.step, fault.until) for fault in plan.faults if fault.name != "nan"]
    ill += [(fault.step, fault.step + 1) for fault in plan.faults if fault.name == "nan"]
    return tuple(
        event
        for event in events
        if event.kind == "firing" and not any(begin <= event.step < end for begin, end in ill)
    )
