"""Several documents to one: later wins, keyed by id. Nodes keep their places, so errors and origins stay
true.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gradwatch.rules.condition import OF_DETECTOR
from gradwatch.rules.yaml.nodes import Entry, Map, Node, Scalar, without

Merge = Callable[[Map, Map], Map]
SECTIONS = ("defaults", "groups", "rules", "clip", "modules", "histograms", "sinks")


def overlay(base: Map, top: Map, deeper: Mapping[str, Merge] | None = None) -> Map:
    """`base` with the entries of `top` on top; keys in `deeper` ("*" = any) are merged instead of
    replaced.
    """
    merged = Map(top.mark, dict(base.entries), base.dropped | top.dropped)
    for key, entry in top.entries.items():
        below = base.get(key)
        merge = (deeper or {}).get(key) or (deeper or {}).get("*")
        node: Node = entry.node
        if merge is not None and isinstance(below, Map) and isinstance(node, Map):
            node = merge(below, node)
        merged.entries[key] = Entry(entry.key, node)
    return merged


def merge_detect(base: Map, top: Map) -> Map:
    """Thresholds are merged key by key; another kind starts afresh."""
    kind, before = top.get("kind"), base.get("kind")
    same = kind is None or (
        isinstance(kind, Scalar) and isinstance(before, Scalar) and kind.text == before.text
    )
    return overlay(base, top) if same else top


def merge_rule(base: Map, top: Map) -> Map:
    """Key by key; `detect`, `labels` and `annotations` by their own keys; lists and `when` are replaced.

    A condition in the place of a detector starts afresh, and so does a detector in the place of a condition.
    """
    if "when" in top.entries and "detect" not in top.entries:
        base = _without(base, OF_DETECTOR)
    elif "detect" in top.entries and "when" not in top.entries:
        base = _without(base, ("when",))
    return overlay(base, top, {"detect": merge_detect, "labels": overlay, "annotations": overlay})


def _without(node: Map, keys: tuple[str, ...]) -> Map:
    for key in keys:
        node = without(node, key)
    return node


def merge_groups(base: Map, top: Map) -> Map:
    """The later file's groups come first: the first match wins, so they must be able to win."""
    merged = overlay(base, top, {"*": overlay})
    order = [*top.entries, *(name for name in base.entries if name not in top.entries)]
    return Map(merged.mark, {name: merged.entries[name] for name in order}, merged.dropped)


def merge_documents(base: Map, top: Map) -> Map:
    """One document of another file (or an override) on top of what there is."""
    return overlay(
        base,
        Map(top.mark, {key: entry for key, entry in top.entries.items() if key in SECTIONS}),
        {
            "defaults": overlay,
            "groups": merge_groups,
            "rules": lambda below, above: overlay(below, above, {"*": merge_rule}),
            "clip": lambda below, above: overlay(below, above, {"groups": overlay}),
            "modules": overlay,
            "histograms": overlay,
        },
    )
