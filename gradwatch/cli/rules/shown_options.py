"""The options of a sink as they may be printed: what may be a secret is masked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_type_hints
from urllib.parse import urlsplit

from gradwatch.rules.rule_set import SinkSpec
from gradwatch.runtime.secret_values import SECRET, without_passwords

MASK = "***"
_SECRET_NAME = re.compile(r"token|passw|secret|credential|auth|(^|_)key", re.I)


def shown_options(spec: SinkSpec) -> dict[str, Any]:
    """The options that the file gives to a sink.

    Masked are texts below names such as token and password, and what follows the host of an address that may be a
    secret (of a webhook, or of a third party's sink). `${NAME}`, which names an environment variable, is shown.
    """
    from gradwatch.rules.sink_kinds import SINKS, SecretUrl

    options = SINKS[spec.kind].options if spec.kind in SINKS else None
    hints = {} if options is None else get_type_hints(options, include_extras=True)
    return {
        name: _shown(name, value, options is None or hints.get(name) == SecretUrl)
        for name, value in spec.options.items()
    }


def _shown(name: str, value: Any, secret_address: bool) -> Any:
    if isinstance(value, Mapping):
        return {key: _shown(str(key), each, secret_address) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(name, each, secret_address) for each in value]
    if not isinstance(value, str) or re.fullmatch(SECRET, value):
        return value
    if _SECRET_NAME.search(name) and not name.endswith("_file"):
        return MASK
    secret = secret_address and re.match(r"[a-z][a-z0-9+.-]*://", value, re.I)
    return _address(value) if secret else without_passwords(value)


def _address(url: str) -> str:
    """A URL up to its host."""
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
    except ValueError:
        return MASK
    return f"{parts.scheme}://{host}" + (f"/{MASK}" if url.rstrip("/") != f"{parts.scheme}://{host}" else "")
