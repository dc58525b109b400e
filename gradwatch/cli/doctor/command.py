"""`gradwatch doctor`: will it work here? Everything is tried, nothing is assumed."""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gradwatch.cli.run import listen_address
from gradwatch.cli.run_argument import default_directory
from gradwatch.cli.terminal import paint
from gradwatch.cli.user_function import from_here, load
from gradwatch.cli.version import versions
from gradwatch.errors import RuleFileError

if TYPE_CHECKING:
    from gradwatch.cli.doctor.watching_cost import Factory
    from gradwatch.rules.rule_set import RuleSet

Status = Literal["ok", "note", "fail"]
FLOORS = {"python": (3, 10), "torch": (2, 6), "numpy": (1, 26), "pydantic": (2, 8)}


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: `section` and `name` say what was tried, `detail` what was seen, `advice` what to do."""

    section: str
    name: str
    status: Status
    detail: str
    advice: str = ""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe `gradwatch doctor` to argparse."""
    parser = commands.add_parser(
        "doctor",
        help="check versions, hooks, port, folder, rule file and cost on this machine",
        description="Check that gradwatch works on this machine: versions, port, run folder, rule file, torch's hooks "
        "in this version, and the cost of watching a model. Also shows the newest run. "
        "Exit 1 where something does not work.",
    )
    add = parser.add_argument
    add("--rules", default="default", metavar="FILE", help="rule file or pack (default: default)")
    add(
        "--model",
        metavar="MODULE:FACTORY",
        help="FACTORY() returns (model, loss); loss(model) is a scalar tensor",
    )
    add("--listen", default="127.0.0.1:29440", type=listen_address, metavar="HOST:PORT", help="port to check")
    add("--dir", metavar="DIR", help="folder to check (default: GRADWATCH_DIR, else ./gradwatch-runs)")
    add(
        "--seconds",
        type=float,
        default=4.0,
        metavar="N",
        help="duration of the overhead measurement; 0 leaves it out (default 4)",
    )
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Print the findings; 1 where something would not work."""
    found = []
    section = ""
    for check in examine(arguments):
        found.append(check)
        if not arguments.json:
            if check.section != section:
                section = check.section
                print(paint(section, "bold"))
            print(line(check), flush=True)
    failed = [check for check in found if check.status == "fail"]
    if arguments.json:
        print(json.dumps({"ok": not failed, "checks": [asdict(check) for check in found]}, indent=2))
    elif failed:
        print(f"\n{paint(f'{len(failed)} of {len(found)} checks failed', 'red')}")
    else:
        print(f"\n{paint('all well', 'green')}; next: gradwatch run -- python train.py")
    return int(bool(failed))


def line(check: Check) -> str:
    """One finding on one line, its advice on the next."""
    mark = {"ok": paint("✓", "green"), "note": paint("·", "yellow"), "fail": paint("✗", "red")}[check.status]
    advice = f"\n      {paint('→ ' + check.advice, 'dim')}" if check.advice else ""
    return f"  {mark} {check.name}: {check.detail}{advice}"


def examine(arguments: argparse.Namespace) -> Iterator[Check]:
    """Every check in turn, the cheap ones first; the cost only where the taps and the rules are fine."""
    yield from check_versions()
    yield check_switch()
    yield check_port(arguments.listen)
    directory = arguments.dir or default_directory()
    yield check_directory(directory)
    yield from check_newest_run(directory)
    ruleset, findings = check_rules(arguments.rules)
    yield from findings
    taps = list(check_taps())
    yield from taps
    if ruleset is not None and arguments.seconds > 0 and all(tap.status != "fail" for tap in taps):
        yield from check_cost(arguments.model, ruleset, arguments.seconds)


def check_versions() -> Iterator[Check]:
    """Versions against the floors of pyproject."""
    for name, version in versions().items():
        floor = FLOORS.get(name)
        if version == "not installed" and name != "gradwatch":
            yield Check("versions", name, "fail", version, f"pip install {name}")
        elif floor and numbers(version) < floor:
            wanted = ".".join(map(str, floor))
            yield Check("versions", name, "fail", version, f"gradwatch needs {name} >= {wanted}")
        else:
            yield Check("versions", name, "ok", "a checkout" if version == "not installed" else version)
    yield Check(
        "versions", "system", "ok", f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    )


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" is (2, 13, 0)."""
    parts = version.split("+")[0].split(".")
    return tuple(int(part) for part in parts[:3] if part.isdigit())


