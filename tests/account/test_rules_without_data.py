"""Rules that never had data: what is said of them is what the engine did."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradwatch
from gradwatch.account import gaps
from gradwatch.account.rules_without_data import NO_OUTPUT, RulesWithoutData
from gradwatch.engine import Engine
from gradwatch.engine.bound_engine import BoundEngine
from gradwatch.engine.engine_state import EngineState
from gradwatch.engine.judged_steps.staggered_judging import NONE_IN_TURN
from gradwatch.records.snapshot import Snapshot
from gradwatch.records.verdict import Verdict
from gradwatch.rules.files import parse_rules
from gradwatch.session.binding.unread_columns import reads_of
from gradwatch.session.watch import session_of
from tests.engine.cases import everywhere, make_sites, make_snapshot
from tests.support.kept import Kept

RULES = parse_rules("""version: 1
rules:
  norm: {detect: {kind: above, of: norm, threshold: 0}}
  rare: {detect: {kind: above, of: norm, threshold: 0}, every: 7}
  loss: {detect: {kind: above, of: loss, threshold: 0}, every: 3}
  scale: {detect: {kind: above, of: loss_scale, threshold: 0}}
  large: {detect: {kind: above, of: max_abs, threshold: 0}, every: 5}
  often: {detect: {kind: above, of: max_abs, threshold: 0}, every: 2}
  nan: {detect: {kind: nonfinite}, every: 4}
""")
SITES = make_sites(4)
STARTS = {"norm": 9, "rare": 20, "loss": 30, "scale": 3, "large": 10, "often": 0, "nan": 40}
LATE = replace(
    RULES,
    rules=(
        *RULES.rules,
        *(replace(rule, id=f"late-{rule.id}", from_step=STARTS[rule.id]) for rule in RULES.rules),
    ),
)
ONE_STEP = st.fixed_dictionaries(
    {
        "loss": st.booleans(),
        "scale": st.booleans(),
        "max_abs": st.booleans(),
        "provisional": st.booleans(),
        "rejected": st.booleans(),
    }
)


@given(st.integers(0, 40), st.lists(ONE_STEP, max_size=12))
def test_a_rule_is_without_data_where_the_engine_never_evaluated_it(
    start: int, steps: list[dict[str, bool]]
) -> None:
    """Every rule breaches whatever it is evaluated on, so that its breaches are its evaluations."""
    engine = Engine(LATE).bind(SITES)
    state, without_data, evaluated = engine.init(), RulesWithoutData(), set[str]()
    without_data.bind(0, reads_of(engine))
    for step, has in enumerate(steps, start):
        counts = everywhere([1, 0, 0, 0])
        columns = {"nonfinite": counts, **({"max_abs": everywhere([1.0] * 4)} if has["max_abs"] else {})}
        scalars = {"scaler_skip": float(has["rejected"])} | ({"loss": 1.0} if has["loss"] else {})
        snapshot = make_snapshot(
            SITES,
            step,
            [float("nan"), 1.0, 1.0, 1.0],
            columns=columns,
            scalars=scalars,
            provisional=has["provisional"],
            loss_scale=2.0 if has["scale"] else None,
        )
        verdict, state = engine.evaluate(state, snapshot)
        without_data.observe(snapshot, state.in_turn)
        evaluated |= verdict.breaching.keys()
    assert without_data.reasons().keys() == {rule.id for rule in LATE.rules} - evaluated


@pytest.mark.parametrize(("loss", "missing"), [(1.0, set()), (float("nan"), set()), (float("inf"), {"loss"})])
def test_a_rule_on_losses_that_are_not_finite_has_data_on_a_rejected_step(
    loss: float, missing: set[str]
) -> None:
    """As the engine judges it there, unless the loss is Inf; a rule on the level of the loss has none."""
    rules = parse_rules("""version: 1
rules:
  loss: {detect: {kind: loss_nonfinite}}
  level: {detect: {kind: above, of: loss, threshold: 0}}
