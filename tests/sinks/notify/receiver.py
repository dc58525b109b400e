"""A receiver of HTTP POSTs on loopback, which may refuse the first ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Receiver:
    """The JSON bodies taken, and the headers of each; so many requests to come are answered with 503."""

    url: str = ""
    bodies: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    refuse: int = 0
    refused: int = 0
    moved_to: str = ""  # every request is redirected there
    entered: threading.Event = field(default_factory=threading.Event)
    may_answer: threading.Event = field(default_factory=threading.Event)


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver, gone at the end."""
    got = Receiver()
    got.may_answer.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            got.entered.set()
            got.may_answer.wait(60)
            if got.moved_to:
                got.refused += 1
                self.send_response(302)
                self.send_header("Location", got.moved_to)
            elif got.refuse > got.refused:
                got.refused += 1
                self.send_response(503)
            else:
                got.headers.append(dict(self.headers))
                got.bodies.append(body)
                self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Not onto pytest's stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        got.url = f"http://127.0.0.1:{server.server_port}/hook"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield got
        finally:
            server.shutdown()
            thread.join()
