"""`clip:` from the rule file to the gradient: groups, scopes, states, and what no policy may do."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.engine import Engine, EngineState
from gradwatch.engine.clipping.bind_clip_section import bind_clipping
from gradwatch.engine.clipping.clip_section_factors import NO_CLIPPING
from gradwatch.errors import AttachError
from gradwatch.policies import POLICIES, ClipByNorm, Policy
from gradwatch.records.snapshot import Sites, Snapshot
from gradwatch.rules.files import load_rules, parse_rules
from gradwatch.rules.rule_set import Clip, ClipPolicy, Group, RuleSet
from gradwatch.testing import draw_norms
from tests.engine.cases import OptimizerRules, make_sites, make_snapshot
from tests.reading.test_foreach_norms import WAITING, Operations
from tests.support.kept import Kept
from tests.support.on_device import gradients_on_device

SKIP = "rules: {bad: {detect: {kind: nonfinite}, do: [skip_step]}}"
STATEFUL = ("autoclip", "zclip", "adagc", "baseline")
GROUPS = (Group("weights", ("*.weight",)), Group("first", ("layers.0.*",)), Group("rest", ("*",)))
X = torch.randn(16, 3, generator=torch.Generator().manual_seed(3))


def engine(total: ClipPolicy | None = None, size: int = 4, **groups: ClipPolicy) -> OptimizerRules:
    """An engine that only clips, over `size` parameters (weights and biases by turns)."""
    return OptimizerRules(Engine(RuleSet(groups=GROUPS, clip=Clip(total, groups))).bind(make_sites(size)))


def norm(max_norm: float, **more: Any) -> ClipPolicy:
    return ClipPolicy("norm", {"max_norm": max_norm, **more})


# -- the engine ---------------------------------------------------------------------------------------------


def test_groups_are_clipped_each_by_its_own_norm() -> None:
    """Root sum of squares over every parameter that it has, whatever their label group; none is in two of them."""
    bound_rules = engine(first=norm(2.0), rest=norm(1.0))
    bound_rules.step(0, [3.0, 4.0, 4.0, 1.0])
    first, rest = 2 / (math.hypot(3, 4) + 1e-6), 1 / (math.hypot(4, 1) + 1e-6)
    expected = [first, first, rest, rest]
    assert bound_rules.decision.coef is not None
    assert bound_rules.decision.coef.tolist() == pytest.approx(expected, rel=1e-6)
    assert bound_rules.decision.max_norm is None


@pytest.mark.parametrize("scope", ["param", "group", "total"])
def test_scope_says_whose_norm(scope: str) -> None:
    """Under `total`: each parameter, each label group, or all together (which stays one scalar)."""
    bound_rules = engine(norm(1.0, scope=scope))
    bound_rules.step(0, [3.0, 0.5, 4.0, 2.0])
    if scope == "total":
        assert (bound_rules.decision.max_norm, bound_rules.decision.coef) == (1.0, None)
        return
    labels = ["weights", "first", "weights", "rest"]
    totals = {"weights": 5.0, "first": 0.5, "rest": 2.0}
    norms = [totals[label] for label in labels] if scope == "group" else [3.0, 0.5, 4.0, 2.0]
    assert bound_rules.decision.coef is not None
    assert bound_rules.decision.coef.tolist() == pytest.approx([min(1.0, 1 / (n + 1e-6)) for n in norms])


def test_a_parameter_is_clipped_by_its_first_group_and_the_total_whichever_is_stricter() -> None:
    """The order is that of `groups:`, for every order under `clip:`; a group that is not named there takes nothing."""
    bounds, total, norms = {"weights": 0.7, "first": 2.0, "rest": 0.2}, 1.5, [3.0, 4.0, 0.5, 4.0]
    members = {"weights": (0, 2), "first": (0, 1), "rest": (0, 1, 2, 3)}
    for number in range(1, 4):
        for order in itertools.permutations(bounds, number):
            clipped = engine(
                norm(total, scope="param"), **{name: norm(bounds[name], scope="param") for name in order}
            )
            clipped.step(0, norms)
            own = [next((bounds[name] for name in bounds if name in order and k in members[name]), total)
                   for k in range(4)]  # fmt: skip
            expected = [
                min(1.0, min(total, bound) / (size + 1e-6)) for bound, size in zip(own, norms, strict=True)
            ]
            assert clipped.decision.coef is not None
            assert clipped.decision.coef.tolist() == pytest.approx(expected, rel=1e-6)


def test_normalize_may_enlarge_where_nobody_objects() -> None:
    """A factor above 1 stands alone, and falls to 1 where any other policy covers the parameter."""
    bound_rules = engine(first=ClipPolicy("normalize", {"target": 6.0}))
    bound_rules.step(0, [1.0, 1.0, 1.0, 1.0])
    assert bound_rules.decision.coef is not None
    assert bound_rules.decision.coef.tolist() == pytest.approx([6 / math.sqrt(2)] * 2 + [1.0, 1.0], rel=1e-5)
    bound_rules = engine(norm(1e9, scope="param"), first=ClipPolicy("normalize", {"target": 6.0}))
    bound_rules.step(0, [1.0, 1.0, 1.0, 1.0])
    assert bound_rules.decision.coef is None


@pytest.mark.parametrize("method", STATEFUL)
def test_only_steps_that_are_taken_are_learned(method: str) -> None:
    """Skipped, rejected by the scaler, provisional, missing, NaN: the state is that of a run without these steps."""
    bound_rules = OptimizerRules(
        Engine(parse_rules(f"version: 1\n{SKIP}\nclip: {{total: {{method: {method}}}}}")).bind(make_sites(4))
    )
    clean = OptimizerRules(bound_rules.engine)
    rng = np.random.default_rng(2)
    for step in range(60):
        norms = np.exp(rng.normal(0, 0.2, 4)).tolist()
        bound_rules.step(step, norms)
        clean.step(step, norms)
        bound_rules.step(step, [math.nan, *norms[1:]])
        assert bound_rules.decision.skip
        bound_rules.step(step, [100.0] * 4, provisional=True)
        bound_rules.step(step, [100.0] * 4, scalars={"scaler_skip": 1.0})
        assert bound_rules.decision.coef is None
        bound_rules.step(step, [None] * 4)
    assert bound_rules.state.to_dict()["clips"] == clean.state.to_dict()["clips"]


@pytest.mark.parametrize("method", STATEFUL)
@pytest.mark.parametrize("scope", ["total", "group", "param"])
def test_states_resume_through_json(method: str, scope: str) -> None:
    """Cut at every kind of age and restored by name, the factors go on to the bit; NaN, spikes and gaps included."""
    said = f"{{method: {method}, scope: {scope}}}" if method != "adagc" else "{method: adagc}"
    ruleset = parse_rules(f"version: 1\ngroups: {{a: {{params: ['*.0.*']}}}}\nclip: {{total: {said}}}")
    bound = Engine(ruleset).bind(make_sites(7))
    one, others = OptimizerRules(bound), {}
    for number, (norms, present) in enumerate(draw_norms(1, steps=130)):
        with np.errstate(over="ignore"):
            narrow = norms.astype(np.float32)
        row = [float(n) if p else None for n, p in zip(narrow, present, strict=True)]
        if number in (0, 1, 7, 19, 25, 101):
            saved = json.loads(json.dumps(one.state.to_dict(), allow_nan=False))
            others[number] = OptimizerRules(bound, EngineState.from_dict(saved, bound))
        one.step(number, row)
        for cut, other in others.items():
            other.step(number, row)
            assert one.decision == other.decision, (cut, number)


@pytest.mark.parametrize("method", STATEFUL)
def test_states_follow_names_when_parameters_come_and_go(method: str) -> None:
    """What is still there goes on, what is new starts empty, and another history or half-life starts afresh."""
    said = "" if method == "adagc" else ", scope: param"
    rules = parse_rules(f"version: 1\nclip: {{total: {{method: {method}{said}}}}}")
    small, large = Engine(rules).bind(make_sites(3)), Engine(rules).bind(make_sites(6))
    bound_rules = OptimizerRules(large)
    for step in range(150):
        bound_rules.step(step, (np.arange(1, 7) * np.exp(0.1 * math.sin(step))).tolist())
    there = EngineState.from_dict(bound_rules.state.to_dict(), small)
    back = EngineState.from_dict(there.to_dict(), large)
    for whole, kept, grown in zip(bound_rules.state.clips[0], there.clips[0], back.clips[0], strict=True):
        assert np.array_equal(kept[..., :3][: len(whole)], whole[..., :3])
        assert np.array_equal(grown[..., :3][: len(whole)], whole[..., :3])
        assert not grown[..., 3:].any()
    again = OptimizerRules(large, back)
    for step in range(150, 200):
        again.step(step, [1.0] * 6)  # a ring that was dropped is there again for those that are new
    other = parse_rules(f"version: 1\nclip: {{total: {{method: {method}{said}, {OTHER[method]}}}}}")
    fresh = EngineState.from_dict(bound_rules.state.to_dict(), Engine(other).bind(make_sites(6)))
    assert not any(array.any() for array in fresh.clips[0])


OTHER = {"autoclip": "history: 5", "zclip": "alpha: 0.5", "adagc": "beta: 0.5", "baseline": "half_life: 5"}


@pytest.mark.parametrize("method", STATEFUL)
def test_rebaseline_forgets_the_policies_too(method: str) -> None:
    """`gw.rebaseline(glob)`: the series with a site in it are blind again, the others go on."""
    said = "" if method == "adagc" else ", scope: param"
    bound = Engine(parse_rules(f"version: 1\nclip: {{total: {{method: {method}{said}}}}}")).bind(
        make_sites(4)
    )
    bound_rules = OptimizerRules(bound)
    for step in range(150):
        bound_rules.step(step, [1.0 + 0.1 * math.sin(step)] * 4)
    state = bound.restarts.rebaseline(bound_rules.state, "layers.0.*")
    for array, before in zip(state.clips[0], bound_rules.state.clips[0], strict=True):
        assert not array[..., :2].any()
        assert np.array_equal(array[: len(before)][..., 2:] if array.ndim > 1 else array[2:], before[..., 2:])
    again = OptimizerRules(bound, state)
    for step in range(150, 200):
        again.step(step, [1.0] * 4)


def test_a_file_that_clips_nothing_carries_nothing() -> None:
    """No policy, no state, no factor, no wait for a device."""
    bound = Engine(parse_rules(f"version: 1\n{SKIP}")).bind(make_sites(4))
    assert bound.clipping is NO_CLIPPING
    assert not bound.clipping
    bound_rules = OptimizerRules(bound)
    bound_rules.step(0, [1e9] * 4)
    assert bound_rules.state.clips == ()
    assert not bound_rules.decision.touches
    assert not Engine(parse_rules(f"version: 1\n{SKIP}")).acts_on_host


@pytest.mark.parametrize("method", sorted(POLICIES))
def test_what_needs_the_host(method: str) -> None:
    """Clips by norm and elementwise ones can be left to a device; all else waits for the norms."""
    more = ", clip_value: 1" if method == "value" else ""
    waits = issubclass(POLICIES[method], Policy) and POLICIES[method] is not ClipByNorm
    assert (
        Engine(parse_rules(f"version: 1\nclip: {{total: {{method: {method}{more}}}}}")).acts_on_host == waits
    )


def test_what_does_not_fit_the_model_is_refused_at_attach() -> None:
    """agc on nothing but the last layer; an autoclip that would remember gigabytes."""
    head = Group("head", ("layers.1.*",))
    with pytest.raises(AttachError, match=r"clip.groups.head: agc leaves the last layer alone"):
        Engine(RuleSet(groups=(head,), clip=Clip(None, {"head": ClipPolicy("agc")}))).check(make_sites(4))
    whole = ClipPolicy("agc", {"last_layer": True})
    Engine(RuleSet(groups=(head,), clip=Clip(None, {"head": whole}))).check(make_sites(4))
    many = ClipPolicy("autoclip", {"scope": "param"})
    with pytest.raises(AttachError, match=r"10000 norms of 2000 series; at most history: 8388"):
        Engine(RuleSet(clip=Clip(many))).check(make_sites(2000))
    Engine(RuleSet(clip=Clip(ClipPolicy("autoclip")))).check(make_sites(2000))


def test_the_last_layer_is_the_module_of_the_last_parameter() -> None:
    """Its weight and its bias, and nothing of a tapped module."""
    sites = make_sites(6, modules=3)
    (policy, mask) = bind_clipping(RuleSet(clip=Clip(ClipPolicy("agc"))), sites).elementwise[0]
    assert policy.method == "agc"
    assert [name for name, chosen in zip(sites.names, mask, strict=True) if chosen] == list(sites.names[:4])


def test_a_fallback_still_clips_by_what_is_known() -> None:
    """Should judging fail on one rank of several, the same factors are made there as on the others."""
    bound_rules = engine(norm(9.0), weights=ClipPolicy("zclip", {"max_norm": 0.5}))
    snapshot: Snapshot = make_snapshot(bound_rules.engine.sites, 0, [3.0, 4.0, 4.0, 1.0])
    decision, state = bound_rules.engine.clip(
        bound_rules.engine.fallback(snapshot.total_norm, snapshot.step), bound_rules.state, snapshot
    )
    bound_rules.take(snapshot)
    assert decision == bound_rules.decision
    assert state.to_dict()["clips"] == bound_rules.state.to_dict()["clips"]


# -- end to end ---------------------------------------------------------------------------------------------


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def rules(text: str, more: str = "rules: {}") -> RuleSet:
    return parse_rules(
        f"version: 1\n{more}\ngroups: {{head: {{params: ['4.*']}}, weights: {{params: ['*.weight']}}}}\nclip: {text}"
    )


def grads_of(model: nn.Module) -> list[Tensor]:
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


CLIPS = {
    "group": "{groups: {head: {method: norm, max_norm: 0.05}, weights: {method: norm, max_norm: 0.4}}}",
    "param": "{total: {method: norm, max_norm: 0.1, scope: param}}",
    "value": "{total: {method: value, clip_value: 0.01}}",
    "agc": "{total: {method: agc}}",
    "centralize": "{groups: {weights: {method: centralize}}}",
    "block_rms": "{total: {method: block_rms, threshold: 0.01}}",
    "normalize": "{total: {method: normalize}}",
    "autoclip": "{total: {method: autoclip}}",
    "zclip": "{total: {method: zclip}}",
    "adagc": "{total: {method: adagc, max_norm: 0.3}}",
    "baseline": "{total: {method: baseline}}",
    "several": "{total: {method: norm, max_norm: 0.3}, groups: {head: {method: value, clip_value: 0.01},"
    " weights: {method: agc}}}",
}


@pytest.mark.parametrize("clip", CLIPS)
def test_the_record_tells_what_the_optimizer_got(clip: str) -> None:
    """`coef` and `total_norm_applied` against float64 norms of the gradients left, healthy and spiking steps."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    sink = Kept()
    touched = 0
    with gradwatch.watch(model, optimizer, rules=rules(CLIPS[clip]), sinks=[sink], strict=True):
        for step in range(40):
            optimizer.zero_grad()
            (model(X).square().mean() * (1e3 if step == 35 else 1.0)).backward()
            before = grads_of(model)
            optimizer.step()
            after = grads_of(model)
            snapshot = sink.records[-1].snapshot
            norms = [float(grad.double().norm()) for grad in after]
            assert (snapshot.norm * snapshot.coef).tolist() == pytest.approx(norms, rel=2e-5, abs=1e-12)
            assert snapshot.total_norm_applied == pytest.approx(math.hypot(*norms), rel=2e-5)
            touched += any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert touched
    assert clip != "baseline" or touched == 1  # only the spike


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [0.05, 1e9])
def test_a_group_is_clipped_as_torch_clips_it(max_norm: float, dtype: torch.dtype) -> None:
    """Bit-equal to `clip_grads_with_norm_` over the group's parameters, given the norm that we read."""
    model, twin = net(dtype), net(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    sink = Kept()
    said = f"{{groups: {{head: {{method: norm, max_norm: {max_norm}}}}}}}"
    with gradwatch.watch(model, optimizer, rules=rules(said), sinks=[sink], strict=True):
        for step in range(8):
            for each in (model, twin):
                each.zero_grad()
                (each(X.to(dtype)).square().mean() * (step + 1)).backward()
            optimizer.step()
            norms = sink.records[-1].snapshot.norm.astype(np.float64)[-2:]
            found = torch.tensor(math.sqrt(np.dot(norms, norms)), dtype=torch.float32)
            nn.utils.clip_grads_with_norm_(twin[4].parameters(), max_norm, found)
            for one, other in zip(grads_of(model), grads_of(twin), strict=True):
                assert torch.equal(one, other)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_passes_and_is_forgotten(clip: str, bad: float) -> None:
    """One bad element in one gradient: it stays where it is, and later steps are clipped as if it had not been."""
    states = []
    for poison in (False, True):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        with gradwatch.watch(model, optimizer, rules=rules(CLIPS[clip], SKIP), sinks=[], strict=True) as gw:
            for step in range(16):
                optimizer.zero_grad()
                model(X * (1 + 0.1 * math.sin(step))).square().mean().backward()
                if step == 10:
                    if not poison:
                        optimizer.zero_grad()  # a step without gradients
                        optimizer.step()
                        continue
                    model[2].weight.grad.view(-1)[3] = bad  # type: ignore[union-attr]
                    before = grads_of(model)
                    optimizer.step()
                    same = zip(before, grads_of(model), strict=True)
                    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in same)
                    continue
                optimizer.step()
            states.append(gw.state_dict()["lanes"]["0"]["engine"]["clips"])
    assert states[0] == states[1]


