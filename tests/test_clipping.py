"""Clipping is noticed before it happens: the norm is pre-clip in every window, also one that ends early."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad, clip_grad_norm_, clip_grad_value_

import gradwatch
from gradwatch.hooks import clipping
from tests.kept import Kept
from tests.recorder import norms_of

ORIGINAL = clip_grad._group_tensors_by_device_and_dtype
X = torch.randn(16, 3, generator=torch.Generator().manual_seed(5))
# Twelve full windows so that the loop is learned and its marks thinned, then one that ends early.
WINDOWS = (*[3] * 12, 2, *[3] * 3, 1)


def by_hand(gw: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Clipping that torch knows nothing of, announced."""
    gw.about_to_clip()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.125)


def by_norm(gw: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    clip_grad_norm_(model.parameters(), 0.1)


def by_value(gw: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    clip_grad_value_(model.parameters(), 0.01)


def in_two_parts(gw: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    total = nn.utils.get_total_norm(grads)
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, total)


Clip = Callable[[Any, nn.Module, torch.optim.Optimizer], None]
CLIPS: dict[str, Clip] = {
    "norm": by_norm,
    "value": by_value,
    "two_parts": in_two_parts,
    "own_code": by_hand,
}


def wide(parameters: int = 40) -> nn.Module:
    """Enough parameters for the marks to be thinned."""
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Linear(3, 3) for _ in range(parameters // 2)])


def train(clip: Clip, scaler: Any = None, rules: str = "default") -> tuple[list[Any], list[dict[str, float]]]:
    """(what was recorded, float64 norms before clipping) of every window."""
    model = wide()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    sink, truth = Kept(), []
    with gradwatch.watch(model, optimizer, rules=rules, sinks=[sink], strict=True) as gw:
        for window in WINDOWS:
            for micro in range(window):
                loss = model(X * (micro + 1)).square().mean()
                (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.unscale_(optimizer)
            truth.append(norms_of(model.named_parameters()))
            clip(gw, model, optimizer)
            optimizer.step() if scaler is None else scaler.step(optimizer)
            if scaler is not None:
                scaler.update()
            optimizer.zero_grad()
    return [record.snapshot for record in sink.records], truth


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("scaled", [False, True])
def test_windows_that_end_early_are_read_before_clipping(clip: str, scaled: bool) -> None:
    """`norm` is the float64 pre-clip norm in every window, nothing is provisional, with a GradScaler too."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5) if scaled else None
    snapshots, truth = train(CLIPS[clip], scaler)
    assert len(snapshots) == len(WINDOWS)
    for snapshot, norms in zip(snapshots, truth, strict=True):
        reported = dict(zip(snapshot.sites.names, snapshot.norm.tolist(), strict=True))
        assert reported == pytest.approx(norms, rel=1e-5)
        assert snapshot.total_norm_applied < 0.9 * snapshot.total_norm
        assert not snapshot.provisional


def test_what_a_window_that_ended_early_shows_without_notice() -> None:
    """Clipping by code of one's own that is not announced: flagged provisional, as documented."""

    def silently(gw: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.125)

    snapshots, truth = train(silently)
    assert [each.step for each in snapshots if each.provisional] == [12]
    assert snapshots[12].norm[0] == pytest.approx(truth[12]["0.weight"] * 0.125)
    # For a hundred steps after that every backward is read, so the next one is right.
    assert snapshots[16].norm[0] == pytest.approx(truth[16]["0.weight"])


def test_torch_is_given_back_as_found() -> None:
    """The wrapper is there while somebody listens, and never on the functions that scripts import."""
    functions = (clip_grad_norm_, clip_grad_value_, nn.utils.clip_grads_with_norm_, nn.utils.get_total_norm)
    first, second = wide(2), wide(2)
    one = gradwatch.watch(first, sinks=[])
    two = gradwatch.watch(second, sinks=[])
    assert clip_grad._group_tensors_by_device_and_dtype is not ORIGINAL
    assert functions == (
        clip_grad.clip_grad_norm_,
        clip_grad.clip_grad_value_,
        clip_grad._clip_grads_with_norm_,
        clip_grad._get_total_norm,
    )
    one.close()
    assert clip_grad._group_tensors_by_device_and_dtype is not ORIGINAL
    two.close()
    assert clip_grad._group_tensors_by_device_and_dtype is ORIGINAL


def test_somebody_elses_wrapper_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that another library put over ours stays."""
    gw = gradwatch.watch(wide(2), sinks=[])
    theirs = lambda *args, **kwargs: ORIGINAL(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(clip_grad, clipping.SORTER, theirs)
    gw.close()
    assert clip_grad._group_tensors_by_device_and_dtype is theirs
    monkeypatch.undo()
    clipping._put_back()
    setattr(clip_grad, clipping.SORTER, ORIGINAL)


def test_without_torchs_sorter_clipping_goes_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that has no such function is left as it is, and watching works."""
    with monkeypatch.context() as patch:
        patch.delattr(clip_grad, clipping.SORTER)
        gradwatch.watch(wide(2), sinks=[], strict=True).close()
        assert not hasattr(clip_grad, clipping.SORTER)


def test_clipping_is_bit_identical_and_a_fault_of_ours_stays_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clipped gradients are those of an unwatched run, even while our read fails."""
    bare, watched = wide(4), wide(4)
    gw = gradwatch.watch(watched, sinks=[])
    for model in (bare, watched):
        model(X).square().mean().backward()
    with monkeypatch.context() as patch:
        patch.setattr(gw._capture, "lanes", None)
        totals = [clip_grad_norm_(model.parameters(), 0.1) for model in (bare, watched)]
    gw.close()
    assert gw.health.errors().keys() == {"capture"}
    assert torch.equal(*totals)
    for one, other in zip(bare.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_a_compiled_clip_has_no_graph_break() -> None:
    """`torch.compile(fullgraph=True)` over a clipping function works as without a watch."""
    model = wide(2)
    reference = copy.deepcopy(model)
    compiled = torch.compile(lambda grads: clip_grads(grads), backend="aot_eager", fullgraph=True)
    with gradwatch.watch(model, sinks=[], strict=True):
        model(X).square().mean().backward()
        reference(X).square().mean().backward()
        out = compiled([p.grad for p in model.parameters()])
    assert torch.equal(out, clip_grads([p.grad for p in reference.parameters()]))


def clip_grads(grads: list[Any]) -> torch.Tensor:
    return nn.utils.get_total_norm(grads)


def test_attached_between_backward_and_clip() -> None:
    """A watch opened after the backward still reads what is there before it is clipped."""
    model = wide(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model(X).square().mean().backward()
    truth = norms_of(model.named_parameters())
    sink = Kept()
    with gradwatch.watch(model, optimizer, sinks=[sink], strict=True):
        clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    (record,) = sink.records
    assert dict(
        zip(record.snapshot.sites.names, record.snapshot.norm.tolist(), strict=True)
    ) == pytest.approx(truth)
    assert record.snapshot.total_norm_applied == pytest.approx(0.01, rel=1e-3)
    assert not record.snapshot.provisional
