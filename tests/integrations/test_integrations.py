"""What the integrations add to the conformance test: fits that fail, repeat and resume, and their absence."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradwatch
from tests.integrations.test_frameworks import WINDOWS
from tests.support import framework_jobs, warm
from tests.support.framework_checks import STEPS, but_weights, nothing_left, steps
from tests.support.framework_jobs import loader, network, squared_error
from tests.support.kept import Kept

pytestmark = pytest.mark.usefixtures("framework_folder")


def integration(framework: str) -> Any:
    """The module of a framework; importing it takes seconds, so not whoever collects this file pays for it."""
    return import_module(f"gradwatch.integrations.{framework}")


# -- transformers ----------------------------------------------------------------------------------------


def test_transformers_resumes_from_its_checkpoint() -> None:
    """Interrupted after epoch one and resumed from the checkpoint folder: the state of an uninterrupted run."""
    from transformers import TrainerCallback

    whole, first, second = (
        integration("transformers").GradwatchCallback(sinks=[], strict=True) for _ in range(3)
    )
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
    assert but_weights(second.gw.state_dict()) == but_weights(whole.gw.state_dict())


def test_transformers_loss_is_that_of_its_step() -> None:
    """Of every step, as the Trainer logs it after that one: neither averaged over others nor a step late."""
    from transformers import TrainerCallback

    sink, logged = Kept(), []

    class Note(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            logged.extend([logs["loss"]] if "loss" in logs else [])

    callback = integration("transformers").GradwatchCallback(sinks=[sink], strict=True)
    framework_jobs.transformers([callback, Note()])
    losses = [record.snapshot.scalars["loss"] for record in sink.records]
    assert len(losses) == STEPS
    assert losses == pytest.approx(logged, rel=1e-5)


def test_transformers_resumes_a_checkpoint_that_has_no_state_of_ours() -> None:
    """A checkpoint made before the callback was added to the job: everything starts afresh, nothing fails."""
    framework_jobs.transformers([], save_strategy="epoch", num_train_epochs=1)
    callback = integration("transformers").GradwatchCallback(sinks=[], strict=True)
    framework_jobs.transformers([callback], resume=True)
    assert callback.gw is not None
    assert callback.gw.state_dict()["lanes"]["0"]["step"] == len(WINDOWS)
    assert callback.gw.health.errors() == {}


def test_transformers_training_that_raises_is_ended_by_the_next() -> None:
    """The Trainer tells nobody of an exception; the next `train()` closes the watch it left open."""
    from transformers import TrainerCallback

    class Raise(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                raise ValueError("of the script")

    callback = integration("transformers").GradwatchCallback(sinks=[], strict=True)
    with pytest.raises(ValueError, match="of the script"):
        framework_jobs.transformers([callback, Raise()])
    broken = callback.gw
    framework_jobs.transformers([callback])
    assert broken is not None
    assert not broken.status()["active"]
    assert callback.gw is not broken
    assert nothing_left()


# -- Accelerate ------------------------------------------------------------------------------------------


def prepared() -> tuple[Any, nn.Module, Any, nn.Module]:
    from accelerate import Accelerator

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
    with integration("accelerate").watch(accelerator, model, optimizer, sinks=[], strict=True) as gw:
        train_prepared(accelerator, model, optimizer, count=5)
        accelerator.save_state("checkpoint")
        train_prepared(accelerator, model, optimizer, skip=5)
    whole = gw.state_dict()
    accelerator, model, optimizer, _ = prepared()
    with integration("accelerate").watch(accelerator, model, optimizer, sinks=[], strict=True) as gw:
        accelerator.load_state("checkpoint")
        train_prepared(accelerator, model, optimizer, skip=5)
    assert but_weights(gw.state_dict()) == but_weights(whole)


def test_accelerate_loads_a_checkpoint_that_has_no_state_of_ours() -> None:
    """A job that gains gradwatch resumes from the checkpoints it already has, and may drop it again."""
    accelerator, model, optimizer, _ = prepared()
    accelerator.save_state("before")
    with integration("accelerate").watch(accelerator, model, optimizer, sinks=[], strict=True) as gw:
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
        Path("checkpoint/gradwatch.json").write_text(text, encoding="utf-8")
        sink = Kept()
        gw = integration("accelerate").watch(accelerator, model, optimizer, sinks=[sink])
        with gw:
            accelerator.load_state("checkpoint")
            train_prepared(accelerator, model, optimizer)
        assert gw.health.errors() == {"resume": 1}, text
        assert steps(sink) == list(range(framework_jobs.BATCHES))


def test_plain_watch_takes_a_prepared_optimizer() -> None:
    """`gradwatch.watch(model, optimizer)` finds the optimizer inside Accelerate's wrapper."""
    accelerator, model, optimizer, _ = prepared()
    sink = Kept()
    with gradwatch.watch(model, optimizer, sinks=[sink], strict=True) as gw:
        train_prepared(accelerator, model, optimizer)
        assert list(gw.state_dict()["lanes"]) == ["0"]
    assert steps(sink) == list(range(framework_jobs.BATCHES))
    assert {record.snapshot.optimizer for record in sink.records} == {0}


