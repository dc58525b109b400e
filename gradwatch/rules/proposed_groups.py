"""Groups of parameters that the names of a model suggest, for a rule file that begins."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("adapters", ("*lora_*", "*adapter*")),
    ("experts", ("*experts.*", "*.expert.*")),
    ("routers", ("*router*", "*gate.weight", "*gating*")),
    ("embeddings", ("*embed*", "*_emb", "*_emb.*", "*wte.*", "*wpe.*")),
    ("head", ("*lm_head*", "*classifier*", "*head.*", "fc.*")),
    ("norms", ("*norm*", "*.ln_*", "*.ln[0-9]*", "*.bn[0-9]*", "bn[0-9]*")),
    ("attention", ("*attn*", "*attention*", "*[qkvo]_proj*")),
    ("mlp", ("*mlp*", "*feed_forward*", "*ffn*", "*.linear[12].*", "*.fc[12].*")),
    ("convolutions", ("*conv*", "*downsample*")),
    ("recurrent", ("*lstm*", "*gru*", "*rnn*", "*weight_hh_*")),
)
"""Parts of models by the names that libraries give them; a parameter that several match belongs to the first."""
MOST_MODULES = 8
"""Modules at the top that become groups where no name is known."""
_EXAMPLES = 2
_PART = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,40}")


@dataclass(frozen=True, slots=True)
class ProposedGroup:
    """A group: its name, the globs that match something, how many parameters are in it, and the first of these."""

    name: str
    globs: tuple[str, ...]
    count: int
    examples: tuple[str, ...]


def proposed(names: Sequence[str]) -> list[ProposedGroup]:
    """The groups of `names`, in their order: a parameter that several match belongs to the first.

    Parts that are known by their names; of a model with none, its modules at the top, if there are 2 to MOST_MODULES.
    A group that would have all parameters says nothing, and is none.
    """
    found = list(_known(names)) or list(_modules(names))
    return [group for group in found if group.count < len(names)]


def why_none(names: Sequence[str]) -> str:
    """The reason why `proposed` makes no group of these names, of which there is one at least."""
    if found := [*_known(names), *_modules(names)]:
        return f"all of them would be in one, {found[0].name}"
    tops = {name.partition(".")[0] for name in names}
    if len(tops) == 1:
        why = "all of them are in one module"
    elif len(tops) > MOST_MODULES:
        why = f"there are more than {MOST_MODULES} modules at the top"
    elif all(map(str.isdecimal, tops)):
        why = "the modules at the top are numbered"
    else:
        why = "the modules at the top have names that are no words"
    return f"no name is that of a known part, and {why}"


def _known(names: Sequence[str]) -> Iterator[ProposedGroup]:
    left = list(names)
    for kind, globs in KINDS:
        of = {glob: {name for name in left if fnmatch.fnmatchcase(name, glob)} for glob in globs}
        matched = [name for name in left if any(name in found for found in of.values())]
        if matched:
            used = tuple(glob for glob, found in of.items() if found)
            yield ProposedGroup(kind, used, len(matched), tuple(matched[:_EXAMPLES]))
            taken = set(matched)
            left = [name for name in left if name not in taken]


def _modules(names: Sequence[str]) -> Iterator[ProposedGroup]:
    tops: dict[str, list[str]] = {}
    for name in names:
        tops.setdefault(name.partition(".")[0], []).append(name)
    if 2 <= len(tops) <= MOST_MODULES and all(map(_PART.fullmatch, tops)):
        for top, found in tops.items():
            yield ProposedGroup(
                top, (top if found == [top] else f"{top}.*",), len(found), tuple(found[:_EXAMPLES])
            )
