"""The cell that finds the course's helper: in a clone, in Colab from any fork and branch, in a copy on a Drive.

Colab's session server and GitHub are played by a local server and a local repository.
"""

import ast
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import quote

import nbformat
import pytest

from shared.cells import ROOT, cell_texts, find

pytestmark = pytest.mark.versions

WEEKS = range(1, 10)
DRIVE = "fileId=1aBcD2efG"
# removed from Python's library by 3.13 (PEP 594, and imp, distutils, asyncore before it)
REMOVED = set(
    "aifc asynchat asyncore audioop cgi cgitb chunk crypt distutils imghdr imp lib2to3 mailcap msilib nis nntplib "  # noqa: SIM905
    "ossaudiodev pipes smtpd sndhdr spwd sunau telnetlib uu xdrlib".split()
)


def source(week=1):
    """The cell's text."""
    return next(cell.source for cell in nbformat.read(find(week), as_version=4).cells if cell.id == "find")


def opened(address):
    """The path that Colab's session server gives for a notebook opened from GitHub."""
    return "fileId=" + quote(f"https://github.com/{address}", safe="/")


@pytest.fixture
def sessions():
    """``sessions(path)``: a server like Colab's, with one session of a notebook at this path; returns its address."""
    servers = []

    def start(path):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                answer = [{"id": "1", "path": path, "name": "x.ipynb", "kernel": {"id": "2"}}]
                body = json.dumps(answer if self.path == "/api/sessions" else {}).encode()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *words):
                pass

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return {"COLAB_JUPYTER_IP": "127.0.0.1", "KMP_TARGET_PORT": str(servers[-1].server_port)}

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
    return subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def github(tmp_path):
    """A folder that stands for GitHub: someone/course and its fork other/fork, each with main and feature/new."""
    for address in ("someone/course", "other/fork"):
        folder = tmp_path / "github" / address
        (folder / "shared").mkdir(parents=True)
        (folder / "week01_fused_softmax").mkdir()
        (folder / "week01_fused_softmax/notes").touch()
        git(folder, "init", "--quiet")
        git(folder, "config", "uploadpack.allowAnySHA1InWant", "true")
        for branch in ("main", "feature/new"):
            (folder / "shared/machine.py").write_text(f"WHERE = {address + ' ' + branch!r}\n")
            git(folder, "checkout", "--quiet", "-B", branch)
            git(folder, "add", ".")
            git(folder, "commit", "--quiet", "--message", branch)
    return tmp_path / "github"


@pytest.fixture
def run(tmp_path, github):
    """``run(text)``: the cell in a fresh folder, as a notebook's first; what it printed, the helper's place last."""
    content = tmp_path / "content"
    content.mkdir()

    def run(text=None, cwd=content, ends=0, **environment):
        rewrite = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_VALUE_0": "https://github.com/"}
        rewrite["GIT_CONFIG_KEY_0"] = f"url.{github}/.insteadOf"
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        say = "\nfrom shared.machine import *\nprint(globals().get('WHERE'), '|', Path.cwd().name)\n"
        shell = "from IPython.core.interactiveshell import InteractiveShell as S; import sys; "
        shell += "r = S.instance().run_cell(sys.stdin.read()); sys.exit(not r.success)"
        ended = subprocess.run(
            [sys.executable, "-c", shell], input=(text or source()) + say, cwd=cwd, capture_output=True, text=True,
            env=clean | rewrite | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")} | environment, timeout=60,
        )  # fmt: skip
        assert ended.returncode == ends, ended.stdout + ended.stderr
        return re.sub(r"\x1b\[[\d;]*m", "", ended.stdout)

    return run


def stamped(repository="someone/course", branch="main"):
    return re.sub(r'REPOSITORY, BRANCH = ".+?", ".+?"', f'REPOSITORY, BRANCH = "{repository}", "{branch}"', source())


def unstamped():
    return stamped("OWNER/REPO")


def test_all_weeks_have_the_same_cell():
    names = {week: find(week).parent.name for week in WEEKS}
    assert {source(week).replace(names[week], "WEEK") for week in WEEKS} == {source(1).replace(names[1], "WEEK")}


