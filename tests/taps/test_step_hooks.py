"""torch's global step hooks come and go without disturbing a step, whoever closes a watch, and wherever."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import gradwatch
from gradwatch.records.record import Record
from gradwatch.taps import step_hooks
from tests.session.test_watch import build, step
from tests.support.kept import Kept

WHERE = ["instance pre", "instance post", "global pre", "global post", "in the judge"]


class Closing(Kept):
    """A sink that closes the watch from inside its own step."""

    close_watch: Callable[[], None] = staticmethod(lambda: None)

    def write(self, record: Record) -> None:
        super().write(record)
        self.close_watch()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("where", "compiled"),
    [*((where, False) for where in WHERE), ("in the judge", True), ("global post", True)],
)
def test_close_inside_a_step_leaves_no_hook(where: str, compiled: bool) -> None:
    """The step in which the watch is closed runs to its end, and at the latest the next one takes our hooks away."""
    model, optimizer = build()
    sink = Closing()
    gw = gradwatch.watch(model, optimizer, sinks=[sink], rules="observe-only", strict=True)
    others = []

    def once(*_: object) -> None:
        gw.close()

    if where == "in the judge":
        sink.close_watch = gw.close
    elif where == "instance pre":
        others.append(optimizer.register_step_pre_hook(once))
    elif where == "instance post":
        others.append(optimizer.register_step_post_hook(once))
    elif where == "global pre":
        others.append(register_optimizer_step_pre_hook(once))
    else:
        others.append(register_optimizer_step_post_hook(once))
    neighbours: list[str] = []
    others.append(register_optimizer_step_pre_hook(lambda *_: neighbours.append("pre")))
    others.append(register_optimizer_step_post_hook(lambda *_: neighbours.append("post")))
    run = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
    try:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            weights = [param.detach().clone() for param in model.parameters()]
            run()
            assert not any(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    finally:
        for handle in others:
            handle.remove()
    assert neighbours == ["pre", "post"] * 2
    assert len(sink.records) == 1
    assert step_hooks.installed() == 0
    if compiled:  # of the step and of torch's own: what closing runs was 255 more
        assert torch._dynamo.utils.counters["frames"]["total"] < 20
    step(model, optimizer)


def test_a_watch_begun_inside_a_step_is_not_disturbed() -> None:
    """Another watch that starts while the last one's hooks are still leaving keeps them."""
    model, optimizer = build()
    other, its = build(1)
    sink = Kept()
    gw = gradwatch.watch(model, optimizer, sinks=[Kept()], rules="observe-only", strict=True)
    begun = []

    def swap_watches(*_: object) -> None:
        if not begun:
            gw.close()
            begun.append(gradwatch.watch(other, its, sinks=[sink], rules="observe-only", strict=True))

    handle = optimizer.register_step_pre_hook(swap_watches)
    step(model, optimizer)
    handle.remove()
    for _ in range(3):
        step(other, its)
    assert len(sink.records) == 3
    assert step_hooks.installed() == 2
    begun[0].close()
    assert step_hooks.installed() == 0


def test_a_listener_that_waits_for_nothing_is_not_called() -> None:
    """It is called around the steps while its container holds something, and while it listens."""
    model, optimizer = build()
    calls, only_if = list[str](), list[int]()
    remove = step_hooks.listen(
        lambda *_: calls.append("before"), lambda _: calls.append("after"), only_if=only_if
    )
    step(model, optimizer)
    assert calls == []
    only_if.append(1)
    step(model, optimizer)
    assert calls == ["before", "after"]
    remove()
    remove()
    step(model, optimizer)
    assert calls == ["before", "after"]
    assert step_hooks.installed() == 0
