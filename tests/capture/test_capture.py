"""The number a Snapshot reports is the gradient the optimizer is about to get, before anybody's clipping."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradwatch
from gradwatch.reading import batched_norms
from gradwatch.session.watch import session_of
from gradwatch.taps import step_hooks
from tests.support.kept import Kept
from tests.support.recorder import Recorder, norms_of, seen

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(7))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def close(got: dict[str, float], want: dict[str, float]) -> None:
    assert got.keys() == want.keys()
    assert got == pytest.approx(want, rel=1e-5)


def loss_of(model: nn.Module, x: torch.Tensor = X) -> torch.Tensor:
    return model(x).pow(2).sum()


def rounds(
    recorder: Recorder, model: nn.Module, optimizer: torch.optim.Optimizer, count: int
) -> Iterator[int]:
    """Steps: gradients are gone before the body of the loop, and what is seen of them after it is right."""
    for step in range(count):
        optimizer.zero_grad()
        yield step
        want = norms_of(model.named_parameters())
        optimizer.step()
        close(seen(recorder.snapshots[-1]), want)


def test_plain_loop_reports_raw_norms() -> None:
    """One backward per step: every norm is right and none is provisional."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Recorder(model) as recorder:
        for _ in rounds(recorder, model, optimizer, 8):
            loss_of(model).backward()
        assert [snapshot.step for snapshot in recorder.snapshots] == list(range(8))
        # No capture before the first step: nothing was read early.
        assert [snapshot.provisional for snapshot in recorder.snapshots] == [True] + [False] * 7


def test_user_clipping_is_seen_after_not_instead() -> None:
    """`norm` is before clip_grad_norm_, `norm_applied` after it, `coef` their ratio as torch computed it."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Recorder(model) as recorder:
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model).backward()
            want = norms_of(model.named_parameters())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            applied = norms_of(model.named_parameters())
            optimizer.step()
            snapshot = recorder.snapshots[-1]
            if step == 0:
                assert snapshot.provisional
                continue
            close(seen(snapshot), want)
            assert snapshot.total_norm_applied == pytest.approx(0.1, rel=1e-4)
            column = snapshot.column("norm_applied")
            assert column is not None
            assert dict(zip(snapshot.sites.names, column.values.tolist(), strict=True)) == pytest.approx(
                applied, rel=1e-5
            )


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_reports_the_sum_once(set_to_none: bool) -> None:
    """Three backwards per step: the accumulated norm, three arrivals, one Snapshot; also under clipping."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Recorder(model) as recorder:
        for step in range(8):
            optimizer.zero_grad(set_to_none=set_to_none)
            for micro in range(3):
                loss_of(model, X * (micro + 1)).backward()
            want = norms_of(model.named_parameters())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            snapshot = recorder.snapshots[-1]
            if step:
                close(seen(snapshot), want)
                assert snapshot.micro == 3
                assert set(snapshot.calls.tolist()) == {3}
    assert len(recorder.snapshots) == 8


def test_partial_window_is_provisional() -> None:
    """A shorter last window of an epoch is read after the user's clipping, and says so."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Recorder(model) as recorder:
        for micro in [2] * 6 + [1]:
            optimizer.zero_grad()
            for _ in range(micro):
                loss_of(model).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        assert [snapshot.provisional for snapshot in recorder.snapshots] == [True] + [False] * 5 + [True]
        # From now on every backward is read, so that the next partial window is not missed.
        optimizer.zero_grad()
        loss_of(model).backward()
        want = norms_of(model.named_parameters())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        assert not recorder.snapshots[-1].provisional
        close(seen(recorder.snapshots[-1]), want)


def test_two_optimizers_as_in_a_gan() -> None:
    """Each optimizer gets its own Snapshot of its own parameters, whoever else's backward touched them."""
    torch.manual_seed(0)
    generator, critic = net(), nn.Linear(2, 1)
    of_generator = torch.optim.Adam(generator.parameters(), 0.01)
    of_critic = torch.optim.Adam(critic.parameters(), 0.01)
    with Recorder([generator, critic]) as recorder:
        for step in range(4):
            of_critic.zero_grad()
            critic(generator(X).detach()).pow(2).sum().backward()
            want = norms_of((f"Linear.{n}", p) for n, p in critic.named_parameters())
            of_critic.step()
            close(seen(recorder.snapshots[-1]), want)
            of_generator.zero_grad()
            critic(generator(X)).sum().backward()
            want = norms_of((f"Sequential.{n}", p) for n, p in generator.named_parameters())
            of_generator.step()
            close(seen(recorder.snapshots[-1]), want)
            assert recorder.snapshots[-1].step == step
        assert {snapshot.optimizer for snapshot in recorder.snapshots} == {0, 1}