""")
    engine, without_data = Engine(rules).bind(SITES), RulesWithoutData()
    without_data.bind(0, reads_of(engine))
    scalars = {"scaler_skip": 1.0, "loss": loss}
    without_data.observe(make_snapshot(SITES, 0, [1.0] * 4, scalars=scalars), NONE_IN_TURN)
    assert without_data.reasons().keys() == {"level"} | missing


def test_every_optimizer_is_asked_about_its_own_rules() -> None:
    """A rule that only the second optimizer has is not fed by the first one's steps, and is done once fed by any."""
    engine, without_data = Engine(RULES).bind(SITES), RulesWithoutData()
    reads = reads_of(engine)
    without_data.bind(0, {"norm": reads["norm"]})
    without_data.bind(1, {"norm": reads["norm"], "rare": reads["rare"]})
    without_data.observe(make_snapshot(SITES, 0, [1.0] * 4), NONE_IN_TURN)
    assert without_data.reasons() == {"rare": "the optimizer at whose steps it is judged took none"}
    without_data.observe(make_snapshot(SITES, 13, [1.0] * 4, optimizer=1), NONE_IN_TURN)
    assert without_data.reasons() == {"rare": "no step at which it is evaluated was reached (every: 7)"}
    without_data.observe(make_snapshot(SITES, 14, [1.0] * 4, optimizer=1), NONE_IN_TURN)
    without_data.bind(1, reads)
    assert without_data.reasons().keys() == {"loss", "scale", "large", "often", "nan"}
    assert without_data.reasons()["loss"].startswith(
        "no loss was observed (a backward started from C++ exposes none"
    )
    assert without_data.reasons()["large"] == "no step at which it is evaluated was reached (every: 5)"
    without_data.observe(make_snapshot(SITES, 16, [1.0] * 4, optimizer=1), NONE_IN_TURN)
    assert without_data.reasons()["large"] == "max_abs was never measured"


def test_a_rule_whose_steps_never_came_is_in_the_account(tmp_path: Path) -> None:
    """`every: 1000` of a column that another rule has read all the time: status and account name it."""
    rules = parse_rules("""version: 1
rules:
  often: {detect: {kind: update_ratio, above: 1e9}, every: 1}
  rare: {detect: {kind: above, of: update_ratio, threshold: 1e9}, scope: total, every: 1000}
""")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gradwatch.watch(model, optimizer, rules=rules, run_dir=tmp_path, sinks=[Kept()]) as gw:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        reason = "no step at which it is evaluated was reached (every: 1000)"
        assert session_of(gw).account().no_data == {"rare": reason}


def test_an_optimizer_that_never_steps_gives_no_reason(tmp_path: Path) -> None:
    """Of two optimizers one is idle: the reason is that of the one that steps."""
    rules = parse_rules("""version: 1
rules:
  a: {detect: {kind: below, of: observed.accuracy, threshold: 0.5}}
  histograms: {detect: {kind: above, of: norm, threshold: 1e9}}
histograms: {params: ["nowhere"]}
""")
    first, second = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (first, second)]
    with gradwatch.watch([first, second], optimizers, rules=rules, run_dir=tmp_path, sinks=[Kept()]) as gw:
        for _ in range(4):
            gw.observe(acc=0.9)
            optimizers[0].zero_grad()
            first(torch.ones(2, 4)).sum().backward()
            optimizers[0].step()
        assert session_of(gw).account().no_data == {
            "a": "`gw.observe(accuracy=…)` gave no number before a step; observed: acc",
            "histograms:gradients": "`histograms: params:` matches no parameter",  # the section, not the rule
        }


COSTLY = parse_rules("""version: 1
groups: {frozen: {params: ["*.0.weight"]}}
rules:
  weights: {detect: {kind: above, of: weight_norm, threshold: 1e9}}
  gradients: {detect: {kind: above, of: max_abs, threshold: 1e9}, every: 1}
  later: {detect: {kind: above, of: update_norm, threshold: 1e9}, scope: total, every: 100}
""")


def no_data(training: Callable[[nn.Module], None], path: Path) -> Mapping[str, str]:
    """The rules of `COSTLY` without data after a training, with their reasons."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with gradwatch.watch(model, rules=COSTLY, run_dir=path, sinks=[Kept()]) as gw:
        training(model)
        return session_of(gw).account().no_data


def by_hand(model: nn.Module) -> None:
    """A loop without an optimizer."""
    for _ in range(5):
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        with torch.no_grad():
            for param in model.parameters():
                assert param.grad is not None
                param -= 0.1 * param.grad


def inside_backward(model: nn.Module) -> None:
    """An optimizer for each parameter, which steps as soon as its gradient is there."""
    for param in model.parameters():
        optimizer = torch.optim.SGD([param], 0.1)

        def step(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        param.register_post_accumulate_grad_hook(step)
    for _ in range(5):
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize(
    ("training", "why"),
    [(by_hand, "no torch optimizer steps here"), (inside_backward, "here it steps inside the backward")],
)
def test_whole_tensors_are_not_read_after_the_weights_have_moved(
    training: Callable[[nn.Module], None], why: str, tmp_path: Path
) -> None:
    """A norm read late would be that of another weight: the rules are named as without data, with the reason."""
    reason = f"columns of whole tensors are read just before the optimizer's step, and {why}"
    assert no_data(training, tmp_path) == dict.fromkeys(("weights", "gradients", "later"), reason)


def test_a_column_that_came_for_others_is_no_data(tmp_path: Path) -> None:
    """The rule's own parameters never had a gradient; another's cadence was never reached: each has its own reason."""
    rules = parse_rules("""version: 1
