"""Does this PyTorch have the taps gradwatch stands on? Each is tried, not looked up by version.

Every probe works on tensors of its own, takes everything back that it registers, and either returns a word
about what it saw or raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


def expect(condition: bool, otherwise: str) -> None:
    """Raise RuntimeError with what was seen instead."""
    if not condition:
        raise RuntimeError(otherwise)


def post_accumulate_hook() -> str:
    """`register_post_accumulate_grad_hook` fires once, after `.grad` was written."""
    weight = torch.ones(2, requires_grad=True)
    seen: list[bool] = []
    handle = weight.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad is not None))
    (weight * 2).sum().backward()
    handle.remove()
    expect(seen == [True], f"fired {len(seen)} times, .grad written: {seen}")
    return "fires once, after .grad is written"


def tensor_hook() -> str:
    """`Tensor.register_hook` replaces the gradient by what it returns."""
    weight = torch.ones(2, requires_grad=True)
    handle = weight.register_hook(lambda grad: grad * 3)
    weight.sum().backward()
    handle.remove()
    expect(
        weight.grad is not None and weight.grad.tolist() == [3.0, 3.0], f"the gradient became {weight.grad}"
    )
    return "its return value replaces the gradient"


def engine_callback() -> str:
    """`queue_callback` inside `queue_callback` runs after every gradient of the backward has been written."""
    first, last = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen: list[bool] = []
    tasks: list[int] = []
    from gradwatch.taps.backward_end import current
    from gradwatch.taps.backward_end import queue_callback as queue

    def mark(leaf: Tensor) -> None:
        tasks.append(current())
        queue(lambda: queue(lambda: seen.append(first.grad is not None and last.grad is not None)))

    handle = last.register_post_accumulate_grad_hook(mark)
    (first * last).sum().backward()
    handle.remove()
    expect(seen == [True], f"ran {len(seen)} times, all gradients there: {seen}")
    expect(tasks[0] >= 0, f"graph task {tasks[0]}")
    return "runs once, after all gradients; graph task known"


def step_hooks() -> str:
    """Global optimizer step hooks fire around `step`, and a pre-hook may take the gradients away (a skip)."""
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.sum().backward()
    order: list[str] = []

    def before(stepped: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if stepped is optimizer:
            order.append("pre")
            weight.grad = None

    def after(stepped: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if stepped is optimizer:
            order.append("post")

    handles = (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after))
    optimizer.step()
    for handle in handles:
        handle.remove()
    expect(order == ["pre", "post"], f"fired as {order}")
    expect(
        weight.tolist() == [1.0, 1.0] and not optimizer.state,
        "a step without gradients still moved something",
    )
    return "fire around step; a step without gradients changes nothing"


def batched_norm() -> str:
    """One call gives the L2 norm of each tensor and carries NaN and Inf through."""
    tensors = [torch.full((4,), 2.0), torch.tensor([float("nan"), 1.0]), torch.tensor([float("inf"), 1.0])]
    from gradwatch.reading import foreach_functions

    norms = [float(norm) for norm in foreach_functions.norms(tensors)]
    expect(norms[0] == 4.0 and norms[1] != norms[1] and norms[2] == float("inf"), f"gave {norms}")
    return "exact on a known vector; NaN and Inf come through"


def version_counter() -> str:
    """A tensor's version changes when it is written in place: how a user's clipping is noticed."""
    grad = torch.ones(4)
    before = grad._version
    from gradwatch.reading import foreach_functions

    foreach_functions.multiply([grad], 0.5)
    expect(grad._version != before, "an in-place multiplication left it as it was")
    return "sees a clip of the gradients"


def anomaly_recording() -> str:
    """Anomaly mode records where in the forward each node was made, without checking for NaN itself."""
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        loss = (torch.ones(2, requires_grad=True) * 2).sum()
    metadata: Any = getattr(loss.grad_fn, "metadata", {})
    expect("traceback_" in metadata, "no traceback on the node")
    return "records the forward line of each operation"


PROBES: dict[str, Callable[[], str]] = {
    "post-accumulate hook": post_accumulate_hook,
    "tensor hook": tensor_hook,
    "end-of-backward callback": engine_callback,
    "optimizer step hooks": step_hooks,
    "batched norm": batched_norm,
    "version counter": version_counter,
    "anomaly recording": anomaly_recording,
}


def probe_all() -> dict[str, tuple[bool, str]]:
    """(works, what was seen) by tap; never raises."""
    results = {}
    for name, probe in PROBES.items():
        try:
            results[name] = (True, probe())
        except Exception as error:
            results[name] = (False, f"{type(error).__name__}: {error}")
    return results
