"""The Grafana dashboards, written with Grafana's own SDK: python deploy/grafana/generate.py [FOLDER]

Needs grafana-foundation-sdk (a development dependency, see pyproject.toml); what it writes is committed and shipped,
and a test regenerates it. Every query is run against a real Prometheus by tests/deploy/test_dashboards.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fleet import fleet_dashboard
from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from run import ANNOTATIONS, run_dashboard


def document(made: Dashboard) -> str:
    """JSON, the same bytes every time. What an annotation asks Prometheus is not in the SDK's schema."""
    found: dict[str, Any] = json.loads(JSONEncoder(sort_keys=True).encode(made.build()))
    for annotation in found["annotations"].get("list", []):
        if annotation["name"] in ANNOTATIONS:
            expr, title, text = ANNOTATIONS[annotation["name"]]
            annotation |= {"expr": expr, "titleFormat": title, "textFormat": text, "step": "15s"}
            if annotation["name"] == "Run start":
                annotation["useValueForTime"] = "on"
    return json.dumps(found, indent=1, sort_keys=True) + "\n"


def dashboards() -> dict[str, str]:
    """File name to content."""
    return {"run.json": document(run_dashboard()), "fleet.json": document(fleet_dashboard())}


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "dashboards"
    folder.mkdir(exist_ok=True)
    for name, content in dashboards().items():
        (folder / name).write_text(content, encoding="utf-8")
        print(folder / name)
