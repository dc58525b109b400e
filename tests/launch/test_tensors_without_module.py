"""Tensors that no module and no optimizer holds, trained by the script's own code: observed by `gradwatch run`."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradwatch.journal import read_journal
from gradwatch.journal.entries import NormsEntry, SitesEntry
from tests.support.launch_cases import bare_and_watched

PERCEPTRON = """
import torch
torch.manual_seed(0)
x = torch.randn(64, 8)
y = x.sum(1, keepdim=True).sin()
w1, w2 = torch.randn(8, 16), torch.randn(16, 1)
b1, b2 = torch.zeros(16), torch.zeros(1)
weights = [each.requires_grad_() for each in (w1, b1, w2, b2)]
for _ in range(20):
    loss = (torch.tanh(x @ w1 + b1) @ w2 + b2 - y).square().mean()
    loss.backward()
    with torch.no_grad():
        for each in weights:
            each -= 0.1 * each.grad
            each.grad = None
print(loss.item(), w1.sum().item())
"""


def test_tensors_that_the_script_updates_are_observed(tmp_path: Path) -> None:
    """From the second backward on, under names that say their shape, with their norms."""
    _, watched = bare_and_watched(PERCEPTRON, tmp_path)
    assert "0 of 0 steps watched, 19 windows without an optimizer · 4 parameters" in watched.stderr
    (journal,) = read_journal(next(tmp_path.glob("gradwatch-runs/*/*.gwj")).parent)
    entries = list(journal.entries())
    names = {each.sites.names for each in entries if isinstance(each, SitesEntry)}
    assert names == {("tensor0[8x16]", "tensor1[16]", "tensor2[16x1]", "tensor3[1]")}
    assert any(isinstance(each, NormsEntry) for each in entries)


INPUTS = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
def attack(x):
    delta = torch.zeros_like(x, requires_grad=True)
    for _ in range(5):
        model(x + delta).sum().backward()
        delta.data.add_(delta.grad.sign(), alpha=0.01)
        delta.grad = None
    return delta.detach()
fixed = torch.randn(3, requires_grad=True)
for _ in range(5): fixed.square().sum().backward()
for _ in range(5): torch.randn(3, requires_grad=True).square().sum().backward()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(5):
    x = torch.randn(2, 4)
    x = x + attack(x)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
print(model.weight.tolist(), fixed.grad.tolist(), len(fixed._post_accumulate_grad_hooks or ()))
"""


def test_inputs_that_want_a_gradient_are_not_taken_for_weights(tmp_path: Path) -> None:
    """Nor is what an attack on a model updates in place; nothing of gradwatch's stays on a tensor."""
    _, watched = bare_and_watched(INPUTS, tmp_path)
    assert "5 of 5 steps watched" in watched.stderr
    assert "windows" not in watched.stderr


LOOSE_FIRST = """
import torch
fixed = torch.randn(3, requires_grad=True)
fixed.square().sum().backward()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(30):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
print(len(fixed._post_accumulate_grad_hooks or ()))
"""


def test_an_optimizer_ends_the_search_for_tensors(tmp_path: Path) -> None:
    """No hook stays on a tensor that was looked at before there was an optimizer."""
    _, watched = bare_and_watched(LOOSE_FIRST, tmp_path)
    assert watched.stdout == "0\n"
    assert "30 of 30 steps watched" in watched.stderr


TABLE = """
import torch
torch.manual_seed(0)
table = torch.randn(200_000, 4, requires_grad=True)
for step in range(10):
    rows = torch.tensor([7 + step, 199_998])
    table[rows].square().sum().backward()
    with torch.no_grad():
        table[rows] -= 0.1 * table.grad[rows]
        table.grad = None
print(table[7:20].sum().item())
"""


def test_a_large_table_of_which_few_rows_are_updated_is_observed(tmp_path: Path) -> None:
    """The sum of all elements shows what no sample of them would."""
    _, watched = bare_and_watched(TABLE, tmp_path)
    assert "9 windows without an optimizer · 1 parameter" in watched.stderr


ANEW = """
import torch
w = torch.ones(3, requires_grad=True)
for _ in range(9):
    w.square().sum().backward()
    w = (w - 0.1 * w.grad).detach().requires_grad_()
print(w.tolist())
"""


