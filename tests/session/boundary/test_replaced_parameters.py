"""Loops without an optimizer that replace their parameters, or the whole model, instead of writing into them."""

from __future__ import annotations

import io
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.account.unwatched_reasons import gaps
from gradwatch.rules.files import parse_rules
from gradwatch.session.boundary.replaced_parameters import AT_ONCE
from gradwatch.session.watch import session_of
from gradwatch.sinks.log import LogSink
from tests.support.kept import Kept
from tests.support.launch_cases import bare_and_watched

STEPS = 12
RULES = "version: 1\nrules: {r: {detect: {kind: nonfinite}}}"
LR = 0.05
Move = Callable[[nn.Module], None]


def moved(param: Tensor) -> nn.Parameter:
    """The parameter after a step of SGD, as a new one."""
    assert param.grad is not None
    return nn.Parameter(param.detach() - LR * param.grad)


def assigned(model: nn.Module) -> None:
    """Every parameter by `setattr`."""
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, moved(param))


def deleted(model: nn.Module) -> None:
    """Every parameter taken away before another is put there."""
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            setattr(module, name, moved(param))


def past_registration(model: nn.Module) -> None:
    """Every parameter past torch's registration hooks."""
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            module._parameters[name] = moved(param)


def loaded(model: nn.Module) -> None:
    """Every parameter by `load_state_dict(assign=True)`, which keeps the class."""
    model.load_state_dict({name: moved(param) for name, param in model.named_parameters()}, assign=True)


def one_layer(model: nn.Module) -> None:
    """One parameter is replaced, the others are cleared."""
    last = list(model.children())[-1]
    assert isinstance(last, nn.Linear)
    last.weight = moved(last.weight)
    for param in model.parameters():
        param.grad = None


def mixed(model: nn.Module) -> None:
    """One parameter is replaced, the others are written into."""
    last = list(model.children())[-1]
    assert isinstance(last, nn.Linear)
    last.weight = moved(last.weight)
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param.sub_(LR * param.grad)
                param.grad = None


def one_past_registration(model: nn.Module) -> None:
    """One parameter, not the first, past torch's registration hooks; the others are written into."""
    last = list(model.children())[-1]
    last._parameters["bias"] = moved(last._parameters["bias"])  # type: ignore[arg-type]
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param.sub_(LR * param.grad)
                param.grad = None


def clipped(model: nn.Module) -> None:
    """Every parameter by `setattr`, after a clip."""
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    assigned(model)


class Trained:
    """One such training, bare or watched: `norms` of each step, and how many parameters were `freed` with it."""

    def __init__(self, move: Move, *, watched: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)), nn.Linear(4, 1))
        self.kept, self.norms, self.freed = Kept(), [], 0
        gw = gradwatch.watch(self.model, sinks=[self.kept], strict=True) if watched else None
        for _ in range(STEPS):
            loss = self.model(torch.randn(8, 4)).square().mean()
            loss.backward()
            del loss
            grads = [param.grad for param in self.model.parameters() if param.grad is not None]
            self.norms.append(float(nn.utils.get_total_norm(grads)))
            before = [weakref.ref(param) for param in self.model.parameters()]
            move(self.model)
            self.freed += sum(ref() is None for ref in before)
        if gw is not None:
            self.coverage = gw.coverage
            self.status = gw.status()
            gw.close()


@pytest.mark.parametrize(
    "move", [assigned, deleted, past_registration, one_past_registration, loaded, one_layer, mixed, clipped]
)
def test_every_step_is_recorded_and_weights_are_as_bare(move: Move) -> None:
    """Counted steps are real steps, of one series each, with the norms that the backward left."""
    bare, seen = Trained(move, watched=False), Trained(move, watched=True)
    for left, right in zip(bare.model.parameters(), seen.model.parameters(), strict=True):
        assert torch.equal(left, right)
    found = [record.snapshot for record in seen.kept.records]
    assert [one.step for one in found] == list(range(STEPS))
    assert [one.total_norm for one in found] == pytest.approx(bare.norms, rel=1e-5)
    assert {one.sites.names for one in found} == {tuple(name for name, _ in bare.model.named_parameters())}
    assert all(one.scalars["observed_only"] for one in found)
    assert seen.coverage == 1.0
    assert seen.status["observed_only"] == [0]


@pytest.mark.parametrize("move", [assigned, loaded, one_layer, mixed, clipped])
def test_what_is_replaced_is_freed_as_in_the_bare_script(move: Move) -> None:
    """The parameter before is not held until the next backward."""
    bare = Trained(move, watched=False).freed
    assert bare >= STEPS
    assert Trained(move, watched=True).freed == bare


