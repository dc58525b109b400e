"""States of torch's generators: right, and no thread waits forever for another one that reads them."""

from __future__ import annotations

import sys

import torch

from gradwatch.reading.generator_state import get_state, set_state
from tests.support import warm

THREADS = """
import gc, threading, torch
from gradwatch.reading.generator_state import get_state
gc.set_threshold(1)
def read():
    for _ in range(2000):
        held = [torch.ones(1)]
        held.append(held)  # freed by the collector alone
        del held
        get_state(torch.default_generator)
threads = [threading.Thread(target=read) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print("done")
"""


def test_a_state_is_put_back() -> None:
    """After it the same numbers are drawn again, by torch's generator and by one of the script's own."""
    for generator in (torch.default_generator, torch.Generator().manual_seed(3)):
        state = get_state(generator)
        drawn = torch.rand(3, generator=generator)
        set_state(generator, state)
        assert torch.equal(torch.rand(3, generator=generator), drawn)


def test_threads_that_read_during_collections_go_on() -> None:
    """torch's own `get_state` hangs here: a collection in it lets another thread in, which waits for its mutex."""
    done = warm.run([sys.executable, "-c", THREADS], timeout=200)
    assert done.stdout == "done\n", done.stderr
