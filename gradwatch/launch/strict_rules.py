"""Messages on rules that `--strict-rules` refuses: printed by rank 0, and by another rank only if its own differs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gradwatch.distributed.process_group import default_store

WAIT_SECONDS = 2.0
"""How long a rank that is about to end waits for the words of rank 0; ranks of one training attach together."""
_KEY = "gradwatch/refused"


def words(text: str) -> str:
    """The text that this process prints of a refusal; "" if rank 0 prints the same."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return text
    try:
        store = default_store()
    except Exception:  # torch no longer shows it
        return text
    return words_of_rank(text, dist.get_rank(), store)


def words_of_rank(text: str, rank: int, store: Any) -> str:
    """As `words`, by this store of torch.distributed; without a collective, so that no rank can block another."""
    try:
        if rank == 0:
            store.set(_KEY, text)
            return text
        store.wait([_KEY], timedelta(seconds=WAIT_SECONDS))
        if store.get(_KEY).decode() == text:
            return ""
    except Exception:  # rank 0 has refused nothing, or is gone with its store
        return f"rank {rank}: {text}"
    return f"rank {rank}: {text}"
