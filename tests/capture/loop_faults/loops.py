"""Training loops that do what they should with their gradients, in many ways, and loops that do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

Step = Callable[[], object]
Loop = tuple[Sequence[nn.Module], Step]


def model(layers: int = 2) -> nn.Sequential:
    """Linear layers whose gradients do not fade with depth."""
    torch.manual_seed(0)
    made = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    for layer in made:
        nn.init.orthogonal_(layer.weight)
    return made


def loss(net: nn.Module) -> Tensor:
    """The loss of a batch drawn at random."""
    result: Tensor = (net(torch.randn(3, 4)) - 1).square().mean()
    return result


def _usual(
    clear: Callable[[nn.Module, torch.optim.Optimizer], object],
    after_backward: Callable[[nn.Module, torch.optim.Optimizer], object] = lambda net, optimizer: None,
    layers: int = 2,
    first: bool = True,
) -> Loop:
    """A loop that clears before its backward, or after its step."""
    net = model(layers)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9)

    def step() -> None:
        if first:
            clear(net, optimizer)
        loss(net).backward()
        after_backward(net, optimizer)
        optimizer.step()
        if not first:
            clear(net, optimizer)

    return [net], step


def _each(change: Callable[[Tensor], object]) -> Callable[[nn.Module, object], None]:
    def clear(net: nn.Module, _: object) -> None:
        for param in net.parameters():
            if param.grad is not None:
                change(param.grad)

    return clear


def _take_away(net: nn.Module, _: object) -> None:
    for param in net.parameters():
        param.grad = None


def _clip(net: nn.Module, _: object) -> None:
    clip_grad_norm_(net.parameters(), 1.0)


def accumulates(set_to_none: bool) -> Loop:
    """Three backwards a step, cleared after it."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)

    def step() -> None:
        for _ in range(3):
            (loss(net) / 3).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none)

    return [net], step


def closure(set_to_none: bool) -> Loop:
    """LBFGS, whose closure clears."""
    net = model()
    optimizer = torch.optim.LBFGS(net.parameters(), 1e-2, max_iter=3)

    def evaluate() -> Tensor:
        optimizer.zero_grad(set_to_none)
        found = loss(net)
        found.backward()
        return found

    return [net], lambda: optimizer.step(evaluate)


def pair(set_to_none: bool) -> Loop:
    """A GAN whose generator's loss goes through the discriminator, and leaves gradients there."""
    made, judge = model(), model()
    of_made, of_judge = (torch.optim.Adam(one.parameters(), 1e-4) for one in (made, judge))

    def step() -> None:
        of_judge.zero_grad(set_to_none)
        (judge(torch.randn(3, 4)) - judge(made(torch.randn(3, 4)).detach())).square().mean().backward()
        of_judge.step()
        of_made.zero_grad(set_to_none)
        judge(made(torch.randn(3, 4))).square().mean().backward()
        clip_grad_norm_([*made.parameters(), *judge.parameters()], 1.0)
        of_made.step()

    return [made, judge], step


def adversarial() -> Loop:
    """FGSM: a backward for the inputs, whose gradients of weights are cleared unused."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)

    def step() -> None:
        inputs = torch.randn(3, 4, requires_grad=True)
        net(inputs).square().mean().backward()
        assert inputs.grad is not None
        optimizer.zero_grad()
        net(inputs.detach() + 0.1 * inputs.grad.sign()).square().mean().backward()
        optimizer.step()

    return [net], step


def penalty() -> Loop:
    """A penalty on the gradient of the inputs."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)

    def step() -> None:
        inputs = torch.randn(3, 4, requires_grad=True)
        found = net(inputs).square().mean()
        [gradient] = torch.autograd.grad(found, inputs, create_graph=True)
        optimizer.zero_grad()
        (found + gradient.square().sum()).backward()
        optimizer.step()

    return [net], step


def sharpness_aware() -> Loop:
    """SAM: moved up by the gradients of one backward, stepped by those of another."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)

    def step() -> None:
        loss(net).backward()
        moved = []
        with torch.no_grad():
            for param in net.parameters():
                assert param.grad is not None
                moved.append(param.grad * 0.05)
                param.add_(moved[-1])
        optimizer.zero_grad()
        loss(net).backward()
        with torch.no_grad():
            for param, by in zip(net.parameters(), moved, strict=True):
                param.sub_(by)
        optimizer.step()
        optimizer.zero_grad()

    return [net], step


def taking_turns() -> Loop:
    """Two optimizers on the same parameters, one step each of the same gradients."""
    net = model()
    optimizers = torch.optim.SGD(net.parameters(), 1e-3), torch.optim.Adam(net.parameters(), 1e-4)

    def step() -> None:
        optimizers[0].zero_grad()
        loss(net).backward()
        for optimizer in optimizers:
            optimizer.step()

    return [net], step


def every_second_time() -> Loop:
    """Gradients are kept for two steps on purpose."""
    net, number = model(), count()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)

    def step() -> None:
        if next(number) % 2:
            optimizer.zero_grad()
        loss(net).backward()
        optimizer.step()

    return [net], step


def scaled(unscales: bool, fused: bool = False, factor: float = 1.0) -> Loop:
    """Half precision with a GradScaler and a clip at `factor`."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(loss(net)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        clip_grad_norm_(net.parameters(), factor)
        scaler.step(optimizer)
        scaler.update()

    return [net], step