groups: {first: {params: ["0.*"]}}
rules:
  all: {detect: {kind: above, of: max_abs, threshold: 1e9}, every: 1}
  first: {detect: {kind: above, of: max_abs, threshold: 1e9}, every: 1, groups: [first]}
  norm: {detect: {kind: above, of: norm, threshold: 1e9}, groups: [first]}
  turns: {detect: {kind: above, of: max_abs, threshold: 1e9}, every: 2, groups: [first]}
  later: {detect: {kind: above, of: update_norm, threshold: 1e9}, scope: total, every: 100}
""")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gradwatch.watch(model, optimizer, rules=rules, run_dir=tmp_path, sinks=[Kept()]) as gw:
        for _ in range(5):
            optimizer.zero_grad()
            model[1](torch.ones(2, 4)).sum().backward()
            optimizer.step()
        found = session_of(gw).account().no_data
    assert found == {
        "first": "none of what it is about had a value of max_abs",
        "norm": "none of what it is about had a value of norm",
        "turns": "none of what it is about had a value of max_abs",
        "later": "no step at which it is evaluated was reached (every: 100)",
    }


def test_parameters_that_are_absent_at_each_of_their_turns_are_judged(tmp_path: Path) -> None:
    """Two branches in turn, at every: 2: what is absent at its turn is judged at the next step, not never."""
    rules = parse_rules(
        "version: 1\nrules:\n"
        + "".join(
            f"  {of}: {{detect: {{kind: above, of: {of}, threshold: -1}}, every: 2, for: 1}}\n"
            for of in ("max_abs", "update_norm", "activation_mean")
        )
        + "modules: {tap: output, names: ['*']}\n"
    )
    torch.manual_seed(0)
    branches = nn.ModuleList([nn.Sequential(nn.Linear(4, 4, bias=False), nn.Sigmoid()) for _ in range(2)])
    optimizer, kept = torch.optim.SGD(branches.parameters(), 0.1), Kept()
    with gradwatch.watch(branches, optimizer, rules=rules, run_dir=tmp_path, sinks=[kept]):
        for step in range(20):
            optimizer.zero_grad()
            branches[step % 2](torch.rand(3, 4)).sum().backward()
            optimizer.step()
    judged: dict[str, dict[str, int]] = {rule.id: {} for rule in rules.rules}
    for record in kept.records:
        for rule, mask in record.verdict.breaching.items():
            for site in np.flatnonzero(mask):
                name = record.snapshot.sites.names[site]
                judged[rule][name] = judged[rule].get(name, 0) + 1
    weights, modules = ("0.0.weight", "1.0.weight"), ("0", "0.0", "0.1", "1", "1.0", "1.1")
    assert {name: count >= 9 for name, count in judged["max_abs"].items()} == dict.fromkeys(weights, True)
    # What is overdue is copied at one step and compared at the next; of modules the next call but one is read.
    assert {name: count >= 4 for name, count in judged["update_norm"].items()} == dict.fromkeys(weights, True)
    assert {name: count >= 4 for name, count in judged["activation_mean"].items()} == dict.fromkeys(
        modules, True
    )


IN_TURNS = parse_rules("""version: 1
modules: {tap: output, names: ["*"]}
rules:
  saturated: {detect: {kind: above, of: activation_saturation, threshold: 1e9}, scope: module}
  dead: {detect: {kind: above, of: activation_near_zero, threshold: 1e9}, scope: module}
  variance: {detect: {kind: above, of: running_var_max, threshold: 1e9}, scope: module}
""")


def reasons_of_modules(steps: int, path: Path, training: bool = True) -> Mapping[str, str]:
    """The account of a model whose modules take turns: the Tanh at step 4, the normalisation at step 3."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).train(training)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gradwatch.watch(model, optimizer, rules=IN_TURNS, run_dir=path, sinks=[Kept()]) as gw:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
        return session_of(gw).account().no_data


