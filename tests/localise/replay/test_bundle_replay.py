"""`gradwatch replay`: the same step to the bit elsewhere, from a bundle and a function that builds the model."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gradwatch.cli import main
from gradwatch.errors import GradwatchError
from gradwatch.incidents.bundle.bundle_reader import BundleError, read_document, read_tensors
from gradwatch.localise.diagnosis.deviation import TWICE
from gradwatch.localise.held_calls.inner_model import inner
from gradwatch.localise.replay.bundle_evidence import NO_GRADIENT
from gradwatch.localise.replay.bundle_replay import Rerun, load_weights
from gradwatch.records.finding import Finding
from gradwatch.rules.files import parse_rules
from gradwatch.session.watch import session_of
from tests.incidents.bundle.cases import (
    BAD,
    Fragile,
    Run,
    batch,
    build,
    build_with_loss,
    compared,
    rules,
    seeded,
)
from tests.support import warm
from tests.support.launch_cases import GRADWATCH


def again(bundle: Path, model: nn.Module | None = None, loss_fn: Any = None) -> Finding:
    """The step of a bundle run again on a fresh model."""
    once = Rerun(read_document(bundle), read_tensors(bundle), [model or build()], loss_fn)
    once.load()
    return once.run(1 << 30)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"micro": 3},
    "autocast": {"autocast": True},
    "keywords": {
        "call": lambda model, x: model(x=x, scales={"h": [torch.full((8,), 1.5)], "none": None, "n": 3})
    },
    "input wants a gradient": {"call": lambda model, x: model(x.requires_grad_())},
    "input computed from another": {"call": lambda model, x: model(x.clone().requires_grad_() * 1)},
    "transposed": {"call": lambda model, x: model(x.t().contiguous().t())},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_same_cause_with_the_same_numbers(way: str, tmp_path: Path) -> None:
    """Dropout, batch norm, moving buffer, three generators: every number of the evidence is what it was."""
    run = Run(tmp_path, rules(), **WAYS[way])
    told = run.document.incident.finding
    random.seed(123)
    np.random.seed(123)
    torch.manual_seed(123)
    found = again(run.only)
    assert told is not None
    assert told.op == "sqrt"
    assert told.operands
    assert compared(found) == compared(told)


def test_gradients_are_those_of_the_step_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What autograd gives the parameters in the replay is what the bundle holds of the step's own gradients."""
    run = Run(tmp_path, rules())
    made: dict[str, Tensor] = {}
    real = torch.autograd.grad

    def grad(roots: Any, leaves: Any, *args: Any, **kwargs: Any) -> Any:
        found = real(roots, leaves, *args, **kwargs)
        made.update({f"{tuple(leaf.shape)}": grad for leaf, grad in zip(leaves, found, strict=True)})
        return found

    monkeypatch.setattr(torch.autograd, "grad", grad)
    again(run.only)
    model, tensors = build(), read_tensors(run.only)
    kept = run.document.gradients
    assert len(kept) >= 3
    shapes = [tuple(param.shape) for param in model.parameters()]
    for name, stored in kept.items():
        shape = tuple(dict(model.named_parameters())[name].shape)
        if shapes.count(shape) == 1:
            assert torch.equal(made[f"{shape}"].nan_to_num(7), tensors[stored].nan_to_num(7)), name


