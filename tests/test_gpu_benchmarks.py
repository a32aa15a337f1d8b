"""scripts/gpu without a GPU: the programs over Gloo, and everything around the driver with faked answers."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks import gpu, gpu_kill, gpu_mps, gpu_pair, gpu_step
from benchmarks.common import ROOT, BenchmarkError, Options, Row
from benchmarks.device_state import Found
from benchmarks.gpu_pair import Pair, choose, pairs
from benchmarks.gpu_report import FROM, NOTHING, TO, GpuReport, ReportError, counts_of, devices, into
from ft_core.doctor.facts import Gpu, GpuFacts
from ft_core.settings import BACKENDS

if TYPE_CHECKING:
    from collections.abc import Callable

H100 = GpuFacts([Gpu("NVIDIA H100", 81000, 4)], "570.86", 1, "13.0", "2.29.7")
GOOD = GpuReport(
    {"date": "2026-11-25", "commit": "abc"}, "NVIDIA H100", "570.86", "13.0", "2.29.7", "2.13.0+cu130", "ours",
    "two processes on one GPU, NCCL between them over sockets", "", {"passed": 7, "failed": 0, "skipped": 1},
    [Row("gpu_step", "added", 42.0, "us", "<= 100 us", True, "n=2", (40.0, 44.0))], {},
)  # fmt: skip

# ---------------------------------------------------------------------------------------------- which tests are run


def test_all_files_with_tests_of_a_gpu_are_found(request: pytest.FixtureRequest) -> None:
    """Of this run of pytest's, too: all there are, where it runs everything."""
    found = {str(pathlib.Path(file).relative_to(ROOT)) for file in gpu.gpu_tests()}
    assert {
        "tests/checkpointing/test_devices_gpu.py", "tests/gpu/test_collectives.py", "tests/gpu/test_healing.py",
        "tests/gpu/test_launched.py", "tests/gpu/test_training.py", "tests/process_group/test_gpu.py",
        "tests/runtime/test_device_commit.py", "tests/runtime/test_on_gpu.py", "tests/test_device.py",
        "tests/test_futures.py",
    } <= found  # fmt: skip
    marked = {str(item.path.relative_to(ROOT)) for item in request.session.items if item.get_closest_marker("gpu")}
    assert marked <= found


# ---------------------------------------------------------------------------------------------------- the programs


@pytest.mark.process
@pytest.mark.timeout(180)
def test_two_processes_reach_each_other_over_gloo() -> None:
    pair, worse = gpu_pair.find("cpu", 0, Options(), nccl=False)
    assert (pair.backend, worse) == ("gloo", "")


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(180)
def test_the_step_is_measured_over_gloo() -> None:
    pair = pairs("cpu", 0, nccl=False)[0]
    again, ours = gpu_step.measure(Options(runs=1), pair)
    assert ours.what == "ft_core: added to a step of torch DDP (gloo, the host is waited for)"
    assert (len(ours.samples), ours.met, again.met) == (1, None, None)


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(180)
def test_both_are_killed_over_gloo_and_the_survivor_commits_again() -> None:
    p50, p90, same = gpu_kill.measure(Options(kills=2), pairs("cpu", 0, nccl=False)[0])
    assert 0 < float(p50.value) <= float(p90.value)
    assert len(p50.samples) == 2
    assert same.met


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_program_of_the_state_is_called_as_it_can_be() -> None:
    with pytest.raises(BenchmarkError, match="it ended with 2: device_state: there is no CUDA device here"):
        gpu.state(Options(), pairs("cuda", 1, nccl=True)[0])


@pytest.mark.process
@pytest.mark.timeout(120)
def test_a_backend_that_does_not_work_is_found_out_by_the_sum_of_a_tensor() -> None:
    why = gpu_pair.probe(Pair("cpu", "nccl"), Options())
    assert "FT_BACKEND=nccl: " in why


# ---------------------------------------------------------------------------------------------------- which devices


