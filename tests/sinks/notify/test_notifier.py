"""When messages leave: grouped, rarely, again until they have arrived; by webhooks, against a receiver on loopback."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from gradwatch.errors import AttachError
from gradwatch.records.decision import Decision, Order
from gradwatch.runtime import process_identity
from gradwatch.runtime.background_worker import background_worker
from gradwatch.runtime.internal_errors import Health
from gradwatch.sinks import make_sink
from gradwatch.sinks.notify.notifier import Notifier
from gradwatch.sinks.notify.slack import SlackSink
from gradwatch.sinks.notify.webhook import WebhookSink
from tests.cli.terminal_session import TerminalSession
from tests.deploy.servers import wait_until
from tests.sinks.notify.receiver import Receiver, receiving
from tests.support import warm
from tests.support.launch_cases import GRADWATCH
from tests.support.sink_records import make_event, make_record, make_run, make_sites, skip

SITES = make_sites(4)
HOSTILE = "evil <!channel> ``` \x1b[31m\n$text {0}"


def record(step: int, rule: str = "non-finite", kind: str = "firing", **fields: Any) -> Any:
    """A step on which one rule fires, or is over."""
    shown: dict[str, Any] = {"sites": ("layers.3.weight",), "value": float("nan")} if kind == "firing" else {}
    return make_record(SITES, step=step, events=(make_event(kind, rule, step, **{**shown, **fields}),))


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(got: Receiver, folder: Path, health: Health | None = None, **options: Any) -> WebhookSink:
    sink = WebhookSink(got.url, **options)
    sink.open(make_run(folder, script="/home/me/train.py"), health or Health())
    return sink


def turn(sink: Notifier) -> None:
    """The worker looks once whether anything is due."""
    assert sink._job is not None
    assert background_worker().wait_for(sink._job, 60)


def test_one_fault_is_one_message(tmp_path: Path) -> None:
    """Two rules that fire within the group's seconds come together, worst first; nothing leaves before."""
    clock = Clock()
    with receiving() as got:
        sink = opened(got, tmp_path, clock=clock)
        sink.write(record(3, "exploding"))
        sink.write(record(4))
        clock.now += 4.9
        turn(sink)
        assert not got.bodies
        clock.now += 0.1
        turn(sink)
        assert got.bodies
        sink.close()
        (body,) = got.bodies
    assert [alert["rule"] for alert in body["alerts"]] == ["non-finite", "exploding"]
    assert body["subject"] == (
        "[critical] gradwatch: non-finite and 1 more firing in train.py (run run-1 on node-1)"
    )
    assert body["text"].startswith("[critical] non-finite at step 4: layers.3.weight, value nan")
    assert body["alerts"][0]["value"] == "NaN"
    assert body["run"]["run_id"] == "run-1"


def test_messages_are_rare(tmp_path: Path) -> None:
    """What happens within a minute of a message waits for its end, and is then one message."""
    clock = Clock()
    with receiving() as got:
        sink = opened(got, tmp_path, clock=clock, group_seconds=0.0)
        sink.write(record(1))
        sink.flush(10)
        for step in range(2, 20):
            clock.now += 1.0
            sink.write(record(step, kind="resolved" if step % 2 == 0 else "firing"))
        sink.write(record(20, "exploding"))
        clock.now += 41.9
        turn(sink)
        assert len(got.bodies) == 1
        clock.now += 0.1
        turn(sink)
        sink.close()
        first, second = got.bodies
    assert [alert["status"] for alert in first["alerts"]] == ["firing"]
    assert [alert["rule"] for alert in second["alerts"]] == ["exploding"]  # the other fires, as was said


def test_a_rule_is_said_to_be_over(tmp_path: Path) -> None:
    """Once, after it was said to fire; with the steps."""
    with receiving() as got:
        sink = opened(got, tmp_path, group_seconds=0.0, every_seconds=0.0)
        sink.write(record(1))
        sink.flush(10)
        sink.write(record(7, kind="resolved"))
        sink.flush(10)
        sink.close()
        assert [body["status"] for body in got.bodies] == ["firing", "resolved"]
        assert got.bodies[1]["text"].startswith("resolved: non-finite at step 7, fired at step 1\n")


def test_what_did_not_arrive_is_sent_again(tmp_path: Path) -> None:
    """A receiver that is away costs nothing but time; the failure is counted under the sink's name."""
    health = Health()
    with receiving() as got:
        got.refuse = 1
        sink = opened(got, tmp_path, health, group_seconds=0.0)
        sink.write(record(1))
        wait_until(lambda: bool(got.bodies), "the second try")
        sink.close()
        assert (got.refused, len(got.bodies)) == (1, 1)
    assert health.errors() == {"webhook": 1}


