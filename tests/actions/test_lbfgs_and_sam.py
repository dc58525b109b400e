"""`optimizer.step(closure)`: one Snapshot of the step's first gradient, every later one looked at, skips exact."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.records.record import Record
from gradwatch.rules.files import parse_rules
from tests.session.boundary.test_optimizer_step import equal
from tests.support.kept import Kept
from tests.support.recorder import norms_of

X = torch.randn(16, 3, generator=torch.Generator().manual_seed(3))
Y = X.sin().sum(1, keepdim=True)


class SharpnessAware(torch.optim.Optimizer):
    """SAM (Foret et al. 2021, arXiv:2010.01412), as people write it: climbs, evaluates again, comes back, steps."""

    def __init__(self, params: Any, lr: float = 0.05, rho: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["climb"] = climb = param.grad * group["rho"]
                    param.add_(climb)
        closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self.state[param]["climb"]).sub_(param.grad, alpha=group["lr"])
        return loss


class ClimbsByGiven(torch.optim.Optimizer):
    """SAM as its best known implementation has it: the loop computes the first gradient, the closure the second."""

    def __init__(self, params: Any, lr: float = 0.05, rho: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"]]
        length = torch.stack([param.grad.norm() for param in params if param.grad is not None]).norm()
        for param in params:
            self.state[param]["before"] = param.detach().clone()
            param.add_(param.grad * 0.05 / (length + 1e-12))
        torch.enable_grad()(closure)()
        for param in params:
            param.copy_(self.state[param]["before"])
            if param.grad is not None:
                param.sub_(param.grad, alpha=0.05)


MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.5, max_iter=4),
    "lbfgs wolfe": lambda params: torch.optim.LBFGS(params, max_iter=4, line_search_fn="strong_wolfe"),
    "sam": SharpnessAware,
    "sam by a given gradient": ClimbsByGiven,
}


class Job:
    """A regression whose closure notes the norms of every evaluation, and can be made to fail."""

    def __init__(self, make: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = MAKERS[make](self.model.parameters())
        self.wants: list[dict[str, float]] = []
        self.poison = -1  # the evaluation of a step that goes wrong

    def closure(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = (self.model(X) - Y).pow(2).mean()
        if len(self.wants) == self.poison:
            loss = loss * math.nan
        loss.backward()
        self.wants.append(norms_of(self.model.named_parameters()))
        return loss

    def step(self) -> None:
        self.wants = []
        if isinstance(self.optimizer, ClimbsByGiven):
            self.closure()
        self.optimizer.step(self.closure)

    def weights(self) -> list[torch.Tensor]:
        return [param.detach().clone() for param in self.model.parameters()]


def seen(record: Record) -> dict[str, float]:
    return dict(zip(record.snapshot.sites.names, record.snapshot.norm.tolist(), strict=True))


@pytest.mark.parametrize("make", MAKERS)
def test_healthy_steps_are_one_snapshot_each_and_change_no_bit(make: str) -> None:
    """The first gradient of each step, however many evaluations follow; weights and state as without us."""
    bare, job, sink = Job(make), Job(make), Kept()
    with gradwatch.watch(job.model, job.optimizer, rules="default", sinks=[sink], strict=True) as gw:
        for number in range(6):
            bare.step()
            job.step()
            assert len(job.wants) > 1 or number > 3
            record = sink.records[-1]
            assert record.snapshot.step == number
            # That a step climbs by what the loop computed shows as its closure begins: from the second on it is known.
            first = job.wants[int(make == "sam by a given gradient" and number == 0)]
            assert seen(record) == pytest.approx(first, rel=1e-5)
            assert record.snapshot.total_norm == pytest.approx(
                math.sqrt(sum(norm * norm for norm in first.values())), rel=1e-5
            )
            assert set(record.snapshot.calls.tolist()) == {1}
            assert not record.snapshot.provisional
        assert len(sink.records) == 6
        assert gw.health.errors() == {}
    assert equal(bare.weights(), job.weights())
    assert equal(bare.optimizer.state_dict(), job.optimizer.state_dict())


@pytest.mark.parametrize("evaluation", [0, 1, 2])
@pytest.mark.parametrize("make", MAKERS)
def test_a_skip_takes_the_whole_step_back(make: str, evaluation: int) -> None:
    """NaN in any evaluation: weights and optimizer state bit-identical to before the step, and it is reported."""
    if "sam" in make and evaluation == 2:
        evaluation = 1
    job, sink = Job(make), Kept()
    with gradwatch.watch(job.model, job.optimizer, rules="default", sinks=[sink], strict=True) as gw:
        for _ in range(2):
            job.step()
        weights, state = job.weights(), copy.deepcopy(job.optimizer.state_dict())
        job.poison = evaluation
        before = len(sink.records)
        job.step()
        assert equal(weights, job.weights())
        if "sam" not in make:  # what a foreign optimizer keeps in its state cannot be known
            assert equal(state, job.optimizer.state_dict())
        fresh = sink.records[before:]
        assert [record.decision.skip for record in fresh] == ([True] if evaluation == 0 else [False, True])
        assert [record.snapshot.step for record in fresh] == list(range(2, 2 + len(fresh)))
        assert not math.isfinite(fresh[-1].snapshot.total_norm)
        assert set(fresh[-1].snapshot.calls.tolist()) == {1}
        job.poison = -1
        job.step()
        assert sink.records[-1].snapshot.step == 2 + len(fresh)
        assert seen(sink.records[-1]) == pytest.approx(job.wants[0], rel=1e-5)
        assert not equal(weights, job.weights())
        assert gw.health.errors() == {}


def test_without_a_rule_that_acts_a_bad_evaluation_is_reported_and_left_alone() -> None:
    """Observation changes no bit, also of a step that goes wrong; and no weights are kept for it."""
    bare, job, sink = Job("lbfgs"), Job("lbfgs"), Kept()
    with gradwatch.watch(job.model, job.optimizer, rules="observe-only", sinks=[sink], strict=True):
        for poison in (-1, -1, 2):
            bare.poison = job.poison = poison
            bare.step()
            job.step()
    assert len(sink.records) == 4
    assert "non-finite" in sink.records[-1].verdict.firing
    assert all(
        a.view(torch.int32).equal(b.view(torch.int32))
        for a, b in zip(bare.weights(), job.weights(), strict=True)
    )


def test_a_standing_clip_bounds_every_evaluation() -> None:
    """LBFGS gets no gradient beyond the bound, as if clip_grad_norm_ stood at the end of the closure."""
    rules = parse_rules("version: 1\nrules: {}\nclip: {total: {method: norm, max_norm: 0.05}}")
    job = Job("lbfgs")
    got: list[float] = []
    gather = job.optimizer._gather_flat_grad  # type: ignore[attr-defined]

    def noted() -> torch.Tensor:
        flat: torch.Tensor = gather()
        got.append(float(flat.double().norm()))
        return flat

    job.optimizer._gather_flat_grad = noted  # type: ignore[attr-defined]
    with gradwatch.watch(job.model, job.optimizer, rules=rules, sinks=[Kept()], strict=True):
        for _ in range(3):
            job.step()
            assert len(got) == len(job.wants) > 1
            for norm, want in zip(got, job.wants, strict=True):
                total = math.sqrt(sum(each * each for each in want.values()))
                assert norm == pytest.approx(min(total, 0.05), rel=1e-4)
            got.clear()


def test_stop_in_a_later_evaluation_leaves_the_weights_of_the_step_before() -> None:
    """A rule that stops is obeyed in the middle of a line search, with the step taken back."""
    rules = parse_rules(
        "version: 1\nrules: {n: {detect: {kind: nonfinite, of: norm, values: [nan, inf]}, do: [stop]}}"
    )
    job = Job("lbfgs")
    with gradwatch.watch(job.model, job.optimizer, rules=rules, sinks=[Kept()], strict=True):
        job.step()
        weights = job.weights()
        job.poison = 2
        with pytest.raises(gradwatch.TrainingStopped):
            job.step()
    assert equal(weights, job.weights())


class Once(torch.optim.Optimizer):
    """SGD that is not torch's own, with one evaluation a step."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        loss = torch.enable_grad()(closure)()
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad, alpha=0.05)
        return loss


