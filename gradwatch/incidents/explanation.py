"""A Finding in words: one sentence, the fields of a log line, and the page that `gradwatch explain` prints."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradwatch.incidents.suggestions import suggestion_for
from gradwatch.records.finding import AS_USUAL, GAINS, LOSS_SIDE, Finding

BEGAN = {
    "forward": "the forward of {op}",
    "backward": "the backward of {op}",
    "irreproducible": "irreproducible: run again, {name} is another than in training",
    "after_backward": "code between the backward and the step: gradients were finite when the backward had ended",
    "input": "the batch, not finite when {op} read it",
    "tensor": "the tensor {name}, not finite when {op} read it",
    "parameter": "a weight, not finite when {op} read it",
    "buffer": "a buffer, not finite when {op} read it",
    "activations": "activations off their usual level, which enter {module}",
    "loss": "the loss side: finite outputs, non-finite gradients",
    "outputs": "the loss side: non-finite gradients of outputs that a number given to {op} made infinite",
    "number": "a number that is not finite as {dtype}, given to {op}",
    "exploding": "gradients that explode",
    "vanishing": "gradients that vanish",
    "unknown": "not known",
}
INFINITE_OUTPUTS = "the loss side: infinite outputs, non-finite gradients"
AT_OUTPUTS = {
    "exploding": "gradients are too large already where they reach the model's last layer",
    "vanishing": "gradients are too small already where they reach the model's last layer",
}
WAYS = {
    "replay": "the step was run again",
    "model": "the model's call was run again",
    "record": "steps were recorded as they ran",
    "closure": "the closure was run again",
    "norms": "the norms of this step were compared with their usual levels",
    "after_backward": "the norms at the end of the backward were compared with those at the step",
}


def sentence(finding: Finding) -> str:
    """`the backward of sqrt in encoder.norm at train.py:11`."""
    op = finding.op or "an operation"
    if finding.function and finding.function != finding.op:
        op += f" (in {finding.function})"
    said = BEGAN[finding.phase].format(
        op=op,
        name=finding.operands[0].name if finding.operands else "",
        module=finding.module,
        dtype="its dtype" if finding.result is None else finding.result.dtype,
    )
    if finding.at_outputs:
        said = _at_outputs(finding)
    elif finding.op and finding.phase in GAINS:
        said += f" in the backward of {op}"
    if finding.phase == "outputs" and not finding.op:
        said = INFINITE_OUTPUTS
    if finding.phase in LOSS_SIDE and not finding.op and finding.where:
        said += ", of the model called"  # there; what is at fault stands after it
    if finding.module and finding.phase not in ("activations", "irreproducible"):
        said += f" in {finding.module}"
    if finding.begins:
        said += f", from {finding.begins} on towards the inputs"
    if finding.lr_jumped_at is not None and finding.found:
        said += f", after the learning rate had jumped at step {finding.lr_jumped_at}"
    return f"{said} at {finding.where}" if finding.where else said


def _at_outputs(finding: Finding) -> str:
    """`a backward of the loss side (the loss is at its usual level): gradients are too large already where …`."""
    by_calls = finding.by == "replay"  # else only norms of parameters are known
    said, moved = AT_OUTPUTS[finding.phase], finding.loss_moved
    if moved is not None and 1 / AS_USUAL <= moved <= AS_USUAL:
        side = "the loss side" if by_calls else "the loss, or of what follows the last layer"
        return f"a backward of {side} (the loss is at its usual level): {said}"
    side = "the loss side" if by_calls else "the loss, or what follows the last layer"
    level = f" (the loss is at ×{moved:.3g} of its usual level)" if moved is not None else ""
    return f"{side}{level}: {said}"


def fields(finding: Finding) -> Iterator[tuple[str, object]]:
    """Fields of a log line on a Finding; empty fields are left out."""
    suggestion = suggestion_for(finding)
    frame = finding.frame
    said: dict[str, object] = {
        "rule": finding.rule,
        "step": finding.step,
        "cause": sentence(finding),
        "where": finding.where,
        "source": "" if frame is None else frame.source,
        "first_parameter": finding.first_parameter,
        "why": "" if suggestion is None else suggestion.why,
        "fix": "" if suggestion is None else suggestion.fix,
        "samples": finding.carriers,
        "device": finding.device,
        "host": finding.host,
        "deterministic": "yes" if finding.deterministic else "",
        "note": finding.note,
        "incident": finding.incident,
    }
    yield from ((key, value) for key, value in said.items() if value != "")


def page(finding: Finding) -> Iterator[str]:
    """The whole of it in Markdown, line by line."""
    suggestion = suggestion_for(finding)
    yield f"## {finding.incident or 'incident'}: {sentence(finding)}"
    yield ""
    yield from _where(finding)
    yield from _evidence(finding)
    yield from _profile(finding)
    if suggestion is not None:
        yield "### Likely fix"
        yield ""
        yield suggestion.why
        yield ""
        yield f"    {suggestion.fix}"
        yield ""
    said = [f"step {finding.step}, rank {finding.rank}", WAYS[_way(finding)]]
    said += [f"rule `{finding.rule}`"] if finding.rule else []
    said += (
        [f"first parameter in backward order: `{finding.first_parameter}`"] if finding.first_parameter else []
    )
    said += [f"forward call {finding.call} of the step"] if finding.call else []
    said += [f"batch {finding.batch}"] if finding.batch is not None else []
    said += [_carried(finding)] if finding.share or finding.carriers else []
    said += (
        ["run again, the model's outputs were the same, bit for bit (deterministic)"]
        if finding.deterministic
        else []
    )
    said += [f"computed on {finding.device} of host {finding.host}"] if finding.device else []
    said += [f"{finding.others} further operations did the same"] if finding.others else []
    said += [finding.note] if finding.note else []
    yield from (f"- {one}" for one in said)


def _carried(finding: Finding) -> str:
    if not finding.share:
        return f"not finite in {finding.carriers} alone"
    return f"carried by {finding.carriers or f'its batch, {min(finding.share, 1):.1%} of the gradient'}"


def _way(finding: Finding) -> str:
    """The key of `WAYS`: for an operation outside the model, the loop's own code was run again as well."""
    if finding.phase == "after_backward":
        return finding.phase
    of_model = finding.module or finding.module_type or not finding.op
    return "model" if finding.by == "replay" and of_model else finding.by