def test_training_waits_for_no_message(tmp_path: Path) -> None:
    """A receiver that does not answer: `write` returns while the message is under way, and `close` gives up."""
    health = Health()
    with receiving() as got:
        got.may_answer.clear()
        sink = opened(got, tmp_path, health, group_seconds=0.0)
        sink.write(record(1))
        assert got.entered.wait(60)
        sink.write(record(2, "exploding"))
        assert not got.bodies
        sink.close()
        assert health.errors() == {"webhook": 1}
        got.may_answer.set()


def test_what_comes_while_a_message_is_under_way_is_flushed_too(tmp_path: Path) -> None:
    """`flush` is true of it only when it has been sent as well."""
    with receiving() as got:
        got.may_answer.clear()
        sink = opened(got, tmp_path, group_seconds=0.0)
        sink.write(record(1, "exploding"))
        assert got.entered.wait(60)
        sink.write(record(2))
        threading.Timer(0.3, got.may_answer.set).start()
        assert sink.flush(60)
        assert [[alert["rule"] for alert in body["alerts"]] for body in got.bodies] == [
            ["exploding"],
            ["non-finite"],
        ]
        sink.close()


def test_no_redirect_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the message nor its token reach another server; it counts as not arrived."""
    monkeypatch.setenv("HOOK_TOKEN", "s3cret")
    health = Health()
    with receiving() as got, receiving() as other:
        got.moved_to = other.url
        sink = opened(got, tmp_path, health, token="${HOOK_TOKEN}")
        sink.write(record(1))
        sink.close()
        assert got.refused >= 1
        assert not other.entered.is_set()
    assert health.errors()["webhook"] >= 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("URL", "hooks.slack.com/services/SECRET"), ("URL", "https://h/SECRET PATH"), ("TOKEN", "abc\nSECRET")],
)
def test_no_secret_is_shown(name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be an address or a token is refused by the name of its variable."""
    monkeypatch.setenv("URL", "http://127.0.0.1:9/x")
    monkeypatch.setenv("TOKEN", "t")
    monkeypatch.setenv(name, value)
    sink = WebhookSink("${URL}", token="${TOKEN}")
    with pytest.raises(AttachError) as refused:
        sink.open(make_run(tmp_path), Health())
    assert "SECRET" not in str(refused.value)
    assert f"${{{name}}}" in str(refused.value)


@pytest.mark.parametrize("url", ["http://me:SECRET@host", "ftp://SECRET", "hooks.slack.com/services/SECRET"])
def test_nor_one_that_is_given_itself(url: str, tmp_path: Path) -> None:
    """In place of the name of a variable."""
    with pytest.raises(AttachError, match="url is no URL") as refused:
        WebhookSink(url).open(make_run(tmp_path), Health())
    assert "SECRET" not in str(refused.value)


def test_a_ladder_that_ends_in_a_stop_is_told(tmp_path: Path) -> None:
    """Also where the rule was reported before, and where it was too slight to be."""
    with receiving() as got:
        sink = opened(got, tmp_path, group_seconds=0.0, every_seconds=0.0)
        sink.write(record(1))
        sink.flush(10)
        stop = Decision(stop=True, orders=frozenset({Order("non-finite", "stop", False)}))
        event = make_event("escalated", "non-finite", 9, severity="critical")
        sink.write(make_record(SITES, step=9, events=(event,), decision=stop))
        slight = make_event("escalated", "exploding", 9, severity="critical")
        sink.write(make_record(SITES, step=9, events=(slight,)))
        assert sink.flush(10)
        sink.close()
        told = [(alert["rule"], alert["actions"]) for body in got.bodies for alert in body["alerts"]]
    assert sorted(told) == [("exploding", []), ("non-finite", []), ("non-finite", ["stop"])]


def test_only_rank_0_writes_to_people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the other ranks of a process group there is neither a message nor a look into the environment."""
    monkeypatch.setattr(process_identity, "_group_rank", [1])
    sink = SlackSink("${GRADWATCH_TEST_NOT_SET}")
    sink.open(make_run(tmp_path, rank=1), Health())
    sink.write(record(1))
    assert sink.flush(1)
    sink.close()


def test_a_body_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names in its strings are filled in, `$alerts` is the list, the rest stays; the token is a header."""
    monkeypatch.setenv("HOOK_TOKEN", "s3cret")
    body = {
        "content": "$severity: $text",
        "cost": "$5",
        "n": 3,
        "all": "$alerts",
        "deep": [{"run": "${run_id}"}],
    }
    with receiving() as got:
        sink = opened(got, tmp_path, body=body, token="${HOOK_TOKEN}")
        sink.write(record(1, sites=(HOSTILE,)))
        sink.close()
        (sent,), (headers,) = got.bodies, got.headers
    assert sent["content"].startswith("critical: [critical] non-finite at step 1")
    assert (sent["cost"], sent["n"], sent["deep"]) == ("$5", 3, [{"run": "run-1"}])
    assert [alert["rule"] for alert in sent["all"]] == ["non-finite"]
    assert headers["Authorization"] == "Bearer s3cret"
    assert "\x1b" not in sent["content"]
    assert sent["content"].count("\n") == 1  # one line per rule, and the next command