def test_unused_parameter_is_absent_not_zero() -> None:
    """A parameter without a gradient has calls 0; one with an all-zero gradient has calls 1 and norm 0."""
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2), "zeroed": nn.Linear(3, 2)})
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Recorder(model) as recorder:
        for _ in range(3):
            optimizer.zero_grad()
            (model["used"](X).sum() + 0.0 * model["zeroed"](X).sum()).backward()
            optimizer.step()
            got = seen(recorder.snapshots[-1])
            assert "unused.weight" not in got
            assert got["zeroed.weight"] == 0.0
            assert got["used.weight"] > 0


def test_stale_gradient_is_absent() -> None:
    """A gradient nobody renewed is no gradient of this step, even if nobody cleared it."""
    model = nn.ModuleDict({"often": nn.Linear(3, 2), "once": nn.Linear(3, 2)})
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Recorder(model) as recorder:
        for step in range(5):
            model["often"].zero_grad()
            loss = loss_of(model["often"]) + (loss_of(model["once"]) if step == 0 else 0)
            loss.backward()
            optimizer.step()
        assert "once.weight" in seen(recorder.snapshots[0])
        assert all("once.weight" not in seen(snapshot) for snapshot in recorder.snapshots[1:])


def test_tied_parameters_count_once() -> None:
    """A shared weight has one name, and the norm of its summed gradient."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(7, 3)
            self.head = nn.Linear(3, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(tokens))

    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Recorder(model) as recorder:
        for _ in rounds(recorder, model, optimizer, 3):
            model(torch.tensor([1, 2, 2])).pow(2).sum().backward()
    assert recorder.snapshots[0].sites.names == ("embed.weight",)


def test_frozen_then_unfrozen_parameter_joins() -> None:
    """A parameter that starts to want a gradient becomes a site at its first step."""
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Recorder(model) as recorder:
        for step in rounds(recorder, model, optimizer, 6):
            if step == 3:
                model[0].requires_grad_(True)
            loss_of(model).backward()
        assert [snapshot.step for snapshot in recorder.snapshots] == list(range(6))
        assert len(recorder.snapshots[-1].sites) == 4


class Mixture(nn.Module):
    """Sparse, complex, bf16, fp16, float64, 0-dim, empty and channels_last parameters in one model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sparse = nn.Embedding(6, 4, sparse=True)
        self.complex = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.bf16 = nn.Parameter(torch.randn(300_000).bfloat16())
        self.fp16 = nn.Parameter(torch.randn(40).half())
        self.fp64 = nn.Parameter(torch.randn(9, dtype=torch.float64))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.large = nn.Parameter(torch.randn(700, 701))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        image = torch.ones(1, 3, 5, 5).to(memory_format=torch.channels_last)
        total = self.sparse(tokens).pow(2).sum() + (self.complex * (1 + 2j)).abs().sum()
        total = total + self.bf16.float().pow(2).sum() + self.fp16.float().pow(2).sum()
        total = total + self.fp64.pow(3).sum().float() + self.scalar.pow(2) + self.empty.sum()
        return total + self.conv(image).pow(2).sum() + self.large.sin().sum()


