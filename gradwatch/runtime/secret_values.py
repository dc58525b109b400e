"""Secrets (passwords, tokens, addresses that are secret themselves): what counts as one, and how it is masked.

In a rule file a secret is `${NAME}`, an environment variable (`from_environment`). Whatever is logged, shown or
exported and may hold one of a user, such as a URL or a line of a rule file, goes through `without_passwords` or
`masked_line` first.
"""

from __future__ import annotations

import os
import re

from gradwatch.errors import AttachError

_VARIABLE = r"\$\{[A-Za-z_][A-Za-z0-9_]{0,127}\}"
SECRET = rf"^{_VARIABLE}$"
SECRET_URL = rf"^(https?://[^\s@]{{1,1000}}|{_VARIABLE})$"
PATTERNS = (SECRET, SECRET_URL)
"""Patterns of values of a rule file that may be secret: what does not match is not shown."""
URL = r"^https?://[^\s@]{1,1000}$"
"""Pattern of one that is no secret: what does not match is shown unless it holds an @."""

_ENDS = re.compile(r"""(\n|,\s|["'](?=[\s,:}\]]|$)|\s#)""")  # of a value among others on a line
_LOGIN = re.compile(r"(?<!\S)[^\s:@]+:\S*(?=@)")  # user:password@host
_KEYED = re.compile(r"""(\b(?:password|token)["']?\s*:\s+["']?)(?!\$\{)([^\s,}\]"']+)""")


def asterisks(text: str, begin: int, end: int) -> str:
    """The text with an asterisk in place of each of these characters, so that all others stay in their columns."""
    return text[:begin] + "*" * len(text[begin:end]) + text[end:]


def without_password(value: str) -> str:
    """One value, all of which may be a URL, with asterisks in place of its user and password."""
    before, scheme, _ = value.partition("://")
    if scheme:
        begin = len(before) + len(scheme)
        return asterisks(value, begin, max(begin, value.rfind("@")))
    return _LOGIN.sub(lambda found: "*" * len(found[0]), value)


def without_passwords(text: str) -> str:
    """Any text with asterisks in place of user and password of every URL in it."""
    return "".join(map(without_password, _ENDS.split(text))) if "@" in text else text


def masked_line(line: str) -> str:
    """A line of a rule file with asterisks in place of passwords in URLs, and of values of the keys named so."""
    return without_passwords(_KEYED.sub(lambda found: found[1] + "*" * len(found[2]), line))


def holds_password(url: str) -> bool:
    """True if a user or a password may be in a URL, which may be wrong in other ways too."""
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
        whole = not parts.netloc or (parts.port or 0) < 0  # a port that is no number raises
    except ValueError:  # whose text shows the URL
        whole = True
    return "@" in (url if whole else parts.netloc)


def from_environment(text: str, option: str, words: bool = False) -> str:
    """`text`, or, where it is `${NAME}`, the value of that environment variable.

    Raises AttachError, which never shows a value, where it has none, or, without `words`, is not one printable word.
    """
    if not re.fullmatch(SECRET, text):
        return text
    name = text[2:-1]
    value = os.environ.get(name, "").strip()
    if not value:
        raise AttachError(
            f"nothing can be sent: {option} is {text}, and the environment variable {name} is not set"
        )
    if not words and (" " in value or not (value.isascii() and value.isprintable())):
        raise AttachError(
            f"nothing can be sent: {option} is {text}, and the value of {name} is not one printable word"
        )
    return value
