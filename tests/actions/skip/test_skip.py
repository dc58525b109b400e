"""A skipped step never happened: the hash of parameters and optimizer state, whatever optimizer, whoever else hooks."""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradwatch.records.decision import Decision
from tests.support.recorder import Recorder

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(3))
VARIANTS: list[dict[str, Any]] = [
    {}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"capturable": True}, {"differentiable": True},
    {"momentum": 0.9, "weight_decay": 0.1}, {"weight_decay": 0.1}, {"amsgrad": True}, {"maximize": True},
    {"line_search_fn": "strong_wolfe"},
]  # fmt: skip


def digest(*values: Any) -> str:
    """SHA-256 over every bit of tensors, and the repr of everything else, in order."""
    sha = hashlib.sha256()

    def feed(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            sha.update(f"{value.dtype}{tuple(value.shape)}".encode())
            sha.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key, each in value.items():
                feed(str(key))
                feed(each)
        elif isinstance(value, (list, tuple)):
            for each in value:
                feed(each)
        else:
            sha.update(repr(value).encode())

    feed(list(values))
    return sha.hexdigest()


def all_optimizers() -> list[type[Optimizer]]:
    """Every Optimizer class defined anywhere in torch.optim, found by walking its modules."""
    found: set[type[Optimizer]] = set()
    for info in pkgutil.walk_packages(torch.optim.__path__, "torch.optim."):
        if "_multi_tensor" not in info.name:  # old aliases: the same classes with foreach=True
            found |= {each for each in vars(import_module(info.name)).values() if is_optimizer(each)}
    return sorted(found - {Optimizer}, key=lambda kind: kind.__name__)


def is_optimizer(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Optimizer)


class Job:
    """A small training of one optimizer class; every step goes through a closure where the class wants one."""

    def __init__(self, kind: type[Optimizer], variant: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.model: nn.Module
        if kind is torch.optim.SparseAdam:
            self.model = nn.Embedding(5, 2, sparse=True)
            self.loss = lambda: self.model(torch.tensor([1, 2])).pow(2).sum()
        else:  # Muon takes matrices only
            self.model = nn.Linear(3, 2, bias=kind.__name__ != "Muon")
            self.loss = lambda: self.model(X).pow(2).sum()
        self.optimizer = kind(self.model.parameters(), lr=0.1, **variant)  # type: ignore[call-arg]
        self.by_closure = kind is torch.optim.LBFGS
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def backward(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        with torch.enable_grad():
            loss: torch.Tensor = self.loss()
            loss.backward()
        return loss

    def step(self) -> None:
        if self.by_closure:
            self.optimizer.step(self.backward)
        else:
            self.backward()
            self.optimizer.step()

    def digest(self) -> str:
        state = self.optimizer.state_dict()
        return digest(list(self.model.parameters()), state["state"], state["param_groups"])


def legal(kind: type[Optimizer], variant: dict[str, Any]) -> bool:
    """Whether torch itself takes two steps with this variant on this machine."""
    if any(key not in inspect.signature(kind.__init__).parameters for key in variant):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            job = Job(kind, variant)
            job.step()
            job.step()
    except (RuntimeError, ValueError, NotImplementedError, AssertionError):
        return False
    return True


@functools.cache
def cases() -> list[Any]:
    return list(_cases())


def _cases() -> Iterator[Any]:
    for kind in all_optimizers():
        for variant in VARIANTS:
            if not variant or legal(kind, variant):
                name = "-".join([kind.__name__, *(f"{key}={value}" for key, value in variant.items())])
                yield pytest.param(kind, variant, id=name)


def test_every_class_of_torch_optim_is_tried() -> None:
    """The enumeration finds every public Optimizer of torch.optim, fused and foreach ones where they exist."""
    public = {kind for kind in vars(torch.optim).values() if is_optimizer(kind)}
    assert public - {Optimizer} <= set(all_optimizers())
    tried = [case.values for case in cases()]
    assert {kind for kind, _ in tried} == set(all_optimizers())
    fused = {kind for kind, variant in tried if variant.get("fused")}
    assert {torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad} <= fused
    foreach = {kind for kind, variant in tried if variant.get("foreach")}
    assert len(foreach) >= 12


@pytest.mark.parametrize(("kind", "variant"), cases())
def test_skip_is_exact(kind: type[Optimizer], variant: dict[str, Any]) -> None:
    """Same hash before and after, the gradients are back, the scheduler is silent, and the next step moves."""
    job = Job(kind, variant)
    with Recorder(job.model) as recorder:
        for _ in range(2):
            job.step()
            job.scheduler.step()
        recorder.decide = lambda snapshot: Decision(skip=True)
        before = job.digest()
        for _ in range(2):
            job.step()
            assert job.digest() == before
            assert all(param.grad is not None for param in job.model.parameters())
        job.scheduler.step()  # warns, and so fails, where it thinks that no step was taken
        recorder.decide = lambda snapshot: Decision()
        before = job.digest()
        job.step()
        assert job.digest() != before


@pytest.mark.parametrize(("kind", "variant"), cases())
def test_skipping_the_very_first_step_leaves_no_state(kind: type[Optimizer], variant: dict[str, Any]) -> None:
    """A run that skips its first step continues as one that began a step later."""
    job, late = Job(kind, variant), Job(kind, variant)
    with Recorder(job.model) as recorder:
        recorder.decide = lambda snapshot: Decision(skip=snapshot.step == 0)
        job.step()
        assert job.digest() == late.digest()
        for _ in range(2):
            job.step()
            late.step()
    assert job.digest() == late.digest()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_skip_under_a_grad_scaler(fused: bool, unscale: bool) -> None:
    """Skipped by us and not by the scaler: nothing moves, and the scale goes on growing."""
    job = Job(torch.optim.AdamW, {"fused": fused})
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)

    def step() -> None:
        job.optimizer.zero_grad()
        scaler.scale(job.loss()).backward()
        if unscale:
            scaler.unscale_(job.optimizer)
        scaler.step(job.optimizer)
        scaler.update()

    with Recorder(job.model) as recorder:
        step()
        recorder.decide = lambda snapshot: Decision(skip=True)
        before = job.digest()
        step()
        assert job.digest() == before
        assert scaler.get_scale() == 1024.0
        assert all(param.grad is not None for param in job.model.parameters())
        recorder.decide = lambda snapshot: Decision()
        step()
        assert job.digest() != before


# -- optimizers of other people ------------------------------------------------------------------------------


class Naive(Optimizer):
    """No check for None, a counter in its groups, one beside them, and an entry of state that is nobody's."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": torch.zeros(())})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        shared = self.state["shared"]
        shared["sum"] = shared.get("sum", torch.zeros(())) + 1
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"].add_(1.0)
            for param in group["params"]:
                param.sub_(param.grad * group["lr"])
                self.state[param]["n"] = self.state[param].get("n", 0) + 1


class OwnList(Optimizer):
    """Walks a list of its own, as LBFGS does, and writes past the version counter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.flat = {"all": [param for group in self.param_groups for param in group["params"]]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.flat["all"]:
            param.data.sub_(param.grad * self.defaults["lr"])
            self.state[param].setdefault("m", torch.zeros_like(param)).add_(param.grad)


class Lookahead(Optimizer):
    """Wraps another optimizer whose groups are its own (Zhang et al. 2019, arXiv:1907.08610)."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.fast = torch.optim.Adam([{**group} for group in self.param_groups], lr=lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.fast.step()
        for group in self.param_groups:
            for param in group["params"]:
                slow = self.state[param].setdefault("slow", param.detach().clone())
                slow.add_(param - slow, alpha=0.5)
                param.copy_(slow)


class DecaysAfter(torch.optim.SGD):
    """Does more after `super().step()` has returned, gradients included."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=1e-3)


class OfLBFGS(torch.optim.LBFGS):
    """A subclass of LBFGS with a step of its own."""

    def step(self, closure: Any) -> Any:
        return super().step(closure)


def everything(optimizer: Optimizer) -> str:
    """Parameters, groups, state and whatever numbers the optimizer counts."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    counts = {name: value for name, value in vars(optimizer).items() if name in ("calls",)}
    inner = optimizer.fast.state_dict() if isinstance(optimizer, Lookahead) else {}
    state = [
        (str(key) if isinstance(key, str) else "", entry) for key, entry in optimizer.state.items() if entry
    ]
    return digest(params, groups, state, counts, inner)


@pytest.mark.parametrize("kind", [Naive, OwnList, Lookahead, DecaysAfter, OfLBFGS])
def test_skip_of_an_optimizer_that_is_not_torchs(kind: Callable[..., Optimizer]) -> None:
    """Weights, groups, state and counters as before, however it reaches its parameters; then it moves again."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            loss: torch.Tensor = model(X).pow(2).sum()
            loss.backward()
        return loss

    def step() -> None:
        if kind is OfLBFGS:
            optimizer.step(closure)
            return
        closure()
        optimizer.step()

    with Recorder(model) as recorder:
        for _ in range(2):
            step()
        recorder.decide = lambda snapshot: Decision(skip=True)
        for _ in range(2):
            before = everything(optimizer)
            step()
            assert everything(optimizer) == before
            assert optimizer.param_groups[0]["params"] == list(model.parameters())
            assert all(param.grad is not None for param in model.parameters())
        recorder.decide = lambda snapshot: Decision()
        step()
        assert everything(optimizer) != before


class NeedsLists(Optimizer):
    """Cannot do with an empty list, and has counted the step by the time it says so."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        self.calls += 1
        self.state["shared"]["noise"] = torch.rand(())
        for group in self.param_groups:
            group["k"] += 1
            flat = torch.cat([param.grad.view(-1) for param in group["params"]])
            for param in group["params"]:
                param.sub_(param.grad / flat.norm(), alpha=group["lr"])
        return loss


class ByState(Optimizer):
    """Reaches its parameters by its state, past the lists."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for param in self.param_groups[0]["params"]:
            self.state[param].setdefault("m", torch.zeros_like(param))
        for param, entry in self.state.items():
            if param.grad is not None:
                param.data.sub_(entry["m"].add_(param.grad), alpha=0.1)
        return loss


class Climbs(torch.optim.SGD):
    """A step that moves the weights on its own after its `super().step(closure)`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.sub_(param.grad, alpha=1e-3)
        return loss


@pytest.mark.parametrize("by_closure", [False, True])
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("kind", [Naive, NeedsLists, ByState, Climbs])
def test_a_skip_never_raises_and_is_exact_from_the_first(
    kind: Callable[..., Optimizer], first: int, by_closure: bool
) -> None:
    """No step raises, nothing moves, hooks are called as often as ever."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    heard: list[Optimizer] = []
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: heard.append(optimizer))

    def backward() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            loss: torch.Tensor = model(X).pow(2).sum()
            loss.backward()
        return loss

    def step() -> None:
        if by_closure and kind is not Naive:
            optimizer.step(backward)
        else:
            backward()
            optimizer.step()

    with Recorder(model) as recorder:
        for _ in range(first):
            step()
        hooks_a_step = len(heard) / first if first else None
        recorder.decide = lambda snapshot: Decision(skip=True)
        for _ in range(3):
            heard.clear()
            before = everything(optimizer)
            step()
            assert everything(optimizer) == before
            assert optimizer.param_groups[0]["params"] == list(model.parameters())
            assert all(param.grad is not None for param in model.parameters())
            assert hooks_a_step in (None, len(heard))
        recorder.decide = lambda snapshot: Decision()
        before = everything(optimizer)
        step()
        assert everything(optimizer) != before
        assert recorder.errors == []


# -- step hooks of other people ------------------------------------------------------------------------------


def test_the_users_step_hooks_never_see_a_skip() -> None:
    """Hooks before and after the step, on the instance and for all, find lists and gradients as ever."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    found: list[tuple[str, list[bool]]] = []

    def note(where: str, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found.append((where, [param.grad is not None for param in optimizer.param_groups[0]["params"]]))

    with Recorder(model) as recorder:
        handles = [
            register_optimizer_step_pre_hook(functools.partial(note, "pre, all")),
            optimizer.register_step_pre_hook(functools.partial(note, "pre")),
            optimizer.register_step_post_hook(functools.partial(note, "post")),
        ]
        for skip in (False, True, True, False):
            recorder.decide = lambda snapshot, skip=skip: Decision(skip=skip)  # type: ignore[misc]
            found.clear()
            optimizer.zero_grad()
            model(X).sum().backward()
            before = digest(list(model.parameters()), optimizer.state_dict()["state"])
            optimizer.step()
            after = digest(list(model.parameters()), optimizer.state_dict()["state"])
            assert (before == after) == skip
            assert found == [("pre, all", [True, True]), ("pre", [True, True]), ("post", [True, True])]
            assert len(optimizer._optimizer_step_pre_hooks) == 1  # nothing of ours is left
            assert len(optimizer._optimizer_step_post_hooks) == 1
        for handle in handles:
            handle.remove()


def test_a_hook_that_changes_gradients_after_us_cannot_undo_a_skip() -> None:
    """A pre-hook of the user that adds noise, and replaces gradients, runs before the gradients are taken away."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def noise(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for param in optimizer.param_groups[0]["params"]:
            param.grad = param.grad + 1.0

    with Recorder(model) as recorder:
        handle = optimizer.register_step_pre_hook(noise)
        recorder.decide = lambda snapshot: Decision(skip=True)
        before = digest(list(model.parameters()))
        model(X).sum().backward()
        grads = [param.grad.clone() for param in model.parameters() if param.grad is not None]
        optimizer.step()
        assert digest(list(model.parameters())) == before
        assert not optimizer.state_dict()["state"]
        assert all(torch.equal(p.grad, g + 1.0) for p, g in zip(model.parameters(), grads, strict=True))
        handle.remove()


def test_two_optimizers_are_skipped_apart() -> None:
    """One of two skips, the other steps; then the other way round."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    parts = list(model.children())
    optimizers = [torch.optim.AdamW(part.parameters(), 0.1) for part in parts]
    with Recorder(model) as recorder:
        for turn in (0, 1, 0):
            recorder.decide = lambda snapshot, turn=turn: Decision(skip=snapshot.optimizer == turn)  # type: ignore[misc]
            before = [digest(list(part.parameters())) for part in parts]
            states = [digest(each.state_dict()["state"]) for each in optimizers]
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(X).pow(2).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            for number, part in enumerate(parts):
                skipped = number == turn
                assert (digest(list(part.parameters())) == before[number]) == skipped
                assert (digest(optimizers[number].state_dict()["state"]) == states[number]) == skipped


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_compiled_step_is_skipped_too() -> None:
    """`torch.compile(optimizer.step)`: the same hash, though the hooks are called from a traced frame."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), torch.tensor(0.1), momentum=0.9)
    step = torch.compile(optimizer.step, backend="eager")
    with Recorder(model) as recorder:
        for number in range(5):
            recorder.decide = lambda snapshot: Decision(skip=snapshot.step in (2, 3))
            optimizer.zero_grad()
            model(X).sum().backward()
            before = digest(list(model.parameters()), copy.deepcopy(optimizer.state_dict()["state"]))
            step()
            same = before == digest(list(model.parameters()), optimizer.state_dict()["state"])
            assert same == (number in (2, 3))
            assert all(param.grad is not None for param in model.parameters())
