"""`*.test.yaml` -> `RuleTests`: everything wrong with it at once, each problem with its place."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from gradwatch.detectors.detector import Column
from gradwatch.errors import RuleFileError
from gradwatch.records.columns import (
    COUNT_COLUMNS,
    MODULE_COLUMNS,
    RANK_COLUMNS,
    SCALAR_COLUMNS,
    is_observed,
    is_scalar,
)
from gradwatch.records.decision import CLIP_SECTION
from gradwatch.records.snapshot import Sites
from gradwatch.rule_tests.schema import CaseEntry, Document, ExpectedAction, ExpectedEvent
from gradwatch.rule_tests.series_notation import NotationError, expand
from gradwatch.rules.files import load_rules
from gradwatch.rules.files.extends import locate, read, start
from gradwatch.rules.files.key_validation import check
from gradwatch.rules.files.model_base import Model
from gradwatch.rules.rule_set import RuleSet
from gradwatch.rules.yaml.nodes import Map, Mark, Node, Scalar, Seq
from gradwatch.rules.yaml.parse import parse
from gradwatch.rules.yaml.problems import Problems, quoted, shown

DERIVED = {"rms": "norm", "norm_applied": "norm and coef", "calls": "norm"}
"""Columns that follow from others, which is what to give."""
COLUMNS = (frozenset({*get_args(Column), *SCALAR_COLUMNS}) | COUNT_COLUMNS | RANK_COLUMNS) - DERIVED.keys()
ALWAYS = frozenset({"norm", "total_norm", *DERIVED}) | COUNT_COLUMNS
"""Columns that every made-up step has."""

Samples = tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Expected:
    """One item of `events:` or `actions:` and where it stands; `fields` holds only what is to be compared."""

    at: Mark
    step: int
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One test: its sites, the series it puts in, and what is to come out (None = not compared).

    `columns` by column and index of the site, `scalars` by column; a series that is shorter than the longest, which
    has `steps` samples, is missing after its end.
    """

    name: str
    at: Mark
    sites: Sites
    columns: Mapping[str, Mapping[int, Samples]]
    scalars: Mapping[str, Samples]
    steps: int
    only: frozenset[str] | None
    events: tuple[Expected, ...] | None
    actions: tuple[Expected, ...] | None


@dataclass(frozen=True, slots=True, eq=False)
class RuleTests:
    """A test file: the rule file it is about, and its cases."""

    path: str
    ruleset: RuleSet
    cases: tuple[Case, ...]


def load_tests(path: str) -> RuleTests:
    """The tests in a file. Raises `RuleFileError` for all that is wrong with it, or with the rule file it names."""
    problems = Problems()
    text = read(path, start(path), problems)
    document = None if text is None else parse(text, path, problems)
    if document is None:
        raise problems.error()
    entry = check(document, Document, problems, document.mark, "the test file")
    ruleset = None if entry is None else _rules(document, entry, path)
    cases = tuple(_cases(document, ruleset, problems))
    if len(problems):
        raise problems.error()
    assert ruleset is not None  # else there was a problem
    return RuleTests(path, ruleset, cases)


def _rules(document: Map, entry: Document, path: str) -> RuleSet:
    named = locate(entry.rules, path)
    if os.path.exists(named):
        return load_rules(named, run=entry.run or "")
    try:
        return load_rules(entry.rules, run=entry.run or "")
    except RuleFileError as error:  # not found: the test file is at fault, at this place
        node = document.get("rules")
        first = error.problems[0]
        at = document.mark if node is None else node.mark
        problems = Problems()
        problems.add(at, first.code, first.message, first.hint)
        raise problems.error() from None


def _cases(document: Map, ruleset: RuleSet | None, problems: Problems) -> Iterator[Case]:
    section = document.get("tests")
    names: set[str] = set()
    for node in section.items if isinstance(section, Seq) else ():
        if not isinstance(node, Map):
            continue
        entry = check(node, CaseEntry, problems, node.mark, "a test")
        if entry is None:
            continue
        if entry.name in names:
            problems.add(
                _at(node, "name"), "GW209", f"test {quoted(entry.name)} is there twice", "rename one"
            )
        names.add(entry.name)
        case = _Reading(node, entry, ruleset, problems).case()
        if case is not None:
            yield case


