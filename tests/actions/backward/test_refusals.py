"""`at: backward` where it would mean something else: refused or switched off loudly; and what hooks promise."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.actions.backward import clip_state
from gradwatch.errors import AttachError, RuleFileError
from gradwatch.rules.files import parse_rules
from tests.support.backward_jobs import CONSTANT, METHODS, POLICY, Job, X, plain_norms, same
from tests.support.kept import Kept

# -- where it would mean something else ------------------------------------------------------------------------


def test_accumulation_switches_it_off_loudly() -> None:
    """At the second backward of a step: no more clipping, one report that names the way out, training goes on."""
    job = Job(CONSTANT % "", strict=False)
    job.backward(100.0)
    assert max(job.norms()) <= 0.5 + 1e-6
    before = job.grads()
    bare = Job()
    (job.model(X).pow(2).sum() * 100).backward()
    bare.backward(100.0)
    for grad, first, added in zip(job.grads(), before, bare.grads(), strict=True):
        assert torch.allclose(grad, first + added)
    job.optimizer.step()
    assert job.gw is not None
    assert job.gw.health.errors() == {"action": 1}
    job.backward(100.0)
    assert max(job.norms()) > 0.5
    job.optimizer.step()
    assert job.gw.health.errors() == {"action": 1}
    job.gw.close()


def test_a_grad_scaler_switches_it_off_before_its_first_backward() -> None:
    """A scaled gradient is never measured against an unscaled bound."""
    job, bare = Job(CONSTANT % "", strict=False), Job()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for each in (job, bare):
        scaler.scale(each.model(X).pow(2).sum()).backward()
    assert same(job.grads(), bare.grads())
    assert job.gw is not None
    assert job.gw.health.errors() == {"action": 1}
    job.gw.close()


@pytest.mark.parametrize("loop", ["accumulates", "scales"])
@pytest.mark.parametrize(
    "text", [CONSTANT % "", *(POLICY % (method, "backward", "") for method in METHODS[:7])]
)
def test_what_is_switched_off_in_the_backward_is_done_at_the_step(text: str, loop: str) -> None:
    """From the step that switches it off, weights and words are those of `at: step`, never a clip that was not."""
    twin = text.replace("at: backward", "at: step")
    jobs = found, wanted = [Job(each, strict=False) for each in (text, twin)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=loop == "scales") for _ in jobs]
    for step, factor in enumerate((1e-4, 1e-4, 300.0, 1.0)):
        for job, scaler in zip(jobs, scalers, strict=True):
            job.optimizer.zero_grad()
            for _ in range(2 if loop == "accumulates" else 1):
                scaler.scale(job.model(X).pow(2).sum() * factor).backward()
            scaler.step(job.optimizer)
            scaler.update()
        if step == 0 and loop == "accumulates":  # until its second backward the hooks acted
            wanted.model.load_state_dict(found.model.state_dict())
            wanted.optimizer.load_state_dict(copy.deepcopy(found.optimizer.state_dict()))
    assert same(found.weights(), wanted.weights())
    for one, other in list(zip(found.sink.records, wanted.sink.records, strict=True))[1:]:
        assert one.decision.orders == other.decision.orders
        assert all(order.coefficient != 1.0 for order in one.decision.orders)
        assert one.snapshot.coef.tolist() == other.snapshot.coef.tolist()
    assert found.sink.records[2].decision.orders
    assert found.gw is not None
    assert found.gw.health.errors() == {"action": 1}
    found.gw.close()
    wanted.close()


def test_insisting_acts_under_a_grad_scaler_on_unscaled_bounds() -> None:
    """`local: true`: the bound holds for the gradient without its loss scale."""
    job = Job(CONSTANT % ", local: true")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(3):
        job.optimizer.zero_grad()
        scaler.scale(job.model(X).pow(2).sum() * 100).backward()
        assert max(job.norms()) / 1024 <= 0.5 + 1e-6
        scaler.step(job.optimizer)
        scaler.update()
        snapshot = job.sink.records[-1].snapshot
        assert snapshot.norm.max() > 2
        assert (snapshot.norm * snapshot.coef).max() == pytest.approx(0.5, rel=1e-4)
    job.close()


def test_insisting_acts_on_every_backward_of_an_accumulating_loop() -> None:
    """`local: true`: each of four backwards is bounded by itself; `norm` is the largest that a hook saw."""
    job = Job(CONSTANT % ", local: true")
    job.optimizer.zero_grad()
    for factor in (100.0, 200.0, 50.0, 1.0):
        (job.model(X).pow(2).sum() * factor).backward()
    largest = [200 * norm for norm in plain_norms()]
    job.optimizer.step()
    snapshot = job.sink.records[-1].snapshot
    assert snapshot.norm == pytest.approx(largest, rel=1e-4)
    assert (snapshot.coef < 1).all()
    job.close()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (CONSTANT.replace("norm,", "total_norm,") % "", "one parameter at a time"),
        (CONSTANT.replace("rules:\n  far:\n", "rules:\n  far:\n    for: 3\n") % "", "`for: 1`"),
        (CONSTANT.replace("norm,", "norm,").replace("kind: above", "kind: drift").replace(
            "threshold: 2.0", "above: 10") % "", "limit known beforehand"),
    ],
)  # fmt: skip
def test_what_no_hook_could_do_is_refused_at_attach(text: str, said: str) -> None:
    """Each refusal names the rule, the reason, and `at: step`."""
    with pytest.raises((AttachError, RuleFileError), match=said) as caught:
        Job(text)
    assert "at: step" in str(caught.value)


def test_several_ranks_are_refused_unless_insisted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a world of two the hooks would act before the reduction: refused with the alternative."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(AttachError, match="reduced over 2 ranks") as caught:
        Job(CONSTANT % "")
    assert "at: step" in str(caught.value)
    assert "local: true" in str(caught.value)


# -- promises --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("x"), MemoryError(), RecursionError(), StopIteration()])
@pytest.mark.parametrize("where", ["exact_norm", "factor_of", "at_site"])
def test_a_fault_in_a_hook_passes_the_gradient_unchanged(
    where: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails in it: counted, the gradient as without us, training goes on."""
    job, bare = Job(CONSTANT % "", strict=False), Job()

    def broken(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(clip_state, where, broken)
    grads = job.backward(100.0)
    assert same(grads, bare.backward(100.0))
    assert job.gw is not None
    assert job.gw.health.errors() == {"action": 6}
    job.gw.close()


def test_a_hook_that_would_return_another_kind_of_tensor_returns_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P3: the same shape, dtype and layout, or None; another dtype is brought back, another shape refused."""
    job, bare = Job(POLICY % (METHODS[4], "backward", ""), strict=False), Job()
    monkeypatch.setattr(clip_state, "shaped", lambda grad, *rest: grad.reshape(1, *grad.shape))
    assert same(job.backward(100.0), bare.backward(100.0))
    assert job.gw is not None
    assert job.gw.health.errors()["action"] == 6
    job.gw.close()


def test_closing_leaves_no_hook_and_the_model_can_be_collected() -> None:
    """No tensor hook stays behind, and nothing of ours keeps a parameter alive."""
    job = Job(CONSTANT % "")
    job.step(100.0)
    assert all(len(param._backward_hooks or ()) == 1 for param in job.model.parameters())
    job.close()
    assert all(len(param._backward_hooks or ()) == 0 for param in job.model.parameters())
    left: Callable[[], Any] = weakref.ref(job.model)
    del job
    gc.collect()
    assert left() is None


def test_a_norm_the_hook_has_taken_is_not_read_twice_and_not_believed_twice() -> None:
    """Large gradients are read in the hook only; one that a hook of the user's changes afterwards is read again."""
    torch.manual_seed(0)
    model = nn.Linear(128, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    sink = Kept()
    rules = parse_rules(CONSTANT.replace("2.0", "1e9") % "")
    x = torch.randn(4, 128)

    def tripled(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(3.0)

    with gradwatch.watch(model, optimizer, rules=rules, sinks=[sink], strict=True):
        for step in range(4):
            if step == 2:
                model.weight.register_post_accumulate_grad_hook(tripled)
            if step == 3:
                model.weight.register_hook(lambda grad: grad * 2.0)
            optimizer.zero_grad()
            model(x).pow(2).sum().backward()
            want = [
                float(param.grad.double().norm()) for param in model.parameters() if param.grad is not None
            ]
            optimizer.step()
            assert sink.records[-1].snapshot.norm == pytest.approx(want, rel=1e-5)
