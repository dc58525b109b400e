"""One rule that judges by a z and by a factor: what breaches by either breaches, and the Event says by which."""

from __future__ import annotations

import numpy as np
import pytest

from gradwatch.detectors import LossSpike, Spike
from gradwatch.errors import GradwatchError
from gradwatch.records.event import Event
from gradwatch.rules.files import parse_rules
from tests.engine.cases import OptimizerRules, bound, rule

Z, FACTOR = "spike", "above_recent_max"
TEXT = rule("text", Spike(factor=4.0), annotations={"summary": "{value} is {beyond}"})


def scattered(step: int) -> float:
    """A healthy norm that leaps by a factor of 150 and back: no z is unusual there."""
    return (0.02, 3.0, 0.3)[step % 3]


def steady(step: int) -> float:
    """A healthy norm that moves by a per cent."""
    return 1.0 + 0.01 * (step % 3)


def events_of(usual: list[float], last: list[float | None], detector: Spike | None = None) -> list[Event]:
    """The Events of one rule, of one parameter with these norms; it fires no later than the last of them."""
    watched = OptimizerRules(bound([rule("r", detector or Spike(factor=4.0), scope="param")], size=1))
    for step, norm in enumerate([*usual, *last]):
        watched.step(step, [norm])
    return watched.events


@pytest.mark.parametrize(
    ("usual", "spike", "yardstick", "threshold"),
    [(scattered, 30.0, FACTOR, 4.0), (steady, 3.5, Z, 10.0), (steady, 100.0, Z, 10.0)],
)
def test_what_breaches_by_either_fires(usual, spike: float, yardstick: str, threshold: float) -> None:  # type: ignore[no-untyped-def]
    """By that which it exceeds most, with the score and the threshold of this one."""
    norms = [usual(step) for step in range(60)]
    fired, resolved = events_of(norms, [spike, usual(61)])
    assert (fired.kind, fired.yardstick, fired.threshold) == ("firing", yardstick, threshold)
    assert fired.value == pytest.approx(spike)
    assert fired.score > threshold
    assert resolved.kind == "resolved"


def test_neither_alone_sees_what_both_see() -> None:
    """The z is blind to one of the spikes, the factor to the other."""
    for usual, spike in ((scattered, 30.0), (steady, 3.5)):
        norms = [usual(step) for step in range(60)]
        assert bool(events_of(norms, [spike], Spike())) is (usual is steady)


def test_a_norm_within_both_is_silent() -> None:
    """Three times the largest where norms scatter, and two per cent where they do not."""
    assert not events_of([scattered(step) for step in range(60)], [9.0])
    assert not events_of([steady(step) for step in range(60)], [1.05])


@pytest.mark.parametrize("gap", [None, np.nan, 0.0])
def test_gaps_change_nothing(gap: float | None) -> None:
    """A step without a gradient, with NaN or with zero is neither judged nor learned by any of the two."""
    norms = [scattered(step) for step in range(60)]
    with_gaps = [value for norm in norms for value in (norm, gap)]
    (fired,) = events_of(with_gaps, [30.0])  # type: ignore[arg-type]
    assert (fired.yardstick, fired.score) == (FACTOR, pytest.approx(10.0))


def test_it_goes_on_firing_until_both_are_quiet() -> None:
    """A level that stays high soon is no large factor any more, while its z still is far out."""
    norms = [steady(step) for step in range(60)]
    events = events_of(norms, [8.0] * 6)
    assert [(event.step, event.kind) for event in events] == [(60, "firing")]


def test_the_score_is_told_in_words() -> None:
    """`{beyond}` is of the yardstick by which it breaches."""
    for usual, spike, words in (
        (scattered, 30.0, "30 is 10 times the largest of the last 100"),
        (steady, 100.0, "100 is 45.95 deviations above its usual level"),
    ):
        watched = OptimizerRules(bound([TEXT], size=1))
        for step in range(60):
            watched.step(step, [usual(step)])
        (event,) = watched.step(60, [spike]).events
        assert event.summary == words


def test_the_worst_of_several_is_the_one_furthest_beyond_either() -> None:
    """A parameter thirtyfold by its factor comes before one that is just beyond by its z."""
    watched = OptimizerRules(bound([rule("r", Spike(factor=4.0), scope="param")], size=2))
    for step in range(60):
        watched.step(step, [steady(step), scattered(step)])
    (event,) = watched.step(60, [2.8, 900.0]).events
    assert event.sites == ("layers.0.bias", "layers.0.weight")
    assert event.yardstick == FACTOR


def test_a_loss_has_both_too() -> None:
    """Of a loss near 0 the asinh is no logarithm: there the factor sees a jump."""
    watched = OptimizerRules(bound([rule("r", LossSpike(factor=4.0, window=150))], size=1))
    for step in range(60):
        watched.step(step, [1.0], scalars={"loss": 0.001 * steady(step)})
    (event,) = watched.step(60, [1.0], scalars={"loss": 0.1}).events
    assert event.yardstick == FACTOR


def test_a_factor_has_no_limit_inside_the_backward() -> None:
    """What is clipped there must be known before it starts: refused with the place."""
    text = (
        "version: 1\nrules:\n  r:\n    detect: {kind: spike, factor: 4}\n"
        "    do: [clip: {to: baseline, at: backward}]\n"
    )
    with pytest.raises(GradwatchError, match="`factor` does not give"):
        parse_rules(text)
    parse_rules(text.replace(", factor: 4", ""))
