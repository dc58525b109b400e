"""Every action that `do:` may name: its parameters, and the facts that all else asks of it.

What it orders of a step is decided in `gradwatch.engine.actions.rule_actions`.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from gradwatch.records.key_limits import Limits
from gradwatch.rules.field_types import Count, Parameters, Positive, Steps, key, unset
from gradwatch.rules.rule_set import ClipAt


class SkipStep(Parameters):
    """Leave parameters and optimizer state bit-identical to before.

    Nothing is learned of a step that is skipped, so that it does not hide the next one; where it goes on for more than
    `max_consecutive` steps in a row (with `then: continue` skipped as well) it is learned as the level of now.
    """

    max_consecutive: Count = key(10, description="Steps in a row that it skips; at the next one, `then`.")
    then: Literal["continue", "stop"] = key(
        "continue",
        description="continue reports the incident again, and skips on; stop ends the training at that step, before "
        "the weights change.",
    )


class ClipTo(Parameters):
    """Clip to the baseline's limit, or to a constant norm."""

    to: Literal["baseline"] | Positive = key("baseline", description="baseline, or a norm.")
    at: ClipAt = key("step", description="step, or backward.")
    local: bool = key(False, description="Force `at: backward` where gradients are sharded or accumulated.")


class Rescale(Parameters):
    """Multiply gradients by a standing factor, from the next step on."""

    factor: Positive = key(description="What every gradient is multiplied by.")


class Localise(Parameters):
    """Find the operation that made the first NaN or Inf.

    An incident is searched until its cause is found, three times at most; without `keep` each incident is, for its
    cause may be another one.
    """

    by: Literal["replay", "record", "detect_anomaly"] = key(
        "replay",
        description="Run the step again, record the next ones, or switch torch's own check on, which stops the job.",
    )
    else_record_steps: Steps = key(
        2, description="Steps to record where a replay is impossible or finds nothing; 0 = none."
    )
    max_bytes: Annotated[int, Limits(ge=0, le=1 << 40)] = key(
        64 << 20, description="Bytes held per model for a replay, beyond the batch of the present step."
    )
    keep: Count = unset(
        "Incidents of the rule in a run whose cause is sought; of later ones it is said that it is not."
    )


class SnapshotTo(Parameters):
    """Keep a bundle of the incident in the run's folder: page, norms, generators, gradients, the batch if asked.

    It needs `pip install 'gradwatch[bundle]'`; `gradwatch rules check` says where that is missing.
    """

    keep: Count = key(3, description="Bundles of this rank in a run's folder, beyond which none is added.")
    batch: bool = key(
        False, description="Keep the model's inputs too: only then can `gradwatch replay` run the step again."
    )
    parameters: bool = key(False, description="Keep the weights too, as far as max_bytes allows.")
    max_bytes: Annotated[int, Limits(ge=0, le=1 << 40)] = key(
        64 << 20, description="Of the tensors of one bundle; what does not fit is named with its size."
    )


class Escalate(Parameters):
    """Do more when it keeps happening; each such item is a rung of one ladder."""

    after: Annotated[str, Limits(pattern=r"^[1-9][0-9]{0,3} in [1-9][0-9]{0,5}$")] = key(
        description="k in n steps: acted on k of the last n optimizer steps."
    )
    to: Literal["clip", "skip_step", "localise", "stop"] = key(description="The stronger action.")


class ZeroNonfinite(Parameters):
    """Set elements that are NaN or Inf to 0, in the gradients that breach, and keep the step.

    Only in a rule about NaN and Inf; all other elements stay as they are. Not under a GradScaler, which has to see the
    overflow to lower its scale: there it is reported as not carried out.
    """


class Stop(Parameters):
    """End the training: `TrainingStopped` is raised at the step that breaches, before the optimizer changes any weight.

    On every rank at the same step, after the step was recorded and reported. `gradwatch run` then ends with exit status
    86; a script that catches it may save a checkpoint first. To stop only where it goes on: `escalate`, or `then: stop`
    of `skip_step`.
    """


class DropMicro(Parameters):
    """Leave out the micro-batch whose gradients are NaN or Inf, and keep the step with the others.

    For gradient accumulation, in a rule of `kind: nonfinite`: what the others gave is multiplied by k / (k - d), where
    d of k backwards were left out. Not under a GradScaler, and not where gradients are reduced over ranks or sharded:
    there it is switched off, with a warning that names `skip_step`.
    """


class ActionKind(NamedTuple):
    """`params` are its keys.

    `changes_gradients`: of parameters, so it needs a rule on these, and a step that is skipped or stopped overrides it.
    `every_step`: it is about the gradients of one step, so its rule is evaluated on every step. `later`: what the log
    says of an action that works from the next step on. `repeated`: it may be listed more than once.
    """

    params: type[Parameters]
    changes_gradients: bool = False
    every_step: bool = False
    later: str = ""
    repeated: bool = False


ACTIONS: dict[str, ActionKind] = {
    "skip_step": ActionKind(SkipStep, every_step=True),
    "clip": ActionKind(ClipTo, changes_gradients=True, every_step=True),
    "rescale": ActionKind(Rescale, changes_gradients=True, later="rescale (from the next step on)"),
    "zero_nonfinite": ActionKind(ZeroNonfinite, changes_gradients=True, every_step=True),
    "localise": ActionKind(Localise),
    "snapshot": ActionKind(SnapshotTo),
    "stop": ActionKind(Stop),
    "escalate": ActionKind(Escalate, repeated=True),
    "drop_micro": ActionKind(DropMicro, every_step=True),
}
"""By the name in a rule file."""


def changing_gradients() -> frozenset[str]:
    """The names of the actions that change gradients."""
    return frozenset(name for name, kind in ACTIONS.items() if kind.changes_gradients)