def test_micro_batches_before_a_step_with_a_closure_are_one_gradient_with_the_closures() -> None:
    """Three backwards, and a fourth in the closure (Lightning's accumulation): their sum is recorded and clipped."""
    rules = parse_rules("version: 1\nrules: {}\nclip: {total: {method: norm, max_norm: 0.05}}")
    jobs = [nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(2)]
    jobs[1].load_state_dict(jobs[0].state_dict())
    totals: list[float] = []

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, clips: bool) -> None:
        def part() -> torch.Tensor:
            loss: torch.Tensor = (model(X) - Y).pow(2).mean() / 4
            loss.backward()
            return loss

        def closure() -> torch.Tensor:
            loss = part()
            if clips:
                totals.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
            return loss

        for _ in range(4):
            for _ in range(3):
                part()
            optimizer.step(closure)
            optimizer.zero_grad()

    train(jobs[0], Once(jobs[0].parameters()), True)
    optimizer, sink = Once(jobs[1].parameters()), Kept()
    with gradwatch.watch(jobs[1], optimizer, rules=rules, sinks=[sink], strict=True):
        train(jobs[1], optimizer, False)
    assert [record.snapshot.total_norm for record in sink.records] == pytest.approx(totals, rel=1e-5)
    for watched, bare in zip(jobs[1].parameters(), jobs[0].parameters(), strict=True):
        assert torch.allclose(watched, bare, rtol=1e-5, atol=1e-7)


