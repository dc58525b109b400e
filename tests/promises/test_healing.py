"""P6: never blind in silence. Whatever happens to the parameters is healed or reported within two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

import gradwatch
from gradwatch.records.record import Record
from gradwatch.rules.files import parse_rules
from gradwatch.taps import module_tree
from tests.support.kept import Kept
from tests.support.recorder import norms_of

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
LOCAL = "version: 1\nrules: {a: {detect: {kind: above, of: norm_local, threshold: 1e9}}}"
Model = nn.Sequential


class Listener(Kept):
    """Also keeps what the watch says about itself."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, str]] = []

    def internal_error(self, component: str, error: BaseException) -> None:
        self.said.append((component, str(error)))


class Job:
    """A loop with clipping; after every step it knows what the Snapshot should have said."""

    def __init__(self, layers: int, rules: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)])
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.sink = Listener()
        self.gw = gradwatch.watch(self.model, rules=rules, sinks=[self.sink], strict=True)
        self.data = X

    def step(self) -> tuple[Record, bool]:
        """One step; its Record, and whether the Record's norms are those of the gradients before clipping."""
        self.model.zero_grad()
        self.optimizer.zero_grad()
        self.model(self.data).pow(2).sum().backward()
        owned = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        want = norms_of((n, p) for n, p in self.model.named_parameters() if id(p) in owned)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1e-2)
        self.optimizer.step()
        record = self.sink.records[-1]
        snapshot = record.snapshot
        triples = zip(snapshot.sites.names, snapshot.norm.tolist(), snapshot.calls.tolist(), strict=True)
        got = {name: norm for name, norm, calls in triples if calls}
        return record, got == pytest.approx(want, rel=1e-5)

    def local(self) -> int:
        """How many parameters the last step has a `norm_local` for."""
        column = self.sink.records[-1].snapshot.column("norm_local")
        return 0 if column is None else int(column.present.sum())


def assign(job: Job) -> None:
    """All parameters are new objects afterwards."""
    job.model.load_state_dict({k: v.clone() for k, v in job.model.state_dict().items()}, assign=True)


def renew(job: Job) -> None:
    job.optimizer = torch.optim.SGD(job.model.parameters(), 1e-3)


def convert(job: Job, how: Callable[[bool], None], dtype: torch.dtype = torch.float64) -> None:
    how(True)
    try:
        job.model.to(dtype)
    finally:
        how(False)
    job.data = X.to(dtype)


def assign_then_new_optimizer(job: Job) -> None:
    assign(job)
    renew(job)


def overwrite_then_new_optimizer(job: Job) -> None:
    convert(job, torch.__future__.set_overwrite_module_params_on_conversion)
    renew(job)


def swap(job: Job) -> None:
    convert(job, torch.__future__.set_swap_module_params_on_conversion)


def replace_parameter(job: Job) -> None:
    fresh = nn.Parameter(job.model[1].weight.detach().clone())  # type: ignore[union-attr, operator]
    params = job.optimizer.param_groups[0]["params"]
    params[next(i for i, p in enumerate(params) if p is job.model[1].weight)] = fresh
    job.model[1].weight = fresh


def replace_module_and_add_group(job: Job) -> None:
    job.model[1] = nn.Linear(8, 8)
    job.optimizer.add_param_group({"params": list(job.model[1].parameters())})


def new_optimizer(job: Job) -> None:
    renew(job)


HEALED = [
    assign_then_new_optimizer,
    overwrite_then_new_optimizer,
    swap,
    replace_parameter,
    replace_module_and_add_group,
    new_optimizer,
]


def assign_only(job: Job) -> None:
    assign(job)


def overwrite_only(job: Job) -> None:
    convert(job, torch.__future__.set_overwrite_module_params_on_conversion)


REPORTED = [assign_only, overwrite_only]


@pytest.fixture(
    params=[(2, "observe-only"), (20, "observe-only"), (3, LOCAL)], ids=["few", "thinned", "local"]
)
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    layers, rules = request.param
    made = Job(layers, rules if rules == "observe-only" else parse_rules(rules))
    with made.gw:
        for _ in range(13):
            made.step()
        assert made.step()[1]
        yield made


@pytest.mark.parametrize("change", HEALED)
def test_healed_within_two_steps(job: Job, change: Callable[[Job], None]) -> None:
    """Right norms again from the second step on; what comes before is right or says that it may not be."""
    local = job.local()
    change(job)
    first, right = job.step()
    assert right or first.snapshot.provisional
    second, right = job.step()
    assert right or second.snapshot.provisional
    for _ in range(3):
        later, right = job.step()
        assert right
        assert not later.snapshot.provisional
        assert later.snapshot.coverage == 1.0
        assert len(later.snapshot.sites) == len(list(job.model.parameters()))
        assert (job.local() > 0) == (local > 0)
    assert job.gw.coverage == 1.0


