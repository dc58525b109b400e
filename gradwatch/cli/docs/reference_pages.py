"""The reference, made from what checks rule files, reads command lines and serves metrics.

`python -m gradwatch.cli.docs.reference_pages` writes it to gradwatch/docs/reference; a test holds that nothing changes.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import gradwatch
from gradwatch.cli.docs.markdown_text import escaped, linked, prose, table
from gradwatch.cli.entry_point import COMMANDS, build_parser
from gradwatch.cli.rules.reference import entries_of, sections
from gradwatch.detectors import DETECTORS, Detector
from gradwatch.rules.files import load_rules, parse_rules
from gradwatch.rules.packs import pack_names, pack_path
from gradwatch.rules.problem_codes import CODES
from gradwatch.rules.rule_set import Rule
from gradwatch.sinks.alert_names import alert_name
from gradwatch.sinks.prometheus.metric_catalogue import METRICS, SERVE_METRICS, documentation

FOLDER = Path(gradwatch.__file__).parent / "docs" / "reference"
MADE = "<!-- Made by python -m gradwatch.cli.docs.reference_pages; change the code, not this file. -->"
_KEY_HEADER = ("key", "value", "default", "what it is")
_RULE_HEADER = ("pack", "rule", "of", "for", "severity", "does")
_EXAMPLE_VALUES: Mapping[str, Any] = {"threshold": 1000.0, "of": "norm"}
_INTEGRATIONS = ("lightning", "pytorch_lightning", "transformers", "accelerate", "ignite")


def pages() -> dict[str, str]:
    """The text of every page, by its path below the folder of the reference."""
    kinds = {f"kinds/{kind}.md": kind_page(kind) for kind in entries_of("kinds")}
    found = {
        "rule-file.md": rule_file_page(),
        "kinds.md": kinds_page(),
        **kinds,
        "actions.md": entries_page("actions", "Actions", "What a rule may do, under `do:`."),
        "policies.md": entries_page("policies", "Clip policies", "Methods of `clip:`."),
        "sinks.md": entries_page("sinks", "Sinks", "Where Records go, under `sinks:`."),
        "packs.md": packs_page(),
        "problems.md": problems_page(),
        "commands.md": commands_page(),
        "metrics.md": metrics_page(),
        "python.md": python_page(),
    }
    return {path: f"{MADE}\n\n{text.rstrip()}\n" for path, text in found.items()}


# -- rules ---------------------------------------------------------------------------------------------------

_RULE_FILE = """\
# Keys of a rule file

What may stand where, besides what belongs to a [kind](kinds.md) (`detect:`), an [action](actions.md) (`do:`), a
[clip policy](policies.md) or a [sink](sinks.md). A key that is left out has no effect, or the default that is named;
defaults of `for`, `warmup` and `half_life` are those of the kind. `gradwatch rules check FILE` reports everything that
is wrong, and `gradwatch rules list --rules FILE` shows all rules as they are in force.

## What `extends:` merges and what it replaces

{merged}

A parameter may match several groups. The first is its label, in metrics and logs; a rule with `groups:` judges every
parameter that matches one of them; of the groups that `clip:` names, the first that matches a parameter clips it.
First is what stands first under `groups:` of the file, whatever the order under `clip: groups:`; groups of a later
file stand before those of the files that it extends. Give an exception its own group, before the one for the rest.
`gradwatch rules list --resolved` shows clip groups in that order.

