"""`gradwatch.watch` as its users meet it: attach, observe, resume, close, and every way of getting it wrong."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.errors import AttachError, RuleFileError
from gradwatch.rules.files import parse_rules
from gradwatch.taps import module_calls, step_hooks
from tests.support.kept import Kept

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(3))


def build(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, scale: float = 1.0) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(X).pow(2).sum() * scale
    loss.backward()
    optimizer.step()
    return loss


def watch(model: Any, optimizer: Any = None, **options: Any) -> tuple[Any, Kept]:
    sink = Kept()
    return gradwatch.watch(model, optimizer, sinks=[sink], strict=True, **options), sink


def test_one_rank_has_no_hook_for_the_rules_of_many(tmp_path: Path) -> None:
    """With one process the default pack puts marks on parameters and nothing else: rank rules cost nothing."""
    model, optimizer = build()
    gw, _ = watch(model, optimizer, run_dir=tmp_path)
    with gw:
        for _ in range(3):
            step(model, optimizer)
        assert not any(parameter._backward_hooks for parameter in model.parameters())
        assert {len(parameter._post_accumulate_grad_hooks) for parameter in model.parameters()} == {1}


def test_every_step_is_recorded(tmp_path: Path) -> None:
    """One Record per optimizer step, with its cost, its time and the norms of every parameter."""
    model, optimizer = build()
    gw, sink = watch(model, optimizer, run_dir=tmp_path)
    with gw:
        for _ in range(5):
            step(model, optimizer)
    assert [record.snapshot.step for record in sink.records] == [0, 1, 2, 3, 4]
    assert sink.records[0].step_seconds is None
    assert all(record.overhead_seconds > 0 for record in sink.records)
    assert sink.records[-1].snapshot.sites.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert sink.records[-1].snapshot.scalars["lr"] == 0.01
    assert sink.closed


def test_optimizer_may_be_left_out() -> None:
    """Any optimizer that owns a watched parameter is adopted at its first step, also one made later."""
    model, _ = build()
    gw, sink = watch(model)
    with gw:
        late = torch.optim.SGD(model.parameters(), 0.1)
        step(model, late)
        other, other_optimizer = build()
        step(other, other_optimizer)
    assert len(sink.records) == 1


def test_observed_loss_reaches_the_rules() -> None:
    """`observe(loss=…)` feeds the loss rules, and a tensor with a graph is not kept alive."""
    model, optimizer = build()
    gw, sink = watch(model, optimizer, rules="observe-only")
    with gw:
        loss = step(model, optimizer)
        gone = weakref.ref(loss)
        gw.observe(loss=loss)
        del loss
        gc.collect()
        assert gone() is None
        step(model, optimizer)
        gw.observe(loss=float("nan"))
        step(model, optimizer)
    assert sink.records[1].snapshot.scalars["loss"] > 0
    assert "loss-non-finite" in sink.records[2].verdict.firing


def test_nan_batch_is_skipped_and_training_goes_on() -> None:
    """The default pack leaves weights and optimizer state untouched on a non-finite step, then goes on."""
    model, optimizer = build()
    gw, sink = watch(model, optimizer, rules="default")
    with gw:
        for _ in range(3):
            step(model, optimizer)
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        step(model, optimizer, scale=float("nan"))
        assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
        assert sink.records[-1].decision.skip
        step(model, optimizer)
        assert not sink.records[-1].decision.skip
        assert not any(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


def test_rule_that_says_stop_stops(tmp_path: Path) -> None:
    """`do: [stop]` raises TrainingStopped from the user's own step, after the sinks were flushed."""
    rules = parse_rules("version: 1\nrules: {lost: {detect: {kind: nonfinite}, do: [stop: {}]}}")
    model, optimizer = build()
    gw, sink = watch(model, optimizer, rules=rules)
    with gw:
        step(model, optimizer)
        with pytest.raises(gradwatch.TrainingStopped, match="lost"):
            step(model, optimizer, scale=float("inf"))
    assert sink.records[-1].decision.stop