def test_an_unskipped_nan_touches_nobody_else() -> None:
    """Without a rule that skips, groups without the NaN are clipped as ever and the one with it passes as found."""
    model, twin = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    said = "{total: {method: norm, max_norm: 0.1}, groups: {head: {method: norm, max_norm: 0.05}}}"
    with gradwatch.watch(model, optimizer, rules=rules(said), sinks=[], strict=True):
        for each in (model, twin):
            each(X).square().mean().backward()
        model[0].weight.grad.view(-1)[0] = math.nan  # type: ignore[union-attr]
        optimizer.step()
    nn.utils.clip_grad_norm_(twin[4].parameters(), 0.05)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        elements = torch.isfinite(one.grad)  # type: ignore[arg-type]
        assert torch.allclose(one.grad[elements], other.grad[elements], rtol=1e-6)  # type: ignore[index]


def test_factors_come_from_the_gradients_as_found_after_the_users_clip() -> None:
    """A loop that clips to 0.2 itself, and a policy of 0.1: together 0.1, not 0.1 of the unclipped norm."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    sink = Kept()
    said = "{groups: {all: {method: norm, max_norm: 0.1}}}"
    text = f"version: 1\nrules: {{}}\ngroups: {{all: {{params: ['*']}}}}\nclip: {said}"
    with gradwatch.watch(model, optimizer, rules=parse_rules(text), sinks=[sink], strict=True):
        for _ in range(8):
            optimizer.zero_grad()
            (model(X).square().mean() * 10).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
            total = math.hypot(*(float(grad.double().norm()) for grad in grads_of(model)))
            assert total == pytest.approx(0.1, rel=1e-4)
            assert sink.records[-1].snapshot.total_norm > 0.2


def test_elementwise_under_a_grad_scaler_and_a_fused_optimizer() -> None:
    """The gradients still carry the loss scale there: bounds are in unscaled units, and so is the Record."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    sink = Kept()
    with gradwatch.watch(model, optimizer, rules=rules(CLIPS["value"], SKIP), sinks=[sink], strict=True):
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(model(X).square().mean() * 5).backward()
            scaler.step(optimizer)
            scaler.update()
            largest = max(float(grad.abs().max()) for grad in grads_of(model))
            assert largest == pytest.approx(0.01)  # the fused step has divided them by now
            left = math.hypot(*(float(grad.double().norm()) for grad in grads_of(model)))
            assert sink.records[-1].snapshot.total_norm_applied == pytest.approx(left, rel=1e-5)


