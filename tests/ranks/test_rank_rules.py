"""Rules on ranks in the engine: judged at a glance as in full, named by rank and parameter, inactive alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.capture.snapshot_assembly import appended
from gradwatch.detectors import RankOutlier, Sample
from gradwatch.engine import BoundEngine, Engine
from gradwatch.engine.unsupported_rules import refuse
from gradwatch.errors import AttachError, RuleFileError
from gradwatch.records.snapshot import Column, Snapshot
from gradwatch.rules.files import parse_rules
from gradwatch.session.binding.rank_requirements import rank_requirements, refused_on_ranks, refused_on_shards
from tests.engine.cases import make_sites, make_snapshot
from tests.ranks.situations import AT_EACH_STEP
from tests.support.examples import examples

SIZE, WORLD = 6, 4


def bound(every: int = 1, world: int = WORLD) -> BoundEngine:
    """The default pack with sites for the ranks, whose rules are judged at each step, or as they are."""
    sites = appended(make_sites(SIZE), tuple(f"rank {k}" for k in range(world)), "rank")
    return Engine(parse_rules(AT_EACH_STEP if every == 1 else "version: 1\nextends: [default]"), rank=2).bind(
        sites
    )


def by_rank(values: Any) -> Column:
    """A column on the last W sites."""
    here = np.concatenate([np.zeros(SIZE, bool), np.ones(len(values), bool)])
    return Column(np.concatenate([np.zeros(SIZE), np.asarray(values, np.float64)]), here)


def step_of(engine: BoundEngine, step: int, norms: Any, ranks: Any, mismatch: Any, site: int = 1) -> Snapshot:
    """One step: parameters, local norms by rank, parameters that differ by rank."""
    columns = {
        "rank_norm": by_rank(ranks),
        "rank_mismatch": by_rank(mismatch),
        "rank_site": by_rank([float(site)] * len(ranks)),
    }
    calls = np.array([1] * SIZE + [0] * len(ranks), np.int32)
    padded = [*norms, *[0.0] * len(ranks)]
    total = float(np.sqrt(np.square(norms).sum()))
    return make_snapshot(
        engine.sites, step, padded, columns=columns, calls=calls, total_norm=total, total_norm_applied=total
    )


@settings(max_examples=examples(3))
@given(st.sampled_from([1, 10]), st.integers(0, 10**6))
def test_a_glance_sees_what_judging_sees(every: int, seed: int) -> None:
    """Same events and bit-equal states at every step, whatever ranks do."""
    engine, rng = bound(every), np.random.default_rng(seed)
    state = engine.init()
    for step in range(120):
        ranks = np.exp(rng.normal(0, 0.2, WORLD))
        if rng.random() < 0.05:
            ranks[rng.integers(WORLD)] *= rng.choice([np.nan, np.inf, 1e4, 0.0])
        mismatch = np.zeros(WORLD)
        mismatch[rng.integers(WORLD)] = rng.choice([0, 3], p=[0.97, 0.03])
        snapshot = step_of(engine, step, np.exp(rng.normal(0, 0.1, SIZE)), ranks, mismatch)
        quick, after = engine.evaluate(state, snapshot)
        slow, expected = engine.evaluate(replace(state, ordinary=None, done=(), active=None), snapshot)
        assert repr(quick.events) == repr(slow.events)
        assert after.to_dict() == expected.to_dict()
        state = after


def test_healthy_ranks_are_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that talk at every step do not send every step through the judgement of single rules."""
    engine, rng = bound(), np.random.default_rng(0)
    state, judged, whole = engine.init(), [], engine._rule_by_rule
    monkeypatch.setattr(engine, "_rule_by_rule", lambda *args: judged.append(args[1].step) or whole(*args))
    for step in range(50):
        norms = 2 + rng.uniform(-0.01, 0.01, SIZE)
        snapshot = step_of(engine, step, norms, 1 + rng.uniform(0, 0.01, WORLD), np.zeros(WORLD))
        state = engine.evaluate(state, snapshot)[1]
    assert judged == [0]


def test_an_event_names_the_rank_and_its_parameter() -> None:
    """`{rank}` and `{param}` of a rank rule are the rank out of line and the parameter to look at there."""
    engine = bound()
    state = engine.init()
    for step in range(3):
        ranks = [1.0, 1.1, 0.9, 1.0 if step < 2 else np.nan]
        verdict, state = engine.evaluate(state, step_of(engine, step, [2.0] * SIZE, ranks, [0] * WORLD, 3))
    (event,) = [event for event in verdict.events if event.rule == "rank-outlier"]
    assert event.sites == ("rank 3",)
    assert event.first_cause == "layers.1.bias"
    assert event.description.startswith("Rank 3 contributes a gradient of norm nan by step 2")
    assert "layers.1.bias" in event.description


def test_a_rank_rule_is_inactive_where_there_is_one_rank() -> None:
    """No error, not even for a rule that is not optional: how many ranks there are shows at the first step."""
    rules = parse_rules("version: 1\nrules: {r: {detect: {kind: rank_outlier}}}")
    engine = Engine(rules)
    engine.check(make_sites(SIZE))
    assert "several ranks" in engine.bind(make_sites(SIZE)).inactive["r"]


@pytest.mark.parametrize("key", ["scope: total", "groups: [some]", "exclude: ['*']"])
def test_a_rank_rule_takes_no_selection(key: str) -> None:
    """Ranks are not parameters: choosing among these is refused at the key."""
    text = (
        "version: 1\ngroups: {some: {params: ['*']}}\n"
        f"rules:\n  r:\n    detect: {{kind: rank_mismatch}}\n    {key}\n"
    )
    with pytest.raises(RuleFileError, match="GW212") as refused:
        parse_rules(text)
    assert refused.value.problems[0].line == 6