def _at(node: Map, key: str) -> Mark:
    value = node.get(key)
    return value.mark if isinstance(value, Scalar) else node.key_mark(key)


class _Reading:
    """One test being read; its problems are reported where they stand."""

    def __init__(self, node: Map, entry: CaseEntry, ruleset: RuleSet | None, problems: Problems) -> None:
        self.node, self.entry, self.ruleset, self.problems = node, entry, ruleset, problems
        self.sites = sites_of(entry.params, tuple(entry.modules or ()), entry.ranks or 0)
        self.columns: dict[str, dict[int, Samples]] = {}
        self.scalars: dict[str, Samples] = {}
        self._expanded: dict[int, Samples] = {}  # by node: a series of many sites is read once

    def case(self) -> Case | None:
        """The test; None where nothing can be made of it."""
        before = len(self.problems)
        self._input()
        events = self._expected("events", ExpectedEvent)
        actions = self._expected("actions", ExpectedAction)
        for item in self._items("only"):
            if isinstance(item, Scalar):
                self._known_rule(item)
        if events is None and actions is None:
            message = f"test {quoted(self.entry.name)} expects nothing"
            hint = "write `events:` or `actions:`; an empty list, [], says that there are none"
            self.problems.add(_at(self.node, "name"), "GW304", message, hint)
        if len(self.problems) != before:
            return None
        series = [
            *self.scalars.values(),
            *(one for by_site in self.columns.values() for one in by_site.values()),
        ]
        steps = max((len(one) for one in series), default=0)
        if not steps:
            self.problems.add(self.node.key_mark("input"), "GW301", "the input has no sample")
            return None
        only = None if self.entry.only is None else frozenset(self.entry.only)
        at = _at(self.node, "name")
        return Case(self.entry.name, at, self.sites, self.columns, self.scalars, steps, only, events, actions)

    # -- what goes in ------------------------------------------------------------------------------------

    def _input(self) -> None:
        section = self.node.get("input")
        assert isinstance(section, Map)
        for name, (mark, node) in section.entries.items():
            if name in DERIVED:
                hint = f"give {DERIVED[name]}, of which it is made"
                self.problems.add(mark, "GW302", f"{quoted(name)} is no input", hint)
            elif name not in COLUMNS and not is_observed(name):
                meant = self.problems.meant(name, COLUMNS)
                hint = f"columns: {', '.join(sorted(COLUMNS))}"
                if not meant and name.isidentifier():
                    hint = f"`observed.{name}` where the script gives it to `observe({name}=…)`; {hint}"
                self.problems.add(mark, "GW302", f"unknown column {quoted(name)}{meant}", hint)
            elif is_scalar(name):
                self._scalar(name, node, mark)
            else:
                self._column(name, node, mark)
        self._incomplete(section)

    def _incomplete(self, section: Map) -> None:
        """A rule that reads two columns and is given one would never fire, for a reason that is not shown."""
        for rule in () if self.ruleset is None else self.ruleset.rules:
            first, *others = rule.detect.columns
            # A one-per-step value beside is one that a training may not have, and so is a test's.
            given = {*section.entries, *ALWAYS, *SCALAR_COLUMNS}
            lacking = [name for name in others if name not in given]
            if rule.enabled and first in section.entries and lacking:
                message = f"rule {quoted(rule.id)} reads {quoted(first)} together with {quoted(lacking[0])}"
                self.problems.add(section.key_mark(first), "GW302", message, f"give {lacking[0]} too")

    def _scalar(self, name: str, node: Node, mark: Mark) -> None:
        if isinstance(node, Scalar):
            self.scalars[name] = self._samples(node)
        else:
            message = f"{quoted(name)} is one value a step: a series, not {shown(node)}"
            self.problems.add(mark, "GW103", message)

    def _column(self, name: str, node: Node, mark: Mark) -> None:
        kind = "module" if name in MODULE_COLUMNS else "rank" if name in RANK_COLUMNS else "param"
        own = np.array([each == kind for each in self.sites.kinds], np.bool_)
        if not own.any():
            hint = {"module": "name some in `modules:`", "rank": "say how many in `ranks:`"}[kind]
            self.problems.add(
                mark, "GW302", f"{quoted(name)} is measured on {kind}s, and there are none", hint
            )
            return
        found = self.columns.setdefault(name, {})
        if isinstance(node, Scalar):
            samples = self._samples(node)
            found.update(dict.fromkeys(map(int, np.flatnonzero(own)), samples))
        elif isinstance(node, Map):
            for glob, (place, values) in node.entries.items():
                here = np.flatnonzero(own & self.sites.select(glob))
                if not len(here):
                    known = [self.sites.names[k] for k in np.flatnonzero(own)]
                    message = f"{quoted(glob)} matches no {kind}{self.problems.meant(glob, known)}"
                    self.problems.add(place, "GW302", message)
                elif isinstance(values, Scalar):  # a later glob wins
                    found.update(dict.fromkeys(map(int, here), self._samples(values)))
                else:
                    self.problems.add(place, "GW103", f"{quoted(glob)} must be a series, not {shown(values)}")
        else:
            self.problems.add(mark, "GW103", f"{quoted(name)} must be a series or a map of them, not a list")

    def _samples(self, node: Scalar) -> Samples:
        if id(node) in self._expanded:
            return self._expanded[id(node)]
        samples: Samples = ()
        try:
            samples = tuple(expand(node.text))
        except NotationError as error:
            folded = node.mark.width == 0 or not _stands_there(node)
            offset = 0 if folded else error.offset + (not node.plain)
            width = node.mark.width if folded else error.length
            at = node.mark._replace(column=node.mark.column + offset, width=width)
            self.problems.add(at, "GW301", str(error), "as promtool: `1x30` is 31 times 1, `_x3` 3 missing")
        self._expanded[id(node)] = samples
        return samples

    # -- what is to come out -----------------------------------------------------------------------------

    def _items(self, key: str) -> list[Node]:
        section = self.node.get(key)
        return section.items if isinstance(section, Seq) else []

    def _expected(self, key: str, model: type[Model]) -> tuple[Expected, ...] | None:
        if key not in self.node.entries:
            return None
        found = []
        for item in self._items(key):
            if not isinstance(item, Map):
                continue
            said = check(item, model, self.problems, item.mark, f"an item of `{key}`")
            named = item.get("rule")
            if isinstance(named, Scalar):
                self._known_rule(named)
            if said is not None:
                values = said.model_dump(exclude_none=True)
                found.append(Expected(item.mark, values.pop("step"), values))
        return tuple(found)

    def _known_rule(self, node: Scalar) -> None:
        if self.ruleset is None or node.text == CLIP_SECTION:
            return
        known = [rule.id for rule in self.ruleset.rules]
        if node.text not in known:
            message = f"no rule {quoted(node.text)} in the rule file{self.problems.meant(node.text, known)}"
            self.problems.add(node.mark, "GW303", message, f"rules: {', '.join(known)}"[:400])


def _stands_there(node: Scalar) -> bool:
    """True if the text of a scalar stands in its line as it is, without escapes."""
    line = node.mark.source.lines[node.mark.line - 1]
    begin = node.mark.column - 1 + (not node.plain)
    return line.startswith(node.text, begin)


def sites_of(params: Mapping[str, list[int]], modules: tuple[str, ...], ranks: int) -> Sites:
    """Parameters of these shapes, then modules and ranks, as a watched model would give them."""
    shapes = list(params.values())
    others = (*modules, *(f"rank {rank}" for rank in range(ranks)))
    zeros = [0] * len(others)
    depths = [*range(len(shapes)), *range(len(modules)), *range(ranks)]
    return Sites(
        names=(*params, *others),
        kinds=("param",) * len(shapes) + ("module",) * len(modules) + ("rank",) * ranks,
        numels=np.array([int(np.prod(shape, dtype=object)) for shape in shapes] + zeros, np.int64),
        ndims=np.array([len(shape) for shape in shapes] + zeros, np.int64),
        depths=np.array(depths, np.int64),
    )