def test_the_process_is_left_as_it_was(tmp_path: Path) -> None:
    """Generators, the model's buffers and gradients: a replay leaves no trace but the weights it loads."""
    run = Run(tmp_path, rules())
    seeded()
    model = build()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    states = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    again(run.only, model)
    assert states == (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())
    assert all(param.grad is None for param in model.parameters())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def test_weights_from_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without weights in the bundle: those of a safetensors file; otherwise it is said whose they are."""
    weights: dict[str, Tensor] = {}

    def before(gw: Any, step: int) -> None:
        if step == 4:
            weights.update(
                {
                    name: value.clone()
                    for name, value in inner(session_of(gw).models()[0]).state_dict().items()
                }
            )

    run = Run(tmp_path, rules("batch: true"), before=before)
    save_file(weights, tmp_path / "weights.safetensors")
    command = ["replay", str(run.only), "--script", "tests.incidents.bundle.cases:build"]
    assert main([*command, "--checkpoint", str(tmp_path / "weights.safetensors"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["same_cause"] is True
    assert told["incident"]["finding"]["operands"] == run.document.incident.to_dict()["finding"]["operands"]
    assert "the weights are those that the function built" not in told["incident"]["finding"]["note"]
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "the weights are those that the function built" in told["incident"]["finding"]["note"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: w.pop("enter.bias"), "it lacks 'enter.bias'"),
        (lambda w: w.update({"strange": torch.ones(1)}), "the model has no 'strange'"),
        (lambda w: w.update({"enter.bias": torch.ones(9)}), "another shape has 'enter.bias'"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: Callable[[Any], Any], says: str) -> None:
    """By name, before any of them is loaded."""
    model = build()
    before = [param.detach().clone() for param in model.parameters()]
    weights = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    change(weights)
    with pytest.raises(BundleError, match=says):
        load_weights(model, weights, "the checkpoint")
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def test_tied_weights_need_one_name(tmp_path: Path) -> None:
    """A checkpoint that names a shared tensor once (as safetensors writes models) is complete."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    weights = {
        name: torch.ones_like(value) for name, value in model.state_dict().items() if name != "1.weight"
    }
    load_weights(model, weights, "the checkpoint")
    assert torch.equal(model[1].weight, torch.ones(3, 3))


def test_a_gradient_that_was_not_finite_is_followed_into_the_loss(tmp_path: Path) -> None:
    """The loss side alone cannot be told from the model; with loss_fn the operation there is found."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x)
            return out * 0 if bool(x[0, 0] == BAD) else out

    def loss(output: Tensor) -> Tensor:
        return torch.sqrt(output.square().sum(1)).mean()  # fault

    seen: list[Tensor] = []

    def call(model: nn.Module, x: Tensor) -> Tensor:
        seen.append(x)
        return loss(model(x)).sqrt()

    run = Run(tmp_path, rules(), model=Net(), call=call)
    assert again(run.only, Net()).phase == "loss"
    found = again(run.only, Net(), lambda output: loss(output).sqrt().square())
    assert (found.phase, found.op) == ("backward", "sqrt")
    assert found.frame is not None
    assert found.frame.source.endswith(("# fault", "lambda output: loss(output).sqrt().square())"))


def test_a_gradient_that_did_not_fit_needs_the_loss(tmp_path: Path) -> None:
    """Refused with what to return; with the loss function the cause is found all the same."""
    whole = Run(tmp_path / "whole", rules()).tensors
    needed = sum(
        tensor.nbytes
        for name, tensor in whole.items()
        if name.startswith(("input.", "generator.", "gradient_at"))
    )
    run = Run(tmp_path / "cut", rules(f"batch: true, max_bytes: {needed - 1}"))
    assert run.document.obstacle == NO_GRADIENT
    with pytest.raises(BundleError, match="have the function return `model, loss_fn`"):
        again(run.only)
    found = again(run.only, *build_with_loss())
    assert (found.phase, found.op) == ("backward", "sqrt")


LOUD = """
version: 1
rules:
  loud:
    detect: {kind: above, of: total_norm, threshold: 1e5}
    do: [localise, snapshot: {batch: true, parameters: true}]
"""


class Loud(nn.Module):
    """Multiplies between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.quiet, self.loud, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """At the bad step."""
        h = self.quiet(x)
        out: Tensor = self.last(self.loud(h * (1e6 if bool(x[0, 0] == BAD) else 1.0)))
        return out


def test_explosions_are_profiled_again(tmp_path: Path) -> None:
    """A rule about norms: the module with the largest gain, from the bundle as in the loop."""
    run = Run(tmp_path, parse_rules(LOUD), model=Loud())
    told = run.document.incident.finding
    assert told is not None
    assert told.phase == "exploding"
    assert told.profile
    found = again(run.only, Loud())
    assert (found.phase, found.module) == (told.phase, told.module)
    assert str(found.profile) == str(told.profile)  # NaN where nobody knows