def test_resume_equals_uninterrupted(tmp_path: Path) -> None:
    """Events after a resume from state_dict are those of the run that was never interrupted."""
    scales = [1.0] * 60 + [1e4] + [1.0] * 10

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, scale: float) -> None:
        optimizer.zero_grad()
        ((model(torch.randn(16, 3)) - torch.randn(16, 2)).pow(2).mean() * scale).backward()
        optimizer.step()

    def run(cut: int | None) -> list[tuple[str, str, int]]:
        model, optimizer = build()
        gw, sink = watch(model, optimizer, rules="default")
        events = []
        for i, scale in enumerate(scales):
            if i == cut:
                state = json.loads(json.dumps(gw.state_dict(), default=list))
                gw.close()
                events += sink.records
                gw, sink = watch(model, optimizer, rules="default")
                gw.load_state_dict(state)
            step(model, optimizer, scale)
        gw.close()
        records = events + sink.records
        return [(e.kind, e.rule, e.step) for record in records for e in record.verdict.events]

    whole = run(None)
    assert any(rule == "norm-spike" for _, rule, _ in whole)
    # Learned loop counts are not state: the first window after a resume is provisional, so cut well before.
    assert run(40) == whole


def test_wrong_arguments_say_what_to_do() -> None:
    """Not a module, no parameters, not an optimizer, nothing that wants a gradient, unknown pack."""
    model, optimizer = build()
    with pytest.raises(AttachError, match=r"torch\.nn\.Module"):
        gradwatch.watch([1, 2])  # type: ignore[list-item]
    swapped: Any = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    with pytest.raises(AttachError, match=r"torch\.nn\.Module or a list of them, not SGD"):
        gradwatch.watch(swapped, nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(AttachError, match=r"torch\.optim\.Optimizer, not float"):
        gradwatch.watch(nn.Linear(2, 2), 0.1)  # type: ignore[arg-type]
    with pytest.raises(AttachError, match=r"not str; sinks by their names stand in a rule file"):
        gradwatch.watch(nn.Linear(2, 2), sinks=["journal"])  # type: ignore[list-item]
    kept = Kept()
    with gradwatch.watch(model, optimizer, sinks=(sink for sink in [kept])) as gw:  # type: ignore[arg-type]
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        gw.flush()
    assert len(kept.records) == 1, "sinks of a generator"
    with pytest.raises(AttachError, match="no model"):
        gradwatch.watch([])
    with pytest.raises(AttachError, match="nothing to watch"):
        gradwatch.watch(nn.ReLU())
    with pytest.raises(AttachError, match="adopted at its first step"):
        gradwatch.watch(model, "adam")  # type: ignore[arg-type]
    with pytest.raises(AttachError, match="unfreezing"):
        gradwatch.watch(build()[0].requires_grad_(False))
    with pytest.raises(RuleFileError, match="GW"):
        gradwatch.watch(model, optimizer, rules="no-such-pack")


def test_attaching_twice_is_an_error_but_the_launcher_gives_way() -> None:
    """A model has one watch; the launcher's is replaced by the script's own."""
    model, optimizer = build()
    launched, _ = watch(model, optimizer, origin="launcher")
    gw, _ = watch(model, optimizer)
    assert launched.status()["active"] is False
    with gw, pytest.raises(AttachError, match="watched already"):
        watch(model, optimizer)
    again, _ = watch(model, optimizer)
    again.close()


def test_rule_that_matches_nothing_is_refused_where_that_is_asked() -> None:
    """With strict_rules a group or rule that selects no parameter is an error before training, unless optional."""
    model, optimizer = build()
    source = """
version: 1
groups: {{heads: {{params: ["*.head.*"]{optional}}}}}
rules: {{big: {{detect: {{kind: above, of: norm, threshold: 5}}, groups: [heads]{optional}}}}}
"""
    with pytest.raises(AttachError, match="heads"):
        watch(model, optimizer, rules=parse_rules(source.format(optional="")), strict_rules=True)
    assert step_hooks.installed() == 0
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    rules = parse_rules(source.format(optional=", optional: true"))
    gw, _ = watch(model, optimizer, rules=rules, strict_rules=True)
    gw.close()


def test_action_not_built_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """An action that a version knows and cannot carry out is refused at attach, never ignored."""
    monkeypatch.setattr("gradwatch.rules.impossible_actions.NOT_BUILT", frozenset({"snapshot"}))
    model, optimizer = build()
    text = "version: 1\nrules: {r: {detect: {kind: nonfinite}, do: [{snapshot: {keep: 1}}]}}"
    with pytest.raises(RuleFileError, match="snapshot"):
        parse_rules(text)
    monkeypatch.undo()
    rules = parse_rules(text)
    monkeypatch.setattr("gradwatch.rules.impossible_actions.NOT_BUILT", frozenset({"snapshot"}))
    with pytest.raises(AttachError, match="snapshot"):
        watch(model, optimizer, rules=rules)


def test_standing_clip_policy() -> None:
    """`clip: {total: {method: norm}}` bounds the norm the optimizer gets, and `norm` still says what it was."""
    model, optimizer = build()
    rules = parse_rules("version: 1\nrules: {}\nclip: {total: {method: norm, max_norm: 0.01}}")
    gw, sink = watch(model, optimizer, rules=rules)
    with gw:
        for _ in range(3):
            step(model, optimizer)
            applied = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])  # type: ignore[misc]
            assert float(applied) == pytest.approx(0.01, rel=1e-4)
        assert sink.records[-1].snapshot.total_norm > 0.1


