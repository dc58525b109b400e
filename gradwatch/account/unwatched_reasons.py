"""Differences between what a process did and what was watched: one sentence each, with the reason if known."""

from __future__ import annotations

from collections.abc import Iterator

from gradwatch.account.account import Account
from gradwatch.runtime.printable import plural

MADE_ANEW = "tensors that are made anew for every backward cannot be distinguished from inputs"
MOST_NAMES = 4
REPLACED = "parameters of another shape, dtype or class had taken the place of theirs before weights were seen to move"


def gaps(account: Account) -> tuple[str, ...]:
    """Sentences on what was not seen or not judged; empty where every step of the process was watched."""
    return tuple(_gaps(account))


def _gaps(account: Account) -> Iterator[str]:
    yield from _steps(account)
    yield from _without_steps(account)
    seen = account.watched
    if seen.coverage < 1:
        yield f"{1 - seen.coverage:.0%} of the parameters were not measured at the last step"
    if account.unended and account.counted:  # else the line itself is about them
        yield f"{unended(account)}, {recorded(account)}"
    if seen.without_histogram and "histograms:gradients" not in account.no_data:
        steps = plural(seen.without_histogram, "step")
        yield f"{steps} gave no histogram of gradients: the loss scale is no power of two"
    yield from _never_judged(account)
    if seen.provisional and account.has_judged:
        steps = plural(seen.provisional, "step")
        yield (
            f"{steps} judged for NaN and Inf alone (provisional: no backward came before, its end was not seen, other "
            "parameters were trained from this step on, or gradients were changed before their norms were read)"
        )
    if seen.nonfinite_unjudged:
        steps = plural(seen.nonfinite_unjudged, "step")
        yield f"{steps} with NaN or Inf in the gradients, which no rule of the file judges: the weights may be ruined"
    if seen.unjudged:
        yield f"{plural(seen.unjudged, 'watched step')} could not be judged ({_why_unjudged(account)})"


def _never_judged(account: Account) -> Iterator[str]:
    """Parameters that rules have left out, those of several rules once."""
    rules: dict[tuple[str, ...], list[str]] = {}
    for rule, names in account.never_judged.items():
        if rule not in account.no_data:  # else its reason is in the line before
            rules.setdefault(names, []).append(rule)
    for names, by in rules.items():
        more = f" and {len(names) - MOST_NAMES:,} more" if len(names) > MOST_NAMES else ""
        shown = f"{', '.join(names[:MOST_NAMES])}{more}"
        yield f"{shown} never judged by {', '.join(by)}: no value (no gradient, most often) at any step that was due"


def _steps(account: Account) -> Iterator[str]:
    """Optimizer steps that torch's hooks saw and no watch did."""
    taken, seen = account.taken, account.watched
    missed = taken.steps - seen.steps
    rejected, of_rejected = account.rejected
    unrecorded = min(max(0, missed), account.unrecorded)
    if unrecorded:
        steps = plural(taken.steps, "optimizer step")
        yield f"{unrecorded:,} of {steps} are in no journal: watched by rules that had none among their sinks"
        missed -= unrecorded
    if missed > 0:
        why = "; ".join((*account.reasons, *_raised(account))) or _guess(account)
        yield f"{missed:,} of {plural(account.steps[1], 'optimizer step')} not watched: {why}"
    elif seen.steps > taken.steps + taken.nested:
        yield f"{plural(seen.steps, 'step')} watched, but only {taken.steps:,} counted in this process"
    elif taken.raised > (account.ended in ("stopped", "failed")):  # perhaps by what ended the training
        steps = plural(taken.raised, "watched step")
        yield f"whether the weights moved in {steps} that an exception, or os._exit, ended"
    if of_rejected > rejected and not unrecorded:  # else they may be among those
        yield f"{of_rejected - rejected:,} of {plural(of_rejected, 'step')} rejected by a GradScaler not watched"