def test_in_a_clone_nothing_is_fetched(run):
    folder = find(1).parent
    assert run(cwd=folder).splitlines()[-1] == f"None | {folder.name}"
    assert not (folder / "course").exists()


@pytest.mark.parametrize("address", ["someone/course", "other/fork"])
@pytest.mark.parametrize("branch", ["main", "feature/new"])
def test_opened_from_github_it_is_that_fork_and_branch(run, sessions, address, branch):
    server = sessions(opened(f"{address}/blob/{branch}/week01_fused_softmax/fused_softmax.ipynb"))
    for text in (unstamped(), stamped()):
        assert run(text, **server).splitlines()[-1] == f"{address} {branch} | week01_fused_softmax"


def test_opened_at_a_commit_it_is_that_commit(run, sessions, github):
    commit = git(github / "other/fork", "rev-parse", "main").strip()
    server = sessions(opened(f"other/fork/blob/{commit}/week01_fused_softmax/fused_softmax.ipynb"))
    assert run(unstamped(), **server).splitlines()[-1] == "other/fork main | week01_fused_softmax"


def test_a_copy_on_a_drive_fetches_the_stamped_course(run, sessions):
    said = run(stamped(branch="feature/new"), **sessions(DRIVE))
    assert said.splitlines()[-1] == "someone/course feature/new | week01_fused_softmax"


def test_a_copy_on_a_drive_says_what_to_set(run, sessions):
    assert "RuntimeError: Set REPOSITORY above" in run(unstamped(), ends=1, **sessions(DRIVE))


def test_a_silent_session_server_is_no_obstacle(run):
    server = {"COLAB_JUPYTER_IP": "127.0.0.1", "KMP_TARGET_PORT": "9"}
    assert run(stamped(), **server).splitlines()[-1].startswith("someone/course main")


def test_after_a_restart_it_is_found_where_it_was_fetched(run, github):
    run(stamped())
    github.rename(github.with_name("offline"))
    assert run(stamped()).splitlines()[-1] == "someone/course main | week01_fused_softmax"


def test_a_wrong_address_is_said_and_can_be_corrected(run):
    said = run(stamped("no/body"), ends=1)
    assert "RuntimeError: Could not fetch the branch main of https://github.com/no/body" in said
    assert run(stamped()).splitlines()[-1].startswith("someone/course main")


def test_a_folder_of_the_readers_is_left_alone(run, tmp_path):
    own = tmp_path / "content/course"
    own.mkdir()
    (own / "essay.txt").write_text("mine")
    assert "exists: rename it, please" in run(stamped(), ends=1)
    assert [path.name for path in own.iterdir()] == ["essay.txt"]


@pytest.mark.parametrize("path", ["not%ffJSON", "/drive/github.com/a/b/blob/c d/week01_fused_softmax/x.ipynb", ""])
def test_a_strange_answer_of_the_session_server_is_no_obstacle(run, sessions, path):
    assert run(stamped(), **sessions(path)).splitlines()[-1].startswith("someone/course main")


CODE = [(f"week {week}", "\n".join(cell_texts(find(week)))) for week in WEEKS]
CODE += [(path.name, path.read_text(encoding="utf-8")) for path in sorted((ROOT / "shared").glob("*.py"))]


@pytest.mark.parametrize(("where", "text"), CODE, ids=[name for name, _ in CODE])
@pytest.mark.filterwarnings("error::SyntaxWarning", "error::DeprecationWarning")
def test_it_is_python_that_3_13_and_an_old_ipython_know(where, text):
    tree = ast.parse(text)  # so there are no IPython magics either
    compile(tree, where, "exec")
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} & REMOVED == set()


@pytest.mark.parametrize(("where", "text"), CODE, ids=[name for name, _ in CODE])
def test_nothing_is_installed(where, text):
    said = re.sub(r"\(pip install \S+\)", "", text)  # a remark on how to have a rival
    assert not re.search(r"\bpip3?\b.{0,6}install|ensurepip|\bconda\b|apt-get", said)
