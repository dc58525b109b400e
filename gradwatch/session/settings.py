"""Sources of a setting: an explicit argument, then `GRADWATCH_*`, then the rule file.

`gradwatch run` starts by this module: what only a watch needs (numpy, rule sets) is imported where it is used.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from gradwatch.errors import AttachError

if TYPE_CHECKING:
    from gradwatch.records.run_info import RuleInfo, RunInfo
    from gradwatch.rules.rule_set import RuleSet, SinkSpec

DEFAULT_SINKS = ("prometheus", "journal", "log")
DEFAULT_DIR = "gradwatch-runs"
LAUNCHED_IN = "GRADWATCH_LAUNCH_DIR"
"""The working folder of `gradwatch run`: there its runs are looked for, wherever the script has gone since."""
ROOT = "GRADWATCH_RUN_ROOT"
"""The folder of all runs that `gradwatch run` has found to be meant by options, environment and rule file."""
IN_SELFTEST = "GRADWATCH_SELFTEST"
"""Set where `gradwatch selftest` injects faults: its plan, as JSON."""
TELLER = "GRADWATCH_TELLER"
"""`PID:RANK:HOST:SECONDS` of the process of a launch whose account, at its end, includes those of its children,
and when it began (Unix seconds)."""


def enabled(env: Mapping[str, str] = os.environ) -> bool:
    """False where `GRADWATCH=0` turns everything off."""
    return env.get("GRADWATCH", "1") != "0"


def quiet_asked() -> bool:
    """True if `--quiet` (GRADWATCH_QUIET) asks for no account at the end."""
    return os.environ.get("GRADWATCH_QUIET", "0") not in ("", "0")


def told_by(env: Mapping[str, str] = os.environ) -> int:
    """The process whose printed account includes this one's, by its id; 0 where this one prints its own.

    One of several ranks (WORLD_SIZE) prints its own, and that of what it starts, which has its RANK.
    """
    pid, _, rest = env.get(TELLER, "").partition(":")
    if not pid.isdigit() or int(pid) == os.getpid():
        return 0
    import platform  # 2 ms, which `gradwatch run` itself does without

    rank, _, rest = rest.partition(":")
    if rest.partition(":")[0] != platform.node():
        return 0
    of_another_rank = env.get("RANK", "") != rank and _number(env, "WORLD_SIZE", 1) > 1
    return 0 if of_another_rank else int(pid)


def launch(env: Mapping[str, str] = os.environ) -> str:
    """A name that all processes share whose accounts are printed as one; "" where none but this one is known."""
    teller = env.get(TELLER, "")
    return teller if told_by(env) or teller.partition(":")[0] == str(os.getpid()) else ""


class Settings(NamedTuple):
    """The resolved settings of one watch; None = not set.

    `in_selftest`: faults are injected, so nothing is sent to people, services or Prometheus.
    """

    rules: str
    listen: str | None
    run_dir: str | None
    run_id: str | None
    strict: bool
    file_sd: str | None = None
    strict_rules: bool = False
    launched_in: str = ""
    in_selftest: bool = False

    @classmethod
    def resolve(
        cls,
        rules: str | None = None,
        listen: str | None = None,
        run_dir: str | None = None,
        run_id: str | None = None,
        strict: bool = False,
        strict_rules: bool = False,
        env: Mapping[str, str] = os.environ,
    ) -> Settings:
        """Explicit argument over environment; what neither says is left to the rule file."""
        return cls(
            rules=rules or env.get("GRADWATCH_RULES") or "default",
            listen=listen or env.get("GRADWATCH_LISTEN") or None,
            run_dir=run_dir or env.get("GRADWATCH_DIR") or None,
            run_id=run_id or env.get("GRADWATCH_RUN_ID") or None,
            strict=strict or _switched_on(env, "GRADWATCH_STRICT"),
            file_sd=env.get("GRADWATCH_FILE_SD") or None,
            strict_rules=strict_rules or _switched_on(env, "GRADWATCH_STRICT_RULES"),
            launched_in=env.get(LAUNCHED_IN, ""),
            in_selftest=IN_SELFTEST in env,
        )

    def run_root(self, sinks: Sequence[SinkSpec] | None) -> str:
        """The absolute path of the folder that receives one folder per run; `sinks` are those of the rule file."""
        if self.run_dir:
            return os.path.abspath(self.run_dir)
        given = next((spec.options.get("dir") for spec in sinks or () if spec.kind == "journal"), None)
        return os.path.abspath(os.path.join(self.launched_in, str(given or DEFAULT_DIR)))


def check_directory(path: str, writable: bool = False) -> None:
    """Raise `AttachError` if the path of the run folder holds something else, or, with `writable`, refuses files."""
    place = os.path.abspath(path)
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    if not os.path.isdir(place):
        raise AttachError(
            f"the run folder cannot be made: {place} is not a folder; give another one (--dir, run_dir)"
        )
    if writable:  # tried, for permissions do not tell of a read-only or a virtual file system
        import tempfile

        try:
            os.rmdir(tempfile.mkdtemp(prefix=".gradwatch-", dir=place))
        except OSError as error:
            raise AttachError(
                f"the run folder cannot be made: {path}: {error.strerror}; give another one (--dir, run_dir)"
            ) from None


def _switched_on(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "0") not in ("", "0")


def sink_specs(ruleset: RuleSet, settings: Settings) -> tuple[SinkSpec, ...]:
    """The sinks to open: the file's or the default three, with the listen address put in."""
    from gradwatch.rules.rule_set import SinkSpec

    specs = tuple(map(SinkSpec, DEFAULT_SINKS)) if ruleset.sinks is None else ruleset.sinks
    if settings.in_selftest:
        specs = tuple(spec for spec in specs if spec.kind in DEFAULT_SINKS)
    chosen = []
    for spec in specs:
        options: dict[str, Any] = dict(spec.options)
        if settings.in_selftest:
            options.pop("file_sd", None)  # Prometheus would find the process, and raise alerts
        if spec.kind == "journal":
            options.pop("dir", None)  # it names the folder of all runs, and is part of RunInfo.directory
        if spec.kind == "prometheus" and settings.listen:
            options["listen"] = settings.listen
        if spec.kind == "prometheus" and settings.file_sd and not settings.in_selftest:
            options["file_sd"] = os.path.abspath(settings.file_sd)
        chosen.append(SinkSpec(spec.kind, options))
    return tuple(chosen)


