"""Under a GradScaler: norms free of the scale, rejected steps seen, and training as it would be without us."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwatch
from gradwatch.account.account_line import lines
from gradwatch.capture import optimizer_capture as captured
from gradwatch.errors import TrainingStopped
from gradwatch.rules.files import parse_rules
from gradwatch.session.boundary import optimizer_step
from gradwatch.session.watch import session_of
from gradwatch.taps import grad_scaler
from tests.precision.loops import ScaledLoop, X, events, exact_norms, net, norms_in, watched

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adam-foreach": lambda p: torch.optim.Adam(p, 1e-2, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, 0.01, fused=True),
}
BAD = frozenset({0, 4, 5})


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_step_is_a_record_with_unscaled_norms(name: str, unscale: bool, micro: int) -> None:
    """Norms are those of the unscaled loss, before clipping; rejected steps are Records that say so."""
    loop = ScaledLoop(OPTIMIZERS[name], BAD, unscale, micro)
    gw, sink = watched(loop.model, loop.optimizer)
    scale = loop.init_scale
    with gw:
        for step, want in loop.run(9):
            snapshot = sink.records[-1].snapshot
            assert snapshot.step == step == len(sink.records) - 1
            assert snapshot.scalars["scaler_skip"] == (step in BAD)
            assert snapshot.loss_scale == scale
            assert snapshot.micro == micro
            if step in BAD:
                scale /= 2
                assert snapshot.columns["nonfinite"].values.all()
                continue
            assert not snapshot.provisional
            assert norms_in(sink.records[-1]) == pytest.approx(want, rel=1e-5)
            total = sum(norm**2 for norm in want.values()) ** 0.5
            assert snapshot.total_norm == pytest.approx(total, rel=1e-5)
            applied = min(total, loop.max_norm) if unscale else total
            assert snapshot.total_norm_applied == pytest.approx(applied, rel=1e-4)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_bit_identical_with_rejected_steps(name: str, unscale: bool) -> None:
    """Weights, optimizer state and the scaler's own state do not depend on being watched."""
    runs = []
    for watch in (False, True):
        loop = ScaledLoop(OPTIMIZERS[name], BAD, unscale)
        gw = watched(loop.model, loop.optimizer)[0] if watch else None
        for _ in loop.run(10):
            assert not hasattr(loop.optimizer, "found_inf")
        if gw is not None:
            gw.close()
        runs.append((loop.weights(), loop.optimizer.state_dict()["state"], loop.scaler.state_dict()))
    (bare, bare_state, bare_scaler), (seen, seen_state, seen_scaler) = runs
    assert all(torch.equal(a, b) for a, b in zip(bare, seen, strict=True))
    assert bare_scaler == seen_scaler
    for slot, values in bare_state.items():
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(seen_state[slot][key])), key


@pytest.mark.parametrize("name", ["adamw", "adamw-fused"])
def test_a_rejected_step_is_an_info_and_nothing_else(name: str) -> None:
    """No rule on gradients fires, nothing is skipped or counted towards `max_consecutive`, nothing is learned."""
    loop = ScaledLoop(OPTIMIZERS[name], frozenset(range(25, 40)), init_scale=65536.0)
    rules = parse_rules("""
version: 1
extends: [default]
rules:
  non-finite: {do: [{skip_step: {max_consecutive: 2, then: stop}}]}
  scale-collapse: {enabled: false}
""")
    gw, sink = watched(loop.model, loop.optimizer, rules)
    with gw:
        for step, _ in loop.run(45):
            if step == 24:
                before = gw.state_dict()
            if step == 39:
                after = gw.state_dict()
        text = {event.rule for event in events(sink)}
        assert text == {"scaler-skip"}
        assert [(e.step, e.kind, e.severity) for e in events(sink)] == [
            (25, "firing", "info"),
            (40, "resolved", "info"),
        ]
        assert not any(record.decision.skip for record in sink.records)
    old, new = (state["lanes"]["0"]["engine"] for state in (before, after))
    assert {key: rows for key, rows in old["baselines"].items() if "loss_scale" not in key} == {
        key: rows for key, rows in new["baselines"].items() if "loss_scale" not in key
    }
    assert {key: rows["consecutive"] for key, rows in new["rules"].items()} == dict.fromkeys(new["rules"], 0)