def test_a_sparse_gradient_costs_the_policy_not_the_step() -> None:
    """Counted as a failed action, said by name; the other policies are carried out and training goes on."""
    torch.manual_seed(0)
    table = nn.Embedding(5, 4, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), 0.1)
    text = (
        "version: 1\nrules: {}\nclip: {total: {method: norm, max_norm: 0.5}, "
        "groups: {t: {method: value, clip_value: 0.01}}}"
    )
    with gradwatch.watch(
        table, optimizer, rules=parse_rules(text + "\ngroups: {t: {params: ['*']}}"), sinks=[]
    ) as gw:
        table(torch.tensor([1, 2, 2])).sum().backward()
        optimizer.step()
        assert gw.health.errors() == {"action": 1}
    assert float(table.weight.grad.coalesce().values().norm()) == pytest.approx(0.5, rel=1e-5)  # type: ignore[union-attr]


def test_a_fault_in_a_policy_lets_the_gradient_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a policy raises is counted, and the step is taken with the gradient as found."""

    def broken(*args: Any) -> Any:
        raise ValueError("broken on purpose")

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with gradwatch.watch(model, optimizer, rules=rules(CLIPS["zclip"]), sinks=[]) as gw:
        monkeypatch.setattr(POLICIES["zclip"], "coefficients", broken)
        (model(X).square().mean() * 100).backward()
        before = grads_of(model)
        optimizer.step()
        assert gw.health.errors() == {"action": 1}
        assert all(torch.equal(a, b) for a, b in zip(before, grads_of(model), strict=True))


def test_a_watch_resumes_its_policies() -> None:
    """`state_dict` through JSON into a new watch: the gradients of 20 more steps are the same to the bit."""
    text = "{total: {method: zclip}, groups: {head: {method: adagc, warmup: 5}, weights: {method: autoclip}}}"
    runs: list[list[Tensor]] = []
    for cut in (False, True):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        gw = gradwatch.watch(model, optimizer, rules=rules(text), sinks=[], strict=True)
        seen = []
        for step in range(60):
            if cut and step == 40:
                saved = json.loads(json.dumps(gw.state_dict(), allow_nan=False))
                gw.close()
                gw = gradwatch.watch(model, optimizer, rules=rules(text), sinks=[], strict=True)
                gw.load_state_dict(saved)
            optimizer.zero_grad()
            (model(X).square().mean() * (20.0 if step % 9 == 8 else 1.0)).backward()
            optimizer.step()
            seen += grads_of(model)
        gw.close()
        runs.append(seen)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


# -- on a device --------------------------------------------------------------------------------------------


DEVICE = {
    "total": "{total: {method: norm, max_norm: 0.1}}",
    "param": "{total: {method: norm, max_norm: 0.05, scope: param}}",
    "group": "{groups: {head: {method: norm, max_norm: 0.01}, weights: {method: norm, max_norm: 0.05}}}",
    "both": "{total: {method: norm, max_norm: 0.1}, groups: {head: {method: norm, max_norm: 0.01}}}",
    "value": "{total: {method: value, clip_value: 0.01}}",
    "agc": "{groups: {weights: {method: agc}, head: {method: norm, max_norm: 0.01}}}",
    "centralize": "{total: {method: norm, max_norm: 0.1}, groups: {weights: {method: centralize}}}",
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", DEVICE)
def test_a_device_clips_without_the_host(clip: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the host to 1e-6, also past a NaN; and no operation of the step copies a number to the host."""
    expected = trained(DEVICE[clip], fused)
    gradients_on_device(monkeypatch)
    found = trained(DEVICE[clip], fused, watched=True)
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-9, equal_nan=True)


