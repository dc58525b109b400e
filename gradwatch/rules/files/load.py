"""A rule file loaded: YAML to `RuleSet`, or a `RuleFileError` that holds everything wrong, with places.

`load_rules` takes the name of a shipped pack or a path, `parse_rules` a text. Neither raises anything but
`RuleFileError`, however strange the input. Bounds per file: 32 KiB, 1,200 lines, 1,600 keys and values,
depth 32; a file may extend others, 16 in all. They keep the worst input within about 50 ms.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from fnmatch import fnmatchcase

from gradwatch.rules.files.clip_section import clip
from gradwatch.rules.files.do_and_sinks_sections import named_items, sinks
from gradwatch.rules.files.extends import Collector, locate, read, start
from gradwatch.rules.files.file_validation import check_sections_of_file
from gradwatch.rules.files.merge import merge_documents
from gradwatch.rules.files.pydantic_models import MOST_OVERRIDES
from gradwatch.rules.files.rule_building import Resolver, groups
from gradwatch.rules.files.rules_digest import digest
from gradwatch.rules.impossible_actions import ImpossibleAction, impossible_actions
from gradwatch.rules.rule_set import Histograms, Modules, RuleSet
from gradwatch.rules.yaml.nodes import Map, Mark, Node, Scalar, Seq, data
from gradwatch.rules.yaml.problems import Problems

Refuse = Callable[[RuleSet], Iterable[tuple[str, str]]]
"""(place, reason) of what else is to be refused: a place is "RULE.do", or "sinks.N" for the sink at position N."""


def load_rules(source: str | os.PathLike[str], *, run: str = "", refuse: Refuse | None = None) -> RuleSet:
    """The rules of a shipped pack (by name, such as "default") or of a file (by path).

    `run` is the run id that `overrides: match: {run: …}` is compared with; `refuse` is asked last, of what only the
    caller knows (which libraries there are). Raises `RuleFileError`.
    """
    spelled = os.fspath(source)
    path = locate(spelled, "") if isinstance(source, str) else spelled
    problems = Problems()
    text = read(path, start(path), problems)
    if text is None:
        raise problems.error()
    return _load(text, path, run, problems, refuse)


def parse_rules(text: str, path: str = "<string>", run: str = "") -> RuleSet:
    """The rules in `text`; `path` is used in messages, and `extends` is relative to it. Raises
    `RuleFileError`.
    """
    return _load(text, path, run, Problems())


def _load(text: str, path: str, run: str, problems: Problems, refuse: Refuse | None = None) -> RuleSet:
    collector = Collector(problems)
    collector.add(text, path)
    for document in collector.files:
        check_sections_of_file(document, problems)
    if not collector.files:
        raise problems.error()
    document = _merged(collector.files, run, problems)
    ruleset = _resolve(document, problems)
    if not len(problems):
        for place, reason in (
            *map(_placed, impossible_actions(ruleset)),
            *(refuse(ruleset) if refuse is not None else ()),
        ):
            problems.add(_mark_of(place, document), "GW215", reason)
    if len(problems):
        raise problems.error()
    return replace(ruleset, digest=digest(ruleset))


def _merged(files: list[Map], run: str, problems: Problems) -> Map:
    """All files on top of each other, then the overrides that match; the others are judged on a copy."""
    document = files[0]
    for top in files[1:]:
        document = merge_documents(document, top)
    for item in (item for file in files for item in _overrides(file)):
        if _matches(item, run):
            document = merge_documents(document, item)
        else:
            _judge_unused(document, item, problems)
    return document


def _overrides(file: Map) -> list[Map]:
    overrides = file.get("overrides")
    if not isinstance(overrides, Seq):
        return []
    return [item for item in overrides.items if isinstance(item, Map)][:MOST_OVERRIDES]


def _matches(item: Map, run: str) -> bool:
    match = item.get("match")
    glob = match.get("run") if isinstance(match, Map) else None
    return isinstance(glob, Scalar) and isinstance(glob.value, str) and fnmatchcase(run, glob.text[:500])


def _judge_unused(document: Map, item: Map, problems: Problems) -> None:
    """An override that does not apply to this run must not wait for the run it applies to with its errors."""
    changed = merge_documents(document, item)
    named = groups(changed, problems)
    names = frozenset(group.name for group in named)
    resolver = Resolver(changed, names, named, problems)
    rules = item.get("rules")
    for rule_id in rules.entries if isinstance(rules, Map) else ():
        resolver.one(rule_id)
    _histograms(changed, problems)
    clip(item.get("clip"), names, problems)


def _resolve(document: Map, problems: Problems) -> RuleSet:
    named = groups(document, problems)
    section = document.get("groups")
    names = frozenset(section.entries) if isinstance(section, Map) else frozenset()
    resolver = Resolver(document, names, named, problems)
    rules = resolver.all()
    clips = clip(document.get("clip"), names, problems)
    listed = document.get("sinks")
    return RuleSet(
        groups=named,
        rules=rules,
        clip=clips,
        modules=_modules(document.get("modules")),
        histograms=_histograms(document, problems),
        sinks=None if listed is None else sinks(listed, problems),
        origins=resolver.origins | _origins_of_sections(document),
        inactive=resolver.inactive,
    )


def _placed(one: ImpossibleAction) -> tuple[str, str]:
    """(place, reason) of an impossible action, as a `Refuse` gives them; the place may also be "clip"."""
    if one.rule:
        return f"{one.rule}.do", f"rule {one.rule!r}: {one.reason}"
    return "clip", f"clip.{one.clip}: {one.reason}"


def _mark_of(place: str, document: Map) -> Mark:
    """The position in the text of a place that `_placed` or a `Refuse` gives."""
    name, _, key = place.rpartition(".")
    listed = document.get("sinks")
    if name == "sinks" and isinstance(listed, Seq):
        return [mark for _, mark, _ in named_items(listed, "sink", Problems())][int(key)]
    rules = document.get("rules")
    node = rules.get(name) if isinstance(rules, Map) else None
    return node.key_mark(key) if isinstance(node, Map) else document.key_mark(place)


def _origins_of_sections(document: Map) -> dict[str, str]:
    """Position of each group, clip policy and sink, by keys that are no rule's id: they hold a colon."""
    clips = document.get("clip")
    found = _keys_of(document.get("groups"), "group:")
    if isinstance(clips, Map):
        found |= _keys_of(clips.get("groups"), "clip:groups.")
        found["clip:total"] = clips.key_mark("total")
    named = named_items(document.get("sinks"), "sink", Problems())
    found |= {f"sinks:{name}": mark for name, mark, _ in named}
    return {key: str(mark) for key, mark in found.items()}