def check_switch() -> Check:
    """Check that GRADWATCH=0 does not turn everything off."""
    if os.environ.get("GRADWATCH") == "0":
        return Check("here", "switch", "fail", "GRADWATCH=0 turns gradwatch off", "unset GRADWATCH")
    return Check("here", "switch", "ok", "on (GRADWATCH is not 0)")


def check_port(listen: str) -> Check:
    """Check the port of the endpoint; a taken one is no failure, another is used."""
    from gradwatch.endpoint.address import parse_listen
    from gradwatch.endpoint.listening_port import listening_socket

    address = parse_listen(listen)
    try:
        with listening_socket(address) as listener:
            port = listener.getsockname()[1]
    except OSError as error:
        return Check(
            "here", "port", "fail", f"cannot listen on {address.host}: {error}", "give another --listen"
        )
    if address.port in (0, port):
        return Check("here", "port", "ok", f"{listen} is free")
    detail = f"{listen} is in use; a run would take a free one and write it to endpoint-rank0.json"
    return Check("here", "port", "note", detail, "see who has it: ss -ltnp")


def check_directory(path: str) -> Check:
    """Check that the journal can be written; the folder itself is made only by a run."""
    place = os.path.abspath(path)
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"gradwatch")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return Check("here", "run directory", "fail", f"{place}: {error.strerror}", "give another --dir")
    free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    return Check("here", "run directory", "ok", f"{place} can be written, {free / 2**30:.1f} GiB free")


def check_newest_run(path: str) -> Iterator[Check]:
    """Summary of the newest run, while it runs too: steps watched of steps taken, what was not seen."""
    from gradwatch.cli.doctor.last_run import newest_account

    found = newest_account(Path(path))
    if found is not None:
        name, lines, whole = found
        for line in lines:
            yield Check("newest run", name, "ok" if whole else "note", line)


def check_rules(source: str) -> tuple[RuleSet | None, list[Check]]:
    """The rules, if the file is valid, and what there is to say about it."""
    from gradwatch.incidents.bundle.snapshot_rules import refused_snapshots
    from gradwatch.rules.files import load_rules

    try:
        ruleset = load_rules(source)
    except RuleFileError as error:
        first = error.problems[0]
        place = f"{first.path}:{first.line}:{first.column}"
        detail = f"{len(error.problems)} problems; the first: {first.code} {first.message} at {place}"
        return None, [Check("rules", source, "fail", detail, f"gradwatch rules check {source}")]
    enabled = sum(rule.enabled for rule in ruleset.rules)
    checks = [Check("rules", source, "ok", f"{enabled} rules, digest {ruleset.digest[:12]}")]
    checks += [
        Check("rules", rule, "note", f"inactive: {reason}") for rule, reason in ruleset.inactive.items()
    ]
    checks += [
        Check("rules", one.rule, "fail", one.reason, "pip install 'gradwatch[bundle]'")
        for one in refused_snapshots(ruleset)
    ]
    return ruleset, checks


def check_taps() -> Iterator[Check]:
    """Every tap of PyTorch that gradwatch uses, tried."""
    try:
        from gradwatch.cli.doctor.torch_probes import probe_all
    except ImportError as error:
        yield Check("taps", "torch", "fail", f"cannot be imported: {error}", "pip install torch")
        return
    for name, (works, detail) in probe_all().items():
        yield Check("taps", name, "ok" if works else "fail", detail)


def check_cost(model: str | None, ruleset: RuleSet, seconds: float) -> Iterator[Check]:
    """Cost of a step with and without gradwatch, and the rules that match nothing in this model."""
    from gradwatch.cli.doctor.watching_cost import idle_rules, measure_cost, own_model

    factory = own_model if model is None else load_factory(model)
    for rule, reason in idle_rules(factory, ruleset).items():
        yield Check("rules on the model", rule, "note", f"inactive: {reason}")
    cost = measure_cost(factory, ruleset, seconds)
    detail = (
        f"{cost.ratio:+.1%} a step, give or take {cost.noise:.1%} "
        f"({1e3 * cost.added_seconds:+.2f} ms on {1e3 * cost.bare_seconds:.2f} ms; "
        f"{cost.parameters:,} parameters, median of {cost.pairs} interleaved pairs)"
    )
    yield Check("cost", model or "own model", "ok" if cost.ratio < 0.05 else "note", detail)


def load_factory(reference: str) -> Factory:
    """Load `module:factory`; the cwd is searched first, as by `python -m`."""
    with from_here():
        return load("--model", reference, "MODULE:FACTORY")
