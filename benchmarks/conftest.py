"""``pytest benchmarks --benchmark-only`` measures one case of each op and ends with a table for each op.

``--all`` measures every case and dtype, ``--quick`` takes fewer samples. pytest-benchmark shows the same numbers case
by case with --benchmark-verbose.
"""

from typing import Any

import pytest

from fasttfm.bench.pytest_bench import compile_ahead, session_rows
from fasttfm.bench.report import table


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fasttfm")
    group.addoption("--all", action="store_true", help="measure every case and dtype of each op, not only the first")
    group.addoption("--quick", action="store_true", help="take fewer samples: a check that the benchmarks run")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.option.benchmark_quiet = True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    further = [item for item in items if item.get_closest_marker("further_case")]
    config.hook.pytest_deselected(items=further)
    items[:] = [item for item in items if not item.get_closest_marker("further_case")]


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly and session.config.getoption("--benchmark-only"):
        compile_ahead(item for item in session.items if isinstance(item, pytest.Function))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    rows = session_rows()
    if rows:
        terminalreporter.section("benchmarks")
        terminalreporter.write_line(table(rows))