def written(model: nn.Module) -> None:
    """Every parameter in place."""
    with torch.no_grad():
        for param in model.parameters():
            assert param.grad is not None
            param.sub_(LR * param.grad)
            param.grad = None


def test_baselines_go_on_from_one_parameter_to_the_next() -> None:
    """A spike after the warm-up fires, as where the same weights are written in place."""
    rules = parse_rules(
        "version: 1\nrules: {r: {detect: {kind: spike, of: norm, above: 8}, warmup: 10, severity: warning}}"
    )
    fired = []
    for move in (written, assigned):
        torch.manual_seed(0)
        model, kept = nn.Linear(4, 1), Kept()
        with gradwatch.watch(model, rules=rules, sinks=[kept], strict=True):
            for step in range(20):
                (model(torch.randn(64, 4)).square().mean() * (1000 if step == 17 else 1)).backward()
                move(model)
        fired.append([one.snapshot.step for one in kept.records if one.verdict.firing])
    assert 17 in fired[0]
    assert fired[1] == fired[0]


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        y: Tensor = self.second(self.first(x).tanh())
        return y


def grow(model: nn.Module, step: int) -> None:
    """Another layer takes the place of the last one at one step, a wider weight that of its weight at another."""
    if step == 4:
        model.register_module("1", nn.Linear(8, 3))
    if step == 8:
        last = model.get_submodule("1")
        last.weight, last.bias = nn.Parameter(torch.ones(6, 8)), nn.Parameter(torch.ones(6))


@pytest.mark.parametrize("what", ["tied", "grows"])
def test_a_model_that_gets_further_parameters_in_such_a_loop(what: str) -> None:
    """Each step is recorded, with the norm of all there are, without a fault or a call to give them to an optimizer."""
    torch.manual_seed(0)
    model = Tied() if what == "tied" else nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    kept, told, norms = Kept(), io.StringIO(), []
    with gradwatch.watch(model, sinks=[kept, LogSink(stream=told)], strict=True) as gw:
        for step in range(STEPS):
            if what == "grows":
                grow(model, step)
            model(torch.ones(2, 4)).square().mean().backward()
            norms.append(
                float(
                    nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
                )
            )
            assigned(model)
        assert gw.coverage == 1.0
    assert [one.snapshot.step for one in kept.records] == list(range(STEPS))
    assert [one.snapshot.total_norm for one in kept.records] == pytest.approx(norms, rel=1e-5)
    assert "not measured" not in told.getvalue()


NEW_MODELS = """
import copy, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
def stepped(model):
    new = copy.deepcopy(model)
    for param, before in zip(new.parameters(), model.parameters()):
        param.data, param.grad = before.data - 0.05 * before.grad, None
    return new
for _ in range(20):
    model(torch.randn(8, 4)).square().mean().backward()
    model = stepped(model)
print(model[0].weight.tolist())
"""


def test_a_new_model_each_step_is_the_successor_of_the_one_before(tmp_path: Path) -> None:
    """One series of windows; the last step, which no backward follows, leaves nothing to compare with."""
    _, watched = bare_and_watched(NEW_MODELS, tmp_path)
    assert "0 of 0 steps watched, 19 windows without an optimizer · 4 parameters" in watched.stderr
    assert "20 backwards and no step of a torch optimizer seen" in watched.stderr


TWINS = """
import torch
torch.manual_seed(0)
twins = [torch.nn.Linear(4, 1) for _ in range(2)]
def train(model):
    for param in model.parameters(): param.grad = None
    model(torch.randn(8, 4)).square().mean().backward()
    model.weight = torch.nn.Parameter(model.weight.detach() - 0.05 * model.weight.grad)
    model.bias.data -= 0.05 * model.bias.grad
for _ in range(10):
    for twin in twins:
        train(twin)
del twins[0], twin
for _ in range(5):
    train(twins[0])
print(twins[0].weight.tolist())
"""


def test_twins_that_are_trained_in_turn_keep_their_own_series(tmp_path: Path) -> None:
    """A living model is no successor of another, also after that one is gone."""
    _, watched = bare_and_watched(TWINS, tmp_path)
    assert "25 windows without an optimizer · 4 parameters" in watched.stderr


