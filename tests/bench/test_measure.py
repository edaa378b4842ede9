"""The benchmark engine: its arithmetic, the order of measurements, and contenders that fail."""

from __future__ import annotations

import csv
import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # pytester forgets modules that are imported inside of it, and this one loads once

from fasttfm.bench import measure, pytest_bench, report, timing
from fasttfm.bench.peers import Inputs, Peer, PeerCall, PeerUnavailable
from fasttfm.bench.pytest_bench import bench_test
from fasttfm.bench.timing import Ceilings, Effort, Work
from fasttfm.cli.main import main
from fasttfm.ops.core import backends
from fasttfm.ops.core.backends import Backend, BackendTable, tables
from fasttfm.ops.core.graph_capture import CaptureError
from fasttfm.testing import specs
from fasttfm.testing.spec import Cost, OpCase, OpSpec
from fasttfm.testing.specs.layer_norm import SPEC

pytest_plugins = ("pytester",)

CEILINGS = Ceilings(copy_bytes_per_second=1e12, gemm_flops_per_second=1e14)
CPU = torch.device("cpu")
CASE = OpCase("4x8", {"shape": (4, 8)}, {"eps": 1e-5})
BRIEF = Effort(round_seconds=1e-5, budget_seconds=0.0, min_rounds=2)


def _spec(*peers: Peer) -> OpSpec:
    return replace(SPEC, bench_cases=(CASE,), bench_cases_cpu=(CASE,), peers=(SPEC.peers[0], *peers))


@pytest.fixture
def _fixed_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ceilings", lambda device: CEILINGS)


def _row(contender: str, milliseconds: float | None, **fields: Any) -> measure.Row:
    row = measure.Row("layer_norm", "4x8", "float32", "forward", "a chip", contender, ms_p50=milliseconds)
    return replace(row, ms_p20=milliseconds, ms_p80=milliseconds, **fields)


# ---- before measurements ---------------------------------------------------------------------------------------------


def test_run_once_calls_every_contender() -> None:
    called = []

    def recorded(name: str) -> Callable[[Inputs, Mapping[str, Any]], Callable[[], Any]]:
        def build(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Any]:
            def call() -> torch.Tensor:
                called.append((name, torch.is_grad_enabled()))
                if name == "fails":
                    raise RuntimeError
                return inputs["x"] * 2

            return call

        return build

    spec = _spec(Peer("fails", recorded("fails")), Peer("works", recorded("works")))
    measure.run_once(spec, CASE, torch.float32, CPU)
    assert called == [("fails", True), ("works", True), ("works", False)]


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def test_percentiles() -> None:
    assert timing.percentiles([float(value) for value in range(100, -1, -1)]) == (20.0, 50.0, 80.0)


@pytest.mark.parametrize(
    ("seconds", "rotation", "calls"),
    [(1e-3, 1, 5), (1.0, 1, 1), (1.0, 3, 3), (1e-3, 4, 8), (1e-9, 1, timing.MAX_CALLS)],
)
def test_calls_fill_a_round_with_whole_rotations(seconds: float, rotation: int, calls: int) -> None:
    assert Effort(round_seconds=5e-3, budget_seconds=1.0).calls(seconds, rotation) == calls


def test_rounds_fill_the_budget_within_bounds() -> None:
    effort = Effort(1e-3, budget_seconds=1.0, min_rounds=10, max_rounds=100)
    assert [effort.rounds(seconds) for seconds in (1.0, 0.05, 1e-4)] == [10, 20, 100]


@pytest.mark.parametrize(
    ("direction", "gpu_ms", "unit", "rate", "fraction"),
    [
        ("forward", None, "TB/s", 0.25, 0.25),  # 1e9 bytes need 1 ms, ms is 4
        ("forward", 2.0, "TB/s", 0.5, 0.5),  # gpu_ms goes before ms
        ("backward", 8.0, "TFLOP/s", 50.0, 0.5),  # 4e11 flops need 4 ms, its bytes only 1
        ("forward+backward", 10.0, "TFLOP/s", 40.0, 0.5),  # 1 + 4 ms
    ],
)
def test_limit(direction: str, gpu_ms: float | None, unit: str, rate: float, fraction: float) -> None:
    spec = replace(SPEC, forward_cost=lambda *_: Cost(1e9), backward_cost=lambda *_: Cost(1e9, flops=4e11))
    row = replace(_row("fasttfm", 4.0, gpu_ms=gpu_ms), direction=direction)
    limited = measure.with_limit(row, spec, CASE, torch.float32, CEILINGS)
    assert (limited.rate_unit, limited.rate, limited.fraction) == (unit, pytest.approx(rate), pytest.approx(fraction))


