"""The accelerator path, run on CPU tensors: right numbers one step late, and no operation that waits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradwatch
from gradwatch.capture.weights.weight_health import Weights
from gradwatch.reading import async_copy, foreach_norms
from gradwatch.reading.pinned_buffers import PinnedPool
from gradwatch.taps import dispatch_modes
from tests.support.on_device import gradients_on_device, losses_on_device
from tests.support.recorder import Recorder, norms_of, seen

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(3))
WAITING = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "unique")


class Operations(TorchDispatchMode):
    """Notes the name of every ATen operation, gradwatch's included: it is not set aside as a script's mode is.

    Without `looks` the weights are not looked at meanwhile.
    """

    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        self._looks = looks
        self.names: list[str] = []
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Operations:
        for length in ("dispatching", "functions"):
            self._patch.setattr(dispatch_modes, length, lambda: 0)
        losses_on_device(self._patch)
        # At the attach and once a second, at whichever step that is, the weights are looked at. Here they are on the
        # host, where that is an operation that waits or none, as threads and sizes have it.
        for look in () if self._looks else ("check_if_due", "meet"):
            self._patch.setattr(Weights, look, lambda *_: None)
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)
        self._patch.undo()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def test_observing_reads_one_step_late_and_right() -> None:
    """Without a rule that acts, each Snapshot arrives at the next step, with the norms of its own."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wants = []
    with Recorder(model, on_device=True) as recorder:
        recorder.wait = False
        for step in range(5):
            optimizer.zero_grad()
            model(X).pow(2).sum().backward()
            wants.append(norms_of(model.named_parameters()))
            optimizer.step()
            assert len(recorder.snapshots) == step
        recorder.boundary.flush()
        assert [snapshot.step for snapshot in recorder.snapshots] == [0, 1, 2, 3, 4]
        for snapshot, want in zip(recorder.snapshots, wants, strict=True):
            assert seen(snapshot) == pytest.approx(want, rel=1e-5)


def test_no_operation_waits_for_the_device() -> None:
    """The op list of backward, step and read holds nothing that copies a number to the host synchronously."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=True)
    with Recorder(model, on_device=True) as recorder:
        recorder.wait = False
        recorder.gate = True
        for step in range(6):
            optimizer.zero_grad()
            loss = model(X).pow(2).sum()
            with Operations() as operations:
                loss.backward()
                optimizer.step()
            if step > 1:
                assert "_foreach_norm" in operations.names
                assert not [name for name in operations.names if name in WAITING]


@pytest.mark.parametrize(
    ("pack", "fused"), [("observe-only", False), ("observe-only", True), ("default", True)]
)
def test_shipped_packs_wait_for_nothing(
    pack: str, fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole watch, samplers and sinks included: no step holds an operation that waits for the device."""
    gradients_on_device(monkeypatch)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=fused)  # AdamW reads its own step counts
    with gradwatch.watch(
        model, optimizer, rules=pack, run_dir=tmp_path, listen="127.0.0.1:0", strict=True
    ) as gw:
        for step in range(8):  # weights are read at step 1
            optimizer.zero_grad()
            loss = model(X).pow(2).sum()
            with Operations() as operations:
                loss.backward()
                gw.observe(loss=loss)
                optimizer.step()
            waiting = [name for name in operations.names if name in WAITING]
            assert not waiting, (step, waiting)
        gw.flush()
        assert gw.status()["steps"] == 8


def test_fused_optimizer_skips_on_the_device() -> None:
    """`found_inf` makes a fused optimizer skip a non-finite step exactly, with the verdict still on the device."""
    model, reference = net(), net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=True)
    twin = torch.optim.AdamW(reference.parameters(), 0.1, fused=True)
    with Recorder(model, on_device=True) as recorder:
        recorder.wait = False
        recorder.gate = True
        for step in range(6):
            bad = step == 3
            for each, model_ in ((optimizer, model), (twin, reference)):
                each.zero_grad()
                (model_(X).pow(2).sum() * (float("nan") if bad else 1.0)).backward()
            optimizer.step()
            if not bad:
                twin.step()
            assert not hasattr(optimizer, "found_inf")
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
        assert optimizer.state_dict()["state"][0]["step"] == twin.state_dict()["state"][0]["step"]


def test_found_inf_of_a_grad_scaler_is_kept() -> None:
    """Under a GradScaler its own found_inf is joined, restored and left to the scaler to delete."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with Recorder(model, on_device=True) as recorder:
        recorder.wait = False
        recorder.gate = True
        for step in range(5):
            optimizer.zero_grad()
            weights = [parameter.detach().clone() for parameter in model.parameters()]
            scaler.scale(model(X).pow(2).sum() * (float("inf") if step == 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            same = all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
            assert same == (step == 2)
    assert scaler.get_scale() == 128.0


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
@pytest.mark.parametrize("loss", [None, torch.tensor(5.0, dtype=torch.float64), torch.tensor(5.0)])
def test_a_number_that_is_sent_together_with_norms_is_none_of_them(
    bad: float | None, loss: torch.Tensor | None
) -> None:
    """Norms by position, total and verdict are those of the gradients; the number has a scale of its own."""
    grads = [torch.full((4,), 3.0), None, torch.full((9,), 1.0 if bad is None else bad)]
    reading = foreach_norms.read(grads, 2.0, loss)
    last = 1.5 if bad is None else bad
    assert reading.norms().tolist() == pytest.approx([3.0, 0.0, last], nan_ok=True)
    assert {k: float(norm) for k, norm in reading.each().items()} == pytest.approx(
        {0: 6.0, 2: 2 * last}, nan_ok=True
    )
    total, flag = reading.device_total(), reading.nonfinite()
    assert total is not None
    assert flag is not None
    assert float(total) == pytest.approx(math.hypot(6.0, 2 * last) if bad is None else bad, nan_ok=True)
    assert (flag.dtype, float(flag)) == (torch.float32, float(bad is not None))
    if loss is None or loss.dtype is torch.float32:  # another type would be rounded, or round the norms
        assert reading.loss is None
    else:
        assert reading.loss is not None
        assert async_copy.host_value(reading.loss) == 5.0
        assert async_copy.host_value(reading.divided(2.0).loss.divided(4.0)) == 1.25  # type: ignore[union-attr]
        assert reading.divided(2.0).norms().tolist() == pytest.approx([1.5, 0.0, last / 2], nan_ok=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_numbers_of_any_type_arrive(dtype: torch.dtype) -> None:
    """The loss of a model in bfloat16, which numpy has not, is one of them."""
    sent = PinnedPool().send(
        torch.tensor([1.5, -2.0, math.inf] if dtype.is_floating_point else [1, -2, 9]).to(dtype)
    )
    expected = [1.5, -2.0, math.inf] if dtype.is_floating_point else [1, -2, 9]
    assert sent.numbers().tolist() == expected
