"""A JupyterLab on loopback, driven by the system's Chromium; every request to anywhere else is refused and listed.

It asserts nothing.

    lab = Lab(folder, {"PYTHONPATH": "."}); lab.write("a.ipynb", ["1 + 1"]); lab.open("a.ipynb"); lab.run_cell(0)
    lab.text(0); lab.foreign; lab.close()

MEMLAB_CHROMIUM names the browser where the path has neither chromium, chromium-browser nor google-chrome.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PICTURES = os.environ.get("MEMLAB_PICTURES")
"""A folder: the screenshots are kept there."""
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
]  # fmt: skip
IDLE = ".jp-NotebookPanel [data-status='idle'], .jp-Notebook-ExecutionIndicator[data-status='idle']"
PROMPT = """([i, pattern]) => {
  const prompt = document.querySelectorAll('.jp-Notebook .jp-Cell')[i].querySelector('.jp-InputPrompt');
  return prompt && new RegExp(pattern).test(prompt.innerText); }"""
# What is sent to a kernel before it has answered once, as after another one was shut down, can be lost: the cell waits for ever.
ANSWERS = """async () => {
  const context = window.jupyterapp.shell.currentWidget.sessionContext;
  await context.ready;
  await context.session.kernel.info; }"""
STARTED, DONE = r"\[(\d+|\*)\]", r"\[\d+\]"
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}


def chromium() -> str | None:
    """The browser to use, or None."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return os.environ.get("MEMLAB_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


