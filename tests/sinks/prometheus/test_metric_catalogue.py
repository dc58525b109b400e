"""The catalogue keeps the rules of the field, and the totals behind it add up."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwatch.account import Taken
from gradwatch.records.record import CheckpointHealth, Record
from gradwatch.records.snapshot import Column
from gradwatch.sinks.prometheus.exposition import render
from gradwatch.sinks.prometheus.metric_catalogue import METRICS, Metric, documentation
from gradwatch.sinks.prometheus.metric_values import RunEnd, families
from gradwatch.sinks.prometheus.run_totals import RecentMax, RunTotals
from gradwatch.sinks.prometheus.sink import MAX_OPTIMIZERS, PrometheusSink
from tests.sinks.prometheus.test_exposition import read
from tests.support.sink_records import RULES, make_event, make_record, make_run, make_sites, skip

SPECIFIED = frozenset(
    re.findall(
        r"\w+",
        """
        build_info run_info steps_total last_step_timestamp_seconds grad_norm grad_norm_applied
        group_grad_norm step_grad_norm nonfinite_steps_total nonfinite_elements_total rule_firings_total
        rule_active actions_total clipped_steps_total skipped_steps_total loss_scale observe_duration_seconds
        step_duration_seconds provisional_steps_total stall_threshold_seconds overhead_ratio coverage_ratio
        internal_errors_total component_up params params_exported config_last_reload_successful
        param_grad_norm series_dropped grad_norm_recent_max
        """,
    )
)

SITES = make_sites(4)


def shown(records: list[Record], tmp_path: Path, **options: object) -> dict[str, float]:
    """Every series of a scrape after these records, as `name{labels in order}`."""
    sink = PrometheusSink(None, **options)  # type: ignore[arg-type]
    sink._run = make_run(tmp_path)
    for record in records:
        sink.write(record)
    return scrape(sink)


def scrape(sink: PrometheusSink) -> dict[str, float]:
    """The series of a sink by name and sorted labels, without the `gradwatch_`."""
    found = {}
    for (name, labels), value in read(sink.render()).items():
        inside = ",".join(f"{key}={text}" for key, text in sorted(labels))
        found[name.removeprefix("gradwatch_") + (f"{{{inside}}}" if inside else "")] = value
    return found


# -- the table -------------------------------------------------------------------------------------------


def test_everything_specified_is_in_the_catalogue() -> None:
    """No metric that dashboards and alerts are to be built on is missing."""
    names = [metric.name for metric in METRICS]
    assert {f"gradwatch_{name}" for name in SPECIFIED} <= {*names}
    assert len({*names}) == len(names)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_and_help_follow_the_rules_of_the_field(metric: Metric) -> None:
    """What promtool and the Prometheus naming guide ask, plus our own: HELP is one sentence."""
    assert re.fullmatch(r"gradwatch_[a-z]+(_[a-z]+)*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert not metric.name.endswith(("_count", "_sum", "_bucket", "_created"))
    assert re.fullmatch(r"[^\n]{15,110}\.", metric.help)
    assert metric.source
    assert (metric.kind == "histogram") == bool(metric.buckets)
    assert list(metric.buckets) == sorted(set(metric.buckets))
    forbidden = {"le", "quantile", "optimizer", "param_group", "job", "instance"}
    # run_id and rank are target labels; in a metric they would clash with service discovery.
    forbidden |= set() if metric.name == "gradwatch_run_info" else {"run_id", "rank"}
    assert not forbidden & set(metric.labels)
    assert all(re.fullmatch(r"[a-z_]+", label) for label in metric.labels)


def test_the_catalogue_documents_itself() -> None:
    """One row per metric, in the order of the scrape."""
    named = re.findall(r"^\| `(gradwatch_\w+)`", documentation(), re.M)
    assert named == [metric.name for metric in METRICS]


def test_every_metric_can_be_shown(tmp_path: Path) -> None:
    """A run in which everything happens shows every family of the table; none is a dead letter."""
    sink = PrometheusSink(None)
    sink.open(make_run(tmp_path), sink._health)
    sink._health.mark("engine", True)
    sink._health.set_inactive({"rule": "matches no parameter"})
    sink._health.counts(lambda: {**asdict(Taken()), "watched": 0, "waiting": 0, "under_way": 0}, dict)
    columns = {"zero_fraction": Column(np.zeros(4, np.float32), np.ones(4, bool))}
    record = make_record(SITES, loss_scale=1024.0, columns=columns)
    scalars = {"loss": 0.7, "lr": 1e-3, "accuracy": 0.5, "noise_scale": 2.0}
    record = replace(record, snapshot=replace(record.snapshot, scalars=scalars))
    sink.write(replace(record, checkpoint=CheckpointHealth(True, 0)))
    view = replace(sink.view(), end=RunEnd("finished", 1_700_000_000.0))
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for name, _ in read(render(families(view)))}
    assert names == {metric.name for metric in METRICS}


def test_values_of_the_script_s_own_are_bounded(tmp_path: Path) -> None:
    """Fifty names of a step are shown, whatever they are, and none of those that gradwatch gives itself."""
    sink = PrometheusSink(None)
    sink.open(make_run(tmp_path), sink._health)
    record = make_record(SITES)
    scalars = {f"name {k} \n": float(k) for k in range(80)} | {
        "loss": 1.0,
        "scaler_skip": 0.0,
        "observed_only": 1.0,
    }
    sink.write(replace(record, snapshot=replace(record.snapshot, scalars=scalars)))
    found = [name for name, _ in read(render(families(sink.view()))) if name == "gradwatch_observed_value"]
    assert len(found) == 50


def test_the_last_value_is_shown_until_there_is_another(tmp_path: Path) -> None:
    """A validation accuracy that comes now and then is there at every scrape, and is the newest."""
    sink = PrometheusSink(None)
    sink.open(make_run(tmp_path), sink._health)
    shown = []
    for step, scalars in enumerate([{}, {"accuracy": 0.5}, {"loss": 1.0}, {"accuracy": 0.75}, {}]):
        sink.write(make_record(SITES, step=step, scalars=scalars))
        shown.append(scrape(sink).get("observed_value{name=accuracy}"))
    assert shown == [None, 0.5, 0.5, 0.75, 0.75]


# -- from the start --------------------------------------------------------------------------------------


def test_every_counter_of_every_rule_exists_before_the_first_step(tmp_path: Path) -> None:
    """`increase()` sees the first firing only if there was a 0 before it."""
    series = shown([], tmp_path)
    for rule in RULES:
        assert series[f"rule_firings_total{{kind={rule.kind},rule={rule.id},severity={rule.severity}}}"] == 0
        assert series[f"rule_active{{rule={rule.id}}}"] == 0
        for action in rule.actions:
            assert series[f"actions_total{{action={action},rule={rule.id}}}"] == 0
    for name in ("steps", "nonfinite_steps", "nonfinite_elements", "clipped_steps", "skipped_steps"):
        assert series[f"{name}_total"] == 0
    assert series["step_grad_norm_count"] == 0
    assert "grad_norm" not in series  # absence, not a made-up 0


# -- from Records to numbers -----------------------------------------------------------------------------


def test_gauges_show_the_last_step(tmp_path: Path) -> None:
    """Norms in total, applied, per group and per parameter; a parameter without a gradient has no series."""
    norm = np.array([3.0, 4.0, 0.0, 12.0], np.float32)
    series = shown([make_record(SITES), make_record(SITES, norm, calls=[1, 1, 1, 0], applied=0.5)], tmp_path)
    assert series["grad_norm"] == 5
    assert series["grad_norm_applied"] == 2.5
    assert series["group_grad_norm{group=embed}"] == 5
    assert series["group_grad_norm{group=rest}"] == 0
    assert series["param_grad_norm{group=embed,param=layers.1.weight}"] == 4
    assert "param_grad_norm{group=rest,param=layers.3.weight}" not in series
    assert series["steps_total"] == 2
    assert series["clipped_steps_total"] == 1
    assert series["params"] == series["params_exported"] == 4


def test_columns_of_parameters_show_what_was_measured_last(tmp_path: Path) -> None:
    """Read in turns, they are of several steps: each parameter's last value stays, also past a step without any."""
    rng, sink = np.random.default_rng(0), PrometheusSink(None, params="all", max_series=100)
    sink._run = make_run(tmp_path)
    expected: dict[str, float] = {}
    for step in range(60):
        columns = {}
        for name in ("update_ratio", "zero_fraction", "nonfinite", "rank_norm"):
            present = rng.random(4) < 0.3
            values = rng.random(4).astype(np.float32)
            if rng.random() < 0.6 and present.any():
                columns[name] = Column(values, present)
        sink.write(make_record(SITES, step=step, columns=columns))
        for name, k in itertools.product(columns.keys() & {"update_ratio", "zero_fraction"}, range(4)):
            if columns[name].present[k]:
                group = "embed" if k < 2 else "rest"
                key = f"param_column{{column={name},group={group},param={SITES.names[k]}}}"
                expected[key] = float(columns[name].values[k])
        if step % 7 == 0:
            series = scrape(sink)
            found = {key: value for key, value in series.items() if key.startswith("param_column{")}
            assert found == pytest.approx(expected)
            assert series["param_column_series_dropped"] == 0
    assert len(expected) == 8


