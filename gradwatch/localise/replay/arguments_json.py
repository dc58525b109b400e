"""The arguments of a call as JSON, and back: containers of tensors and plain values, and nothing that could run.

What a tree may hold is written down in `gradwatch.incidents.bundle.incident_json`. A value of any other type becomes a
`missing` that names its class: to make one again, code chosen by whoever wrote the file would have to be imported.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gradwatch.runtime.json_numbers import json_ready

DEPTH = 32
DICTS = (dict, OrderedDict)
DTYPES = {
    name: found for name in sorted(dir(torch)) if isinstance(found := getattr(torch, name), torch.dtype)
}


class TreeError(ValueError):
    """A tree that is none; the message begins with the place in it."""


def encode(value: Any, tensor: Callable[[Tensor], Any], depth: int = DEPTH) -> dict[str, Any]:
    """A value as a tree; `tensor(t)` says what stands for a tensor."""
    if isinstance(value, Tensor):
        document: dict[str, Any] = tensor(value)
        return document
    if not depth:
        return {"missing": "nested too deep"}
    if type(value) in (list, tuple):
        items = [encode(item, tensor, depth - 1) for item in value]
        return {"list" if isinstance(value, list) else "tuple": items}
    if type(value) in DICTS:
        if all(map(_plain, value)):
            return {"dict": [[key, encode(item, tensor, depth - 1)] for key, item in value.items()]}
        return {"missing": "a dict whose keys are neither text nor integers"}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if type(value) is float and not math.isfinite(value):
        return {"float": json_ready(value)}
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    return {"missing": f"a value of type {type(value).__module__}.{type(value).__qualname__}"}


def _plain(key: Any) -> bool:
    return type(key) in (str, int)


def decode(
    tree: Any, tensor: Callable[[Mapping[str, Any], str], Tensor], at: str, depth: int = DEPTH + 1
) -> Any:
    """The value of a tree from anywhere; `tensor(described, place)` finds a tensor.

    Raises:
        TreeError: what is there is no tree, is nested too deep, or stands for something that was not kept.
    """
    if not isinstance(tree, dict) or len(tree) != 1 or not depth:
        raise TreeError(f"{at}: not a value: {_short(tree)}")
    ((kind, said),) = tree.items()
    if kind == "value" and (said is None or isinstance(said, (bool, int, float, str))):
        return said
    if kind == "float" and said in ("NaN", "Infinity", "-Infinity"):
        return float(said)
    if kind == "dtype" and isinstance(said, str) and said in DTYPES:
        return DTYPES[said]
    if kind == "missing":
        raise TreeError(f"{at}: was not kept: {_short(said)}")
    if kind == "tensor" and isinstance(said, dict):
        return tensor(said, at)
    if kind in ("list", "tuple") and isinstance(said, list):
        items = [decode(item, tensor, f"{at}[{n}]", depth - 1) for n, item in enumerate(said)]
        return items if kind == "list" else tuple(items)
    if kind == "dict" and isinstance(said, list):
        return dict(_items(said, tensor, at, depth - 1))
    raise TreeError(f"{at}: not a value: {_short(tree)}")


def _items(
    said: list[Any], tensor: Callable[[Mapping[str, Any], str], Tensor], at: str, depth: int
) -> Iterator[tuple[Any, Any]]:
    for item in said:
        if not (isinstance(item, list) and len(item) == 2 and _plain(item[0])):
            raise TreeError(f"{at}: not an item of a dict: {_short(item)}")
        yield item[0], decode(item[1], tensor, f"{at}[{item[0]!r:.60}]", depth)


def missing(tree: Any, at: str = "") -> Iterator[str]:
    """The parts of a tree that were not kept, with their places."""
    ((kind, said),) = tree.items()
    if kind == "missing":
        yield f"{at}: {said}"
    elif kind in ("list", "tuple"):
        for n, item in enumerate(said):
            yield from missing(item, f"{at}[{n}]")
    elif kind == "dict":
        for key, item in said:
            yield from missing(item, f"{at}[{key!r}]")


def _short(value: Any) -> str:
    try:
        text = value if isinstance(value, str) else json.dumps(value)
    except (ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= 80 else f"{text[:79]}…"
