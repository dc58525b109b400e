"""Looking at what a script has at hand leaves nothing behind in its frames."""

from __future__ import annotations

import gc
import sys
import weakref

from torch import nn

from gradwatch.localise.diagnosis.python_frames import locals_of


def test_what_was_looked_at_can_still_go() -> None:
    """A local that the function deletes is gone, and the others are what they were."""

    def train() -> list[bool]:  # without `assert`, of which pytest makes calls of `locals()`
        model, other = nn.Linear(2, 2), nn.ReLU()
        gone, kept = weakref.ref(model), id(other)
        found = [locals_of(sys._getframe())["model"] is model]
        del model
        gc.collect()
        return [*found, gone() is None, id(other) == kept, locals_of(sys._getframe())["other"] is other]

    assert train() == [True] * 4


def test_a_module_keeps_its_globals() -> None:
    """The locals of module-level code are its globals: they are shown, and never emptied."""
    space = {"see": locals_of, "frame": sys._getframe, "answer": 42}
    code = compile("found = see(frame())", "<script>", "exec")
    exec(code, space)
    assert space["found"]["answer"] == 42  # type: ignore[index]
    assert space["answer"] == 42


def test_a_dict_that_locals_gave_is_left_as_it_was() -> None:
    """`settings = locals()` at the top of a script's function keeps what it held, however often one looks."""

    def train(rate: float) -> tuple[dict[str, object], dict[str, object]]:
        settings = locals()
        model = nn.Linear(2, 2)
        del model
        seen = locals_of(sys._getframe())
        return settings, seen

    settings, _ = train(0.1)
    assert settings == {"rate": 0.1}