def test_our_own_clip_is_what_was_applied() -> None:
    """The Record says what the optimizer really got: norm before, norm_applied and coef after our clip."""
    model, optimizer = build()
    rules = parse_rules("version: 1\nrules: {}\nclip: {total: {method: norm, max_norm: 0.01}}")
    gw, sink = watch(model, optimizer, rules=rules)
    with gw:
        step(model, optimizer)
        snapshot = sink.records[-1].snapshot
        assert snapshot.total_norm_applied == pytest.approx(0.01, rel=1e-4)
        assert snapshot.coef.tolist() == pytest.approx([0.01 / snapshot.total_norm] * 4, rel=1e-4)
        applied = snapshot.column("norm_applied")
        assert applied is not None
        got = [float(parameter.grad.norm()) for parameter in model.parameters()]  # type: ignore[union-attr]
        assert applied.values.tolist() == pytest.approx(got, rel=1e-5)


def test_new_optimizer_takes_over_the_lane_of_a_dead_one() -> None:
    """Re-creating optimizers neither mixes up parameters nor leaves ghosts: one capture each, names and norms right."""
    first, a = build(0)
    second, b = build(1)
    gw, sink = watch([first, second], rules="observe-only")
    with gw:
        step(first, a)
        step(second, b)
        del a
        gc.collect()
        c = torch.optim.SGD(first.parameters(), 0.1)
        for _ in range(3):
            step(first, c)
            of_c = sink.records[-1].snapshot
            step(second, b)
            of_b = sink.records[-1].snapshot
            assert {name.split(".")[0] for name in of_c.sites.names} == {"Sequential"}
            assert {name.split(".")[0] for name in of_b.sites.names} == {"Sequential1"}
            assert of_c.total_norm == pytest.approx(total(first), rel=1e-5)
            assert of_b.total_norm == pytest.approx(total(second), rel=1e-5)
        assert {record.snapshot.optimizer for record in sink.records} == {0, 1}
        assert [r.snapshot.step for r in sink.records if r.snapshot.optimizer == 0] == [0, 1, 2, 3]


def total(model: nn.Module) -> float:
    """The total norm of a model's gradients."""
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


