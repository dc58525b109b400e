"""`gradwatch run` in front of torchrun, with a rank that dies and an elastic restart."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

from gradwatch.journal import read_journal
from tests.support import warm
from tests.support.launch_cases import GRADWATCH

SCRIPT = Path(__file__).with_name("elastic.py")
NAMES = ("0.weight", "0.bias", "2.weight", "2.bias", "rank 0", "rank 1")


def test_an_elastic_restart_is_watched_anew(tmp_path: Path) -> None:
    """The second attempt meets again, both ranks skip the step that rank 1 poisoned, and each has its journal.

    Names lack the wrapper's prefix, and of each attempt rank 0 alone prints an account.
    """
    options = ["--dir", str(tmp_path / "runs"), "--run-id", "r", "--listen", "127.0.0.1:0"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = warm.run(
        [*GRADWATCH, "run", *options, "--", sys.executable, *torchrun, str(SCRIPT), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("gradwatch: ")]
    counts = [line.split(" steps watched")[0] for line in said if " steps watched" in line]
    # The first attempt's rank 0 may be ended by torchrun before it has printed its own: then the process above tells it
    # at the end, or that there was none.
    # Killed between its line and the note that it is printed, it is reported twice: rather than not at all.
    assert counts.count("gradwatch: 12 of 12") == 1, done.stderr
    assert set(counts) <= {"gradwatch: 12 of 12", "gradwatch: 3 of 3"}, done.stderr
    assert counts.count("gradwatch: 3 of 3") <= 2, done.stderr
    missing = sum("1 process that left no summary" in line for line in said)
    assert missing <= 2 - len(set(counts)), done.stderr
    homes = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    assert homes[0] == homes[1]
    assert homes[0]["attempt"] == 1
    assert all(math.isfinite(total) for total in homes[0]["weights"])
    journals = read_journal(tmp_path / "runs" / "r")
    # What a rank saw just before `os._exit` may not have reached its file.
    assert {(one.rank, one.attempt) for one in journals} >= {(0, 1), (1, 1)}
    for journal in journals:
        if journal.attempt == 1:
            records = [step.record for step in journal.records()]
            assert records[0].snapshot.sites.names == NAMES
            assert [one.snapshot.step for one in records if one.decision.skip] == [4]
            named = [
                (event.step, event.sites)
                for one in records
                for event in one.verdict.events
                if event.rule == "rank-outlier" and event.kind == "firing"
            ]
            assert named == [(10, ("rank 1",))]
