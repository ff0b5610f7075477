"""Kernels live once, in a notebook's cells. Load them from there, or run the reader's live ones in a second process.

Triton decides when it is imported whether kernels run in its interpreter or on a GPU, so one process cannot do both:
a notebook without a GPU compiles for one in a second Python, and a notebook on a GPU counts bytes in one.
"""

import hashlib
import json
import linecache
import operator
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path
from types import ModuleType

from shared.sources import path, sources

__all__ = ["ROOT", "call", "cell_texts", "execute", "find", "in_subprocess", "load", "sources", "weeks"]
ROOT = Path(__file__).resolve().parent.parent


def weeks() -> dict[str, Path]:
    """The weeks' folders by name, in order."""
    return {folder.name: folder for folder in sorted(ROOT.glob("week[0-9][0-9]*")) if folder.is_dir()}


def find(week: int | str) -> Path:
    """The notebook of a week given by number (1, "1") or folder name; ValueError when it has none."""
    week = str(week).rstrip("/")  # a shell that completes a folder's name adds one
    number = f"{int(week):02d}" if week.isdecimal() else None
    notebooks = [
        notebook
        for name, folder in weeks().items()
        if name == week or name[4:6] == number
        for notebook in sorted(folder.glob("*.ipynb"))
    ]
    if len(notebooks) != 1:
        raise ValueError(f"{len(notebooks)} notebooks for week {week!r}; the weeks are {', '.join(weeks())}")
    return notebooks[0]


def load(week: int | str) -> ModuleType:
    """A module with what a week's cells tagged `kernel` define; the same one until the notebook changes on disk.

    The cells run in order in one namespace. ValueError for an unknown week, or a notebook without such cells.
    """
    notebook = find(week)
    return _load(notebook, notebook.stat().st_mtime_ns)


def cell_texts(notebook: Path, kind: str = "code", tag: str | None = None) -> list[str]:
    """The sources of a notebook's cells of a kind ("code", "markdown"), in order; with ``tag``, of those tagged so."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    tagged = (cell for cell in cells if tag is None or tag in cell["metadata"].get("tags", []))
    return ["".join(cell["source"]) for cell in tagged if cell["cell_type"] == kind]


@cache
def _load(notebook: Path, _changed: int) -> ModuleType:
    # as IPython keeps them, with a last line break: a kernel that the notebook has compiled is found in the cache
    texts = [text + "\n" for text in cell_texts(notebook, tag="kernel")]
    if not texts:
        raise ValueError(f"{notebook.relative_to(ROOT)} has no cell tagged `kernel`")
    return execute(texts, notebook.parent.name)


def execute(texts: list[str], name: str = "cells") -> ModuleType:
    """A module `name` in which the texts have run, in order.

    `linecache` gets each text under a name of its own, as it does from IPython: `inspect`, and through it Triton, reads
    the source of a function there.
    """
    module = ModuleType(name)
    sys.modules[name] = module  # a dataclass looks up the module of its class
    for number, text in enumerate(texts, 1):
        file = f"<{name} {number} {hashlib.sha1(text.encode()).hexdigest()[:8]}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        exec(compile(text, file, "exec", dont_inherit=True), module.__dict__)
    return module


def in_subprocess(task, objects, *arguments, interpret: bool):
    """What `task(objects, *arguments)` returns in a Python of its own, where `objects` are defined anew.

    task: a function of an importable module. objects: a function, class or Triton kernel, or a list of them, from
    wherever `sources` finds them. interpret: whether Triton runs kernels in its interpreter there. Arguments and result
    travel pickled. The process stays for the next task of its kind. RuntimeError with its words when the task fails or
    the process dies.
    """
    several = objects if isinstance(objects, list) else [objects]
    paths = [path(value) for value in several] if several is objects else path(objects)
    request = pickle.dumps((task, sources(*several), paths, arguments))
    kind = interpret, os.environ.get("TRITON_OVERRIDE_ARCH")
    process, words = _processes[kind] = _processes.get(kind) or _start(interpret)
    spoken = words.seek(0, os.SEEK_END)
    try:
        process.stdin.write(request)
        process.stdin.flush()
        result, error = pickle.load(process.stdout)
    except (BrokenPipeError, EOFError):
        del _processes[kind]
        result, error = None, f"status {process.wait()}"
    if error:
        words.seek(spoken)
        said = words.read().decode(errors="replace").strip()[-4000:]
        raise RuntimeError(f"{task.__name__} failed in its own process: {error}\n{said}")
    return result


_processes: dict = {}


def _start(interpret: bool):
    """A Python that serves tasks until this one ends, and the file with what it says."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_INTERPRET": "1"} if interpret else {}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    words = tempfile.TemporaryFile()  # noqa: SIM115, it lives as long as the process
    command = [sys.executable, "-c", "from shared.cells import _serve; _serve()"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=words), words


def call(function, *arguments):
    """The simplest task for `in_subprocess`: call the function that was defined anew."""
    return function(*arguments)


def _serve() -> None:
    """The other end of `in_subprocess`: answer requests from standard input until it is closed."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a task prints is no reply
    while True:
        try:
            task, texts, paths, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            module = execute(texts)
            found = [operator.attrgetter(name)(module) for name in (paths if isinstance(paths, list) else [paths])]
            objects = found if isinstance(paths, list) else found[0]
            answer = pickle.dumps((task(objects, *arguments), None))
        except Exception:
            answer = pickle.dumps((None, "\n" + traceback.format_exc()))
        replies.write(answer)
        replies.flush()