def run_info(ruleset: RuleSet, rules: tuple[RuleInfo, ...], settings: Settings) -> RunInfo:
    """The identity of this run and rank, from the launcher's environment (torchrun sets RANK and so on)."""
    import platform

    from gradwatch.records.run_info import RunInfo

    env = os.environ
    run_id = _as_folder(settings.run_id or _shared_id(env)) or _fresh_id()
    return RunInfo(
        run_id=run_id,
        directory=os.path.join(settings.run_root(ruleset.sinks), run_id),
        rank=_number(env, "RANK", 0),
        local_rank=_number(env, "LOCAL_RANK", 0),
        world_size=_number(env, "WORLD_SIZE", 1),
        attempt=_number(env, "TORCHELASTIC_RESTART_COUNT", 0),
        pid=os.getpid(),
        host=platform.node(),
        start_time=time.time(),
        script=sys.argv[0] if sys.argv else "",
        versions={
            "gradwatch": package_version(),
            "torch": _version("torch"),
            "python": platform.python_version(),
        },
        rules=rules,
        rules_digest=ruleset.digest,
        told_by=told_by(env),
        launch=launch(env),
    )


def package_version() -> str:
    """The installed version of gradwatch, "0+unknown" in a bare checkout."""
    return _version("gradwatch")


@cache
def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "0+unknown"


def _shared_id(env: Mapping[str, str]) -> str:
    """Identity of the run that all ranks of one torchrun share; "none" is torchrun's default."""
    elastic = env.get("TORCHELASTIC_RUN_ID", "")
    if elastic and elastic != "none" and "WORLD_SIZE" in env:
        return elastic
    return ""


def _as_folder(name: str) -> str:
    """A run id that names a folder inside the run directory and nothing else."""
    safe = "".join(char if char.isascii() and (char.isalnum() or char in "-_.") else "-" for char in name)
    return safe[:128].lstrip(".")


def _fresh_id() -> str:
    # From the operating system's randomness: the training's own generators must not move.
    return time.strftime("%Y%m%d-%H%M%S") + "-" + os.urandom(3).hex()


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(env.get(name, default))
    except ValueError:
        return default
