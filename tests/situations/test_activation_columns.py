"""Columns of inputs and outputs of modules in unusual models: values equal float64 by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.capture.columns.test_activation_reader import COLUMNS, check, of_column
from tests.situations.catalogue import SITUATIONS
from tests.situations.laws import seeded, watched
from tests.situations.training import STEPS, small
from tests.support.module_calls import ModuleCalls

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about what the situations do on purpose

CADENCES = (1, 3, 10)
RULES = 'version: 1\nmodules: {tap: output, names: ["*"]}\nrules:\n' + "".join(
    f"  {column}-{every}: {{detect: {{kind: above, of: {column}, threshold: -1e30}}, for: 1, every: {every}}}\n"
    for column in COLUMNS
    for every in CADENCES
)
NAMES = [
    *(name for name in SITUATIONS if name.startswith("zoo: ")),
    *(
        "in-place activations and outputs",
        "in-place operations on outputs",
        "one layer three times in a forward",
    ),
    *(
        "nested outputs, keywords only, ModuleList, `.forward()` directly",
        "packed sequences",
        "bf16 autocast",
    ),
    *("bf16 parameters", "float64 parameters", "complex parameters", "LSTM, MultiheadAttention"),
    *("checkpoint, non-reentrant", "checkpoint, reentrant", "hooks of the user's", "sparse embedding"),
    *("accumulation over 3 micro-batches", "parametrizations", "`functional_call`"),
]


@pytest.mark.parametrize("name", NAMES)
def test_values_are_exact_and_judged_when_due(name: str) -> None:
    """Ten columns at three cadences beside each other; modules that are called at each step are judged in turn."""
    with small():
        training = seeded(SITUATIONS[name].make)
    calls = ModuleCalls(training.models)
    with watched(training, RULES, training.optimizers) as sink:
        for number in range(STEPS):
            calls.begin()
            training.step(number)
    assert len(sink.records) == STEPS
    judged: dict[tuple[str, int], dict[str, list[int]]] = {}
    for step, record in enumerate(sink.records):
        for column in COLUMNS:
            side, statistic = column.split("_", 1)
            now = (calls.inputs if side == "input" else calls.outputs)[step]
            found = of_column(record, column)
            assert found.keys() == now.keys(), (step, column)
            check(found, now, statistic)
            for every in CADENCES:
                mask = record.verdict.breaching.get(f"{column}-{every}", ())
                for k in np.flatnonzero(mask):
                    steps = judged.setdefault((column, every), {})
                    steps.setdefault(record.snapshot.sites.names[k], []).append(step)
    for (column, every), modules in judged.items():
        always = {
            name
            for name in modules
            if all(name in now for now in (calls.inputs if "input" in column else calls.outputs))
        }
        for name in always:
            assert set(np.diff(modules[name])) <= {every}, (column, every, name)
            assert len(modules[name]) >= STEPS // every