def test_a_loss_of_nan_is_critical_though_the_scaler_rejects_the_step() -> None:
    """At its step, not when the scale has come down to 1; the weights are as the scaler left them."""
    loop = ScaledLoop(OPTIMIZERS["adamw"], frozenset({5}), poison=float("nan"))
    gw, sink = watched(loop.model, loop.optimizer)
    with gw:
        for _ in loop.run(8):
            pass
    told = [(event.step, event.rule, event.severity) for event in events(sink) if event.kind == "firing"]
    assert told == [(5, "loss-non-finite", "critical"), (5, "scaler-skip", "info")]
    assert gw.healthy
    assert all(weight.isfinite().all() for weight in loop.weights())


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
def test_a_nan_that_the_scaler_no_longer_sees_is_critical_and_skipped(optimizer: str) -> None:
    """Written to a gradient after `unscale_`: the scaler lets the step through."""
    loop = ScaledLoop(OPTIMIZERS[optimizer], unscale=True)
    step_of, steps = loop.scaler.step, 0

    def spoilt(optimizer: torch.optim.Optimizer) -> Any:
        nonlocal steps
        if steps == 5:
            loop.model[0].weight.grad.view(-1)[0] = float("nan")
        steps += 1
        return step_of(optimizer)

    loop.scaler.step = spoilt  # type: ignore[method-assign]
    gw, sink = watched(loop.model, loop.optimizer)
    with gw:
        for _ in loop.run(8):
            pass
    told = [(event.step, event.rule, event.sites) for event in events(sink) if event.kind == "firing"]
    assert told == [(5, "non-finite", ("0.weight",))]
    assert [record.decision.skip for record in sink.records] == [step == 5 for step in range(8)]
    assert all(weight.isfinite().all() for weight in loop.weights())


def test_the_metric_counts_rejected_steps(tmp_path: Path) -> None:
    """`gradwatch_scaler_skips_total` and `gradwatch_loss_scale`, from a real run."""
    loop = ScaledLoop(OPTIMIZERS["adamw"], BAD)
    with gradwatch.watch(
        loop.model, loop.optimizer, run_dir=tmp_path, listen="127.0.0.1:0", strict=True
    ) as gw:
        for _ in loop.run(9):
            pass
        (prometheus,) = [each.sink for each in session_of(gw)._sinks if each.sink.name == "prometheus"]
        text = prometheus.render().decode()
    assert "\ngradwatch_scaler_skips_total 3\n" in text
    assert "\ngradwatch_steps_total 9\n" in text
    assert "\ngradwatch_skipped_steps_total 0\n" in text
    assert "\ngradwatch_loss_scale 128.0\n" in text


def test_an_overflow_at_the_first_step_of_an_unknown_optimizer() -> None:
    """`watch(model)` alone: the first optimizer call may never come, and the step is seen all the same."""
    loop = ScaledLoop(OPTIMIZERS["adamw"], frozenset({0, 1}))
    gw, sink = watched(loop.model, None)
    with gw:
        for _ in loop.run(5):
            pass
    assert [record.snapshot.step for record in sink.records] == list(range(5))
    assert [record.snapshot.scalars["scaler_skip"] for record in sink.records] == [1, 1, 0, 0, 0]
    assert [record.snapshot.loss_scale for record in sink.records] == [1024, 512, 256, 256, 256]