@contextmanager
def opened(tmp_path_factory: pytest.TempPathFactory, name: str, cells: Sequence[str]) -> Iterator[Lab]:
    """A JupyterLab with this notebook open.

    One thread: several would wait for each other for milliseconds where others use the cores too.
    """
    paths = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "tests")))
    lab = Lab(tmp_path_factory.mktemp("lab"), {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"})
    try:
        lab.write(name, cells)
        lab.open(name)
        yield lab
    finally:
        lab.close()


class Lab:
    """One server and one browser page. `folder` has to be empty; `environment` is added to the server's own."""

    def __init__(self, folder: str | Path, environment: Mapping[str, str] | None = None) -> None:
        self.home = Path(folder)
        self.root = self.home / "notebooks"
        self.root.mkdir(parents=True)
        self.foreign: list[str] = []
        self.console: list[tuple[str, str]] = []
        with socket.socket() as probe:  # a port of loopback that nobody listens on
            probe.bind(("127.0.0.1", 0))
            self.token, self.port = "test-token", probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._start_server(environment or {})
        try:
            self._start_browser()
        except BaseException:
            self._stop_server()
            raise

    def _start_server(self, environment: Mapping[str, str]) -> None:
        self.log = self.home / "server.log"
        own = self.home / "jupyter"
        news = own / "SETTINGS/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
        news.parent.mkdir(parents=True)
        news.write_text('{"fetchNews": "false", "checkForUpdates": false, "doNotDisturbMode": true}')
        options = [
            "--no-browser", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={self.port}", "--ServerApp.port_retries=0",
            f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={self.root}",
            "--ServerApp.allow_root=True", "--LabApp.expose_app_in_browser=True", "--LabApp.news_url=",
            "--LabApp.extension_manager=readonly",
            "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        ]  # fmt: skip
        command = [sys.executable, "-m", "jupyterlab", *options]
        kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        rooms = {f"JUPYTER_{name}": str(own / name) for name in ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")}
        lab = {f"JUPYTERLAB_{name}_DIR": str(own / name) for name in ("SETTINGS", "WORKSPACES")}
        env = kept | rooms | lab | {"IPYTHONDIR": str(own / "ipython")} | dict(environment)
        with self.log.open("w") as log:
            self.server = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
        try:
            self._wait_for_server()
        except BaseException:
            self._stop_server()
            raise

    def _wait_for_server(self) -> None:
        for _ in range(360):
            if self.server.poll() is not None:
                raise RuntimeError(f"JupyterLab ended with {self.server.returncode}:\n{self.log.read_text()[-3000:]}")
            try:
                with urllib.request.urlopen(f"{self.url}/api?token={self.token}", timeout=2) as answer:
                    answer.read()
                return
            except OSError:
                time.sleep(0.25)
        raise TimeoutError(f"JupyterLab did not answer within 90 s:\n{self.log.read_text()[-3000:]}")

    def _start_browser(self) -> None:
        from playwright.sync_api import sync_playwright

        self.playwright = sync_playwright().start()
        try:
            self.browser = self.playwright.chromium.launch(executable_path=chromium(), args=FLAGS, headless=True)
        except BaseException:
            self.playwright.stop()
            raise
        context = self.browser.new_context(viewport={"width": 1300, "height": 1000})
        context.route("**/*", self._guard)
        self.page = context.new_page()
        self.page.on("console", lambda message: self.console.append((message.type, message.text[:300])))
        self.page.on("pageerror", lambda error: self.console.append(("pageerror", str(error)[:300])))

    def _guard(self, route: Any) -> None:
        url = route.request.url
        if url.startswith((self.url, "data:", "blob:")):
            route.continue_()
        else:
            self.foreign.append(url)
            route.abort()

    def write(self, name: str, cells: Sequence[str]) -> Path:
        """Write a notebook of code cells into the server's folder."""
        import nbformat

        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        path = self.root / name
        nbformat.write(notebook, path)
        return path

    def theme(self, name: str) -> None:
        """`light` or `dark`, from now on, also for the page that is open."""
        command = "async theme => { await window.jupyterapp.commands.execute('apputils:change-theme', {theme}); }"
        self.page.evaluate(command, THEMES[name])
        flag = "true" if name == "light" else "false"
        self.page.wait_for_selector(f"body[data-jp-theme-light='{flag}']", timeout=15_000, state="attached")
        # Until then a splash covers the page.
        self.page.wait_for_selector("#jupyterlab-splash", timeout=15_000, state="detached")

    def open(self, name: str) -> None:
        """Open a notebook and wait until its kernel is idle."""
        self.name = name
        self.page.goto(f"{self.url}/lab/tree/{name}?token={self.token}&reset")
        self._wait_for_kernel()

    def _wait_for_kernel(self) -> None:
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        self.page.wait_for_selector(IDLE, timeout=90_000, state="attached")
        self.page.evaluate(ANSWERS)

    def reopen_without_kernel(self) -> None:
        """Save the notebook, end its kernel and open it again: nothing is run."""
        self.save()
        self.page.evaluate("async () => { await window.jupyterapp.serviceManager.sessions.shutdownAll(); }")
        self.page.goto(f"{self.url}/lab/tree/{self.name}?token={self.token}&reset")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)

    def cell(self, i: int) -> Any:
        """The locator of cell number `i`."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(i)

    def run_cell(self, i: int, wait: bool = True) -> None:
        """Run cell `i` as a user does."""
        from playwright.sync_api import TimeoutError as NotYet

        self.cell(i).locator(".jp-InputArea-editor").first.click()
        for _ in range(5):  # the first Ctrl+Enter can be lost though the status is idle
            self.page.keyboard.press("Control+Enter")
            try:
                self.page.wait_for_function(PROMPT, arg=[i, STARTED], timeout=4000)
                break
            except NotYet:
                continue
        if wait:
            self.wait_cell(i)

    def run_until_shown(self, i: int, shown: Any, timeout_s: float = 30.0) -> None:
        """Run cell `i` until this locator is shown, reloading the page once if it is not.

        ipykernel 7.4 can miss the second of two requests for a subshell (`_process_control_request` answers with a raw send
        on the socket of a stream, which may take the event of the next request); JupyterLab 4.6 then waits for ever.
        """
        from playwright.sync_api import TimeoutError as NotShown

        self.run_cell(i)
        try:
            shown.wait_for(timeout=1000 * timeout_s)
        except NotShown:
            self.save()  # the other cells' outputs
            self.page.reload()
            self._wait_for_kernel()
            self.run_cell(i)
            shown.wait_for(timeout=1000 * timeout_s)

    @property
    def page_errors(self) -> list[str]:
        """What failed in the page, but for subshells that were asked for when the kernel was restarted."""
        lost = "Canceled future for create_subshell_request"
        return [text for kind, text in self.console if kind == "pageerror" and lost not in text]

    def wait_cell(self, i: int, timeout_s: float = 120.0) -> None:
        """Wait until cell `i` has its number."""
        self.page.wait_for_function(PROMPT, arg=[i, DONE], timeout=1000 * timeout_s)

    def is_running(self, i: int) -> bool:
        """Whether cell `i` has not ended yet."""
        return self.page.evaluate(PROMPT, [i, r"\[\*\]"])

    def text(self, i: int) -> str:
        """All output of cell `i` as text."""
        return "\n".join(self.cell(i).locator(".jp-OutputArea-output").all_inner_texts())

    def save(self) -> None:
        """Save the notebook and wait until it is on disk."""
        self.page.evaluate("async () => { await window.jupyterapp.commands.execute('docmanager:save'); }")

    def outputs(self, i: int) -> list[dict[str, Any]]:
        """The outputs of cell `i` as they are on disk."""
        self.save()
        return json.loads((self.root / self.name).read_text())["cells"][i]["outputs"]

    def picture(self, name: str, i: int = 0) -> None:
        """A screenshot of the output of cell `i` in both themes, where a folder for it was named."""
        for theme in ("dark", "light") if PICTURES else ():
            self.theme(theme)
            self.page.wait_for_timeout(1500)
            self.cell(i).locator(".jp-OutputArea").first.screenshot(path=f"{PICTURES}/{name}-{theme}.png")

    def close(self) -> None:
        """End browser and server; nothing of them stays."""
        try:
            self.browser.close()
            self.playwright.stop()
        finally:
            self._stop_server()

    def _stop_server(self) -> None:
        for how in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.server.pid, how)
                self.server.wait(10)
                return
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
