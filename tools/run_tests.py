"""Runs tests in several processes: ``python tools/run_tests.py [options] [paths]``; it needs only pytest.

Each worker is one long-lived pytest session: it imports and collects everything once, and then takes groups of tests
from a queue. A group consists of consecutive tests of one file; the groups that are expected to take longest come
first. Tests marked ``large_memory`` form one group, so that only one of them runs at a time. A worker that crashes,
hangs or loses its CUDA context is reported with the test that was running, and replaced; the new one runs the rest of
its group.

The log folder receives ``results.jsonl`` (one line per test), ``failures.txt``, ``durations.json`` (mean seconds of
each test function, and seconds of each long test; ``--durations`` reads it) and the output of each worker. The exit
code is 0 if every test passed or was skipped, 1 if one failed, and 2 if tests were not run because of the time limit or
a collection error.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Client, Connection
from pathlib import Path

import pytest

UNKNOWN_SECONDS = 0.3  # assumed for a test without a known duration
UNKNOWN_SLOW_SECONDS = 20.0  # assumed for one that is marked slow
OWN_DURATION = 5.0  # tests that take longer have durations of their own in the log
LONGEST_GROUP = 64  # tests
KEPT_OUTPUT = 6000  # characters of the output of a failing test or a crashed worker
TEST_LINE = "\n[test] "  # prefix of the line in a worker's log that names the test that starts
CACHED_GPU_BYTES = 1 << 30  # memory that torch's caching allocator may keep between tests
DONE = "done"
GOOD_ENDS = {f"exit code {code}" for code in (0, 1, 5)}  # pytest's, of a session whose tests were all run


# ---- a worker: one pytest session ------------------------------------------------------------------------------------


class Worker:
    """The pytest plugin that runs the tests that the parent process sends."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.connection.send(("collection failed", report.nodeid, str(report.longrepr)))
        elif report.skipped:
            self.connection.send(("left out", report.nodeid, _reason(report)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("errors during collection")
        items = {item.nodeid: item for item in session.items}
        marks = [[mark for mark in ("slow", "large_memory") if item.get_closest_marker(mark)] for item in session.items]
        self.connection.send(("collected", list(zip(items, marks, strict=True)), os.getpid()))
        selected = self._items(items)
        item = next(selected, None)
        while item is not None:
            following = next(selected, None)  # pytest keeps the fixtures that both use
            self._run(item, following)
            item = following
        return True

    def _items(self, items: dict[str, pytest.Item]) -> Iterator[pytest.Item]:
        while True:
            self.connection.send(("ready",))
            group = self.connection.recv()
            if not group:
                return
            yield from (items[nodeid] for nodeid in group)

    def _run(self, item: pytest.Item, following: pytest.Item | None) -> None:
        os.write(1, f"{TEST_LINE}{item.nodeid}\n".encode())
        self.connection.send(("start", item.nodeid))
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        problem = _gpu_problem()
        self.connection.send(("finish", problem))
        if problem:
            os._exit(3)  # every later call of CUDA in this process would fail

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = report.outcome
        if hasattr(report, "wasxfail"):
            outcome = "xfailed" if report.skipped else "xpassed"
        text = ""
        if report.failed:
            printed = "\n".join(f"--- {name}\n{content[-KEPT_OUTPUT:]}" for name, content in report.sections)
            text = f"{report.longreprtext}\n{printed}".rstrip()
        elif report.skipped:
            text = _reason(report)
        self.connection.send(("report", report.nodeid, outcome, report.duration, text))


def _reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Why something was skipped."""
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)


def _gpu_problem() -> str:
    """CUDA's error after the test's kernels have ended, if torch has used it; also frees torch's cached memory."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
        if torch.cuda.memory_reserved() > CACHED_GPU_BYTES:
            gc.collect()
            torch.cuda.empty_cache()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def work(address: str, arguments: list[str]) -> int:
    sys.path[0] = os.getcwd()  # as for python -m pytest
    with Client(address, "AF_UNIX") as connection:
        return int(pytest.main(arguments, plugins=[Worker(connection)]))


# ---- the parent: groups, results, processes --------------------------------------------------------------------------


@dataclass
class Result:
    nodeid: str
    outcome: str = "passed"
    seconds: float = 0.0
    text: str = ""

    def add(self, outcome: str, seconds: float, text: str) -> None:
        """Adds a phase of the test (setup, call, teardown). A failure of any phase is the outcome; otherwise it is that
        of the first phase that did not pass."""
        self.seconds += seconds
        if outcome == "failed" or (outcome != "passed" and self.outcome == "passed"):
            self.outcome = outcome
            self.text = f"{self.text}\n{text}" if self.text and outcome == "failed" else text


@dataclass
class Schedule:
    """The tests, their results, and the groups that have not been taken; used by one thread per worker."""

    processes: int
    known: dict[str, float]  # mean seconds of test functions, and seconds of long tests
    tests: list[str] = field(default_factory=list)
    groups: collections.deque[list[str]] = field(default_factory=collections.deque)
    results: dict[str, Result] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)  # of collection, and of workers outside of any test
    lock: threading.Lock = field(default_factory=threading.Lock)

    def collected(self, tests: list[tuple[str, list[str]]]) -> None:
        """Takes the list of the first worker; all workers collect the same tests."""
        with self.lock:
            if self.tests or self.errors:
                return
            self.tests = [nodeid for nodeid, _ in tests]
            seconds = {nodeid: self._seconds(nodeid, marks) for nodeid, marks in tests}
            single = [nodeid for nodeid, marks in tests if "large_memory" in marks]
            others = [nodeid for nodeid in self.tests if nodeid not in set(single)]
            groups = [*([single] if single else []), *_cut(others, seconds, self.processes)]
            groups.sort(key=lambda group: sum(seconds[nodeid] for nodeid in group), reverse=True)
            self.groups.extend(groups)

    def _seconds(self, nodeid: str, marks: list[str]) -> float:
        unknown = UNKNOWN_SLOW_SECONDS if "slow" in marks else UNKNOWN_SECONDS
        return self.known.get(nodeid, self.known.get(function_of(nodeid), unknown))

    def take(self) -> list[str]:
        with self.lock:
            return self.groups.popleft() if self.groups else []

    def put_back(self, group: list[str]) -> None:
        with self.lock:
            if group:
                self.groups.appendleft(group)

    def error(self, text: str) -> None:
        with self.lock:
            if text not in self.errors:
                self.errors.append(text)

    def left(self) -> list[str]:
        return [nodeid for nodeid in self.tests if nodeid not in self.results]


def _cut(tests: list[str], seconds: dict[str, float], processes: int) -> list[list[str]]:
    """Groups of consecutive tests of one file, small enough that all processes end at about the same time."""
    longest = sum(seconds[nodeid] for nodeid in tests) / (8 * processes)
    groups: list[list[str]] = []
    file, total = "", 0.0
    for nodeid in tests:
        if not groups or file != file_of(nodeid) or total > longest or len(groups[-1]) >= LONGEST_GROUP:
            groups.append([])
            file, total = file_of(nodeid), 0.0
        groups[-1].append(nodeid)
        total += seconds[nodeid]
    return groups


def file_of(nodeid: str) -> str:
    return nodeid.split("::", 1)[0]


def function_of(nodeid: str) -> str:
    return nodeid.split("[", 1)[0]


class Slot(threading.Thread):
    """Runs one worker process after the other, until all tests are done."""

    def __init__(self, number: int, schedule: Schedule, options: argparse.Namespace, log: Path, scratch: Path) -> None:
        super().__init__(daemon=True)
        self.number, self.schedule, self.options, self.scratch = number, schedule, options, scratch
        self.log_file = log / f"worker-{number}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.pending: list[str] = []  # sent to the worker, and not finished
        self.current = ""
        self.finished = 0  # tests of this worker process
        self.stopped = False

    def run(self) -> None:
        while not self.stopped:
            self.finished = 0
            end = self._one_worker()
            self._end()
            if self.stopped or end == DONE:
                return
            if self.current:
                text = f"The worker process {end}\n--- {self.log_file.name}\n{self._printed()}"
                self._record(Result(self.current, "failed", 0.0, text))
            elif not self.finished or not self.pending:
                self.schedule.error(f"worker {self.number} {end}\n--- {self.log_file.name}\n{self._printed()}")
                return

    def _one_worker(self) -> str:
        """Runs a worker to its end; returns DONE, or what happened to it."""
        address = str(self.scratch / f"socket-{self.number}")
        Path(address).unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            listener.settimeout(0.2)
            self._start(address)
            assert self.process is not None
            while True:
                try:
                    accepted, _ = listener.accept()
                    break
                except TimeoutError:
                    if self.process.poll() is not None:
                        return f"ended before it began: {self._exit()}"
                    if self.stopped:
                        return "was stopped"
        with Connection(accepted.detach()) as connection:
            return self._converse(connection)

    def _start(self, address: str) -> None:
        threads = str(self.options.threads)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "passive",  # the threads of a test would spin on the cores of other processes
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONHASHSEED": "0",
        }
        temporary = self.scratch / f"tmp-{self.number}"
        command = [
            *shlex.split(self.options.wrap.replace("{worker}", str(self.number))),
            *(sys.executable, str(Path(__file__).resolve()), "--worker", address),
            # Output of native code goes to the worker's log, because a crash would lose a captured file.
            *("-q", "--tb=short", "--capture=sys", "-p", "no:cacheprovider", f"--basetemp={temporary}"),
            *(("-m", self.options.marker) if self.options.marker else ()),
            *(("-k", self.options.keyword) if self.options.keyword else ()),
            *self.options.paths,
        ]
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _converse(self, connection: Connection) -> str:
        pid, result, waited_since = 0, Result(""), time.monotonic()
        try:
            while True:
                if not connection.poll(0.5):
                    if self.stopped:
                        return "was stopped"
                    if self.current and time.monotonic() - waited_since > self.options.test_timeout:
                        os.kill(pid, signal.SIGABRT)  # pytest's faulthandler prints where it is
                        time.sleep(1)
                        return f"did not end within {self.options.test_timeout} seconds"
                    continue
                kind, *message = connection.recv()
                waited_since = time.monotonic()
                if kind == "collected":
                    tests, pid = message
                    self.schedule.collected(tests)
                    self.schedule.put_back(self.pending)
                    self.pending = []
                elif kind == "left out":
                    nodeid, reason = message
                    with self.schedule.lock:
                        self.schedule.results[nodeid] = Result(nodeid, "skipped", 0.0, reason)
                elif kind == "collection failed":
                    self.schedule.error("\n".join(message))
                elif kind == "ready":
                    group = [] if self.stopped else self.schedule.take()
                    self.pending += group
                    connection.send(group)
                elif kind == "start":
                    (self.current,) = message
                    result = Result(self.current)
                elif kind == "report":
                    result.add(*message[1:])
                elif kind == "finish":
                    (problem,) = message
                    if problem:
                        result.add("failed", 0.0, f"CUDA's context was lost in this test: {problem}")
                    self._record(result)
        except (EOFError, ConnectionResetError, BrokenPipeError):
            ended = self._exit()
            return DONE if not self.pending and ended in GOOD_ENDS else f"ended: {ended}"

    def _record(self, result: Result) -> None:
        with self.schedule.lock:
            self.schedule.results[result.nodeid] = result
        self.pending.remove(result.nodeid)
        self.current = ""
        self.finished += 1

    def _exit(self) -> str:
        assert self.process is not None
        try:
            code = self.process.wait(60)  # on a busy machine a process ends slowly
        except subprocess.TimeoutExpired:
            return "it closed its connection and went on"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def _printed(self) -> str:
        """The worker's output since its last test began, or before its first."""
        text = self.log_file.read_text(errors="replace")
        return text[text.rfind(TEST_LINE) :][:KEPT_OUTPUT] if TEST_LINE in text else text[-KEPT_OUTPUT:]

    def _end(self) -> None:
        """Waits for the process, because a tool that runs it may have to write a summary, or kills it with its
        children."""
        if self.process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.0 if self.stopped or self.current else 60.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


