"""The accelerator path, as far as it can be shown without one: on CPU tensors routed through it, and on `meta`.

The `meta` device has no numbers: whatever would read one on the host raises there. On a real one: `tests/gpu`.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradwatch.capture import parameter_names as site_names
from gradwatch.capture.columns import activation_reader, module_taps
from gradwatch.policies.norm import clip_coefficient
from gradwatch.reading import async_copy, foreach_norms, pinned_buffers
from gradwatch.reading.pinned_buffers import PinnedPool, Sending
from gradwatch.rules.files import parse_rules
from gradwatch.session.pipeline import deferred_steps
from gradwatch.session.pipeline.deferred_steps import DEPTH
from tests.precision.loops import ScaledLoop, X, events, exact_norms, net, norms_in, watched
from tests.reading.test_foreach_norms import WAITING, Operations
from tests.support.on_device import gradients_on_device

CLIP = "version: 1\nclip: {total: {method: norm, max_norm: 0.7}}\nrules: {}"


@pytest.fixture
def routed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor counts as one on a device."""
    gradients_on_device(monkeypatch)


class Late:
    """Makes every copy to the host late until told otherwise; waiting for one is noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrived = False
        monkeypatch.setattr(Sending, "ready", lambda sending: self.arrived)


# -- no waiting ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", ["observe-only", "default"])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.usefixtures("routed")
def test_under_a_scaler_nothing_waits(pack: str, unscale: bool) -> None:
    """Fused optimizer and GradScaler: no operation of ours, nor of theirs, reads a number on the host."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=True)  # AdamW reads its own step counts
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    gw, sink = watched(model, optimizer, pack)
    with gw:
        for step in range(9):
            optimizer.zero_grad()
            loss = scaler.scale(model(X).pow(2).sum() * (float("inf") if step == 4 else 1.0))
            with Operations() as operations:
                loss.backward()
                if unscale:
                    scaler.unscale_(optimizer)
                gw.observe(loss=loss)
                scaler.step(optimizer)
                scaler.update()
            assert not [name for name in operations.names if name in WAITING], step
    snapshots = [record.snapshot for record in sink.records]
    assert [snapshot.scalars["scaler_skip"] for snapshot in snapshots] == [0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert [snapshot.loss_scale for snapshot in snapshots] == [1024.0] * 5 + [512.0] * 4
    assert {event.rule for event in events(sink)} <= {"scaler-skip"}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.usefixtures("routed")
def test_the_numbers_are_those_of_the_host_path(fused: bool, unscale: bool) -> None:
    """Norms, rejected steps and clipping under a GradScaler, read on a device: right, some steps later."""
    loop = ScaledLoop(lambda p: torch.optim.AdamW(p, 1e-2, fused=fused), frozenset({0, 4}), unscale)
    gw, sink = watched(loop.model, loop.optimizer, "observe-only")
    with gw:
        wants = [want for _, want in loop.run(8)]
        gw.flush()
    assert [record.snapshot.step for record in sink.records] == list(range(8))
    for step, want in enumerate(wants):
        snapshot = sink.records[step].snapshot
        assert snapshot.scalars["scaler_skip"] == (step in loop.bad)
        if step not in loop.bad:
            total = sum(norm**2 for norm in want.values()) ** 0.5
            assert norms_in(sink.records[step]) == pytest.approx(want, rel=1e-5)
            assert snapshot.total_norm_applied == pytest.approx(
                min(total, 0.5) if unscale else total, rel=1e-4
            )


def test_on_meta_every_read_of_a_number_would_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole watch on a device without numbers: one copy of the norms a step, and of whole tensors where due."""
    sent: list[Tensor] = []
    ring = PinnedPool()

    class Wire:
        """The one thing `meta` cannot do: what comes over it is made up here."""

        def send(self, part: Tensor) -> Sending:
            assert part.device.type == "meta"
            sent.append(part)
            return ring.send(torch.full(part.shape, 0.5, dtype=part.dtype))

    monkeypatch.setattr(async_copy, "POOL", Wire())
    monkeypatch.setattr(site_names, "valueless", lambda param: False)
    with torch.device("meta"):
        model, x = net(), torch.randn(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=True)
    gw, sink = watched(model, optimizer, "observe-only")
    with gw:
        for step in range(8):
            optimizer.zero_grad()
            loss = model(x).pow(2).sum()
            loss.backward()
            before = len(sent)
            gw.observe(loss=loss)
            optimizer.step()
            if step > 1:  # a small model's weights and zeros are read at steps 1, 11, ...
                assert [part.shape for part in sent[before:]] == [torch.Size([1])], "the loss"
        norms = [part for part in sent if part.shape == (4,) and part.dtype is torch.float64]
        assert len(norms) == 8
        # At step 1, of the two matrices: the norms of weights, of those before, of what changed, and counts of zeros.
        joint = [part for part in sent if part.shape not in ((1,), (4,))]
        assert [(part.shape, part.dtype) for part in joint] == [((8,), torch.float64)]
    assert [record.snapshot.total_norm for record in sink.records] == [1.0] * 8
    assert sink.records[-1].snapshot.scalars["loss"] == 0.5
    assert gw.health.errors() == {}


TAPPED = """
version: 1
modules: {tap: output, names: ["2"]}
rules:
  a: {detect: {kind: above, of: norm_local, threshold: 1e30}}
  b: {detect: {kind: above, of: grad_output_norm, threshold: 1e30}}
  c: {detect: {kind: above, of: activation_std, threshold: 1e30}}
  d: {detect: {kind: above, of: input_max, threshold: 1e30}}
"""


@pytest.mark.parametrize("captured", ["whole step", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_taps_and_local_norms_on_meta(
    dtype: torch.dtype, captured: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hooks inside backward look at no number either; and under a CUDA graph's capture they do nothing."""
    ring = PinnedPool()

    class Wire:
        def send(self, part: Tensor) -> Sending:
            return ring.send(torch.full(part.shape, 0.5, dtype=part.dtype))

    monkeypatch.setattr(async_copy, "POOL", Wire())
    monkeypatch.setattr(site_names, "valueless", lambda param: False)
    for reads in (module_taps, activation_reader):
        monkeypatch.setattr(reads, "has_values", lambda tensor: True)
    names: list[list[str]] = []
    for rules in (TAPPED, "version: 1\nrules: {}"):
        with torch.device("meta"):
            model, x = net().to(dtype), torch.randn(4, 3, dtype=dtype)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=True)
        gw, sink = watched(model, optimizer, parse_rules(rules))
        with gw:
            for step in range(3):  # activations are looked at in the first three
                optimizer.zero_grad()
                before = model(x).pow(2).sum() if captured == "backward" else None
                with monkeypatch.context() as patch, Operations() as operations:
                    if step == 2:
                        patch.setattr(torch.cuda, "is_initialized", lambda: True)
                        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
                    loss = model(x).pow(2).sum() if before is None else before
                    loss.backward()
                    optimizer.step()
            assert gw.health.errors() == {"capture": 1}  # said once, of the last step
        names.append(operations.names)
        if rules is TAPPED:
            columns = sink.records[-1].snapshot.columns
            assert columns.keys() >= {"norm_local", "grad_output_norm"}
            assert columns["norm_local"].values[:4].tolist() == [0.5] * 4
    assert names[0] == names[1]


