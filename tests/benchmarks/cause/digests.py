"""A fault trained with and without `localise`: the weights and the generator have to end the same, bit for bit."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.benchmarks.cause.fault import Fault
from tests.support import warm
from tests.support.launch_cases import GRADWATCH

RULES = """version: 1
rules:
  non-finite:
    detect: {kind: nonfinite, of: norm}
    do: [skip_step, LOCALISE]
"""
FIRST = """from torch.nn.modules.module import register_module_parameter_registration_hook as _listen
_params = []
_listen(lambda module, name, param: _params.append(param))
"""
LAST = """
import hashlib
_state = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
for _one in _params:
    _state.update(_one.detach().numpy().tobytes())
print("digest", _state.hexdigest())
"""


def digests(fault: Fault) -> tuple[str, str]:
    """What the script ends with: where each step at fault is only skipped, and where its cause is told too."""
    return _digest(fault, ""), _digest(fault, "localise: {by: replay}")


def _digest(fault: Fault, localise: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        script, rules = Path(folder) / "train.py", Path(folder) / "rules.yaml"
        script.write_text(FIRST + fault.source + LAST)
        rules.write_text(RULES.replace(", LOCALISE", f", {localise}" if localise else ""))
        command = [*GRADWATCH, "run", "--rules", str(rules), "--", sys.executable, str(script)]
        done = warm.run(command, folder)
    if done.returncode:
        raise RuntimeError(f"{fault.name} failed:\n{done.stderr}")
    fired = "gradwatch firing rule=non-finite" in done.stderr
    if (fired and bool(localise)) is not ("gradwatch cause" in done.stderr):
        raise RuntimeError(f"{fault.name}: localise={localise!r}, and the log says\n{done.stderr}")
    return next(line for line in done.stdout.splitlines() if line.startswith("digest"))
