"""Tensors that no module holds and that the script itself trains: `w = torch.randn(…, requires_grad=True)`.

An input of a model may want a gradient too (adversarial examples, saliency), but it is another tensor for each batch,
or never changes. So a tensor is taken to be trained if a later look finds the same tensor with other values. Between
two looks a hook that does nothing identifies it: a weak reference would make `torch.utils.swap_tensors` raise, and a
strong one would keep every input alive. A tensor that is updated by making a new one (`w = (w -
w.grad).detach().requires_grad_()`) cannot be distinguished from an input, and is not watched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradwatch.reading.foreach_norms import widest
from gradwatch.taps.dynamo import untraced
from gradwatch.taps.hook_ids import own_ids
from gradwatch.taps.swap_tensors import contents, revive

COMPARED = 1024
"""Elements of each that are compared one by one, beside the sums of all."""


class _Candidate(NamedTuple):
    """A tensor as it was when it was looked at; `handle` is of the hook that identifies it.

    `contents` is the tensor that it stood for: a script may swap its contents (`swap_tensors`).
    """

    handle: RemovableHandle
    contents: int
    values: Tensor


class TensorsWithoutModule:
    """The tensors reached at the last look, to be found again at the next one."""

    def __init__(self) -> None:
        self._candidates: list[_Candidate] = []
        self._named = 0

    def reset(self) -> None:
        """Remove every hook, and begin with a first look again."""
        while self._candidates:
            self._candidates.pop().handle.remove()

    def moved(self, leaves: Sequence[Tensor]) -> list[tuple[str, nn.Parameter]]:
        """(name, tensor) of the `leaves` that the last look found too, if some of them have other values now."""
        before = {
            id(hooks): one for one in self._candidates if (hooks := one.handle.hooks_dict_ref()) is not None
        }
        leaves = [leaf for leaf in leaves if _is_plain(leaf)]
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return []  # to look would break the user's CUDA graph
        same = [(leaf, then) for leaf in leaves if (then := before.get(id(_hooks(leaf)))) is not None]
        trained = any(_differ(_values(leaf), then.values) for leaf, then in same)
        self.reset()
        if trained:
            for leaf, then in same:
                if contents(leaf) != then.contents:
                    revive(leaf, "_post_accumulate_grad_hooks", then.handle.id)
            return [self._name(leaf) for leaf, _ in reversed(same)]  # nearly the order of the forward
        for leaf in leaves:
            with own_ids:
                self._candidates.append(
                    _Candidate(
                        leaf.register_post_accumulate_grad_hook(_nothing), contents(leaf), _values(leaf)
                    )
                )
        return []

    def _name(self, leaf: Any) -> tuple[str, nn.Parameter]:
        self._named += 1
        return f"tensor{self._named - 1}[{'x'.join(map(str, leaf.shape))}]", leaf


def _is_plain(leaf: Tensor) -> bool:
    """True if its values lie in this process, one after the other: not spread over ranks, sparse or on no device."""
    return type(leaf) in (Tensor, nn.Parameter) and leaf.layout is torch.strided and not leaf.is_meta


def _hooks(leaf: Any) -> object:
    return leaf._post_accumulate_grad_hooks


def _values(leaf: Tensor) -> Tensor:
    """Some of the elements, and sums of all of them: of a large table perhaps a few rows are updated."""
    flat = leaf.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    wide = widest(flat.device)
    some = flat[:: max(1, flat.numel() // COMPARED)].to(wide)
    sums = flat.sum(dtype=wide), torch.linalg.vector_norm(flat, dtype=wide)
    return torch.cat([some, torch.stack(sums)])


def _differ(now: Tensor, then: Tensor) -> bool:
    if now.shape != then.shape:
        return True
    return not torch.allclose(now, then, rtol=0.0, atol=0.0, equal_nan=True)


@untraced
def _nothing(_: Tensor) -> None:
    """Do nothing: a hook whose place in the table marks the tensor."""
