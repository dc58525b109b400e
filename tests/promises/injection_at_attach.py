"""`python -m tests.promises.injection_at_attach EVERY KIND …`: as `test_injection`, where `gradwatch run` attaches.

In one process, as the launcher arms it: a training of two steps for each line of gradwatch that making its optimizer
and those steps execute, the start of the session included (rules read, journal opened, endpoint served); it is closed
after each. Prints for each kind the number of lines, then one that went wrong a line.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from gradwatch.launch import auto_watch
from tests.promises.test_injection import KINDS, Injected, left_behind


def job(injected: Injected) -> tuple[BaseException | None, list[torch.Tensor]]:
    """What reached the script, and its weights; it goes on where it was interrupted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    reached: list[BaseException] = []

    def part(run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            reached.append(error)

    made: list[torch.optim.Optimizer] = []

    def step() -> None:
        made[0].zero_grad()
        model(torch.ones(2, 3)).square().mean().backward()
        made[0].step()

    def make() -> None:
        made.append(torch.optim.AdamW(model.parameters(), 1e-2))

    sys.settrace(injected)
    try:
        part(make)
        for run in ([] if made else [make]) + [step, step]:
            part(run)
    finally:
        sys.settrace(None)
    return (reached[0] if reached else None), [param.detach().clone() for param in model.parameters()]


def run(injected: Injected) -> tuple[BaseException | None, list[torch.Tensor]]:
    """A job, and the end of the session that it has begun; nothing that is said is shown."""
    with contextlib.redirect_stderr(io.StringIO()):
        done = job(injected)
        auto_watch.close_all(os.getpid())
        for agent in auto_watch._agents:
            agent._baselines = None
    return done


def _threads_left() -> list[str]:
    """The names of gradwatch's threads that go on after the session was closed, each told once."""
    ours = [one for one in threading.enumerate() if one.name.startswith("gradwatch") and one not in _told]
    for one in ours:
        one.join(0.5)
    left = [one for one in ours if one.is_alive()]
    _told.update(left)
    return [one.name for one in left]


_told: set[threading.Thread] = set()


def wrong(kind: type[BaseException], every: int) -> Iterator[str]:
    """The number of lines, then those at which it went wrong, of every so-many-th."""
    run(Injected(-1, kind))  # what is imported and learned once
    counts, bare = [], []
    for _ in range(3):  # some lines are of what is due by the clock, so that not every run has equally many
        seen = Injected(-1, kind)
        bare = run(seen)[1]
        counts.append(len(seen.lines))
    yield str(max(counts))
    last = max(counts) if every == 1 else min(counts)
    chosen, missed = range(KINDS.index(kind) % every, last, every), 0
    for at in chosen:
        injected = Injected(at, kind)
        reached, weights = run(injected)
        file, line = list(injected.lines)[-1]
        place = f"{Path(file).name}:{line} {injected.where}"
        yield from (f"{place}: {one} left" for one in left_behind())
        yield from (f"{place}: a thread of {one} left" for one in _threads_left())
        missed += not injected.where
        if not injected.where or injected.where == "try:":
            continue
        if kind is not RuntimeError:
            if not isinstance(reached, kind):
                yield f"{place}: kept {kind.__name__}"
        elif reached is not None:
            yield f"{place}: {reached!r}"
        elif not all(map(torch.equal, weights, bare)):
            yield f"{place}: other weights"
    if missed > len(chosen) / 10:  # a few lines are of what is due by the clock
        yield f"{missed} of {len(chosen)} lines were not executed again: something attached no more"


if __name__ == "__main__":
    torch.set_num_threads(1)
    auto_watch.arm()
    named = {kind.__name__: kind for kind in KINDS}
    for name in sys.argv[2:]:
        for line in wrong(named[name], int(sys.argv[1])):
            print(line, flush=True)
