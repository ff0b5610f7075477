"""The frame around the four questions: machine, arguments, recordings, plots, and the command line for notebooks."""

import os
import re
import subprocess
import sys

import matplotlib.pyplot as plt
import nbformat
import pandas as pd
import pytest
import torch
from tiny import H200, NO_GPU, T4, rows_at, write

from shared import cells, inputs, machine, notebook, plots, results, timing, turing
from shared.machine import Machine
from shared.results import OURS, measure_or_recall

plt.switch_backend("Agg")


def python(*arguments, **environment):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | environment
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cells.ROOT, env=environment, capture_output=True, text=True, timeout=120)


# machine


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it is never too late")
def test_setup_after_triton_says_that_it_is_too_late():
    ended = python("-c", "import triton; from shared.machine import setup; setup()")
    assert ended.returncode != 0
    assert "RuntimeError: Triton was imported before setup()" in ended.stderr


def test_setup_says_where_we_are(course, on, capsys):
    (course / "results").mkdir()
    for name in ("tesla-t4.csv", "nvidia-h200.csv", "nvidia-l4.tmp"):
        (course / "results" / name).touch()
    on(NO_GPU)
    assert machine.setup() == NO_GPU
    said = capsys.readouterr().out
    assert "interpreter" in said
    assert "Recorded so far: nvidia-h200, tesla-t4\n" in said


@pytest.mark.parametrize(("here", "switched"), [(T4, True), (H200, False)])
def test_setup_gives_a_t4_its_tensor_cores(here, switched, course, on, monkeypatch):
    calls = []
    monkeypatch.setattr(turing, "enable", lambda: calls.append("enable"))
    on(here)
    machine.setup()
    assert bool(calls) == switched


@pytest.mark.parametrize(
    ("name", "slug", "sheet"),
    [
        ("Tesla T4", "tesla-t4", "Tesla T4"),
        ("NVIDIA H200", "nvidia-h200", "NVIDIA H200"),
        ("NVIDIA A100-SXM4-80GB", "nvidia-a100-sxm4-80gb", "NVIDIA A100"),
        ("NVIDIA L4", "nvidia-l4", "NVIDIA L4"),
        ("NVIDIA L40S", "nvidia-l40s", None),
        ("NVIDIA A100-SXM4-40GB", "nvidia-a100-sxm4-40gb", "NVIDIA A100-SXM4-40GB"),
        ("NVIDIA H100 NVL", "nvidia-h100-nvl", None),
        ("NVIDIA GeForce RTX 4090", "nvidia-geforce-rtx-4090", None),
    ],
)
def test_a_gpus_name(name, slug, sheet):
    here = Machine(name, "cuda")
    assert here.slug == slug
    assert (here.datasheet and here.datasheet.name) == sheet


def test_bfloat16_is_left_to_gpus():
    assert torch.bfloat16 in H200.dtypes
    assert torch.bfloat16 not in NO_GPU.dtypes


# arguments

X = torch.zeros(2, 3, device=machine.machine().device)
ELSEWHERE = torch.zeros(2, 3, device="meta")
WRONG_ARGUMENTS = [  # value, options, error, what it says besides the name
    (None, {}, TypeError, "NoneType"),
    ([1.0], {}, TypeError, "list"),
    (X.int(), {}, TypeError, "int32.*float16"),
    (X.double(), {}, TypeError, "float64.*float32"),
    (X.to_sparse(), {}, ValueError, "sparse"),
    (X, {"ndim": (1, 1)}, ValueError, r"2 dimensions.*\(2, 3\).*1 to 1"),
    (X, {"ndim": (3, 4)}, ValueError, "3 to 4"),
    (ELSEWHERE, {}, ValueError, "meta.*" + X.device.type),
    (X, {"like": ("weight", X.half())}, TypeError, "float32.*float16.*weight"),
    (X, {"like": ("weight", ELSEWHERE)}, ValueError, "meta.*weight"),
]