def test_actions_on_what_one_rank_knows_are_refused() -> None:
    """Only where there are several ranks, and only where the rule acts."""
    rule = "version: 1\nrules: {r: {detect: {kind: above, of: norm_local, threshold: 1}, do: [skip_step]%s}}"
    acting, shadow = Engine(parse_rules(rule % "")), Engine(parse_rules(rule % ", mode: shadow"))
    assert refused_on_ranks(acting, 1) == refused_on_ranks(shadow, 2) == []
    with pytest.raises(AttachError, match="'r': acts on norm_local"):
        refuse(refused_on_ranks(acting, 2), acting.ruleset)
    assert rank_requirements(acting).refused
    assert not rank_requirements(shadow).refused


def test_an_action_on_what_shards_do_not_add_up_to_is_refused() -> None:
    """The largest element of a sharded parameter is not known to any rank: an action on it would never happen."""
    rule = "version: 1\nrules: {r: {detect: {kind: above, of: max_abs, threshold: 1}, do: [skip_step]%s}}"
    acting, shadow = Engine(parse_rules(rule % "")), Engine(parse_rules(rule % ", mode: shadow"))
    assert refused_on_shards(acting, make_sites(4), []) == refused_on_shards(shadow, make_sites(4), [1]) == []
    with pytest.raises(AttachError, match="'r': acts on max_abs"):
        refuse(refused_on_shards(acting, make_sites(4), [1]), acting.ruleset)


def test_wants_follow_the_rules() -> None:
    """A collective only for rules on ranks and for actions on the loss; a meeting for any action."""
    rule = "version: 1\nrules: {r: {detect: {kind: %s}%s}}"
    plain = rank_requirements(Engine(parse_rules(rule % ("nonfinite", ""))))
    acting = rank_requirements(Engine(parse_rules(rule % ("nonfinite", ", do: [skip_step]"))))
    lossy = rank_requirements(Engine(parse_rules(rule % ("loss_nonfinite", ", do: [skip_step]"))))
    ranked = rank_requirements(Engine(parse_rules(rule % ("rank_mismatch", ""))))
    assert (plain.acts, plain.facts, plain.ranked) == (False, False, False)
    assert (acting.acts, acting.facts, acting.ranked) == (True, False, False)
    assert (lossy.acts, lossy.facts, lossy.ranked) == (True, True, False)
    assert (ranked.acts, ranked.facts, ranked.ranked) == (False, True, True)


def test_an_outlier_is_one_that_leaves_its_own_share() -> None:
    """A rank that always has ten times the norm is healthy; one that doubles its share six times over is not."""
    detector = RankOutlier()
    rng, share = np.random.default_rng(1), np.array([10.0, 1.0, 1.0, 1.0])
    state, worst = detector.init(4), 0.0
    for _ in range(200):
        sample = Sample(share * np.exp(rng.normal(0, 0.1, 4)), np.ones(4, bool))
        worst = max(worst, float(detector.score(state, sample).max()))
        state = detector.learn(state, sample)
    assert worst < detector.fires_at
    moved = Sample(share * np.array([1.0, 1.0, 64.0, 1.0]), np.ones(4, bool))
    assert (detector.score(state, moved) > detector.fires_at).tolist() == [False, False, True, False]
    fallen = Sample(share * np.array([1.0, 1.0, 1 / 64, 1.0]), np.ones(4, bool))
    assert (detector.score(state, fallen) > detector.fires_at).tolist() == [False, False, True, False]


def test_of_two_ranks_the_larger_is_the_outlier() -> None:
    """Their shares are opposites: only the one that rises is named."""
    detector = RankOutlier()
    state = detector.init(2)
    for step in range(30):
        state = detector.learn(state, Sample(np.array([1.0, 1.0 + 0.01 * (step % 3)]), np.ones(2, bool)))
    found = detector.score(state, Sample(np.array([1.0, 50.0]), np.ones(2, bool)))
    assert (found > detector.fires_at).tolist() == [False, True]


def test_a_rank_alone_in_not_being_finite_is_named_before_any_baseline() -> None:
    """From the first step on; where no rank is finite, nobody is out of line."""
    detector = RankOutlier()
    state = detector.init(3)
    found = detector.score(state, Sample(np.array([1.0, np.nan, 2.0]), np.ones(3, bool)))
    assert found.tolist() == [0.0, np.inf, 0.0]
    nobody = detector.score(state, Sample(np.full(3, np.nan), np.ones(3, bool)))
    assert not (nobody > detector.fires_at).any()


def test_what_an_acting_condition_is_about_is_exchanged_and_refused_as_if_it_acted() -> None:
    """Also through another condition: every rank must come to the same value of it."""
    text = """version: 1
rules:
  loss: {detect: {kind: loss_nonfinite}}
  local: {detect: {kind: above, of: norm_local, threshold: 1}}
  inner: {when: {any: [%s]}}
  outer: {when: {all: [inner]}, mode: %s, do: [stop]}
"""
    assert rank_requirements(Engine(parse_rules(text % ("loss", "act")))).facts
    assert not rank_requirements(Engine(parse_rules(text % ("loss", "shadow")))).facts
    refused = refused_on_ranks(Engine(parse_rules(text % ("local", "act"))), 2)
    assert [one.rule for one in refused] == ["outer"]
    assert "acts on norm_local" in refused[0].reason
