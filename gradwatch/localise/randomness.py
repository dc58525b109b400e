"""Random generators of a process: Python's, numpy's, torch's on the CPU and on every CUDA device in use."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

FIRST = 2
RECHECK = 64  # calls between looks at generators that no forward has drawn from


@dataclass(slots=True)
class Generators:
    """Their states at one moment; what is None was not looked at."""

    python: Any = None
    numpy: Any = None
    cpu: Tensor | None = None
    cuda: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def now(cls) -> Generators:
        """All of them."""
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), _cuda())

    def restore(self) -> None:
        """Put them back, as far as they were looked at."""
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            np.random.set_state(self.numpy)
        if self.cpu is not None:
            torch.set_rng_state(self.cpu)
        for index, state in self.cuda.items():
            torch.cuda.default_generators[index].set_state(state)


class Held:
    """Generators before each forward, without those that forwards have been seen not to draw from.

    Reading them all takes 70 us, and most forwards draw from none. `looking` is true in the first calls and in one
    of 64 ever after: then all are read, before and after.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._python = self._numpy = self._cpu = False
        self._before: Generators | None = None

    @property
    def looking(self) -> bool:
        """Whether the present call is one in which everything is looked at."""
        return self._before is not None

    def before(self) -> Generators:
        """The states at the beginning of a forward."""
        looking = self._calls % RECHECK < FIRST
        self._calls += 1
        if looking:
            self._before = Generators.now()
            return self._before
        return Generators(
            random.getstate() if self._python else None,
            np.random.get_state() if self._numpy else None,
            torch.get_rng_state() if self._cpu else None,
            _cuda(),
        )

    def after(self) -> None:
        """The forward has ended: learn what it drew from."""
        before, self._before = self._before, None
        if before is None or before.cpu is None:
            return
        self._python |= before.python != random.getstate()
        self._numpy |= _moved(before.numpy, np.random.get_state())
        self._cpu |= not torch.equal(before.cpu, torch.get_rng_state())


def _moved(before: Any, now: Any) -> bool:
    return before[2:] != now[2:] or not np.array_equal(before[1], now[1])


def _cuda() -> dict[int, Tensor]:
    """A generator's state is kept on the host: reading it waits for no device."""
    if not torch.cuda.is_initialized():
        return {}
    return {n: generator.get_state() for n, generator in enumerate(torch.cuda.default_generators)}