def test_a_double_backward_has_no_place_by_layers(tmp_path: Path) -> None:
    """A slope that is a part of the loss comes to layers past the outputs: the bundle knows, as the loop did."""

    def with_slope(model: nn.Module, x: Tensor) -> Tensor:
        x.requires_grad_()
        out: Tensor = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + slope.square().sum()

    run = Run(tmp_path, parse_rules(LOUD), model=Loud(), call=with_slope)
    told = run.document.incident.finding
    assert told is not None
    for found in (told, again(run.only, Loud())):
        assert (found.phase, found.module, found.begins) == ("exploding", "", "")
        assert TWICE in found.note


def test_nothing_is_run_without_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page alone: torch is not even imported, and the model's module neither."""
    run = Run(tmp_path, rules())
    code = (
        "import sys; from gradwatch.cli import main; status = main(['replay', sys.argv[1]]);"
        "print(status, [name for name in ('torch', 'tests.incidents.bundle.cases', 'safetensors')"
        " if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run.only)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 []"
    assert "the backward of sqrt in Fragile" in done.stdout


def test_the_command_in_another_process(tmp_path: Path) -> None:
    """As the page says it: a module of the working directory, the page of the cause, exit 0; nothing is written."""
    run = Run(tmp_path / "runs", rules())
    (tmp_path / "mine.py").write_text(
        "from tests.incidents.bundle.cases import Fragile\n\n\n"
        "def build():\n    print('building')\n    return Fragile()\n"
    )
    before = {path: path.stat().st_mtime_ns for path in run.directory.rglob("*")}
    command = [*GRADWATCH, "replay", str(run.only), "--script", "mine:build"]
    done = warm.run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    for words in (
        "building",
        "## non-finite-0-4: the backward of sqrt in Fragile",
        "# fault",
        "- the same cause as when it happened",
    ):
        assert words in done.stdout
    assert {path: path.stat().st_mtime_ns for path in run.directory.rglob("*")} == before
    done = warm.run([*command, "--json"], tmp_path, check=True)
    told = json.loads(done.stdout)
    assert (told["ran"], told["same_cause"], told["obstacle"]) == (True, True, "")
    assert "building" in done.stderr


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("nonsense", "is not MODULE:FUNCTION, e.g. train:build"),
        ("train.py:build", "name the module, not its file: train:build"),
        ("./sub/train.py:build", "name the module, not its file: sub.train:build"),
        ("./train:build", "name the module, not its file: train:build"),
        ("../sub/train.py:build", "name the module, not its file: train:build, in the folder ../sub"),
        (".train:build", "relative import"),
        ("no.such.module:build", "No module named 'no'"),
        ("tests.incidents.bundle.cases:nothing", "has no attribute 'nothing'"),
        ("tests.incidents.bundle.cases:BAD", "BAD is not a function but a float"),
        ("os:getcwd", "returned str; return the model"),
        ("tests.localise.replay.test_bundle_replay:two_models", "the step was one of 1 models"),
        ("tests.localise.replay.test_bundle_replay:another", "the bundle does not fit the model"),
        ("tests.localise.replay.test_bundle_replay:no_loss", "loss_fn is not a function but a float"),
        ("tests.localise.replay.test_bundle_replay:raises", "the model raised ValueError at "),
    ],
)
def test_a_script_that_does_not_fit_is_exit_2(
    script: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what is wrong, and no traceback."""
    run = Run(tmp_path, rules())
    assert main(["replay", str(run.only), "--script", script]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said


def two_models() -> Any:
    """One too many."""
    return [build(), build()]


def another() -> nn.Module:
    """Not the model of the step."""
    return nn.Linear(4, 2)


def no_loss() -> Any:
    """A model, and something that is no loss function."""
    return build(), 3.0


class Raises(Fragile):
    """Fails where the other one works."""

    def forward(self, x: Tensor, scales: Any = None) -> Tensor:
        """Fail."""
        raise ValueError("not today")


def raises() -> nn.Module:
    """A model that cannot be called."""
    return Raises()


def test_another_class_is_said(tmp_path: Path) -> None:
    """The same parameters by another name: it runs, and the page tells."""

    class Renamed(Fragile):
        pass

    run = Run(tmp_path, rules())
    assert "Renamed, and was a tests.incidents.bundle.cases.Fragile" in again(run.only, Renamed()).note


class Mended(Fragile):
    """Without the root that had no derivative."""

    def forward(self, x: Tensor, scales: Any = None) -> Tensor:
        """On a batch that is not the bad one."""
        x = x.clone()
        x[0, 0] = 0.0
        return super().forward(x, scales)


def mended() -> nn.Module:
    """The model without its fault."""
    return Mended()


def test_a_cause_that_is_gone_is_exit_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mended model gives finite gradients: the page says that none was found, and that this is another class."""
    run = Run(tmp_path, rules())
    assert main(["replay", str(run.only), "--script", "tests.localise.replay.test_bundle_replay:mended"]) == 1
    told = capsys.readouterr().out
    assert "run again, the step gives finite gradients" in told
    assert "when it happened the cause was: the backward of sqrt in Fragile" in told


def test_a_bundle_without_its_batch_cannot_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2, with the line of the rule file that changes that."""
    run = Run(tmp_path, rules(""))
    assert main(["replay", str(run.only), "--script", "tests.incidents.bundle.cases:build"]) == 2
    assert "snapshot: {batch: true}" in capsys.readouterr().err


def test_a_checkpoint_needs_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the model there is nothing to load it into."""
    assert main(["replay", str(tmp_path), "--checkpoint", "x.safetensors"]) == 2
    assert "--checkpoint needs --script" in capsys.readouterr().err


def test_two_networks(tmp_path: Path) -> None:
    """A generator and its critic: both are built, the calls go to the right one."""
    import gradwatch

    seeded()
    generator, critic = Fragile(), nn.Sequential(nn.Linear(3, 1))
    optimizers = [torch.optim.SGD(each.parameters(), 0.01) for each in (generator, critic)]
    with gradwatch.watch(
        [generator, critic], optimizers, rules=rules(), sinks=[], run_dir=tmp_path, strict=True
    ) as gw:
        for step in range(4):
            fake = generator(batch(step, bad=step == 2))
            optimizers[1].zero_grad()
            (critic(fake.detach()).mean() - critic(torch.randn(5, 3)).mean()).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            critic(fake).mean().backward()
            optimizers[0].step()
        assert gw.flush(30)  # a slow disk
    (bundle,) = (Path(gw.run.directory) / "bundles").iterdir()
    document = read_document(bundle)
    assert [one.type.rpartition(".")[2] for one in document.models] == ["Fragile", "Sequential"]
    once = Rerun(document, read_tensors(bundle), [Fragile(), nn.Sequential(nn.Linear(3, 1))])
    once.load()
    assert compared(once.run(1 << 30)) == compared(document.incident.finding)
    with pytest.raises(BundleError, match="load them in the function"):
        once.load({})


def test_a_loss_that_is_none_is_no_traceback(tmp_path: Path) -> None:
    """A loss_fn that gives no scalar tensor: said as an error of the model's."""
    run = Run(tmp_path, rules())
    tensors = read_tensors(run.only)
    document = read_document(run.only)
    tensors["gradient_at_output.0.0"] = torch.full((6, 3), float("nan"))
    model, _ = build_with_loss()
    once = Rerun(document, tensors, [model], lambda output: None)  # type: ignore[arg-type,return-value]
    once.load()
    with pytest.raises(GradwatchError):
        once.run(1 << 30)


def test_one_tensor_given_twice_is_one_tensor_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept once, and the same object for the model: its gradient is of both uses."""

    class Twice(Fragile):
        def forward(self, x: Tensor, scales: Any = None) -> Tensor:
            assert scales[0] is x
            return super().forward(x)

    run = Run(tmp_path, rules(), model=Twice(), call=lambda model, x: model(x, [x]))
    assert [name for name in run.tensors if name.startswith("input.")] == ["input.0.0"]
    assert again(run.only, Twice()).op == "sqrt"


class Focal(nn.Module):
    """A criterion of the user's, with a fault of its own."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """A root of 0 where output and target agree."""
        return torch.sqrt((output - target).square().sum(1)).mean()  # fault


def trained_with_a_criterion(folder: Path) -> Run:
    """The model's outputs are the targets on the bad batch, so the criterion's gradient is not finite."""
    criterion = Focal()

    def call(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        bad = bool(x[0, 0] == BAD)
        return criterion(out, out.detach() if bad else torch.zeros_like(out))  # type: ignore[no-any-return]

    class Calm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x)
            return out

    run = Run(folder, rules(), model=Calm(), call=call)
    run.kind = Calm  # type: ignore[attr-defined]
    return run


def test_the_fault_of_a_criterion_is_found_again_with_it(tmp_path: Path) -> None:
    """The criterion beside the model is in the bundle too; the function returns it as the loss."""
    run = trained_with_a_criterion(tmp_path)
    document, tensors = run.document, read_tensors(run.only)
    told = document.incident.finding
    assert told is not None
    assert (told.op, told.module_type) == ("sqrt", "Focal")
    assert told.batch is not None
    assert told.batch.hash == document.calls[0].batch.hash  # type: ignore[union-attr]  # that of the model's call
    assert [one.of for one in document.models] == [0, -1]
    once = Rerun(document, tensors, [run.kind()], Focal())  # type: ignore[attr-defined]
    once.load()
    found = once.run(1 << 30)
    assert (found.op, found.module_type, found.where) == (told.op, told.module_type, told.where)
    without = Rerun(document, tensors, [run.kind()])  # type: ignore[attr-defined]
    without.load()
    alone = without.run(1 << 30)
    assert alone.phase == "loss"
    assert "Focal was not run again: have the function return it" in alone.note


def test_parts_that_the_loop_calls_itself_find_their_place(tmp_path: Path) -> None:
    """A loop that never calls the model but its parts: the function builds the model, the parts are in it."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = Fragile(), nn.Linear(3, 1)

    run = Run(
        tmp_path,
        rules(),
        bad=(6,),
        steps=8,
        model=Parts(),
        call=lambda model, x: model.head(model.encoder(x)),  # type: ignore[operator]
    )
    document = run.document
    assert document.watched == (f"{Parts.__module__}.{Parts.__qualname__}",)
    assert {one.name for one in document.models} == {"encoder", "head"}
    once = Rerun(document, read_tensors(run.only), [Parts()])
    once.load()
    found = once.run(1 << 30)
    assert (found.op, found.where) == ("sqrt", document.incident.finding.where)  # type: ignore[union-attr]
    other = Rerun(document, read_tensors(run.only), [nn.Linear(2, 2)])
    with pytest.raises(BundleError, match="no part 'encoder' in model 0"):
        other.load()


def test_a_generator_of_the_scripts_own_is_told(tmp_path: Path) -> None:
    """Its state is in no bundle; where a forward draws from one, the step cannot be run again, and it says why."""

    class Own(Fragile):
        def __init__(self) -> None:
            super().__init__()
            self.dice = torch.Generator().manual_seed(3)

        def forward(self, x: Tensor, scales: Any = None) -> Tensor:
            return super().forward(x) * torch.rand(1, generator=self.dice)

    told = Run(tmp_path, rules(), model=Own()).document
    assert "draws from a generator of the script's own" in told.obstacle

    class Idle(Fragile):
        def __init__(self) -> None:
            super().__init__()
            self.dice = torch.Generator()

    run = Run(tmp_path / "idle", rules(), bad=(1,), model=Idle())
    assert run.document.obstacle == ""
    assert again(run.only, Idle()).op == "sqrt"
