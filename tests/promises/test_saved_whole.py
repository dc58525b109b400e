"""What is pickled, saved, copied or looked at of a watched model is what it is without a watch, to the byte."""

from __future__ import annotations

import copy
import io
import os
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import gradwatch
from gradwatch.rules.files import parse_rules
from gradwatch.taps import module_calls
from tests.support.kept import Kept
from tests.support.one_rank import one_rank


class OwnState(nn.Module):
    """A model that says itself what is pickled of it: all it has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(x)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()


class OwnReduce(OwnState):
    """And one that says how it is made again."""

    def __reduce__(self) -> Any:
        return _again, (self.__dict__,)


def _again(state: dict[str, Any]) -> OwnReduce:
    found = OwnReduce.__new__(OwnReduce)
    found.__dict__.update(state)
    return found


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)))


def parametrized() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))


def compiled() -> nn.Module:
    made: nn.Module = torch.compile(plain(), backend="eager")  # type: ignore[assignment]
    return made


def replicated() -> nn.Module:
    return nn.parallel.DistributedDataParallel(plain())


TAPPED = """
version: 1
extends: [default]
modules: {{tap: {tap}, names: ["*"]}}
rules: {{tap: {{detect: {{kind: above, of: grad_output_norm, threshold: 1e6}}}}}}
"""
RULES = {
    "default": lambda: "default",
    "output": lambda: parse_rules(TAPPED.format(tap="output")),
    "full_backward": lambda: parse_rules(TAPPED.format(tap="full_backward")),
}
# weight_norm's parametrized class cannot be pickled by torch itself; a parametrized model is saved by its state.
BUILDS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "own-state": OwnState,
    "own-reduce": OwnReduce,
    "parametrized": parametrized,
    "compiled": compiled,
    "ddp": replicated,
}


class Pickled(pickle.Pickler):
    """Tensors by their shape alone: torch pickles their memory with its address."""

    def persistent_id(self, obj: Any) -> Any:
        return (type(obj).__name__, tuple(obj.shape)) if isinstance(obj, torch.Tensor) else None


def written(model: nn.Module) -> list[bytes]:
    """The bytes of all that a script may write of a model."""
    found = []
    saves: list[Callable[[Any], Any]] = [
        lambda file: torch.save(model, file),
        lambda file: torch.save(model.state_dict(), file),
        lambda file: Pickled(file, protocol=2).dump(model),
        lambda file: Pickled(file, protocol=5).dump(model),
        lambda file: torch.save(copy.deepcopy(model), file),
    ]
    for save in saves:
        file = io.BytesIO()
        try:
            save(file)
        except Exception as error:  # torch refuses; then it shall refuse alike
            file.write(f"{type(error)} {error}".encode())
        found.append(file.getvalue())
    return found


def trained(build: Callable[[], nn.Module], rules: Any) -> tuple[list[bytes], list[bytes], list[str]]:
    """What is written within and after a watch (None: no watch), and the hooks that are seen."""
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    gw = None if rules is None else gradwatch.watch(model, optimizer, rules=rules, sinks=[Kept()])
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4, requires_grad=True)).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    seen = [
        f"{name} {len(value)}"
        for module in (*model.modules(), *copy.deepcopy(model).modules())
        for name, value in sorted(vars(module).items())
        if name.endswith("hooks")
    ]
    during = written(model)
    if gw is not None:
        assert any(map(module_calls.noticed, model.modules()))
        gw.close()
        assert gw.health.errors() == {}
    return during, written(model), seen


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("build", BUILDS)
def test_files_are_byte_equal_to_bare(build: str, rules: str) -> None:
    """torch.save, every pickle protocol and deepcopy, within and after a watch, with taps that are asked for too."""
    if build == "compiled" and rules == "full_backward":
        pytest.skip("torch breaks the graph at a module that is tapped so")
    with one_rank():
        if build == "compiled":
            trained(
                BUILDS[build], None
            )  # dynamo marks the parameters of what it compiles first, and no others
        bare = trained(BUILDS[build], None)
        assert trained(BUILDS[build], RULES[rules]()) == bare


def test_a_file_saved_whole_loads_with_weights_only() -> None:
    """With the model's own classes allowed and nothing else."""
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with gradwatch.watch(model, optimizer, sinks=[Kept()]):
        model(torch.randn(8, 4)).mean().backward()
        optimizer.step()
        file = io.BytesIO()
        torch.save(model, file)
    file.seek(0)
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.ReLU, nn.Dropout]):
        loaded = torch.load(file, weights_only=True)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


