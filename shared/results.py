"""Record and recall: measurements go to ``results/<gpu>.csv`` in the week's folder, and come back from there.

One row per provider, size and experiment: ``experiment, provider, …sizes…, ms, ms_p20, ms_p80, gbps, tflops,
peak_mib, …, gpu, torch, triton, date``. A GPU writes only its own file; an experiment replaces its own rows.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from shared.journal import current
from shared.machine import machine, versions, week_folder
from shared.progress import progress

OURS = "this kernel"  # the provider that a week is about
BASELINE = "unfused"  # providers named so are the teaching baseline, never the rival
PREFERRED = "nvidia-h200"  # the recording shown when there are several and the reader chose none


def recording(folder: Path, gpu: str | None = None) -> pd.DataFrame:
    """All rows recorded in ``folder``/results for ``gpu`` (a file name such as ``"tesla-t4"``), or an empty frame."""
    files = {path.stem: path for path in sorted((folder / "results").glob("*.csv"))}
    if gpu is None:
        gpu = PREFERRED if PREFERRED in files else next(iter(files), None)
    if gpu not in files:
        return pd.DataFrame(columns=["experiment", "provider", "gpu", "torch", "triton", "date"])
    try:
        return _whole(pd.read_csv(files[gpu]))
    except (pd.errors.EmptyDataError, pd.errors.ParserError, UnicodeDecodeError) as error:
        raise ValueError(f"{folder.name}/results/{gpu}.csv is no table; delete it, and record anew: {error}") from None


def recorded(folder: Path, experiment: str, gpu: str | None = None) -> pd.DataFrame:
    """The rows of one experiment in :func:`recording`, with the columns that it has."""
    rows = recording(folder, gpu)
    return rows[rows["experiment"] == experiment].dropna(axis="columns", how="all").reset_index(drop=True)


def _whole(rows: pd.DataFrame) -> pd.DataFrame:
    """Columns of whole numbers as such: a gap makes pandas see floats in them, and sizes must stay exact."""
    floats = rows.select_dtypes("float")
    return rows.astype({name: "Int64" for name in floats if (floats[name].dropna() % 1 == 0).all()})


def _write(folder: Path, rows: pd.DataFrame, experiment: str) -> Path:
    path = folder / "results" / f"{machine().slug}.csv"
    path.parent.mkdir(exist_ok=True)
    old = recording(folder, path.stem)
    kept = old[old["experiment"] != experiment]
    table = _whole(pd.concat([kept, rows], ignore_index=True) if len(kept) else rows)
    last = [name for name in ("gpu", "torch", "triton", "date") if name in table]
    table = table[[name for name in table if name not in last] + last]
    unfinished = path.with_suffix(".tmp")
    table.to_csv(unfinished, index=False, float_format="%.6g", lineterminator="\n")
    unfinished.replace(path)  # an interrupted run leaves the old file whole
    return path


def measure_or_recall(experiment: str, measure, gpu: str | None = None) -> pd.DataFrame:
    """The rows of ``experiment``: measured and recorded on a GPU, recalled without one.

    ``measure`` is a function without arguments that returns a list of dicts (see :func:`shared.timing.compare`).
    Without a GPU the recording of ``gpu`` is recalled (a file name in results/; the H200's unless told). A
    missing recording is no error: it prints the command that makes one and returns an empty frame.
    """
    folder, journal = week_folder(), current()
    if machine().has_gpu:
        if journal and experiment in journal.recorded(folder.name):
            rows = recorded(folder, experiment, machine().slug)
            if len(rows):
                place = f"results/{machine().slug}.csv"
                print(f"Recorded {len(rows)} rows of '{experiment}' before the interruption, in {place}")
                return rows
        with progress(f"sizes of '{experiment}' timed"):
            rows = pd.DataFrame(measure())
        rows.insert(0, "experiment", experiment)
        rows = rows.assign(gpu=machine().name, **versions())
        path = _write(folder, rows, experiment)
        if journal:
            journal.note(folder.name, experiment)
        print(f"Recorded {len(rows)} rows of '{experiment}' in results/{path.name}")
        return rows
    rows = recorded(folder, experiment, gpu)
    if rows.empty:
        print(f"No recording of '{experiment}' yet. On a GPU: python -m shared.notebook record {folder.name}")
    else:
        print(f"Recalled {len(rows)} rows of '{experiment}', {source(rows)}")
    return rows


def source(rows: pd.DataFrame) -> str:
    """Where rows come from: "measured on NVIDIA H200, 2026-11-29, torch 2.11.0, triton 3.6.0"; or the several GPUs."""
    if rows.empty:
        return "no recording"
    verb = "measured" if machine().has_gpu else "recorded"
    first, gpus = rows.iloc[0], rows["gpu"].unique()
    if len(gpus) > 1:
        return f"{verb} on {', '.join(gpus)}"
    return f"{verb} on {first['gpu']}, {first['date']}, torch {first['torch']}, triton {first['triton']}"


def ratios(rows: pd.DataFrame, sizes: list[str]) -> pd.DataFrame:
    """Speed of this kernel against the fastest rival at each size (1.2 = a fifth faster), a row a combination.

    ``sizes`` names the columns that tell workloads apart. The unfused baseline is no rival.
    """
    found = []
    rows = rows.dropna(subset=["ms"]) if "ms" in rows else rows
    for key, group in rows.groupby(sizes, sort=False, dropna=False) if len(rows) else []:
        ours = group[group["provider"] == OURS]
        rivals = group[(group["provider"] != OURS) & ~group["provider"].str.startswith(BASELINE)]
        if len(ours) and len(rivals):
            best = rivals.loc[rivals["ms"].idxmin()]
            row = dict(zip(sizes, key, strict=True)) | {
                "rival": best["provider"],
                "ratio": best["ms"] / ours["ms"].iloc[0],
            }
            found.append(row)
    return pd.DataFrame(found, columns=[*sizes, "rival", "ratio"])