# ---- output ----------------------------------------------------------------------------------------------------------


def write_log(schedule: Schedule, log: Path) -> None:
    results = sorted(schedule.results.values(), key=lambda result: result.nodeid)
    (log / "results.jsonl").write_text("".join(json.dumps(asdict(result)) + "\n" for result in results))
    failed = [f"{result.nodeid}\n{result.text}\n\n" for result in results if result.outcome == "failed"]
    (log / "failures.txt").write_text("".join(failed))
    seconds = collections.defaultdict(list)
    for result in results:
        is_long = result.seconds > OWN_DURATION
        seconds[result.nodeid if is_long else function_of(result.nodeid)].append(result.seconds)
    means = {name: round(sum(values) / len(values), 2) for name, values in sorted(seconds.items())}
    (log / "durations.json").write_text(json.dumps(means, indent=0) + "\n")


def summary(schedule: Schedule, seconds: float, limit: str) -> Iterator[str]:
    """The lines that are printed at the end."""
    results = list(schedule.results.values())
    reasons = collections.Counter(result.text for result in results if result.outcome == "skipped")
    if reasons:
        yield "---- skipped"
        yield from (f"{count:6d}  {reason}" for reason, count in reasons.most_common(12))
    yield "---- slowest"
    slowest = sorted(results, key=lambda result: -result.seconds)[:20]
    yield from (f"{result.seconds:8.1f} s  {result.nodeid}" for result in slowest)
    by_file = collections.Counter()
    for result in results:
        by_file[file_of(result.nodeid)] += result.seconds
    yield "---- seconds by file, all processes together"
    yield from (f"{total:8.1f} s  {name}" for name, total in by_file.most_common(12))
    left = schedule.left()
    if left:
        yield f"---- not run ({limit})"
        yield from (f"{count:6d}  {name}" for name, count in collections.Counter(map(function_of, left)).items())
    for error in schedule.errors:
        yield f"---- error\n{error}"
    for result in results:
        if result.outcome == "failed":
            yield f"---- FAILED {result.nodeid}\n{result.text}"
    for result in results:
        if result.outcome == "failed":
            yield f"FAILED {result.nodeid}"
    counts = collections.Counter(result.outcome for result in results)
    counts["not run"] = len(left)
    counts["errors"] = len(schedule.errors)
    passed_first = sorted(counts.items(), key=lambda pair: pair[0] != "passed")
    parts = [f"{number} {name}" for name, number in passed_first if number]
    yield f"==== {', '.join(parts) or 'no tests'} in {seconds:.0f} s"


