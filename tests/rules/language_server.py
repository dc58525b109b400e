"""A client of the real yaml-language-server over stdio, as an editor with the schema of rule files speaks to it."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from queue import Queue
from types import TracebackType
from typing import Any

Message = dict[str, Any]
SECONDS = 60.0
"""Within which the server answers, or something is wrong."""


class LanguageServer:
    """One server, that has read the schema; each document is opened under a new name in `folder`."""

    def __init__(self, program: str, schema: Path, folder: Path) -> None:
        self._folder = folder
        self._settings = {
            "yaml": {
                "schemas": {schema.as_uri(): "*.gradwatch.yaml"},
                "schemaStore": {"enable": False},  # nothing is fetched
                "completion": True,
                "validate": True,
                "hover": True,
            }
        }
        self._process = subprocess.Popen(
            [program, "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._numbers, self._documents = count(1), count(1)
        self._answers: Queue[Message] = Queue()
        self._diagnostics: Queue[Message] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        text = {"publishDiagnostics": {}, "completion": {}, "hover": {"contentFormat": ["plaintext"]}}
        able = {"workspace": {"configuration": True}, "textDocument": text}
        self.ask("initialize", {"processId": None, "rootUri": None, "capabilities": able})
        self._send({"method": "initialized", "params": {}})
        self._send({"method": "workspace/didChangeConfiguration", "params": {"settings": self._settings}})
        # What is opened before it has asked for the settings is looked at without the schema first.
        uri = self.open("nonsense: 1\n")
        while (said := self._diagnostics.get(timeout=SECONDS))["uri"] != uri or not said["diagnostics"]:
            pass

    def __enter__(self) -> LanguageServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._reader.join()

    def open(self, text: str, suffix: str = ".gradwatch.yaml") -> str:
        """The address of a new document with this text; the schema is set for the suffix of rule files."""
        uri = (self._folder / f"{next(self._documents)}{suffix}").as_uri()
        document = {"uri": uri, "languageId": "yaml", "version": 1, "text": text}
        self._send({"method": "textDocument/didOpen", "params": {"textDocument": document}})
        return uri

    def problems(self, *texts: str, suffix: str = ".gradwatch.yaml") -> list[list[Message]]:
        """The diagnostics of a document with each of these texts."""
        opened = [self.open(text, suffix) for text in texts]
        found: dict[str, list[Message]] = {}
        while not found.keys() >= set(opened):
            said = self._diagnostics.get(timeout=SECONDS)
            found[said["uri"]] = said["diagnostics"]
        return [found[uri] for uri in opened]

    def completions(self, text: str) -> list[str]:
        """What is offered where `|` stands in the text."""
        found = self.ask("textDocument/completion", self._at(text))
        return [item["label"] for item in found["items"]]

    def hover(self, text: str) -> str:
        """What is said of the word where `|` stands in the text."""
        return str(self.ask("textDocument/hover", self._at(text))["contents"]["value"])

    def ask(self, method: str, params: Mapping[str, Any]) -> Any:
        """The result of a request. Raises `queue.Empty` where none comes."""
        number = next(self._numbers)
        self._send({"id": number, "method": method, "params": params})
        while (answer := self._answers.get(timeout=SECONDS))["id"] != number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _at(self, text: str) -> Message:
        before, after = text.split("|")
        place = {"line": before.count("\n"), "character": len(before.rpartition("\n")[2])}
        return {"textDocument": {"uri": self.open(before + after)}, "position": place}

    def _send(self, message: Message) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self._process.stdin is not None
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            length = int(line.split(b":")[1])
            while self._process.stdout.readline().strip():
                pass  # further headers
            self._take(json.loads(self._process.stdout.read(length)))

    def _take(self, message: Message) -> None:
        method = message.get("method")
        if method is None:
            self._answers.put(message)
        elif method == "textDocument/publishDiagnostics":
            self._diagnostics.put(message["params"])
        elif "id" in message:  # a request of the server's
            sections = message["params"].get("items", ()) if method == "workspace/configuration" else ()
            result = [self._settings.get(one.get("section", "")) for one in sections] if sections else None
            self._send({"id": message["id"], "result": result})
