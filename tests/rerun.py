"""Runs pytest, then reruns each test that failed, alone in a process of its own.

A test that passes the second time is printed as FLAKY and does not fail the run; one that fails again does. This is for
a machine that is busy with other things: the lines stay in its log, so that a flaky test is seen and fixed.

    python -m tests.rerun -n 2 --dist worksteal tests             all options are pytest's

A test whose process crashed, or that ran into its timeout, has failed like any other. If pytest itself could not do
its work (interrupted, internal error, wrong usage, no tests), or if a great part of the tests fail, nothing is rerun.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

MAX_RERUN = 50


class _Failed:
    """The plug-in: the tests that failed, in the process that has started pytest and not in those of xdist."""

    def __init__(self) -> None:
        self.tests: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.tests[report.nodeid] = None


def passes(test: str) -> bool:
    print(f"RERUN {test}", flush=True)
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", test]
    return subprocess.run(command, stdin=subprocess.DEVNULL).returncode == 0


def main(args: Sequence[str]) -> int:
    failed = _Failed()
    code = int(pytest.main(list(args), plugins=[failed]))
    if code != pytest.ExitCode.TESTS_FAILED or not failed.tests:
        return code
    if len(failed.tests) > MAX_RERUN:
        print(f"{len(failed.tests)} tests failed; no more than {MAX_RERUN} are rerun", flush=True)
        return code
    results = {test: passes(test) for test in failed.tests}
    for test, has_passed in results.items():
        print("FLAKY" if has_passed else "FAILED AGAIN", test, flush=True)
    return 0 if all(results.values()) else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
