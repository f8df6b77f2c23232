"""What the doctor says of one thing."""

from dataclasses import dataclass
from typing import Literal

Status = Literal['ok', 'note', 'wrong']


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Args:
        section: Heading that it stands under.
        name: What was looked at.
        value: What was found.
        status: ``'ok'``; ``'note'`` for what works but could be more; ``'wrong'`` for what is
            broken, contradicts something else, or leaves this machine's fast path unused.
        fix: What to do about it; empty for ``'ok'``.
    """

    section: str
    name: str
    value: str
    status: Status = 'ok'
    fix: str = ''
