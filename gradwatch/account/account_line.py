"""An account in words: one short line, and a second one where something was not seen."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from textwrap import shorten

from gradwatch.account.account import NOT_ARMED, Account
from gradwatch.account.unwatched_reasons import gaps, recorded, unended
from gradwatch.runtime.printable import plural

PREFIX = "gradwatch: "
NO_TORCH = (
    f"{PREFIX}no training seen: this process imported no torch, and none that it started recorded a step "
    "(Pythons that a script starts with -I, -E or -S, and a `gradwatch run` of its own, are not seen here)"
)
"""The line of a launched process that did not train, and left it to others if anything was trained."""
MOST_NAMED = 4
"""Rules named in the line; the others are counted, and `gradwatch audit` names them all."""
LONGEST_REASON = 90
LEAST_SECONDS = 0.05


def lines(account: Account, folder: str = "") -> list[str]:
    """The account of a process that trained, a line or two; `folder` is how the run's folder is shown."""
    missed = gaps(account)
    line = PREFIX + " · ".join(_parts(account, folder))
    return [line, *([f"{PREFIX}not seen: {'; '.join(missed)}"] if missed else [])]


def fields(account: Account) -> Iterator[tuple[str, object]]:
    """The account as the fields of a log line; empty ones are left out."""
    taken, seen = account.taken, account.watched
    without_data = never_evaluated(account)
    share = seen.own_share
    steps, of = account.steps
    line: dict[str, object] = {
        "steps_watched": steps,
        "steps_taken": of,
        "rejected": account.rejected[1] or "",
        "optimizers": seen.optimizers,
        "optimizers_stepped": "" if taken.stepped == seen.optimizers else taken.stepped,
        "parameters": seen.parameters,
        "coverage": seen.coverage,
        "fired": _counted(account.fired),
        "done": _counted(account.actions),
        "rebaselined": _by_reason(account.rebaselined),
        "replaced_unfit": _by_reason(account.replaced_unfit),
        "unhealthy": _unfit(account),
        "no_data": _without_data(without_data, account.rules) if without_data else "",
        "not_armed": _unarmed(account),
        "cleared_unused": (not seen.cleared_suspicious and seen.cleared) or "",
        "own_cost": "" if share is None else f"{share:.1%}",
        "attached_in": f"{seen.attach_seconds:.1f} s" if seen.attach_seconds >= LEAST_SECONDS else "",
        "ended": "" if account.ended == "finished" else account.ended,
        "directory": account.directory,
        "not_seen": "; ".join(gaps(account)),
    }
    yield from ((key, value) for key, value in line.items() if value != "")


def nothing_seen(account: Account) -> str:
    """The line of a launched process that trained nothing as far as counted."""
    taken = account.taken
    counts = f"{taken.backwards:,} backwards, {taken.steps:,} steps"
    if taken.grad_calls:
        counts += f", {taken.grad_calls:,} calls of torch.autograd.grad, which fill no .grad"
    return f"{PREFIX}no training seen in this process ({counts})"


def never_evaluated(account: Account) -> dict[str, str]:
    """The reason why a rule judged nothing, by rule: it matches nothing, or what it reads never came."""
    unmatched = {rule: why for rule, why in account.inactive.items() if not why.startswith(NOT_ARMED)}
    return {**account.no_data, **unmatched}


def _without_data(without_data: Mapping[str, str], rules: int) -> str:
    """The number of rules and groups without data, sections of the rule file, and each reason once."""
    groups = [name for name in without_data if name.startswith("group:")]
    sections = [name for name in without_data if name.endswith(":")]
    off = len(without_data) - len(groups) - len(sections)
    counts = [f"{off} of {max(rules, off)} rules"] if off else []
    if groups:
        counts.append(f"{len(groups)} group{'s' * (len(groups) > 1)} of parameters")
    counts += [f"`{name}`" for name in sections]
    return f"{' and '.join(counts)} ({_reasons(without_data)})"


def not_armed(account: Account) -> dict[str, str]:
    """The reason why actions are off, by rule or `clip:` and a place of it."""
    return {
        rule: why.removeprefix(NOT_ARMED)
        for rule, why in account.inactive.items()
        if why.startswith(NOT_ARMED)
    }


def _unarmed(account: Account) -> str:
    off = not_armed(account)
    names = sorted(off)
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more} ({_reasons(off)})" if off else ""


