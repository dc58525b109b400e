"""Many recordings, several at a time: those that are in the folder already are not made again."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from tests.benchmarks.detection.recording import Key, save
from tests.benchmarks.detection.recording import record as record_healthy

STEPS = 1000


def make(key: Key, folder: Path) -> str:
    """Record one training; returns what went wrong, "" for nothing."""
    try:
        save(record_healthy(key, STEPS), folder)
    except Exception as error:  # the others are recorded all the same
        return f"{type(error).__name__}: {error}"
    return ""


def make_all(keys: Sequence[Key], folder: Path, jobs: int) -> list[str]:
    """Record what is not recorded yet; returns what went wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [key for key in keys if not key.path(folder).exists()]
    failed: list[str] = []
    started = time.monotonic()
    spawn = multiprocessing.get_context("spawn")  # a fork would inherit torch's thread pools half alive
    with ProcessPoolExecutor(jobs, spawn, torch.set_num_threads, (1,)) as pool:
        running = {pool.submit(make, key, folder): key for key in missing}
        for done, future in enumerate(as_completed(running), 1):
            key, error = running[future], future.result()
            failed += [f"{key}: {error}"] if error else []
            left = (time.monotonic() - started) / done * (len(missing) - done) / 60
            print(f"recorded {done}/{len(missing)}, {left:.0f} min left  {key} {error}", file=sys.stderr, flush=True)
    return failed


