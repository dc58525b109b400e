"""Messages to a Slack channel, by an incoming webhook (https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks)."""

from __future__ import annotations

from typing import Any

from gradwatch.sinks.http_post import post_json, url_from_environment
from gradwatch.sinks.notify.message import Message
from gradwatch.sinks.notify.notifier import Notifier, Schedule

LONGEST_TEXT = 3000
"""Characters of one text block in Slack."""


class SlackSink(Notifier):
    """Writes messages to the channel of an incoming webhook, whose secret address is in an environment variable.

    `schedule` are the fields of `Schedule`.
    """

    name = "slack"

    def __init__(
        self,
        url: str = "${SLACK_WEBHOOK_URL}",
        **schedule: Any,
    ) -> None:
        super().__init__(Schedule(**schedule))
        self._url, self._target = url, ""

    def prepare(self) -> None:
        """Look up the address."""
        self._target = url_from_environment(self._url, "url")

    def send(self, message: Message) -> None:
        """POST it; OSError unless the answer is 2xx. A notification shows `text`, the channel the blocks."""
        blocks = [
            {"type": "header", "text": {"type": "plain_text", "text": message.subject[:150]}},
            {"type": "section", "text": {"type": "mrkdwn", "text": _fenced(message.text)}},
        ]
        post_json(self._target, {"text": _escaped(message.subject), "blocks": blocks})


def _fenced(text: str) -> str:
    """Preformatted: names of parameters hold what Slack would read as markup."""
    room = LONGEST_TEXT - len("```\n\n```")
    escaped = _escaped(text.replace("```", "'''"))
    return f"```\n{escaped if len(escaped) <= room else escaped[: room - 1] + '…'}\n```"


def _escaped(text: str) -> str:
    """The three characters that Slack wants as entities, so that `<!channel>` in a name is text."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
