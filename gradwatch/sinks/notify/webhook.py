"""Messages as JSON to any HTTP endpoint: a chat system's incoming webhook, an automation, an on-call service."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from gradwatch.runtime.secret_values import from_environment
from gradwatch.sinks.http_post import post_json, url_from_environment
from gradwatch.sinks.notify.message import Message
from gradwatch.sinks.notify.notifier import Notifier, Schedule

ALERTS = "$alerts"


class WebhookSink(Notifier):
    """POSTs messages to `url`, which may be `${NAME}`: the value of an environment variable.

    `body` is the JSON document to send; in its strings `$subject $text $status $severity $run_id $host $script
    $directory` are filled in, and the string `$alerts` alone becomes the list of alerts. Without it
    `Message.document` is sent. `token` is sent as a bearer token, `${NAME}`. `schedule` are the fields of `Schedule`.
    """

    name = "webhook"

    def __init__(
        self,
        url: str,
        body: Mapping[str, Any] | None = None,
        token: str | None = None,
        **schedule: Any,
    ) -> None:
        super().__init__(Schedule(**schedule))
        self._url, self._body, self._token = url, body, token
        self._target, self._bearer = "", ""

    def prepare(self) -> None:
        """Look up the address and the token."""
        self._target = url_from_environment(self._url, "url")
        self._bearer = from_environment(self._token, "token") if self._token else ""

    def send(self, message: Message) -> None:
        """POST it; OSError unless the answer is 2xx."""
        document = message.document()
        if self._body is not None:
            words = {name: str(document[name]) for name in ("subject", "text", "status", "severity")}
            words |= {name: str(text) for name, text in document["run"].items()}
            document = filled(self._body, words, document["alerts"])
        post_json(self._target, document, bearer=self._bearer)


def filled(template: Any, words: Mapping[str, str], alerts: list[Any]) -> Any:
    """A JSON value with `$name` in its strings filled in; what is no name of `words` stays as it is."""
    if isinstance(template, Mapping):
        return {str(key): filled(value, words, alerts) for key, value in template.items()}
    if isinstance(template, list | tuple):
        return [filled(value, words, alerts) for value in template]
    if template == ALERTS:
        return alerts
    return string.Template(template).safe_substitute(words) if isinstance(template, str) else template
