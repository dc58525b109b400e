"""A slice of the benchmark of causes: the log tells operation and line, and nothing else of the training changes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from tests.benchmarks.cause import bad_samples
from tests.benchmarks.cause.digests import digests
from tests.benchmarks.cause.fault import Fault, faults
from tests.benchmarks.cause.score import run

SLICE = (
    *(
        "kl_ratio",
        "gradient_penalty",
        "custom_function",
        "nan_labels",
        "accumulation",
        "grad_divided_by_zero",
    ),
)
MORE = (
    *("gumbel_noise", "nan_to_num_after", "helper_called_twice", "normalise_between_modules"),
    *("advantage_without_spread", "pow_of_negative"),
)
"""Those of a soak: each is a process of its own."""
SAMPLES = (
    *("ddp_target_in_other_units", "token_weight_out_of_range", "penalty_on_the_weights"),
    *("encoder_and_decoder", "fsdp2_accumulated_input_times_1000"),
)
MORE_SAMPLES = (
    *("accumulated_input_times_1000_clipped", "ddp_every_rank_alike", "time_comes_first"),
    *("ids_of_a_generator", "fsdp1_blocks_input_times_1000"),
)
PLANTED = [one for file in bad_samples.FILES for one in bad_samples.planted(file)]


def params(found: Iterable[Any], few: Collection[str], more: Collection[str]) -> list[Any]:
    """Those named, the second part in a soak only."""
    return [
        pytest.param(one, id=one.name, marks=[pytest.mark.soak] * (one.name in more))
        for one in found
        if one.name in (*few, *more)
    ]


@pytest.mark.parametrize("fault", params(faults(), SLICE, MORE))
def test_the_log_tells_operation_and_line(fault: Fault) -> None:
    """Of an unmodified script, at the step of its only fault; no claim is wrong."""
    score = run(fault)
    assert score.fired
    assert (score.op, score.line, score.wrong) == (True, True, False), score.row()


@pytest.mark.parametrize("fault", params(faults(), SLICE[::2], MORE))
def test_looking_for_the_cause_changes_no_bit(fault: Fault) -> None:
    """Weights and generator end as they do where the step is only skipped."""
    without, with_cause = digests(fault)
    assert without == with_cause


@pytest.mark.parametrize("planted", params(PLANTED, SAMPLES, MORE_SAMPLES))
def test_the_log_names_the_bad_samples(planted: bad_samples.Planted) -> None:
    """With their positions in the dataset, where they can be known, else none."""
    named = bad_samples.run(planted)
    assert (named.right, named.wrong) == (True, False), named.row()


def test_looking_for_bad_samples_changes_no_bit() -> None:
    """Weights and generator end as they do without a search, on each rank."""
    (planted,) = (one for one in PLANTED if one.name == "ddp_target_in_other_units")
    assert bad_samples.run(planted).digest == bad_samples.run(planted, localise=False).digest