def _why_unjudged(account: Account) -> str:
    """The errors that may have ended the judging of a step: in gradwatch, or, where steps raised, in the script."""
    own = "internal errors, see the journal"
    if not account.taken.raised:
        return own
    return f"{plural(account.taken.raised, 'step')} ended by an exception of the script's; or {own}"


def _raised(account: Account) -> Iterator[str]:
    """Steps that an exception ended, as one in a closure does before there is anything to read."""
    if account.taken.raised:
        yield f"{plural(account.taken.raised, 'step')} ended by an exception, or os._exit"
    if 0 < account.taken.raised < account.taken.steps - account.watched.steps and not account.reasons:
        yield _guess(account)


def _guess(account: Account) -> str:
    if not account.watched.steps:
        return "gradwatch was attached to no model"
    return (
        "taken before gradwatch was attached, after it was closed, or by an optimizer that it did not watch"
    )


def _without_steps(account: Account) -> Iterator[str]:
    """Gradients that no step of a torch optimizer, as far as hooks see one, has used."""
    taken, seen = account.taken, account.watched
    no_step = not (taken.steps or taken.rejected)
    if no_step and taken.backwards:
        observed = (
            f"; {plural(seen.unowned, 'window')} of gradients observed, never acted on"
            if seen.unowned
            else ""
        )
        backwards = plural(taken.backwards, "backward")
        yield f"{backwards} and no step of a torch optimizer seen: {_hidden(account)}{observed}"
    elif no_step and taken.grad_calls:
        yield (
            f"gradients came from {plural(taken.grad_calls, 'call')} of torch.autograd.grad or torch.func, "
            "which fill no .grad: there was nothing to watch"
        )
    elif seen.unowned:
        yield f"{plural(seen.unowned, 'window')} of gradients belong to no torch optimizer: observed, never acted on"
    if seen.replaced:
        yield f"{plural(seen.replaced, 'window')} of gradients without an optimizer not watched: {REPLACED}"
    lost = taken.backwards - seen.backwards
    # Backwards of steps that were not watched are in another gap; without any watched one there is nothing to compare.
    if seen.backwards and not account.unrecorded and lost > max(0, taken.steps - seen.steps):
        backwards = plural(taken.backwards, "backward")
        yield f"{lost:,} of {backwards} reached no parameter that is watched, or did not get that far"
    # As such they are no fault: those that a GAN's generator leaves at the discriminator, SAM's first ones.
    if seen.cleared_suspicious:
        kinds = {"NaN or Inf": seen.cleared_nonfinite, "beside weights that moved unseen": seen.cleared_moved}
        of_them = ", ".join(f"{count:,} of them {kind}" for kind, count in kinds.items() if count)
        yield (
            f"gradients were cleared {plural(seen.cleared, 'time')} ({of_them}) and computed anew, with no optimizer "
            "step seen since they were made"
        )


def _hidden(account: Account) -> str:
    if account.reasons and not account.watched.backwards:
        return "; ".join(account.reasons)
    if account.taken.optimizers:
        return "the optimizers were created and never stepped, or stepped without running torch's step hooks"
    made_anew = "" if account.watched.backwards else f" ({MADE_ANEW})"
    return f"if weights changed, the script itself updated them{made_anew}"


def unended(account: Account, that: str = "") -> str:
    """The processes that left no summary, by what became of them."""
    kinds = (
        (account.lost, f"{that}left no summary (killed, or ended by os._exit)"),
        (account.running, "still running"),
        (account.unknown, f"on another machine {that}left no summary (killed, or still running)"),
    )
    return ", ".join(
        f"{count:,} process{'' if count == 1 else 'es'} {what}" for count, what in kinds if count
    )


def recorded(account: Account) -> str:
    """The number of steps in the journals of these processes."""
    return f"at least {plural(account.recorded, 'step')} recorded" if account.recorded else "no step recorded"
