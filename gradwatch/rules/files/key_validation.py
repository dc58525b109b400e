"""One map of the file against one model: pydantic's complaints become problems at the right place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from gradwatch.records.columns import is_observed
from gradwatch.records.key_limits import Limits
from gradwatch.rules.files import words_of_other_tools
from gradwatch.rules.sink_kinds import ADDRESS
from gradwatch.rules.yaml.nodes import Map, Mark, Node, Scalar, Seq, data
from gradwatch.rules.yaml.problems import MAX_SUGGESTIONS, Problems, quoted, shown
from gradwatch.rules.yaml.scalars import advice
from gradwatch.runtime import secret_values

M = TypeVar("M", bound=BaseModel)

_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number of reasonable size",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a map",
    "model_type": "a map",
    "model_attributes_type": "a map",
}
_BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
OF_OBSERVED = ("string_pattern_mismatch", "measured")
"""Complaints of `ObservedColumn`, which is one branch of a union."""
OR_OBSERVED = "; or observed.NAME, a value that the script gives to observe(NAME=…)"
TAKEN_BY = (
    "; observed values are taken by above, below, above_recent_max, below_recent_min, above_usual, below_usual, "
    "converged, plateau, spike, drift, loss_spike and loss_nonfinite"
)
_PATTERNS = {
    "of": "a column, or observed.NAME: a name of at most 64 characters without spaces",
    "listen": "HOST:PORT, such as 127.0.0.1:29440",
    "after": "'k in n', such as 3 in 100",
    "labels": "a name of letters, digits and _, starting with a letter",
    "annotations": "a name of letters, digits and _, starting with a letter",
    "server": "HOST:PORT, such as smtp.example.org:587",
    ADDRESS: "an e-mail address",
    secret_values.SECRET: "${NAME}: an environment variable, for a secret has no place in a rule file",
    secret_values.SECRET_URL: "a URL without user and password, or ${NAME}: an environment variable that holds it",
    secret_values.URL: "a URL without user and password, such as http://127.0.0.1:9093",
}
"""What is wanted, by the name of the key or by the pattern."""


def check(
    node: Map,
    model: type[M],
    problems: Problems,
    at: Mark,
    where: str,
    elsewhere: Mapping[str, str] | None = None,
) -> M | None:
    """The map as a `model`, or None after reporting what is wrong with it.

    `at` is where the map's own key stands (for a missing key), `where` names it in messages, `elsewhere` says
    for keys that exist in another map where they belong.
    """
    known = problems.checked.get((id(node), model))
    if known is not None:
        return known[1]  # type: ignore[no-any-return]
    try:
        result = model.model_validate_json(json.dumps(data(node)))
    except ValidationError as error:
        _Report(node, model, problems, at, where, elsewhere or {}).all(error.errors(include_url=False))
        result = None
    else:
        _in_float32(node, problems)
    problems.checked[id(node), model] = (node, result)
    return result


def right_keys(node: Map, model: type[BaseModel]) -> Map:
    """A copy of the map without the keys that a model does not know, or whose values it refuses."""
    try:
        model.model_validate_json(json.dumps(data(node)))
    except ValidationError as error:
        wrong = {str(one["loc"][0]) for one in error.errors(include_url=False) if one["loc"]}
        return Map(node.mark, {key: entry for key, entry in node.entries.items() if key not in wrong})
    return node


def right_part(node: Map, model: type[M]) -> M:
    """The map as a `model` that requires no key, of the keys that are right: to check what does not depend on others.

    Nothing is reported: `check` does that.
    """
    return model.model_validate_json(json.dumps(data(right_keys(node, model))))


FLOAT32 = (2.0**-126, (2 - 2.0**-23) * 2.0**127)
"""Smallest and largest positive normal number."""


def _in_float32(node: Map, problems: Problems) -> None:
    """Report numbers that become 0, lose digits or become infinite in float32, in which gradients are compared."""
    for key, entry in node.entries.items():
        value = entry.node.value if isinstance(entry.node, Scalar) else None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and value and not FLOAT32[0] <= abs(value) <= FLOAT32[1]:
            reason = "float32, in which gradients are compared, cannot hold it"
            message = f"{quoted(key)} cannot be {shown(entry.node)}: {reason}"
            problems.add(entry.node.mark, "GW105", message, "from 1.2e-38 to 3.4e38, or 0")


def keys_of(model: type[BaseModel]) -> list[str]:
    """The keys a model knows, as the file spells them."""
    return [info.alias or name for name, info in model.model_fields.items()]


class _Report:
    def __init__(
        self,
        node: Map,
        model: type[BaseModel],
        problems: Problems,
        at: Mark,
        where: str,
        elsewhere: Mapping[str, str],
    ) -> None:
        self.node, self.model, self.problems = node, model, problems
        self.at, self.where, self.elsewhere = at, where, elsewhere
        self.meant: set[str] = set()

    def all(self, errors: Iterable[Any]) -> None:
        """Report one problem per place: the branches of a union complain one by one, the apt one speaks."""
        by_place: dict[tuple[Any, ...], list[Any]] = {}
        for error in errors:
            by_place.setdefault(self._place(error["loc"]), []).append(error)
        known = keys_of(self.model)
        unknown = [
            str(place[-1]) for place, group in by_place.items() if group[0]["type"] == "extra_forbidden"
        ]
        self.meant = {self.problems.closest(word, known) for word in unknown[:MAX_SUGGESTIONS]}
        for place, group in by_place.items():
            if self.problems.full:
                self.problems.omit()
                continue
            error = _apt(group, self._find(place))
            observed = any(one["type"] in OF_OBSERVED for one in group)
            self._one(place, error, OR_OBSERVED if observed and error["type"] == "literal_error" else "")

    def _place(self, loc: tuple[Any, ...]) -> tuple[Any, ...]:
        """`loc` without the parts that pydantic adds for branches of unions."""
        place: list[Any] = []
        node: Node | None = self.node
        for part in loc:
            if part == "[key]" and isinstance(node, Scalar):
                pass  # pydantic's way to say that the key itself is refused
            elif isinstance(node, Map) and isinstance(part, str) and part in node.entries:
                node = node.get(part)
            elif isinstance(node, Seq) and isinstance(part, int) and part < len(node.items):
                node = node.items[part]
            elif part != loc[-1] or isinstance(node, (Scalar, Seq)):
                continue
            place.append(part)
        return tuple(place)

    def _find(self, place: tuple[Any, ...]) -> Node | None:
        node: Node | None = self.node
        for part in place:
            if isinstance(node, Map):
                node = node.get(part)
            elif isinstance(node, Seq):
                node = node.items[part]
        return node

    def _key_mark(self, place: tuple[Any, ...]) -> Mark:
        """The innermost key on the way to `place`."""
        mark, node = self.at, self.node
        for part in place:
            if isinstance(node, Map) and part in node.entries:
                mark, node = node.entries[part]  # type: ignore[assignment]
            elif isinstance(node, Seq):
                node = node.items[part]
                mark = node.mark
        return mark

    def _one(self, place: tuple[Any, ...], error: Any, further: str) -> None:
        kind, name = error["type"], str(place[-1]) if place else self.where
        if kind == "extra_forbidden":
            self._unknown(place, name)
        elif kind == "missing":
            self._missing(place, name)
        elif name == "[key]" and len(place) > 1:
            wanted = _PATTERNS.get(str(place[0]), "a plain name")
            message = f"{quoted(str(place[-2]))} cannot be a key here; it must be {wanted}"
            self.problems.add(self._key_mark(place[:-1]), "GW106", message)
        else:
            self._value(place, error, name, further)

    def _unknown(self, place: tuple[Any, ...], name: str) -> None:
        known = keys_of(self.model)
        message = f"unknown key {quoted(name)} in {self.where}"
        node = self._find(place)
        if isinstance(node, Scalar) and any(self._pattern(key) in secret_values.PATTERNS for key in known):
            self.problems.hide(node.mark)  # it may be the value of one of these
        if name in self.elsewhere:
            self.problems.add(self._key_mark(place), "GW101", message, self.elsewhere[name])
            return
        hint = f"known here: {', '.join(known)}" if known else "it takes no keys"
        self.problems.add(self._key_mark(place), "GW101", message + self.problems.meant(name, known), hint)

    def _missing(self, place: tuple[Any, ...], name: str) -> None:
        parent = self._find(place[:-1])
        if name in self.meant or (isinstance(parent, Map) and name in parent.dropped):
            return  # misspelt or refused, and reported as that
        if isinstance(parent, Seq):
            self.problems.add(
                self._key_mark(place[:-1]), "GW105", f"{quoted(str(place[-2]))} has too few items"
            )
            return
        self.problems.add(self._key_mark(place[:-1]), "GW102", f"{self.where} lacks the key {quoted(name)}")

    def _value(self, place: tuple[Any, ...], error: Any, name: str, further: str) -> None:
        node = self._find(place)
        if node is None:  # the whole map
            self.problems.add(self.at, "GW105", f"{self.where}: {error['msg']}")
            return
        mark = node.mark if isinstance(node, Scalar) and node.value is not None else self._key_mark(place)
        named = next((str(part) for part in reversed(place) if isinstance(part, str)), name)
        pattern = self._pattern(str(place[0])) if place else ""
        secret = pattern in secret_values.PATTERNS or (
            pattern == secret_values.URL and "@" in str(data(node))
        )
        if secret:
            self.problems.hide(node.mark)
            if isinstance(node, Scalar) and node.value is not None:
                message = f"{quoted(named)} must be {_PATTERNS[pattern]}"
                self.problems.add(mark, "GW106", message)
                return
        code, message, hint = _describe(error, node, named, self.problems)
        self.problems.add(mark, code, message, hint + further)

    def _pattern(self, key: str) -> str:
        """The pattern that the value of a key has to match; "" where there is none."""
        field = self.model.model_fields.get(key)
        limits = [one for one in (field.metadata if field else ()) if isinstance(one, Limits)]
        return next((one.pattern for limit in limits for one in limit if hasattr(one, "pattern")), "")


def _apt(group: list[Any], node: Node | None) -> Any:
    """Of several complaints about one value, the one that fits what was written."""
    text = isinstance(node, Scalar) and isinstance(node.value, str) and not is_observed(node.text)
    literal = [error for error in group if error["type"] == "literal_error"]
    others = [error for error in group if error["type"] != "literal_error"]
    chosen = literal if (text and literal) else (others or literal)
    return chosen[0]


def _describe(error: Any, node: Node, name: str, problems: Problems) -> tuple[str, str, str]:
    """(code, message, hint) for a value that pydantic refused."""
    kind, context = error["type"], error.get("ctx", {})
    label = quoted(name)
    if kind in _TYPES:
        return "GW103", f"{label} must be {_TYPES[kind]}, not {shown(node)}", _type_hint(kind, node, name)
    if kind == "literal_error":
        return _choice(str(context["expected"]), node, label, problems)
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        code = "GW107" if name == "version" else "GW105"
        return code, f"{label} must be {words} {_number(context[key])}, not {shown(node)}", ""
    if kind == "finite_number":
        return "GW105", f"{label} must be a finite number, not {shown(node)}", ""
    if kind in ("too_short", "string_too_short"):
        return "GW105", f"{label} must not be empty", ""
    if kind in ("too_long", "string_too_long"):
        return "GW105", f"{label} is too long: at most {context['max_length']:,}", ""
    if kind == "measured":
        return "GW208", f"{label} cannot be {shown(node)}: {error['msg']}", ""
    if kind == "must_be":
        return "GW105", f"{label} must be {error['msg']}, not {shown(node)}", ""
    if kind == "string_pattern_mismatch":
        pattern = str(context["pattern"])
        wanted = _PATTERNS.get(name) or _PATTERNS.get(pattern, f"text that matches {pattern}")
        return "GW106", f"{label} must be {wanted}, not {shown(node)}", ""
    return "GW105", f"{label}: {str(error['msg'])[:200]}", ""


def _choice(expected: str, node: Node, label: str, problems: Problems) -> tuple[str, str, str]:
    known = re.findall(r"'([^']*)'", expected)
    word = node.text if isinstance(node, Scalar) else ""
    meant = problems.meant(word.strip("."), known) if word else ""
    hint = f"one of: {', '.join(known) or expected}" + (TAKEN_BY if is_observed(word) else "")
    for name, words in (("'of'", words_of_other_tools.COLUMNS), ("'scope'", words_of_other_tools.SCOPES)):
        if label == name and word in words:
            meant, hint = "", words[word]
    return "GW104", f"{label} cannot be {shown(node)}{meant}", hint


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _type_hint(kind: str, node: Node, name: str) -> str:
    if isinstance(node, Map) and kind in ("list_type", "tuple_type") and name in ("sinks", "do"):
        return words_of_other_tools.as_list(name, node.entries)
    if not isinstance(node, Scalar):
        return ""
    if node.value is None:
        return "write a value, or delete the key"
    if kind == "string_type" and name in _PATTERNS and isinstance(node.value, int | float):
        return f"write {_PATTERNS[name]}"
    if kind == "string_type":
        return f'quote it: "{node.text}"' if len(node.text) < 80 and node.text.isprintable() else "quote it"
    if kind in ("list_type", "tuple_type"):
        return (
            f"write a list: [{node.text}]"
            if len(node.text) < 80 and node.text.isprintable()
            else "write a list"
        )
    if kind == "bool_type":
        return advice(node.text, "truth")
    if kind in ("dict_type", "model_type"):
        return f"write {words_of_other_tools.CLIP}" if name == "clip" else ""
    if isinstance(node.value, str) and not node.plain:
        return "delete the quotes" if node.text.replace(".", "").isdigit() else advice(node.text, "number")
    return advice(node.text, "number")