# -- Ignite ----------------------------------------------------------------------------------------------


def ignite_engine(fail_at: int = 0) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    from ignite.engine import Engine

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
    from ignite.engine import Events

    engine, model, optimizer = ignite_engine(fail_at=3)
    gw = integration("ignite").watch(engine, model, optimizer, sinks=[])
    with pytest.raises(ValueError, match="of the script"), gw:
        engine.run(loader(), max_epochs=1)
    assert nothing_left()
    assert not engine.has_event_handler(None, Events.EXCEPTION_RAISED)


def test_ignite_takes_the_loss_out_of_any_output() -> None:
    """`loss=` says where in the output it is; what fails there is counted, and the root of `backward` is the loss."""
    for pick, errors in ((lambda output: output["loss"], {}), (lambda output: output["no"], {"observe": 9})):
        engine, model, optimizer = ignite_engine()
        sink = Kept()
        gw = integration("ignite").watch(engine, model, optimizer, loss=pick, sinks=[sink])
        with gw:
            engine.run(loader(), max_epochs=1)
        assert steps(sink) == list(range(framework_jobs.BATCHES))
        assert gw.health.errors() == errors
        assert all("loss" in record.snapshot.scalars for record in sink.records)


def test_ignite_checkpoints_hold_the_watch_like_any_other_object() -> None:
    """`Checkpoint({"gradwatch": gw})` saves and loads it, with `weights_only`."""
    from ignite.engine import Events
    from ignite.handlers import Checkpoint, DiskSaver

    engine, model, optimizer = ignite_engine()
    with integration("ignite").watch(engine, model, optimizer, sinks=[], strict=True) as gw:
        saver = DiskSaver("saved", create_dir=True)
        engine.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint({"model": model, "gradwatch": gw}, saver))
        engine.run(loader(), max_epochs=1)
    (saved,) = Path("saved").iterdir()
    engine, model, optimizer = ignite_engine()
    with integration("ignite").watch(engine, model, optimizer, sinks=[], strict=True) as later:
        Checkpoint.load_objects({"model": model, "gradwatch": later}, saved)
        assert later.state_dict() == gw.state_dict()
        engine.run(loader(), max_epochs=1)
    assert later.state_dict()["lanes"]["0"]["step"] == 2 * framework_jobs.BATCHES


# -- absent ----------------------------------------------------------------------------------------------

ABSENT = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
import gradwatch.integrations
from gradwatch.errors import GradwatchError
for module in {modules!r}:
    try:
        __import__("gradwatch.integrations." + module)
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


def imports_without(modules: list[str], missing: list[str]) -> list[str]:
    """What the import of each integration says where some packages are missing."""
    code = ABSENT.format(missing=missing, modules=modules)
    return warm.run([sys.executable, "-c", code], check=True).stdout.splitlines()


def test_without_a_framework_the_error_says_which_extra_to_install() -> None:
    """The import fails with an ImportError of ours that holds the command; nothing else needs the framework."""
    for framework, said in zip(EXTRAS, imports_without([*EXTRAS], [*EXTRAS]), strict=True):
        assert said.startswith(f"True {framework} is not installed")
        assert said.endswith(f"pip install 'gradwatch[{EXTRAS[framework]}]'")


def test_a_framework_that_is_broken_in_itself_says_so_itself() -> None:
    """A missing dependency of the framework is not reported as the framework's absence."""
    (said,) = imports_without(["accelerate"], ["yaml"])
    assert said.startswith("False")
    assert "yaml" in said


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_an_unknown_option_is_refused_at_once(framework: str) -> None:
    """A typo in an option is an error where it is written, naming those there are."""
    with pytest.raises(TypeError, match=r"'rule'; there are: rules, sinks, run_dir, listen, run_id, strict"):
        integration(framework).GradwatchCallback(rule="default")