def test_slack_reads_no_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that calls the channel, or ends the block, is text; all is within Slack's limits."""
    with receiving() as got:
        monkeypatch.setenv("SLACK_WEBHOOK_URL", got.url)
        sink = SlackSink()
        sink.open(make_run(tmp_path, script="<!here>.py"), Health())
        for optimizer in range(300):
            sink.write(record(1, sites=(HOSTILE,), optimizer=optimizer))
        sink.close()
        (body,) = got.bodies
    header, section = body["blocks"]
    text = section["text"]["text"]
    assert "<" not in body["text"].replace("&lt;", "")
    assert "<!" not in text
    assert text.count("```") == 2
    assert len(text) <= 3000
    assert len(header["text"]["text"]) <= 150


@pytest.mark.parametrize("kind", ["slack", "webhook", "email"])
def test_a_secret_that_is_missing_is_named(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sink does not open, and the sentence names the option and the variable."""
    monkeypatch.delenv("NOT_SET", raising=False)
    options: dict[str, dict[str, Any]] = {
        "slack": {"url": "${NOT_SET}"},
        "webhook": {"url": "http://127.0.0.1:9/", "token": "${NOT_SET}"},
        "email": {
            "server": "127.0.0.1:25",
            "sender": "a@b.c",
            "to": ["d@e.f"],
            "user": "u",
            "password": "${NOT_SET}",
        },
    }
    sink = make_sink(kind, options[kind])
    with pytest.raises(AttachError, match="environment variable NOT_SET is not set"):
        sink.open(make_run(tmp_path), Health())


def test_a_stop_is_on_its_way_before_the_process_ends(tmp_path: Path) -> None:
    """An unmodified script under `gradwatch run`: one message with rule, parameter and what was done."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 1); optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for step in range(50):\n"
        "    optimizer.zero_grad()\n"
        "    x = torch.randn(8, 4) * (float('nan') if step == 30 else 1)\n"
        "    model(x).square().mean().backward()\n"
        "    optimizer.step()\n"
    )
    rules = tmp_path / "rules.yaml"
    with receiving() as got:
        rules.write_text(
            "version: 1\nextends: [default]\n"
            f"sinks: [journal, log, webhook: {{url: '{got.url}'}}]\n"
            "rules: {non-finite: {do: [stop]}}\n"
        )
        options = ["--rules", str(rules), "--dir", str(tmp_path / "runs"), "--listen", "127.0.0.1:0"]
        done = warm.run(
            [*GRADWATCH, "run", *options, "--", sys.executable, str(script)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 86, done.stderr
        (body,) = got.bodies
    assert body["alerts"][0]["rule"] == "non-finite"
    assert body["alerts"][0]["step"] == 30
    assert "stop" in body["alerts"][0]["actions"]
    assert "train.py" in body["subject"]
    assert "\nnext: gradwatch explain --run " in body["text"]


def test_without_a_journal_nobody_is_sent_to_one(tmp_path: Path) -> None:
    """A file whose list of sinks leaves the default ones out: said in the first line; messages name no such command."""
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 1); optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for step in range(5):\n"
        "    optimizer.zero_grad()\n"
        "    (model(torch.ones(8, 4)).mean() * (float('nan') if step == 3 else 1)).backward()\n"
        "    optimizer.step()\n"
    )
    with receiving() as got:
        (tmp_path / "rules.yaml").write_text(
            f"version: 1\nextends: [default]\nsinks: [prometheus, webhook: {{url: '{got.url}'}}]\n"
        )
        command = [*GRADWATCH, "run", "--rules", "rules.yaml", "--listen", "127.0.0.1:0", "--dir", "runs"]
        with TerminalSession([*command, "--", sys.executable, "train.py"], tmp_path, os.environ) as session:
            assert session.process.wait(120) == 0
            told = session.wait_for("5 of 5 steps watched")
        assert got.bodies
    assert "non-finite at step 3" in got.bodies[-1]["text"]
    assert "next:" not in got.bodies[-1]["text"]
    first = next(line for line in told.splitlines() if "watching 2 parameters of Linear" in line)
    assert first.endswith(" · no journal, no log: not in the rule file's `sinks:`")
    assert "runs/" not in first
    assert "next:" not in told


def test_decisions_of_other_rules_are_not_this_ones(tmp_path: Path) -> None:
    """What is said to be done is what this rule had done."""
    with receiving() as got:
        sink = opened(got, tmp_path)
        step = record(1, "exploding")
        other: Decision = skip("non-finite")
        sink.write(make_record(SITES, step=1, events=step.verdict.events, decision=other))
        sink.close()
        (body,) = got.bodies
    assert body["alerts"][0]["actions"] == []
