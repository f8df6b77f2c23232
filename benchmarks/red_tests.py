"""Which ops may not be timed, because a test of theirs is red."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

# Parts of a test's name, its file included, that say which op it tests.
_MENTIONS = {
    'laplacian_kernel': ('laplacian', 'gaussian', 'test_kernels', 'test_gpu_sizes'),
    'newton_schulz_inverse': ('newton_schulz', ),
    'nystrom_attention': ('nystrom_attention', ),
}
_BUILT_ON = {'nystrom_attention': ('laplacian_kernel', 'newton_schulz_inverse')}


def red_tests(results: Path) -> list[str]:
    """Names of the tests that failed, from a JUnit file of pytest.

    Raises:
        ValueError: The file names no test that passed, so nothing was shown.
    """
    passed, red = 0, []
    for test in ElementTree.parse(results).iter('testcase'):
        if test.find('failure') is not None or test.find('error') is not None:
            red.append(f'{test.get("classname")}.{test.get("name")}')
        elif test.find('skipped') is None:
            passed += 1
    if not passed and not red:
        raise ValueError(f'{results} holds no test that ran')
    return red


def refused_ops(red: list[str]) -> dict[str, list[str]]:
    """The red tests of each op; one that names no op counts for all of them."""
    blamed: dict[str, list[str]] = {op: [] for op in _MENTIONS}
    for test in red:
        own = [op for op, parts in _MENTIONS.items() if any(part in test for part in parts)]
        for op in own or _MENTIONS:
            blamed[op].append(test)
    for op, parts in _BUILT_ON.items():
        blamed[op] = sorted({*blamed[op], *(test for part in parts for test in blamed[part])})
    return {op: tests for op, tests in blamed.items() if tests}
