"""This rank's part of each parameter: all of it, or a shard; and whose shards together make it once.

FSDP2's parameters are DTensors and say so themselves. FSDP1 keeps a flat parameter per wrapped module, whose
handle knows the shapes of the originals; with `use_orig_params` each original is a one-dimensional slice of
it, empty on ranks that hold nothing of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn

from gradwatch.records.snapshot import Sites
from gradwatch.taps import module_tree

_FSDP2 = "_get_fsdp_state"
"""A method of the class that `fully_shard` gives a module."""
_FSDP = "torch.distributed.fsdp"


@dataclass(frozen=True, slots=True)
class ShardPlacement:
    """This rank's part of one parameter, `numel` and `ndim` being those of the whole.

    `ranks` whose parts make the parameter once or, where it is also replicated, several times: `first` says
    that this rank stands in the replica that counts. `ranks` None: every rank of the run holds all of it.
    """

    numel: int
    ndim: int
    sharded: bool = False
    ranks: frozenset[int] | None = None
    first: bool = True

    def counts(self, rank: int, leader: int) -> bool:
        """True if this rank's part is to be added up; `leader` is the lowest rank with the same parameters."""
        if self.ranks is None:
            return rank == leader
        return self.first and leader in self.ranks


def is_shard(param: Tensor) -> bool:
    """True if this rank holds only a part of a parameter (FSDP2's DTensor, FSDP1's flat parameter)."""
    flat = getattr(param, "_fsdp_flattened", False) or type(param).__name__ == "FlatParameter"
    return bool(flat) or hasattr(param, "to_local")


def placements(params: Sequence[nn.Parameter], models: Iterable[nn.Module]) -> list[ShardPlacement]:
    """This rank's part of each of K parameters."""
    flattened = [getattr(param, "_fsdp_flattened", False) for param in params]
    flats = dict(_flat_placements(models)) if any(flattened) else {}
    return [flats.get(id(param)) or _placement(param) for param in params]


def sharded_positions(params: Sequence[nn.Parameter], models: Iterable[nn.Module]) -> list[int]:
    """The positions of the parameters of which this rank holds only a part."""
    if not any(map(is_shard, params)):
        return []
    return [k for k, held in enumerate(placements(params, models)) if held.sharded]


def local_taps(params: Sequence[nn.Parameter], models: Iterable[nn.Module]) -> list[Tensor | None]:
    """The tensors whose hooks see this rank's own gradient of each of K parameters; None where no hook does.

    Autograd accumulates into the parameter itself, under FSDP2 into its unsharded twin, which exists from the
    first forward on. A slice of FSDP1 (`use_orig_params`) has no hook that sees its gradient.
    """
    spread = [param for param in params if hasattr(param, "to_local")]
    unsharded = dict(_unsharded(models)) if spread else {}
    return [unsharded.get(id(param)) if _has_no_gradient(param) else param for param in params]


def offloaded(models: Iterable[nn.Module]) -> dict[int, nn.Parameter]:
    """Parameters, by id, whose shards FSDP2 keeps on the host (`CPUOffloadPolicy`).

    A post-accumulate hook on one of them makes FSDP2 wait for its gradient to be copied.
    """
    return offloaded_in(module for model in models for module in module_tree.modules(model))


def offloaded_in(modules: Iterable[nn.Module]) -> dict[int, nn.Parameter]:
    """Parameters of these modules' own that are `offloaded`."""
    found = {}
    for module in modules:
        for one in _fsdp_params(module):
            if one.offload_to_cpu:
                found[id(one.sharded_param)] = one.sharded_param
    return found


