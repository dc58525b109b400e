"""Contents of nested containers, as torch sees them: tuples, lists, dicts, and classes registered with its pytree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

leaves: Callable[[Any], list[Any]] = pytree.tree_leaves
"""Everything in the containers that is no container itself, in order."""
replaced: Callable[[Callable[[Any], Any], Any], Any] = pytree.tree_map
"""`replaced(function, tree)`: the containers once more, with `function(leaf)` in the place of each leaf."""


def tensors_replaced(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The containers once more, with `function(tensor)` in the place of each tensor."""
    return pytree.tree_map_only(Tensor, function, tree)


def named_leaves(args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each leaf of a call's arguments with its place: `args[0]["x"]`, or the name of a keyword."""
    for (first, *rest), leaf in pytree.tree_leaves_with_path((args, kwargs)):
        tail = pytree.keystr(tuple(rest))
        yield f"args{tail}" if first.idx == 0 else tail.strip("[]'"), leaf  # type: ignore[attr-defined]
