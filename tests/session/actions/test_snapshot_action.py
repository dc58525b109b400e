"""The action `snapshot`: what a bundle holds, when it is written, and that training never notices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import gradwatch
from gradwatch.errors import AttachError
from gradwatch.incidents.bundle import background_jobs
from gradwatch.incidents.bundle.bundle_reader import read_document
from gradwatch.localise.replay import bundle_evidence
from gradwatch.rules.files import parse_rules
from gradwatch.session.watch import session_of
from gradwatch.taps import module_calls
from tests.incidents.bundle.cases import BAD, RULES, Fragile, Run, batch, rules
from tests.promises.test_bit_identity import train, unwatched
from tests.support.bare_torch import by_bare_torch
from tests.support.kept import Kept

FIRES = """
version: 1
rules:
  at-0: {detect: {kind: above, of: total_norm, threshold: 0}, do: [snapshot: {OPTIONS}]}
  at-3: {detect: {kind: above, of: total_norm, threshold: 0}, for: 4, do: [snapshot: {OPTIONS}]}
  at-9: {detect: {kind: above, of: norm, threshold: 0}, for: 10, do: [snapshot: {OPTIONS}, localise: {by: replay}]}
"""


def test_what_is_in_a_bundle(tmp_path: Path) -> None:
    """Inputs, buffers before the forward, generators, the gradient at the outputs, weights: as the loop had them."""
    seen: dict[str, Any] = {}

    def watch(gw: Any, step: int) -> None:
        if step == 4:
            model = session_of(gw).models()[0]
            seen["centre"] = model.centre.clone()
            seen["weights"] = {name: param.detach().clone() for name, param in model.named_parameters()}
            seen["cpu"] = torch.get_rng_state()

    run = Run(tmp_path, rules(), before=watch)
    told, tensors = run.document, run.tensors
    (call,) = told.calls
    assert torch.equal(tensors["input.0.0"], batch(4, bad=True))
    assert torch.equal(tensors[told.models[0].buffers["centre"]], seen["centre"])
    assert torch.equal(tensors[call.generators.cpu], seen["cpu"])
    assert call.generators.python
    assert call.generators.numpy
    assert tensors[call.gradients["0"]].shape == (6, 3)
    for name, weight in seen["weights"].items():
        assert torch.equal(tensors[told.models[0].parameters[name]], weight), name
    assert told.sites == tuple(seen["weights"])
    assert tensors["site.norm"].shape == tensors["site.calls"].shape == (len(told.sites),)
    assert not torch.isfinite(tensors["site.norm"]).all()
    assert set(told.gradients) >= {told.incident.event.first_cause}  # type: ignore[union-attr]
    assert told.models[0].type == "tests.incidents.bundle.cases.Fragile"
    assert (told.obstacle, told.left_out, told.suspicion) == ("", (), "nonfinite")


def test_the_document_tells_the_whole_incident(tmp_path: Path) -> None:
    """What fired, the cause, what was done, the norms up to it, who it was; in strict JSON and as a page."""
    kept = Kept()
    run = Run(tmp_path, rules(), sinks=[kept], before=lambda gw, step: gw.observe(loss=float(step)))
    incident = run.document.incident
    assert (incident.name, incident.step, incident.rank) == ("non-finite-0-4", 4, 0)
    assert incident.event is not None
    assert (incident.event.rule, incident.event.severity) == ("non-finite", "critical")
    assert incident.finding == next(one for record in kept.records for one in record.findings)
    assert {order.action for order in incident.done} == {"skip_step", "localise", "snapshot"}
    assert [one.step for one in incident.around] == [0, 1, 2, 3, 4]
    assert [one.total_norm for one in incident.around[:4]] == [
        record.snapshot.total_norm for record in kept.records[:4]
    ]
    assert [one.loss for one in incident.around] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert incident.around[-1].skipped
    assert incident.run_id == run.gw.run.run_id

    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    raw = json.loads((run.only / "incident.json").read_text("ascii"), parse_constant=refuse)
    assert raw["incident"]["around"][-1]["total_norm"] in ("NaN", "Infinity")
    page = (run.only / "incident.md").read_text(encoding="utf-8")
    for words in (
        "## non-finite-0-4: the backward of sqrt in Fragile",
        "h = h + torch.sqrt((h - h.detach()).square() + torch.relu(h))  # fault",
        "### What happened",
        "### Norms around it",
        "### What was done",
        f"gradwatch replay {run.only} --script MODULE:FUNCTION",
    ):
        assert words in page


def test_nothing_is_kept_that_was_not_asked_for(tmp_path: Path) -> None:
    """By default neither the batch nor the weights: their sizes are told, and how to ask; the page says so too."""
    run = Run(tmp_path, rules(""))
    told, tensors = run.document, run.tensors
    assert not [name for name in tensors if name.startswith(("input.", "parameter."))]
    assert [(one.name, one.nbytes) for one in told.left_out] == [("input.0", 6 * 4 * 4)]
    assert "snapshot: {batch: true}" in told.obstacle
    assert told.calls[0].batch is not None
    assert told.calls[0].batch.hash == gradwatch.batch_hash(batch(4, bad=True))
    page = (run.only / "incident.md").read_text(encoding="utf-8")
    assert "cannot be run again: its inputs were not asked for" in page
    assert "not kept: input.0 (96 bytes)" in page


@pytest.mark.parametrize("max_bytes", [1, 5000, 10_600, 11_000, 12_000])
def test_the_cap_holds_and_what_is_left_out_is_named(max_bytes: int, tmp_path: Path) -> None:
    """Tensors of the step never take more than max_bytes; what is missing is there by name and size."""
    run = Run(tmp_path, rules(f"batch: true, parameters: true, max_bytes: {max_bytes}"))
    told, tensors = run.document, run.tensors
    of_step = {name: tensor for name, tensor in tensors.items() if not name.startswith("site.")}
    assert sum(tensor.nbytes for tensor in of_step.values()) <= max_bytes
    whole = Run(tmp_path / "whole", rules("batch: true, parameters: true")).tensors
    everything = {name: tensor.nbytes for name, tensor in whole.items() if not name.startswith("site.")}
    missing = {one.name: one.nbytes for one in told.left_out}
    assert {**{name: tensor.nbytes for name, tensor in of_step.items()}, **missing} == everything
    assert all(f"max_bytes = {max_bytes:,}" in one.why for one in told.left_out)
    needed = [name for name in missing if name.startswith(("input", "generator", "gradient_at"))]
    assert bool(told.obstacle) == bool(needed)


def nan_in_row_three(model: nn.Module, x: Tensor) -> Tensor:
    """A call with a batch that is too large for a bundle, and bad in one row at the step at fault."""
    wide = x.repeat(1, 1000)
    wide[3, 7] = float("nan") if x[0, 0] == BAD else 0.0
    return model(wide)


def test_the_rows_at_fault_are_kept_of_a_batch_that_is_too_large(tmp_path: Path) -> None:
    """Those of each input, before anything else; the batch is left out."""
    model = nn.Sequential(nn.Linear(4000, 2), nn.Tanh())
    run = Run(tmp_path, rules("batch: true, max_bytes: 40000"), model=model, call=nan_in_row_three)
    assert run.document.incident.finding is not None
    assert run.document.incident.finding.samples == (3,)
    kept = run.tensors["sample.0.0"]
    assert kept.shape == (1, 4000)
    assert torch.isnan(kept[0]).nonzero().tolist() == [[7]]
    assert "input.0.0" in [one.name for one in run.document.left_out]


def test_rows_are_not_kept_where_inputs_were_not_asked_for(tmp_path: Path) -> None:
    """They are inputs."""
    model = nn.Sequential(nn.Linear(4000, 2), nn.Tanh())
    run = Run(tmp_path, rules("batch: false"), model=model, call=nan_in_row_three)
    assert not [name for name in run.tensors if name.startswith(("sample", "input"))]


def test_one_bundle_per_incident_and_no_more_than_keep(tmp_path: Path) -> None:
    """A fault that stays is one incident; the third incident finds two bundles there, and is not even counted."""
    kept = Kept()
    run = Run(tmp_path, rules("keep: 2"), bad=(2, 3, 6, 9), steps=12, sinks=[kept])
    assert [path.name for path in run.bundles] == ["non-finite-0-2", "non-finite-0-6"]
    ordered = [
        record.snapshot.step
        for record in kept.records
        if any(order.action == "snapshot" for order in record.decision.orders)
    ]
    assert ordered == [2, 6]
    assert run.errors == {}


def test_shadow_mode_only_says_it_would(tmp_path: Path) -> None:
    """No bundle, and the step is not held for one."""
    kept = Kept()
    run = Run(tmp_path, rules("", RULES + "    mode: shadow\n"), sinks=[kept], model=Fragile())
    assert run.bundles == []
    assert not (run.directory / "bundles").exists()
    orders = [order for record in kept.records for order in record.decision.orders]
    assert {order.action for order in orders if order.shadow} >= {"snapshot"}


@pytest.mark.parametrize(
    ("model", "optimizer", "mode"),
    [
        ("mlp_dropout", "sgd", "fp32"),
        ("cnn_batchnorm", "adamw", "accumulate"),
        ("transformer", "adam_foreach", "fp32"),
        ("lstm", "adamw", "bf16"),
        ("mlp_dropout", "adamw", "checkpoint"),
    ],
)
def test_a_snapshot_changes_no_bit(
    model: str, optimizer: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bundles of healthy steps, batch and weights and all: losses, weights, optimizer, generators as without us."""
    monkeypatch.setattr(background_jobs, "MOST", 9)  # the steps take no time
    text = FIRES.replace("OPTIONS", "batch: true, parameters: true, keep: 9")

    @contextmanager
    def watched(net: nn.Module, opt: torch.optim.Optimizer) -> Iterator[Any]:
        with gradwatch.watch(
            net, opt, rules=parse_rules(text), run_dir=tmp_path, sinks=[], strict=True
        ) as gw:
            yield gw
            assert gw.flush(30)  # a slow disk

    bare = by_bare_torch(lambda: train(model, optimizer, mode, 14, unwatched))
    assert train(model, optimizer, mode, 14, watched) == bare
    (run,) = tmp_path.glob("*/bundles")
    assert {path.name for path in run.iterdir()} == {"at-0-0-0", "at-3-0-3", "at-9-0-9"}


