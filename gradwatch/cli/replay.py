"""`gradwatch replay BUNDLE --script MODULE:FUNCTION`: the step of an incident again, and its cause."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwatch.cli.explain import shown
from gradwatch.cli.user_function import from_here, load
from gradwatch.errors import GradwatchError

if TYPE_CHECKING:
    from torch import nn

    from gradwatch.incidents.bundle.incident_json import Document
    from gradwatch.localise.replay.bundle_replay import LossFn
    from gradwatch.records.finding import Finding

DESCRIPTION = """The step of an incident run again, from the bundle that the action `snapshot` kept.

BUNDLE is a folder of RUN/bundles. Without --script nothing runs: its page is printed. FUNCTION takes nothing and
returns the model (or a list of them, or `model, loss_fn`; loss_fn(output) is the loss, for a step whose gradient at
the outputs was not kept or not finite). Nothing is ever run that the bundle names, and nothing is written.
Exit 1 where no cause is known, 2 where the bundle cannot be read or not be run again."""

MAX_BYTES = 1 << 30
"""Of tensors in module attributes that are copied and restored."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe `gradwatch replay` to argparse."""
    parser = commands.add_parser(
        "replay",
        help="run the step of an incident again, from its bundle",
        description=DESCRIPTION,
    )
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="folder of a bundle")
    parser.add_argument("--script", metavar="MODULE:FUNCTION", help="builds the model; your code, run here")
    parser.add_argument(
        "--checkpoint",
        metavar="FILE",
        type=Path,
        help="weights, as safetensors (default: those of the bundle)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Run the step again and print the page of its cause; 1 where none is known.

    Raises GradwatchError for wrong options.
    """
    from gradwatch.incidents.bundle.bundle_reader import read_document

    if arguments.checkpoint is not None and not arguments.script:
        raise GradwatchError("--checkpoint needs --script MODULE:FUNCTION, which builds the model it is for")
    document = read_document(arguments.bundle)
    before = document.incident.finding
    found = again(document, arguments) if arguments.script else before
    if arguments.json:
        print(json.dumps(described(document, found, arguments), indent=2, allow_nan=False))
    else:
        print(text(document, found, arguments))
    return int(found is None or not found.found)


def again(document: Document, arguments: argparse.Namespace) -> Finding:
    """Run the step on the model that the user's function builds. What it prints does not mix with a document."""
    from gradwatch.incidents.bundle.bundle_reader import load_tensors, read_tensors
    from gradwatch.localise.replay.bundle_replay import Rerun

    stored = read_tensors(arguments.bundle)
    weights = None if arguments.checkpoint is None else load_tensors(arguments.checkpoint)
    quiet = contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext()
    with from_here(), quiet:
        models, loss_fn = built(load("--script", arguments.script), arguments.script)
        rerun = Rerun(document, stored, models, loss_fn)
        rerun.load(weights)
        if sys.stderr.isatty():
            print("running the step again …", file=sys.stderr, flush=True)
        return rerun.run(MAX_BYTES)


def built(function: Callable[..., Any], reference: str) -> tuple[list[nn.Module], LossFn | None]:
    """Call the user's function: the models, and the loss function if there is one.

    Raises GradwatchError if it returns anything else.
    """
    from torch import nn

    found = function()
    loss_fn = None
    if isinstance(found, tuple) and len(found) == 2 and not isinstance(found[1], nn.Module):
        found, loss_fn = found
    models = [found] if isinstance(found, nn.Module) else found
    if not isinstance(models, (list, tuple)) or not all(isinstance(model, nn.Module) for model in models):
        raise GradwatchError(
            f"--script {reference}: returned {type(found).__name__}; return the model, or `model, loss_fn`"
        )
    if loss_fn is not None and not callable(loss_fn):
        raise GradwatchError(
            f"--script {reference}: loss_fn is not a function but a {type(loss_fn).__name__}"
        )
    return list(models), loss_fn


def same(before: Finding | None, found: Finding | None) -> bool | None:
    """True if both name one cause; None where one of them names none."""
    if before is None or found is None or not (before.found and found.found):
        return None
    return (before.phase, before.module, before.op) == (found.phase, found.module, found.op)


def described(document: Document, found: Finding | None, arguments: argparse.Namespace) -> dict[str, object]:
    """The outcome for a machine."""
    incident = replace(document.incident, finding=found)
    return {
        "bundle": str(arguments.bundle),
        "ran": bool(arguments.script),
        "same_cause": same(document.incident.finding, found) if arguments.script else None,
        "obstacle": document.obstacle,
        "incident": incident.to_dict(),
        "left_out": [{"name": one.name, "nbytes": one.nbytes, "why": one.why} for one in document.left_out],
    }


def text(document: Document, found: Finding | None, arguments: argparse.Namespace) -> str:
    """The outcome for a person: the same page as `gradwatch explain` prints."""
    from gradwatch.incidents.explanation import sentence
    from gradwatch.incidents.incident_page import page

    incident = replace(document.incident, finding=found)
    lines = list(page(incident, str(arguments.bundle), document.obstacle, map(str, document.left_out)))
    before = document.incident.finding
    if arguments.script and before is not None and before.found and not same(before, found):
        lines.append(f"- when it happened the cause was: {sentence(before)}")
    elif arguments.script and same(before, found):
        lines.append("- the same cause as when it happened")
    return shown(lines)