def test_modules_whose_turn_is_to_come_are_no_reason(tmp_path: Path) -> None:
    """After two steps neither the Tanh nor the normalisation has been looked at: that there is none would be wrong."""
    to_come = "nothing that has had its turn has a value of {}, and not all had it yet (every: 10)"
    assert reasons_of_modules(2, tmp_path) == {
        "saturated": to_come.format("activation_saturation"),
        "variance": to_come.format("running_var_max"),
    }
    assert reasons_of_modules(8, tmp_path) == {}


def test_the_account_of_a_model_in_eval_mode_says_so(tmp_path: Path) -> None:
    """Fine-tuning with all layers in eval mode: activations are read in training mode only."""
    reasons = reasons_of_modules(12, tmp_path, training=False)
    assert reasons["dead"] == NO_OUTPUT
    assert reasons["saturated"].startswith(
        "no tapped Tanh, Sigmoid, Hardtanh, ReLU6 or Hardsigmoid was called"
    )


def test_a_condition_has_data_where_all_its_rules_have() -> None:
    """Until then it is listed with what they lack, also what judges nothing in this model."""
    rules = parse_rules("""version: 1
groups: {none: {params: ["nothing.*"]}}
rules:
  norm: {detect: {kind: above, of: norm, threshold: 0}}
  loss: {detect: {kind: above, of: loss, threshold: 0}}
  off: {detect: {kind: above, of: norm, threshold: 0}, groups: [none]}
  joined: {when: {all: [norm, {not: loss}]}}
  joins: {when: {any: [joined, norm]}}
  misses: {when: {any: [norm, off]}}
  never: {when: {all: [norm, off]}}
""")
    engine, without_data = Engine(rules).bind(SITES), RulesWithoutData()
    without_data.bind(0, reads_of(engine))
    without_data.observe(make_snapshot(SITES, 0, [1.0] * 4), NONE_IN_TURN)
    reasons = without_data.reasons()
    assert sorted(reasons) == ["joined", "joins", "loss", "misses"]
    assert reasons["joined"] == f"its condition is not known without `loss` ({reasons['loss']})"
    assert reasons["joins"] == reasons["joined"]
    assert (
        reasons["misses"] == "its condition is not known without `off` (matches no parameter of groups: none)"
    )
    assert "no data here for 'off'" in engine.inactive["never"]
    without_data.observe(make_snapshot(SITES, 1, [1.0] * 4, scalars={"loss": 1.0}), NONE_IN_TURN)
    assert sorted(without_data.reasons()) == ["misses"]


def test_a_condition_waits_for_the_warm_up_of_its_rules() -> None:
    """And is listed with it."""
    rules = parse_rules("""version: 1
rules:
  spike: {detect: {kind: spike}, warmup: 5}
  joined: {when: {not: spike}}
""")
    engine = Engine(rules).bind(SITES)
    assert engine.warming_up(engine.init()) == {
        "spike": "warm-up not over: 0 of 5 samples",
        "joined": "its condition is not known without `spike` (warm-up not over: 0 of 5 samples)",
    }


OF_CLIPS = {"clip-always-bites", "clip-never-bites", "clip-of-scaled", "clip-without-effect"}


@pytest.mark.parametrize("clipped", ["never", "by norm", "by value"])
def test_rules_about_clips_have_data_from_the_first_clip_on(clipped: str) -> None:
    """Their silence says nothing about a loop that does not clip, or whose clips have no norm; the account says so."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with gradwatch.watch(model, optimizer, rules="default", sinks=[], strict=True) as gw:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            if clipped == "by norm":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            elif clipped == "by value":
                nn.utils.clip_grad_value_(model.parameters(), 1.0)
            optimizer.step()
        no_data = session_of(gw).account().no_data
    expected = {"never": OF_CLIPS, "by norm": set(), "by value": {"clip-always-bites", "clip-never-bites"}}
    assert {rule for rule, why in no_data.items() if "clip" in why} == expected[clipped]


def test_rules_about_the_loop_have_no_data_where_no_optimizer_steps() -> None:
    """A loop that moves the weights itself is observed; what it does between its steps is not, which is said."""
    model = nn.Linear(4, 1)
    with gradwatch.watch(model, rules="default", sinks=[], strict=True) as gw:
        for _ in range(5):
            model.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            for param in model.parameters():
                param.data.sub_(0.01 * param.grad)
        no_data = session_of(gw).account().no_data
    assert "no torch optimizer steps here" in no_data["no-zero-grad"]
    assert "no torch optimizer steps here" in no_data["discarded-before-step"]


@pytest.mark.parametrize("how", ["learning rate", "rebaseline", "unfrozen"])
def test_a_rule_that_warms_up_anew_has_had_data(how: str) -> None:
    """Ten steps after its baselines began anew, for whatever reason, it waits; it has judged all steps before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    model[0].requires_grad_(how != "unfrozen")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gradwatch.watch(model, optimizer, rules="default", sinks=[Kept()], strict=True) as gw:
        for step in range(90):
            if step == 80:
                if how == "learning rate":
                    optimizer.param_groups[0]["lr"] = 1e-4
                elif how == "rebaseline":
                    gw.rebaseline("on purpose")
                else:
                    model[0].requires_grad_(True)
            optimizer.zero_grad()
            (model(torch.randn(8, 4)) - torch.randn(8, 1)).square().mean().backward()
            optimizer.step()
        without_data = session_of(gw).account().no_data
    assert without_data["drift"].startswith("warm-up not over: ")
    assert "total-norm-spike" not in without_data
    assert "norm-spike" not in without_data


