"""The inside of a frame: a JSON header and little-endian arrays, bit-exact and free of code.

    u32 length of the header · header, ASCII JSON · the arrays, one after the other, without padding

The header is an object; `kind` names the entry, `arrays` lists `[name, code, count]` in order of the bytes.
Codes: `f4` `f8` `i4` `i8` `u1` as numpy spells them, `b` = bools packed eight to a byte, highest bit first.
Non-finite numbers in the JSON are the strings "NaN", "Infinity", "-Infinity"; -0.0 and subnormals are JSON
numbers that read back to the same bits. Nothing here can run code: no pickle, no object arrays.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.journal.crash_safe_frames import MAX_PAYLOAD

Array = NDArray[Any]
_LENGTH = struct.Struct("<I")
_CODES = {code: np.dtype("<" + code) for code in ("f4", "f8", "i4", "i8", "u1")}


@dataclass(frozen=True, slots=True)
class Payload:
    """A decoded payload: what `kind` of entry, its JSON `fields`, its `arrays` by name."""

    kind: str
    fields: Mapping[str, Any]
    arrays: Mapping[str, Array]


def encode_payload(kind: str, fields: Mapping[str, Any], arrays: Mapping[str, Array]) -> bytes:
    """The bytes of one payload; 1-D arrays only, bool or one of the five codes.

    `ValueError` for a non-finite float in `fields` (spell it with `number`) or more bytes than a frame takes,
    `TypeError` for any other dtype.
    """
    listing: list[tuple[str, str, int]] = []
    blobs: list[bytes] = []
    for name, array in arrays.items():
        code = _code(array)
        listing.append((name, code, array.size))
        blobs.append(
            (np.packbits(array) if code == "b" else array.astype(_CODES[code], copy=False)).tobytes()
        )
    document = {"kind": kind, **fields, "arrays": listing}
    header = _ENCODER.encode(document).encode("ascii")
    payload = b"".join([_LENGTH.pack(len(header)), header, *blobs])
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(f"an entry of {len(payload)} bytes is too large for a journal")
    return payload


def _code(array: Array) -> str:
    code = "b" if array.dtype == np.bool_ else array.dtype.str[1:]
    if array.ndim != 1 or (code != "b" and code not in _CODES):
        raise TypeError(f"a journal holds no array of {array.dtype} with {array.ndim} dimensions")
    return code


def decode_payload(data: bytes) -> Payload:
    """The inverse of `encode_payload`; `ValueError` for anything that is not exactly such a payload."""
    try:
        (length,) = _LENGTH.unpack_from(data)
        document = _DECODER.decode(data[4 : 4 + length].decode("ascii"))
        kind, listing = document.pop("kind"), document.pop("arrays")
        arrays, end = _split(data, 4 + length, listing)
    except (struct.error, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a payload: {error!r}") from error
    if end != len(data) or not isinstance(kind, str):
        raise ValueError("not a payload: its length does not match its header")
    return Payload(kind, document, arrays)


def _split(data: bytes, start: int, listing: list[tuple[str, str, int]]) -> tuple[dict[str, Array], int]:
    arrays: dict[str, Array] = {}
    for name, code, count in listing:
        if not isinstance(count, int) or not 0 <= count <= 8 * len(data):
            raise ValueError(f"not a payload: array of {count!r} elements")
        dtype = _CODES["u1" if code == "b" else code]
        size = (count + 7) // 8 if code == "b" else count
        array = np.frombuffer(data, dtype, size, start).copy()  # aligned, and free of the payload
        start += array.nbytes
        arrays[name] = np.unpackbits(array, count=count).astype(bool) if code == "b" else array
    return arrays, start


def of_length(array: Array, length: int) -> Array:
    """The array; `ValueError` where it has another length."""
    if len(array) != length:
        raise ValueError(f"an array of {len(array)} elements where {length} are due")
    return array


def _refuse(constant: str) -> float:
    raise ValueError(f"not a payload: bare {constant} in the JSON")


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_DECODER = json.JSONDecoder(parse_constant=_refuse)
