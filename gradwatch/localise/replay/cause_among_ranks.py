"""Several ranks and one cause: what all of them must agree on, and whose step it was.

A NaN of one rank is in the gradients of all ranks once they are reduced, so all ranks judge alike and localise alike,
each its own step. They exchange what they found, and all report the same cause, with its rank. Nothing here is a
collective of torch's: ranks meet in the store that `init_process_group` made, all of them or none, and wait for one
another for a bounded time (`gradwatch.distributed.process_group`).
"""

from __future__ import annotations

from collections.abc import Sequence

from gradwatch.distributed.process_group import AloneError, meet
from gradwatch.localise.held_calls.module_attributes import Refused
from gradwatch.localise.replay.rows_with_large_gradients import CARRIED, STANDS_OUT
from gradwatch.records.finding import GAINS, LOSS_SIDE, Finding

MADE = "made"  # beside the fields of a Finding
SURE = ("unknown", "after_backward", *LOSS_SIDE)
"""From the least sure; every other phase names an operation, a tensor or a module. Where ranks all-reduce manually
after the backward, a NaN of one comes to the others so."""
MET = "the ranks could not compare causes: {why}; this is the cause found on rank {rank} alone"


class RankAgreement:
    """The ranks at one boundary whose verdict they share; `name` is the same on all, and of no other boundary."""

    def __init__(self, name: str, rank: int) -> None:
        self._name = name
        self._rank = rank

    def agree(self, refusal: str, gradients: Sequence[Sequence[str]] = ()) -> bool:
        """Raise `Refused`, on all ranks, where one of them has a `refusal` ("" = it has none).

        True if all ranks have these `gradients` to gather: names of parameters, model by model.
        """
        hello = {"refusal": refusal, "gradients": [list(names) for names in gradients]}
        try:
            reports = meet(f"{self._name}/agreed", hello, {}).hellos
        except AloneError as error:
            raise Refused(f"the collective failed: {error}") from error
        for rank, report in enumerate(reports):
            if report["refusal"]:
                raise Refused(f"on rank {rank}: {report['refusal']}")
        return all(report["gradients"] == hello["gradients"] for report in reports)

    def share(self, finding: Finding, made: float | None = None) -> Finding:
        """The Finding of the rank that knows most, on all ranks; this rank's own where they do not meet.

        `made`: how much of a gradient that explodes this rank made, None where that is not known.
        """
        try:
            reports = meet(f"{self._name}/found", {**finding.to_dict(), MADE: made}, {}).hellos
        except AloneError as error:
            alone = finding.amended(samples=(), share=0.0) if finding.phase in GAINS else finding
            return alone.amended(rank=self._rank).noted(MET.format(why=error, rank=self._rank))
        found = [Finding.from_dict(report) for report in reports]
        return chosen(found, [report[MADE] for report in reports])


def chosen(findings: Sequence[Finding], made: Sequence[float | None] = ()) -> Finding:
    """The surest of what the ranks found, the lowest rank's where several are; it says what became of the others'.

    Of a gradient that explodes that of the rank which `made` most of it; the lowest where that is not known of all.
    """
    known = [one for one in made if one is not None]
    whole = sum(known) if len(known) == len(findings) else 0.0
    of = known if whole > 0 else [0.0] * len(findings)
    rank = max(range(len(findings)), key=lambda k: (_sureness(findings[k]), of[k], -k))
    best = findings[rank]
    if best.share:
        # What carries this rank's part may be little of the whole, to which every rank contributes.
        next_most = max((abs(one) for k, one in enumerate(of) if k != rank), default=0.0)
        share = best.share * of[rank] / whole if whole > 0 else 0.0
        sure = share >= CARRIED and of[rank] >= STANDS_OUT * next_most
        best = best.amended(**({"share": share} if sure else {"share": 0.0, "samples": ()}))
    alike = [k for k, one in enumerate(findings) if _sureness(one) == _sureness(best)]
    others = [k for k in range(len(findings)) if k not in alike]
    if not best.found:
        return best.amended(rank=rank, note=_each(findings))
    note = f"on {_ranks(alike)}" + (f", not on {_ranks(others)}" if others else "")
    return best.amended(rank=rank).noted(note)


def _each(findings: Sequence[Finding]) -> str:
    """The reason why the cause is not known; rank by rank where they say different things."""
    said: dict[str, list[int]] = {}
    for rank, finding in enumerate(findings):
        said.setdefault(finding.note, []).append(rank)
    if len(said) == 1:
        return findings[0].note
    return "; ".join(f"{_ranks(ranks)}: {note}" for note, ranks in said.items() if note)


def _sureness(finding: Finding) -> int:
    return SURE.index(finding.phase) if finding.phase in SURE else len(SURE)


def _ranks(numbers: Sequence[int]) -> str:
    """`rank 1`, `ranks 0, 2`."""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:16]))}"
