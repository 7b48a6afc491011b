"""A headless Chromium for tests of pages, spoken to over its DevTools protocol through two pipes: no port, no driver.

`scripts/fetch_chromium.sh .cache/chromium` fetches one; `SWIFT_CHROMIUM` names another.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.job import ROOT

FETCHED = ROOT / ".cache" / "chromium" / "headless-chromium"
TIMEOUT_S = 30.0


def chromium() -> str | None:
    """The path of one, None if there is none."""
    named = os.environ.get("SWIFT_CHROMIUM")
    if named:
        return named
    return str(FETCHED) if FETCHED.exists() else shutil.which("chromium-headless-shell")


class Browser:
    """One page in one browser. *said*: all that its console was told, and every error that nobody caught."""

    def __init__(self, directory: Path) -> None:
        found = chromium()
        assert found is not None
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        self._lead = os.path.realpath(directory)
        flags = [
            "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
            "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
            "--remote-debugging-pipe", f"--user-data-dir={directory}/profile", "about:blank",
        ]  # fmt: skip
        # It speaks on 3 and 4; a shell puts them there, whatever numbers they have here.
        shell = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
        self._log = open(directory / "chromium.log", "wb")  # noqa: SIM115
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", found, *flags], pass_fds=(to_browser, from_browser), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._rest, self._session = 0, b"", ""
        self._events: list[dict[str, Any]] = []
        self.said: list[str] = []
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.requests: list[str] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)  # it ends with its pipe
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._read)
        self._log.close()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            answer = self._next(deadline_s)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self, deadline_s: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, f"the browser did not answer within {TIMEOUT_S:g} s"
            more = os.read(self._read, 1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        raw, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        self._note(message)
        return message

    def _note(self, message: Mapping[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.consoleAPICalled":
                self.said.append(f"console.{params['type']}: {params['args']}")
            case "Runtime.exceptionThrown":
                self.said.append(f"uncaught: {params['exceptionDetails']}")
            case "Log.entryAdded":
                self.said.append(f"{params['entry']['level']}: {params['entry']['text']}")
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case str(method):
                self._events.append({"method": method})

    def show(self, path: Path, width: int, *, is_dark: bool = False) -> None:
        """Load the page *path* in a window of that width, and wait until it has been loaded."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self._events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        deadline_s = time.monotonic() + TIMEOUT_S
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._next(deadline_s)

    def value(self, expression: str) -> Any:
        """What *expression* is in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str) -> None:
        text = {"Tab": 9, "ArrowRight": 39, "ArrowLeft": 37, "Enter": 13}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=text[key])

    def screenshot(self, path: Path) -> None:
        """Of the whole page."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))
