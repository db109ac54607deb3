"""A headless Chromium, driven through its debugging pipe: no driver, no websocket, no further package."""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

COMMAND = next((found for name in ("chromium", "chromium-browser") if (found := shutil.which(name))), None)
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]


class Browser:
    """One page of a browser; `events` holds all that it reported.

    Args:
        profile: a new, empty directory.
        patience: seconds until an answer must have come.
    """

    def __init__(self, profile: Path, patience: float = 30.0):
        assert COMMAND is not None
        self.events: list[dict[str, Any]] = []
        self.patience, self._number, self._buffer, self._session = patience, 0, b"", ""
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # The browser reads at 3 and writes at 4; the shell puts our pipes there.
        script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", COMMAND, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        page = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its own session: it and its children, nobody else
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Ask, and wait for the answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": arguments}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        limit = time.monotonic() + self.patience
        while True:
            answer = self._read(limit)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self.events.append(answer)

    def open(self, page: Path, width: int = 1200) -> None:
        """Load a page, until its scripts have run."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Page.navigate", url=page.resolve().as_uri())
        limit = time.monotonic() + self.patience
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read(limit))
        self.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 100)))")

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", script))
        return answer["result"].get("value")

    def complaints(self) -> list[str]:
        """Errors and warnings on the console, and exceptions."""
        found = []
        for event in self.events:
            kind, content = event.get("method"), event.get("params", {})
            if kind == "Runtime.exceptionThrown":
                found.append(str(content["exceptionDetails"].get("exception", {}).get("description", content)))
            elif kind == "Runtime.consoleAPICalled" and content["type"] in ("error", "warning", "assert"):
                found.append(str([a.get("value") for a in content["args"]]))
            elif kind == "Log.entryAdded" and content["entry"]["level"] in ("error", "warning"):
                found.append(content["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """What the page asked for, itself not counted."""
        asked = [e["params"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [a["request"]["url"] for a in asked if a["request"]["url"] != a["documentURL"]]

    def _read(self, limit: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(limit - time.monotonic(), 0))
            if not ready:
                raise TimeoutError(f"Chromium was silent for {self.patience:g} s.")
            chunk = os.read(self._in, 1 << 20)
            if not chunk:
                raise RuntimeError(f"Chromium ended with code {self._process.wait()}.")
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\0", 1)
        return dict(json.loads(line))
