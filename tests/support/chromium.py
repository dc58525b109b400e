"""A real Chromium without a window, driven through its own pipe (the DevTools protocol, no WebSocket needed).

What the page logs and asks for is kept: `complaints` of the console, `requests` beyond the page itself.
"""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.binaries import require

SECONDS = 60.0


class Chromium:
    """One browser with one page."""

    def __init__(self, folder: Path) -> None:
        program = require("chromium")
        theirs, self._to = os.pipe()
        self._from, answers = os.pipe()
        options = "--headless --no-sandbox --disable-gpu --no-first-run --remote-debugging-pipe"
        command = f'exec "$0" {options} --user-data-dir="$1" about:blank 3<&{theirs} 4>&{answers} 2>/dev/null'
        self._process = subprocess.Popen(
            ["bash", "-c", command, program, str(folder)], pass_fds=(theirs, answers)
        )
        os.close(theirs)
        os.close(answers)
        self._rest = b""
        self._number = 0
        self.complaints: list[str] = []
        self.requests: list[str] = []
        (page,) = (one for one in self._ask("Target.getTargets")["targetInfos"] if one["type"] == "page")
        session = self._ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session: str | None = session["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def open(self, page: Path | str, *, width: int = 1200, dark: bool = False) -> None:
        """Show a file, or what answers at an address, and wait until its script says that all is drawn."""
        url = page if isinstance(page, str) else page.as_uri()
        self.complaints, self.requests = [], []
        self._ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        self.theme(dark)
        self._ask("Page.navigate", url=url)
        deadline = time.monotonic() + SECONDS
        while not self.value(f"location.href === {json.dumps(url)} && document.readyState === 'complete'"):
            assert time.monotonic() < deadline

    def theme(self, dark: bool) -> None:
        """What `prefers-color-scheme` says from now on."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])

    def value(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self, path: Path) -> None:
        """The whole page as a PNG."""
        shot = self._ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session := getattr(self, "_session", None):
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], SECONDS)
            assert ready, "Chromium does not answer"
            part = os.read(self._from, 1 << 20)
            assert part, "Chromium has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        method, about = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(about["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(about["args"]))
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.complaints.append(about["entry"]["text"])
        elif method == "Network.requestWillBeSent" and about.get("type") != "Document":
            self.requests.append(about["request"]["url"][:200])