ONE_AFTER_ANOTHER = """
import torch
for seed in range(6):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    for _ in range(12):
        model(torch.randn(8, 4)).square().mean().backward()
        for module in model:
            for name, param in list(module.named_parameters()):
                setattr(module, name, torch.nn.Parameter(param.detach() - 0.05 * param.grad))
print(model[0].weight.tolist())
"""


def test_models_that_are_trained_so_one_after_another_are_found_at_once(tmp_path: Path) -> None:
    """What is registered in a loop is no new model to look for in vain: of none a window is missed."""
    _, watched = bare_and_watched(ONE_AFTER_ANOTHER, tmp_path)
    assert "72 windows without an optimizer" in watched.stderr
    assert "reached no parameter" not in watched.stderr


def test_of_a_large_model_each_parameter_is_looked_at_in_turn(tmp_path: Path) -> None:
    """One of 200 is replaced past every hook: found within as many backwards as there are parts."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(100)))
    kept, norms = Kept(), []
    with gradwatch.watch(model, rules=parse_rules(RULES), run_dir=tmp_path, sinks=[kept]):
        for step in range(14):
            if step == 5:
                model[57]._parameters["weight"] = nn.Parameter(model[57].weight.detach() * 1.5)
            model(torch.ones(2, 4)).square().sum().backward()
            norms.append(float(model[57].weight.grad.norm()))
            with torch.no_grad():
                for param in model.parameters():
                    assert param.grad is not None
                    param -= 1e-3 * param.grad
                    param.grad = None
    seen = {}
    for record in kept.records:
        site = record.snapshot.sites.names.index("57.weight")
        if record.snapshot.calls[site]:
            seen[record.snapshot.step] = float(record.snapshot.norm[site])
    last = max(seen)
    assert last >= 12
    assert seen[last] == pytest.approx(norms[last], rel=1e-5)
    assert sum(step not in seen for step in range(5, last)) <= -(-200 // AT_ONCE) + 1


def wider_linears(model: nn.Sequential, step: int) -> None:
    """Both layers are replaced by wider ones, whose parameters are unlike those before."""
    model[0], model[1] = nn.Linear(4, 5 + step), nn.Linear(5 + step, 4)


def new_class(model: nn.Sequential, step: int) -> None:
    """Every parameter is replaced by one of a class that is made for it."""
    for module in model:
        for name, param in list(module.named_parameters()):
            assert param.grad is not None
            setattr(module, name, type("Own", (nn.Parameter,), {})(param.detach() - LR * param.grad))


def wider_weights(model: nn.Sequential, step: int) -> None:
    """The weights of one layer are replaced by wider ones, the other layer's stay as they are."""
    first, second = model[0], model[1]
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    first.weight, first.bias = nn.Parameter(torch.ones(5 + step, 4)), nn.Parameter(torch.ones(5 + step))
    second.weight = nn.Parameter(torch.ones(4, 5 + step))


@pytest.mark.parametrize("replace", [wider_linears, new_class, wider_weights])
def test_parameters_that_make_way_for_others_unlike_them_are_freed_and_accounted_for(
    replace: Callable[[nn.Sequential, int], None],
) -> None:
    """None is held longer than until the next backward, and the account says why there are no windows of them."""
    torch.manual_seed(0)
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), list[weakref.ref[Tensor]]()
    with gradwatch.watch(model, sinks=[], strict=True) as gw:
        for step in range(STEPS):
            model(torch.ones(2, 4)).square().mean().backward()
            seen += map(weakref.ref, model.parameters())
            replace(model, step)
        model(torch.ones(2, 4)).square().mean().backward()
        alive = {id(one()) for one in seen} - {id(None)} - set(map(id, model.parameters()))
        assert not alive
        assert gw.coverage == 1.0
        account = session_of(gw).account()
    assert account.watched.replaced >= STEPS - 1
    assert any("another shape, dtype or class" in gap for gap in gaps(account))


NEW_SHAPES = """
import torch, weakref
torch.manual_seed(0)
seen = []
for width in range(30):
    model = torch.nn.Sequential(torch.nn.Linear(4, 8 + width), torch.nn.Linear(8 + width, 1))
    model(torch.randn(8, 4)).square().mean().backward()
    seen += map(weakref.ref, model.parameters())
print(sum(one() is not None for one in seen) <= 8)
"""


def test_models_of_other_shapes_that_are_gone_are_freed(tmp_path: Path) -> None:
    """A new model for each backward, each wider than the one before: of the models before none is held."""
    _, watched = bare_and_watched(NEW_SHAPES, tmp_path)
    assert watched.stdout.startswith("True")
