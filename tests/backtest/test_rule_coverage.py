"""What was not recorded is said of each rule, and nothing is judged without it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from gradwatch.backtest.run_backtest import backtest_run
from gradwatch.records.decision import Decision, Order
from gradwatch.records.record import Record
from gradwatch.records.run_info import RuleInfo
from gradwatch.records.snapshot import Column
from gradwatch.rules.files import parse_rules
from tests.report.runs import SITES, broken, recorded, steps
from tests.support.sink_records import make_record, make_sites

SEVERAL = """
version: 1
rules:
  spike: {detect: {kind: spike}, warmup: 20}
  vanished: {detect: {kind: below, of: norm, threshold: 1e-3}}
  total: {detect: {kind: above, of: total_norm, threshold: 100}}
  alone: {detect: {kind: above, of: total_norm, threshold: 100}, unless: [vanished]}
  ratio: {detect: {kind: above, of: update_ratio, threshold: 1}, every: 1}
  weight: {detect: {kind: above, of: weight_norm, threshold: 1}}
  applied: {detect: {kind: above, of: norm_applied, threshold: 100}}
  reward: {detect: {kind: below, of: observed.reward, threshold: 1}}
  loss: {detect: {kind: loss_spike}, warmup: 500}
  nowhere: {detect: {kind: above, of: norm, threshold: 1}, groups: [heads], optional: true}
groups: {heads: {params: [nowhere.*], optional: true}}
"""

MODULES = """
version: 1
modules: {tap: output}
rules:
  outputs: {detect: {kind: above, of: activation_near_zero, threshold: 0.4}}
  perhaps: {detect: {kind: above, of: activation_near_zero, threshold: 0.4}, optional: true}
  large: {detect: {kind: above, of: total_norm, threshold: 100}}
  unless: {detect: {kind: above, of: total_norm, threshold: 100}, unless: [outputs]}
  both: {when: {all: [outputs, large]}}
  either: {when: {any: [outputs, large]}}
  of-it: {when: {all: [both]}}
"""
RANKS = """
version: 1
rules:
  outlier: {detect: {kind: rank_outlier}, every: 1, warmup: 20}
"""


def coverage(folder: Path, rules: str = SEVERAL) -> dict[str, tuple[str, int, str]]:
    """By rule: how far it was judged, on how many steps, and why no further."""
    found = backtest_run(folder, parse_rules(rules)).outcome.coverage
    return {one.rule: (one.extent, one.judged, one.why) for one in found}


def of_two_processes(root: Path, first: Path, second: Path) -> Path:
    """The folder of a run that a second process, recorded as attempt 1, went on with."""
    for journal in second.glob("*.gwj"):
        journal.rename(first / journal.name)
    return first.rename(root / "run")


def thinned(folder: Path) -> Path:
    """A run whose norms are recorded at every other step after the first 1,000, and that is loud at the end."""
    sites = make_sites(2100)
    made = [make_record(sites, 1.0, step=step, wall_time=1e9 + step) for step in range(1005)]
    made += [make_record(sites, 50.0, step=step, wall_time=1e9 + step) for step in range(1005, 1010)]
    return recorded(folder, made, params="sampled")


def test_after_a_gap_rules_on_parameters_judge_nothing_and_the_others_go_on(tmp_path: Path) -> None:
    """A norm that was not recorded is no gradient that did not come; what depends on such a rule ends, too."""
    folder = thinned(tmp_path)
    found = coverage(folder)
    for rule in ("spike", "vanished", "alone"):
        extent, judged, why = found[rule]
        assert (extent, judged) == ("part", 1001), rule
        assert "from step 1,001 on" in why
        assert "params: full" in why
    assert found["total"] == ("whole", 1010, "")
    events = backtest_run(folder, parse_rules(SEVERAL)).outcome.events
    assert [(one.event.rule, one.event.step) for one in events] == [("total", 1005)]


def test_a_step_that_may_have_been_skipped_ends_all_rules(tmp_path: Path) -> None:
    """Where a total is NaN, and its norms are not there, it is not known whether a rule would have had it skipped."""
    sites = make_sites(2100)
    made: list[Record] = [
        make_record(sites, np.nan if step == 1005 else 1.0, step=step, wall_time=1e9 + step)
        for step in range(1010)
    ]
    folder = recorded(tmp_path, made, params="sampled")
    rules = "version: 1\nrules:\n  total: {detect: {kind: above, of: total_norm, threshold: 100}}\n"
    skips = f"{rules}  nan: {{detect: {{kind: nonfinite}}, do: [skip_step]}}\n"
    assert coverage(folder, rules)["total"] == ("whole", 1010, "")
    extent, judged, why = coverage(folder, skips)["total"]
    assert (extent, judged) == ("part", 1005)
    assert "at step 1,005 gradients were not finite" in why


def test_columns_that_were_not_recorded_and_values_that_were_not_there(tmp_path: Path) -> None:
    """A column that no rule of the run read is another reason than one of which the run had no value."""
    found = coverage(recorded(tmp_path, steps(60)))
    assert found["spike"] == found["applied"] == found["total"] == ("whole", 60, "")
    assert found["weight"][:2] == ("not recorded", 0)
    assert "no rule of the run read it" in found["weight"][2]
    assert found["reward"] == ("no data", 0, "the run had no value of `reward`")
    assert found["loss"] == ("no data", 0, "warm-up not over: 60 of 500 samples")
    assert found["nowhere"][0] == "no site"


def test_a_column_that_a_rule_of_the_run_read_had_no_value(tmp_path: Path) -> None:
    """Then the recording lacks nothing."""
    asked = (RuleInfo("w", "above", "info", of="weight_norm"),)
    found = coverage(recorded(tmp_path, steps(60), rules=asked))
    assert found["weight"] == ("no data", 0, "the run had no value of `weight_norm`")


def test_a_column_that_was_read_less_often_is_judged_in_part(tmp_path: Path) -> None:
    """At every fourth step, of six parameters; after a clip of gradwatch's own, norms after clips are not judged."""
    found = coverage(recorded(tmp_path, broken()))
    assert found["ratio"][0] == "part"
    assert "`update_ratio` was recorded 78 times of the 348" in found["ratio"][2]
    assert found["applied"][:2] == ("part", 10)
    assert "what gradwatch itself did" in found["applied"][2]


