"""P4: models stay copyable and checkpoints clean; a copy of a watched model carries nothing of ours."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gradwatch
from gradwatch.rules.files import parse_rules
from gradwatch.session.watch import Watch
from gradwatch.taps import module_calls
from tests.support import warm

# Every tap at once: marks, tensor hooks, module hooks, samplers.
RULES = """
version: 1
modules: {tap: output, names: ["*"]}
rules:
  local: {detect: {kind: above, of: norm_local, threshold: 1e6}}
  tap: {detect: {kind: above, of: grad_output_norm, threshold: 1e6}}
  activations: {detect: {kind: above, of: activation_std, threshold: 1e6}}
  stuck: {detect: {kind: stuck}}
"""
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(3))
Watched = tuple[nn.Module, torch.optim.Optimizer, Watch]


@contextmanager
def made(folder: Path) -> Iterator[Watched]:
    """A model that has taken a step under every tap."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with gradwatch.watch(
        model, optimizer, rules=parse_rules(RULES), run_dir=folder, listen="127.0.0.1:0", strict=True
    ) as gw:
        step(model, optimizer)
        yield model, optimizer, gw


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    with made(tmp_path) as parts:
        yield parts


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(X).pow(2).sum().backward()
    optimizer.step()


def taught(gw: Watch) -> int:
    return int(gw.status()["steps"])


def test_deepcopy_fires_no_hook(watched: Watched) -> None:
    """Training a deep copy with a deep-copied optimizer is invisible to the watch."""
    model, optimizer, gw = watched
    before = taught(gw)
    twin, twin_optimizer = copy.deepcopy(model), copy.deepcopy(optimizer)
    assert twin_optimizer.state_dict().keys() == optimizer.state_dict().keys()
    fresh = torch.optim.AdamW(twin.parameters(), 0.01)
    for _ in range(3):
        step(twin, fresh)
    assert taught(gw) == before
    assert gw.health.errors() == {}
    assert all(not p._post_accumulate_grad_hooks and not p._backward_hooks for p in twin.parameters())


def test_averaged_models(watched: Watched) -> None:
    """EMA and SWA copies of a watched model work and update."""
    model, optimizer, gw = watched
    before = taught(gw)
    for average in (AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))):
        average.update_parameters(model)
        average(X).sum().backward()
    step(model, optimizer)
    assert taught(gw) == before + 1
    assert gw.health.errors() == {}


def test_no_saved_file_names_gradwatch(watched: Watched) -> None:
    """state_dict, the whole module, the optimizer, the parameters: no file contains our name."""
    model, optimizer, _ = watched
    for thing in (model.state_dict(), model, optimizer.state_dict(), optimizer, list(model.parameters())):
        buffer = io.BytesIO()
        torch.save(thing, buffer)
        assert b"gradwatch" not in buffer.getvalue()
        assert b"gradwatch" not in pickle.dumps(thing)


def test_saved_model_loads_where_gradwatch_is_not_installed(watched: Watched, tmp_path: Path) -> None:
    """A whole pickled module loads and trains in a process that cannot import gradwatch."""
    model, _, _ = watched
    torch.save(model, tmp_path / "model.pt")
    code = (
        "import sys\n"
        "sys.modules['gradwatch'] = None\n"
        "import torch\n"
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "model(torch.ones(1, 3)).sum().backward()\n"
        "print(sum(p.grad is not None for p in model.parameters()))\n"
    )
    done = warm.run([sys.executable, "-c", code])
    assert done.stdout.strip() == "4", done.stderr


SPAWNS = """
import sys, warnings
from pathlib import Path
from tests.promises.test_copies import made, spawned
warnings.simplefilter("error")
with made(Path(sys.argv[1])) as watched:
    spawned(watched)
"""


def test_spawned_process_gets_a_clean_model(tmp_path: Path) -> None:
    """The watched model itself, hooks and all, arrives without any, trains, and nobody is warned (errors here)."""
    warm.run([sys.executable, "-c", SPAWNS, str(tmp_path)], check=True)


def spawned(watched: Watched) -> None:
    """Send the model to a process that is started anew."""
    model, _, gw = watched
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    before = taught(gw)
    process = context.Process(target=train_in_child, args=(model, queue))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert queue.get() == 0
    assert taught(gw) == before


def train_in_child(model: nn.Module, queue: torch.multiprocessing.SimpleQueue) -> None:  # type: ignore[type-arg]
    """In the child: how many hooks of any kind the parameters carry; then a step."""
    hooks = [p._post_accumulate_grad_hooks or p._backward_hooks for p in model.parameters()]
    step(model, torch.optim.SGD(model.parameters(), 0.01))
    queue.put(sum(len(each) for each in hooks if each))


def test_parameters_sent_by_reference_do_not_warn(watched: Watched) -> None:
    """A single parameter with hooks of ours goes through torch's shared-memory pickler without a warning."""
    model, _, _ = watched
    for parameter in model.parameters():
        assert parameter._backward_hooks
        torch.multiprocessing.reductions.reduce_tensor(parameter)


def test_swap_tensors_still_works(watched: Watched) -> None:
    """No weak reference of ours stands in the way of torch.utils.swap_tensors."""
    model, _, _ = watched
    weight = model[0].weight  # type: ignore[index]
    weight.grad = None
    torch.utils.swap_tensors(weight, nn.Parameter(torch.zeros_like(weight)))
    assert float(model[0].weight.detach().abs().sum()) == 0.0  # type: ignore[index]


def test_close_gives_the_model_back_as_found(watched: Watched) -> None:
    """P40: after close there are no hooks on anything, and the watch can be attached again."""
    model, optimizer, gw = watched
    gw.close()
    for parameter in model.parameters():
        assert not parameter._post_accumulate_grad_hooks
        assert not parameter._backward_hooks
    for module in model.modules():
        assert not module_calls.noticed(module)
    step(model, optimizer)
    gw.close()
