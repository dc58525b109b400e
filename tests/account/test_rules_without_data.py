"""Rules that never had data: what is said of them is what the engine did."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradwatch
from gradwatch.account.rules_without_data import RulesWithoutData
from gradwatch.engine import Engine
from gradwatch.rules.files import parse_rules
from gradwatch.session.binding.rule_bindings import reads_of
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
    engine = Engine(RULES).bind(SITES)
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
        without_data.observe(snapshot)
        verdict, state = engine.evaluate(state, snapshot)
        evaluated |= verdict.breaching.keys()
    assert without_data.reasons().keys() == {rule.id for rule in RULES.rules} - evaluated


def test_every_optimizer_is_asked_about_its_own_rules() -> None:
    """A rule that only the second optimizer has is not fed by the first one's steps, and is done once fed by any."""
    engine, without_data = Engine(RULES).bind(SITES), RulesWithoutData()
    reads = reads_of(engine)
    without_data.bind(0, {"norm": reads["norm"]})
    without_data.bind(1, {"norm": reads["norm"], "rare": reads["rare"]})
    without_data.observe(make_snapshot(SITES, 0, [1.0] * 4))
    assert without_data.reasons() == {"rare": "no step at which it is evaluated was reached (every: 7)"}
    without_data.observe(make_snapshot(SITES, 14, [1.0] * 4, optimizer=1))
    without_data.bind(1, reads)
    assert without_data.reasons().keys() == {"loss", "scale", "large", "often", "nan"}
    assert without_data.reasons()["loss"].startswith(
        "no loss was observed (a backward started from C++ exposes none"
    )
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
