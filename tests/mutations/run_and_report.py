"""Runs pytest and writes down how each test ended: ``run_and_report.py REPORT ARGUMENT...``."""

import json
import sys
from collections.abc import Generator
from pathlib import Path

import pytest


class Recorder:
    """A pytest plugin that keeps the result and the exception of each test and each file."""

    def __init__(self) -> None:
        self.outcomes: dict[str, tuple[str, str]] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file or folder that cannot be collected."""
        if report.failed:
            self.outcomes[report.nodeid] = 'error', str(report.longrepr)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
            self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """One phase of a test: what its fixtures raise is an error, not a failure."""
        report = yield
        if report.when == 'call' or report.outcome != 'passed':
            result = report.outcome
            if report.failed and report.when != 'call':
                result = 'error'
            text = '' if call.excinfo is None else f'{call.excinfo.typename}: {call.excinfo.value}'
            self.outcomes[item.nodeid] = result, text
        return report


def main(report: str, *arguments: str) -> None:
    # The ops need none of the mm packages, whose import would take longer than most tests.
    sys.modules['mmengine'] = None
    recorder = Recorder()
    status = pytest.main(list(arguments), plugins=[recorder])
    package = sys.modules.get('mmlaplacian')
    Path(report).write_text(json.dumps({
        'status': int(status), 'package': package and package.__file__,
        'outcomes': recorder.outcomes}), encoding='utf-8')


if __name__ == '__main__':
    main(*sys.argv[1:])