def test_every_optimizer_sees_an_observed_value_once() -> None:
    """A loss observed once replaces the heard one in the next step of every watched optimizer, and only there."""
    first, a = build(0)
    second, b = build(1)
    gw, sink = watch([first, second], [a, b])
    with gw:
        gw.observe(loss=2.5)
        heard = [step(*one).item() for one in [(first, a), (second, b)] * 2]
    told = [record.snapshot.scalars["loss"] for record in sink.records]
    assert told == [2.5, 2.5, *map(pytest.approx, heard[2:])]


def test_two_watches_give_the_scaler_back_in_any_order() -> None:
    """GradScaler is wrapped once for all watches; the last one to close restores it."""
    names = ("_unscale_grads_", "step", "update")
    found = [getattr(torch.amp.GradScaler, name) for name in names]
    built = [build(seed) for seed in (0, 1)]
    gws = [watch(model, optimizer)[0] for model, optimizer in built]
    assert not any(getattr(torch.amp.GradScaler, name) in found for name in names)
    for gw in gws:
        gw.close()
    assert [getattr(torch.amp.GradScaler, name) for name in names] == found


def test_failed_attach_leaves_no_module_hook() -> None:
    """Taps are taken off again when a rule refuses the model."""
    model, optimizer = build()
    source = """
version: 1
modules: {tap: full_backward, names: ["*"]}
groups: {heads: {params: ["*.head.*"]}}
rules:
  tap: {detect: {kind: above, of: grad_output_norm, threshold: 5}}
  big: {detect: {kind: above, of: norm, threshold: 5}, groups: [heads]}
"""
    with pytest.raises(AttachError, match="heads"):
        watch(model, optimizer, rules=parse_rules(source), strict_rules=True)
    assert not any(map(module_calls.noticed, model.modules()))


def test_state_dict_right_after_load_and_after_close() -> None:
    """A save before the first step after a resume, or after close, loses nothing."""
    model, optimizer = build()
    gw, _ = watch(model, optimizer)
    with gw:
        for _ in range(3):
            step(model, optimizer)
    state = gw.state_dict()
    assert state["lanes"]["0"]["step"] == 3
    again, _ = watch(model, optimizer)
    with again:
        again.load_state_dict(state)
        assert again.state_dict() == state


