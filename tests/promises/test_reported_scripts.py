"""Unmodified scripts under `gradwatch run`, each the report of a defect: every step is watched, nothing is left behind.

Smaller forms of those marked `soak` stand elsewhere in the suite; `pytest -m soak tests/promises` runs the scripts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.promises.launched import bare, watched, watching_itself


@pytest.mark.soak
def test_a_module_that_wraps_the_model_for_one_forward_changes_nothing(tmp_path: Path) -> None:
    """All 30 steps are recorded, the one with the NaN is skipped, and the weights stay finite."""
    done = watched("passing_wrapper", tmp_path)
    assert done.status == 0
    assert "nan" not in done.stdout
    records = done.records()
    assert [record.snapshot.step for record in records] == list(range(30))
    assert [record.snapshot.step for record in records if record.decision.skip] == [5]


@pytest.mark.soak
def test_a_scaler_that_rejects_every_step_is_told(tmp_path: Path) -> None:
    """No optimizer step is ever taken, and the collapse of the loss scale fires all the same."""
    done = watched("scaler_rejects", tmp_path)
    assert done.status == 0
    assert "scale-collapse" in {event.rule for event in done.fired()}


@pytest.mark.soak
def test_a_checkpoint_assigned_with_a_new_optimizer_stays_watched(tmp_path: Path) -> None:
    """Parameters and optimizer are replaced at step 10: 20 steps are recorded, and the NaN at step 15 is found."""
    done = watched("assign_and_new_optimizer", tmp_path)
    assert done.stdout == "finite True\n"
    records = done.records()
    assert len(records) == 20
    assert [n for n, record in enumerate(records) if record.decision.skip] == [15]
    assert "non-finite" in {event.rule for event in done.fired()}
    assert all(record.snapshot.coverage == 1.0 for record in records)


def test_two_hundred_optimizers_are_watched_without_scanning_the_heap(tmp_path: Path) -> None:
    """Reptile: a copied model and a new optimizer 200 times; each step is recorded and the heap is never listed."""
    done = watched("many_optimizers", tmp_path)
    assert done.status == 0
    assert done.stdout.splitlines()[-1] == "heap listed 0 times"
    assert len(done.records()) == 800


@pytest.mark.soak
def test_a_deleted_model_is_freed_while_another_is_watched(tmp_path: Path) -> None:
    """A sweep: the weights of the model before are freed as in the bare script."""
    done = watched("deleted_model", tmp_path)
    assert done.stdout == "".join(f"trial {n} freed True\n" for n in range(3))
    assert len(done.records()) == 3 + 3 * 6


@pytest.mark.soak
def test_a_forked_child_that_trains_is_recorded(tmp_path: Path) -> None:
    """Hogwild: the parent's 4 steps stand in one journal, the child's 8 in another."""
    done = watched("forked_trainer", tmp_path)
    assert done.stdout == "done 0\n"
    lengths = sorted(sum(1 for _ in journal.records()) for journal in done.journals())
    assert lengths == [4, 8]


@pytest.mark.soak
def test_a_loop_without_an_optimizer_is_observed(tmp_path: Path) -> None:
    """SGD by hand with a clip: ten steps are recorded, NaN from the fourth on, and nothing is done about it."""
    script, done = bare("no_optimizer", tmp_path), watched("no_optimizer", tmp_path)
    assert (done.status, done.stdout) == (script.status, script.stdout)
    records = done.records()
    assert [bool(record.snapshot.nonfinite().any()) for record in records] == [False] * 3 + [True] * 7
    assert not any(record.decision.skip for record in records)
    assert all(order.shadow for record in records for order in record.decision.orders)
    assert "non-finite" in {event.rule for event in done.fired()}


@pytest.mark.soak
def test_a_model_saved_whole_is_the_bare_file(tmp_path: Path) -> None:
    """`torch.save(model)` writes the bytes it writes bare, and `weights_only` loading takes them."""
    script, done = bare("save_whole", tmp_path), watched("save_whole", tmp_path)
    assert (done.status, done.stdout) == (script.status, script.stdout) == (0, "loaded Sequential\n")
    assert (done.folder / "m.pt").read_bytes() == (script.folder / "m.pt").read_bytes()
    assert len(done.records()) == 5


@pytest.mark.soak
def test_a_warning_appears_as_often_as_bare(tmp_path: Path) -> None:
    """Python shows a warning once a place; under `gradwatch run` too."""
    done = watched("warn_once", tmp_path)
    assert done.stderr.count("UserWarning: once, please") == 1
    assert len(done.records()) == 3


@pytest.mark.soak
def test_an_exception_from_another_thread_reaches_training(tmp_path: Path) -> None:
    """A timeout of the script's own, raised at a random line of a watched step, is caught by the script each time."""
    done = watching_itself("async_exception", tmp_path, "watched")
    assert done.status == 0, done.stderr
    assert done.stdout == "caught 30 of 30\n"


@pytest.mark.soak
def test_a_loss_rule_fires_in_a_script_that_observes_nothing(tmp_path: Path) -> None:
    """The only rule is about the loss, the script never calls `observe`: it fires, with the loss as its value."""
    rules = tmp_path / "loss.gradwatch.yaml"
    rules.write_text(
        "version: 1\nrules:\n  mine: {detect: {kind: above, of: loss, threshold: 10}, severity: critical}\n"
    )
    done = watched("loss_rule", tmp_path, options=("--rules", str(rules)))
    assert done.status == 0
    (fired,) = done.fired()
    assert fired.rule == "mine"
    assert fired.value > 800
    losses = [record.snapshot.scalars["loss"] for record in done.records()]
    assert len(losses) == 60
    assert f"loss {losses[-1]}"[:9] == done.stdout[:9]