def _parts(account: Account, folder: str) -> Iterator[str]:
    yield _steps(account)
    watched = bool(account.watched.steps or account.watched.rejected or account.watched.unowned)
    if watched:
        yield _what(account)
    if account.fired:
        yield f"fired: {_counted(account.fired)}"
    elif watched:
        alone = account.ranks > account.processes  # the loss of another rank may have been NaN
        of_ranks = f" on rank {account.rank} of {account.ranks}" if alone else ""
        yield ("no firing recorded" if account.unended else "no rule fired") + of_ranks
    if account.actions:
        yield f"done: {_counted(account.actions)}"
    if account.rebaselined:
        yield f"baselines begun anew: {_by_reason(account.rebaselined)}"
    if account.replaced_unfit:
        yield f"weights replaced that were not healthy: {_by_reason(account.replaced_unfit)}"
    if account.unfit:
        yield f"not healthy at the end: {_unfit(account)}"
    if watched:
        without_data = never_evaluated(account)
        if without_data:
            yield f"no data for {_without_data(without_data, account.rules)}"
        if not_armed(account):
            yield f"not armed: {_unarmed(account)}"
        if account.watched.own_share is not None:
            yield f"own cost {account.watched.own_share:.1%}"
        if account.watched.attach_seconds >= LEAST_SECONDS:
            yield f"attached in {account.watched.attach_seconds:.1f} s"
        if account.watched.cleared and not account.watched.cleared_suspicious:  # else told as a gap
            yield f"gradients cleared unused {account.watched.cleared:,} ×"
    if account.ended in ("stopped", "failed"):
        yield account.ended
    if folder:
        yield f"next: gradwatch {'explain --run' if account.fired else 'report'} {folder}"


def _unfit(account: Account) -> str:
    if not account.unfit:
        return ""
    # Rules that fire are named beside it.
    first = min(account.unfit, key=lambda reason: not reason.startswith("weights"))
    more = f" (and {plural(len(account.unfit) - 1, 'more reason')})" if len(account.unfit) > 1 else ""
    return f"{shorten(first, LONGEST_REASON, placeholder='…')}{more}"


def _steps(account: Account) -> str:
    if account.unended and not account.counted:
        return f"{recorded(account)} in {unended(account, 'that ')}"
    (steps, of), (rejected, of_rejected) = account.steps, account.rejected
    line = f"rank {account.rank}: " if account.rank else ""
    line += f"{steps:,} of {of:,} steps watched"
    if account.watched.waiting:
        line += f" ({account.watched.waiting:,} of them not judged yet)"
    if rejected or of_rejected:
        line += f" and {rejected:,} of {of_rejected:,} rejected by a GradScaler"
    if unowned := account.watched.unowned:
        line += f", {unowned:,} windows without an optimizer"
    if account.processes > 1:
        line += f" in {account.processes:,} processes"
    return line


def _what(account: Account) -> str:
    seen = account.watched
    return f"{_optimizers(account)}{seen.parameters:,} parameters, coverage {seen.coverage:.0%}"


def _optimizers(account: Account) -> str:
    """Watched ones, "of" those stepped where these are others; "" where there is none, or their number is not known."""
    seen, stepped = account.watched.optimizers, account.taken.stepped
    if not (seen or stepped):
        return ""
    of = f" of {stepped:,}" if stepped > seen else ""
    return f"{seen:,}{of} optimizer{'' if max(seen, stepped) == 1 else 's'}, "


def _counted(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    named = [f"{name} ×{count:,}" for name, count in ordered[:MOST_NAMED]]
    more = len(ordered) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def _by_reason(counts: Mapping[str, int]) -> str:
    shown = Counter[str]()
    for reason, count in counts.items():
        shown[shorten(reason, LONGEST_REASON)] += count
    return _counted(shown)


def _reasons(without_data: Mapping[str, str]) -> str:
    """Each reason once, without what it adds in brackets or after a semicolon, the most frequent first.

    Of warm-ups neither how many samples there were: rules differ in what they need.
    """
    counts: dict[str, int] = {}
    for reason in without_data.values():
        short = shorten(
            re.split(r"; | \(|(?<=^warm-up not over): ", reason, maxsplit=1)[0],
            LONGEST_REASON,
            placeholder=" …",
        )
        counts[short] = counts.get(short, 0) + 1
    ordered = sorted(counts, key=lambda reason: -counts[reason])
    return "; ".join(ordered[:MOST_NAMED]) + ("; …" if len(ordered) > MOST_NAMED else "")