@pytest.mark.parametrize(("value", "options", "error", "words"), WRONG_ARGUMENTS)
def test_a_wrong_argument_is_named(value, options, error, words):
    with pytest.raises(error, match=f"^logits .*{words}"):
        inputs.check_tensor("logits", value, **options)


@pytest.mark.parametrize("value", [X, X.half(), X.T, X[0, 0], X[:0], X.bfloat16().requires_grad_()])
def test_a_right_argument_passes(value):
    assert inputs.check_tensor("logits", value, ndim=(0, 2), like=("other", value)) is None


@pytest.mark.parametrize(("dim", "ndim", "counted"), [(0, 1, 0), (-1, 3, 2), (-3, 3, 0), (2, 3, 2), (-1, 0, 0)])
def test_a_dimension_is_counted_from_the_front(dim, ndim, counted):
    assert inputs.check_dim("dim", dim, ndim) == counted


@pytest.mark.parametrize(("dim", "error"), [(3, ValueError), (-4, ValueError), (1.0, TypeError), (None, TypeError)])
def test_a_wrong_dimension_is_named(dim, error):
    with pytest.raises(error, match=r"^dim "):
        inputs.check_dim("dim", dim, 3)


# timing


@pytest.mark.parametrize("measure", [lambda: timing.compare({}), timing.copy_bandwidth, timing.matmul_rate])
def test_times_need_a_gpu(measure, on):
    on(NO_GPU)
    with pytest.raises(RuntimeError, match="need a GPU"):
        measure()


def test_what_fits(on):
    on(T4)
    assert timing.fits(12 * 10**9)
    assert not timing.fits(14 * 10**9)


@pytest.mark.gpu
def test_providers_side_by_side(capsys):
    x = torch.randn(2**24, device="cuda")
    greedy = lambda: torch.empty(2**50, dtype=torch.uint8, device="cuda")
    rows = timing.compare({"once": x.exp, "greedy": greedy, "twice": lambda: x.exp().exp()}, bytes_moved=2 * x.nbytes)
    once, twice = rows
    assert [once["provider"], twice["provider"]] == ["once", "twice"]
    assert "greedy: out of memory" in capsys.readouterr().out
    assert once["ms_p20"] <= once["ms"] <= once["ms_p80"]
    assert 1.5 < twice["ms"] / once["ms"] < 2.5
    assert once["gbps"] == pytest.approx(2 * x.nbytes / once["ms"] / 1e6)


# recordings


RATIOS = r"0\.50x \([^()]*8,192\) to 2\.00x \([^()]*4,096\)"  # of the rows below, where the rival takes 0.5 and 2 ms


def never():
    raise AssertionError("measured without a GPU")


def test_what_was_recorded_is_recalled(recorded, capsys):
    recorded(H200, "speed", rows_at(256, 12_345))
    recorded(H200, "memory", [{"provider": OURS, "peak_mib": 1.5}])
    found = measure_or_recall("speed", never)
    assert found[list(rows_at(1)[0])].to_dict("records") == rows_at(256, 12_345)
    assert set(found["gpu"]) == {"NVIDIA H200"}
    assert {"torch", "triton", "date"} <= set(found)
    assert "peak_mib" not in found
    assert "recorded on NVIDIA H200, " in capsys.readouterr().out


def test_sizes_are_recorded_exactly(recorded):
    recorded(H200, "speed", [*rows_at(2**20 + 1, 2**31 + 1), {"provider": "of no size", "ms": 1.5}])
    for peak in (1.5, 2.5):  # other experiments leave the sizes' column partly empty too
        recorded(H200, "memory", [{"provider": OURS, "peak_mib": peak}])
    sizes = measure_or_recall("speed", never)["n_cols"].dropna().unique()
    assert list(sizes) == [2**20 + 1, 2**31 + 1]


def test_a_missing_recording_names_the_command_that_makes_it(recorded, capsys):
    recorded(H200, "memory", [{"provider": OURS, "peak_mib": 1.5}])
    assert measure_or_recall("speed", never).empty
    said = capsys.readouterr().out
    assert "No recording of 'speed' yet. On a GPU: python -m shared.notebook record week01_tiny" in said


