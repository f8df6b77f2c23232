"""Largest resident set of this process, the memory that a machine must have for it."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_STATUS = Path('/proc/self/status')


def resident_peak() -> int:
    """Largest resident set so far, in bytes.

    Linux's ``getrusage`` starts from the peak of the process that started this one.
    """
    if _STATUS.exists():
        for line in _STATUS.read_text(encoding='utf-8').splitlines():
            if line.startswith('VmHWM:'):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == 'darwin' else peak * 1024