def test_a_spec_without_costs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layer_norm: expected a forward_cost in its OpSpec, got None"):
        measure.with_limit(_row("fasttfm", 1.0), replace(SPEC, forward_cost=None), CASE, torch.float32, CEILINGS)


def test_ratio_is_to_the_best_peer() -> None:
    rows = [
        _row("fasttfm", 2.0, gpu_ms=1.0),
        _row("fasttfm:triton", 1.0),
        _row("slow", 9.0, gpu_ms=0.5),
        _row("fast", 3.0),
        _row("absent", None),
    ]
    rated = measure.with_ratios(rows)
    assert [row.ratio for row in rated] == [1.5, 3.0, None, None, None]
    assert [row.gpu_ratio for row in rated] == [0.5, None, None, None, None]


# ---- rounds ----------------------------------------------------------------------------------------------------------


class FakeClock:
    """A clock that only the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def synchronize(self) -> None:
        pass


def test_contenders_alternate_and_setup_is_not_timed() -> None:
    clock, order = FakeClock(), []

    def spend(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            order.append(name)
            clock.now += seconds

        return run

    works = {"a": Work(spend("a", 2.0), calls=4, setup=spend("setup", 100.0)), "b": Work(spend("b", 3.0), calls=1)}
    times = timing.measure(works, clock, Effort(1.0, 0.0, min_rounds=3))
    assert times.seconds == {"a": [0.5] * 3, "b": [3.0] * 3}
    assert order == ["setup", "a", "b"] * 5  # two passes to warm up and plan


@pytest.mark.parametrize("good_calls", [0, 1, 3])
def test_a_contender_that_raises_does_not_affect_the_others(good_calls: int) -> None:
    count = iter(range(100))

    def fail() -> None:
        if next(count) >= good_calls:
            raise RuntimeError("out of luck\nwith details")

    times = timing.measure({"bad": Work(fail, 1), "good": Work(lambda: None, 1)}, FakeClock(), Effort(1.0, 0.0, 5))
    assert times.failures == {"bad": "RuntimeError: out of luck"}
    assert list(times.seconds) == ["good"]
    assert len(times.seconds["good"]) == 5


# ---- whole cases -----------------------------------------------------------------------------------------------------


def _failing(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Any]:
    raise RuntimeError("cannot be built")


def _failing_backward(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Any]:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no backward")

    return lambda: Broken.apply(inputs["x"])


def _absent(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Any]:
    raise PeerUnavailable("needs another machine")


@pytest.mark.usefixtures("_fixed_ceilings")
def test_every_contender_gets_a_row_in_every_direction() -> None:
    peers = (Peer("absent", _absent), Peer("failing", _failing), Peer("no backward", _failing_backward))
    spec = _spec(*peers)
    names = measure.contender_names(spec, CPU, measure.Selection())
    rows = measure.bench_case(spec, CASE, torch.float32, CPU, contenders=names, effort=BRIEF)
    assert [(row.direction, row.contender) for row in rows] == [
        (direction, name) for direction in measure.DIRECTIONS for name in names
    ]
    for row in rows:
        if row.contender in ("fasttfm", "torch") or (row.contender, row.direction) == ("no backward", "forward"):
            assert row.ms_p50 is not None
            assert row.note == ""
            assert row.fraction is not None
        else:
            reasons = {"absent": "needs another machine", "failing": "cannot be built", "no backward": "no backward"}
            assert row.ms_p50 is None
            assert reasons[row.contender] in row.note
    text = report.table(rows)
    assert "(needs another machine): layer_norm: absent" in text
    assert "(RuntimeError: no backward): layer_norm: no backward" in text


def test_backends_that_are_used_only_by_name_are_contenders_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    table = tables()["layer_norm"]
    further = (
        Backend("new", lambda: None, lambda *_: None, lambda *_: None, by_name="is not measured"),
        Backend("elsewhere", lambda: "is not here", lambda *_: None, lambda *_: None, by_name="is not measured"),
    )
    monkeypatch.setitem(vars(table), "backends", (*table.backends, *further))
    spec, everything = _spec(), measure.Selection()
    assert measure.contender_names(spec, torch.device("cuda"), everything)[:2] == ("fasttfm", "fasttfm:new")
    assert "fasttfm:new" not in measure.contender_names(spec, CPU, everything)
    assert measure.contender_names(spec, CPU, measure.Selection(contenders=("fasttfm",))) == ("fasttfm",)


@pytest.mark.usefixtures("_fixed_ceilings")
def test_the_backend_that_ran_is_observed() -> None:
    names = ("fasttfm", "fasttfm:reference", "fasttfm:nonsense")
    rows = measure.bench_case(_spec(), CASE, torch.float32, CPU, contenders=names, effort=BRIEF)
    assert [row.backend for row in rows[:2]] == ["cpu", "reference"]
    assert "layer_norm: backend: expected one of" in rows[2].note


@pytest.mark.usefixtures("_fixed_ceilings")
def test_backends_of_both_directions_are_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention selects with keyword options, and another backend may run its backward."""
    op = importlib.import_module("fasttfm.ops.attention")
    by_name = {backend.name: backend for backend in op.TABLE.backends}
    forward_alone = replace(by_name["cpu"], refuse_backward=lambda *args, **options: "forward only, for this test")
    monkeypatch.setitem(backends._tables, op.TABLE.op, op.TABLE)  # restores the table that a new one replaces
    monkeypatch.setattr(op, "TABLE", BackendTable(op.TABLE.op, (forward_alone, by_name["reference"])))
    spec = specs.all_specs()["attention"]
    case = next(case for case in spec.cases if case.name == "typical")
    rows = measure.bench_case(spec, case, torch.float32, CPU, contenders=("fasttfm",), effort=BRIEF)
    assert {row.direction: row.backend for row in rows} == {
        "forward": "cpu",
        "backward": "reference",
        "forward+backward": "cpu+reference",
    }


