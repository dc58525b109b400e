"""`gradwatch deploy export DIR`: the monitoring stack for a rule file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from gradwatch.cli.terminal import paint
from gradwatch.errors import GradwatchError

EXPORT = """Write the monitoring stack into DIR: Prometheus with alerts made from the rule file, Alertmanager,
Grafana dashboards, Compose, Kubernetes, Slurm, systemd, and a runbook for every alert. Run it again after
changing the rules; files whose content stays the same are not touched."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe `gradwatch deploy` to argparse."""
    parser = commands.add_parser("deploy", help="Prometheus, Alertmanager and Grafana for a rule file")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    export = actions.add_parser("export", help="write the stack into a folder", description=EXPORT)
    export.add_argument("directory", metavar="DIR", type=Path, help="made if it does not exist")
    export.add_argument("--rules", metavar="FILE", default="default", help="rule file, or a shipped pack")
    export.add_argument(
        "--scrape-interval", metavar="SECONDS", type=int, default=15, help="between scrapes (default: 15)"
    )
    export.add_argument("--serve-url", metavar="URL", help="where people reach `gradwatch serve` (runbooks)")
    export.add_argument("--grafana-url", metavar="URL", help="where people reach Grafana")
    export.add_argument("--alertmanager", metavar="HOST:PORT", help="where Prometheus reaches Alertmanager")
    export.add_argument("--serve", metavar="HOST:PORT", help="where Prometheus reaches `gradwatch serve`")
    export.add_argument("--targets", metavar="GLOB", help="files that name training processes (file_sd)")
    export.add_argument("--force", action="store_true", help="replace files that differ")
    export.add_argument("--json", action="store_true", help="list the files written as JSON")
    export.set_defaults(handler=handle_export)


def handle_export(arguments: argparse.Namespace) -> int:
    """Write the stack; 0. Raises GradwatchError for a wrong option or rule file, and files that are in the way."""
    from gradwatch.monitoring import Options, export
    from gradwatch.monitoring.prometheus_rule_files import Links, Places
    from gradwatch.monitoring.scrape_interval import Pace
    from gradwatch.rules.files import load_rules

    try:
        links = Links(arguments.serve_url or Links().serve, arguments.grafana_url or Links().grafana)
        pace = Pace(arguments.scrape_interval)
        places = Places(
            arguments.alertmanager or Places().alertmanager,
            arguments.serve or Places().serve,
            arguments.targets or Places().targets,
        )
    except ValueError as error:
        raise GradwatchError(str(error)) from None
    options = Options(load_rules(arguments.rules), Path(arguments.rules).name, pace, links, places)
    try:
        written = export(arguments.directory, options, overwrite=arguments.force)
    except OSError as error:
        raise GradwatchError(
            f"cannot write {error.filename or arguments.directory}: {error.strerror}"
        ) from error
    if arguments.json:
        print(json.dumps({"directory": str(arguments.directory), "written": [str(path) for path in written]}))
        return 0
    for path in written:
        print(path)
    print(paint(_next(arguments.directory, len(written)), "bold"), file=sys.stderr)
    return 0


def _next(directory: Path, count: int) -> str:
    if not count:
        return "everything there is up to date"
    return f"{count} files written; next: promtool check config {directory}/prometheus/prometheus.yml"