# -- the clips of a later evaluation -----------------------------------------------------------------------


class Thrice(torch.optim.SGD):
    """Evaluates three times a step, at other weights each time, and keeps the gradients that it is given."""

    given: list[list[torch.Tensor]]

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        params, self.given = self.param_groups[0]["params"], []
        for _ in range(3):
            with torch.enable_grad():
                closure()
            self.given.append([param.grad.clone() for param in params])
            with torch.no_grad():
                for param in params:
                    param.mul_(1.1)
        return None


def by_norm(grads: list[torch.Tensor], most: float) -> list[torch.Tensor]:
    """torch's own clip of all of these together."""
    copies = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for copy_, grad in zip(copies, grads, strict=True):
        copy_.grad = grad.clone()
    torch.nn.utils.clip_grad_norm_(copies, most)
    return [one.grad for one in copies if one.grad is not None]


def each_by_norm(grads: list[torch.Tensor], most: float) -> list[torch.Tensor]:
    return [by_norm([grad], most)[0] for grad in grads]


LATER: dict[str, tuple[str, Callable[[list[torch.Tensor]], list[torch.Tensor]]]] = {
    "total": ("total: {method: norm, max_norm: 0.05}", lambda grads: by_norm(grads, 0.05)),
    "each": ("total: {method: norm, max_norm: 0.02, scope: param}", lambda grads: each_by_norm(grads, 0.02)),
    "groups": (
        "groups: {first: {method: norm, max_norm: 0.02}, last: {method: norm, max_norm: 0.01}}",
        lambda grads: by_norm(grads[:2], 0.02) + by_norm(grads[2:], 0.01),
    ),
    "value": (
        "total: {method: value, clip_value: 0.003}",
        lambda grads: [grad.clamp(-0.003, 0.003) for grad in grads],
    ),
    "centralize": (
        "total: {method: centralize}",
        lambda grads: [grad - grad.mean(1, keepdim=True) if grad.dim() > 1 else grad for grad in grads],
    ),
}


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("kind", LATER)
def test_every_evaluation_is_clipped(kind: str, at: str) -> None:
    """What the optimizer is given at each of its evaluations is that very gradient, clipped as the file says."""
    if at == "backward" and kind in ("total", "groups"):
        return  # refused: neither is of one parameter
    clip, expected = LATER[kind]
    text = f"""
version: 1
groups: {{first: {{params: ["0.*"]}}, last: {{params: ["2.*"]}}}}
rules: {{}}
clip: {{{clip}, at: {at}}}
"""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer, sink = Thrice(model.parameters(), lr=0.1), Kept()
    made: list[list[torch.Tensor]] = []

    def closure() -> None:
        optimizer.zero_grad()
        loss = (model(X) - Y).pow(2).mean()
        made.append(list(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)))
        loss.backward()

    with gradwatch.watch(model, optimizer, rules=parse_rules(text), sinks=[sink], strict=True):
        for number in range(3):
            made.clear()
            optimizer.step(closure)
            for raw, given in zip(made, optimizer.given, strict=True):
                assert any(not torch.equal(a, b) for a, b in zip(raw, given, strict=True))
                for one, other in zip(given, expected(raw), strict=True):
                    assert torch.allclose(one, other, rtol=1e-4, atol=1e-8)
            assert sink.records[-1].snapshot.step == number
    assert len(sink.records) == 3