def test_a_failed_capture_loses_only_the_device_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path for GPUs, with the host's clock and with graphs whose replay repeats the call."""

    def captured(work: Work, stream: object) -> Work:
        if work.calls == 2:
            raise CaptureError("capture failed") from ValueError("no item() under capture")
        return replace(work, drain=False)

    class Calls:
        functions = (None,)

        def __init__(self, calls: int) -> None:
            self.calls = calls

        def forward(self, index: int) -> None:
            pass

        def work(self, direction: str, calls: int) -> Work:
            return Work(lambda: None, self.calls)

    monkeypatch.setattr(timing, "CudaClock", timing.HostClock)
    monkeypatch.setattr(timing, "captured", captured)
    ready: Any = {"good": Calls(1), "bad": Calls(2)}
    stream: Any = object()
    measured = measure._measure_direction("forward", ready, stream, BRIEF)
    assert list(measured.seconds) == ["good", "bad"]
    assert list(measured.gpu_seconds) == ["good"]
    assert measured.failures == {}
    assert measured.capture_failures == {"bad": "no CUDA graph: ValueError: no item() under capture"}


@pytest.mark.gpu
def test_device_time_and_memory_are_measured_on_a_gpu() -> None:
    device = torch.device("cuda")
    case = OpCase("256x512", {"shape": (256, 512)}, {"eps": 1e-5})
    effort = timing.effort_for(device, quick=True)
    rows = measure.bench_case(SPEC, case, torch.bfloat16, device, contenders=("fasttfm", "torch"), effort=effort)
    for row in rows:
        assert row.note == ""
        # How long is not compared: other processes may use the GPU.
        assert row.gpu_ms is not None
        assert row.gpu_ms > 0
        assert row.ms_p50 is not None
        assert (row.peak_mib is not None) == (row.direction == "forward+backward")


