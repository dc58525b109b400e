"""The numbers of an account, as plain data that goes through JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

Ending = Literal["", "finished", "stopped", "failed"]
"""How a process ended: "" while it runs; "stopped" by a rule or by Ctrl-C; "failed" by an exception."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Totals of the process; the fields of `gradwatch.taps.process_totals.ProcessTotals`."""

    backwards: int = 0
    grad_calls: int = 0
    steps: int = 0
    nested: int = 0
    clips: int = 0
    rejected: int = 0
    optimizers: int = 0
    stepped: int = 0
    raised: int = 0

    def since(self, before: Taken, elsewhere: int = 0) -> Taken:
        """Totals since `before`, without `elsewhere` steps that another watch has watched."""
        rest = {each.name: getattr(self, each.name) - getattr(before, each.name) for each in fields(self)}
        return Taken(**{**rest, "steps": max(0, rest["steps"] - elsewhere)})

    def until(self, after: Taken) -> Taken:
        """Difference between two readings of the totals of one process; never less than nothing."""
        return Taken(
            **{
                each.name: max(0, getattr(after, each.name) - getattr(self, each.name))
                for each in fields(self)
            }
        )

    def __add__(self, other: Taken) -> Taken:
        """Totals of two processes."""
        return Taken(
            **{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        )

    @property
    def trained(self) -> bool:
        """True if anything was done that training does: evaluation alone runs no backward and no step."""
        return bool(self.backwards or self.steps or self.rejected)


NOTHING_TAKEN = Taken()
NOT_ARMED = "not armed: "
"""Begins the reason in `Account.inactive` for a rule that judges, but whose actions are off; or for a clip."""
NUMBERS = (
    "rules",
    "rank",
    "ranks",
    "told_by",
    "processes",
    "lost",
    "running",
    "unknown",
    "recorded",
    "unrecorded",
)
COUNTS = (
    "steps",
    "backwards",
    "rejected",
    "rejected_inside",
    "unowned",
    "cleared",
    "cleared_nonfinite",
    "cleared_moved",
    "cleared_last",
    "replaced",
    "without_histogram",
    "provisional",
    "unjudged",
    "nonfinite_unjudged",
    "waiting",
)
DISTINCT = ("optimizers", "parameters")


@dataclass(frozen=True, slots=True)
class Watched:
    """Totals of what was watched.

    `steps` calls of an optimizer's step, `backwards` those that reached a watched parameter (parts of one count, too),
    `rejected` steps for which a GradScaler has not called the optimizer, `rejected_inside` those of the `steps` that a
    fused optimizer, which is called all the same, left out as its GradScaler asked; `unowned` windows of
    gradients that belong to no torch optimizer (observed only), `cleared` windows whose gradients were cleared before a
    step was seen, `cleared_nonfinite` those of them whose gradients held NaN or Inf, as far as these were read on the
    host, `cleared_moved` those before which weights were written to outside of steps that were seen, `cleared_last`
    those after the last step, `replaced` windows without an optimizer of which no step is known, since others unlike
    theirs took their place; `without_histogram`
    steps at which histograms of gradients were due and whose loss scale is no power of two; `provisional` and
    `unjudged` steps of those watched, `nonfinite_unjudged` those whose gradients held NaN or Inf with no rule that says
    so, `waiting` those that a process that runs on has yet to judge. `optimizers` of which a step, taken or rejected,
    was watched; `parameters` watched at one time, at most (those of an optimizer that is gone until another one takes
    its place); `optimizers_before` and `parameters_before` are those of them that another watch of the process had
    counted when this one took its place, by other rules. `coverage` 0..1 of the parameters that want a gradient.
    `own_seconds` of `seconds` were gradwatch's, from the second recorded step on; `attach_seconds` are what it took
    before: imports, hooks, the binding of rules.
    """

    steps: int = 0
    backwards: int = 0
    rejected: int = 0
    rejected_inside: int = 0
    unowned: int = 0
    cleared: int = 0
    cleared_nonfinite: int = 0
    cleared_moved: int = 0
    cleared_last: int = 0
    replaced: int = 0
    without_histogram: int = 0
    provisional: int = 0
    unjudged: int = 0
    nonfinite_unjudged: int = 0
    waiting: int = 0
    optimizers: int = 0
    parameters: int = 0
    optimizers_before: int = 0
    parameters_before: int = 0
    coverage: float = 1.0
    own_seconds: float = 0.0
    attach_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def cleared_suspicious(self) -> bool:
        """True if gradients were cleared unused that a GAN, or a sharpness-aware step, does not leave."""
        return bool(self.cleared_nonfinite or self.cleared_moved)

    @property
    def own_share(self) -> float | None:
        """gradwatch's share of the time between the first and the last step, 0..1; None before the second."""
        return self.own_seconds / self.seconds if self.seconds > 0 else None


@dataclass(frozen=True, slots=True)
class Account:
    """One process: `taken` beside `watched`.

    `fired` times by rule, `actions` times by name, `rebaselined` how often baselines began anew, by reason,
    `replaced_unfit` how often weights were not healthy when those of another optimizer replaced them, `unfit` why they
    are not at the end; `inactive` why a
    rule matched nothing, or what of its actions is off (`NOT_ARMED`), `no_data` why a rule was never evaluated, by
    rule; `never_judged` which parameters a rule has not judged at any step, since nothing of theirs had a value when
    their turn came; `rules` how many are enabled. `reasons` are what is known to have kept steps from being watched (a
    watch that failed, or that was closed). `directory` is the run's folder, "" where it has none, or no journal in it.

    `rank` is the one in torch's process group, if the process was `in_group`, else the one by its launcher's word;
    `ranks` is how many there are.
    `told_by` is the process whose printed account includes this one, 0 where it is its own. Where it includes others,
    `processes` is how many of all trained and gave an account; of those that gave none `lost` are gone, `running` run
    on, and `unknown` were on another machine. These are in `fired` and `actions` as far as they were recorded, and
    `recorded` counts the steps that their journals hold, at least, which are not in `watched`.

    `unrecorded` are steps that the watch before it has watched, by rules without a journal, when this one took its
    place: no journal has them. `before` and `after` are the totals of the process when the watch was attached and when
    it ended: several watches of one process overlap, so that their `taken` do not add up (`taken_by_one`).
    """

    taken: Taken = NOTHING_TAKEN
    watched: Watched = Watched()
    ended: Ending = ""
    fired: Mapping[str, int] = field(default_factory=dict)
    actions: Mapping[str, int] = field(default_factory=dict)
    inactive: Mapping[str, str] = field(default_factory=dict)
    no_data: Mapping[str, str] = field(default_factory=dict)
    never_judged: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rules: int = 0
    reasons: tuple[str, ...] = ()
    directory: str = ""
    rank: int = 0
    in_group: bool = False
    told_by: int = 0
    processes: int = 1
    lost: int = 0
    running: int = 0
    unknown: int = 0
    recorded: int = 0
    unrecorded: int = 0
    before: Taken = NOTHING_TAKEN
    after: Taken = NOTHING_TAKEN
    rebaselined: Mapping[str, int] = field(default_factory=dict)
    replaced_unfit: Mapping[str, int] = field(default_factory=dict)
    ranks: int = 1
    unfit: tuple[str, ...] = ()

    @property
    def has_judged(self) -> bool:
        """True if there are rules, and a step or window that they could judge."""
        seen = self.watched
        return self.rules > 0 and seen.steps + seen.unowned > seen.provisional + seen.unjudged

    @property
    def steps(self) -> tuple[int, int]:
        """Steps that were not rejected: those watched, and those taken as far as known."""
        inside = self.watched.rejected_inside
        return max(0, self.watched.steps - inside), max(0, self.taken.steps - inside)

    @property
    def rejected(self) -> tuple[int, int]:
        """Steps that a GradScaler rejected, whether it called the optimizer or not: those watched, and all known."""
        inside = self.watched.rejected_inside
        return self.watched.rejected + inside, self.taken.rejected + inside

    @property
    def trained_or_watched(self) -> bool:
        """True if there is anything to report: the process trained, or something was watched in it."""
        return self.counted or self.unended

    @property
    def counted(self) -> bool:
        """True if a process that trained, or was watched, wrote its account."""
        return self.taken.trained or bool(self.watched.steps or self.watched.rejected)

    @property
    def unended(self) -> bool:
        """True if there are processes that left no summary."""
        return bool(self.lost or self.running or self.unknown)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {**asdict(self), "reasons": list(self.reasons), "unfit": list(self.unfit)}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Account:
        """Read the output of `to_dict` of any version: unknown keys are ignored, absent ones are as at the start.

        Raises ValueError for anything else.
        """
        try:
            known = _of(cls, document)
            for name in ("taken", "before", "after"):
                known[name] = Taken(**_numbers(Taken, document.get(name, {})))
            known["watched"] = Watched(**_numbers(Watched, document.get("watched", {})))
            for name in ("fired", "actions", "rebaselined", "replaced_unfit"):
                known[name] = {str(key): int(count) for key, count in document.get(name, {}).items()}
            for name in ("inactive", "no_data"):
                known[name] = {str(key): str(reason) for key, reason in document.get(name, {}).items()}
            known["never_judged"] = {
                str(rule): tuple(map(str, names)) for rule, names in document.get("never_judged", {}).items()
            }
            known["reasons"] = tuple(map(str, document.get("reasons", ())))
            known["in_group"] = bool(document.get("in_group", False))
            for name in ("ended", "directory"):
                known[name] = str(document.get(name, ""))
            for name in NUMBERS:
                known[name] = int(document.get(name, name in ("processes", "ranks")))
            known["unfit"] = tuple(map(str, document.get("unfit", ())))
            return cls(**known)
        except (AttributeError, TypeError, OverflowError) as error:
            raise ValueError(f"not an account: {error}") from error


def merged(accounts: Iterable[Account], taken: Taken = NOTHING_TAKEN) -> Account:
    """Several watches of one process as one account; `taken` is what the process did.

    A rule counts as one that never had data where it had none in any watch that has judged a step by its rules.
    """
    found = list(accounts)
    if not found:
        return Account(taken=taken)
    last, having = found[-1], [one for one in found if one.has_judged] or found
    seen = [one.watched for one in found]
    totals = {name: sum(getattr(one, name) for one in seen) for name in COUNTS}
    totals |= {name: _distinct(seen, name) for name in DISTINCT}
    times = {
        name: sum(getattr(one, name) for one in seen) for name in ("own_seconds", "attach_seconds", "seconds")
    }
    return Account(
        taken=taken,
        watched=Watched(**totals, **times, coverage=min(one.coverage for one in seen)),
        ended=last.ended,
        fired=summed(one.fired for one in found),
        actions=summed(one.actions for one in found),
        rebaselined=summed(one.rebaselined for one in found),
        replaced_unfit=summed(one.replaced_unfit for one in found),
        inactive=_in_all([one.inactive for one in having]),
        no_data=_in_all([one.no_data for one in having]),
        never_judged=_names_of_all([one.never_judged for one in found]),
        rules=max(one.rules for one in found),
        reasons=tuple(dict.fromkeys(reason for one in found for reason in one.reasons)),
        directory=next((one.directory for one in reversed(found) if one.directory), ""),
        rank=min(one.rank for one in found),
        in_group=any(one.in_group for one in found),
        told_by=min(one.told_by for one in found),
        unrecorded=sum(one.unrecorded for one in found),
        ranks=max(one.ranks for one in found),
        unfit=tuple(dict.fromkeys(reason for one in found for reason in one.unfit)),
    )


def taken_by_one(accounts: Iterable[Account]) -> Taken:
    """Totals of one process, by the accounts of its watches, which may overlap.

    Added up where an earlier version wrote them, without the totals of the process.
    """
    found = list(accounts)
    if len(found) < 2 or any(one.after == NOTHING_TAKEN for one in found):
        return total(one.taken for one in found)
    first = {each.name: min(getattr(one.before, each.name) for one in found) for each in fields(Taken)}
    last = {each.name: max(getattr(one.after, each.name) for one in found) for each in fields(Taken)}
    return Taken(**first).until(Taken(**last))


def total(taken: Iterable[Taken]) -> Taken:
    """Totals of several processes."""
    return sum(taken, NOTHING_TAKEN)


def _distinct(seen: Sequence[Watched], name: str) -> int:
    """Number that these have counted, each once: one that took another's place had counted some of them before."""
    counted: list[int] = [getattr(one, name) for one in seen]
    before: list[int] = [getattr(one, f"{name}_before") for one in seen]
    return max(sum(counted) - sum(before), *counted)


def _of(kind: type, document: Mapping[str, Any]) -> dict[str, Any]:
    return {each.name: document[each.name] for each in fields(kind) if each.name in document}


def _numbers(kind: type, document: Mapping[str, Any]) -> dict[str, Any]:
    floats = {each.name for each in fields(kind) if each.type == "float"}
    found = _of(kind, document)
    return {name: float(value) if name in floats else int(value) for name, value in found.items()}


def summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Counts summed by name."""
    total: dict[str, int] = {}
    for one in counts:
        for key, count in one.items():
            total[key] = total.get(key, 0) + count
    return total


def _names_of_all(found: list[Mapping[str, tuple[str, ...]]]) -> dict[str, tuple[str, ...]]:
    """By rule, the names that any of these has, each once."""
    rules = dict.fromkeys(rule for one in found for rule in one)
    return {rule: tuple(dict.fromkeys(name for one in found for name in one.get(rule, ()))) for rule in rules}


def _in_all(reasons: list[Mapping[str, str]]) -> dict[str, str]:
    shared = set.intersection(*(set(one) for one in reasons))
    return {key: reason for key, reason in reasons[-1].items() if key in shared}