def logged_after_step(bound: float) -> Loop:
    """`clip_grad_norm_` after the step with a bound that is none, for the norm that it returns."""

    def log_and_clear(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        clip_grad_norm_(net.parameters(), bound)
        optimizer.zero_grad()

    return _usual(log_and_clear, first=False)


def clipped_once_more() -> Loop:
    """Clipped where it should be, and once more after the step."""

    def clear(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        _clip(net, optimizer)
        optimizer.zero_grad()

    return _usual(clear, _clip, first=False)


def gives_up() -> Loop:
    """Every third batch is given up by clearing what it has left; the step is taken all the same."""
    number = count()
    return _usual(
        lambda net, optimizer: optimizer.zero_grad(),
        lambda net, optimizer: None if next(number) % 3 else optimizer.zero_grad(),
    )


def _zero_grad(set_to_none: bool) -> Callable[[nn.Module, torch.optim.Optimizer], None]:
    return lambda net, optimizer: optimizer.zero_grad(set_to_none)


def _nothing(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    pass


HEALTHY: Mapping[str, Callable[[], Loop]] = {
    "zero_grad": lambda: _usual(_zero_grad(True)),
    "zero_grad after the step": lambda: _usual(_zero_grad(True), first=False),
    "zero_grad in place": lambda: _usual(_zero_grad(False)),
    "zero_grad in place, many layers": lambda: _usual(_zero_grad(False), layers=20),
    "zero_": lambda: _usual(_each(lambda grad: grad.zero_())),
    "data.zero_": lambda: _usual(_each(lambda grad: grad.data.zero_())),
    "taken away": lambda: _usual(_take_away),
    "momentum by hand": lambda: _usual(_each(lambda grad: grad.mul_(0.9))),
    "accumulates": lambda: accumulates(True),
    "accumulates, cleared in place": lambda: accumulates(False),
    "closure": lambda: closure(True),
    "closure that clears in place": lambda: closure(False),
    "GAN": lambda: pair(True),
    "GAN that clears in place": lambda: pair(False),
    "FGSM": adversarial,
    "gradient penalty": penalty,
    "SAM": sharpness_aware,
    "two optimizers on the same parameters": taking_turns,
    "cleared every second time": every_second_time,
    "scaler": lambda: scaled(True),
    "fused scaler": lambda: scaled(True, fused=True),
    "clip of scaled, its bound scaled too": lambda: scaled(False, factor=2.0**14),
    "clip": lambda: _usual(_zero_grad(True), _clip),
    "clip by value": lambda: _usual(_zero_grad(True), lambda net, _: clip_grad_value_(net.parameters(), 0.1)),
    "norm logged": lambda: logged_after_step(float("inf")),
    "norm logged, by a clip at 1e9": lambda: logged_after_step(1e9),
    "clip twice": clipped_once_more,
    "batches given up": gives_up,
}
FAULTY: Mapping[str, tuple[str, Callable[[], Loop]]] = {
    "no zero_grad": ("no-zero-grad", lambda: _usual(_nothing)),
    "no zero_grad, many layers": ("no-zero-grad", lambda: _usual(_nothing, layers=20)),
    "clear after backward": ("discarded-before-step", lambda: _usual(_nothing, _zero_grad(True))),
    "clear after backward, many layers": (
        "discarded-before-step",
        lambda: _usual(_nothing, _zero_grad(True), layers=20),
    ),
    "clip of scaled": ("clip-of-scaled", lambda: scaled(False)),
    "clip of scaled, fused": ("clip-of-scaled", lambda: scaled(False, fused=True)),
    "clip before backward": (
        "clip-without-effect",
        lambda: _usual(lambda net, optimizer: (optimizer.zero_grad(), _clip(net, optimizer))),
    ),
    "clip of zeros": (
        "clip-without-effect",
        lambda: _usual(lambda net, optimizer: (optimizer.zero_grad(False), _clip(net, optimizer))),
    ),
    "clip by value after the step": (
        "clip-without-effect",
        lambda: _usual(
            lambda net, optimizer: (clip_grad_value_(net.parameters(), 1.0), optimizer.zero_grad(False)),
            first=False,
        ),
    ),
    "clip after the step": (
        "clip-without-effect",
        lambda: _usual(lambda net, optimizer: (_clip(net, optimizer), optimizer.zero_grad()), first=False),
    ),
}
"""Each with the rule of the default pack that finds it."""
