"""Clipping is noticed before it happens: the norm is pre-clip in every window, also one that ends early."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad, clip_grad_norm_, clip_grad_value_

import gradwatch
from gradwatch.reading.batched_norms import CpuReader
from gradwatch.session.watch import session_of
from gradwatch.taps import clip_functions
from tests.support.kept import Kept
from tests.support.recorder import norms_of

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
    functions = (clip_grad_norm_, clip_grad_value_, nn.utils.get_total_norm)
    multiplier = clip_grad._clip_grads_with_norm_
    first, second = wide(2), wide(2)
    one = gradwatch.watch(first, sinks=[])
    two = gradwatch.watch(second, sinks=[])
    assert clip_grad._group_tensors_by_device_and_dtype is not ORIGINAL
    assert functions == (
        clip_grad.clip_grad_norm_,
        clip_grad.clip_grad_value_,
        clip_grad._get_total_norm,
    )
    assert nn.utils.clip_grads_with_norm_ is multiplier
    assert clip_grad._clip_grads_with_norm_ is not multiplier
    one.close()
    assert clip_grad._group_tensors_by_device_and_dtype is not ORIGINAL
    two.close()
    assert clip_grad._group_tensors_by_device_and_dtype is ORIGINAL
    assert clip_grad._clip_grads_with_norm_ is multiplier


def test_somebody_elses_wrapper_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that another library put over ours stays."""
    gw = gradwatch.watch(wide(2), sinks=[])
    theirs = lambda *args, **kwargs: ORIGINAL(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(clip_grad, clip_functions.SORTER, theirs)
    gw.close()
    assert clip_grad._group_tensors_by_device_and_dtype is theirs
    monkeypatch.undo()
    setattr(clip_grad, clip_functions.SORTER, ORIGINAL)


def test_without_torchs_sorter_clipping_goes_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that has no such function is left as it is, and watching works."""
    with monkeypatch.context() as patch:
        patch.delattr(clip_grad, clip_functions.SORTER)
        gradwatch.watch(wide(2), sinks=[], strict=True).close()
        assert not hasattr(clip_grad, clip_functions.SORTER)


def test_clipping_is_bit_identical_and_a_fault_of_ours_stays_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clipped gradients are those of an unwatched run, even while our read fails."""
    bare, watched = wide(4), wide(4)
    gw = gradwatch.watch(watched, sinks=[])
    for model in (bare, watched):
        model(X).square().mean().backward()
    with monkeypatch.context() as patch:
        patch.setattr(session_of(gw).attached.capture, "captures", None)
        totals = [clip_grad_norm_(model.parameters(), 0.1) for model in (bare, watched)]
    gw.close()
    assert "capture" in gw.health.errors()
    assert gw.health.errors().keys() <= {"capture", "boundary"}  # the clip tells both
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


# --- the norm after torch's own clip is known by arithmetic ---------------------------------------------------


def one_step(clip: Callable[[nn.Module], None], dtype: torch.dtype = torch.float32, steps: int = 4) -> Any:
    """(last Snapshot, float64 norms the optimizer got, how often gradients were read) of a short loop."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2)).to(dtype)
    optimizer = torch.optim.SGD(reversed(list(model.parameters())), 1e-3)  # not in the order of the clip
    sink = Kept()
    reads: list[Counter[CpuReader]] = []  # by reader: looks at the weights have one of their own
    read = CpuReader.read

    def counted(self: CpuReader, grads: Any) -> Any:
        reads[-1][self] += 1
        return read(self, grads)

    with pytest.MonkeyPatch.context() as patch, gradwatch.watch(model, optimizer, sinks=[sink], strict=True):
        patch.setattr(CpuReader, "read", counted)
        for _ in range(steps):
            reads.append(Counter())
            optimizer.zero_grad()
            model(X.to(dtype)).square().mean().backward()
            clip(model)
            truth = norms_of(model.named_parameters())
            optimizer.step()
    return sink.records[-1].snapshot, truth, max(reads[-1].values())


def applied(snapshot: Any) -> dict[str, float]:
    return dict(zip(snapshot.sites.names, snapshot.column("norm_applied").values.tolist(), strict=True))


def clip_to(max_norm: float) -> Callable[[nn.Module], None]:
    return lambda model: (clip_grad_norm_(model.parameters(), max_norm), None)[1]


@pytest.mark.parametrize("max_norm", [1e-3, 0.05, 1e9])
def test_a_clip_by_torch_costs_no_second_read(max_norm: float) -> None:
    """Its factor is known, so what the optimizer gets is too, to 1e-6 of float64 norms taken after the clip."""
    snapshot, truth, reads = one_step(clip_to(max_norm))
    assert applied(snapshot) == pytest.approx(truth, rel=1e-6)
    assert reads == 1
    assert (snapshot.coef == 1).all() == (max_norm == 1e9)


def doubled(model: nn.Module) -> None:
    """Clipped, and then changed by other code."""
    clip_grad_norm_(model.parameters(), 0.05)
    model[0].weight.grad.mul_(2)  # type: ignore[index, union-attr, operator]


def replaced(model: nn.Module) -> None:
    """Clipped, with a gradient exchanged for another of the same version since."""
    clip_grad_norm_(model.parameters(), 0.05)
    weight = model[0].weight  # type: ignore[index]
    weight.grad = torch.full_like(weight, 0.25).mul_(1)


def in_halves(model: nn.Module) -> None:
    """Each layer clipped by itself."""
    for layer, bound in ((model[0], 0.01), (model[2], 0.03)):  # type: ignore[index]
        clip_grad_norm_(layer.parameters(), bound)


def twice(model: nn.Module) -> None:
    """Clipped, and clipped again."""
    clip_grad_norm_(model.parameters(), 0.05)
    clip_grad_norm_(model.parameters(), 0.01)


def one_by_one(model: nn.Module) -> None:
    """Every parameter clipped by itself, and then all."""
    for parameter in model.parameters():
        clip_grad_norm_(parameter, 0.01)
    clip_grad_norm_(model.parameters(), 0.001)


def tiny(model: nn.Module) -> None:
    """By a factor that flushes elements to zero."""
    clip_grad_norm_(model.parameters(), 1e-42)


def value_then_norm(model: nn.Module) -> None:
    """A clip whose effect nobody announced, and one that was."""
    clip_grad_value_(model.parameters(), 0.001)
    clip_grad_norm_(model.parameters(), 0.002)


@pytest.mark.parametrize(
    "clip", [doubled, replaced, in_halves, twice, one_by_one, tiny, value_then_norm], ids=lambda f: f.__name__
)
def test_whatever_else_happens_to_gradients_around_a_clip_is_read(clip: Callable[[nn.Module], None]) -> None:
    """Arithmetic is used only where the announced clips are all that happened."""
    snapshot, truth, _ = one_step(clip)
    assert applied(snapshot) == pytest.approx(truth, rel=1e-5, abs=1e-42)


def test_a_clip_of_bfloat16_gradients_is_read_again() -> None:
    """One multiplication of bfloat16 rounds by up to 4e-3, which arithmetic would not see."""
    snapshot, truth, reads = one_step(clip_to(0.05), torch.bfloat16)
    assert reads == 2
    assert applied(snapshot) == pytest.approx(truth, rel=1e-5)


def test_a_clip_of_one_of_two_models_is_known_to_it_alone() -> None:
    """Two optimizers, each clipped before both step: neither takes the other's factor."""
    torch.manual_seed(0)
    models = [nn.Linear(3, 4), nn.Linear(4, 3)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in models]
    sink = Kept()
    with gradwatch.watch(models, optimizers, sinks=[sink], strict=True):
        for _ in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            models[1](models[0](X)).square().mean().backward()
            for model, bound in zip(models, (0.01, 0.002), strict=True):
                clip_grad_norm_(model.parameters(), bound)
            truths = [norms_of(model.named_parameters()) for model in models]
            for optimizer in optimizers:
                optimizer.step()
    for record, truth in zip(sink.records[-2:], truths, strict=True):
        found = [value for _, value in sorted(applied(record.snapshot).items())]
        assert found == pytest.approx([value for _, value in sorted(truth.items())], rel=1e-6)
