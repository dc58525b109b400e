"""A slice of the benchmark of causes: the log tells operation and line, and nothing else of the training changes."""

from __future__ import annotations

import pytest

from tests.benchmarks.cause import bad_samples
from tests.benchmarks.cause.digests import digests
from tests.benchmarks.cause.fault import Fault, faults
from tests.benchmarks.cause.score import run

SLICE = (
    *(
        "kl_ratio",
        "gumbel_noise",
        "nan_to_num_after",
        "gradient_penalty",
        "helper_called_twice",
        "custom_function",
    ),
    *(
        "nan_labels",
        "normalise_between_modules",
        "accumulation",
        "advantage_without_spread",
        "pow_of_negative",
    ),
    "grad_divided_by_zero",
)
SAMPLES = (
    *("accumulated_input_times_1000_clipped", "ddp_target_in_other_units", "token_weight_out_of_range"),
    *(
        "ddp_every_rank_alike",
        "penalty_on_the_weights",
        "time_comes_first",
        "encoder_and_decoder",
        "ids_of_a_generator",
    ),
    *("fsdp2_accumulated_input_times_1000", "fsdp1_blocks_input_times_1000"),
)
PLANTED = [one for file in bad_samples.FILES for one in bad_samples.planted(file) if one.name in SAMPLES]
CHOSEN = [fault for fault in faults() if fault.name in SLICE]


@pytest.mark.parametrize("fault", CHOSEN, ids=lambda fault: fault.name)
def test_the_log_tells_operation_and_line(fault: Fault) -> None:
    """Of an unmodified script, at the step of its only fault; no claim is wrong."""
    score = run(fault)
    assert score.fired
    assert (score.op, score.line, score.wrong) == (True, True, False), score.row()


@pytest.mark.parametrize("fault", CHOSEN[::3], ids=lambda fault: fault.name)
def test_looking_for_the_cause_changes_no_bit(fault: Fault) -> None:
    """Weights and generator end as they do where the step is only skipped."""
    without, with_cause = digests(fault)
    assert without == with_cause


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_the_log_names_the_bad_samples(planted: bad_samples.Planted) -> None:
    """With their positions in the dataset, where they can be known, else none."""
    named = bad_samples.run(planted)
    assert (named.right, named.wrong) == (True, False), named.row()


def test_looking_for_bad_samples_changes_no_bit() -> None:
    """Weights and generator end as they do without a search, on each rank."""
    planted = PLANTED[0]
    assert bad_samples.run(planted).digest == bad_samples.run(planted, localise=False).digest