def test_two_gpus_have_a_process_each_and_one_gpu_has_both() -> None:
    apart = pairs("cuda", 4, nccl=True)
    assert [pair.backend for pair in apart] == ["nccl", "gloo"]
    assert [apart[0].of(rank) for rank in range(2)] == [
        {"FT_BACKEND": "nccl", "CUDA_VISIBLE_DEVICES": str(rank)} for rank in range(2)
    ]
    together = pairs("cuda", 1, nccl=True)
    assert [pair.backend for pair in together] == ["nccl", "gloo"]
    first, second = (together[0].of(rank) for rank in range(2))
    assert first["NCCL_HOSTID"] != second["NCCL_HOSTID"]
    assert {first["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"], first["NCCL_MAX_CTAS"][1:]} == {"0", ""}
    assert "NCCL_HOSTID" not in together[1].of(0)
    assert [pair.backend for pair in pairs("cuda", 1, nccl=False)] == ["gloo"]
    for found in (apart, together, pairs("cpu", 0, nccl=False)):
        assert all(pair.backend in BACKENDS and pair.backend.upper() in pair.how.upper() for pair in found)


@pytest.mark.parametrize(("gpus", "theirs"), [(1, ["GPU-8a3f", "GPU-8a3f"]), (2, ["GPU-8a3f", "GPU-1234"])])
def test_gpus_that_this_process_does_not_see_are_left_alone(gpus: int, theirs: list[str]) -> None:
    for pair in pairs("cuda", gpus, nccl=True, visible="GPU-8a3f,GPU-1234"):
        assert [pair.of(rank)["CUDA_VISIBLE_DEVICES"] for rank in range(2)] == theirs


def test_the_best_that_works_is_taken_and_the_table_says_why_not_a_better_one() -> None:
    nccl, gloo = pairs("cuda", 1, nccl=True)
    assert choose([(nccl, "")]) == (nccl, "")
    assert choose([(nccl, "duplicate GPU"), (gloo, "")]) == (gloo, f"{nccl.how}: duplicate GPU")
    with pytest.raises(BenchmarkError, match=r"two processes cannot reach each other: .*: a; .*: b"):
        choose([(nccl, "a"), (gloo, "b")])


def test_what_was_promised_is_promised_on_a_gpu_only() -> None:
    times = {
        gpu_step.BASE: [1e-3, 2e-3], gpu_step.AGAIN: [1e-3, 2e-3], gpu_step.WAITS: [1.02e-3, 2.08e-3],
        gpu_step.OURS: [1.05e-3, 2.25e-3],
    }  # fmt: skip
    nccl = pairs("cuda", 1, nccl=True)[0]
    again, waits, ours, beyond = gpu_step.rows({"device": times}, nccl, service=True)
    assert ours.what.endswith("(nccl, the device is waited for, MPS)")
    assert float(ours.value) == pytest.approx(150.0)
    assert float(waits.value) == pytest.approx(50.0)
    assert float(beyond.value) == pytest.approx(100.0)
    assert [row.met for row in (ours, again, waits, beyond)] == [False, None, None, None]
    p50, p90, same = gpu_kill.rows([100.0, 300.0, 1500.0], {"a"}, nccl)
    assert (p50.value, p50.met, p90.value, p90.met, same.met) == (300.0, True, 1500.0, False, True)
    p50, _, same = gpu_kill.rows([100.0], {"a", "b"}, pairs("cpu", 0, nccl=False)[0])
    assert (p50.met, same.met) == (None, False)


def test_two_processes_share_a_gpu_through_the_service_where_it_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    with gpu_mps.shared_gpu(wanted=False) as environment:
        assert environment == {}
    log, program = tmp_path / "log", tmp_path / gpu_mps.CONTROL
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for status, expected in (0, ["-d", "quit"]), (1, ["-d"]):
        log.unlink(missing_ok=True)
        program.write_text(f"#!/bin/sh\n[ $# = 1 ] && echo $1 >> {log} || cat >> {log}\nexit {status}\n")
        program.chmod(0o755)
        with gpu_mps.shared_gpu() as environment:
            assert bool(environment) == (status == 0)
            assert all(pathlib.Path(value).is_dir() for value in environment.values())
        assert log.read_text().split() == expected


def test_every_file_with_a_test_for_a_gpu_is_run() -> None:
    """Also those that take the mark from another file."""
    names = {str(pathlib.Path(file).relative_to(ROOT / "tests")) for file in gpu.gpu_tests()}
    assert names >= {"gpu/test_training.py", "process_group/test_gpu.py", "test_device.py"}


# ---------------------------------------------------------------------------------------------------- the report