def test_several_devices_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients on two devices: one batch each, every norm at its own position."""
    ring, seen = PinnedPool(), []

    class Wire:
        def send(self, part: Tensor) -> Sending:
            seen.append((part.device.type, len(part)))
            return ring.send(torch.full(part.shape, 7.0) if part.device.type == "meta" else part)

    monkeypatch.setattr(async_copy, "POOL", Wire())
    monkeypatch.setattr(site_names, "valueless", lambda param: False)
    grads = [torch.ones(4), torch.empty(3, device="meta"), None, torch.ones(9), torch.empty(2, device="meta")]
    reading = foreach_norms.read(grads)
    assert reading.norms().tolist() == [2.0, 7.0, 0.0, 3.0, 7.0]
    assert seen == [("cpu", 2), ("meta", 2)]


# -- late numbers ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("routed")
def test_late_numbers_queue_in_order_and_the_queue_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is judged before it arrived, nothing overtakes, and no more than a few steps are under way."""
    late = Late(monkeypatch)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    gw, sink = watched(model, optimizer, "observe-only")
    with gw:
        for step in range(10):
            optimizer.zero_grad()
            model(X).pow(2).sum().backward()
            optimizer.step()
            assert len(sink.records) == max(0, step + 1 - DEPTH), "waited for the oldest only"
        late.arrived = True
        optimizer.zero_grad()
        model(X).pow(2).sum().backward()
        optimizer.step()
        assert [record.snapshot.step for record in sink.records] == list(range(10))
    assert [record.snapshot.step for record in sink.records] == list(range(11))