def _keys_of(section: Node | None, prefix: str) -> dict[str, Mark]:
    entries = section.entries if isinstance(section, Map) else {}
    return {f"{prefix}{name}": entry.key for name, entry in entries.items()}


def _modules(node: Node | None) -> Modules | None:
    """The taps, as far as they are right; what is wrong was reported by `check_sections_of_file`."""
    if not isinstance(node, Map):
        return None
    written = data(node)
    names = written.get("names", ["*"])
    return Modules(written.get("tap", "output"), tuple(names) if isinstance(names, list) else ())


def _histograms(document: Map, problems: Problems) -> Histograms | None:
    """The section, as far as its shape is right: what is wrong with that was reported by `check_sections_of_file`."""
    node = document.get("histograms")
    if not isinstance(node, Map):
        return None
    written, usual = data(node), Histograms()
    every = written.get("every", usual.every)
    lists = [written.get(key, list(getattr(usual, key))) for key in ("params", "of", "modules")]
    if not isinstance(every, int) or not all(isinstance(one, list) for one in lists):
        return None
    params, of, modules = map(tuple, lists)
    if "activations" in of and document.get("modules") is None:
        message = "histograms of activations are read by module taps only"
        problems.add(node.key_mark("of"), "GW215", message, "add `modules: {tap: output}` to the file")
    elif "modules" in written and "of" not in written:
        message = "'modules' chooses among activations, and these histograms are of gradients"
        problems.add(node.key_mark("modules"), "GW208", message, "add `of: [gradients, activations]`")
    return Histograms(every, params, of, modules)