def test_the_preferred_recording_is_recalled_unless_another_is_asked_for(recorded):
    recorded(Machine("A first GPU", "cuda"), "speed", rows_at(256))
    recorded(T4, "speed", rows_at(256))
    assert set(measure_or_recall("speed", never)["gpu"]) == {"A first GPU"}
    recorded(H200, "speed", rows_at(256))
    assert set(measure_or_recall("speed", never)["gpu"]) == {"NVIDIA H200"}
    assert set(measure_or_recall("speed", never, gpu="tesla-t4")["gpu"]) == {"Tesla T4"}
    assert measure_or_recall("speed", never, gpu="nvidia-b200").empty


def test_an_experiment_replaces_its_own_rows_alone(recorded, course):
    recorded(T4, "speed", rows_at(64))
    other_gpu = (course / "results/tesla-t4.csv").read_bytes()
    recorded(H200, "speed", rows_at(256, 512))
    recorded(H200, "backward", rows_at(1024))
    recorded(H200, "speed", rows_at(128))
    assert (course / "results/tesla-t4.csv").read_bytes() == other_gpu
    assert set(measure_or_recall("speed", never)["n_cols"]) == {128}
    assert set(measure_or_recall("backward", never)["n_cols"]) == {1024}


def test_an_interrupted_write_leaves_the_old_recording(recorded, course, monkeypatch):
    def half(table, path, **options):
        path.write_text("experiment,prov")
        raise KeyboardInterrupt

    recorded(H200, "speed", rows_at(256))
    before = (course / "results/nvidia-h200.csv").read_bytes()
    monkeypatch.setattr(pd.DataFrame, "to_csv", half)
    with pytest.raises(KeyboardInterrupt):
        recorded(H200, "speed", rows_at(512))
    assert (course / "results/nvidia-h200.csv").read_bytes() == before
    assert [path.name for path in (course / "results").glob("*.csv")] == ["nvidia-h200.csv"]


def test_the_rival_is_the_fastest_but_never_the_unfused_baseline():
    found = results.ratios(pd.DataFrame(rows_at(256) + rows_at(512, rival=0.5)), ["n_cols"])
    assert found.to_dict("records") == [
        {"n_cols": 256, "rival": "torch", "ratio": 2.0},
        {"n_cols": 512, "rival": "torch", "ratio": 0.5},
    ]


# plots


def test_a_plot_names_its_gpu_and_every_provider(recorded):
    half = [row | {"dtype": "half"} for row in rows_at(256, 512)]
    single = [row | {"dtype": "single", "provider": row["provider"].replace("torch", "late")} for row in half]
    recorded(H200, "speed", half + single)
    rows, titles = measure_or_recall("speed", never), {"half": "GB/s, half", "single": "GB/s, single"}
    plots.lines(rows, "n_cols", "gbps", "dtype", titles=titles, xlabel="n", limits={"copy": 9.0})
    figure = plt.gcf()
    assert "recorded on NVIDIA H200, " in figure.get_supxlabel()
    named = {text.get_text() for legend in figure.legends for text in legend.get_texts()}
    assert named == {OURS, "slow", "torch", "unfused (eager)", "late"}
    assert figure.axes[0].get_ylim()[0] == 0
    plt.close(figure)


def test_without_a_recording_nothing_is_plotted(capsys):
    before = plt.get_fignums()
    plots.lines(pd.DataFrame(), "n_cols", "gbps", "dtype", titles={"fp32": ""}, xlabel="n")
    assert "Nothing to plot without a recording" in capsys.readouterr().out
    assert plt.get_fignums() == before


def test_no_two_providers_look_alike():
    look = plots.styles([*"abcdefgh", OURS])
    assert len({(style["color"], style["marker"]) for style in look.values()}) == 9


# the command line


def test_record_refuses_without_a_gpu():
    ended = python("-m", "shared.notebook", "record", CUDA_VISIBLE_DEVICES="")
    assert ended.returncode != 0
    assert "needs a GPU" in ended.stdout + ended.stderr