def test_late_verdicts_say_what_the_host_would_have_said(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Norms, columns of whole tensors (an update compares two steps) and events do not depend on when they came."""
    runs = []
    # By default it waits while `jump` fires, which ends when the weights have been looked at.
    alone = "version: 1\nextends: [observe-only]\nrules: {loss-diverged: {inhibited_by: [converged]}}\n"
    for on_device in (False, True):
        if on_device:
            request.getfixturevalue("routed")
            Late(monkeypatch)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        gw, sink = watched(model, optimizer, parse_rules(alone))
        with gw:
            for step in range(12):
                optimizer.zero_grad()
                (model(X).pow(2).sum() * (float("nan") if step == 9 else 1.0)).backward()
                optimizer.step()
        runs.append(sink.records)
    host, late = runs
    for a, b in zip(host, late, strict=True):
        assert b.snapshot.norm.tolist() == pytest.approx(a.snapshot.norm.tolist(), rel=1e-6, nan_ok=True)
        for name in ("update_ratio", "weight_norm", "zero_fraction"):
            left, right = a.snapshot.columns.get(name), b.snapshot.columns.get(name)
            assert (left is None) == (right is None), name
            if left is not None and right is not None:
                assert right.values.tolist() == pytest.approx(left.values.tolist(), rel=1e-6, nan_ok=True)
                assert right.present.tolist() == left.present.tolist()
    told = [[(e.step, e.kind, e.rule) for r in records for e in r.verdict.events] for records in runs]
    # What only a look at the weights confirms is told when there was one, on a device some steps later.
    jumps = [[one for one in events if one[2] == "jump"] for events in told]
    assert jumps[0][0] == jumps[1][0] == (3, "firing", "jump")
    assert [one for one in told[0] if one[2] != "jump"] == [one for one in told[1] if one[2] != "jump"]
    assert any(rule == "non-finite" for _, _, rule in told[0])
    assert any("update_ratio" in record.snapshot.columns for record in late)


FAULTS = {80: float("nan"), 95: 300.0, 110: 0.0}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("rules", ["default", CLIP.replace("rules: {}", "extends: [default]")])
def test_usual_steps_of_a_device_are_judged_together(
    rules: str, fused: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Many wait, a fault is told as soon as its numbers are here, and everything is what the host says."""
    monkeypatch.setattr(deferred_steps, "LONGEST", math.inf)  # no clock decides how many are judged together
    runs, waited = [], 0
    for on_device in (False, True):
        if on_device:
            request.getfixturevalue("routed")
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.001, fused=fused)
        gw, sink = watched(model, optimizer, parse_rules(rules) if rules != "default" else rules)
        with gw:
            for step in range(140):
                optimizer.zero_grad()
                (model(X).pow(2).sum() * FAULTS.get(step, 1.0)).backward()
                optimizer.step()
                if on_device:
                    waited = max(waited, step + 1 - len(sink.records))
                    if step - 1 in FAULTS:  # here it has arrived before the next step
                        assert sink.records[-1].snapshot.step >= step - 1
        runs.append(sink.records)
    host, there = runs
    assert (waited > 16) == (fused or rules == "default")
    for a, b in zip(host, there, strict=True):
        assert b.snapshot.step == a.snapshot.step
        assert b.snapshot.norm.tolist() == pytest.approx(a.snapshot.norm.tolist(), rel=1e-6, nan_ok=True)
        if not any(
            step <= b.snapshot.step < step + 6 for step in FAULTS
        ):  # then it is not known at once what moved
            assert b.snapshot.columns.keys() == a.snapshot.columns.keys(), b.snapshot.step
        assert b.decision.skip == a.decision.skip
        assert b.snapshot.coef.tolist() == pytest.approx(a.snapshot.coef.tolist(), rel=1e-5, nan_ok=True)
    told = [[(e.step, e.kind, e.rule) for r in records for e in r.verdict.events] for records in runs]
    assert told[0] == told[1]
    assert {step for step, kind, _ in told[0] if kind == "firing"} >= {80, 95}


