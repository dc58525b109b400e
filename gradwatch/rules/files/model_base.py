"""The pydantic models of maps in a rule file: their base, and those of the parameters that actions and sinks list."""

from __future__ import annotations

from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from gradwatch.rules.field_types import Key, Parameters

# Built when first used: a file that names no detector of a kind should not pay for it.
CONFIG = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)


class Model(BaseModel):
    """One map of a rule file."""

    model_config = CONFIG


def unset(description: str, **constraints: Any) -> Any:
    """A key that may be left out; what then applies depends on `defaults` and on the kind."""
    return Field(default=None, description=description, **constraints)


_PARAMETERS_MODELS: dict[type[Parameters], type[BaseModel]] = {}


def parameters_model(cls: type[Parameters]) -> type[BaseModel]:
    """The model of the parameters that a class lists."""
    model = _PARAMETERS_MODELS.get(cls)
    if model is None:
        model = _PARAMETERS_MODELS[cls] = _parameters_model(cls)
    return model


def _parameters_model(cls: type[Parameters]) -> type[BaseModel]:
    keys: dict[str, Any] = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        said = getattr(cls, name, Key(..., ""))
        keys[name] = (hint, Field(default=said.default, description=said.description or None))
    return create_model(cls.__name__, __config__=CONFIG, __doc__=cls.__doc__, **keys)
