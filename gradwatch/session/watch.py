"""A live watch, as its user sees it: what `gradwatch.watch` returns."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from gradwatch.account.exit_reason import ended_by
from gradwatch.errors import AttachError, GradwatchError
from gradwatch.records.run_info import RunInfo
from gradwatch.rules.rule_set import RuleSet
from gradwatch.runtime.internal_errors import Health
from gradwatch.runtime.json_numbers import json_number
from gradwatch.session.session import Session
from gradwatch.taps.dynamo import untraced

T = TypeVar("T")


class Watch:
    """A live watch; see `gradwatch.watch`. `close()` it, or use it as a context manager."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: object = None, *exc_info: object) -> None:
        self._session.ends(ended_by(kind))
        self.close()

    @property
    def run(self) -> RunInfo:
        """The identity of this run: folder, rank, process, rules."""
        return self._session.run

    @property
    def health(self) -> Health:
        """gradwatch's own state: components up or down, internal errors, rules that are off."""
        return self._session.health

    @property
    def ruleset(self) -> RuleSet:
        """The rules in force; those that could not be carried out here are not among them."""
        return self._session.ruleset

    # -- while it trains ---------------------------------------------------------------------------------

    def observe(self, **scalars: float | torch.Tensor) -> None:
        """Give one-per-step values to the rules, e.g. `observe(accuracy=0.9)`; changes and raises nothing.

        The loss needs no call: it is the sum of the values that the step's backwards started from, with a loss scale
        taken out. `observe(loss=…)` replaces it for that step: for a loop whose backward starts from a tensor of
        several elements, or from another number than the one to be judged.

        A name of a per-step value that gradwatch measures itself (`lr`, `loss_scale`, `scaler_skip`, `total_norm` …) is
        not used, which the log says once.

        Seen by the next `optimizer.step()` of every watched optimizer. A tensor is detached; one on a device
        is read without waiting when the step is judged.
        """
        self._session.observe(scalars)

    def batch(self, indices: Iterable[int] | torch.Tensor) -> None:
        """Tell which samples of the dataset make the forward calls that follow; changes and raises nothing.

        Positions in the dataset (or other numbers that find a sample), for the cause of an incident and its bundle: no
        DataLoader can be asked which samples it has just given. Have the dataset return them with the sample:

            for indices, x, y in loader:
                gw.batch(indices)

        Holds until the next `optimizer.step()`, or until it is told again (per micro-batch). Do not write into
        `indices` before the step is taken; they are read only if something goes wrong. Without them a batch is known
        by its hash (`gradwatch.batch_hash`).
        """
        self._session.batch(indices)

    def step(self, closure: Callable[[], T]) -> T:
        """Run `closure`, which computes the loss and its gradients, then step every watched optimizer; its result.

        For a rule that orders `localise` this is the exact path: should the gradients not be finite, the closure
        is run once more, loss function and all, with the generators and buffers it began with, and without a
        trace on the models. So it must be fit to run twice on the same data: fetch the batch outside it.

            loss = gw.step(lambda: compute_and_backward(batch))

        Raises AttachError where no optimizer is known yet: name it at `gradwatch.watch(model, optimizer)`.
        """
        optimizers = self._session.optimizers()
        if not optimizers:
            raise AttachError("step() needs the optimizer: name it at gradwatch.watch(model, optimizer)")
        with self._session.closure(closure):
            result = closure()
            for optimizer in optimizers:
                optimizer.step()
        return result

    def about_to_clip(self) -> None:
        """Have the gradients read now, before code of your own clips them; changes and raises nothing.

        torch's `clip_grad_*` functions do this by themselves. Other code needs it for the window of an
        accumulating loop that ends early: without it that step is flagged provisional, its norm read too late.
        """
        self._session.read_before_clip()

    def add(self, models: Iterable[nn.Module]) -> None:
        """Watch further models in the same run; their optimizers are adopted at their first step."""
        self._session.add(models)

    def rebaseline(self, reason: str, *, params: str = "*", rules: Iterable[str] = ()) -> None:
        """Start baselines afresh, after a change made on purpose, whose `reason` is told with the next step.

        For a learning rate or batch size changed by much, a loss or a data set replaced: what detectors have learned
        of the parameters that match `params` (`*` and `?` match as in a rule's groups) and of the total norm, the loss
        and other values that there is one of per step, is learned anew, their warm-up included; so are the norms that
        policies of `clip:` have learned. With `rules`, only what these rules (ids) judge by, which others may share.
        Until their warm-up is over these rules see nothing, and what was firing by a baseline is resolved; what needs
        none (`above`, non-finite gradients) goes on as it was. For `healthy` all weights are as large as they should
        be, unless `params` or `rules` choose some. The log, the journal and the account say so. In a distributed
        training every rank must call it before the same step.
        """
        self._session.rebaseline(str(reason), params, (rules,) if isinstance(rules, str) else tuple(rules))

    # -- its state ---------------------------------------------------------------------------------------

    @property
    def url(self) -> str | None:
        """URL of /metrics, None without an endpoint."""
        return self._session.url

    @property
    def coverage(self) -> float:
        """Parameters that can be measured over parameters that want a gradient, 0..1."""
        return self._session.coverage

    @property
    def healthy(self) -> bool:
        """True if a checkpoint saved now is one to go back to; see `gradwatch.checkpoint` for what that means.

        Looks at the weights, at the price of about one read of a step's gradients; waits for a device. Without a
        collective: any rank may ask alone, and answers for what it holds of sharded weights. What cannot be known is
        False; `status()["unhealthy_because"]` says why. In another thread than the one that trains: as of the last
        step judged. After `close()`: as it was then.
        """
        return self._session.checkpoint().healthy

    @property
    def last_healthy_step(self) -> int | None:
        """The last optimizer step after which `healthy` was true (the earliest of several optimizers'); None = none."""
        return self._session.checkpoint().last_healthy_step

    def status(self) -> dict[str, Any]:
        """The present state, JSON-safe: run, steps, what is firing, internal errors, the account so far.

        `inactive` says why a rule (by id) or a group (`group:NAME`) judges nothing of the model as it is now, but for
        those with `optional: true`. A reason that begins with "not armed: " is of a rule that judges, but whose actions
        `gradwatch run` has switched off since they cannot be carried out here; or of a place of the rule file's clip
        (`clip:total`, `clip:groups.NAME`), or its taps (`modules:TAP`).
        """
        session = self._session
        checkpoint = session.checkpoint()
        records = session.records()
        return {
            "run_id": self.run.run_id,
            "directory": self.run.directory,
            "url": self.url,
            "active": not session.closed,
            "steps": sum(record.snapshot.step + 1 for record in records),
            "total_norm": [json_number(record.snapshot.total_norm) for record in records],
            "inactive": self.health.inactive(),
            "firing": sorted({rule for record in records for rule in record.verdict.firing}),
            "coverage": self.coverage,
            "observed_only": session.observed_only(),
            "healthy": checkpoint.healthy,
            "unhealthy_because": list(checkpoint.reasons),
            "account": session.account().to_dict(),
            "last_healthy_step": checkpoint.last_healthy_step,
            "internal_errors": self.health.errors(),
            "components_up": self.health.up(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Baselines, streaks and step counts, to be saved beside the model's checkpoint."""
        self._session.take_state()
        return self._session.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict()`; parameters that are new start afresh, by name.

        It must be one of the same model: shapes are not compared. Raises AttachError for a state that another version
        has saved.
        """
        self._session.load_state_dict(state)

    def _repr_html_(self) -> str:
        """The report of the run so far, for notebooks; in words where it has no journal."""
        from gradwatch.report import load

        self.flush()
        try:
            return load(self.run.directory, self.run.rank)._repr_html_()
        except GradwatchError as error:
            return f"<p>gradwatch: no report of this run: {html.escape(str(error))}</p>"

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until everything seen so far is where it belongs (journal on disk); False if it is not."""
        return self._session.flush(timeout)

    @untraced  # a script may close it in a function that is compiled: it took seconds to trace
    def close(self) -> None:
        """Remove every hook, flush and close every sink; model and optimizer are as found. Idempotent."""
        self._session.close()


def session_of(watch: Watch) -> Session:
    """The session of a Watch: for integrations and tests."""
    return watch._session