def fsdp2_in(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those that `fully_shard` was called on."""
    return [module for module in modules if hasattr(type(module), _FSDP2)]


def fsdp2_groups(module: Any) -> list[Any]:
    """The groups of parameters that FSDP2 gathers and reduces together in a module's forward and backward."""
    if not hasattr(type(module), _FSDP2):
        return []
    state = module._get_fsdp_state()
    groups = getattr(
        state, "_fsdp_param_groups", None
    )  # several with mixed policies; one in earlier versions
    return [one for one in (groups if groups is not None else [state._fsdp_param_group]) if one is not None]


def _fsdp_params(module: Any) -> Iterator[Any]:
    return (param for group in fsdp2_groups(module) for param in group.fsdp_params)


def _has_no_gradient(param: Tensor) -> bool:
    slice_of_flat = getattr(param, "_fsdp_flattened", False) and not hasattr(param, "_fqns")
    return hasattr(param, "to_local") or slice_of_flat


def _unsharded(models: Iterable[nn.Module]) -> Iterator[tuple[int, Tensor]]:
    """(id of a DTensor parameter, its unsharded twin) for all of FSDP2's that have one already."""
    for module in (module for model in models for module in module_tree.modules(model)):
        for one in _fsdp_params(module):
            unsharded = getattr(one, "_unsharded_param", None)
            if unsharded is not None:
                yield id(one.sharded_param), unsharded


def as_sharded(
    named: Sequence[tuple[str, nn.Parameter]], models: Iterable[nn.Module]
) -> Sequence[tuple[str, nn.Parameter]]:
    """The parameters of these models with FSDP2's own in the place of gathered ones, which no optimizer has."""
    if _FSDP not in sys.modules:  # most models, without a walk
        return named
    gathered = gathered_in(module for model in models for module in module_tree.modules(model))
    return [(name, gathered.get(id(param), param)) for name, param in named] if gathered else named


def gathered_in(modules: Iterable[nn.Module]) -> dict[int, nn.Parameter]:
    """FSDP2's parameters by the ids of their gathered twins, for which these modules' own have some.

    Modules show the twins between forward and backward, a root until its backward is over; then these have no storage.
    """
    sharded = fsdp2_in(modules) if _FSDP in sys.modules else ()
    if not sharded:  # without a call for each module
        return {}
    return {
        id(one._unsharded_param): one.sharded_param
        for module in sharded
        for one in _fsdp_params(module)
        if getattr(one, "_unsharded_param", None) is not None
    }


def whole(sites: Sites, held: Sequence[ShardPlacement]) -> Sites:
    """The sites with the sizes and dimensions of the whole parameters."""
    return replace(
        sites,
        numels=np.array([one.numel for one in held], np.int64),
        ndims=np.array([one.ndim for one in held], np.int64),
    )


def _placement(param: Any) -> ShardPlacement:
    if not hasattr(param, "to_local"):
        return ShardPlacement(param.numel(), param.dim())
    mesh = param.device_mesh
    spots = zip(param.placements, mesh.get_coordinate() or (), strict=False)
    first = all(spot == 0 for placement, spot in spots if placement.is_replicate())
    sharded = any(not placement.is_replicate() for placement in param.placements)
    ranks = frozenset(map(int, mesh.mesh.flatten().tolist()))  # sync: the mesh lies on the host
    return ShardPlacement(param.numel(), param.dim(), sharded, ranks, first)


def _flat_placements(models: Iterable[nn.Module]) -> Iterator[tuple[int, ShardPlacement]]:
    """(id of a parameter, holding) for all that FSDP1 has flattened."""
    for module in (module for model in models for module in module_tree.modules(model)):
        handle: Any = getattr(module, "_handle", None)
        flat: Any = getattr(handle, "flat_param", None)
        if flat is None:
            continue
        ranks, first = _owners(module, handle)
        yield id(flat), ShardPlacement(sum(flat._numels), 1, handle.uses_sharded_strategy, ranks, first)
        for param, shape in zip(flat._params or (), flat._shapes, strict=False):
            yield (
                id(param),
                ShardPlacement(shape.numel(), len(shape), handle.uses_sharded_strategy, ranks, first),
            )


def _owners(module: Any, handle: Any) -> tuple[frozenset[int] | None, bool]:
    """The ranks an FSDP1 module is sharded over, and whether this one is in the first of its replicas."""
    if not handle.uses_sharded_strategy:  # NO_SHARD: gradients are all-reduced, as under DDP
        return None, True
    ranks = frozenset(dist.get_process_group_ranks(handle.process_group))
    between = getattr(module, "_inter_node_pg", None)
    if between is None:
        return ranks, True
    replicas, here = sorted(dist.get_process_group_ranks(between)), dist.get_rank()
    # Of the others' groups this rank knows none: a mesh is regular, so they are its own, moved by as many ranks.
    owners = frozenset(rank + replica - here for rank in ranks for replica in replicas)
    return owners, here == replicas[0]
