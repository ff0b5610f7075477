"""Week 1 in JupyterLab, in a real browser: opened, run from top to bottom, looked at."""

import json
import os
import shutil
import subprocess
import sys
import time
from urllib.request import urlopen

import nbformat
import pytest

from shared.cells import ROOT, find

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]
QUIET = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-gpu"]
TOKEN = "a-token-for-this-test"


@pytest.fixture
def notebook(tmp_path):
    """Week 1 without outputs, in a copy of what it needs: JupyterLab saves what it runs."""
    week = find(1)
    shutil.copytree(ROOT / "shared", tmp_path / "shared", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(week.parent / "results", tmp_path / week.parent.name / "results")
    read = nbformat.read(week, as_version=4)
    for cell in read.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(read, tmp_path / week.relative_to(ROOT))
    return tmp_path / week.relative_to(ROOT)


@pytest.fixture
def lab(notebook, tmp_path):
    """The address of a JupyterLab that serves the copy, with settings of its own."""
    course, own = notebook.parent.parent, tmp_path / "jupyter"
    folders = {f"JUPYTER_{name}_DIR": str(own / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    environment = os.environ | folders | {"JUPYTERLAB_SETTINGS_DIR": str(own / "settings")}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--ServerApp.root_dir={course}"]
    command += [f"--IdentityProvider.token={TOKEN}", "--ServerApp.port=0", "--LabApp.news_url="]
    with open(tmp_path / "lab.log", "w+") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=course)
        try:
            for _ in range(240):
                found = list((own / "runtime").glob("jpserver-*.json"))
                if found:
                    break
                assert server.poll() is None, (tmp_path / "lab.log").read_text()
                time.sleep(0.25)
            yield json.loads(found[0].read_text())["url"]
        finally:
            server.terminate()
            server.wait(20)


@pytest.fixture
def page(tmp_path):
    """A page of a headless Chromium; BROWSER_THEME=dark asks for JupyterLab's dark theme."""
    if os.environ.get("BROWSER_THEME") == "dark":
        theme = tmp_path / "jupyter/settings/@jupyterlab/apputils-extension/themes.jupyterlab-settings"
        theme.parent.mkdir(parents=True)
        theme.write_text('{"theme": "JupyterLab Dark"}')
    with playwright.sync_playwright() as driver:
        options = [*QUIET, "--no-sandbox"] if os.geteuid() == 0 or "CI" in os.environ else QUIET
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser.new_page(viewport={"width": 1280, "height": 900})
        browser.close()


def settle(lab):
    """Wait until the notebook's kernel has nothing to do for three seconds."""
    idle = 0
    for _ in range(600):
        with urlopen(f"{lab}api/kernels?token={TOKEN}", timeout=10) as reply:
            kernels = json.load(reply)
        idle = idle + 1 if kernels and all(kernel["execution_state"] == "idle" for kernel in kernels) else 0
        if idle == 6:
            return
        time.sleep(0.5)
    pytest.fail("the kernel is still busy after five minutes")


def test_week_1_runs_in_jupyterlab(page, lab, notebook, tmp_path):
    page.goto(f"{lab}lab/tree/{notebook.relative_to(notebook.parent.parent)}?token={TOKEN}")
    page.locator(".jp-Notebook h1").first.wait_for(timeout=60_000)
    page.get_by_text("Python 3", exact=False).first.wait_for(timeout=60_000)
    page.locator("li.lm-MenuBar-item", has_text="Run").click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.wait_for_timeout(2000)
    settle(lab)
    page.keyboard.press("Control+s")
    page.wait_for_timeout(2000)
    cells = [cell for cell in nbformat.read(notebook, as_version=4).cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]
    assert all(cell.execution_count for cell in cells)
    assert [output.evalue for output in outputs if output.output_type == "error"] == []
    plots = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(plots) >= 5
    shown = page.locator(".jp-OutputArea-output img")
    shown.first.scroll_into_view_if_needed()
    assert shown.first.evaluate("picture => picture.naturalWidth") > 300
    page.screenshot(path=tmp_path / "week01.png")
    if shots := os.environ.get("BROWSER_SHOTS"):
        look_around(page, shots)


def look_around(page, folder):
    """Screenshots of the whole notebook, a screen each, for eyes."""
    os.makedirs(folder, exist_ok=True)
    scroller = page.locator(".jp-WindowedPanel-outer").first
    for number in range(60):
        page.screenshot(path=f"{folder}/{number:02d}.png")
        if scroller.evaluate("it => (it.scrollBy(0, 800), it.scrollTop + it.clientHeight >= it.scrollHeight - 5)"):
            break
        page.wait_for_timeout(400)