def test_later_evaluations_are_clipped_by_what_was_learned_and_teach_nothing() -> None:
    """AutoClip: one norm is learned a step, and each later gradient held to the percentile of those and its own."""
    text = "version: 1\nrules: {}\nclip: {total: {method: autoclip, percentile: 50}}\n"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = Thrice(model.parameters(), lr=0.0)
    firsts: list[float] = []
    made: list[float] = []

    def closure() -> None:
        optimizer.zero_grad()
        ((model(X) - Y).pow(2).mean() * (3.0 if made else 1.0)).backward()
        made.append(
            math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
        )

    with gradwatch.watch(model, optimizer, rules=parse_rules(text), sinks=[Kept()], strict=True) as gw:
        for _ in range(5):
            made.clear()
            optimizer.step(closure)
            firsts.append(made[0])
            norms = [float(torch.cat([g.flatten() for g in given]).norm()) for given in optimizer.given]
            wanted = [min(norm, float(torch.tensor([*firsts, norm]).quantile(0.5))) for norm in made[1:]]
            assert norms[1:] == pytest.approx(wanted, rel=1e-4)
        saved = gw.state_dict()["lanes"]["0"]["engine"]["clips"]
        (only,) = saved.values()
        assert only["fields"]["seen"] == [5]


# -- closures that are objects -----------------------------------------------------------------------------


class Raising:
    """Whose attributes raise."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run = run

    def __call__(self) -> Any:
        return self.run()

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"lazy proxy: {name}")


class Asks(torch.optim.SGD):
    """Reads an attribute of its closure."""

    def step(self, closure: Any = None) -> Any:
        return closure.run and super().step(closure)


@pytest.mark.parametrize(
    "wrap", [Raising, lambda run: MagicMock(side_effect=run, run=run)], ids=["raising", "mock"]
)
def test_closures_that_are_objects(wrap: Callable[[Callable[[], Any]], Any]) -> None:
    """One whose attributes raise and one that has every attribute: both steps judged, the bad one skipped."""
    torch.manual_seed(0)
    model, kept = nn.Linear(3, 2), Kept()
    optimizer = Asks(model.parameters(), 0.1)
    rules = parse_rules("version: 1\nrules: {nf: {detect: {kind: nonfinite}, do: [skip_step]}}\n")
    with gradwatch.watch(model, optimizer, rules=rules, sinks=[kept]) as gw:
        for value in (1.0, math.nan):

            def closure(value: float = value) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(torch.full((1, 3), value)).sum()
                loss.backward()
                return loss  # type: ignore[no-any-return]

            optimizer.step(wrap(closure))
    assert len(kept.records) == 2
    assert model.weight.isfinite().all()
    assert gw.health.errors() == {}


def test_a_closure_belongs_to_the_watch_that_owns_its_optimizer() -> None:
    """Of two watches in one process the first leaves the closure of the second one's optimizer alone."""
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    plain, closing = torch.optim.SGD(first.parameters(), 0.1), torch.optim.LBFGS(second.parameters(), 0.1)
    kept, kept_too = Kept(), Kept()
    batch = torch.randn(4, 3)

    def evaluate() -> torch.Tensor:
        closing.zero_grad()
        loss = second(batch).pow(2).mean()
        loss.backward()
        return loss

    with (
        gradwatch.watch(first, plain, sinks=[kept], strict=True),
        gradwatch.watch(second, closing, sinks=[kept_too], strict=True),
    ):
        for _ in range(3):
            plain.zero_grad()
            first(batch).pow(2).mean().backward()
            plain.step()
            closing.step(evaluate)
    assert (len(kept.records), len(kept_too.records)) == (3, 3)
