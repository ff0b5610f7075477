"""Long work says how far it is: a line of plain text every ten seconds, which a terminal and GitHub show as it is.

    with progress("cases", 36):      # "  … 12 of 36 cases after 10 s"
        for … :
            …
            step()
"""

from __future__ import annotations

import time
from contextlib import contextmanager

EVERY = 10.0  # seconds
SIGN = "  … "  # how such a line begins
_open: list[dict] = []


@contextmanager
def progress(what: str, total: int | None = None):
    """While the block runs, :func:`step` counts ``what``. What ends within ten seconds says nothing."""
    now = time.monotonic()
    _open.append({"what": what, "total": total, "count": 0, "began": now, "said": now})
    try:
        yield
    finally:
        _open.pop()


def step(count: int = 1) -> None:
    """So many more are done, in the innermost block; without one, nothing happens."""
    if not _open:
        return
    work, now = _open[-1], time.monotonic()
    work["count"] += count
    if now - work["said"] >= EVERY and work["count"] != work["total"]:
        work["said"] = now
        total = f" of {work['total']}" if work["total"] else ""
        print(f"{SIGN}{work['count']}{total} {work['what']} after {now - work['began']:.0f} s", flush=True)