@pytest.mark.parametrize("late", [0, 1])
def test_a_rule_of_one_optimizer_is_warming_up_whatever_the_other_does(late: int) -> None:
    """Muon beside AdamW: a rule on parameters of one of them is listed until it is warm there."""
    rules = parse_rules("""version: 1
groups: {ours: {params: ["0.*"]}}
rules:
  own: {detect: {kind: spike, of: norm}, groups: [ours], warmup: 20}
  all: {detect: {kind: spike, of: norm}, warmup: 8}
""")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(layer.parameters(), 0.01) for layer in model]
    with gradwatch.watch(model, optimizers, rules=rules, sinks=[], strict=True) as gw:
        for step in range(10):
            model.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            for optimizer in optimizers if step else optimizers[late : late + 1]:
                optimizer.step()
        account = session_of(gw).account()
    assert account.no_data.keys() == {"own"}
    assert account.no_data["own"].endswith("of 20 samples")


class InterruptedStepError(Exception):
    """What a script raises from a signal handler of its own."""


@pytest.mark.parametrize("error", [ValueError("ours"), InterruptedStepError()])
def test_steps_that_an_error_ended_are_told(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of gradwatch's as it judges, or what the script raises there: watched, and no verdict."""
    rules = parse_rules(
        "version: 1\nrules: {r: {detect: {kind: above, of: norm, threshold: 1e9}, do: [skip_step]}}\n"
    )
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    judge = BoundEngine.evaluate
    asked: list[int] = []

    def evaluate(self: BoundEngine, state: EngineState, snapshot: Snapshot) -> tuple[Verdict, EngineState]:
        asked.append(snapshot.step)
        if snapshot.step == 4:
            raise error
        return judge(self, state, snapshot)

    def refuse(*_: object) -> None:
        return None

    monkeypatch.setattr(BoundEngine, "evaluate", evaluate)
    monkeypatch.setattr(BoundEngine, "evaluate_many", refuse)
    with gradwatch.watch(model, optimizer, rules=rules, sinks=[]) as gw:
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            with contextlib.suppress(InterruptedStepError):
                optimizer.step()
        account = session_of(gw).account()
    assert 4 in asked
    assert (account.watched.steps, account.watched.unjudged) == (8, 1)
    assert any("1 watched step could not be judged" in gap for gap in gaps(account))


def test_a_first_step_that_is_not_reached_is_a_reason_of_its_own() -> None:
    """In the account, the status and the metric, also of a condition; it goes with the step."""
    rules = parse_rules("""version: 1
rules:
  high: {detect: {kind: above, of: total_norm, threshold: 1e9}, from_step: 6}
  never: {detect: {kind: spike, of: total_norm}, from_step: 5000}
  calm: {when: {not: {any: [high]}}, from_step: 9}
""")
    model = nn.Linear(3, 1)
    optimizer, said = torch.optim.SGD(model.parameters(), 0.0), dict[int, dict[str, str]]()
    with gradwatch.watch(model, optimizer, rules=rules, sinks=[Kept()], strict=True) as gw:
        for step in range(11):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            gw.flush()
            said[step] = dict(session_of(gw).health.without_data())
    assert said[3] == {
        "high": "before its from_step: 6 (the last step was 3)",
        "never": "before its from_step: 5,000 (the last step was 3)",
        "calm": "its condition is not known without `high` (before its from_step: 6 (the last step was 3))",
    }
    assert said[7].keys() == {"never", "calm"}
    assert said[7]["calm"] == "before its from_step: 9 (the last step was 7)"
    assert said[10].keys() == {"never"}