def test_the_file_comes_back_and_what_is_none_of_ours_is_refused_by_its_field() -> None:
    text = json.dumps(GOOD.as_json())
    assert GpuReport.from_json(json.loads(text)) == GOOD
    bad: list[tuple[Callable[[dict[str, Any]], object], str]] = [
        (lambda found: found.pop("driver"), r"fields \['driver'\] are missing, or unknown"),
        (lambda found: found.update(more=1), r"fields \['more'\]"),
        (lambda found: found.update(nccl=2), "nccl=2 is no text"),
        (lambda found: found.update(tests={"passed": "7"}), "tests=.*expected whole numbers of passed, failed"),
        (lambda found: found.update(not_run=[]), "not_run=.* is no object"),
        (lambda found: found.update(rows=[{"figure": 1}]), "rows: "),
    ]
    for spoil, says in bad:
        found = json.loads(text)
        spoil(found)
        with pytest.raises(ReportError, match=says):
            GpuReport.from_json(found)
    with pytest.raises(ReportError, match="expected an object"):
        GpuReport.from_json([])


def test_it_is_good_only_if_everything_ran_and_kept_what_was_promised() -> None:
    assert GOOD.good
    missed = dataclasses.replace(GOOD.rows[0], met=False)
    changes: list[dict[str, Any]] = [
        {"rows": [missed]}, {"not_run": {"gpu_kill": "why"}}, {"tests": {"passed": 1, "failed": 1, "skipped": 0}},
        {"tests": {"passed": 0, "failed": 0, "skipped": 9}}, {"tests": {}},
    ]  # fmt: skip
    for change in changes:
        assert not dataclasses.replace(GOOD, **change).good, change


def test_the_table_says_device_driver_versions_and_which_group() -> None:
    text = GOOD.markdown()
    for line in (
        "| device | NVIDIA H100 |", "| driver | 570.86 |", "| CUDA, NCCL | 13.0, 2.29.7 |", "| torch | 2.13.0+cu130 |",
        "NCCL between them over sockets", "| tests marked gpu | 7 passed, 0 failed, 1 skipped |",
        "| gpu_step | added | 42 us | <= 100 us | ok | n=2 |",
    ):  # fmt: skip
        assert line in text
    worse = dataclasses.replace(GOOD, why_not_better="a|b\nc", not_run={"gpu_kill": "d|e"}, rows=[])
    assert "| why not better | a/b c |" in worse.markdown()
    assert "| gpu_kill did not run | d/e |" in worse.markdown()


def test_the_page_has_a_place_for_it_and_says_now_what_the_file_says() -> None:
    page = (ROOT / "docs/gpu.md").read_text()
    path = ROOT / "benchmarks/gpu.json"
    if path.exists():
        assert into(page, GpuReport.from_json(json.loads(path.read_text()))) == page
    else:
        assert NOTHING in page
    filled = into(page, GOOD)
    assert NOTHING not in filled
    assert GOOD.markdown() in filled
    assert into(filled, GOOD) == filled
    with pytest.raises(ReportError, match="has no lines"):
        into(page.replace(TO, ""), GOOD)
    with pytest.raises(ReportError, match="has no lines"):
        into(page.replace(FROM, ""), GOOD)


def test_pytests_report_and_a_programs_figures_are_read() -> None:
    junit = '<testsuites><testsuite tests="9" failures="1" errors="1" skipped="3"/></testsuites>'
    assert counts_of(junit) == {"passed": 4, "failed": 2, "skipped": 3}
    with pytest.raises(ReportError, match=r"pytest's report cannot be read"):
        counts_of("<testsuites>")
    with pytest.raises(ReportError):
        counts_of('<testsuites><testsuite tests="x"/></testsuites>')
    printed = json.dumps(dataclasses.asdict(Found("H100", 1024, 7, 0.1, 0.12, 21.5, 17.9, 0.83, True)))
    (row,) = gpu.state_rows(f"noise\n{printed}\n")
    assert (row.value, row.unit, row.met, row.detail) == (17.9, "GB/s", True, "83% of 21.5 GB/s; 1024 MiB, n=7")
    with pytest.raises(BenchmarkError, match="it printed no figures: 'noise'"):
        gpu.state_rows("noise")
    assert devices(["H100", "A100", "H100"]) == "2 H100, A100"


