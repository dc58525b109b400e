"""YAML events to a tree of nodes: what a rule file may not hold is refused at its place, and left out."""

from __future__ import annotations

from enum import Enum
from typing import Any

from gradwatch.rules.yaml.line_and_column import mark_of_event
from gradwatch.rules.yaml.nodes import Map, Mark, Node, Scalar, Seq, Source
from gradwatch.rules.yaml.problems import Problems, quoted
from gradwatch.rules.yaml.scalars import resolve
from gradwatch.rules.yaml.size_limits import FORBIDDEN, MAX_DEPTH, MAX_NODES, too_large
from gradwatch.runtime.warning_filters import filters_kept

with filters_kept():  # ruamel adds warning filters of its own when it is imported
    from ruamel.yaml.events import (
        AliasEvent,
        CollectionStartEvent,
        DocumentStartEvent,
        MappingEndEvent,
        MappingStartEvent,
        ScalarEvent,
        SequenceEndEvent,
    )


class _Refused(Enum):
    """Stands for a key that was refused: its value is left out as well."""

    KEY = 0


class NodeBuilder:
    """Puts events together to nodes, without recursion; refuses what a rule file may not hold."""

    def __init__(self, source: Source, problems: Problems) -> None:
        self.source, self.problems = source, problems
        self.root: Node | None = None
        self.open: list[Map | Seq] = []
        self.keys: list[Scalar | _Refused | None] = []  # per open map, the key that waits for its value
        self.skipped = 0  # > 0: inside a collection that is being left out
        self.nodes = self.documents = self.depth = 0

    def feed(self, event: Any) -> bool:
        """Take one event; False when reading must end here."""
        if isinstance(event, DocumentStartEvent):
            return self._document(event)
        if isinstance(event, (MappingEndEvent, SequenceEndEvent)):
            self._close(event)
        elif isinstance(event, (ScalarEvent, CollectionStartEvent, AliasEvent)):
            return self._node(event)
        return True

    def _document(self, event: Any) -> bool:
        self.documents += 1
        if self.documents > 1:
            self.problems.add(
                mark_of_event(self.source, event),
                "GW007",
                "a second document; a rule file holds one",
                "delete '---'",
            )
        return self.documents == 1

    def _node(self, event: Any) -> bool:
        mark = mark_of_event(self.source, event)
        self.nodes += 1
        starts = isinstance(event, CollectionStartEvent)
        if self.nodes > MAX_NODES:
            too_large(mark, f"{MAX_NODES:,} keys and values", self.problems)
            return False
        if starts and self.depth >= MAX_DEPTH:
            self.problems.add(mark, "GW003", f"nested deeper than {MAX_DEPTH}", "no rule needs this depth")
            return False
        self.depth += starts
        if self.skipped:
            self.skipped += starts
            return True
        self._plain(event, mark)
        if isinstance(event, AliasEvent):
            self.problems.add(mark, "GW007", f"alias *{event.anchor}; write the value out", "")
            self._drop()
        elif isinstance(event, ScalarEvent):
            self._scalar(event, mark)
        elif self._awaits_key():
            self.problems.add(mark, "GW007", "a key must be a single word, not a map or a list", "")
            self.skipped = 1
        else:
            self.open.append(Map(mark) if isinstance(event, MappingStartEvent) else Seq(mark))
            self.keys.append(None)
        return True

    def _plain(self, event: Any, mark: Mark) -> None:
        """Anchors and tags are reported and otherwise ignored."""
        if getattr(event, "anchor", None) and not isinstance(event, AliasEvent):
            self.problems.add(
                mark, "GW007", f"anchor &{event.anchor}; anchors are not used in rule files", ""
            )
        if getattr(event, "ctag", None) is not None:
            self.problems.add(mark, "GW007", f"tag {event.tag}; tags are not used in rule files", "delete it")

    def _scalar(self, event: Any, mark: Mark) -> None:
        text = str(event.value)
        if FORBIDDEN.search(text):
            self.problems.add(
                mark, "GW004", "the text holds a control character or a surrogate", "delete the escape"
            )
            self._drop()
            return
        plain = event.style is None
        self._put(Scalar(mark, resolve(text) if plain else text, text, plain))

    def _close(self, event: Any) -> None:
        self.depth -= 1
        if self.skipped:
            self.skipped -= 1
            if not self.skipped:
                self._drop()
            return
        node = self.open.pop()
        self.keys.pop()
        if event.end_mark.line + 1 == node.mark.line and event.end_mark.column >= node.mark.column:
            node.underline(event.end_mark.column + 1 - node.mark.column)
        self._put(node)

    def _awaits_key(self) -> bool:
        return bool(self.open) and isinstance(self.open[-1], Map) and self.keys[-1] is None

    def _put(self, node: Node) -> None:
        """The node is complete: it is the root, an item, a key, or the value of the key that waits."""
        if not self.open:
            self.root = node
            return
        parent = self.open[-1]
        if isinstance(parent, Seq):
            parent.items.append(node)
        elif (key := self.keys[-1]) is None:
            assert isinstance(node, Scalar)
            self.keys[-1] = node
        else:
            self.keys[-1] = None
            if key is not _Refused.KEY:
                self._entry(parent, key, node)

    def _entry(self, parent: Map, key: Scalar, node: Node) -> None:
        if key.plain and key.text == "<<":
            self.problems.add(key.mark, "GW007", "merge key <<; use `extends:` or `defaults:`", "")
        elif key.text in parent.entries:
            first = parent.entries[key.text].key.line
            message = f"duplicate key {quoted(key.text)}; first on line {first}"
            self.problems.add(key.mark, "GW008", message, "keep one of them")
        else:
            parent.set(key.text, key.mark, node)

    def _drop(self) -> None:
        """Leave out a node that was refused, without a second complaint that it is missing."""
        if not self.open:
            return
        parent = self.open[-1]
        if isinstance(parent, Seq):
            parent.item_dropped()
        elif (key := self.keys[-1]) is None:
            self.keys[-1] = _Refused.KEY
        else:
            if key is not _Refused.KEY:
                parent.dropped.add(key.text)
            self.keys[-1] = None