def test_input_sets_exceed_twice_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 1000)
    sets = measure._input_sets(SPEC, CASE, torch.float32, CPU)
    size = sum(value.nbytes for value in sets[0].values())
    assert len(sets) * size > 2000 >= (len(sets) - 1) * size
    assert len({inputs["x"].data_ptr() for inputs in sets}) == len(sets)
    assert all(torch.equal(inputs["x"], sets[0]["x"]) and inputs["x"].requires_grad for inputs in sets)


def test_copies_keep_strides_and_shared_storage() -> None:
    packed = torch.arange(24.0).reshape(4, 6)
    inputs = {"q": packed[:, :3], "k": packed[:, 3:], "none": None, "scale": 2.0}
    copy = measure._copy(inputs)
    assert torch.equal(copy["q"], inputs["q"])
    assert copy["k"].stride() == (6, 1)
    assert copy["q"].untyped_storage().data_ptr() == copy["k"].untyped_storage().data_ptr() != packed.data_ptr()
    assert (copy["none"], copy["scale"]) == (None, 2.0)


def test_quick_is_one_case_in_one_dtype() -> None:
    assert len(measure.calls_of(SPEC, CPU, measure.Selection())) > 1
    assert measure.calls_of(SPEC, CPU, measure.Selection(quick=True)) == [(SPEC.bench_cases_cpu[0], torch.float32)]
    gpu = measure.calls_of(SPEC, torch.device("cuda"), measure.Selection())
    assert gpu == [(case, torch.bfloat16) for case in SPEC.bench_cases]


# ---- outputs ---------------------------------------------------------------------------------------------------------


def test_csv_replaces_the_ops_that_ran_and_keeps_the_others(tmp_path: Path) -> None:
    path = tmp_path / "results" / "chip.csv"
    report.write_csv(path, [_row("fasttfm", 1.0), replace(_row("fasttfm", 2.0), op="attention")])
    report.write_csv(path, [_row("fasttfm", 3.0), _row("torch", 1 / 3, note="one, two")])
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["op"], line["contender"], line["ms_p50"]) for line in lines] == [
        ("attention", "fasttfm", "2"),
        ("layer_norm", "fasttfm", "3"),
        ("layer_norm", "torch", "0.333333"),
    ]
    assert lines[-1]["note"] == "one, two"
    assert lines[-1]["gpu_ms"] == ""
    assert "samples" not in lines[0]


def test_table_shows_what_ran_and_hides_empty_columns() -> None:
    rows = [
        _row("fasttfm", 0.01234, fraction=0.8, rate=3.3, rate_unit="TB/s", backend="triton", ratio=1.5),
        _row("torch", 1234.5, fraction=0.4, rate=0.0166, rate_unit="TB/s"),
    ]
    lines = report.table(rows).splitlines()
    assert lines[1].split()[:5] == ["case", "dtype", "direction", "contender", "backend"]
    assert "gpu_ms" not in lines[1]
    assert lines[2].split()[3:] == ["fasttfm", "triton", "0.01234", "0.01234-0.01234", "3.3", "TB/s", "80%", "1.50x"]
    assert lines[3].split() == ["torch", "1234", "1234-1234", "16.6", "GB/s", "40%"]  # repeated columns are blank