# ---------------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (GpuFacts(), "there is no NVIDIA GPU on this machine"),
        (GpuFacts(error="nvidia-smi: no answer within 5 s"), "do not answer (nvidia-smi: no answer within 5 s)"),
        (dataclasses.replace(H100, cuda=""), "is built without CUDA"),
        (dataclasses.replace(H100, torch_devices=0), "(CUDA 13.0) can use none of this machine's GPUs (driver 570.86)"),
    ],
)
def test_without_a_gpu_nothing_runs_and_one_sentence_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], facts: GpuFacts, says: str
) -> None:
    monkeypatch.setattr(gpu, "gpus", lambda: facts)
    assert gpu.main([]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("scripts/gpu: nothing ran, because ")
    assert says in err
    assert err.count("\n") == 1


def run(monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path, **benchmarks: Any) -> tuple[int, GpuReport, str]:
    """scripts/gpu on a machine with a GPU, as far as it sees that."""
    nccl, gloo = pairs("cuda", 1, nccl=True)
    monkeypatch.setattr(gpu, "gpus", lambda: H100)
    monkeypatch.setattr(gpu, "run_tests", lambda: {"passed": 3, "failed": 0, "skipped": 0})
    monkeypatch.setattr(gpu_pair, "probe", lambda pair, _: "it hangs" if pair == nccl else "")
    monkeypatch.setattr(gpu, "BENCHMARKS", benchmarks)
    page = folder / "gpu.md"
    page.write_text(f"# GPUs\n{FROM}\n{NOTHING}\n{TO}\nmore\n")
    status = gpu.main(["--json", str(folder / "gpu.json"), "--page", str(page), "--interpreter", "a Python"])
    report = GpuReport.from_json(json.loads((folder / "gpu.json").read_text()))
    assert report.between == gloo.how
    assert report.why_not_better == f"{nccl.how}: it hangs"
    return status, report, page.read_text()


def test_a_run_is_written_to_the_file_and_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    status, report, page = run(monkeypatch, tmp_path, one=lambda _, pair: [Row("one", pair.backend, 1.0, met=True)])
    assert status == 0
    assert (report.device, report.driver, report.nccl, report.interpreter) == (
        "NVIDIA H100",
        "570.86",
        "2.29.7",
        "a Python",
    )
    assert report.torch == torch.__version__
    assert [row.what for row in report.rows] == ["gloo"]
    assert page == f"# GPUs\n{FROM}\n{report.markdown()}\n{TO}\nmore\n"


def test_a_benchmark_that_fails_is_named_and_the_others_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    def fails(*_: object) -> list[Row]:
        raise BenchmarkError("it broke\nwith more lines")

    status, report, _ = run(monkeypatch, tmp_path, bad=fails, good=lambda *_: [Row("good", "x", 1.0)])
    assert status == 1
    assert report.not_run == {"bad": "it broke"}
    assert [row.figure for row in report.rows] == ["good"]


def script(tmp_path: pathlib.Path, nvidia_smi: str | None, **variables: str) -> subprocess.CompletedProcess[str]:
    """scripts/gpu with that nvidia-smi on the PATH."""
    if nvidia_smi is not None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{nvidia_smi}\n")
        tool.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin", **variables}
    command = [str(ROOT / "scripts/gpu")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.process
@pytest.mark.parametrize("nvidia_smi", ["exit 9", "echo 'No devices were found'"])
def test_the_script_without_a_gpu(tmp_path: pathlib.Path, nvidia_smi: str) -> None:
    done = script(tmp_path, nvidia_smi)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "scripts/gpu: nothing ran, because nvidia-smi lists no GPU on this machine.\n"


@pytest.mark.process
@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch without CUDA")
def test_the_script_with_an_interpreter_that_cannot_do_it(tmp_path: pathlib.Path) -> None:
    gpu_0 = "echo 'GPU 0: NVIDIA H100 (UUID: GPU-8a3f)'"
    done = script(tmp_path, gpu_0, FT_GPU_PYTHON=sys.executable)
    assert done.returncode == 3
    assert (
        done.stderr
        == f"scripts/gpu: nothing ran, because {sys.executable} lacks something: AssertionError: a CPU build.\n"
    )