def test_columns_take_a_bounded_number_of_series(tmp_path: Path) -> None:
    """Only of parameters that are shown, `max_series` of them for the sink's life; what is left out is counted."""
    everywhere = Column(np.full(4, 0.25, np.float32), np.ones(4, bool))
    columns = dict.fromkeys(("max_abs", "update_ratio", "zero_fraction"), everywhere)
    sink = PrometheusSink(None, params="all", max_series=5)
    sink._run = make_run(tmp_path)
    for names in (SITES.names, ("a", "b", "c", "d")):  # the second model's are too many
        sink.write(make_record(replace(SITES, names=names), columns=columns))
        series = scrape(sink)
        assert sum(key.startswith("param_column{") for key in series) <= 5
    assert series["param_column_series_dropped"] > 0
    off = shown([make_record(SITES, columns=columns)], tmp_path, params="off")
    assert not any(key.startswith("param_column{") for key in off)


def test_a_group_without_a_gradient_has_no_series(tmp_path: Path) -> None:
    """Absence is never shown as a number."""
    series = shown([make_record(SITES, calls=[0, 0, 1, 1])], tmp_path)
    assert "group_grad_norm{group=embed}" not in series
    assert series["group_grad_norm{group=rest}"] == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_one_nan_is_counted_and_poisons_nothing(broken: float, tmp_path: Path) -> None:
    """Counters and histograms stay finite and go on counting after a non-finite step."""
    records = [make_record(SITES), make_record(SITES, [broken, 1, broken, 1]), make_record(SITES)]
    series = shown(records, tmp_path)
    assert series["nonfinite_steps_total"] == 1
    assert series["nonfinite_elements_total"] == 2
    assert series["step_grad_norm_count"] == series["step_grad_norm_bucket{le=+Inf}"] == 2
    assert series["step_grad_norm_sum"] == 4
    assert series["steps_total"] == 3
    assert series["clipped_steps_total"] == 0


