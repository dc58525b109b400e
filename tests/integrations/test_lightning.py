"""The Lightning callback beyond the conformance test: clipping, precision, loss, failure, repetition, resume."""

from __future__ import annotations

import copy
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwatch
from gradwatch.errors import RuleFileError
from gradwatch.journal import read_journal
from gradwatch.session.watch import session_of
from tests.integrations.test_frameworks import WINDOWS
from tests.launch.test_training import execute_warm
from tests.support import framework_jobs
from tests.support.framework_checks import STEPS, but_weights, nothing_left, steps
from tests.support.framework_jobs import loader, network, squared_error
from tests.support.kept import Kept
from tests.support.launch_cases import GRADWATCH, ROOT
from tests.support.recorder import norms_of

pytestmark = pytest.mark.usefixtures("framework_folder", "lightning")


@pytest.fixture(scope="module")
def lightning() -> None:
    """What needs Lightning, whose import takes seconds: not for all who collect this."""
    global pl, LightningCallback, Plain
    with warnings.catch_warnings():  # of the frameworks, about their own imports
        warnings.simplefilter("ignore")
        import lightning.pytorch as pl
    from gradwatch.integrations.lightning import GradwatchCallback as LightningCallback

    class Plain(pl.LightningModule):
        """The network, trained on the mean of squares; tests override what they need."""

        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return squared_error(self.net, *batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)


def trainer(callback: Any, **options: Any) -> Any:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    settings = {"max_epochs": 1, "accumulate_grad_batches": 2, "enable_checkpointing": False, **options}
    return pl.Trainer(accelerator="cpu", callbacks=[callback], **quiet, **settings)


def test_lightning_clipping_of_ones_own_is_preceded_by_the_read() -> None:
    """`configure_gradient_clipping` that torch knows nothing of: pre-clip in the partial window, too."""
    truth = []

    class OwnClipping(Plain):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            truth.append(norms_of(self.named_parameters()))
            for parameter in self.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.125)

    sink = Kept()
    trainer(LightningCallback(sinks=[sink], strict=True)).fit(OwnClipping(), loader())
    assert len(sink.records) == len(truth) == len(WINDOWS)
    for record, norms in zip(sink.records, truth, strict=True):
        snapshot = record.snapshot
        assert dict(zip(snapshot.sites.names, snapshot.norm.tolist(), strict=True)) == pytest.approx(norms)
        assert snapshot.total_norm_applied == pytest.approx(snapshot.total_norm * 0.125)
        assert not snapshot.provisional


def test_lightning_manual_optimization_with_two_optimizers() -> None:
    """Each optimizer's norms are its own parameters', before `clip_gradients`; the loss is its own backward's."""
    truth: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    losses: dict[int, list[float]] = {0: [], 1: []}

    class Manual(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for index, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type]
                optimizer.zero_grad()
                loss = squared_error(self.net, *batch) * (index + 1)
                losses[index].append(loss.item())
                self.manual_backward(loss)
                part = self.net.hidden if index else self.net.out
                name = "net.hidden" if index else "net.out"
                truth[index].append({f"{name}.{k}": v for k, v in norms_of(part.named_parameters()).items()})
                self.clip_gradients(optimizer, 0.01, "norm")
                optimizer.step()

        def configure_optimizers(self) -> Any:
            parts = (self.net.out, self.net.hidden)
            return [torch.optim.SGD(part.parameters(), lr=0.05) for part in parts]

    sink = Kept()
    callback = LightningCallback(sinks=[sink], strict=True)
    trainer(callback, accumulate_grad_batches=1).fit(Manual(), loader())
    for index, expected in truth.items():
        snapshots = [each.snapshot for each in sink.records if each.snapshot.optimizer == index]
        assert len(snapshots) == len(expected) == framework_jobs.BATCHES
        for snapshot, norms in zip(snapshots, expected, strict=True):
            reported = dict(zip(snapshot.sites.names, snapshot.norm.tolist(), strict=True))
            assert reported == pytest.approx(norms, rel=1e-5)
            assert snapshot.total_norm_applied == pytest.approx(0.01, rel=1e-3)
        assert [snapshot.scalars["loss"] for snapshot in snapshots] == pytest.approx(losses[index])