def test_every_kind_of_gradient_is_read_right() -> None:
    """Layouts and dtypes: 1e-5 relative against float64; a parameter with no elements is no site."""
    model = Mixture()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    tokens = torch.tensor([1, 1, 2])
    with Recorder(model) as recorder:
        for _ in range(3):
            optimizer.zero_grad()
            model(tokens).backward()
            want = norms_of(model.named_parameters())
            del want["empty"]
            optimizer.step()
            close(seen(recorder.snapshots[-1]), want)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant: bool) -> None:
    """Activation checkpointing of either kind does not change what is reported."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = X.clone().requires_grad_()
    with Recorder(model) as recorder:
        for _ in rounds(recorder, model, optimizer, 4):
            checkpoint(model, x, use_reentrant=reentrant).pow(2).sum().backward()


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS])
@pytest.mark.parametrize("keyword", [True, False])
def test_closures(make: Callable[..., torch.optim.Optimizer], keyword: bool) -> None:
    """A backward inside `step(closure)` is reported once, with the first gradient the closure made."""
    model = net()
    optimizer = make(model.parameters(), lr=0.01)
    wants: list[dict[str, float]] = []

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        wants.append(norms_of(model.named_parameters()))
        return loss.item()

    with Recorder(model) as recorder:
        for step in range(3):
            wants.clear()
            optimizer.step(closure=closure) if keyword else optimizer.step(closure)
            assert len(recorder.snapshots) == step + 1
            close(seen(recorder.snapshots[-1]), wants[0])


def test_backward_that_raises_is_followed_by_a_right_one() -> None:
    """A backward that dies leaves no stuck flag: the next step is reported as if nothing had happened."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Recorder(model) as recorder:
        for step in rounds(recorder, model, optimizer, 5):
            if step == 2:
                handle = model[0].bias.register_hook(lambda grad: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    loss_of(model).backward()
                handle.remove()
                optimizer.zero_grad()
            loss_of(model).backward()


@pytest.mark.parametrize("cleared", [True, False])
def test_a_backward_that_raised_midway_counts_for_nothing(cleared: bool) -> None:
    """Retried at once: one arrival each, the norm of what is in `.grad`, cleared in between or not."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Recorder(model) as recorder:
        for step in range(6):
            optimizer.zero_grad()
            if step == 3:
                handle = model[0].weight.register_hook(lambda grad: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    loss_of(model).backward()
                handle.remove()
                if cleared:
                    optimizer.zero_grad()
            loss_of(model).backward()
            want = norms_of(model.named_parameters())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            snapshot = recorder.snapshots[-1]
            if step:
                close(seen(snapshot), want)
                assert snapshot.calls.tolist() == [1, 1, 1, 1]
                assert snapshot.micro == 1
                assert not snapshot.provisional


def test_add_param_group_and_replaced_parameter() -> None:
    """Parameters that join later are sites from their first step on, under their own names."""
    model = net()
    optimizer = torch.optim.SGD(model[0].parameters(), 0.01)
    with Recorder(model) as recorder:
        for step in range(6):
            if step == 2:
                optimizer.add_param_group({"params": list(model[2].parameters())})
            if step == 4:
                fresh = nn.Parameter(model[2].weight.detach().clone())
                model[2].weight = fresh
                optimizer.param_groups[1]["params"][0] = fresh
            model.zero_grad()
            loss_of(model).backward()
            want = norms_of(model.named_parameters())
            optimizer.step()
            got = seen(recorder.snapshots[-1])
            assert got == pytest.approx({name: want[name] for name in got}, rel=1e-5)
            assert len(got) == (2 if step < 2 else 4)


def wide(layers: int = 40) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)])


def test_marks_are_thinned_and_the_numbers_stay_right() -> None:
    """Once the loop is learned a few sentinels remain, with the same norms, arrivals and absences."""
    model = wide()
    x = torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with Recorder(model) as recorder:
        for _ in rounds(recorder, model, optimizer, 12):
            loss_of(model, x).backward()
        assert recorder.capture.slots.hooked <= 6
        assert set(recorder.snapshots[-1].calls.tolist()) == {1}


@pytest.mark.parametrize("change", ["skip_layer", "accumulate", "keep_grads", "in_place_zero"])
def test_thinned_marks_come_back_when_the_loop_changes(change: str) -> None:
    """Whatever changes after thinning is either reported right, or that one step is provisional."""
    model = wide()
    x = torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    with Recorder(model) as recorder:
        for step in range(24):
            changed = step >= 12
            if not (changed and change == "keep_grads" and step % 2):
                optimizer.zero_grad(set_to_none=not (changed and change == "in_place_zero"))
            layers = [
                layer for i, layer in enumerate(model) if not (changed and change == "skip_layer" and i == 7)
            ]
            for _ in range(2 if changed and change == "accumulate" else 1):
                loss_of(nn.Sequential(*layers), x).backward()
            want = norms_of(model.named_parameters())
            optimizer.step()
            snapshot = recorder.snapshots[-1]
            if not snapshot.provisional:
                got = seen(snapshot)
                assert got == pytest.approx({name: want[name] for name in got}, rel=1e-5)
                skipped = {"7.weight", "7.bias"} if changed and change == "skip_layer" else set()
                assert got.keys() == want.keys() - skipped
        assert not any(snapshot.provisional for snapshot in recorder.snapshots[15:])


def test_double_firing_step_is_one_step() -> None:
    """A subclass whose step calls super().step() fires torch's global hooks twice; we count one step."""

    class Chained(torch.optim.SGD):
        def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
            return super().step(closure)

    model = net()
    optimizer = Chained(model.parameters(), 0.01)
    with Recorder(model) as recorder:
        for _ in range(4):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
    assert [snapshot.step for snapshot in recorder.snapshots] == [0, 1, 2, 3]


def test_gradients_changed_after_the_backward_to_squares_beyond_float64() -> None:
    """The step is judged, also where a script has made warnings errors."""
    model = nn.Linear(4, 4, dtype=torch.float64)
    sink = Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with gradwatch.watch(model, optimizer, sinks=[sink], strict=True):
        model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        assert model.weight.grad is not None
        model.weight.grad.fill_(1e200)
        optimizer.step()
    assert sink.records[0].snapshot.total_norm_applied == math.inf


def test_norm_overflow_underflow_and_zero_are_told_apart() -> None:
    """Finite 1e20 elements overflow only the fast norm; 1e-25 is not zero; counts name NaN and Inf."""
    model = nn.ParameterDict(
        {
            name: nn.Parameter(torch.ones(1000))
            for name in ("big", "huge", "small", "zero", "nan", "inf", "fine")
        }
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with Recorder(model) as recorder:
        for _ in range(2):
            optimizer.zero_grad()
            sum(parameter.sum() for parameter in model.values()).backward()
            model["big"].grad.fill_(1e20)
            model["huge"].grad.fill_(3e38)
            model["small"].grad.fill_(1e-25)
            model["zero"].grad.zero_()
            model["nan"].grad[:3] = float("nan")
            model["inf"].grad[:2] = float("inf")
            optimizer.step()
        loop = recorder.snapshots[-1]
    # Written after the read, so this is what the step boundary found: `norm_applied` is not looked at twice.
    assert seen(loop)["fine"] == pytest.approx(1000**0.5)


def test_details_of_suspicious_norms() -> None:
    """What backward itself produced is counted per parameter: NaN, Inf, overflow, exact small norms."""

    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor, name: str) -> torch.Tensor:
            ctx.name = name  # type: ignore[attr-defined]
            return x.sum()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            out = torch.ones(1000)
            name = ctx.name  # type: ignore[attr-defined]
            if name in ("big", "huge", "small"):
                out.fill_({"big": 1e18, "huge": 3e38, "small": 1e-25}[name])
            elif name == "zero":
                out.zero_()
            elif name in ("nan", "inf"):
                out[:3] = float(name)
            return out, None

    names = ("big", "huge", "small", "zero", "nan", "inf", "fine")
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(1000)) for name in names})
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with Recorder(model) as recorder:
        for _ in range(3):
            optimizer.zero_grad()
            sum(Poison.apply(parameter, name) for name, parameter in model.items()).backward()
            optimizer.step()
    snapshot = recorder.snapshots[-1]
    norm = seen(snapshot)
    assert norm["big"] == pytest.approx(1e18 * 1000**0.5, rel=1e-5)
    assert norm["small"] == pytest.approx(1e-25 * 1000**0.5, rel=1e-5)
    assert norm["zero"] == 0.0
    found = {
        name: dict(zip(snapshot.sites.names, snapshot.column(name).values.tolist(), strict=True))  # type: ignore[union-attr]
        for name in ("nonfinite", "nan_count", "inf_count", "norm_overflow")
    }
    assert {n: v for n, v in found["nonfinite"].items() if v} == {"nan": 3, "inf": 3}
    assert {n: v for n, v in found["nan_count"].items() if v} == {"nan": 3}
    assert {n: v for n, v in found["inf_count"].items() if v} == {"inf": 3}
    assert {n: v for n, v in found["norm_overflow"].items() if v} == {"huge": 1}


