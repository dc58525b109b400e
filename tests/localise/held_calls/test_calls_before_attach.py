"""Calls held before anybody watches: the first step of a training is localised like any other, and nothing stays."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import gradwatch
from gradwatch.localise.held_calls.calls_before_attach import PreAttachRecorder
from gradwatch.localise.held_calls.model_recorder import ModelRecorder
from gradwatch.records.finding import Finding
from gradwatch.rules.files import parse_rules
from gradwatch.session.watch import Watch, session_of
from gradwatch.taps import module_calls
from tests.localise.models import SqrtAtZero
from tests.localise.test_in_the_loop import broken, rules
from tests.support.kept import Kept
from tests.support.one_rank import one_rank


def failed(component: str, error: BaseException) -> None:
    """A fault fails the test."""
    raise error


@pytest.fixture
def early() -> Iterator[PreAttachRecorder]:
    """What holds from the beginning; its faults fail the test."""

    held = PreAttachRecorder(failed)
    yield held
    held.close()


def attached_late(
    early: PreAttachRecorder, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Watch, Kept]:
    """What the launcher does at the first step: a watch, which takes over what was held."""
    kept = Kept()
    gw = gradwatch.watch(model, optimizer, rules=rules(), sinks=[kept], strict=True)
    session_of(gw).inherit(early)
    early.close()
    return gw, kept


def first_step(early: PreAttachRecorder, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Finding]:
    """The findings of a step whose forward and backward are over; the weights stand still."""
    before = [param.detach().clone() for param in model.parameters()]
    gw, kept = attached_late(early, model, optimizer)
    with gw:
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return [finding for record in kept.records for finding in record.findings]


def test_a_forward_inside_a_function_transform_is_left_alone(early: PreAttachRecorder) -> None:
    """`torch.func.grad` calls the model with stand-ins for tensors: nothing is held, and nothing fails."""
    model = nn.Linear(2, 1)
    early.add(model)
    params = {name: param.detach().clone() for name, param in model.named_parameters()}

    def loss(params: dict[str, Tensor]) -> Tensor:
        output: Tensor = torch.func.functional_call(model, params, (torch.ones(3, 2),))
        return output.sum()

    assert torch.equal(torch.func.grad(loss)(params)["bias"], torch.tensor([3.0]))
    assert [call for holding in early for call in holding.calls] == []


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Any optimizer."""
    return torch.optim.SGD(model.parameters(), 0.01)


def hooks(model: nn.Module) -> int:
    """How many modules of a model are listened to; no hook stands on any."""
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    return sum(map(module_calls.noticed, model.modules()))


def test_the_first_step_has_a_cause(early: PreAttachRecorder) -> None:
    """Module, operation and line, though the watch came after forward and backward."""
    model = SqrtAtZero()
    early.add(model)
    model(broken(torch.randn(5, 4))).sum().backward()
    (finding,) = first_step(early, model, sgd(model))
    assert (finding.phase, finding.op, finding.by, finding.module) == (
        "backward",
        "sqrt",
        "replay",
        "SqrtAtZero",
    )
    assert finding.frame is not None
    assert finding.frame.source.endswith("# fault")


