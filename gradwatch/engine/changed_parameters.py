"""A change of the parameters of an optimizer, in words."""

from __future__ import annotations

from gradwatch.records.snapshot import Sites
from gradwatch.runtime.printable import shortened


def changed_parameters(before: Sites, now: Sites) -> str:
    """The parameters that an optimizer has gained or lost, in words; "" if there are none."""
    was, has = (
        {name: None for name, kind in zip(sites.names, sites.kinds, strict=True) if kind == "param"}
        for sites in (before, now)
    )
    if was and has and was.keys().isdisjoint(has):  # or it is another optimizer, after one that is gone
        return f"the optimizer trains other parameters, {len(has)} in the place of {len(was)}: {shortened(list(has))}"
    joined, left = [name for name in has if name not in was], [name for name in was if name not in has]
    changes = {"joined": joined, "left": left}.items()
    return "; ".join(
        f"{len(names)} parameter{'s' * (len(names) > 1)} {word} the optimizer: {shortened(names)}"
        for word, names in changes
        if names
    )
