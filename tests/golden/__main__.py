"""Do two checkouts give the same Records? `python -m tests.golden OTHER [AREA ...] [--repeat]`.

OTHER is the folder of another checkout, e.g. made by `git worktree add OTHER COMMIT`; each runs its own tests with its
own code, in turns. Everything of a Record counts but time and cost. `--repeat`: each runs twice, and a situation whose
Records are not the same in both runs of one checkout (threads, clocks) is left out, and named.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.golden.situations import areas

ROOT = Path(__file__).resolve().parents[2]
SHOWN = 10


def main() -> int:
    """Exit status 1 where a Record differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("other", type=Path)
    parser.add_argument("areas", nargs="*")
    parser.add_argument("--repeat", action="store_true")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    chosen = [name for name, _ in areas() if not asked.areas or name in asked.areas]
    if asked.into is not None:
        take(asked.into, chosen)
        return 0
    with tempfile.TemporaryDirectory(prefix="gradwatch-golden-") as scratch:
        return compare(Path(scratch), asked.other.resolve(), chosen, 1 + asked.repeat)


def take(folder: Path, chosen: list[str]) -> None:
    """Write the Records of these areas down, with the code of this checkout."""
    for name, records in areas():
        if name in chosen:
            records(folder / name)


def compare(scratch: Path, other: Path, chosen: list[str], times: int) -> int:
    """Run both checkouts area by area; how many differ, as an exit status."""
    differing = same = 0
    for area in chosen:
        runs = [run(checkout, scratch / str(k), area) for k in range(times) for checkout in (other, ROOT)]
        old, new = runs[:2]
        unsteady = {
            name for k in (0, 1) for one in runs[k::2] for name in one if one[name] != runs[k].get(name)
        }
        names = sorted((old.keys() | new.keys()) - unsteady)
        bad = [name for name in names if old.get(name) != new.get(name)]
        same, differing = same + len(names) - len(bad), differing + len(bad)
        left_out = (
            f", {len(unsteady)} differ from run to run: {', '.join(sorted(unsteady))}" if unsteady else ""
        )
        print(f"{area}: {len(names) - len(bad)} of {len(names)} situations the same{left_out}", flush=True)
        for name in bad[:SHOWN]:
            print(f"  {name}: {first_difference(old.get(name, []), new.get(name, []))}")
    print(f"{same} situations the same, {differing} not")
    return min(1, differing + (not same))


def run(checkout: Path, folder: Path, area: str) -> dict[str, list[str]]:
    """The lines of each situation of an area, as this checkout writes them."""
    into = folder / checkout.name / ("new" if checkout == ROOT else "old")
    command = [sys.executable, "-m", "tests.golden", ".", area, "--into", str(into)]
    environ = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, cwd=checkout, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{checkout}, {area}: {done.stderr[-2000:]}")
    return {
        path.stem: path.read_text(encoding="utf-8").splitlines()
        for path in sorted((into / area).glob("*.jsonl"))
    }


def first_difference(old: list[str], new: list[str]) -> str:
    """Which Record differs first, and in what."""
    for number, (one, other) in enumerate(zip(old, new, strict=False)):
        if one != other:
            return f"Record {number}: {_difference('', json.loads(one), json.loads(other))}"
    return f"{len(old)} Records, then {len(new)}"


def _difference(where: str, old: object, new: object) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                return _difference(f"{where}.{key}", old.get(key), new.get(key))
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (one, other) in enumerate(zip(old, new, strict=True)):
            if one != other:
                return _difference(f"{where}[{number}]", one, other)
    return f"{where.lstrip('.')}: {old!r:.200} → {new!r:.200}"


if __name__ == "__main__":
    sys.exit(main())
