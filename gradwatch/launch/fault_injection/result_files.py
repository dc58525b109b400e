"""The plan of a selftest as this process was given it, and the file of its results."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from gradwatch.launch.selftest_faults import RESULTS, VARIABLE, Document, Plan
from gradwatch.runtime.atomic_files import write_whole


def plan_of_process() -> Plan:
    """The plan in the environment of this process."""
    return Plan(**json.loads(os.environ[VARIABLE]))


def result_file(plan: Plan, rank: int) -> Path:
    """The file of the results of the process of this rank."""
    return Path(plan.directory) / RESULTS.format(rank)


def write_document(plan: Plan, rank: int, document: Document) -> None:
    """Write the whole file anew."""
    write_whole(result_file(plan, rank), json.dumps(asdict(document)).encode(), 0o600)