def test_a_step_that_the_run_skipped_has_no_update_to_record(tmp_path: Path) -> None:
    """A rule on updates is judged on the whole of it, as it was live."""
    skip, made = Order("non-finite", "skip_step", False, SITES.names[0], 1), []
    for step in range(60):
        ratios = Column(np.full(len(SITES), 1e-3, np.float32), np.full(len(SITES), step < 30))
        decision = Decision(skip=step >= 30, orders=frozenset({skip} if step >= 30 else ()))
        made.append(make_record(SITES, step=step, columns={"update_ratio": ratios}, decision=decision))
    assert coverage(recorded(tmp_path, made))["ratio"] == ("whole", 60, "")


def test_what_is_missing_of_a_run_is_noted(tmp_path: Path) -> None:
    """The process was killed; it had begun before; steps in the middle are lost."""
    made = [one for one in steps(40) if not 10 <= one.snapshot.step < 15]
    made = [replace(one, snapshot=replace(one.snapshot, step=one.snapshot.step + 7)) for one in made]
    notes = backtest_run(recorded(tmp_path, made, closed=False), parse_rules(SEVERAL)).notes
    assert [note.partition(": ")[2][:40] for note in notes] == [
        "optimizer 0 begins at step 7: what its r",
        "optimizer 0: 5 steps, from step 17 on, a",
        "the journal has no end: the process was ",
    ]


def test_rules_with_baselines_end_where_steps_are_missing(tmp_path: Path) -> None:
    """A spike of the total is judged by the totals before it; a bound is judged by nothing else."""
    made = [
        make_record(make_sites(3), step=step, scalars={"loss": 1.0}) for step in (*range(40), *range(90, 99))
    ]
    rules = """
version: 1
rules:
  spike: {detect: {kind: spike, of: total_norm}, warmup: 20}
  bound: {detect: {kind: above, of: total_norm, threshold: 100}}
"""
    found = coverage(recorded(tmp_path, made), rules)
    assert found["bound"] == ("whole", 49, "")
    extent, judged, why = found["spike"]
    assert (extent, judged) == ("part", 40)
    assert why.startswith("steps before step 90 are missing from the journal")


def test_of_two_optimizers_one_is_enough(tmp_path: Path) -> None:
    """A value that one of them never has is none that is missing from the recording."""
    first = steps(30)
    second = [
        replace(one, snapshot=replace(one.snapshot, optimizer=1, scalars={"reward": 2.0}))
        for one in steps(30)
    ]
    found = coverage(recorded(tmp_path, [one for pair in zip(first, second, strict=True) for one in pair]))
    assert found["reward"] == ("whole", 30, "")
    assert found["loss"][0] == "no data"
    assert found["total"] == ("whole", 60, "")