def test_elements_are_counted_where_they_were_measured(tmp_path: Path) -> None:
    """The counted column wins; a norm that merely overflows float32 is not a non-finite step."""
    present = np.array([True, True, False, True])
    counted = Column(np.array([10, 0, 99, 5], np.float32), present)
    overflow = Column(np.zeros(4, np.float32), np.ones(4, bool))
    series = shown(
        [
            make_record(SITES, [math.nan, 1, 1, math.inf], columns={"nonfinite": counted}),
            make_record(SITES, [math.inf, 1, 1, 1], columns={"nonfinite": overflow}),
        ],
        tmp_path,
    )
    assert series["nonfinite_elements_total"] == 15
    assert series["nonfinite_steps_total"] == 1


def test_firings_and_actions_are_counted_once_each(tmp_path: Path) -> None:
    """Only `firing` is a firing; a shadow action is not an action."""
    kinds = ("pending", "firing", "repeat", "resolved", "firing")
    records = [make_record(SITES, events=(make_event(kind),), decision=skip()) for kind in kinds]
    records.append(make_record(SITES, firing=["non-finite"], decision=skip(shadow=True)))
    series = shown(records, tmp_path)
    assert series["rule_firings_total{kind=nonfinite,rule=non-finite,severity=critical}"] == 2
    assert series["actions_total{action=skip_step,rule=non-finite}"] == 5
    assert series["shadow_actions_total{action=skip_step,rule=non-finite}"] == 1
    assert series["skipped_steps_total"] == 5
    assert series["rule_active{rule=non-finite}"] == 1
    assert series["rule_active{rule=exploding}"] == 0


def test_own_cost_and_stall_threshold(tmp_path: Path) -> None:
    """Overhead is a share of step time; a stall is 20 average steps but never under 300 s."""
    series = shown([make_record(SITES, overhead=0.02, step_seconds=s) for s in (None, 1.0, 1.0)], tmp_path)
    assert series["overhead_ratio"] == pytest.approx(0.02)
    assert series["stall_threshold_seconds"] == 300
    assert series["observe_duration_seconds_count"] == 3
    assert series["step_duration_seconds_count"] == 2
    slow = shown([make_record(SITES, step_seconds=60.0) for _ in range(50)], tmp_path)
    assert slow["stall_threshold_seconds"] == pytest.approx(1200)