def test_fused_overflow_under_a_scaler_is_no_incident() -> None:
    """A step the GradScaler itself rejects is told as info and no more, whether the optimizer is called or not."""
    for fused in (False, True):
        model, _ = build()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        gw, sink = watch(model, optimizer, rules="default")
        with gw:
            for i in range(6):
                optimizer.zero_grad()
                scaler.scale(model(X).pow(2).sum() * (float("inf") if i == 3 else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
            events = [event for record in sink.records for event in record.verdict.events]
            assert {(event.rule, event.severity) for event in events} == {("scaler-skip", "info")}
            assert not any(record.decision.skip for record in sink.records)
            # Without the scaler the same gradients are taken as they are.
            step(model, optimizer)
            assert sink.records[-1].snapshot.total_norm == pytest.approx(total(model), rel=1e-5)


def test_a_clip_counts_gradients_nobody_renewed() -> None:
    """The recorded coefficient is the one applied, also where a stale gradient is part of what is clipped."""
    model = nn.ModuleDict({"often": nn.Linear(3, 2), "once": nn.Linear(3, 2)})
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    rules = parse_rules("version: 1\nrules: {}\nclip: {total: {method: norm, max_norm: 0.5}}")
    gw, sink = watch(model, optimizer, rules=rules)
    with gw:
        for i in range(4):
            model["often"].zero_grad()
            (model["often"](X).pow(2).sum() + (model["once"](X).pow(2).sum() if i == 0 else 0)).backward()
            before = model["often"].weight.grad.clone()  # type: ignore[union-attr, operator]
            optimizer.step()
            got = float((model["often"].weight.grad / before).mean())  # type: ignore[union-attr, operator]
            snapshot = sink.records[-1].snapshot
            assert snapshot.coef[snapshot.sites.names.index("often.weight")] == pytest.approx(got, rel=1e-5)


def test_gradwatch_0_is_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """P40: with GRADWATCH=0 there are no hooks, no threads, no files, and the script runs as it is."""
    monkeypatch.setenv("GRADWATCH", "0")
    threads = threading.active_count()
    model, optimizer = build()
    with gradwatch.watch(model, optimizer, run_dir=tmp_path) as gw:
        step(model, optimizer)
        gw.observe(loss=1.0)
        assert gw.flush()
        assert gw.status()["active"] is False
        assert gw.state_dict()["lanes"] == {}
        assert step_hooks.installed() == 0
        assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert threading.active_count() == threads
    assert list(tmp_path.iterdir()) == []


def another_watch() -> None:
    model, optimizer = build()
    watch(model, optimizer)[0].close()


AFTERWARDS: dict[str, Callable[[], object]] = {
    "backward": lambda: torch.ones(1, requires_grad=True).sum().backward(),
    "watch": another_watch,
    "asked": lambda: gradwatch.session.session.live_sessions(),
}


@pytest.mark.parametrize("event", AFTERWARDS)
def test_forgotten_watch_does_not_keep_the_model_alive(event: str, tmp_path: Path) -> None:
    """A watch that is not kept goes on with its model; when that is gone, it ends at the next event of the process."""
    model, optimizer = build()
    gw, sink = watch(model, optimizer, run_dir=tmp_path)
    gone, weights = (weakref.ref(model), weakref.ref(gw)), weakref.ref(next(model.parameters()))
    del gw
    gc.collect()
    step(model, optimizer)
    assert len(sink.records) == 1
    ran: list[str] = []
    package = os.path.dirname(gradwatch.__file__)
    sys.setprofile(lambda frame, *_: ran.append(frame.f_code.co_filename))
    try:
        del model, optimizer
        gc.collect()
    finally:
        sys.setprofile(None)
    assert gone[0]() is None
    assert [one for one in ran if one.startswith(package)] == []
    assert weights() is None
    assert not sink.closed
    AFTERWARDS[event]()
    assert sink.closed
    gc.collect()
    assert gone[1]() is None
    assert step_hooks.installed() == 0


@pytest.mark.parametrize("rules", ["default", "clip", "skip"])
def test_closed_watch_keeps_no_parameter_alive(rules: str) -> None:
    """After `close()` a Watch that is still held frees weights, gradients and optimizer, and answers as before."""
    text = {
        "default": None,
        "clip": "version: 1\nclip:\n  total: {method: norm, max_norm: 1.0}\n",
        "skip": "version: 1\nrules:\n  nf: {detect: {kind: nonfinite}, do: [skip_step, localise]}\n",
    }[rules]
    given = {} if text is None else {"rules": parse_rules(text)}
    model, optimizer = build()
    gw = gradwatch.watch(model, optimizer, sinks=[], **given)
    for _ in range(3):
        step(model, optimizer)
    before = gw.status(), gw.state_dict()
    gw.close()
    alive = [weakref.ref(one) for one in (model, optimizer, *model.parameters())]
    alive += [weakref.ref(p.grad) for p in model.parameters() if p.grad is not None]
    assert len(alive) == 10
    del model, optimizer
    gc.collect()
    assert [one() for one in alive] == [None] * 10
    assert gw.state_dict() == before[1]
    assert gw.status()["account"]["watched"] == before[0]["account"]["watched"]
    assert gw.healthy
    assert gw.last_healthy_step == 2


def test_a_watch_lives_while_one_of_its_models_does() -> None:
    """Of two models the first is gone: the second is watched on."""
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    sink = Kept()
    gradwatch.watch(models, optimizers, sinks=[sink], strict=True)
    for _ in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            del model, optimizer
        del models[:-1], optimizers[:-1]
        gc.collect()
    assert len(sink.records) == 3
    assert not sink.closed
    del models, optimizers
    AFTERWARDS["backward"]()
    assert sink.closed


@pytest.mark.parametrize(
    "container", [lambda *all_: nn.ModuleList(all_), lambda a, b: nn.ModuleDict({"a": a, "b": b})]
)
def test_container_made_for_the_call_is_kept(container: Any, tmp_path: Path) -> None:
    """`watch(nn.ModuleList([a, b]))` sees every step until it is closed, and lets go of both then."""
    a, b = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], 0.1)
    sink = Kept()
    gw = gradwatch.watch(container(a, b), optimizer, sinks=[sink], run_dir=tmp_path, strict=True)
    gc.collect()
    for _ in range(3):
        optimizer.zero_grad()
        b(a(torch.ones(2, 4))).sum().backward()
        optimizer.step()
    gone = weakref.ref(a), weakref.ref(b)
    gw.close()
    assert [record.snapshot.step for record in sink.records] == [0, 1, 2]
    del a, b, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_models_one_after_another_in_one_watch() -> None:
    """A new optimizer on the same model goes on under its own capture; a dead one is forgotten."""
    model, optimizer = build()
    gw, sink = watch(model)
    with gw:
        step(model, optimizer)
        del optimizer
        gc.collect()
        for _ in range(3):
            step(model, torch.optim.SGD(model.parameters(), 0.1))
    assert len(sink.records) == 4