class Task(nn.Module):
    """A model that is never called: the loop calls a part of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList([SqrtAtZero()])
        self.other = nn.Linear(2, 2)

    def training_step(self, x: Tensor) -> Tensor:
        """As in Lightning."""
        loss: Tensor = self.nets[0](x).sum()
        return loss


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_parts_that_the_loop_calls_are_held_from_the_beginning(early: PreAttachRecorder, bad: int) -> None:
    """Neither the first step nor those after it have to wait until it is known what is called."""
    model = Task()
    early.add(model)
    x = torch.randn(5, 4)
    model.training_step(broken(x) if bad == 0 else x).backward()
    optimizer = sgd(model)
    gw, kept = attached_late(early, model, optimizer)
    with gw:
        for step in range(1, 4):
            optimizer.step()
            optimizer.zero_grad()
            x = torch.randn(5, 4)
            model.training_step(broken(x) if bad == step else x).backward()
    found = [(one.step, one.module, one.op) for record in kept.records for one in record.findings]
    assert found == [(bad, "nets.0", "sqrt")]


def test_parts_are_let_go_when_the_whole_is_called(early: PreAttachRecorder) -> None:
    """Hooks cost every call a little: those that can hear nothing are taken away."""
    model = nn.Sequential(SqrtAtZero(), nn.Tanh())
    early.add(model)
    assert hooks(model) > 1
    with torch.no_grad():
        model(torch.randn(5, 4))
    assert hooks(model) > 1
    model(torch.randn(5, 4))
    assert hooks(model) == 1


def test_a_step_walks_only_what_can_still_hear_a_call() -> None:
    """Once it is known that the loop calls the model itself, its parts cost a step nothing any more."""
    model = nn.Sequential(SqrtAtZero(), nn.Tanh())
    optimizer = sgd(model)
    with gradwatch.watch(model, optimizer, rules=rules(), sinks=[], strict=True) as gw:
        assert session_of(gw).attached.causes is not None
        held = session_of(gw).attached.causes._localiser._recordings
        assert len(list(held)) > 1
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        assert [holding.model() for holding in held] == [model]


def test_parts_of_a_kind_that_was_called_whole_are_held_once_a_model_is_not_called() -> None:
    """A copy is held as the model before it was called; parts that a loop calls are found two steps later."""
    first, second = nn.Sequential(SqrtAtZero(), nn.Tanh()), nn.Sequential(SqrtAtZero(), nn.Tanh())
    optimizer, other = sgd(first), sgd(second)
    kept = Kept()
    with gradwatch.watch(first, optimizer, rules=rules(), sinks=[kept], strict=True) as gw:
        first(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        gw.add([second])
        assert not any(map(module_calls.noticed, second))
        for step in range(4):
            other.zero_grad()
            x = torch.randn(5, 4)
            second[1](second[0](broken(x) if step == 3 else x)).sum().backward()
            other.step()
    found = [(one.step, one.op) for record in kept.records for one in record.findings]
    assert found == [(3, "sqrt")]


def test_a_model_of_many_parts_is_held_as_a_whole(early: PreAttachRecorder) -> None:
    """Two hooks on it, and none on a hundred parts."""
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(100)])
    early.add(model)
    assert hooks(model) == 1


class Logarithm(nn.Module):
    """A criterion that is wrong at once."""

    def forward(self, out: Tensor) -> Tensor:
        """log of zero."""
        return torch.log((out - out).abs()).sum()


def test_a_criterion_is_at_fault_at_the_first_step(early: PreAttachRecorder) -> None:
    """It is found beside the first call of the model, and its call handed over with the model's."""
    model, criterion = nn.Linear(4, 3), Logarithm()
    early.add(model)
    criterion(model(torch.randn(5, 4))).backward()
    (finding,) = first_step(early, model, sgd(model))
    assert (finding.phase, finding.op, finding.module_type) == ("forward", "log", "Logarithm")


def test_the_second_of_three_micro_batches(early: PreAttachRecorder) -> None:
    """All micro-batches of the first step are held; the one at fault is named."""
    model = SqrtAtZero()
    early.add(model)
    for micro in range(3):
        x = torch.randn(5, 4)
        model(broken(x) if micro == 1 else x).sum().backward()
    (finding,) = first_step(early, model, sgd(model))
    assert (finding.op, finding.call) == ("sqrt", 1)


def test_gradients_that_were_thrown_away_are_no_part_of_the_step(early: PreAttachRecorder) -> None:
    """A trial run with NaN of its own before the first step is not what made that step NaN."""
    model = SqrtAtZero()
    optimizer = sgd(model)
    early.add(model)
    model(broken(torch.randn(5, 4))).sum().backward()
    optimizer.zero_grad()
    x = torch.randn(5, 4)
    x[0, 1] = float("nan")
    model(x).sum().backward()
    (finding,) = first_step(early, model, optimizer)
    assert (finding.phase, finding.call) == ("input", 0)