@given(
    st.lists(st.floats(width=32) | st.sampled_from([math.nan, math.inf, 0.0, 1e-8, 1e4, 2e4]), max_size=60)
)
def test_counters_are_finite_and_never_fall(norms: list[float]) -> None:
    """Whatever the norms, and in whatever order."""
    sites, run_totals, before = make_sites(1), RunTotals.of(RULES), (0,) * 6
    for step, norm in enumerate(norms):
        run_totals.observe(make_record(sites, abs(norm), overhead=norm, step_seconds=norm), float(step))
        now = (
            run_totals.steps,
            run_totals.nonfinite_steps,
            run_totals.nonfinite_elements,
            run_totals.clipped_steps,
            sum(run_totals.grad_norm.counts),
            run_totals.grad_norm.sum,
        )
        assert all(math.isfinite(value) and value >= old for value, old in zip(now, before, strict=True))
        assert math.isfinite(run_totals.overhead_ratio)
        before = now
    finite = [abs(norm) for norm in norms if math.isfinite(norm)]
    cumulated = list(itertools.accumulate(run_totals.grad_norm.counts))
    assert cumulated[:-1] == [sum(norm <= bound for norm in finite) for bound in run_totals.grad_norm.bounds]
    assert cumulated[-1] == len(finite)


@given(st.lists(st.tuples(st.floats(0, 30), st.floats(allow_nan=True)), max_size=80))
def test_the_recent_maximum_is_the_maximum_of_the_last_minute(steps: list[tuple[float, float]]) -> None:
    """Against the definition, in whole seconds; NaN does not count."""
    recent, now, seen = RecentMax(60), 0.0, []
    for pause, value in steps:
        now += pause
        recent.observe(value, now)
        seen.append((math.floor(now), value))
        window = [v for at, v in seen if at > math.floor(now) - 60 and not math.isnan(v)]
        assert recent.value() == max(window) if window else math.isnan(recent.value())
        assert len(recent._slots) <= 61


# -- several optimizers ----------------------------------------------------------------------------------


def test_the_optimizer_label_appears_with_the_second_optimizer(tmp_path: Path) -> None:
    """One optimizer, no label; from the second on every per-optimizer series says whose it is."""
    one = shown([make_record(SITES, optimizer=0)], tmp_path)
    assert not any("optimizer=" in series for series in one)
    two = shown([make_record(SITES, optimizer=i, step=i) for i in (0, 1, 1)], tmp_path)
    assert two["steps_total{optimizer=0}"] == 1
    assert two["steps_total{optimizer=1}"] == 2
    assert two["param_grad_norm{group=embed,optimizer=1,param=layers.0.weight}"] == 1
    for metric in METRICS:
        found = [name for name in two if re.match(rf"{metric.name[10:]}(_bucket|_sum|_count)?(\{{|$)", name)]
        assert all(("optimizer=" in name) == metric.per_optimizer for name in found), metric.name


def test_a_new_optimizer_every_epoch_does_not_grow_for_ever(tmp_path: Path) -> None:
    """The stalest optimizer goes, and gives its parameters' series back."""
    sink = PrometheusSink(None, max_series=4 * MAX_OPTIMIZERS)
    for i in range(10 * MAX_OPTIMIZERS):
        sink.write(make_record(SITES, optimizer=i, wall_time=1e9 + i))
    series = scrape(sink)
    steps = [name for name in series if name.startswith("steps_total")]
    assert len(steps) == MAX_OPTIMIZERS
    assert f"steps_total{{optimizer={10 * MAX_OPTIMIZERS - 1}}}" in steps
    assert sum(name.startswith("param_grad_norm") for name in series) == 4 * MAX_OPTIMIZERS


def test_the_noise_scale_stays_until_ranks_compare_again() -> None:
    """Ranks compare their gradients at some steps only: in between, and in blocks of steps, the last value is told."""
    sites, run_totals = make_sites(), RunTotals()
    run_totals.observe_all([make_record(sites, step=0), make_record(sites, step=1)], 0.0)
    assert run_totals.noise_scale is None
    block = [
        make_record(sites, step=step, scalars={"noise_scale": 7.0} if step == 3 else {}) for step in (2, 3, 4)
    ]
    run_totals.observe_all(block, 1.0)
    run_totals.observe(make_record(sites, step=5), 2.0)
    assert run_totals.noise_scale == 7.0