def test_chart_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [_row("fasttfm", 1.0, fraction=0.8), _row("torch", 2.0, fraction=0.4), _row("absent", None, note="why")]
    report.write_chart(tmp_path / "charts" / "chart.png", rows)
    assert (tmp_path / "charts" / "chart.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="expected at least one measured row"):
        report.write_chart(tmp_path / "empty.png", rows[2:])


def test_curves_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        replace(_row(contender, milliseconds), case=f"size{size}", flops=1e9 * size)
        for contender, milliseconds in (("fasttfm", 1.0), ("torch", 2.0))
        for size in (128, 256)
    ]
    curves = {"one": {128: "size128", 256: "size256"}, "not measured": {128: "other"}}
    report.write_curves(tmp_path / "charts" / "curves.png", rows, curves)
    assert (tmp_path / "charts" / "curves.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="expected two measured sizes of a curve"):
        report.write_curves(tmp_path / "empty.png", rows, {"not measured": {128: "other"}})


@pytest.mark.usefixtures("_fixed_ceilings")
def test_a_peer_may_have_its_own_tensors() -> None:
    gradients: list[int] = []

    def build(inputs: Inputs, options: Mapping[str, Any]) -> PeerCall:
        leaf = inputs["x"].detach().t().contiguous().requires_grad_()
        leaf.register_hook(lambda gradient: gradients.append(gradient.shape[0]))
        return PeerCall(lambda: 2 * leaf, [leaf])

    rows = measure.bench_case(
        _spec(Peer("other", build)), CASE, torch.float32, CPU, contenders=("other",), effort=BRIEF
    )
    assert all(row.ms_p50 is not None for row in rows), rows
    assert set(gradients) == {8}


@pytest.mark.usefixtures("_fixed_ceilings")
def test_a_peer_of_the_backward_has_no_other_rows() -> None:
    spec = _spec(Peer("failing", _failing, backward_only=True))
    names = ("fasttfm", "failing")
    rows = measure.bench_case(spec, CASE, torch.float32, CPU, contenders=names, effort=BRIEF)
    assert [row.direction for row in rows if row.contender == "failing"] == ["backward"]
    assert [row.direction for row in rows if row.contender == "fasttfm"] == list(measure.DIRECTIONS)


def test_a_peer_of_the_backward_has_no_other_benchmarks() -> None:
    spec = _spec(Peer("failing", _failing, backward_only=True))
    (mark,) = (mark for mark in bench_test(spec).pytestmark if mark.name == "parametrize")
    assert {parameters.values[2] for parameters in mark.args[1] if parameters.values[3] == "failing"} == {"backward"}


@pytest.mark.usefixtures("_fixed_ceilings")
def test_no_backward_is_measured_if_the_forward_computes_gradients() -> None:
    spec = replace(_spec(), gradients_in_forward=True)
    rows = measure.bench_case(spec, CASE, torch.float32, CPU, contenders=("fasttfm",), effort=BRIEF)
    assert [row.direction for row in rows] == ["forward", "forward+backward"]


@pytest.mark.usefixtures("_fixed_ceilings")
def test_a_forward_is_compared_with_its_own_cost() -> None:
    spec = replace(_spec(), inference_cost=lambda case, dtype: Cost(bytes=7.0))
    rows = measure.bench_case(spec, CASE, torch.float32, CPU, contenders=("fasttfm",), effort=BRIEF)
    alone, _, both = rows
    assert alone.bytes == 7.0
    assert both.bytes > 7.0


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("Neoverse-N1", "cpu-neoverse-n1"),
        ("Intel(R) Xeon(R) Gold 6130 CPU @ 2.10GHz", "cpu-intel-xeon-gold-6130"),
        ("AMD EPYC 9654 96-Core Processor", "cpu-amd-epyc-9654-96-core"),
        ("Intel(R) Xeon(R) Processor family 6 model 207", "cpu-intel-xeon-family-6-model-207"),
    ],
)
def test_file_stem(monkeypatch: pytest.MonkeyPatch, name: str, stem: str) -> None:
    monkeypatch.setattr(timing, "device_name", lambda device: name)
    assert timing.file_stem(CPU) == stem


def test_a_cpu_without_a_model_number_in_its_name() -> None:
    lscpu = "Vendor ID:  GenuineIntel\nModel name:  {}\nCPU family:  6\nModel:  207\nBIOS Model name:  pc-q35\n"
    assert timing._cpu_name(lscpu.format("Neoverse-N1")) == "Neoverse-N1"
    named = timing._cpu_name(lscpu.format("Intel(R) Xeon(R) Processor"))
    assert named == "Intel(R) Xeon(R) Processor family 6 model 207"
    assert timing._cpu_name(lscpu.format("Intel(R) Xeon(R) Processor @ 2.50GHz")) == named
    assert timing._cpu_name("") == ""


