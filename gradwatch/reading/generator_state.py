"""States of torch's random generators, read and put back by one thread of gradwatch's at a time.

`Generator.get_state` makes a Python object while it holds the generator's mutex. That may start a garbage collection,
which frees tensors and so lets other threads run; one of them that asks for the state then waits for the mutex without
letting go of the interpreter, and both wait forever. A script whose threads never ask must not be made to hang. Where
they ask themselves, at the very moment of such a collection, they are as exposed to each other as without gradwatch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwatch.runtime.fork_safe_locks import ForkSafeLock

_reading = ForkSafeLock()


def get_state(generator: torch.Generator) -> Tensor:
    """The state of a generator, uint8 on the host."""
    with _reading.held:
        return generator.get_state()


def set_state(generator: torch.Generator, state: Tensor) -> None:
    """Put a generator into a state that `get_state` gave."""
    with _reading.held:
        generator.set_state(state)
