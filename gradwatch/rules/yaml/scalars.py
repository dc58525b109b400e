"""Plain words to values: the YAML 1.2 core schema, without its traps.

`1e-7` and `1e3` are numbers; `on`, `no`, `1:30`, `010` and `1_000` stay text, so that a number or a truth
value spelled in a doubtful way is refused where it is used, with advice, instead of meaning something
else. A float that is a whole number is an int (`1e3` samples are 1000), as in JSON Schema.
"""

from __future__ import annotations

import math
import re
from typing import Any

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), math.inf),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -math.inf),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
}
_LONGEST_NUMBER = 64
_EXACT = 2**53


def resolve(text: str) -> Any:
    """The value of an unquoted scalar: None, bool, int, float or the text itself."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > _LONGEST_NUMBER or text[0] not in "+-.0123456789":
        return text
    if _INT.fullmatch(text):
        return int(text)
    if _BASED.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        number = float(text)
        return int(number) if abs(number) < _EXACT and number.is_integer() else number
    return text


def advice(text: str, wanted: str) -> str:
    """Advice on plain `text` where `wanted` ("number", "truth") was needed, or ""."""
    if wanted == "truth":
        return _truth(text)
    if re.fullmatch(r"[-+]?0[0-9_]+", text):
        return f"a leading zero is octal to some readers: write {text.lstrip('+-0') or '0'}, or 0o… for octal"
    if re.fullmatch(r"[-+]?[0-9_]+(\.[0-9_]*)?", text) and "_" in text:
        return f"write {text.replace('_', '')}"
    if re.fullmatch(r"[0-9]+(:[0-9]+)+", text):
        return "this is a time, or a number in base 60, to some readers: write a plain number"
    if (unit := re.fullmatch(r"([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z%]+)", text)) is not None:
        return f"a bare number without a unit; {unit.group(2)!r} is not understood here"
    if text.lower().strip("+-.") in ("nan", "inf", "infinity"):
        return "a finite number is needed"
    return ""


def _truth(text: str) -> str:
    word = text.lower()
    if word in ("yes", "on", "y", "1"):
        return "write true"
    if word in ("no", "off", "n", "0"):
        return "write false"
    return "write true or false"