def test_tensors_made_anew_for_every_backward_are_told(tmp_path: Path) -> None:
    """They cannot be distinguished from inputs, which the account says."""
    _, watched = bare_and_watched(ANEW, tmp_path)
    assert (
        "tensors that are made anew for every backward cannot be distinguished from inputs" in watched.stderr
    )


LET_GO = """
import torch, weakref
for fold in range(4):
    w = torch.ones(3, requires_grad=True)
    for _ in range(10):
        w.square().sum().backward()
        w.data.add_(w.grad, alpha=-0.1)
        w.grad.zero_()
    held = weakref.ref(w)
    del w
    torch.ones(1, requires_grad=True).square().sum().backward()
    print(held() is None)
"""


def test_a_tensor_that_the_script_lets_go_is_freed(tmp_path: Path) -> None:
    """At the next backward at the latest, and the next one trained is observed again."""
    _, watched = bare_and_watched(LET_GO, tmp_path)
    windows = int(watched.stderr.split("steps watched, ")[1].split()[0])
    assert windows > 9


BESIDE_A_MODULE = """
import torch
torch.manual_seed(0)
table, head = torch.randn(20, 4, requires_grad=True), torch.nn.Linear(4, 1)
weights = [table, *head.parameters()]
for _ in range(20):
    at = torch.randint(20, (6,))
    (head(table[at]).squeeze() - at / 20).square().mean().backward()
    with torch.no_grad():
        torch._foreach_sub_(weights, [each.grad for each in weights], alpha=0.02)
    for each in weights:
        each.grad = None
print(table.sum().item(), head.weight.tolist())
"""


def test_a_tensor_trained_with_a_module_joins_its_loop(tmp_path: Path) -> None:
    """One window for each step, from the first on, and the tensor is among what is measured."""
    _, watched = bare_and_watched(BESIDE_A_MODULE, tmp_path)
    assert "20 windows without an optimizer · 3 parameters" in watched.stderr


STEPS_THROUGH = """
import torch
torch.manual_seed(0)
lr = torch.tensor(0.05, requires_grad=True)
meta = torch.optim.Adam([lr], 1e-2)
for _ in range(5):
    fast = torch.zeros(4, requires_grad=True) * 1
    inner = torch.optim.SGD([fast], lr=lr, differentiable=True)
    for _ in range(3):
        x = torch.randn(8, 4)
        loss = (x @ fast - x.sum(1)).square().mean()
        (fast.grad,) = torch.autograd.grad(loss, fast, create_graph=True)
        inner.step()
    meta.zero_grad()
    (fast - 1).square().sum().backward()
    meta.step()
print(lr.item())
"""


def test_a_differentiable_optimizer_does_not_keep_the_others_from_being_watched(tmp_path: Path) -> None:
    """It steps through results of operations, which no hook of torch's can watch: the account says so."""
    _, watched = bare_and_watched(STEPS_THROUGH, tmp_path)
    assert "5 of 20 steps watched" in watched.stderr
    assert (
        "15 of 20 optimizer steps not watched: the parameters of a differentiable optimizer are"
        in watched.stderr
    )


SWAPPED = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
w = model.weight if KIND == "module" else torch.randn(1, 4, requires_grad=True)
for step in range(20):
    out = model(torch.ones(8, 4)) if KIND == "module" else torch.ones(8, 4) @ w.t()
    out.square().mean().backward()
    moved = (w.detach() - 0.05 * w.grad).requires_grad_()
    w.grad = None
    if KIND != "once" or step == 8:
        torch.utils.swap_tensors(w, torch.nn.Parameter(moved.detach()) if KIND == "module" else moved)
    else:
        w.data.copy_(moved.detach())
    del moved
print(w.tolist())
"""


@pytest.mark.parametrize("kind", ["module", "always", "once"])
def test_tensors_whose_contents_are_swapped_keep_their_hook(kind: str, tmp_path: Path) -> None:
    """Every step from the second backward on is a window of that tensor, and no rule finds its gradient stale."""
    _, watched = bare_and_watched(f"KIND = {kind!r}\n{SWAPPED}", tmp_path)
    windows = 20 if kind == "module" else 19
    assert f"{windows} windows without an optimizer · {1 + (kind == 'module')} parameters" in watched.stderr
    assert "no rule fired" in watched.stderr