def test_lightning_loss_is_that_of_its_step() -> None:
    """What its backwards began with, which Lightning has divided for accumulation; not a step late."""
    losses = []

    class Noting(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = squared_error(self.net, *batch)
            losses.append(loss.item())
            return {"loss": loss}

    sink = Kept()
    trainer(LightningCallback(sinks=[sink], strict=True)).fit(Noting(), loader())
    seen = [record.snapshot.scalars["loss"] for record in sink.records]
    assert seen == pytest.approx([sum(losses[k : k + 2]) / 2 for k in range(0, 9, 2)])


def test_lightning_fit_that_raises_is_left_unhooked() -> None:
    """The exception is the script's own; no hook stays, and the watch has closed its files."""

    class Failing(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 5:
                raise ValueError("of the script")
            return super().training_step(batch, batch_idx)

    callback = LightningCallback(run_dir="runs", run_id="r", listen="127.0.0.1:0")
    module = Failing()
    with pytest.raises(ValueError, match="of the script"):
        trainer(callback).fit(module, loader())
    assert nothing_left()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in module.parameters())
    (journal,) = read_journal("runs/r")
    assert len(list(journal.records())) == 2


def test_lightning_second_fit_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    """Steps and baselines of the same model continue; a second journal stands beside the first."""
    module = Plain()
    callback = LightningCallback(run_dir="runs", run_id="r", listen="127.0.0.1:0", strict=True)
    first = trainer(callback)
    first.fit(module, loader())
    first.fit_loop.max_epochs = 2
    first.fit(module, loader())
    counts = [[each.record.snapshot.step for each in one.records()] for one in read_journal("runs/r")]
    assert counts == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    trainer(callback).fit(Plain(), loader())
    assert callback.gw is not None
    assert callback.gw.status()["steps"] == len(WINDOWS)  # another model starts afresh


def test_lightning_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    """One epoch, saved and resumed for a second, leaves the state that two epochs leave."""
    whole, first, second = (LightningCallback(sinks=[], strict=True) for _ in range(3))
    trainer(whole, max_epochs=2).fit(Plain(), loader())
    begun = trainer(first, max_epochs=1)
    begun.fit(Plain(), loader())
    begun.save_checkpoint("one.ckpt", weights_only=False)
    trainer(second, max_epochs=2).fit(Plain(), loader(), ckpt_path="one.ckpt", weights_only=True)
    assert second.state_dict()["lanes"]["0"]["step"] == STEPS
    resumed, unbroken, half = (but_weights(each.state_dict()) for each in (second, whole, first))
    assert resumed == unbroken != half


def test_lightning_checkpoints_are_saved_though_our_state_cannot_be() -> None:
    """A fault while the state is put together costs that state, not the checkpoint; it is counted."""

    class Unreadable(LightningCallback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            def fails() -> dict[str, Any]:
                raise MemoryError("no state")

            assert self.gw is not None
            session_of(self.gw).state_dict = fails  # type: ignore[method-assign]

    callback = Unreadable(sinks=[])
    trainer(callback, enable_checkpointing=True, max_epochs=2).fit(Plain(), loader())
    assert callback.gw is not None
    assert callback.gw.health.errors() == {"checkpoint": 2, "close": 1}
    assert nothing_left()


def test_lightning_under_a_gradscaler() -> None:
    """Norms are free of the loss scale, read after `unscale_` and before the clip, in every window."""
    truth = []

    class Scaled(Plain):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            truth.append(norms_of(self.named_parameters()))
            super().configure_gradient_clipping(optimizer, *args, **kwargs)

    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)
    sink = Kept()
    callback = LightningCallback(sinks=[sink], strict=True)
    trainer(callback, plugins=[plugin], gradient_clip_val=0.1, max_epochs=2).fit(Scaled(), loader())
    assert len(sink.records) == len(truth) == STEPS
    for record, norms in zip(sink.records, truth, strict=True):
        snapshot = record.snapshot
        assert dict(zip(snapshot.sites.names, snapshot.norm.tolist(), strict=True)) == pytest.approx(norms)
        assert snapshot.total_norm_applied == pytest.approx(0.1, rel=1e-3)
        assert snapshot.loss_scale == 256.0
        assert not snapshot.provisional


def test_lightning_callback_under_the_launcher_is_the_one_that_watches(tmp_path: Path) -> None:
    """A script with the callback behind `gradwatch run`: one journal, complete."""
    Path("train.py").write_text(
        f"import sys; sys.path.insert(0, {ROOT!r})\n"
        "from gradwatch.integrations.lightning import GradwatchCallback\n"
        "from tests.support.framework_jobs import lightning\n"
        "lightning([GradwatchCallback()])\n",
        encoding="utf-8",
    )
    launcher = [*GRADWATCH, "run", "--dir", "runs", "--run-id", "r", "--listen", "127.0.0.1:0", "--"]
    done = execute_warm([*launcher, sys.executable, "train.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    (journal,) = read_journal("runs/r")
    assert [each.record.snapshot.step for each in journal.records()] == list(range(STEPS))


def test_plain_watch_takes_a_lightning_optimizer() -> None:
    """`gradwatch.watch(module, module.optimizers())` inside a fit finds the optimizer in Lightning's wrapper."""
    sink = Kept()

    class Own(Plain):
        def on_train_start(self) -> None:
            self.watch = [gradwatch.watch(self.net, self.optimizers(), sinks=[sink], strict=True)]  # type: ignore[arg-type]

        def on_train_end(self) -> None:
            self.watch.pop().close()

    trainer(pl.callbacks.Timer()).fit(Own(), loader())
    assert steps(sink) == list(range(len(WINDOWS)))
    assert {record.snapshot.optimizer for record in sink.records} == {0}


def test_lightning_callback_can_be_copied_and_pickled() -> None:
    """For `ddp_spawn` and tuners; a copy watches for itself."""
    callback = LightningCallback(rules="observe-only", sinks=[])
    trainer(callback).fit(Plain(), loader())
    for twin in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
        assert twin.gw is None
        trainer(twin).fit(Plain(), loader())
        assert twin.gw.status()["steps"] == len(WINDOWS)


def test_a_bad_rule_file_stops_the_job_before_it_trains() -> None:
    """The error names file and line, no batch was trained on, and nothing is left hooked."""
    Path("bad.gradwatch.yaml").write_text("version: 1\nrules:\n  x: {detekt: 1}\n", encoding="utf-8")
    module = Plain()
    with pytest.raises(RuleFileError, match=r"bad\.gradwatch\.yaml:3"):
        trainer(LightningCallback(rules="bad.gradwatch.yaml")).fit(module, loader())
    assert framework_jobs.digest(module.net) == framework_jobs.digest(network())
    assert nothing_left()