class Penalised(nn.Module):
    """A critic whose slope is asked for before its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The length of x has no slope at zero."""
        out: Tensor = self.layer(x) * x.square().sum(-1, keepdim=True).sqrt()
        return out


def test_a_gradient_penalty_is_part_of_the_step(early: PreAttachRecorder) -> None:
    """`autograd.grad` leaves nothing in the parameters: the backward after it does not mean that it was in vain."""
    model = Penalised()
    early.add(model)
    between = torch.zeros(7, 4, requires_grad=True)
    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    (model(torch.randn(5, 4)).mean() + (slope.norm(dim=-1) - 1).square().mean()).backward()
    (finding,) = first_step(early, model, sgd(model))
    assert (finding.phase, finding.op) == ("backward", "sqrt")


class Flat(nn.Module):
    """Wrong without a branch, so that it compiles whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """The slope of sqrt at zero."""
        h: Tensor = self.layer(x)
        return h + torch.sqrt((h - h).square())


def test_a_wrapper_made_later_is_held_in_the_place_of_its_model(early: PreAttachRecorder) -> None:
    """What torch.compile makes of a model is called from outside what it compiles; the model itself keeps no hook."""
    torch._dynamo.reset()
    model = Flat()
    early.add(model)
    compiled = torch.compile(model, backend="aot_eager")
    early.wraps(compiled, model)
    compiled(torch.randn(5, 4)).sum().backward()
    assert hooks(model) == 0
    (finding,) = first_step(early, compiled, sgd(model))
    assert (finding.phase, finding.op, finding.module) == ("backward", "sqrt", "Flat")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def test_a_wrapper_that_is_never_called_is_given_back(early: PreAttachRecorder) -> None:
    """What waits for its first call goes with the rest."""
    outer, model = nn.Module(), nn.Linear(2, 2)
    early.add(model)
    early.wraps(outer, model)
    assert hooks(outer) == 1
    early.close()
    assert hooks(outer) == 0


def test_a_part_that_is_to_be_compiled_loses_its_hooks_before(early: PreAttachRecorder) -> None:
    """Were they to go later, torch would compile it anew; the whole is held all the same."""
    model = nn.Sequential(SqrtAtZero(), nn.Sequential(Flat()))
    early.add(model)
    early.wraps(nn.Module(), model[0])
    assert hooks(model[0]) == 0
    assert hooks(model[1]) > 0
    model[0](torch.randn(5, 4)).sum().backward()
    assert not [one for one in early if one.calls]
    assert early.holds(model)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("watched", [False, True])
def test_parts_compiled_under_watch_are_compiled_once(watched: bool) -> None:
    """Hooks on what was compiled since stay where they are: dynamo compiles as often as without a watch."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 1))
    optimizer = sgd(model)
    gw = gradwatch.watch(model, optimizer, rules=rules(), sinks=[], strict=True) if watched else None
    model[1] = torch.compile(model[1], backend="eager", fullgraph=True, dynamic=False)
    for _ in range(3):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    if gw is not None:
        gw.close()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def test_a_watch_hears_parts_from_its_first_step() -> None:
    """The same for a watch that the script makes itself: it need not wait to know what the loop calls."""
    model, kept = Task(), Kept()
    optimizer = sgd(model)
    with gradwatch.watch(model, optimizer, rules=rules(), sinks=[kept], strict=True):
        model.training_step(broken(torch.randn(5, 4))).backward()
        optimizer.step()
    assert [(one.op, one.module) for record in kept.records for one in record.findings] == [
        ("sqrt", "nets.0")
    ]


@pytest.mark.parametrize("build", [SqrtAtZero, Task])
def test_no_hook_is_left(early: PreAttachRecorder, build: Callable[[], nn.Module]) -> None:
    """After the hand-over stand those of the watch alone, and after the watch none."""
    model = build()
    with gradwatch.watch(model, rules=rules(), sinks=[]):
        watched = hooks(model)
    early.add(model)
    assert hooks(model) > 0
    gw, _ = attached_late(early, model, sgd(model))
    assert hooks(model) == watched
    gw.close()
    assert hooks(model) == 0