def trained(clip: str, fused: bool, watched: bool = False) -> list[list[Tensor]]:
    """The gradients that the optimizer got at each of eight steps, the last of them with a NaN."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.0, fused=fused)
    seen = []
    with gradwatch.watch(model, optimizer, rules=rules(clip), sinks=[], strict=True):
        for step in range(8):
            optimizer.zero_grad()
            (model(X).square().mean() * (step + 1)).backward()
            if step == 7:
                model[0].weight.grad.view(-1)[0] = math.nan  # type: ignore[union-attr]
            with Operations() as operations:
                optimizer.step()
            waiting = [name for name in operations.names if name in WAITING]
            assert not (watched and waiting), (step, waiting)
            seen.append(grads_of(model))
    return seen


def test_a_device_divides_the_loss_scale_out_of_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused optimizer under a GradScaler: bounds hold for the unscaled gradients, of a group and of elements."""
    gradients_on_device(monkeypatch)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    said = parse_rules(
        "version: 1\ngroups: {middle: {params: ['2.*']}, head: {params: ['4.*']}}\n"
        "clip: {groups: {middle: {method: value, clip_value: 0.002}, head: {method: norm, max_norm: 0.01}}}"
    )
    with gradwatch.watch(model, optimizer, rules=said, sinks=[], strict=True):
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(model(X).square().mean() * 5).backward()
            scaler.step(optimizer)
            scaler.update()
            assert float(model[2].weight.grad.abs().max()) == pytest.approx(0.002)  # type: ignore[union-attr]
            head = math.hypot(*(float(grad.double().norm()) for grad in grads_of(model)[-2:]))
            assert head == pytest.approx(0.01, rel=1e-3)


