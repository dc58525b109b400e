"""All the faulty models: those with one operation at fault, and those whose structure is the difficulty."""

from __future__ import annotations

from tests.localise import models, structures
from tests.localise.models import Faulty

MODELS: tuple[type[Faulty], ...] = tuple(
    each
    for module in (models, structures)
    for each in list(vars(module).values())
    if isinstance(each, type)
    and issubclass(each, Faulty)
    and each is not Faulty
    and each.__module__ == module.__name__
)