Of several clip policies that apply to a parameter (`total`, its group's, a rule's `clip`) the strictest wins, once: one
for a group does not take its parameters out of the total.
"""
_MERGED = (
    ("`rules`", "by id, key by key; `enabled: false` switches a rule off"),
    (
        "`detect`, `labels`, `annotations` of a rule",
        "key by key too: `update-too-big: {detect: {above: 0.5}}` changes that threshold, and whatever else the rule "
        "has stays (as a second one, the `factor` of `norm-spike`); `KEY: null` takes a key out; another `kind` starts "
        "afresh",
    ),
    ("`do`, `groups`, `exclude`, `inhibited_by`, `unless`, `when` of a rule", "replaced as a whole"),
    (
        "`groups`",
        "by name, key by key; those of the later file come first",
    ),
    ("`clip`", "`total` is replaced, `groups` are merged by name"),
    ("`defaults`, `modules`, `histograms`", "key by key"),
    ("`sinks`", "replaced as a whole; where no file has any: `[journal, log, prometheus]`"),
)


def rule_file_page() -> str:
    """The keys of every map of a rule file, and how files on top of each other are merged."""
    merged = table(("of the later file", "on top of the earlier"), _MERGED)
    parts = [_RULE_FILE.replace("{merged}", merged).rstrip()]
    for place, entry in sections().items():
        parts.append(f"## `{place}`\n\n{prose(entry['does'])}\n\n{_keys(entry)}")
    return "\n\n".join(parts)


def kinds_page() -> str:
    """All kinds of detectors, each with its first sentence."""
    rows = [
        (f"[`{kind}`](kinds/{kind}.md)", _first_sentence(entry["does"]), ", ".join(_packs_with(kind)) or "–")
        for kind, entry in entries_of("kinds").items()
    ]
    return (
        "# Kinds of detectors\n\nFor `detect: {kind: …}`; in the terminal: `gradwatch rules kinds`. "
        "What tells them apart: [against what a value is held](../rules.md#against-what-a-value-is-held).\n\n"
        + table(("kind", "what it is", "in packs"), rows)
    )


def kind_page(kind: str) -> str:
    """One kind: what it does, an example that is accepted, its keys, and the shipped rules of it."""
    entry = entries_of("kinds")[kind]

    def other(name: str) -> str | None:
        return f"{name}.md" if name in DETECTORS and name != kind else None

    text = linked(prose(entry["does"]), other)
    parts = [f"# `{kind}`", text, f"```yaml\n{_example(kind)}```", _keys(entry), _timing(DETECTORS[kind])]
    rules = [(pack, rule) for pack, rule in _shipped() if rule.kind == kind]
    if rules:
        rows = [
            (f"`{pack}`", f"`{rule.id}`", f"`{_of(rule)}`", str(rule.for_), rule.severity, _does(rule))
            for pack, rule in rules
        ]
        parts.append(f"## In the shipped packs\n\n{table(_RULE_HEADER, rows)}")
    of = _of(rules[0][1]) if rules else ""
    parts.append(f"Alert: `{alert_name(kind, of)}`. [All kinds](../kinds.md).")
    return "\n\n".join(parts)


def _timing(cls: type[Detector]) -> str:
    """The keys of a rule whose defaults are the kind's own."""
    own = {each.name: each.default for each in fields(cls) if each.metadata.get("rule_key")}  # type: ignore[arg-type]
    said = ", ".join(f"`{name}: {value}`" for name, value in {"for": cls.default_for, **own}.items())
    none = [f"`{name}`" for name in ("warmup", "half_life") if name not in own]
    return f"Keys of the rule, as this kind has them: {said}{'; it takes no ' if none else ''}{' and no '.join(none)}."


def _example(kind: str) -> str:
    """A rule file with one rule of the kind: the first shipped one, else its required keys."""
    shipped = [rule for _, rule in _shipped() if rule.kind == kind]
    keys = entries_of("kinds")[kind]["keys"]
    detect: dict[str, Any] = {"kind": kind}
    for name, key in keys.items():
        value = getattr(shipped[0].detect, name, None) if shipped else _EXAMPLE_VALUES.get(name)
        if key["required"] or (shipped and _plain(value) != _plain(key["default"]) and value is not None):
            detect[name] = _plain(value)
    inner = ", ".join(f"{name}: {_yaml(value)}" for name, value in detect.items())
    text = f"version: 1\nrules:\n  {shipped[0].id if shipped else 'my-rule'}:\n    detect: {{{inner}}}\n"
    if shipped and shipped[0].for_ != 1:
        text += f"    for: {shipped[0].for_}\n"
    text += f"    severity: {shipped[0].severity if shipped else 'warning'}\n"
    parse_rules(text, f"the example of {kind}")
    return text


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (tuple, frozenset, set)) else value


def _yaml(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, str) else value


@cache
def _shipped() -> tuple[tuple[str, Rule], ...]:
    """The rules of shipped packs, each in the first pack that has it as it is, `default` before others."""
    seen: list[tuple[str, Rule]] = []
    for pack in _packs():
        rules = [rule for rule in _rules(pack) if rule.enabled]
        seen += [(pack, rule) for rule in rules if not any(rule == other for _, other in seen)]
    return tuple(seen)


