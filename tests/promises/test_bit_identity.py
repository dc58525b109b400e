"""P1: observation changes nothing: weights, optimizer state, losses and every random generator bit-identical."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradwatch
from tests.support import warm
from tests.support.bare_torch import by_bare_torch
from tests.support.zoo import MODELS


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, 1e-3, foreach=True)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, 1e-2, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, 1e-3),
    "adam_foreach": adam,
}
MODES = ("fp32", "bf16", "accumulate", "checkpoint", "checkpoint_reentrant")


def digest(*things: Any) -> str:
    sha = hashlib.sha256()
    for thing in things:
        sha.update(pickle.dumps(thing))
    return sha.hexdigest()


def tensors(state: Any) -> Any:
    """Optimizer state with tensors as bytes, so that equality means equality of bits."""
    if isinstance(state, torch.Tensor):
        return state.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() if state.numel() else b""
    if isinstance(state, dict):
        return {key: tensors(value) for key, value in state.items()}
    return [tensors(value) for value in state] if isinstance(state, (list, tuple)) else state


def train(model_name: str, optimizer_name: str, mode: str, steps: int, watched: Any) -> str:
    """SHA-256 over everything training leaves behind: losses, weights, buffers, optimizer state, generators."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model, batch = MODELS[model_name]()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    losses = []
    with watched(model, optimizer):
        for _ in range(steps):
            for _ in range(4 if mode == "accumulate" else 1):
                inputs = batch()
                with torch.autocast("cpu", torch.bfloat16) if mode == "bf16" else contextlib.nullcontext():
                    if mode.startswith("checkpoint") and inputs.is_floating_point():
                        inputs.requires_grad_()
                        out = checkpoint(model, inputs, use_reentrant=mode == "checkpoint_reentrant")
                    else:
                        out = model(inputs)
                    loss = out.float().pow(2).mean()
                loss.backward()
                losses.append(loss.item())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
    state = tensors(model.state_dict()), tensors(optimizer.state_dict()["state"])
    return digest(
        losses, state, torch.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state()
    )


@contextlib.contextmanager
def unwatched(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    yield


@pytest.fixture
def watched(tmp_path: Path) -> Callable[..., Any]:
    def attach(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        return gradwatch.watch(
            model, optimizer, rules="default", run_dir=tmp_path, listen="127.0.0.1:0", strict=True
        )

    return attach


@pytest.mark.parametrize(
    ("model", "optimizer", "mode"),
    [
        ("mlp_dropout", "sgd", "fp32"),
        ("cnn_batchnorm", "adamw", "fp32"),
        ("transformer", "adam_foreach", "accumulate"),
        ("mlp_dropout", "adamw", "checkpoint"),
        ("cnn_batchnorm", "sgd", "bf16"),
        ("lstm", "adam_foreach", "fp32"),
        ("transformer", "adamw", "checkpoint_reentrant"),
    ],
)
def test_watching_changes_no_bit(model: str, optimizer: str, mode: str, watched: Callable[..., Any]) -> None:
    """The default pack on a healthy run: the hash of everything is that of the unwatched run."""
    bare = by_bare_torch(lambda: train(model, optimizer, mode, 30, unwatched))
    assert train(model, optimizer, mode, 30, watched) == bare


def test_what_sinks_import_draws_no_number(tmp_path: Path) -> None:
    """A library that draws from `random` while it is imported (rich does) leaves the job's generators alone."""
    (tmp_path / "rich.py").write_text("import random\nrandom.random()\n")
    code = (
        "import random, sys, tempfile\n"
        "for name in [name for name in sys.modules if name.startswith(('rich', 'structlog'))]:\n"
        "    del sys.modules[name]  # a warm Python has them\n"
        "import numpy as np, torch\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "def states(): return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()\n"
        "before = states()\n"
        "import gradwatch\n"
        "with gradwatch.watch(model, optimizer, run_dir=tempfile.mkdtemp(), listen='127.0.0.1:0', strict=True):\n"
        "    model(torch.ones(1, 2)).sum().backward(); optimizer.step()\n"
        "assert sys.modules['rich'].__file__.startswith(sys.argv[1])\n"
        "assert states() == before\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = warm.run([sys.executable, "-c", code, str(tmp_path)], env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_watching_changes_no_bit_anywhere(
    model: str, optimizer: str, mode: str, watched: Callable[..., Any]
) -> None:
    """P1 in full: 12 models × 3 optimizers × 5 modes, 200 steps."""
    bare = by_bare_torch(lambda: train(model, optimizer, mode, 200, unwatched))
    assert train(model, optimizer, mode, 200, watched) == bare