def test_script_that_never_closes_exits_cleanly(tmp_path: Path) -> None:
    """P8: a script that forgets close() ends by itself, with its own status and a readable journal."""
    code = f"""
import torch, gradwatch, sys
model = torch.nn.Linear(2, 2); optimizer = torch.optim.SGD(model.parameters(), 1e-3)
gw = gradwatch.watch(model, optimizer, run_dir={str(tmp_path)!r}, listen="127.0.0.1:0")
for _ in range(5):
    optimizer.zero_grad(); model(torch.ones(1, 2)).sum().backward(); optimizer.step()
sys.exit(7)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=False
    )
    assert (done.returncode, done.stdout) == (7, "")
    assert done.stderr.startswith("[info     ] gradwatch account steps_watched=5 steps_taken=5")
    assert done.stderr.count("\n") == 1
    journals = list(tmp_path.rglob("*.gwj"))
    assert len(journals) == 1
    assert journals[0].stat().st_mode & 0o777 == 0o600


def test_forked_child_is_not_watched() -> None:
    """P7 in small: a forked child that trains reports nothing and leaves the parent's sinks alone."""
    model, optimizer = build()
    gw, sink = watch(model, optimizer)
    with gw:
        step(model, optimizer)
        pid = os.fork()
        if pid == 0:
            step(model, optimizer)
            os._exit(0 if len(sink.records) == 1 else 1)
        assert os.waitpid(pid, 0)[1] == 0
        step(model, optimizer)
        assert len(sink.records) == 2


def test_forked_child_may_watch_for_itself() -> None:
    """The watch a child inherits is inert, so the child may attach its own."""
    model, optimizer = build()
    gw, _ = watch(model, optimizer)
    with gw:
        pid = os.fork()
        if pid == 0:
            _, sink = watch(model, torch.optim.SGD(model.parameters(), 0.1))
            step(model, torch.optim.SGD(model.parameters(), 0.1))
            os._exit(len(sink.records))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_status_is_json_even_when_nothing_is_finite() -> None:
    """NaN travels as a string, as everywhere in our JSON."""
    model, optimizer = build()
    gw, _ = watch(model, optimizer)
    with gw:
        step(model, optimizer, scale=float("nan"))
        status = json.loads(json.dumps(gw.status(), allow_nan=False))
    assert status["total_norm"] == ["NaN"]
    assert "non-finite" in status["firing"]


def test_coverage_counts_parameters_that_joined_unseen() -> None:
    """A parameter that replaces a watched one lowers the coverage until its optimizer has stepped."""
    model, optimizer = build()
    gw, _ = watch(model, optimizer)
    with gw:
        step(model, optimizer)
        assert gw.coverage == 1.0
        model[0].weight = nn.Parameter(torch.randn(4, 3))  # type: ignore[index]
        assert gw.coverage == pytest.approx(0.75)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step(model, optimizer)
        assert gw.coverage == 1.0
