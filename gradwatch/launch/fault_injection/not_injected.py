"""Processes that train and in which no fault can be injected: the reason, for the one who asked for the selftest."""

from __future__ import annotations

import atexit
import os

from gradwatch.launch import exit_summary
from gradwatch.launch.fault_injection.result_files import plan_of_process, result_file, write_document
from gradwatch.launch.selftest_faults import Document
from gradwatch.runtime.process_identity import group_rank


def arm() -> None:
    """Have this process report at its end why it injected nothing, if it has trained."""
    atexit.register(_at_exit, os.getpid())


def not_injected(why: str) -> None:
    """Report the reason, unless results of faults, or a reason, were reported before."""
    plan, rank = plan_of_process(), group_rank() or 0
    if not result_file(plan, rank).exists():
        write_document(plan, rank, Document(why=why))


def _at_exit(pid: int) -> None:
    account = exit_summary.account_of_process()
    if os.getpid() == pid and account.taken.trained:  # not of launchers, DataLoader workers, compile workers
        not_injected("; ".join(account.reasons) or "its training was not watched")