def _packs() -> list[str]:
    return sorted(pack_names(), key=lambda name: (name != "default", name))


@cache
def _rules(pack: str) -> tuple[Rule, ...]:
    return tuple(load_rules(pack).rules)


def _packs_with(kind: str) -> list[str]:
    return list(dict.fromkeys(pack for pack, rule in _shipped() if rule.kind == kind))


def _of(rule: Rule) -> str:
    return str(getattr(rule.detect, "of", "")) or "–"


def _does(rule: Rule) -> str:
    return ", ".join(action.name for action in rule.do) or "(alert)"


def entries_page(topic: str, title: str, lead: str) -> str:
    """All entries of a topic of `gradwatch rules …`, each with its keys."""
    parts = [f"# {title}", f"{lead} In the terminal: `gradwatch rules {topic}`."]
    for name, entry in entries_of(topic).items():
        parts.append(f"## `{name}`\n\n{prose(entry['does'])}")
        parts += [_keys(entry)] if entry["keys"] else []
    return "\n\n".join(parts)


def _keys(entry: Mapping[str, Any]) -> str:
    if not entry["keys"]:
        return "It has no keys of its own."
    rows = [
        (
            f"`{name}`",
            escaped(key["type"]),
            "required" if key["required"] else _shown(key["default"]),
            escaped(key["means"]),
        )
        for name, key in entry["keys"].items()
    ]
    return table(_KEY_HEADER, rows)


def _shown(value: Any) -> str:
    return "–" if value is None else escaped(json.dumps(value, ensure_ascii=False).strip('"'))


def packs_page() -> str:
    """The shipped packs: what each is for, and its rules."""
    parts = [
        "# Shipped packs",
        "By their names, for `extends:` and `--rules`; in the terminal: `gradwatch rules list`.",
    ]
    for pack in _packs():
        path = pack_path(pack)
        assert path is not None
        lines = path.read_text(encoding="utf-8").splitlines()
        head = [
            line.lstrip("#").strip() for line in lines[: lines.index("version: 1")] if line.startswith("#")
        ]
        rows = [
            (
                f"`{rule.id}`",
                f"[`{rule.kind}`](kinds/{rule.kind}.md)" if rule.kind in DETECTORS else rule.kind,
                f"`{_of(rule)}`",
                _thresholds(rule),
                str(rule.for_),
                rule.severity,
                _does(rule) if rule.enabled else "off",
            )
            for rule in _rules(pack)
            if pack == "default" or rule not in _rules("default")
        ]
        parts.append(f"## `{pack}`\n\n{escaped(_first_paragraph(head))}")
        if pack != "default":
            parts.append("Its rules that are not as in `default`:")
        parts.append(table(("rule", "kind", "of", "keys of `detect`", "for", "severity", "does"), rows))
    return "\n\n".join(parts)


def _thresholds(rule: Rule) -> str:
    """The keys of its detector that are not as its kind has them, and the parameters that it is about."""
    if rule.kind not in DETECTORS:
        return ""
    keys = entries_of("kinds")[rule.kind]["keys"]
    values = {name: _plain(getattr(rule.detect, name, None)) for name in keys if name != "of"}
    said = [
        f"{name}: {_yaml(value)}"
        for name, value in values.items()
        if value is not None and (keys[name]["required"] or value != _plain(keys[name]["default"]))
    ]
    said += [f"{name}: {list(named)}" for name in ("groups", "exclude") if (named := getattr(rule, name))]
    return escaped(f"`{', '.join(said)}`") if said else ""


def _first_paragraph(lines: list[str]) -> str:
    found: list[str] = []
    for line in lines:
        if not line:
            break
        found.append(line)
    return " ".join(found)


def problems_page() -> str:
    """Every code of a problem in a rule file."""
    parts = [
        "# Problems of rule files",
        "By the codes of `gradwatch rules check`; `gradwatch rules explain CODE` prints one.",
    ]
    for code, entry in CODES.items():
        parts.append(
            f"## {code}\n\n**{escaped(entry.title)}.** {escaped(entry.meaning)}\n\n"
            f"```text\n{entry.example.strip()}\n```\n\n{escaped(entry.fix)}"
        )
    return "\n\n".join(parts)