def test_models_that_nobody_watches_are_let_go(early: PreAttachRecorder) -> None:
    """A watch takes over what belongs to its own models."""
    watched, other = SqrtAtZero(), SqrtAtZero()
    early.add(watched)
    early.add(other)
    other(broken(torch.randn(5, 4))).sum().backward()
    watched(broken(torch.randn(5, 4))).sum().backward()
    (finding,) = first_step(early, watched, sgd(watched))
    assert finding.call == 0
    assert hooks(other) == 0


def test_an_optimizer_that_somebody_else_watches(early: PreAttachRecorder) -> None:
    """Its models are let go, the others stay held."""
    theirs, ours = SqrtAtZero(), SqrtAtZero()
    early.add(theirs)
    early.add(ours)
    early.without(sgd(theirs))
    assert hooks(theirs) == 0
    assert early.holds(ours)
    assert not early.holds(theirs)


def test_a_model_within_a_model_is_held_once(early: PreAttachRecorder) -> None:
    """What joins a larger model gives way to it."""
    part = SqrtAtZero()
    early.add(part)
    alone = hooks(part)
    early.add(nn.Sequential(part))
    assert not early.holds(part)
    assert hooks(part) == alone


def test_rules_that_replay_nothing_take_over_nothing(early: PreAttachRecorder) -> None:
    """Neither a rule file that records nor one without causes holds anything."""
    for text in (rules("by: record"), parse_rules("version: 1\nrules: {a: {detect: {kind: nonfinite}}}")):
        model = SqrtAtZero()
        early.add(model)
        model(torch.randn(5, 4)).sum().backward()
        with gradwatch.watch(model, rules=text, sinks=[]) as gw:
            session_of(gw).inherit(early)
            early.close()
            assert hooks(model) == 0
            assert session_of(gw).attached.causes is None or session_of(gw).attached.causes.held() == []


def test_no_more_is_held_than_the_rule_allows(early: PreAttachRecorder) -> None:
    """The watch's own `max_bytes` cuts what it takes over, and says how many micro-batches that cost."""
    model = SqrtAtZero()
    early.add(model)
    for _ in range(4):
        model(torch.randn(5, 4)).sum().backward()
    small = rules("by: replay, max_bytes: 256")
    with gradwatch.watch(model, rules=small, sinks=[]) as gw:
        session_of(gw).inherit(early)
        assert session_of(gw).attached.causes is not None
        assert session_of(gw).attached.causes.dropped > 0
        assert len(session_of(gw).attached.causes.held()) < 4


def test_steps_that_were_taken_let_go_of_what_led_to_them(early: PreAttachRecorder) -> None:
    """After the first step nothing of it is held any more."""
    model = SqrtAtZero()
    early.add(model)
    model(torch.randn(5, 4)).sum().backward()
    optimizer = sgd(model)
    gw, _ = attached_late(early, model, optimizer)
    with gw:
        assert session_of(gw).attached.causes is not None
        assert len(session_of(gw).attached.causes.held()) == 1
        optimizer.step()
        assert session_of(gw).attached.causes.held() == []
        assert not [
            one
            for one in session_of(gw).attached.causes._localiser._recordings
            if isinstance(one, ModelRecorder) and one.calls
        ]


