"""Draw both dashboards: python -m tests.deploy.drawing FOLDER [--seconds N] [--build DIR] [--mode dark|light]."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.deploy.drawing.pages import answered, bundle, drawn
from tests.deploy.drawing.training import FLEET, end, fleet
from tests.deploy.servers import running, stack, wait_until


def main() -> None:
    """Start the stack and a fleet of jobs, wait, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=180.0, help="how long the jobs train")
    parser.add_argument("--build", type=Path, default=Path(tempfile.gettempdir()) / "gradwatch-panels")
    parser.add_argument("--mode", choices=("dark", "light"), nargs="*", default=["dark"])
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    bundle(chosen.build)
    with tempfile.TemporaryDirectory() as temporary:
        draw(Path(temporary), chosen)


def draw(folder: Path, chosen: argparse.Namespace) -> None:
    """The fleet trains; then every panel is drawn from what Prometheus has."""
    (folder / "runs").mkdir()
    serve = [sys.executable, "-m", "gradwatch", "serve", "--dir", str(folder / "runs")]
    with stack(folder, "default") as servers, fleet(folder, servers.targets) as jobs:
        listen = ["--listen", f"127.0.0.1:{servers.serve_port}", "--state", str(folder / "state")]
        with running([*serve, *listen], folder / "serve.log"):
            first = FLEET[0]
            ranks = [str(rank) for rank in range(first.ranks)]
            wait_until(lambda: servers.up(first.run_id) == ranks, f"{first.run_id} is scraped")
            began = time.monotonic()
            waiting = sorted((plan for plan in FLEET if plan.after is not None), key=lambda plan: plan.after)
            for plan in waiting:
                time.sleep(max(0.0, began + plan.after - time.monotonic()))
                end(folder, plan, jobs[plan.run_id])
                print(f"{plan.run_id} has ended", flush=True)
            time.sleep(max(0.0, began + chosen.seconds - time.monotonic()))
            for mode in chosen.mode:
                for name in ("run", "fleet"):
                    panels = answered(servers.prometheus, name, first.run_id, chosen.seconds)
                    sheet = chosen.folder / f"{name}-{mode}.png"
                    drawn(chosen.build, panels, chosen.seconds, mode, sheet)
                    print(sheet, flush=True)


if __name__ == "__main__":
    main()
