"""The group of connections of one meeting: what becomes of it in a forked child."""

from __future__ import annotations

import os
import signal

import numpy as np
import torch.distributed as dist

from gradwatch.distributed.process_group import Group, Meeting


def test_a_forked_child_may_drop_the_connections_of_its_parent() -> None:
    """As where it closes a watch, or frees it: torch would join threads there that only the parent has, and abort."""
    group = Group(Meeting(0, 1, ({},), dist.HashStore()))
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)  # it may as well wait for ever
        group.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert group.total(np.ones(2)).tolist() == [1.0, 1.0]