class Raises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("the user's own")


def test_a_forward_that_raises_has_torchs_frames_and_the_users_alone(tmp_path: Path) -> None:
    """Nothing of gradwatch stands in its traceback, and a later call of the module is noticed as before."""
    model = nn.Sequential(nn.Linear(2, 2), Raises())
    with gradwatch.watch(model, sinks=[Kept()], run_dir=tmp_path):
        with pytest.raises(ValueError, match="own") as raised:
            model(torch.ones(1, 2))
        ours = os.path.dirname(gradwatch.__file__) + os.sep
        stood = [one.filename for one in traceback.extract_tb(raised.value.__traceback__)[1:]]
        assert [file for file in stood if file.startswith(ours)] == []


def test_kwargs_results_and_the_modules_own_hooks() -> None:
    """Listeners get what the forward got and made; what they return takes its place, before the module's own hooks."""
    seen: list[Any] = []

    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
            return x * by

    model = Scaled()
    model.register_forward_hook(lambda _, args, out: out + 1)
    ignore = module_calls.listen(
        model,
        lambda module, args, kwargs: seen.append(("before", args, dict(kwargs))) or (args[0] + 1,),
        lambda module, args, out: seen.append(("after", float(out))) or out * 10,
    )
    assert float(model(torch.tensor(1.0), by=2.0)) == 41.0
    assert seen == [("before", (torch.tensor(1.0),), {"by": 2.0}), ("after", 4.0)]
    assert model._call_impl.__func__ is vars(nn.Module)["_call_impl"]  # outside a call it is torch's
    assert not torch.nn.modules.module._has_any_global_hook()
    ignore()
    assert module_calls.noticed(model) is False


def test_only_classes_of_modules_with_listeners_are_touched() -> None:
    """Parts of a model are called as bare; when the last listener has gone every class is as it was found."""

    class Net(nn.Sequential):
        pass

    kinds = (nn.Module, nn.Sequential, nn.Linear, Net)
    found = [dict(vars(kind)) for kind in kinds]
    net, other, seen = Net(nn.Linear(2, 2)), Net(nn.Linear(2, 2)), []
    first = module_calls.listen(net, before=lambda *_: seen.append(1))  # type: ignore[arg-type]
    second = module_calls.listen(net, after=lambda *_: seen.append(2))
    assert [dict(vars(kind)) for kind in kinds[:3]] == found[:3]
    net(torch.ones(1, 2))
    other(torch.ones(1, 2))
    assert seen == [1, 2]
    first()
    net(torch.ones(1, 2))
    assert seen == [1, 2, 2]
    second()
    assert [dict(vars(kind)) for kind in kinds] == found


def test_a_class_pickled_by_value_is_torchs_own_where_it_is_read() -> None:
    """What joblib sends of a script's own class names nothing of gradwatch, and works without listeners."""
    cloudpickle = pytest.importorskip("cloudpickle")

    class Net(nn.Linear):
        pass

    ignore = module_calls.listen(Net(2, 2), before=lambda *_: None)
    sent = cloudpickle.dumps(Net)
    ignore()
    assert b"gradwatch" not in sent.replace(__file__.encode(), b"").replace(b"gradwatch_tests", b"")
    read = cloudpickle.loads(sent)
    assert read(2, 2)(torch.ones(1, 2)).shape == (1, 2)


def test_regions_with_hooks_of_the_users_own_compile_whole() -> None:
    """Dynamo inlines `_call_impl` of modules that have hooks: it goes through the lookup as through torch's own."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
            self.last.register_forward_hook(lambda _, args, out: out * 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.last(self.first(x))
            return made

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    net, x, seen = Net(), torch.randn(2, 3), []
    want = net(x)
    whole = torch.compile(net, backend="eager", fullgraph=True)
    ignore = module_calls.listen(whole, after=lambda *_: seen.append(1))  # type: ignore[arg-type]
    for _ in range(3):
        assert torch.equal(whole(x), want)
    assert len(seen) == 3
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    ignore()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