@pytest.mark.parametrize("fused", [False, True])
def test_loss_scale_is_removed(fused: bool) -> None:
    """Under a GradScaler every norm is that of the unscaled gradient; a rejected step leaves one too."""
    model, reference = net(), net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with Recorder(model) as recorder:
        for step in range(6):
            reference.load_state_dict(model.state_dict())
            reference.zero_grad()
            loss_of(reference).backward()
            want = norms_of(reference.named_parameters())
            optimizer.zero_grad()
            loss = loss_of(model) * (float("inf") if step == 3 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if step and step != 3:
                close(seen(recorder.snapshots[-1]), want)
                assert not recorder.snapshots[-1].provisional
    assert [snapshot.step for snapshot in recorder.snapshots] == list(range(6))
    assert [snapshot.scalars["scaler_skip"] for snapshot in recorder.snapshots] == [0, 0, 0, 1, 0, 0]
    assert [snapshot.loss_scale for snapshot in recorder.snapshots] == [1024.0] * 4 + [512.0] * 2


def test_close_gives_everything_back() -> None:
    """After close no hook of ours is left on parameters, optimizers, torch or GradScaler."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    names = ("_unscale_grads_", "step", "update")
    found = [getattr(torch.amp.GradScaler, name) for name in names]
    recorder = Recorder(model)
    loss_of(model).backward()
    optimizer.step()
    assert step_hooks.installed() == 2
    recorder.close()
    assert step_hooks.installed() == 0
    assert all(not p._post_accumulate_grad_hooks and not p._backward_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks
    assert [getattr(torch.amp.GradScaler, name) for name in names] == found


def test_model_is_collectable_after_close() -> None:
    """Nothing keeps a model alive once the watch is closed (hook cycles on parameters are uncollectable)."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    recorder = Recorder(model)
    loss_of(model).backward()
    optimizer.step()
    gone = weakref.ref(model), weakref.ref(optimizer)
    recorder.close()
    del model, optimizer
    gc.collect()
    assert gone[0]() is None
    assert gone[1]() is None


def test_deepcopy_of_a_watched_model_carries_nothing() -> None:
    """A copy has no marks: its gradients are never reported."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Recorder(model) as recorder:
        twin = copy.deepcopy(model)
        twin_optimizer = torch.optim.SGD(twin.parameters(), 0.01)
        loss_of(twin).backward()
        twin_optimizer.step()
        assert recorder.snapshots == []
        loss_of(model).backward()
        optimizer.step()
        assert len(recorder.snapshots) == 1


def test_a_new_optimizer_of_the_same_parameters_is_read_as_its_predecessor_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """How gradients are read is planned once for a model, however many optimizers train it one after another."""
    planned = []

    class Counted(batched_norms.Plan):
        def __init__(self, *args: Any) -> None:
            planned.append(len(args[0]))
            super().__init__(*args)

    monkeypatch.setattr(batched_norms, "Plan", Counted)
    model, sink = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with gradwatch.watch(model, optimizer, sinks=[sink]) as gw:
        for number in range(3):
            if number:
                optimizer = torch.optim.SGD(model.parameters(), 0.01)
                session_of(gw).join([model], [optimizer])
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(5, 3)).pow(2).sum().backward()
                expected = [
                    float(param.grad.norm()) for param in model.parameters() if param.grad is not None
                ]
                optimizer.step()
                assert sink.records[-1].snapshot.norm == pytest.approx(expected, rel=1e-5)
    assert planned == [4, 4]  # of the weights, and of their gradients


@pytest.mark.parametrize("watched_head", [True, False])
def test_a_part_of_a_backward_is_no_backward_of_its_own(watched_head: bool) -> None:
    """With layers before and behind a reentrant checkpoint, some frozen, one backward is counted for one step."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    head = nn.Linear(2, 2).requires_grad_(watched_head)
    whole, sink = nn.ModuleList([model, head]), Kept()
    optimizer = torch.optim.SGD([param for param in whole.parameters() if param.requires_grad], 0.01)
    with gradwatch.watch(whole, optimizer, sinks=[sink]):
        for _ in range(4):
            optimizer.zero_grad()
            head(checkpoint(model, X.clone().requires_grad_(), use_reentrant=True)).pow(2).sum().backward()
            expected = [float(param.grad.norm()) for param in whole.parameters() if param.grad is not None]
            optimizer.step()
            snapshot = sink.records[-1].snapshot
            assert snapshot.norm == pytest.approx(expected, rel=1e-5)
            assert set(snapshot.calls.tolist()) == {1}
            assert snapshot.micro == 1
