"""``pytest benchmarks --benchmark-only`` ends with one table of all ops.

The same numbers case by case, as pytest-benchmark shows them: --benchmark-verbose.
"""

from typing import Any

import pytest

from fasttfm.testing.pytest_bench import session_rows
from fasttfm.testing.report import table


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.option.benchmark_quiet = True


def pytest_terminal_summary(terminalreporter: Any) -> None:
    rows = session_rows()
    if rows:
        terminalreporter.section("benchmarks")
        terminalreporter.write_line(table(rows))
