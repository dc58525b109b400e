"""A rule file that is replaced again and again while a script trains: each is taken up whole, or refused whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gradwatch.launch import rules_reload
from gradwatch.launch.rules_reload import RulesReload
from gradwatch.rules.files import load_rules
from gradwatch.session.settings import Settings
from gradwatch.session.watch_function import watch_optimizers

RULES = "version: 1\nrules:\n  NAME: {detect: {kind: above, of: total_norm, threshold: LIMIT}}\n"
WRONG = (
    "version: 1\nrules: {bad: {detect: {kind: nan}}}\n",
    "version: 1\nrules: [",
    "",
    "\x00",
    "version: 2\n",
)


@pytest.mark.parametrize("count", [20, pytest.param(1_000, marks=pytest.mark.soak)])
@pytest.mark.timeout(3600)
def test_rules_are_taken_up_whole_or_not_at_all(
    count: int,
    tmp_path: object,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """P29: every other file is wrong; the rules in force are always those of the last right one, and steps go on."""
    file = tmp_path / "rules.yaml"  # type: ignore[operator]
    file.write_text(RULES.replace("NAME", "first").replace("LIMIT", "1"))
    monkeypatch.chdir(tmp_path)  # type: ignore[arg-type]
    monkeypatch.setenv("GRADWATCH_RULES", str(file))
    monkeypatch.setenv("GRADWATCH_DIR", str(tmp_path))
    monkeypatch.setenv("GRADWATCH_LISTEN", "127.0.0.1:0")
    monkeypatch.setattr(rules_reload, "LOOK_SECONDS", 0.0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    session = watch_optimizers([model], [optimizer], [])
    reload = RulesReload(session, str(file))
    taken = refused = 0
    try:
        for at in range(count):
            right = at % 2 == 0
            text = (
                RULES.replace("NAME", f"r{at}").replace("LIMIT", str(1 + at)) if right else WRONG[at // 2 % 5]
            )
            (tmp_path / "next").write_text(text)  # type: ignore[operator]
            (tmp_path / "next").replace(file)  # type: ignore[operator]
            found = reload.new_rules()
            while found is None and (right or reload.session.health.last_reload_successful):
                found = reload.new_rules()
            if found is not None:
                assert reload.take_up(found) is not None
                taken += 1
            refused += not right
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            assert [rule.id for rule in reload.session.ruleset.rules] == [f"r{at - at % 2}"]
            assert reload.session.health.last_reload_successful is right
            assert (
                reload.session.ruleset.digest
                == load_rules(
                    Settings.resolve().rules if right else str(_right(tmp_path, at - 1)),
                    run=session.run.run_id,
                ).digest
            )
    finally:
        reload.session.close()
    assert (taken, refused) == ((count + 1) // 2, count // 2)
    record_property("seen", f"{taken} taken up, {refused} refused")


def _right(folder: object, at: int) -> object:
    """The last right file, written anew."""
    path = folder / "right.yaml"  # type: ignore[operator]
    path.write_text(RULES.replace("NAME", f"r{at}").replace("LIMIT", str(1 + at)))
    return path