def test_every_micro_batch_is_there(tmp_path: Path) -> None:
    """An accumulating loop: one call each, in their order, with the generators each began with."""
    run = Run(tmp_path, rules(), micro=3)
    told, tensors = run.document, run.tensors
    assert len(told.calls) == 3
    for each in range(3):
        expected = batch(4 * 3 + each, bad=each == 2)
        assert torch.equal(tensors[f"input.{each}.0"], expected)
    assert len({bytes(tensors[call.generators.cpu].tolist()) for call in told.calls}) == 3
    assert told.incident.finding is not None
    assert told.incident.finding.call == 2
    assert told.incident.finding.batch == told.calls[2].batch


def test_micro_batches_that_were_not_held_are_told(tmp_path: Path) -> None:
    """Beyond max_bytes the earlier ones are let go of while the step is still going on; the last is there."""
    alone = rules("batch: true, max_bytes: 5000", RULES.replace("localise, ", ""))
    run = Run(tmp_path, alone, micro=50)
    (told,) = (one for one in run.document.left_out if one.name == "earlier micro-batches")
    held = len(run.document.calls)
    assert told.why == f"{50 - held} were not held: beyond max_bytes"
    assert 0 < held < 50


def test_inputs_written_into_after_the_forward_are_copied_but_not_run_again(tmp_path: Path) -> None:
    """What is there is no longer what the model was given, and the bundle says so."""
    inputs: list[torch.Tensor] = []
    model = Fragile()

    def write(leaf: torch.Tensor) -> None:
        inputs[-1].add_(1)  # by the time this gradient is there nobody needs the input any more

    model.enter.weight.register_post_accumulate_grad_hook(write)

    def call(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        inputs.append(x)
        return net(x)  # type: ignore[no-any-return]

    run = Run(tmp_path, rules(), model=model, call=call)
    assert "an input was written into" in run.document.obstacle
    assert run.document.calls[0].batch is None


def test_copies_are_made_before_the_next_batch_overwrites_the_buffer(tmp_path: Path) -> None:
    """A static input buffer, filled anew at every step: the bundle holds that of the incident."""
    static = torch.empty(6, 4)

    def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            static.copy_(x)
        out: torch.Tensor = model(static)
        return out

    run = Run(tmp_path, rules(), call=call)
    assert torch.equal(run.tensors["input.0.0"], batch(4, bad=True))


def test_a_step_judged_too_late_says_so(tmp_path: Path) -> None:
    """An optimizer that steps inside backward: the page, and no tensors of the step."""
    text = "version: 1\nrules: {r: {detect: {kind: above, threshold: 0}, do: [snapshot: {batch: true}]}}\n"
    model = nn.Linear(4, 2)
    for param in model.parameters():
        optimizer = torch.optim.SGD([param], 0.01)
        param.register_post_accumulate_grad_hook(lambda leaf, optimizer=optimizer: optimizer.step())
    with gradwatch.watch(model, rules=parse_rules(text), run_dir=tmp_path, sinks=[], strict=True) as gw:
        for _ in range(4):
            model(torch.ones(2, 4)).sum().backward()
    found = [read_document(path) for path in sorted((Path(gw.run.directory) / "bundles").iterdir())]
    assert found
    assert all("steps inside the backward" in told.obstacle for told in found)


def test_what_safetensors_cannot_hold_is_left_out(tmp_path: Path) -> None:
    """A sparse input, a complex128 one, an object: named, and the step cannot be run again."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, *others: Any, **more: Any) -> torch.Tensor:
            return torch.log(self.layer(x).square() * 0)

    def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        sparse = torch.eye(3).to_sparse()
        return model(x, sparse, torch.ones(2, dtype=torch.complex128), how=Path("there"))  # type: ignore[no-any-return]

    told = Run(tmp_path, rules(), bad=(), steps=1, model=Odd(), call=call).document
    assert {one.name for one in told.left_out} == {"input.0.1", "input.0.2"}
    assert told.obstacle.startswith("args[1]: sparse, quantized or nested")
    assert told.calls[0].kwargs == {"dict": [["how", {"missing": "a value of type pathlib.PosixPath"}]]}


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.uint16,
    ],
)
def test_every_dtype_goes_to_the_disk_and_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    """Also empty, without dimensions, transposed, expanded."""
    plain = torch.arange(12).reshape(3, 4).to(dtype)
    shapes = {"t": plain.t(), "e": plain[:0], "s": plain[1, 2], "x": plain[:1].expand(3, 4)}
    kept = bundle_evidence.Evidence(1 << 20)
    for name, tensor in shapes.items():
        assert kept.keep(name, tensor) == name
    save_file(kept.tensors, tmp_path / "x.safetensors")
    found = load_file(tmp_path / "x.safetensors")
    for name, tensor in shapes.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], tensor), name


def test_without_safetensors_it_is_refused_at_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rule's name and what to install; a rule in shadow mode needs nothing."""
    monkeypatch.setattr("gradwatch.runtime.optional_dependencies._installed", lambda module: False)
    with pytest.raises(AttachError, match=r"'non-finite'.*pip install 'gradwatch\[bundle\]'"):
        gradwatch.watch(nn.Linear(2, 2), rules=rules(), sinks=[])
    shadow = rules("", RULES + "    mode: shadow\n")
    gradwatch.watch(nn.Linear(2, 2), rules=shadow, sinks=[]).close()


def test_hooks_and_sink_are_gone_after_close(tmp_path: Path) -> None:
    """P40: nothing of it stays on the model."""
    run = Run(tmp_path, rules())
    assert not module_calls.noticed(run.model)


def test_without_a_snapshot_rule_there_is_no_such_component(tmp_path: Path) -> None:
    """The sink is there only where a rule asks for it."""
    names: list[set[str]] = []

    def after(gw: Any, step: int) -> None:
        names.append(set(gw.health.up()))

    plain = parse_rules("version: 1\nrules: {r: {detect: {kind: nonfinite}, do: [skip_step]}}\n")
    Run(tmp_path, plain, after=after, steps=1, bad=())
    Run(tmp_path, rules(), after=after, steps=1, bad=())
    assert "bundle" not in names[0]
    assert "bundle" in names[1]


def test_a_step_that_the_scaler_rejected_says_so(tmp_path: Path) -> None:
    """What led to it is let go of at once: the page, the norms, and why there are no inputs."""
    detect = "{kind: above, of: scaler_skip, threshold: 0.5}"
    text = f"version: 1\nrules: {{r: {{detect: {detect}, do: [snapshot: {{batch: true}}]}}}}\n"
    model = Fragile()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with gradwatch.watch(
        model, optimizer, rules=parse_rules(text), sinks=[], run_dir=tmp_path, strict=True
    ) as gw:
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(model(batch(step, bad=step == 2)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    (bundle,) = (Path(gw.run.directory) / "bundles").iterdir()
    told = read_document(bundle)
    assert told.incident.step == 2
    assert "GradScaler rejected the step" in told.obstacle
    assert told.loss_scale == 4.0
