"""tools/run_tests.py on a small suite: tests that pass, fail, crash, hang or are not run are all reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
RUNNER = Path(__file__).parents[2] / "tools" / "run_tests.py"
SUITE = {
    "test_good.py": """
        import pytest

        @pytest.fixture(scope="session")
        def folder(tmp_path_factory):
            return tmp_path_factory.mktemp("folder")

        @pytest.mark.parametrize("number", range(12))
        def test_passes(number, folder):
            assert folder.is_dir()

        @pytest.mark.skip(reason="needs a moon")
        def test_skipped():
            pass

        @pytest.mark.xfail
        def test_expected_to_fail():
            assert False

        @pytest.mark.large_memory
        def test_large():
            pass
    """,
    "test_bad.py": """
        import ctypes
        import pytest

        def test_before_the_crash():
            pass

        def test_fails():
            print("what it printed")
            assert 1 == 2

        def test_crashes():
            ctypes.string_at(0)

        def test_after_the_crash():
            pass

        @pytest.fixture
        def broken():
            yield
            raise ValueError("in teardown")

        def test_teardown_fails(broken):
            pass
    """,
    "test_left_out.py": """
        import pytest

        pytest.skip("needs a sun", allow_module_level=True)
    """,
    "test_hangs.py": """
        import time

        def test_hangs():
            time.sleep(600)

        def test_after_the_hang():
            pass
    """,
}


def write(folder: Path, files: dict[str, str]) -> None:
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = large_memory\n    slow\n")
    for name, text in files.items():
        lines = text.split("\n")
        (folder / name).write_text("\n".join(line[8:] for line in lines))


def run(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    log = folder / "log"
    command = [sys.executable, str(RUNNER), "--log", str(log), *arguments]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # other plugins take longer than the tests
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    rows = [json.loads(line) for line in (log / "results.jsonl").read_text().splitlines()]
    return done, {row["nodeid"].split("::")[-1]: row["outcome"] for row in rows}


def test_everything_is_reported(tmp_path: Path) -> None:
    write(tmp_path, SUITE)
    done, outcomes = run(tmp_path, "-n", "3", "--test-timeout", "5")
    assert done.returncode == 1, done.stdout + done.stderr
    bad = {"test_fails", "test_crashes", "test_teardown_fails", "test_hangs"}
    assert {name for name, outcome in outcomes.items() if outcome == "failed"} == bad
    assert sum(outcome == "passed" for outcome in outcomes.values()) == 12 + 1 + 2 + 1
    assert "2 skipped" in done.stdout
    assert "1 xfailed" in done.stdout
    for part in (
        "FAILED test_bad.py::test_fails",
        "assert 1 == 2",
        "what it printed",
        "SIGSEGV",
        "did not end within 5.0 seconds",
        "line 5 in test_hangs",
        "ValueError: in teardown",
        "needs a moon",
        "needs a sun",
        "==== 16 passed",
    ):
        assert part in done.stdout, f"{part!r} is missing in\n{done.stdout}"
    durations = json.loads((tmp_path / "log" / "durations.json").read_text())
    assert "test_good.py::test_passes" in durations
    write(tmp_path, {"test_good.py": SUITE["test_good.py"]})
    known = tmp_path / "durations.json"
    known.write_text(json.dumps(durations))
    done, outcomes = run(tmp_path, "-n", "2", "--durations", str(known), "test_good.py", "-k", "passes or large")
    assert (done.returncode, len(outcomes)) == (0, 13), done.stdout


def test_the_time_limit_reports_what_is_left(tmp_path: Path) -> None:
    write(tmp_path, {"test_hangs.py": SUITE["test_hangs.py"]})
    done, outcomes = run(tmp_path, "-n", "1", "--time-limit", "10")
    assert done.returncode == 2, done.stdout
    assert not outcomes
    assert "the time limit of 10 s; running then: test_hangs.py::test_hangs" in done.stdout
    assert "==== 2 not run" in done.stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [("        import nowhere", "No module named 'nowhere'"), ("        import os; os.abort()", "SIGABRT")],
)
def test_a_collection_error_is_reported(text: str, said: str, tmp_path: Path) -> None:
    write(tmp_path, {"test_broken.py": text, "test_good.py": SUITE["test_good.py"]})
    done, outcomes = run(tmp_path, "-n", "2")
    assert done.returncode == 2, done.stdout
    assert not outcomes
    assert said in done.stdout


def test_a_selection_of_nothing_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, {"test_good.py": SUITE["test_good.py"]})
    done, _ = run(tmp_path, "-n", "2", "-k", "nothing")
    assert done.returncode == 2
    assert "no tests" in done.stdout


def test_a_lost_cuda_context_is_the_failure_of_one_test(tmp_path: Path) -> None:
    """With a fake torch, whose synchronize() always fails after a test has spoiled it."""
    torch = """
        class cuda:
            spoiled = False
            is_initialized = staticmethod(lambda: True)
            memory_reserved = staticmethod(lambda: 0)

            @classmethod
            def synchronize(cls):
                if cls.spoiled:
                    raise RuntimeError("an illegal memory access was encountered")
    """
    suite = """
        import torch

        def test_before():
            pass

        def test_spoils():
            torch.cuda.spoiled = True

        def test_after():
            torch.cuda.synchronize()

        def test_last():
            pass
    """
    write(tmp_path, {"torch.py": torch, "test_context.py": suite})
    done, outcomes = run(tmp_path, "-n", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert {name for name, outcome in outcomes.items() if outcome == "failed"} == {"test_spoils"}
    assert sum(outcome == "passed" for outcome in outcomes.values()) == 3
    assert "CUDA's context was lost in this test: RuntimeError: an illegal memory access" in done.stdout


def test_workers_run_under_a_command(tmp_path: Path) -> None:
    write(tmp_path, {"test_env.py": "        import os\n        def test_it(): assert os.environ['WORKER'] == '0'"})
    done, outcomes = run(tmp_path, "-n", "1", "--wrap", "env WORKER={worker}")
    assert (done.returncode, outcomes) == (0, {"test_it": "passed"}), done.stdout