def _profile(finding: Finding) -> Iterator[str]:
    if finding.profile:
        yield "### The gradient by depth"
        yield ""
        by_calls = finding.by != "norms"  # else no hook was called: there are the parameters' norms alone
        passing = ("", "at its output", "at its input", "gain") if by_calls else ()
        yield _row("module", *passing, "its bias ÷ usual", "its weights ÷ usual")
        yield _row(*(["---"] * (3 + len(passing))))
        for layer in finding.profile:
            numbers = [layer.at_output, layer.at_input, layer.gain] if by_calls else []
            shown = [
                "–" if math.isnan(one) else f"{one:.3g}"
                for one in (*numbers, layer.moved, layer.weights_moved)
            ]
            yield _row(layer.module, *([layer.kind] if by_calls else []), *shown)
        yield ""


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _where(finding: Finding) -> Iterator[str]:
    for frame in finding.frames:
        yield f"    {frame.where} in {frame.function}" + (" (library)" if frame.is_library else "")
        if frame.source:
            yield f"        {frame.source}"
    if finding.frames:
        yield ""


def _evidence(finding: Finding) -> Iterator[str]:
    shown = [*finding.operands, *([finding.result] if finding.result else [])]
    if shown:
        yield "### Evidence"
        yield ""
        if finding.module:
            yield f"- module `{finding.module}` ({finding.module_type})"
        if finding.node:
            yield f"- autograd node `{finding.node}`"
        # A tensor that was read may be the one that was found.
        yield from dict.fromkeys(f"- {operand}" for operand in shown)
        yield ""