@pytest.mark.parametrize("change", REPORTED)
def test_blindness_is_reported_in_the_same_step(job: Job, change: Callable[[Job], None]) -> None:
    """An optimizer that still holds the old parameters trains nothing: coverage 0, said once, for good."""
    change(job)
    for _ in range(20):
        record, _ = job.step()
        assert record.snapshot.coverage == 0.0
    assert [component for component, _ in job.sink.said] == ["coverage"]
    assert "add_param_group" in job.sink.said[0][1]
    assert "0.weight" in job.sink.said[0][1]
    assert job.gw.coverage == 0.0
    renew(job)
    job.step()
    assert job.gw.coverage == 1.0


def test_coverage_falls_with_the_first_step_and_recovers() -> None:
    """An adapter that joins the model is missing until its optimizer has it, and then a site."""
    job = Job(20, "observe-only")
    with job.gw:
        for _ in range(10):
            job.step()
        job.model.append(nn.Linear(8, 8, bias=False))
        assert job.step()[0].snapshot.coverage == pytest.approx(40 / 41)
        job.optimizer.add_param_group({"params": [job.model[-1].weight]})
        record, _ = job.step()
        assert record.snapshot.sites.names[-1] == "20.weight"
        assert record.snapshot.coverage == 1.0
        assert len(job.sink.said) == 1


def test_module_swapped_tensors_are_heard_again_at_once() -> None:
    """The step in which the marks were silent says so in its coverage; the next is heard as ever."""
    job = Job(2, "observe-only")
    with job.gw:
        for _ in range(4):
            job.step()
        swap(job)
        assert job.step()[0].snapshot.coverage == 0.0
        record, right = job.step()
        assert right
        assert not record.snapshot.provisional
        assert record.snapshot.coverage == 1.0


@pytest.mark.parametrize("kind", ["post_accumulate", "tensor"])
def test_healing_revives_no_hook_of_the_users(kind: str) -> None:
    """A user's hook that a swap silenced stays silent, one registered afterwards works, as without us."""

    def run(watched: bool) -> list[int]:
        torch.manual_seed(0)
        model = nn.Linear(8, 2)
        register = (
            model.weight.register_post_accumulate_grad_hook
            if kind == "post_accumulate"
            else model.weight.register_hook
        )
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        heard: list[int] = []
        register(lambda _: heard.append(0))
        sink = Kept()
        gw = gradwatch.watch(model, rules=parse_rules(LOCAL), sinks=[sink], strict=True) if watched else None
        for step in range(6):
            if step == 2:
                torch.__future__.set_swap_module_params_on_conversion(True)
                model.to(torch.float64)
                torch.__future__.set_swap_module_params_on_conversion(False)
            optimizer.zero_grad()
            model(X.double() if step >= 2 else X).sum().backward()
            optimizer.step()
        if gw is not None:
            gw.close()
        return heard

    assert run(watched=True) == run(watched=False) == [0, 0]


def test_lazy_modules_may_be_attached_before_their_first_forward() -> None:
    """A model that has no shapes yet is watched; its parameters become sites with their first step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(2))
    sink = Listener()
    rules = parse_rules(
        "version: 1\ngroups: {w: {params: ['*.weight'], min_ndim: 2}}\n"
        "rules: {a: {detect: {kind: above, of: norm, threshold: 1e9}, groups: [w]}}"
    )
    with gradwatch.watch(model, rules=rules, sinks=[sink], strict=True) as gw:
        model(X)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for _ in range(4):
            optimizer.zero_grad()
            model(X).pow(2).sum().backward()
            want = norms_of(model.named_parameters())
            optimizer.step()
            snapshot = sink.records[-1].snapshot
            got = dict(zip(snapshot.sites.names, snapshot.norm.tolist(), strict=True))
            assert got == pytest.approx(want, rel=1e-5)
        assert gw.coverage == 1.0


def test_a_strangers_optimizer_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer of somebody else's model costs one walk of the watched models, not one per step."""
    job = Job(2, "observe-only")
    other = nn.Linear(8, 2)
    theirs = torch.optim.SGD(other.parameters(), 1e-3)
    walks: list[int] = []
    present = module_tree.parameters
    with job.gw:
        job.step()
        other(X).sum().backward()
        with monkeypatch.context() as patch:
            patch.setattr(module_tree, "parameters", lambda root: walks.append(1) or present(root))
            for _ in range(5):
                theirs.step()
    assert len(walks) == 1
    assert {record.snapshot.optimizer for record in job.sink.records} == {0}


def test_registration_hooks_leave_with_the_watch() -> None:
    """P40: torch's global registration hooks are given back by close."""
    hooks = (
        torch_module._global_parameter_registration_hooks,
        torch_module._global_module_registration_hooks,
    )
    before = [len(each) for each in hooks]
    job = Job(2, "observe-only")
    assert [len(each) for each in hooks] == [each + 1 for each in before]
    job.gw.close()
    assert [len(each) for each in hooks] == before
