"""A process group of one rank in the process of the tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

# torch hangs now and then, watched or not, where a DistributedDataParallel outlives `destroy_process_group`: its
# reducer then takes the group apart while it holds the interpreter, and a thread of gloo's that has just reduced
# gradients waits for the interpreter to let go of the backward's context. A group that stays is taken apart by nobody.
_groups: list[dist.ProcessGroup | None] = []


@contextmanager
def one_rank() -> Iterator[None]:
    """torch's default group, of this process alone, until the context ends."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1)
        _groups.append(dist.group.WORLD)
        try:
            yield
        finally:
            dist.destroy_process_group()
