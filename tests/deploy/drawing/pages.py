"""From a dashboard and a Prometheus to pictures: ask every query, bundle the components, let Chromium draw."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
from pathlib import Path
from typing import Any

from PIL import Image

from tests.deploy.test_dashboards import board, substituted
from tests.support.binaries import require
from tests.support.real_prometheus import Prometheus

HERE = Path(__file__).parent
WIDTH, ROW = 1400, 38  # pixels: of 24 columns, of one row of the grid (as in panels.jsx)
# The ESM builds import CommonJS packages as Node does, whose default export is then an object: no table is drawn.
ALIASES = [
    f"--alias:@grafana/{name}=./node_modules/@grafana/{name}/dist/cjs/index.cjs" for name in ("data", "ui")
]
LOADERS = [f"--loader:.{kind}=dataurl" for kind in ("svg", "png", "woff", "woff2", "ttf", "gif")]
PAGE = """<!doctype html><html><head><meta charset="utf-8"><link rel="stylesheet" href="panels.css"><style>
html,body{margin:8px;background:%s;font-family:Inter,sans-serif}</style></head><body><div id="root"></div>
<script>window.__grafana_public_path__="";window.DATA=%s</script><script src="panels.js"></script></body></html>"""


def bundle(build: Path) -> None:
    """Install the components into `build` where they are missing, and bundle panels.jsx there."""
    build.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "panels.jsx"):
        shutil.copy(HERE / name, build / name)
    if not (build / "node_modules/@grafana/ui").exists():
        print("installing @grafana/ui from the npm registry (600 MB)", flush=True)
        subprocess.run([require("npm"), "install", "--no-progress"], cwd=build, check=True)
    subprocess.run(
        [
            str(build / "node_modules/.bin/esbuild"),
            "panels.jsx",
            "--bundle",
            "--outfile=panels.js",
            '--define:process.env.NODE_ENV="production"',
            "--log-level=error",
            *ALIASES,
            *LOADERS,
        ],
        cwd=build,
        check=True,
    )


def answered(prometheus: Prometheus, name: str, run_id: str, seconds: float) -> list[dict[str, Any]]:
    """The panels of a dashboard with what Prometheus answers; `run_id` is what its variable is set to."""
    now = time.time()
    found = []
    for panel in board(name)["panels"]:
        results = []
        for target in panel.get("targets") or []:
            expr = target["expr"].replace("$run_id", run_id).replace("$__range", f"{seconds:.0f}s")
            expr = substituted(expr, name)
            asked: dict[str, Any] = {"query": expr}
            if target.get("instant"):
                path, asked["time"] = "query", now
            else:
                path = "query_range"
                asked |= {"start": now - seconds, "end": now, "step": max(1, round(seconds / 120))}
            answer = prometheus.get(f"/api/v1/{path}?{urllib.parse.urlencode(asked)}")["data"]["result"]
            results.append(
                {
                    "ref": target.get("refId", "A"),
                    "legend": target.get("legendFormat"),
                    "format": target.get("format"),
                    "result": answer,
                }
            )
        found.append({**panel, "results": results})
    return found


def drawn(build: Path, panels: list[dict[str, Any]], seconds: float, mode: str, out: Path) -> None:
    """One picture of all panels, and one of each in a folder beside it."""
    now = time.time()
    data = {"panels": panels, "from": now - seconds, "to": now, "width": WIDTH, "mode": mode}
    ink = {"dark": "#111217", "light": "#f4f5f5"}[mode]
    page = build / f"{out.stem}.html"
    page.write_text(PAGE % (ink, json.dumps(data).replace("</", "<\\/")))
    height = ROW * max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels) + 16
    done = subprocess.run(
        [
            require("chromium"),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--allow-file-access-from-files",
            "--enable-logging=stderr",
            f"--user-data-dir={build / 'chromium'}",
            f"--window-size={WIDTH + 16},{height}",
            "--virtual-time-budget=10000",
            f"--screenshot={out}",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    for line in done.stderr.splitlines():
        if "CONSOLE" in line:
            print(line[:300])
    if done.returncode or not out.exists():
        raise RuntimeError(f"Chromium drew nothing: {done.stderr[-2000:]}")
    cut(out, panels)


def cut(sheet: Path, panels: list[dict[str, Any]]) -> None:
    """A picture of each panel."""
    folder = sheet.with_suffix("")
    folder.mkdir(exist_ok=True)
    with Image.open(sheet) as picture:
        for panel in panels:
            if panel["type"] == "row":
                continue
            grid = panel["gridPos"]
            left, top = 8 + grid["x"] * WIDTH / 24, 8 + grid["y"] * ROW
            box = (left, top, left + grid["w"] * WIDTH / 24 - 8, top + grid["h"] * ROW - 8)
            name = "".join(letter if letter.isalnum() else "-" for letter in panel["title"].lower())
            picture.crop(tuple(round(each) for each in box)).save(folder / f"{panel['id']:02}-{name}.png")
