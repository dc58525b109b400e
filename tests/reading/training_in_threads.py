"""Four threads train a model each under one watch, as fast as they can; prints what differs from training in turn.

Run as `python -m tests.reading.training_in_threads LOOP...`: a thread that looks at a gradient of another thread's
may end the process, as torch keeps no lock on `.grad`.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable

import torch
from torch import nn

import gradwatch
from gradwatch.rules.files import parse_rules
from tests.support.kept import Kept

STEPS = 20
DROPPING = "version: 1\nrules: {n: {detect: {kind: nonfinite}, do: [drop_micro]}}\n"

Change = Callable[[nn.Module], object]
CHANGES: dict[str, Change] = {
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "clip_grad_value_": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3),
    "get_total_norm": lambda model: nn.utils.get_total_norm(
        [p.grad for p in model.parameters() if p.grad is not None]
    ),
    "own code": lambda model: [p.grad.mul_(0.5) for p in model.parameters() if p.grad is not None],
    "zeroed": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "never cleared": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "discarded": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "drop_micro": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "no optimizer": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
}
"""What each loop does to its gradients before a step."""


def train(loop: str, model: nn.Module, optimizer: torch.optim.Optimizer | None, batch: torch.Tensor) -> None:
    """The steps of one thread; of three windows of "discarded" one ends in no step."""
    for step in range(STEPS):
        if loop != "never cleared":
            model.zero_grad(set_to_none=loop != "zeroed")
        for _ in range(2 if loop == "drop_micro" else 1):
            model(batch).square().mean().backward()
        if loop == "discarded" and step % 3 == 0:
            continue
        CHANGES[loop](model)
        if optimizer is not None:
            optimizer.step()
            continue
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param.sub_(param.grad, alpha=1e-2)


def wrong(loop: str) -> str:
    """What is wrong with one loop; empty if nothing is."""
    torch.manual_seed(0)
    models = [nn.Sequential(*[nn.Linear(16, 16) for _ in range(12)]) for _ in range(4)]
    batches = [torch.randn(8, 16) for _ in models]
    alike = copy.deepcopy(models)

    def optimizers(of: list[nn.Sequential]) -> list[torch.optim.Optimizer]:
        return [] if loop == "no optimizer" else [torch.optim.SGD(model.parameters(), 1e-2) for model in of]

    for model, optimizer, batch in zip(alike, optimizers(alike) or [None] * 4, batches, strict=True):
        train(loop, model, optimizer, batch)
    watched, kept = optimizers(models), Kept()
    rules = parse_rules(DROPPING) if loop == "drop_micro" else None
    with gradwatch.watch(models, watched, rules=rules, sinks=[kept], strict=True):
        threads = [
            threading.Thread(target=train, args=(loop, *each))
            for each in zip(models, watched or [None] * 4, batches, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    pairs = zip(models, alike, strict=True)
    same = [
        torch.equal(a, b)
        for one, other in pairs
        for a, b in zip(one.parameters(), other.parameters(), strict=True)
    ]
    steps = 4 * len([step for step in range(STEPS) if loop != "discarded" or step % 3])
    found = [] if all(same) else [f"{same.count(False)} parameters differ"]
    if (
        loop != "no optimizer" and len(kept.records) != steps
    ):  # without one, steps are known by later backwards
        found.append(f"{len(kept.records)} Records of {steps} steps")
    return ", ".join(found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-5)
    for name in sys.argv[1:]:
        print(f"{name}: {wrong(name)}", flush=True)
