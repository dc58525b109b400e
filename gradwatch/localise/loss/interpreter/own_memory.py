"""Tensors and containers that interpreted code made itself: into nothing else may it write.

What it writes into lists and dicts of the script is left out, and reading these afterwards is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from gradwatch.localise.diagnosis.tensor_values import tensors
from gradwatch.localise.held_calls.module_attributes import Refused
from gradwatch.localise.loss.interpreter import purity
from gradwatch.localise.loss.interpreter.effort_limits import Effort
from gradwatch.localise.replay.first_nonfinite_in_forward import key_of

READ_BEFORE = "loss code reads `{name}` and changes it, and what it was before is not known"
WRITES = "loss code writes in place into a tensor that it did not make"


class OwnMemory:
    """The tensors and containers made here, and the attributes set here, beside their objects.

    `depth`: how many functions are being interpreted. What the loop itself (0) wrote into a tensor of its own is in it
    already; what a function of it writes into one is refused.
    """

    def __init__(self, effort: Effort) -> None:
        self.depth = 0
        self._effort = effort
        self._tensors: dict[
            int, Tensor
        ] = {}  # by the key of their memory, which is given to no other meanwhile
        self._containers: dict[int, Any] = {}
        self._incomplete: dict[int, Any] = {}  # containers of the script's that lack what was written here
        self._attributes: dict[tuple[int, str], tuple[Any, Any]] = {}
        self._read: dict[tuple[int, str], Any] = {}  # attributes of the script's own, as they are now
        self._unknown: dict[tuple[int, str], Any] = {}  # of which what they were before is not known

    def function_begins(self) -> None:
        """Note that a function of the script is interpreted from here on."""
        self.depth += 1

    def function_ends(self) -> None:
        """Note that it has returned, or raised."""
        self.depth -= 1

    def add_result(self, result: Any, given: Any) -> Any:
        """Note the tensors of a result whose memory is none of what was given. Returns it."""
        made = tensors(result)
        if made:
            held = {key_of(tensor) for tensor in tensors(given)} - self._tensors.keys()
            for one in made:
                key = key_of(one)
                if key not in held and key not in self._tensors:
                    self._tensors[key] = one
                    self._effort.memory(one.numel() * one.element_size())
        return result

    def add_container(self, value: Any) -> Any:
        """Note a container or an iterator. Returns it."""
        if type(value) in (list, dict, set) or hasattr(value, "__next__"):
            self._containers[id(value)] = value
        return value

    def has(self, value: Any) -> bool:
        """True for a tensor or a container made here."""
        if isinstance(value, Tensor):
            return key_of(value) in self._tensors
        return id(value) in self._containers

    def writable(self, tensor: Tensor) -> bool:
        """True if it may be written into; False if the script has done so. Raises Refused where neither is so."""
        if self.has(tensor):
            return True
        if self.depth:
            raise Refused(WRITES)
        return False

    def put(self, owner: Any, place: Any, value: Any) -> None:
        """`owner[place] = value`, on what was made here; left out where it is a container of the script's."""
        if isinstance(owner, Tensor):
            purity.checked_arguments((owner, value), {})
            if self.writable(owner):
                owner[place] = value
        elif self.has(owner):
            owner[place] = value
        elif type(owner) in (list, dict):
            self.leave_out(owner)
        else:
            raise Refused(f"loss code writes into {type(owner).__name__}")

    def leave_out(self, container: Any) -> None:
        """A container of the script's lacks from now on what was written into it here."""
        self._incomplete[id(container)] = container

    def check_complete(self, value: Any, name: str) -> None:
        """Raise `Refused` where a container of the script's is read that lacks something."""
        if id(value) in self._incomplete:
            raise Refused(f"loss code reads `{name}`, which it has written into")

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        """`owner.name = value`, beside the object.

        Raises `Refused` where it was read before: the first run has set it already, and what it was is not known.
        """
        if isinstance(owner, Tensor):
            raise Refused("loss code sets an attribute of a tensor")
        if (id(owner), name) in self._read:
            raise Refused(READ_BEFORE.format(name=name))
        self._unknown.pop((id(owner), name), None)
        self._attributes[id(owner), name] = owner, value

    def release_attribute(self, owner: Any, name: str) -> None:
        """`owner.name += …`, of the script's own: the first run has added to it already."""
        if (id(owner), name) in self._read:
            raise Refused(READ_BEFORE.format(name=name))
        self._unknown[id(owner), name] = owner

    def add_read(self, owner: Any, name: str) -> None:
        """An attribute of the script's was read, which it may have set in its first run."""
        if (id(owner), name) in self._unknown:
            raise Refused(READ_BEFORE.format(name=name))
        self._read[id(owner), name] = owner

    def attribute(self, owner: Any, name: str) -> tuple[Any, ...]:
        """(the value set here,), or () where none was: the script's own is read."""
        return self._attributes.get((id(owner), name), (None,))[1:]

    def check_iterators(self, values: Iterable[Any]) -> None:
        """Raise `Refused` for an iterator of the script's: to look into it would use it up."""
        if any(hasattr(value, "__next__") and not self.has(value) for value in values):
            raise Refused("loss code iterates over an iterator of the script's")

    def check_hooks(self, given: Iterable[Tensor]) -> None:
        """Raise `Refused` where a hook of the script's would be called once more."""
        if any(one._backward_hooks and not self.has(one) for one in given):
            raise Refused("loss code differentiates a tensor with a hook")

    def check_in_place(self, func: Any, args: Any, kwargs: Any) -> None:
        """Raise `Refused` where a function would write into a tensor that was not made here."""
        if not purity.is_in_place(func, args, kwargs):
            return
        # `_foreach_mul_([…], 2)` writes into all of its first argument; what is given by name is not told apart.
        written = tensors(args[0]) if args else tensors(kwargs)
        if any(not self.writable(one) for one in written):
            raise Refused(WRITES)
