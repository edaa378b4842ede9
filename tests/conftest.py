"""Environment variables of the tests, set before torch and Triton are imported: without a GPU, Triton kernels run in
Triton's interpreter; processes that run tests in parallel share the cores; and no test downloads a model.
"""

import importlib.util
import json
import os
import platform
import re
import sys
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    cores, workers = len(os.sched_getaffinity(0)), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // workers)))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # the threads of a test would spin on the cores of others
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import numpy
import pytest
import torch

# `python -m pytest` puts the current directory first on the path: there the folder kernels/ would hide the package
# kernels of Hugging Face, which transformers imports where it is installed.
sys.path.sort(key=lambda entry: Path(entry).resolve() == Path(__file__).parents[1])

# Optional packages: tests that need one that is not installed are skipped.
OPTIONAL = (
    "accelerate", "datasets", "hypothesis", "matplotlib", "pyarrow", "scipy", "sklearn", "tokenizers", "tqdm",
    "transformers",
)  # fmt: skip
ABSENT = frozenset(name for name in OPTIONAL if importlib.util.find_spec(name) is None)


DURATIONS = Path(__file__).with_name("durations.json")
WRITTEN_DURATIONS = os.environ.pop("FASTTFM_DURATIONS", None)  # tests that run pytest do not write it
MOST_SECONDS = 3.0  # of one test function in `make test`
LONG_SECONDS = 10.0  # a test that takes longer is slow


def numpy_refuses_the_interpreter() -> bool:
    """Triton 3.6's interpreter converts arrays of one element to Python integers, which numpy rejects from 2.4 on."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            int(numpy.ones(1))
    except TypeError:
        return True
    return False


if torch.cuda.is_available() or numpy_refuses_the_interpreter():
    os.environ.pop("TRITON_INTERPRET", None)
else:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    if torch.cuda.is_available():
        # torch's own, of TF32, cuBLAS and CUDA graphs, depend on the GPU and on the order of tests.
        config.addinivalue_line("filterwarnings", "default:::torch")


@pytest.fixture(autouse=True, scope="session")
def float32_on_cpus() -> Iterator[None]:
    """Which precision a command chooses on a CPU depends on its instructions: here it is fp32, the one that tests
    compare with, unless a test chooses another."""
    from fasttfm.inference import precision

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "supported_products", lambda: ["generic"])
        patch.setattr(precision, "has_bf16_instructions", lambda: False)
        yield


def pytest_report_header() -> list[str]:
    if torch.cuda.is_available() or "TRITON_INTERPRET" in os.environ:
        return []
    return [f"Triton kernels are not run: without a GPU they need numpy older than 2.4, here {numpy.__version__}"]


def mark_slow(items: list[pytest.Item], seconds: dict[str, float]) -> None:
    """Marks tests as slow by the measured ``seconds`` of their functions: those of a function that takes long, and of
    a function with many parameters all but as many, evenly spread, as take ``MOST_SECONDS``."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not any(item.get_closest_marker(mark) for mark in ("slow", "interpreted", "gpu")):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, tests in functions.items():
        mean = seconds.get(name, 0.0)
        kept = len(tests)
        if mean * len(tests) > MOST_SECONDS:
            kept = 0 if mean > LONG_SECONDS else min(kept, max(1, int(MOST_SECONDS / mean)))
        chosen = {number * len(tests) // kept for number in range(kept)}
        for number, item in enumerate(tests):
            if number not in chosen:
                item.add_marker(pytest.mark.slow)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """With the environment variable FASTTFM_DURATIONS, writes the mean seconds of test functions to that file, for
    those that take more than a second in all; tests/durations.json is such a file of `make test-all`."""
    if WRITTEN_DURATIONS is None:
        return
    tests: dict[str, float] = {}
    reports = (report for reports in terminalreporter.stats.values() for report in reports)
    for report in (item for item in reports if isinstance(item, pytest.TestReport)):
        tests[report.nodeid] = tests.get(report.nodeid, 0.0) + report.duration
    functions: dict[str, list[float]] = {}
    for name, duration in tests.items():
        functions.setdefault(name.partition("[")[0], []).append(duration)
    means = {name: round(sum(times) / len(times), 2) for name, times in sorted(functions.items()) if sum(times) > 1}
    Path(WRITTEN_DURATIONS).write_text(json.dumps(means, indent=1) + "\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_slow(items, json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {})
    # Slow tests first: if a process began a long test at the end, the others would be idle.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    needs = {}
    if not torch.cuda.is_available():
        needs["gpu"] = "a CUDA device; torch sees none"
    if "TRITON_INTERPRET" not in os.environ or importlib.util.find_spec("triton") is None:
        needs["interpreted"] = "Triton's interpreter: Triton, no CUDA device, and numpy older than 2.4"
    for item in items:
        for mark, what in needs.items():
            if item.get_closest_marker(mark) is not None:
                item.add_marker(pytest.mark.skip(reason=f"needs {what}"))


@pytest.fixture(autouse=True)
def restored_onednn() -> Iterator[None]:
    """After a bf16 GEMM on a CPU without bf16 instructions, torch disables oneDNN in the process, which would
    change the rounding of fp32 in later tests."""
    before = torch._C._get_mkldnn_enabled()
    yield
    torch._C._set_mkldnn_enabled(before)


@pytest.fixture
def torch_multiplies_by_blas(restored_onednn: None) -> None:
    """torch multiplies fp32 matrices on a CPU with its BLAS, as native layers do, so that bits can be compared. On Arm
    it would call the Arm Compute Library, through oneDNN."""
    if platform.machine() not in ("x86_64", "AMD64"):
        torch._C._set_mkldnn_enabled(False)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    missing = re.search(r"No module named '(\w+)", str(report.longrepr)) if report.failed else None
    if missing is not None and missing[1] in ABSENT:
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: {missing[1]} is not installed")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    absent = ABSENT.intersection(missing_modules(call.excinfo.value)) if call.excinfo is not None else ()
    if report.failed and absent:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {', '.join(absent)} is not installed")
    return report


def missing_modules(error: BaseException | None) -> Iterator[str]:
    """The packages whose absence led to an error."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            yield error.name.partition(".")[0]
        error = error.__cause__ or error.__context__