def test_what_one_process_measured_says_nothing_of_another(tmp_path: Path) -> None:
    """The second process of a run, under other rules, did not measure what those of the first read."""
    asked = (RuleInfo("w", "above", "info", of="weight_norm"),)
    every = np.ones(len(SITES), np.bool_)
    weights = {"weight_norm": Column(np.full(len(SITES), 0.5, np.float32), every)}
    first = recorded(tmp_path / "first", steps(30, columns=weights), rules=asked)
    second = recorded(tmp_path / "second", steps(50), attempt=1)
    extent, judged, why = coverage(of_two_processes(tmp_path, first, second))["weight"]
    assert (extent, judged) == ("part", 30)
    assert "no rule of the run read it" in why


def test_modules_that_no_rule_of_the_run_had_tapped_are_not_recorded(tmp_path: Path) -> None:
    """Whether the model has such modules is not known, also of a rule that may be about none, or that needs another."""
    found = coverage(recorded(tmp_path, steps(40)), MODULES)
    for rule in ("outputs", "perhaps"):
        extent, judged, why = found[rule]
        assert (extent, judged) == ("not recorded", 0), rule
        assert why.startswith("the run tapped no module")
    for rule in ("both", "of-it"):
        assert found[rule][:2] == ("not recorded", 0), rule
    assert found["both"][2] == "it depends on `outputs`, not judged on the whole run"
    for rule in ("unless", "either"):
        assert found[rule][0] == "part", rule
    assert found["large"] == ("whole", 40, "")


def test_modules_that_the_rules_of_the_run_found_none_of_are_no_gap(tmp_path: Path) -> None:
    """Judged by the very rules that it was recorded under, a run has all that these would have had measured."""
    folder = recorded(tmp_path, steps(40), rules_digest=parse_rules(MODULES).digest)
    found = coverage(folder, MODULES)
    assert {rule: found[rule][0] for rule in ("outputs", "both")} == {"outputs": "no site", "both": "no site"}


def test_ranks_that_no_rule_of_the_run_compared_are_not_recorded(tmp_path: Path) -> None:
    """A process alone has nothing to compare; nor had those of a run whose own rule of this kind found no ranks."""
    several = recorded(tmp_path / "several", steps(40), world_size=2)
    extent, _, why = coverage(several, RANKS)["outlier"]
    assert extent == "not recorded"
    assert why.startswith("the run compared no ranks")
    own = (RuleInfo("o", "rank_outlier", "info", of="norm_local"),)
    alone = recorded(tmp_path / "alone", steps(40))
    sharded = recorded(tmp_path / "sharded", steps(40), world_size=2, rules=own)
    assert coverage(alone, RANKS)["outlier"][0] == coverage(sharded, RANKS)["outlier"][0] == "no site"


def test_the_modules_that_the_run_measured_are_noted(tmp_path: Path) -> None:
    """Other rules might tap more of them; those of the run itself tap these, and rules on none have no use for it."""
    sites = replace(make_sites(3), kinds=("param", "param", "module"))
    near_zero = Column(np.full(3, 0.1, np.float32), np.array([False, False, True]))
    made = steps(40, sites, columns={"activation_near_zero": near_zero})
    folder = recorded(tmp_path / "others", made)
    own = recorded(tmp_path / "own", made, rules_digest=parse_rules(MODULES).digest)
    (note,) = backtest_run(folder, parse_rules(MODULES)).notes
    assert note.startswith("rules on modules are judged at the 1 module that the run tapped")
    assert backtest_run(folder, parse_rules(RANKS), parse_rules(MODULES)).notes == (note,)
    assert (
        backtest_run(own, parse_rules(MODULES)).notes == backtest_run(folder, parse_rules(RANKS)).notes == ()
    )


ON_REQUEST = """
version: 1
rules:
  batch: {{detect: {{kind: same_batch, one_in: {every}}}}}
  noise: {{detect: {{kind: above, of: noise_scale, threshold: 1e9}}, every: {every}}}
  outlier: {{detect: {{kind: rank_outlier}}, every: {every}, warmup: {warmup}}}
"""