def test_copies_carry_nothing(early: PreAttachRecorder) -> None:
    """P4: what is copied, pickled or saved before the first step is heard by nobody, and names nothing of ours."""
    model = Task()
    early.add(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    for written in (pickle.dumps(model), buffer.getvalue()):
        assert b"gradwatch" not in written
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.training_step(torch.randn(5, 4)).backward()
    assert not [one for one in early if one.calls]


def test_the_fast_path_of_transformers_stays(early: PreAttachRecorder) -> None:
    """An encoder layer computes other bits where a hook stands on it or in it: none does, and its calls are noticed."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).eval()
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        bare = model(x)
        early.add(model)
        assert hooks(model) > 0
        assert torch.equal(model(x), bare)


def test_replicas_made_after_the_optimizer(early: PreAttachRecorder) -> None:
    """DistributedDataParallel around a model that is held already: its calls are run again as the replica's."""
    with one_rank():
        model = SqrtAtZero()
        early.add(model)
        replica = nn.parallel.DistributedDataParallel(model)
        replica(broken(torch.randn(5, 4))).sum().backward()
        (finding,) = first_step(early, replica, sgd(model))
        assert (finding.op, finding.module) == ("sqrt", "SqrtAtZero")


class Unreadable(dict[str, Any]):
    """An argument that cannot be taken apart."""


def refuse(value: Unreadable) -> Any:
    """Taken apart it raises."""
    raise LookupError("not today")


def test_a_fault_of_ours_is_told_and_stays_here() -> None:
    """An argument that cannot be looked at costs the cause, not the forward."""
    faults: list[tuple[str, BaseException]] = []
    early = PreAttachRecorder(lambda component, error: faults.append((component, error)))
    model = SqrtAtZero()
    early.add(model)

    def forward(x: Tensor, extra: Unreadable) -> Tensor:
        return type(model).forward(model, x)  # type: ignore[no-any-return]

    model.forward = forward  # type: ignore[method-assign,assignment]
    pytree.register_pytree_node(Unreadable, refuse, lambda values, context: Unreadable())
    try:
        out = model(torch.randn(5, 4), Unreadable())
    finally:
        pytree._deregister_pytree_node(Unreadable)
        early.close()
    assert out.shape == (5, 3)
    assert [(component, type(error)) for component, error in faults] == [("localise", LookupError)]


def held_for(module: nn.Module) -> list[ModelRecorder]:
    """What holds, or may hold, calls of this very module."""
    live = [
        each for each in gc.get_objects() if issubclass(type(each), ModelRecorder) and each.model() is module
    ]
    return [each for each in live if not each.is_over]


def called(model: nn.Module, criterion: nn.Module, x: Tensor) -> None:
    """One forward and backward, from a function whose locals gradwatch may look at (pytest's asserts keep them)."""
    criterion(model(x), torch.zeros(5, 3)).backward()


def test_what_was_held_before_goes_on_and_is_not_made_anew(early: PreAttachRecorder) -> None:
    """One holding of a model, and of the criterion beside it, from the first forward on; also of the next model."""
    first, second, criterion = SqrtAtZero(), SqrtAtZero(), nn.MSELoss()
    early.add(first)
    (held,) = held_for(first)
    called(first, criterion, torch.randn(5, 4))
    gw, kept = attached_late(early, first, sgd(first))
    with gw:
        assert held_for(first) == [held]
        (of_criterion,) = held_for(criterion)
        later, optimizer = PreAttachRecorder(failed), sgd(second)
        later.add(second)
        (held,) = held_for(second)
        called(second, criterion, torch.randn(5, 4))
        session_of(gw).inherit(later, [second])
        session_of(gw).join([second], [optimizer])
        assert held_for(second) == [held]
        optimizer.step()
        assert held_for(criterion) == [of_criterion]
        optimizer.zero_grad()
        called(second, criterion, broken(torch.randn(5, 4)))
        optimizer.step()
    (finding,) = kept.records[-1].findings
    assert (finding.phase, finding.op) == ("backward", "sqrt")


def test_a_line_that_calls_one_model_after_another_is_looked_at_once_for_each(
    early: PreAttachRecorder,
) -> None:
    """A criterion made for each model is found beside its first call, also where the line and the kind are known."""
    gw = None
    for _ in range(3):
        model, criterion = SqrtAtZero(), nn.MSELoss()
        optimizer = sgd(model)
        if gw is None:
            early.add(model)
            called(model, criterion, torch.randn(5, 4))
            gw, _ = attached_late(early, model, optimizer)
        else:
            session_of(gw).join([model], [optimizer])
        for _ in range(4):
            called(model, criterion, torch.randn(5, 4))
            optimizer.step()
            optimizer.zero_grad()
        assert len(held_for(criterion)) == 1
    assert gw is not None
    gw.close()
