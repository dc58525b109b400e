"""`gradwatch deploy export`: the monitoring stack as a folder, part made from a rule file, part as shipped."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import gradwatch
from gradwatch.errors import GradwatchError
from gradwatch.monitoring.prometheus_rule_files import (
    Links,
    Places,
    alerts_text,
    prometheus_rule,
    recordings_text,
    server_config,
)
from gradwatch.monitoring.scrape_interval import Pace
from gradwatch.monitoring.yaml_text import to_yaml
from gradwatch.rules.rule_set import RuleSet
from gradwatch.runtime.atomic_files import not_replaceable, write_named
from gradwatch.sinks.prometheus.metric_catalogue import SERVE_METRICS, documentation

MADE = "Made by `gradwatch deploy export`; change the rule file and export again, not this file."
_NOT_SHIPPED = ("constraints.txt", "*.py")
"""In the folder for those who work on gradwatch itself."""
_ONLY_BY_DEFAULT = frozenset({"prometheus/alerts_test.yml"})
"""Says what the shipped alerts do, so it goes with them alone."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a stack: `ruleset` judges the runs, `source` is its name (for the files' headers)."""

    ruleset: RuleSet
    source: str = "default"
    pace: Pace = field(default_factory=Pace)
    links: Links = field(default_factory=Links)
    places: Places = field(default_factory=Places)

    @property
    def are_defaults(self) -> bool:
        """True if the files come out as shipped."""
        return self == Options(self.ruleset)


def made(options: Options) -> Mapping[str, Callable[[], str]]:
    """The files that are generated, by path, and what makes each."""
    ruleset, pace, links = options.ruleset, options.pace, options.links
    comment = f"{MADE}\nRules: {options.source}."
    return {
        "metrics.md": lambda: (
            f"# Metrics\n\n<!-- {MADE} -->\n\n## Of a training process\n\n{documentation()}\n"
            f"## Of `gradwatch serve`\n\n{documentation(SERVE_METRICS)}"
        ),
        "prometheus/prometheus.yml": lambda: to_yaml(server_config(pace, options.places), MADE),
        "prometheus/rules/alerts.yml": lambda: alerts_text(ruleset, pace, links, comment),
        "prometheus/rules/recording.yml": lambda: recordings_text(pace, MADE),
        "k8s/prometheusrule.yaml": lambda: to_yaml(prometheus_rule(ruleset, pace, links), comment),
    }


def files(options: Options) -> dict[str, str]:
    """Every file of the stack, path to content, generated ones over shipped ones; sorted by path."""
    shipped = stack_directory()
    found = {}
    for path in sorted(shipped.rglob("*")):
        name = path.relative_to(shipped).as_posix()
        left_out = any(map(path.match, _NOT_SHIPPED)) or (
            name in _ONLY_BY_DEFAULT and not options.are_defaults
        )
        if path.is_file() and not left_out and "__pycache__" not in path.parts:
            found[name] = path.read_text(encoding="utf-8")
    found |= {name: make() for name, make in made(options).items()}
    return dict(sorted(found.items()))


def stack_directory() -> Path:
    """The folder of what ships as it is: inside the wheel, or `deploy/` of a checkout."""
    package = Path(gradwatch.__file__).parent
    inside = package / "_deploy"
    return inside if inside.is_dir() else package.parent / "deploy"


def export(directory: Path, options: Options, *, overwrite: bool = False) -> list[Path]:
    """Write the stack and return the paths written; files that are there with the same content stay untouched.

    Raises GradwatchError, having written nothing, where a file of other content is in the way and `overwrite`
    is not set, or something that is no regular file; OSError where the disk refuses.
    """
    wanted = {directory / name: content for name, content in files(options).items()}
    differing = [path for path, content in wanted.items() if _content(path) != content]
    in_the_way = [path for path in differing if os.path.lexists(path)]
    if in_the_way and not overwrite:
        listed = "".join(f"\n  {path}" for path in in_the_way)
        raise GradwatchError(
            f"these files exist and differ; nothing was written (--force replaces them):{listed}"
        )
    refused = "".join(f"\n  {path}: {reason}" for path in in_the_way if (reason := not_replaceable(path)))
    if refused:
        raise GradwatchError(f"these cannot be replaced; nothing was written:{refused}")
    for path in differing:
        _write(path, wanted[path])
    return differing


def _content(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None  # a FIFO would be waited for
    except (OSError, UnicodeDecodeError):
        return None


def _write(path: Path, content: str) -> None:
    """Whole or not at all: a Prometheus that reloads meanwhile must not read half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_named(path, content, 0o666)