# ---- pytest-benchmark and the command --------------------------------------------------------------------------------


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize(("gradients_in_forward", "directions"), [(False, 3), (True, 2)])
def test_pytest_benchmark_has_the_same_numbers(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    everything: bool,
    gradients_in_forward: bool,
    directions: int,
) -> None:
    """Without options the first case of each op runs, in its first dtype. If the forward computes the gradients, there
    is no backward to measure."""
    pytest.importorskip("pytest_benchmark")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # pytest-benchmark measures nothing in a worker
    monkeypatch.setattr(pytest_bench, "_measured", {})  # rows of the other parameters, in this process
    monkeypatch.setattr(measure, "default_device", lambda: CPU)
    monkeypatch.setattr(timing, "ceilings", lambda device: CEILINGS)
    monkeypatch.setattr(timing, "effort_for", lambda device, quick, one_case: BRIEF)
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    pytester.makeconftest((benchmarks / "conftest.py").read_text())
    pytester.makepyfile(
        """
        from dataclasses import replace
        from fasttfm.bench.pytest_bench import bench_test
        from fasttfm.testing.spec import OpCase
        from fasttfm.testing.specs.layer_norm import SPEC

        cases = tuple(OpCase(f"{rows}x8", {"shape": (rows, 8)}, {"eps": 1e-5}) for rows in (4, 5))
        changed = {"bench_cases": cases, "bench_cases_cpu": cases, "gradients_in_forward": GRADIENTS_IN_FORWARD}
        test_layer_norm = bench_test(replace(SPEC, **changed))
        """.replace("GRADIENTS_IN_FORWARD", str(gradients_in_forward))
    )
    options = ["--all", "-k", "5x8 and float32"] if everything else []
    result = pytester.runpytest_inprocess("--benchmark-only", "--benchmark-json=out.json", *options)
    case, count = "5x8" if everything else "4x8", 2 * directions  # fasttfm and torch
    result.stdout.fnmatch_lines(
        ["*layer_norm on *", f"*{case}*float32*forward*fasttfm*", "*liger*", f"*{count} passed*"]
    )
    measured = json.loads((pytester.path / "out.json").read_text())["benchmarks"]
    assert len(measured) == count
    for entry in measured:
        assert entry["stats"]["median"] * 1e3 == pytest.approx(entry["extra_info"]["ms_p50"])


def _command(*arguments: str) -> int:
    return main(["bench", *arguments])


@pytest.mark.usefixtures("_fixed_ceilings")
def test_command_prints_the_table_and_writes_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(specs, "all_specs", lambda: {"layer_norm": _spec(Peer("absent", _absent))})
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert _command("--device", "cpu", "--quick") == 0
    stem = timing.file_stem(CPU)
    text = capsys.readouterr().out
    for part in ("4x8", "needs another machine", f"fasttfm-bench/{stem}.csv", f"fasttfm-bench/{stem}-layer_norm.png"):
        assert part in text
    assert (tmp_path / "fasttfm-bench" / f"{stem}.csv").exists()
    assert not list((tmp_path / "benchmarks" / "results").iterdir())  # a quick run does not touch committed results
    assert _command("--device", "cpu", "--contenders", "fasttfm:nonsense") == 1


@pytest.mark.usefixtures("_fixed_ceilings")
def test_a_killed_run_leaves_the_rows_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    whole = measure.bench_op

    def killed(*arguments: Any) -> Iterator[Any]:
        yield next(iter(whole(*arguments)))
        raise KeyboardInterrupt

    monkeypatch.setattr(specs, "all_specs", lambda: {"layer_norm": _spec(Peer("absent", _absent))})
    monkeypatch.chdir(tmp_path)
    left = tmp_path / "fasttfm-bench" / f"{timing.file_stem(CPU)}-unfinished.csv"
    with monkeypatch.context() as during:
        during.setattr(measure, "bench_op", killed)
        assert _command("--device", "cpu", "--quick") == 130  # as a shell reports an interrupt
    assert "layer_norm" in left.read_text()
    assert _command("--device", "cpu", "--quick") == 0
    assert not left.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ops", "nonsense"), "--ops: expected some of .*layer_norm.*, got nonsense"),
        (("--dtypes", "float8"), "--dtypes: expected some of float32, bfloat16, float16, got float8"),
        (("--device", "cpu", "--cases", "nonsense"), "no such cases"),
    ],
)
def test_wrong_arguments_of_the_command(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        _command(*arguments)
    assert re.search(message, capsys.readouterr().err)
