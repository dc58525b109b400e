"""Hooks of the script's own have the numbers that they have without gradwatch, and are saved with these."""

from __future__ import annotations

import ast
import io
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

import gradwatch
from gradwatch.taps.hook_ids import FIRST, own_ids
from tests.support.kept import Kept
from tests.test_layers import SOURCES, nodes, parsed, place_of

REGISTERING = "register_"
SCRIPTS_OWN = (
    "cli/doctor/torch_probes.py",
    "integrations/accelerate.py",
)  # a process of its own; no hooks of torch's


def ran(module: nn.Module, args: Any, output: Any) -> None:
    """A hook of the script's."""


@pytest.mark.parametrize("rules", ["default", "activations"])
def test_hooks_that_a_script_registers_while_it_is_watched_are_saved_as_without(
    rules: str, tmp_path: Path
) -> None:
    """The same numbers, from the next one on, in a saved model whose layer has one; a cause is looked for meanwhile."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer, first = torch.optim.SGD(model.parameters(), 0.1), RemovableHandle.next_id
    with gradwatch.watch(model, optimizer, rules=rules, run_dir=tmp_path, sinks=[Kept()], strict=True):
        for number in range(12):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 3)).square().mean() * (float("nan") if number == 9 else 1)
            loss.backward()
            optimizer.step()
        model[0].register_forward_hook(ran)
        file = io.BytesIO()
        torch.save(model, file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert list(saved[0]._forward_hooks) == [first]


def test_no_number_is_given_twice_where_blocks_overlap() -> None:
    """As those of two threads do; the script's counter goes on where it was."""
    hooks: OrderedDict[int, Any] = OrderedDict()
    first = RemovableHandle.next_id
    own_ids.__enter__()
    numbers = [RemovableHandle(hooks).id]
    own_ids.__enter__()
    numbers.append(RemovableHandle(hooks).id)
    own_ids.__exit__()
    numbers += [own_ids.take(), RemovableHandle(hooks).id]
    own_ids.__exit__()
    assert RemovableHandle(hooks).id == first
    assert len(set(numbers)) == len(numbers)
    assert numbers[0] >= FIRST


@pytest.mark.usefixtures("switching")
def test_the_counter_goes_on_where_it_was_after_blocks_of_many_threads_at_once() -> None:
    """However they overlap, no number of gradwatch's is left for hooks of the script."""
    hooks: OrderedDict[int, Any] = OrderedDict()
    first, together = RemovableHandle.next_id, threading.Barrier(4, timeout=60)

    def register() -> None:
        together.wait()
        for _ in range(20_000):
            with own_ids:
                RemovableHandle(hooks)

    threads = [threading.Thread(target=register) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert RemovableHandle(hooks).id == first


def test_a_child_forked_while_another_thread_registers_goes_on_with_the_scripts_numbers() -> None:
    """That thread does not run in it, and would never leave its block."""
    first = RemovableHandle.next_id
    with own_ids:
        child = os.fork()
        if not child:
            os._exit(RemovableHandle.next_id != first)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert RemovableHandle.next_id == first


def test_every_hook_of_ours_is_registered_under_a_number_of_its_own() -> None:
    """By the syntax trees of all files: a call that registers a hook stands in a `with own_ids:`."""
    missing, found = [], 0
    for file in SOURCES:
        if not file.as_posix().endswith(SCRIPTS_OWN):
            calls = [one for one in nodes(parsed(file)) if isinstance(one, ast.Call) and _registers(one)]
            found += len(calls)
            blocks = [block for block in nodes(parsed(file)) if _own(block)] if calls else []
            inside = {id(one) for block in blocks for one in ast.walk(block)}
            missing += [f"{place_of(file)}:{one.lineno}" for one in calls if id(one) not in inside]
    assert found
    assert not missing


def _own(node: ast.AST) -> bool:
    return isinstance(node, ast.With) and any(
        ast.unparse(item.context_expr) == "own_ids" for item in node.items
    )


def _registers(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return (name.startswith(REGISTERING) and name.endswith("_hook")) or name == "register_hook"
