"""Many trainings recorded and many recordings judged, several at a time.

Recordings are kept in a folder: those that are there already are not made again.
"""

from __future__ import annotations

import functools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TypeVar

import torch

from gradwatch.rules.files import load_rules
from gradwatch.rules.rule_set import RuleSet
from tests.benchmarks.detection.faults import record_fault
from tests.benchmarks.detection.judging import Alarm, Judge, RuleFile
from tests.benchmarks.detection.live import UnfitError
from tests.benchmarks.detection.recording import Key, load, record, save
from tests.benchmarks.detection.rivals import RIVALS, Rival
from tests.benchmarks.detection.scores import Scores, healthy, live, plan, replayed

STEPS = 1000
"""Of a healthy training."""
UNFIT = ".unfit"
"""Instead of a recording: this training has no place for this fault."""
Task = TypeVar("Task")
Result = TypeVar("Result")


# -- recording ----------------------------------------------------------------------------------------------------


def make(folder: Path, key: Key) -> str:
    """Record one training; returns what went wrong, "" for nothing."""
    try:
        save(record_fault(key) if key.fault else record(key, STEPS), folder)
    except UnfitError as error:
        key.path(folder).with_suffix(UNFIT).write_text(f"{error}\n")
    except Exception as error:  # the others are recorded all the same
        return f"{key}: {type(error).__name__}: {error}"
    return ""


def make_all(keys: Iterable[Key], folder: Path, jobs: int) -> list[str]:
    """Record what is not recorded yet; returns what went wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [
        key
        for key in keys
        if not key.path(folder).exists() and not key.path(folder).with_suffix(UNFIT).exists()
    ]
    return [error for error in several(functools.partial(make, folder), missing, jobs, "recorded") if error]


def several(work: Callable[[Task], Result], tasks: Sequence[Task], jobs: int, done: str) -> Iterator[Result]:
    """The results as they are ready, and on stderr how far it is."""
    if jobs <= 1 or len(tasks) <= 1:
        yield from map(work, tasks)
        return
    started = time.monotonic()
    spawn = multiprocessing.get_context("spawn")  # a fork would inherit torch's thread pools half alive
    with ProcessPoolExecutor(min(jobs, len(tasks)), spawn, torch.set_num_threads, (1,)) as pool:
        try:
            for count, future in enumerate(as_completed([pool.submit(work, one) for one in tasks]), 1):
                left = (time.monotonic() - started) / count * (len(tasks) - count) / 60
                if count % 10 == 0 or count == len(tasks):
                    print(f"{done} {count}/{len(tasks)}, {left:.0f} min left", file=sys.stderr, flush=True)
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # what is recorded is kept, no more is begun
            raise


# -- judging ------------------------------------------------------------------------------------------------------


@functools.cache
def _rules(source: str) -> RuleSet:
    return load_rules(source)


def judge_of(name: str) -> Judge:
    """A rival by its name; any other name is a pack or the path of a rule file."""
    return Rival(RIVALS[name]) if name in RIVALS else RuleFile(_rules(name))


def judge_training(
    folder: Path, names: Sequence[str], replay: bool, training: tuple[str, int]
) -> dict[str, Scores]:
    """The scores of every judge on all recordings of one training and seed."""
    path = Key(*training).path(folder)
    whole = load(path) if path.exists() else None
    faults = [load(one) for one in _live(folder, training)]
    placed = plan(whole) if whole is not None and replay else []
    found = {}
    for name in names:
        made = functools.partial(judge_of, name)
        scores, usual = Scores(), list[Alarm]()
        if whole is not None:
            scores, usual = healthy(made, whole)
            scores.add(replayed(made, whole, placed, usual))
        for one in faults:
            scores.add(live(made, one, usual))
        found[name] = scores
    return found


def _live(folder: Path, training: tuple[str, int]) -> list[Path]:
    """The recordings of faults in a training."""
    return sorted(folder.glob(f"{training[0]}.{training[1]}.*.npz"))


def judge_all(
    trainings: Sequence[tuple[str, int]], folder: Path, names: Sequence[str], jobs: int, replay: bool = True
) -> Mapping[str, Scores]:
    """The scores of every judge on what is recorded of these trainings."""
    here = [one for one in trainings if Key(*one).path(folder).exists() or _live(folder, one)]
    total = {name: Scores() for name in names}
    work = functools.partial(judge_training, folder, names, replay)
    for found in several(work, here, jobs, "judged"):
        for name, scores in found.items():
            total[name].add(scores)
    return total