def test_one_loss_is_scaled_and_the_other_is_not() -> None:
    """Two optimizers, one outside the scaler: each is seen with its own norms, and only one has a loss scale."""
    first, second = net(1), net(2)
    a, b = torch.optim.AdamW(first.parameters(), 1e-2), torch.optim.SGD(second.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    gw, sink = watched([first, second], [a, b])
    with gw:
        for _ in range(6):
            want = [exact_norms(model, lambda m: m(X).pow(2).sum()) for model in (first, second)]
            a.zero_grad()
            b.zero_grad()
            scaler.scale(first(X).pow(2).sum()).backward()
            second(X).pow(2).sum().backward()
            scaler.step(a)
            b.step()
            scaler.update()
            by_optimizer = {record.snapshot.optimizer: record for record in sink.records}
            for index, scale in ((0, 4096.0), (1, None)):
                got = {name.split(".", 1)[1]: norm for name, norm in norms_in(by_optimizer[index]).items()}
                assert got == pytest.approx(want[index], rel=1e-5)
                assert by_optimizer[index].snapshot.loss_scale == scale
            assert "scaler_skip" not in by_optimizer[1].snapshot.scalars


def test_two_scalers_with_scales_of_their_own() -> None:
    """Each optimizer is seen with the scale, and the rejections, of the scaler it goes through."""
    models = net(1), net(2)
    optimizers = [torch.optim.SGD(model.parameters(), 1e-2) for model in models]
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in (256.0, 65536.0)]
    gw, sink = watched(list(models), optimizers)
    with gw:
        for step in range(4):
            for index, (model, optimizer, scaler) in enumerate(zip(models, optimizers, scalers, strict=True)):
                optimizer.zero_grad()
                poison = float("inf") if index and step == 1 else 1.0
                scaler.scale(model(X).pow(2).sum() * poison).backward()
                scaler.step(optimizer)
                scaler.update()
    of = [[record.snapshot for record in sink.records if record.snapshot.optimizer == i] for i in (0, 1)]
    assert [snapshot.loss_scale for snapshot in of[0]] == [256.0] * 4
    assert [snapshot.loss_scale for snapshot in of[1]] == [65536.0] * 2 + [32768.0] * 2
    assert [snapshot.scalars["scaler_skip"] for snapshot in of[1]] == [0, 1, 0, 0]
    assert all(0.01 < snapshot.total_norm < 100 for snapshot in of[0] + of[1][2:])


@pytest.mark.parametrize("overflow", [True, False])
def test_a_loop_that_unscales_and_then_does_not_step(overflow: bool) -> None:
    """Its overflow is a rejected step; a step it leaves out for reasons of its own is none."""
    loop = ScaledLoop(OPTIMIZERS["adamw"])
    gw, sink = watched(loop.model, loop.optimizer)
    with gw:
        for step in range(5):
            loop.optimizer.zero_grad()
            want = exact_norms(loop.model, lambda m, step=step: loop.loss(m, step, 0))
            poison = float("inf") if overflow and step == 2 else 1.0
            loop.scaler.scale(loop.loss(loop.model, step, 0) * poison).backward()
            loop.scaler.unscale_(loop.optimizer)
            if step != 2:
                loop.scaler.step(loop.optimizer)
            loop.scaler.update()
            if step != 2:
                assert norms_in(sink.records[-1]) == pytest.approx(want, rel=1e-5)
                assert sink.records[-1].snapshot.micro == 1
    skips = [record.snapshot.scalars["scaler_skip"] for record in sink.records]
    assert skips == ([0, 0, 1, 0, 0] if overflow else [0, 0, 0, 0])


