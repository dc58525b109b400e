"""Looking at what a script has at hand leaves nothing behind in its frames."""

from __future__ import annotations

import gc
import sys
import weakref

from torch import nn

from gradwatch.localise.frames import locals_of


def test_what_was_looked_at_can_still_go() -> None:
    """A local that the function deletes is gone, and the others are what they were."""
    model, other = nn.Linear(2, 2), nn.ReLU()
    gone, kept = weakref.ref(model), id(other)
    assert locals_of(sys._getframe())["model"] is model
    del model
    gc.collect()
    assert gone() is None
    assert id(other) == kept
    assert locals_of(sys._getframe())["other"] is other


def test_a_module_keeps_its_globals() -> None:
    """The locals of module-level code are its globals: they are shown, and never emptied."""
    space = {"see": locals_of, "frame": sys._getframe, "answer": 42}
    code = compile("found = see(frame())", "<script>", "exec")
    exec(code, space)
    assert space["found"]["answer"] == 42  # type: ignore[index]
    assert space["answer"] == 42