# -- the pack -----------------------------------------------------------------------------------------------


PACK = Path(__file__).parents[2] / "rules" / "clip-policies.gradwatch.yaml"


def test_the_pack_touches_spikes_and_nothing_else() -> None:
    """150 healthy steps bit-identical to those without a watch; a loss × 1000 after that is clipped back."""
    weights = []
    for pack in (False, True):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        sink = Kept()
        gw = gradwatch.watch(
            model, optimizer, rules="clip-policies" if pack else "observe-only", sinks=[sink]
        )
        for step in range(150):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            x, noise = torch.randn(64, 3, generator=generator), torch.randn(64, 2, generator=generator)
            (model(x) - noise).square().mean().backward()
            optimizer.step()
        weights.append([param.detach().clone() for param in model.parameters()])
        optimizer.zero_grad()
        ((model(x) - noise).square().mean() * 1000).backward()
        optimizer.step()
        gw.close()
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    usual = max(record.snapshot.total_norm for record in sink.records[20:-1])
    last = sink.records[-1].snapshot
    assert last.total_norm > 100 * usual
    assert last.total_norm_applied <= 2 * usual
    assert gw.health.errors() == {}


def test_every_alternative_in_the_pack_is_one() -> None:
    """The commented lines name all ten methods, and each stands where the pack's own policy does."""
    lines = [line for line in PACK.read_text(encoding="utf-8").splitlines() if line.startswith("#   {method")]
    methods = set()
    for line in lines:
        text = line.removeprefix("#").split("  #")[0].strip()
        found = parse_rules(f"version: 1\nclip: {{total: {text}}}")
        assert found.clip is not None
        assert found.clip.total is not None
        methods.add(found.clip.total.method)
        sites: Sites = make_sites(4)
        Engine(found).check(sites)
    assert methods | {"baseline"} == set(POLICIES)


def test_the_pack_is_the_default_with_a_clip() -> None:
    """Same rules; it fits a model without embeddings."""
    pack, default = load_rules("clip-policies"), load_rules("default")
    assert {rule.id for rule in pack.rules} == {rule.id for rule in default.rules}
    Engine(pack).check(make_sites(6))