# -- commands ------------------------------------------------------------------------------------------------


def commands_page() -> str:
    """Every command with its options, as argparse knows them."""
    parts = [
        "# Commands",
        "`gradwatch COMMAND --help` says the same; the exit status is 0, 1 (something was found) or 2 (used wrongly).",
    ]
    for name in COMMANDS:
        parser = _choices(build_parser((name,)))[name]
        parts.append(_command(f"gradwatch {name}", parser))
        for verb, below in _choices(parser).items():
            parts.append(_command(f"gradwatch {name} {verb}", below))
    return "\n\n".join(parts)


def _choices(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    return next((one.choices for one in parser._actions if isinstance(one, argparse._SubParsersAction)), {})


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    rows = [
        (_spelled(one), escaped((one.help or "").replace("%%", "%")))
        for one in parser._actions
        if not isinstance(one, (argparse._HelpAction, argparse._SubParsersAction))
        and one.help is not argparse.SUPPRESS
    ]
    parts = [f"## {name}"]
    if parser.description:
        parts.append(escaped(inspect.cleandoc(parser.description)))
    return "\n\n".join([*parts, *([table(("argument", "what it is"), rows)] if rows else [])])


def _spelled(one: argparse.Action) -> str:
    value = one.metavar if isinstance(one.metavar, str) else ""
    if one.choices is not None and not value:
        value = "{" + ",".join(map(str, one.choices)) + "}"
    if not one.option_strings:
        return f"`{value or one.dest.upper()}`"
    takes = one.nargs != 0
    return ", ".join(
        f"`{option}{f' {value or one.dest.upper()}' if takes else ''}`" for option in one.option_strings
    )


def metrics_page() -> str:
    """Every metric that a process, and `gradwatch serve`, export."""
    return (
        "# Metrics\n\nOf a process that trains, at `/metrics`; see [monitoring](../monitoring.md).\n\n"
        f"{documentation(METRICS)}\n## Of `gradwatch serve`\n\n{documentation(SERVE_METRICS)}"
    )


# -- Python --------------------------------------------------------------------------------------------------


def python_page() -> str:
    """Names that `gradwatch` exports, by their docstrings, and the classes of the frameworks."""
    parts = ["# Python", "Everything that `gradwatch` exports; how it is used: [using it](../using.md)."]
    for name in gradwatch.__all__:
        parts += _documented(name, getattr(gradwatch, name))
    parts.append("## Frameworks\n\nEach is imported from the module that is named for it.")
    for module in _INTEGRATIONS:
        path = Path(gradwatch.__file__).parent / "integrations" / f"{module}.py"
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
                text = prose(ast.get_docstring(node))
                parts.append(f"### `gradwatch.integrations.{module}.{node.name}`\n\n{text}")
    return "\n\n".join(parts)


def _documented(name: str, found: Any) -> Iterator[str]:
    signature = "" if isinstance(found, type) and issubclass(found, Exception) else _signature(found)
    yield f"## `gradwatch.{name}{signature}`"
    yield prose(found.__doc__)
    if isinstance(found, type) and not issubclass(found, Exception):
        for member, value in vars(found).items():
            if member.startswith("_"):
                continue
            if isinstance(value, property):
                yield f"### `{name}.{member}`\n\n{prose(value.__doc__)}"
            elif inspect.isfunction(value):
                yield f"### `{name}.{member}{_signature(value)}`\n\n{prose(value.__doc__)}"


def _signature(found: Any) -> str:
    """The parameters by their names; "" of a class."""
    if isinstance(found, type):
        return ""
    params = [one for one in inspect.signature(found).parameters.values() if one.name != "self"]
    return f"({', '.join(str(one.replace(annotation=one.empty, default=one.empty)) for one in params)})"


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence, dot, _ = paragraph.partition(". ")
    return escaped(sentence + "." * bool(dot))


def write(folder: Path = FOLDER) -> None:
    """Write every page, and remove those that are no more."""
    made = pages()
    for path in folder.rglob("*.md"):
        if str(path.relative_to(folder)) not in made:
            path.unlink()
    for name, text in made.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