def test_rules_are_bound_anew_after_what_is_late_was_learned(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A parameter group added while numbers are under way: no step is lost to the baselines."""
    learned = []
    for on_device in (False, True):
        if on_device:
            request.getfixturevalue("routed")
            Late(monkeypatch)
        model, extra = net(), nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        gw, sink = watched([model, extra], optimizer, "observe-only")
        with gw:
            for step in range(10):
                if step == 6:
                    optimizer.add_param_group({"params": list(extra.parameters())})
                optimizer.zero_grad()
                (model(X).pow(2).sum() + extra(X).pow(2).sum()).backward()
                optimizer.step()
            gw.flush()
            baselines = gw.state_dict()["lanes"]["0"]["engine"]["baselines"]
        assert [record.snapshot.step for record in sink.records] == list(range(10))
        learned.append({key: rows["fields"].get("n") for key, rows in baselines.items()})
    assert learned[0] == learned[1]


# -- buffers ---------------------------------------------------------------------------------------------


def test_buffers_are_used_again_and_never_while_in_use() -> None:
    """Taking the numbers out frees the buffer; two parts under way have two; what was taken stays as it was."""
    ring = PinnedPool()
    first, second = ring.send(torch.arange(3.0)), ring.send(torch.arange(3.0) + 10)
    used = {id(first._buffer), id(second._buffer)}
    assert len(used) == 2
    taken = first.numbers()
    third = ring.send(torch.full((5,), 7.0))  # another size, the same capacity
    assert id(third._buffer) in used
    assert taken.tolist() == first.numbers().tolist() == [0.0, 1.0, 2.0]
    assert second.numbers().tolist() == [10.0, 11.0, 12.0]
    assert third.numbers().tolist() == [7.0] * 5
    assert ring.send(torch.zeros(5, dtype=torch.float64)).numbers().dtype == np.float64
    for _ in range(100):  # nobody comes for these
        ring.send(torch.ones(3))
    assert sum(map(len, ring._free.values())) <= 2 * pinned_buffers.KEPT


def test_threads_share_the_ring() -> None:
    """Autograd runs one thread per device: numbers never mix."""
    ring, wrong = PinnedPool(), []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        waiting: list[tuple[Tensor, Sending]] = []
        for _ in range(300):
            part = torch.randn(int(torch.randint(1, 40, (1,), generator=generator)), generator=generator)
            waiting.append((part, ring.send(part)))
            if len(waiting) > 5:
                want, sending = waiting.pop(0)
                if not np.array_equal(sending.numbers(), want.numpy()):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# -- acting without the host -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "total", [0.0, 1e-30, 0.3, 0.7, 0.70001, 5.0, 3e38, 1e39, float("inf"), float("nan")]
)
def test_the_device_clips_by_the_same_factor_to_the_bit(total: float) -> None:
    """`device.clip` is `clip_coefficient`, computed without the host; a non-finite total changes nothing."""
    grads = [torch.randn(50), None, torch.randn(3, 4).half(), torch.randn(7, dtype=torch.float64)]
    want = [None if grad is None else grad.clone() for grad in grads]
    present = [grad for grad in want if grad is not None]
    torch._foreach_mul_(present, torch.tensor(clip_coefficient(total, 0.7)))
    with Operations() as operations:
        foreach_norms.clip(grads, torch.tensor(total, dtype=torch.float64), 0.7)
    assert not [name for name in operations.names if name in WAITING]
    assert all(
        a is b or torch.equal(a, b)
        for a, b in zip(grads, want, strict=True)  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("fused", [False, True])
def test_a_standing_clip_works_on_a_device(
    fused: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """`clip: total` without a host-side rule: gradients are clipped in the same step, and the Records say so."""
    runs = []
    for on_device in (False, True):
        if on_device:
            request.getfixturevalue("routed")
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, fused=fused)
        gw, sink = watched(model, optimizer, parse_rules(CLIP))
        with gw:
            for _ in range(6):
                optimizer.zero_grad()
                model(X).pow(2).sum().backward()
                with Operations() as operations:
                    optimizer.step()
                if on_device:
                    assert not [name for name in operations.names if name in WAITING]
        runs.append(([p.detach() for p in model.parameters()], [r.snapshot for r in sink.records]))
    (host, host_seen), (there, there_seen) = runs
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(host, there, strict=True))
    for a, b in zip(host_seen, there_seen, strict=True):
        assert b.total_norm == pytest.approx(a.total_norm, rel=1e-5)
        assert b.total_norm_applied == pytest.approx(a.total_norm_applied, rel=1e-5)
        assert b.coef.tolist() == pytest.approx(a.coef.tolist(), rel=1e-5)
    assert host_seen[0].total_norm > 0.7 > host_seen[-1].total_norm_applied * 0.999


@pytest.mark.usefixtures("routed")
def test_a_standing_clip_on_a_device_under_a_scaler() -> None:
    """The fused optimizer's gradients still carry the scale: the factor is that of the unscaled norm."""
    model, twin = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, fused=True)
    reference = torch.optim.SGD(twin.parameters(), 0.05, fused=True)
    scaler, plain = (torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2))
    gw, _ = watched(model, optimizer, parse_rules(CLIP))
    with gw:
        for step in range(6):
            poison = float("inf") if step == 3 else 1.0
            for each, its_optimizer, its_scaler in ((model, optimizer, scaler), (twin, reference, plain)):
                its_optimizer.zero_grad()
                its_scaler.scale(each(X).pow(2).sum() * poison).backward()
            plain.unscale_(reference)
            nn.utils.clip_grad_norm_(twin.parameters(), 0.7)
            for its_optimizer, its_scaler in ((optimizer, scaler), (reference, plain)):
                its_scaler.step(its_optimizer)
                its_scaler.update()
    assert scaler.get_scale() == plain.get_scale() == 512.0
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in pairs)