def on_request(measured: Iterable[int], count: int = 400) -> list[Record]:
    """Steps of two ranks, at some of which the batch was hashed and ranks were compared."""
    sites = replace(make_sites(4), kinds=("param", "param", "rank", "rank"))
    own, compared = np.array([1, 1, 0, 0]), np.array([False, False, True, True])
    found = {"columns": {"rank_norm": Column(np.ones(4, np.float32), compared)}}
    return [
        make_record(
            sites,
            own,
            calls=own,
            step=step,
            wall_time=1e9 + step,
            **({"scalars": {"batch_hash": step, "noise_scale": 1.0}, **found} if step in measured else {}),
        )
        for step in range(1, count)
    ]


def test_what_is_measured_on_request_was_measured_at_other_steps(tmp_path: Path) -> None:
    """Batches and ranks, at every tenth step: rules that would have looked at them more often are not judged whole."""
    folder = recorded(tmp_path, on_request(range(0, 400, 10)))
    often = coverage(folder, ON_REQUEST.format(every=5, warmup=50))
    for rule, column, times in (
        ("batch", "batch_hash", "39 times of the 79"),
        ("noise", "noise_scale", "39 times of the 79"),
        ("outlier", "rank_norm", "78 times of the 158"),
    ):
        extent, _, why = often[rule]
        assert extent == "part", rule
        assert why.startswith(f"`{column}` was recorded {times} that the rule would have read it")
    seldom = coverage(folder, ON_REQUEST.format(every=20, warmup=5))
    assert {one[0] for one in seldom.values()} == {"whole"}


def test_what_is_measured_on_request_was_measured_at_none_of_the_steps(tmp_path: Path) -> None:
    """At every tenth step of the first sixty, and the rules look at each seventh."""
    found = coverage(
        recorded(tmp_path, on_request(range(0, 60, 10), 60)), ON_REQUEST.format(every=7, warmup=5)
    )
    for rule in ("batch", "noise", "outlier"):
        extent, judged, why = found[rule]
        assert (extent, judged) == ("not recorded", 0), rule
        assert "was recorded 0 times of the " in why


def test_a_value_that_is_not_there_at_some_steps_is_no_gap(tmp_path: Path) -> None:
    """Noise that hides the gradient has none, here at every other step and a few more: live there was none either."""
    measured = [step for step in range(400) if step % 2 or step % 30 == 0]
    found = coverage(recorded(tmp_path, on_request(measured)), ON_REQUEST.format(every=1, warmup=5))
    assert {one[0] for one in found.values()} == {"whole"}


def test_a_rule_that_had_no_step_to_look_at_is_without_data(tmp_path: Path) -> None:
    """None of nine steps is one at which it would have looked: no recording would have more."""
    found = coverage(recorded(tmp_path, on_request([], 10)), ON_REQUEST.format(every=10, warmup=5))
    assert {one[0] for one in found.values()} == {"no data"}


def test_a_rule_that_learns_anew_where_a_process_went_on_is_not_judged(tmp_path: Path) -> None:
    """Live it went on with what it had learned; one that has learned enough by the end is judged, and so noted."""
    rules = """
version: 1
rules:
  long: {detect: {kind: spike, of: total_norm}, warmup: 50}
  short: {detect: {kind: spike, of: total_norm}, warmup: 20}
  after: {when: {all: [long]}}
"""
    first = recorded(tmp_path / "first", steps(40))
    made = [replace(one, snapshot=replace(one.snapshot, step=one.snapshot.step + 40)) for one in steps(30)]
    second = recorded(tmp_path / "second", made, attempt=1)
    found = coverage(of_two_processes(tmp_path, first, second), rules)
    assert found["short"] == ("whole", 70, "")
    for rule in ("long", "after"):
        extent, judged, why = found[rule]
        assert (extent, judged) == ("not recorded", 0), rule
        assert why.startswith("a process went on with what it had learned before")
        assert "warm-up not over: 30 of 50 samples" in why


def test_a_rule_whose_first_step_the_run_never_reached(tmp_path: Path) -> None:
    """It was judged on nothing, whatever was recorded; one that the run reached was judged."""
    rules = """version: 1
rules:
  late: {detect: {kind: above, of: total_norm, threshold: 100}, from_step: 60}
  reached: {detect: {kind: above, of: total_norm, threshold: 100}, from_step: 59}
"""
    found = coverage(recorded(tmp_path, steps(60)), rules)
    assert found["late"] == ("no data", 0, "before its from_step: 60 (the last step was 59)")
    assert found["reached"] == ("whole", 60, "")
