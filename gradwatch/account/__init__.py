"""The account of a process: what it did, what of that was watched, and why the two differ where they do.

Pure data and text: `gradwatch.taps.process_totals` counts what was done, a Watch what it saw; the log, the journal, the
metrics and the line at the end of `gradwatch run` are all made from one `Account`.
"""

from gradwatch.account.account import NOT_ARMED, NOTHING_TAKEN, Account, Ending, Taken, Watched, merged, total
from gradwatch.account.account_line import lines
from gradwatch.account.unwatched_reasons import gaps

__all__ = [
    "NOTHING_TAKEN",
    "NOT_ARMED",
    "Account",
    "Ending",
    "Taken",
    "Watched",
    "gaps",
    "lines",
    "merged",
    "total",
]
