"""What the integrations add to the conformance test: fits that fail, repeat and resume, and their absence."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradwatch.errors import RuleFileError
from gradwatch.hooks import step_hooks
from gradwatch.journal import read_journal
from tests import framework_jobs
from tests.framework_jobs import EPOCHS, loader, network, squared_error
from tests.launch_cases import GRADWATCH, ROOT
from tests.recorder import norms_of
from tests.test_frameworks import WINDOWS
from tests.test_launch_training import execute
from tests.test_watch import Collector

with warnings.catch_warnings():  # of the frameworks, about their own imports
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
    from accelerate import Accelerator
    from ignite.engine import Engine, Events
    from ignite.handlers import Checkpoint, DiskSaver
    from transformers import TrainerCallback

    import gradwatch.integrations.accelerate
    import gradwatch.integrations.ignite
    from gradwatch.integrations.lightning import GradwatchCallback as LightningCallback
    from gradwatch.integrations.transformers import GradwatchCallback as TransformersCallback

STEPS = EPOCHS * len(WINDOWS)


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Frameworks write into the working folder and warn about their own and each other's habits."""
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def steps(sink: Collector) -> list[int]:
    return [record.snapshot.step for record in sink.records]


def nothing_left() -> bool:
    """Whether no hook of ours is on any optimizer."""
    return step_hooks.installed() == 0


# -- Lightning -------------------------------------------------------------------------------------------