@pytest.mark.usefixtures("routed")
def test_a_step_that_raises_leaves_no_verdict_behind() -> None:
    """`found_inf` of a bad step that raised must not make the optimizer skip the good one after it."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, fused=True)
    gw, _ = watched(model, optimizer, "default")

    def refuse(*args: Any) -> None:
        raise RuntimeError("disk full")

    with gw:
        for step in range(4):
            optimizer.zero_grad()
            (model(X).pow(2).sum() * (float("nan") if step == 2 else 1.0)).backward()
            if step == 2:
                handle = optimizer.register_step_pre_hook(refuse)
                with pytest.raises(RuntimeError, match="disk full"):
                    optimizer.step()
                handle.remove()
                assert bool(optimizer.found_inf)
                continue
            weights = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            assert not hasattr(optimizer, "found_inf")
            assert not any(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


@pytest.mark.usefixtures("routed")
def test_finite_gradients_whose_norm_overflows_are_not_skipped() -> None:
    """The device's verdict is about elements: a norm beyond float32 is `norm_overflow`, and the step is taken."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(400))})
    optimizer = torch.optim.SGD(model.parameters(), 1e-38, fused=True)
    gw, sink = watched(model, optimizer, "default")
    with gw:
        for _ in range(3):
            optimizer.zero_grad()
            (model["w"] * 3e38).sum().backward()
            before = model["w"].detach().clone()
            optimizer.step()
            assert not torch.equal(before, model["w"])
    assert {event.rule for event in events(sink, "critical")} >= {"norm-overflow"}
    assert "non-finite" not in {event.rule for event in events(sink)}


# -- CUDA graphs -----------------------------------------------------------------------------------------


def test_a_step_under_capture_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a CUDA graph is captured no operation of ours is enqueued; it is said once; then all goes on."""
    gradients_on_device(monkeypatch)
    names: list[list[str]] = []
    for watch in (False, True):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        gw, sink = watched(model, optimizer, "observe-only") if watch else (None, None)
        for step in range(6):
            optimizer.zero_grad()
            loss = model(X).pow(2).sum()
            with monkeypatch.context() as patch, Operations() as operations:
                if step == 3:
                    patch.setattr(torch.cuda, "is_initialized", lambda: True)
                    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
                loss.backward()
                optimizer.step()
            if step == 3:
                names.append(operations.names)
        if gw is not None and sink is not None:
            want = exact_norms(model, lambda m: m(X).pow(2).sum())
            optimizer.zero_grad()
            model(X).pow(2).sum().backward()
            optimizer.step()
            assert gw.health.errors() == {"capture": 1}
            gw.close()
            assert norms_in(sink.records[-1]) == pytest.approx(want, rel=1e-5)
            assert [record.snapshot.micro for record in sink.records] == [1] * 6  # seven steps, one captured
            assert not sink.records[-1].snapshot.provisional
    assert names[0] == names[1]
