"""Secrets in a rule file are in no message about it, whatever is wrong."""

from __future__ import annotations

import pytest

from gradwatch.errors import RuleFileError
from gradwatch.rules.files import parse_rules

URL = "http://me:hunter@host"
LONG = f"http://me:{'hunter' * 20}@host"


def refused(*lines: str) -> str:
    """All that the refusal of a rule file with these lines says."""
    with pytest.raises(RuleFileError) as caught:
        parse_rules("\n".join(("version: 1", *lines, "")), "rules.yaml")
    return f"{caught.value}\n{caught.value.problems!r}"


@pytest.mark.parametrize("sink", ["alertmanager", "pushgateway", "otlp", "webhook", "slack"])
@pytest.mark.parametrize(
    "url",
    [
        *(URL, f"'{URL}'", f"[{URL}]", f"{{x: {URL}}}", LONG, "ftp://me:hunter@host", "me:hunter@host:9093"),
        *("http://me:my hunter@host", "http://me:hun/hunter@host", f">\n        {URL}"),
    ],
)
def test_a_password_in_a_url_is_not_shown(sink: str, url: str) -> None:
    """In no key that takes a URL, neither as the value that is refused nor in its line."""
    assert "hunter" not in refused("sinks:", f"  - {sink}:", f"      url: {url}")


@pytest.mark.parametrize(
    "sink",
    [
        f"alertmanager: {{ulr: {URL}}}",
        f"alertmanger: {{url: {URL}}}",
        f"alertmanager: {{dashboard: {URL}}}",
        f"alertmanager: {{runbooks: {LONG}}}",
        f"alertmanager: {{url: {URL}, url: {URL}}}",
        f"alertmanager: {{url: {URL}, : : [}}",
        f"mlflow: {{tracking_uri: {URL}, evry: 3}}",
        'email: {server: "me:hunter@smtp.example.org:587", sender: a@b, to: [a@b]}',
        "webhook: {url: http://h, token: hunter}",
        "webhook: {url: http://h, tkoen: hunter}",
        "webhok: {url: http://h, token: hunter}",
        "slack: {url: [https://hooks.slack.com/hunter]}",
        URL,
        f"{{'{URL}': 1}}",
    ],
)
def test_nor_where_something_else_is_wrong(sink: str) -> None:
    """A key or a sink that is misspelt, a list for a text, what is not YAML."""
    assert "hunter" not in refused("sinks:", f"  - {sink}")


def test_nor_one_that_looks_like_a_number() -> None:
    """And what is wanted is said."""
    said = refused("sinks:", "  - webhook: {url: http://h, token: 5550123}")
    assert "5550123" not in said
    assert "'token' must be ${NAME}" in said


def test_nor_in_the_name_of_a_file() -> None:
    """That a file extends."""
    assert "hunter" not in refused(f"extends: [{URL}]")


def test_a_url_without_password_is_shown() -> None:
    """So that what is wrong with it can be seen."""
    assert "not the text 'htp://host'" in refused("sinks:", "  - otlp: {url: htp://host}")