FAILURES = {
    "error": ("1 / 0", "ZeroDivisionError: division by zero"),
    "long message": (r"assert False, 'first line\nsecond line'", "AssertionError: first line"),
    "dead kernel": ("import os; os._exit(1)", "Kernel died"),
}


@pytest.mark.parametrize(("source", "error"), FAILURES.values(), ids=FAILURES)
def test_run_names_notebook_cell_and_error(source, error, course, capsys):
    path = write(course, "x = 1", source, "print('never')", executed="of last time")
    before = path.read_bytes()
    assert notebook.main(["run", "1"]) == 1
    said = capsys.readouterr().out
    verdict = next(line for line in said.splitlines() if "FAILED" in line)
    assert "week01_tiny" in verdict
    assert "tiny.ipynb, cell 3" in verdict
    assert error in verdict
    assert "0 of 1 notebooks ran through" in said
    assert path.read_bytes() == before


def test_run_reports_progress_and_a_verdict_and_keeps_nothing(course, recorded, capsys):
    recorded(H200, "speed", rows_at(4096) + rows_at(8192, rival=0.5))
    path = write(course, "print('Right: f agrees')", "print(\"Recalled 3 rows of 'speed', recorded on …\")")
    before = path.read_bytes()
    capsys.readouterr()
    assert notebook.main(["run"]) == 0
    said = capsys.readouterr().out
    assert "cell 2 of 3" in said and "cell 3 of 3" in said
    assert re.search(rf"week01_tiny: 1 check passed · [^·]*{RATIOS}[^·]* · recalled: speed · ", said)
    assert path.read_bytes() == before


def test_a_saved_notebook_has_outputs_and_no_timestamps(course):
    path = write(course, "print('Right: f agrees')", executed="of last time")
    verdict = notebook.run(path, save=True)
    assert re.search(r"^1 check passed · [^·]*no speed recorded · recorded: nothing · ", verdict)
    saved = nbformat.read(path, as_version=4)
    assert saved.cells[1].outputs[0].text == "Right: f agrees\n"
    assert saved.cells[1].execution_count == 1
    assert "execution" not in saved.cells[1].metadata
    assert set(saved.metadata) == {"kernelspec", "language_info"}


def test_an_unknown_week_is_an_error_that_lists_the_weeks(course, capsys):
    write(course, "1")
    assert notebook.main(["run", "week17"]) == 2
    assert "week01_tiny" in capsys.readouterr().out


def test_a_tensor_that_only_wraps_others_is_refused():
    from torch.testing._internal.two_tensor import TwoTensor

    with pytest.raises(TypeError, match="x is a TwoTensor, which has no memory of its own"):
        inputs.check_tensor("x", TwoTensor(torch.ones(2), torch.ones(2)))


def test_a_rival_that_is_missing_is_left_out_by_name(monkeypatch, capsys):
    assert timing.rival("JSON", "json", "loads") is __import__("json").loads
    monkeypatch.setattr(timing, "machine", lambda: Machine("NVIDIA H200", "cuda"))
    assert timing.rival("Nobody", "no_such_library.ops", "f") is None
    assert "Nobody is not installed here" in capsys.readouterr().out


def test_progress_is_shown_at_once_and_not_saved(course, capsys):
    said = "print('  … 3 of 9 cases after 11 s', flush=True); print('Right: f agrees')"
    path = write(course, said, "print('  … 1 size timed', flush=True)")
    notebook.run(path, save=True)
    assert "  … 3 of 9 cases after 11 s\n" in capsys.readouterr().out
    cells = nbformat.read(path, as_version=4).cells
    assert [[output.text for output in cell.outputs] for cell in cells[1:]] == [["Right: f agrees\n"], []]


@pytest.mark.parametrize("text", ["", "a,b\n1\n1,2,3\n"])
def test_a_recording_that_is_no_table_is_named(text, course):
    (course / "results").mkdir()
    (course / "results/nvidia-h200.csv").write_text(text)
    with pytest.raises(ValueError, match=r"week01_tiny/results/nvidia-h200\.csv is no table"):
        results.recording(course)