@pytest.mark.parametrize("way", ["stepped", "unscaled and stepped", "unscaled alone"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_account_counts_a_rejected_step_once(name: str, way: str) -> None:
    """Whether a fused optimizer is called for it, none is, or the loop itself looks: it is no step, here and there."""
    loop = ScaledLoop(OPTIMIZERS[name])
    gw, _ = watched(loop.model, loop.optimizer)
    with gw:
        for step in range(6):
            loop.optimizer.zero_grad()
            bad = step in (2, 4)
            loop.scaler.scale(loop.loss(loop.model, step, 0) * (math.nan if bad else 1.0)).backward()
            if way != "stepped":
                loop.scaler.unscale_(loop.optimizer)
            if not (bad and way == "unscaled alone"):
                loop.scaler.step(loop.optimizer)
            loop.scaler.update()
        account = session_of(gw).account()
    assert (account.steps, account.rejected) == ((4, 4), (2, 2))
    told = lines(account)
    assert told[0].startswith("gradwatch: 4 of 4 steps watched and 2 of 2 rejected by a GradScaler · ")
    assert not told[1:]


def test_a_disabled_scaler_is_not_there() -> None:
    """`GradScaler(enabled=False)`: plain norms, no loss scale, no `scaler_skip`."""
    loop = ScaledLoop(OPTIMIZERS["adamw"])
    loop.scaler = torch.amp.GradScaler("cpu", enabled=False)
    gw, sink = watched(loop.model, loop.optimizer)
    with gw:
        for _, want in loop.run(4):
            assert norms_in(sink.records[-1]) == pytest.approx(want, rel=1e-5)
            assert sink.records[-1].snapshot.loss_scale is None
            assert "scaler_skip" not in sink.records[-1].snapshot.scalars


@pytest.mark.parametrize("fused", [False, True])
def test_sampled_local_and_module_columns_are_unscaled_too(fused: bool) -> None:
    """`max_abs`, `norm_local` and `grad_output_norm` under a scale of 4,096 are those of the unscaled loss."""
    rules = parse_rules("""
version: 1
modules: {tap: output, names: ["2"]}
rules:
  a: {detect: {kind: above, of: max_abs, threshold: 1e30}, every: 1}
  b: {detect: {kind: above, of: norm_local, threshold: 1e30}}
  c: {detect: {kind: above, of: grad_output_norm, threshold: 1e30}}
""")
    seen = []
    for scaled in (False, True):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4096.0, enabled=scaled)
        gw, sink = watched(model, optimizer, rules)
        with gw:
            for _ in range(3):
                optimizer.zero_grad()
                scaler.scale(model(X).pow(2).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
        columns = sink.records[-1].snapshot.columns
        seen.append({name: column.values[column.present].tolist() for name, column in columns.items()})
    assert seen[0].keys() == seen[1].keys() >= {"max_abs", "norm_local", "grad_output_norm"}
    for name, values in seen[0].items():
        assert any(values)
        assert seen[1][name] == pytest.approx(values, rel=1e-5), name


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("how", ["no scaler", "implicit", "unscale_"])
def test_a_divisor_of_the_users_own_is_a_clip(how: str, kind: Any) -> None:
    """`optimizer.grad_scale` of a fused optimizer: `norm` is before it, `norm_applied` after; nothing changes."""
    runs = []
    for watch in (False, True):
        model = net()
        optimizer = kind(model.parameters(), 1e-2, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=512.0, enabled=how != "no scaler")
        gw, sink = watched(model, optimizer) if watch else (None, None)
        for _ in range(5):
            optimizer.zero_grad()
            want = exact_norms(model, lambda m: m(X).pow(2).sum())
            scaler.scale(model(X).pow(2).sum()).backward()
            if how == "unscale_":
                scaler.unscale_(optimizer)
            optimizer.grad_scale = torch.tensor(4.0)
            scaler.step(optimizer)
            if scaler.is_enabled():
                scaler.update()
                assert not hasattr(optimizer, "grad_scale")
            if sink is not None:
                snapshot = sink.records[-1].snapshot
                assert norms_in(sink.records[-1]) == pytest.approx(want, rel=1e-5)
                assert snapshot.coef.tolist() == pytest.approx([0.25] * 4, rel=1e-5)
                assert snapshot.total_norm_applied == pytest.approx(snapshot.total_norm / 4, rel=1e-5)
                assert snapshot.loss_scale == (None if how == "no scaler" else 512.0)
        if gw is not None:
            gw.close()
        runs.append([parameter.detach() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_rule_that_stops_does_so_on_a_rejected_step() -> None:
    """`scale_collapse` with `do: [stop]` ends training from within `scaler.step`, though no optimizer ran."""
    loop = ScaledLoop(OPTIMIZERS["adamw"], frozenset(range(100)), init_scale=8.0)
    rules = parse_rules("version: 1\nrules: {collapse: {detect: {kind: scale_collapse}, do: [stop]}}")
    gw, sink = watched(loop.model, loop.optimizer, rules)
    with gw, pytest.raises(TrainingStopped, match="step 3: rule collapse"):
        for _ in loop.run(10):
            pass
    assert [record.snapshot.loss_scale for record in sink.records] == [8.0, 4.0, 2.0, 1.0]


def test_a_scaler_subclass_with_methods_of_its_own() -> None:
    """FSDP's ShardedGradScaler replaces `scale`, `_unscale_grads_`, `unscale_` and `update`: seen all the same."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for unscale in (False, True):
            loop = ScaledLoop(OPTIMIZERS["adamw"], BAD, unscale)
            loop.scaler = ShardedGradScaler("cpu", init_scale=1024.0, process_group=dist.group.WORLD)
            gw, sink = watched(loop.model, loop.optimizer)
            with gw:
                for step, want in loop.run(8):
                    if step not in BAD:
                        assert norms_in(sink.records[-1]) == pytest.approx(want, rel=1e-5)
            skips = [record.snapshot.scalars["scaler_skip"] for record in sink.records]
            assert skips == [step in BAD for step in range(8)]
    finally:
        dist.destroy_process_group()
    assert ShardedGradScaler.update.__module__ == ShardedGradScaler.__module__
    assert "wrapped" not in ShardedGradScaler.update.__qualname__


def test_an_optimizer_without_hooks_is_not_taken_for_rejected() -> None:
    """One that never ran torch's constructor fires no step hooks: its silence means nothing."""

    class Bare(torch.optim.Optimizer):
        def __init__(self, params: list[nn.Parameter]) -> None:
            self.param_groups, self.state, self.defaults = [{"params": params}], {}, {}

        def step(self) -> None:
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.sub_(0.01 * parameter.grad)

    loop = ScaledLoop(lambda p: Bare(list(p)))
    gw, sink = watched(loop.model, None)
    weights, norms = loop.weights(), list[float]()
    with gw:
        for _ in range(3):
            loop.model.zero_grad()
            loop.scaler.scale(loop.model(X).pow(2).sum()).backward()
            loop.scaler.step(loop.optimizer)
            norms.append(float(torch.nn.utils.get_total_norm(p.grad for p in loop.model.parameters())))  # type: ignore[misc]
            loop.scaler.update()
    assert [record.snapshot.total_norm for record in sink.records] == pytest.approx(norms, rel=1e-5)
    assert all(record.snapshot.scalars["observed_only"] for record in sink.records)
    assert not any("scaler_skip" in record.snapshot.scalars for record in sink.records)
    assert not any(torch.equal(a, b) for a, b in zip(weights, loop.model.parameters(), strict=True))


FAULTS: dict[str, tuple[Any, str, str]] = {
    "unscaled": (captured.OptimizerCapture, "remove_scale", "precision"),
    "start_copy": (optimizer_step, "start_copy", "precision"),
    "rejected": (optimizer_step.Boundary, "_at_rejected", "boundary"),
    "abandoned": (grad_scaler, "_unscaled_only", "precision"),
    "settle": (optimizer_step.Boundary, "_closed_window", "boundary"),
}
ERRORS: tuple[Exception, ...] = (
    ValueError("broken"),
    OSError(errno.ENOSPC, "no space left on device"),
    MemoryError(),
    RecursionError("too deep"),
    StopIteration(),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("site", FAULTS)
def test_a_fault_of_ours_around_a_scaler_is_counted_and_harmless(
    site: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails in our wrappers of the scaler never reaches training, and its result is unchanged."""
    owner, attribute, component = FAULTS[site]

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise error

    runs = []
    for watch in (True, False):
        loop = ScaledLoop(OPTIMIZERS["adamw"], BAD, unscale=True)
        gw = (
            gradwatch.watch(loop.model, loop.optimizer, run_dir=tmp_path, listen="127.0.0.1:0")
            if watch
            else None
        )
        with monkeypatch.context() as patch:
            if gw is not None:
                patch.setattr(owner, attribute, broken)
            for _ in loop.run(8):
                pass
        if gw is not None:
            assert gw.health.errors().get(component, 0) >= 1, gw.health.errors()
            gw.close()
        runs.append((loop.weights(), loop.scaler.state_dict()))
    assert all(torch.equal(a, b) for a, b in zip(runs[0][0], runs[1][0], strict=True))
    assert runs[0][1] == runs[1][1]


def test_ctrl_c_inside_the_step_of_a_scaler_passes() -> None:
    """KeyboardInterrupt out of the optimizer goes through, and the next step is measured as ever."""
    loop = ScaledLoop(OPTIMIZERS["adamw"])
    gw, sink = watched(loop.model, loop.optimizer)
    with gw:
        for _ in loop.run(2):
            pass
        handle = loop.optimizer.register_step_pre_hook(_interrupt)
        with pytest.raises(KeyboardInterrupt):
            for _ in loop.run(1):
                pass
        handle.remove()
        loop.scaler.update()
        for step, want in loop.run(2):
            if step:
                assert norms_in(sink.records[-1]) == pytest.approx(want, rel=1e-5)
    assert not grad_scaler._inside


def _interrupt(*args: Any) -> None:
    raise KeyboardInterrupt
