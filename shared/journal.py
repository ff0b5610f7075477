"""What an interrupted recording had finished: the file ``recording-<gpu>.unfinished`` in the course's folder.

`python -m shared.notebook record` opens it, and tells the notebooks of it by an environment variable; a notebook adds
each experiment that it has recorded. When all weeks are done the file goes. When the command is run again before that,
finished weeks are left out, and of the others those experiments are recalled that stand here, as long as GPU, versions,
the weeks asked for and the week's code are the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

from shared.cells import cell_texts

VARIABLE = "COURSE_RECORDING"


class Journal:
    """The journal in a file, which need not exist; every change is written at once."""

    def __init__(self, path: Path):
        self.path = path
        self.data = {}
        self._read()

    def begin(self, about: dict, fresh: bool = False) -> None:
        """Go on with what is there if it is ``about`` the same (GPU, versions, weeks asked for); else start anew."""
        if fresh or self.data.get("about") != about:
            self.data = {"about": about, "done": [], "weeks": {}}
        self._write()

    def open_week(self, notebook: Path) -> list[str]:
        """The experiments of a notebook that are recorded already; none when its code has changed since."""
        code, week = "\0".join(cell_texts(notebook)), notebook.parent.name
        digest = hashlib.sha256(code.encode()).hexdigest()
        self._read()
        if self.data["weeks"].get(week, {}).get("code") != digest:
            self.data["weeks"][week] = {"code": digest, "experiments": []}
            self.data["done"] = [other for other in self.data["done"] if other != week]
            self._write()
        return list(self.data["weeks"][week]["experiments"])

    def recorded(self, week: str) -> list[str]:
        """The experiments of a week that this recording has."""
        return self.data.get("weeks", {}).get(week, {}).get("experiments", [])

    def note(self, week: str, experiment: str) -> None:
        """An experiment of a week is in its CSV now."""
        self._read()
        if experiment not in self.data["weeks"][week]["experiments"]:
            self.data["weeks"][week]["experiments"].append(experiment)
            self._write()

    def finish(self, week: str) -> None:
        """A week's notebook ran through."""
        self._read()
        self.data["done"].append(week)
        self._write()

    def _read(self) -> None:
        """What the file says now, for command and notebook take turns to write it; what is damaged says nothing."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if isinstance(data, dict):
                self.data = data

    def _write(self) -> None:
        unfinished = self.path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(self.data, indent=1), encoding="utf-8")
        unfinished.replace(self.path)


def current() -> Journal | None:
    """The journal of the recording that this process is part of, or None."""
    path = os.environ.get(VARIABLE)
    return Journal(Path(path)) if path and Path(path).exists() else None