def exit_code(schedule: Schedule) -> int:
    if schedule.errors or schedule.left() or not schedule.tests:
        return 2
    return int(any(result.outcome == "failed" for result in schedule.results.values()))


def run(options: argparse.Namespace, log: Path, scratch: Path) -> int:
    begun = time.monotonic()
    known = json.loads(Path(options.durations).read_text()) if options.durations else {}
    schedule = Schedule(options.processes, known)
    slots = [Slot(number, schedule, options, log, scratch) for number in range(options.processes)]
    for slot in slots:
        slot.start()
    shown, limit = 0.0, "no worker took them"
    try:
        while any(slot.is_alive() for slot in slots):
            time.sleep(0.2)
            passed = time.monotonic() - begun
            if options.time_limit and passed > options.time_limit:
                limit = f"the time limit of {options.time_limit:.0f} s"
                break
            if passed - shown > options.every:
                shown = passed
                failed = sum(result.outcome == "failed" for result in list(schedule.results.values()))
                busy = sum(slot.is_alive() for slot in slots)
                done = f"{len(schedule.results)} of {len(schedule.tests)} tests"
                print(f"{passed:5.0f} s: {done}, {failed} failed, {busy} processes", flush=True)
    finally:
        running = [slot.current for slot in slots if slot.current]
        for slot in slots:
            slot.stopped = True
        for slot in slots:
            slot.join(30)
    if running:
        limit += "; running then: " + ", ".join(running)
    write_log(schedule, log)
    lines = list(summary(schedule, time.monotonic() - begun, limit))
    (log / "summary.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines), flush=True)
    return exit_code(schedule)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Runs pytest's tests in several processes.")
    parser.add_argument("paths", nargs="*", help="files, folders and node ids; pytest's testpaths if there are none")
    parser.add_argument("-m", "--marker", default="", help="pytest's -m")
    parser.add_argument("-k", "--keyword", default="", help="pytest's -k")
    parser.add_argument("-n", "--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--threads", type=int, default=1, help="threads of each process (OMP_NUM_THREADS)")
    parser.add_argument("--time-limit", type=float, default=0.0, help="seconds after which everything is stopped")
    parser.add_argument(
        "--test-timeout", type=float, default=300.0, help="seconds after which a test counts as hanging"
    )
    parser.add_argument("--log", default="build/tests", help="folder for the log; emptied first")
    parser.add_argument(
        "--durations", default="", help="durations.json of an earlier run, by which the longest tests run first"
    )
    parser.add_argument(
        "--wrap", default="", help="command that the workers run under; {worker} is the worker's number"
    )
    parser.add_argument("--every", type=float, default=15.0, help="seconds between progress lines")
    return parser


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    log = Path(options.log).resolve()
    shutil.rmtree(log, ignore_errors=True)
    log.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="run-tests-", ignore_cleanup_errors=True) as scratch:
        return run(options, log, Path(scratch))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        raise SystemExit(work(sys.argv[2], sys.argv[3:]))
    raise SystemExit(main(sys.argv[1:]))