class Plain(pl.LightningModule):
    """The network, trained on the mean of squares; tests override what they need."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return squared_error(self.net, *batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def trainer(callback: Any, **options: Any) -> pl.Trainer:
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

    sink = Collector()
    trainer(LightningCallback(sinks=[sink], strict=True)).fit(OwnClipping(), loader())
    assert len(sink.records) == len(truth) == len(WINDOWS)
    for record, norms in zip(sink.records, truth, strict=True):
        snapshot = record.snapshot
        assert dict(zip(snapshot.sites.names, snapshot.norm.tolist(), strict=True)) == pytest.approx(norms)
        assert snapshot.total_norm_applied == pytest.approx(snapshot.total_norm * 0.125)
        assert not snapshot.provisional


def test_lightning_manual_optimization_with_two_optimizers() -> None:
    """Each optimizer's norms are its own parameters', before `clip_gradients`; the loss is not guessed."""
    truth: dict[int, list[dict[str, float]]] = {0: [], 1: []}

    class Manual(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for index, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type]
                optimizer.zero_grad()
                self.manual_backward(squared_error(self.net, *batch) * (index + 1))
                part = self.net.hidden if index else self.net.out
                name = "net.hidden" if index else "net.out"
                truth[index].append({f"{name}.{k}": v for k, v in norms_of(part.named_parameters()).items()})
                self.clip_gradients(optimizer, 0.01, "norm")
                optimizer.step()

        def configure_optimizers(self) -> Any:
            parts = (self.net.out, self.net.hidden)
            return [torch.optim.SGD(part.parameters(), lr=0.05) for part in parts]

    sink = Collector()
    callback = LightningCallback(sinks=[sink], strict=True)
    trainer(callback, accumulate_grad_batches=1).fit(Manual(), loader())
    for index, expected in truth.items():
        snapshots = [each.snapshot for each in sink.records if each.snapshot.optimizer == index]
        assert len(snapshots) == len(expected) == framework_jobs.BATCHES
        for snapshot, norms in zip(snapshots, expected, strict=True):
            reported = dict(zip(snapshot.sites.names, snapshot.norm.tolist(), strict=True))
            assert reported == pytest.approx(norms, rel=1e-5)
            assert snapshot.total_norm_applied == pytest.approx(0.01, rel=1e-3)
            assert "loss" not in snapshot.scalars


def test_lightning_observes_the_loss_of_a_batch() -> None:
    """The rules see the batch's own loss, not the one divided for accumulation."""
    losses = []

    class Noting(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = squared_error(self.net, *batch)
            losses.append(loss.item())
            return {"loss": loss}

    sink = Collector()
    trainer(LightningCallback(sinks=[sink], strict=True)).fit(Noting(), loader())
    seen = [record.snapshot.scalars["loss"] for record in sink.records[1:]]
    # Lightning tells callbacks at the end of a batch: a step's rules see the batch before its last one.
    assert seen == pytest.approx([losses[2], losses[4], losses[6], losses[7]])


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
    assert second.state_dict() == whole.state_dict() != first.state_dict()


def test_lightning_checkpoints_are_saved_though_our_state_cannot_be() -> None:
    """A fault while the state is put together costs that state, not the checkpoint; it is counted."""

    class Unreadable(LightningCallback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            def fails() -> dict[str, Any]:
                raise MemoryError("no state")

            assert self.gw is not None
            self.gw.state_dict = fails  # type: ignore[method-assign]

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
    sink = Collector()
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
        "from tests.framework_jobs import lightning\n"
        "lightning([GradwatchCallback()])\n"
    )
    launcher = [*GRADWATCH, "run", "--dir", "runs", "--run-id", "r", "--listen", "127.0.0.1:0", "--"]
    done = execute([*launcher, sys.executable, "train.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    (journal,) = read_journal("runs/r")
    assert [each.record.snapshot.step for each in journal.records()] == list(range(STEPS))


def test_plain_watch_takes_a_lightning_optimizer() -> None:
    """`gradwatch.watch(module, module.optimizers())` inside a fit finds the optimizer in Lightning's wrapper."""
    sink = Collector()

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
    Path("bad.gradwatch.yaml").write_text("version: 1\nrules:\n  x: {detekt: 1}\n")
    module = Plain()
    with pytest.raises(RuleFileError, match=r"bad\.gradwatch\.yaml:3"):
        trainer(LightningCallback(rules="bad.gradwatch.yaml")).fit(module, loader())
    assert framework_jobs.digest(module.net) == framework_jobs.digest(network())
    assert nothing_left()


# -- transformers ----------------------------------------------------------------------------------------


def test_transformers_resumes_from_its_checkpoint() -> None:
    """Interrupted after epoch one and resumed from the checkpoint folder: the state of an uninterrupted run."""
    whole, first, second = (TransformersCallback(sinks=[], strict=True) for _ in range(3))
    saving: dict[str, Any] = {"save_strategy": "epoch"}
    framework_jobs.transformers([whole], "whole", **saving)

    class Interrupt(TrainerCallback):  # type: ignore[misc]
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = True

    framework_jobs.transformers([first, Interrupt()], "parts", **saving)
    assert first.gw is not None
    assert first.gw.status()["steps"] == len(WINDOWS)
    framework_jobs.transformers([second], "parts", resume=True, **saving)
    assert second.gw is not None
    assert whole.gw is not None
    assert second.gw.state_dict()["lanes"]["0"]["step"] == STEPS
    assert second.gw.state_dict() == whole.gw.state_dict()


def test_transformers_resumes_a_checkpoint_that_has_no_state_of_ours() -> None:
    """A checkpoint made before the callback was added to the job: everything starts afresh, nothing fails."""
    framework_jobs.transformers([], save_strategy="epoch", num_train_epochs=1)
    callback = TransformersCallback(sinks=[], strict=True)
    framework_jobs.transformers([callback], resume=True)
    assert callback.gw is not None
    assert callback.gw.state_dict()["lanes"]["0"]["step"] == len(WINDOWS)
    assert callback.gw.health.errors() == {}


def test_transformers_training_that_raises_is_ended_by_the_next() -> None:
    """The Trainer tells nobody of an exception; the next `train()` closes the watch it left open."""

    class Raise(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                raise ValueError("of the script")

    callback = TransformersCallback(sinks=[], strict=True)
    with pytest.raises(ValueError, match="of the script"):
        framework_jobs.transformers([callback, Raise()])
    broken = callback.gw
    framework_jobs.transformers([callback])
    assert broken is not None
    assert not broken.models()
    assert callback.gw is not broken
    assert nothing_left()


# -- Accelerate ------------------------------------------------------------------------------------------


def prepared() -> tuple[Any, nn.Module, Any, nn.Module]:
    accelerator = Accelerator(cpu=True)
    net = network()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    return accelerator, model, optimizer, net


def train_prepared(accelerator: Any, model: nn.Module, optimizer: Any, skip: int = 0, count: int = 9) -> None:
    for position, (x, y) in enumerate(loader()):
        if skip <= position < count:
            accelerator.backward(squared_error(model, x, y))
            optimizer.step()
            optimizer.zero_grad()


def test_accelerate_keeps_the_state_in_its_checkpoints() -> None:
    """Saved after five steps, loaded into a new process's objects, nine steps: as nine without a break."""
    accelerator, model, optimizer, _ = prepared()
    with gradwatch.integrations.accelerate.watch(accelerator, model, optimizer, sinks=[], strict=True) as gw:
        train_prepared(accelerator, model, optimizer, count=5)
        accelerator.save_state("checkpoint")
        train_prepared(accelerator, model, optimizer, skip=5)
    whole = gw.state_dict()
    accelerator, model, optimizer, _ = prepared()
    with gradwatch.integrations.accelerate.watch(accelerator, model, optimizer, sinks=[], strict=True) as gw:
        accelerator.load_state("checkpoint")
        train_prepared(accelerator, model, optimizer, skip=5)
    assert gw.state_dict() == whole


def test_accelerate_loads_a_checkpoint_that_has_no_state_of_ours() -> None:
    """A job that gains gradwatch resumes from the checkpoints it already has, and may drop it again."""
    accelerator, model, optimizer, _ = prepared()
    accelerator.save_state("before")
    with gradwatch.integrations.accelerate.watch(accelerator, model, optimizer, sinks=[], strict=True) as gw:
        accelerator.load_state("before")
        train_prepared(accelerator, model, optimizer)
        accelerator.save_state("with")
    assert gw.health.errors() == {}
    accelerator, model, optimizer, _ = prepared()
    accelerator.load_state("with")


def test_a_checkpoint_file_that_is_no_state_is_counted_and_training_goes_on() -> None:
    """Garbage where the state should be: baselines start afresh, the fault is in the metrics."""
    accelerator, model, optimizer, _ = prepared()
    accelerator.save_state("checkpoint")
    for text in ("{", '{"version": 7}', "[]", '{"version": 1}'):
        Path("checkpoint/gradwatch.json").write_text(text)
        sink = Collector()
        gw = gradwatch.integrations.accelerate.watch(accelerator, model, optimizer, sinks=[sink])
        with gw:
            accelerator.load_state("checkpoint")
            train_prepared(accelerator, model, optimizer)
        assert gw.health.errors() == {"resume": 1}, text
        assert steps(sink) == list(range(framework_jobs.BATCHES))


def test_plain_watch_takes_a_prepared_optimizer() -> None:
    """`gradwatch.watch(model, optimizer)` finds the optimizer inside Accelerate's wrapper."""
    accelerator, model, optimizer, _ = prepared()
    sink = Collector()
    with gradwatch.watch(model, optimizer, sinks=[sink], strict=True) as gw:
        train_prepared(accelerator, model, optimizer)
        assert list(gw.state_dict()["lanes"]) == ["0"]
    assert steps(sink) == list(range(framework_jobs.BATCHES))
    assert {record.snapshot.optimizer for record in sink.records} == {0}


# -- Ignite ----------------------------------------------------------------------------------------------


def ignite_engine(fail_at: int = 0) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(engine: Any, batch: Any) -> dict[str, float]:
        if engine.state.iteration == fail_at:
            raise ValueError("of the script")
        optimizer.zero_grad()
        loss = squared_error(model, *batch)
        loss.backward()
        optimizer.step()
        return {"loss": loss.item(), "other": 1.0}

    return Engine(step), model, optimizer


def test_ignite_exceptions_are_raised_as_without_us() -> None:
    """Ignite swallows an exception as soon as a handler listens for it: none of ours does."""
    engine, model, optimizer = ignite_engine(fail_at=3)
    gw = gradwatch.integrations.ignite.watch(engine, model, optimizer, sinks=[])
    with pytest.raises(ValueError, match="of the script"), gw:
        engine.run(loader(), max_epochs=1)
    assert nothing_left()
    assert not engine.has_event_handler(None, Events.EXCEPTION_RAISED)


def test_ignite_takes_the_loss_out_of_any_output() -> None:
    """`loss=` says where in the output it is; what fails there is counted and ends nothing."""
    for pick, errors in ((lambda output: output["loss"], {}), (lambda output: output["no"], {"observe": 9})):
        engine, model, optimizer = ignite_engine()
        sink = Collector()
        gw = gradwatch.integrations.ignite.watch(engine, model, optimizer, loss=pick, sinks=[sink])
        with gw:
            engine.run(loader(), max_epochs=1)
        assert steps(sink) == list(range(framework_jobs.BATCHES))
        assert gw.health.errors() == errors
        assert ("loss" in sink.records[-1].snapshot.scalars) == (not errors)


def test_ignite_checkpoints_hold_the_watch_like_any_other_object() -> None:
    """`Checkpoint({"gradwatch": gw})` saves and loads it, with `weights_only`."""
    engine, model, optimizer = ignite_engine()
    with gradwatch.integrations.ignite.watch(engine, model, optimizer, sinks=[], strict=True) as gw:
        saver = DiskSaver("saved", create_dir=True)
        engine.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint({"model": model, "gradwatch": gw}, saver))
        engine.run(loader(), max_epochs=1)
    (saved,) = Path("saved").iterdir()
    engine, model, optimizer = ignite_engine()
    with gradwatch.integrations.ignite.watch(engine, model, optimizer, sinks=[], strict=True) as later:
        Checkpoint.load_objects({"model": model, "gradwatch": later}, saved)
        assert later.state_dict() == gw.state_dict()
        engine.run(loader(), max_epochs=1)
    assert later.state_dict()["lanes"]["0"]["step"] == 2 * framework_jobs.BATCHES


# -- absent ----------------------------------------------------------------------------------------------

ABSENT = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name == {missing!r} or name.startswith({missing!r} + "."):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
import gradwatch.integrations
from gradwatch.errors import GradwatchError
try:
    import gradwatch.integrations.{module}
except ImportError as error:
    print(isinstance(error, GradwatchError), error)
"""
EXTRAS = {
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "ignite": "ignite",
}


def import_without(module: str, missing: str) -> str:
    code = ABSENT.format(missing=missing, module=module)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("framework", EXTRAS)
def test_without_the_framework_the_error_says_which_extra_to_install(framework: str) -> None:
    """The import fails with an ImportError of ours that holds the command; nothing else needs the framework."""
    said = import_without(framework, framework)
    assert said.startswith(f"True {framework} is not installed")
    assert said.endswith(f"pip install 'gradwatch[{EXTRAS[framework]}]'")


def test_a_framework_that_is_broken_in_itself_says_so_itself() -> None:
    """A missing dependency of the framework is not reported as the framework's absence."""
    said = import_without("accelerate", "yaml")
    assert said.startswith("False")
    assert "yaml" in said


@pytest.mark.parametrize("callback", [LightningCallback, TransformersCallback])
def test_an_unknown_option_is_refused_at_once(callback: Any) -> None:
    """A typo in an option is an error where it is written, naming those there are."""
    with pytest.raises(TypeError, match=r"'rule'; there are: rules, sinks, run_dir, listen, run_id, strict"):
        callback(rule="default")
