"""The findings as text and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby

from ..version import __version__
from .finding import Finding

_MARKS = {'ok': ' ', 'note': '-', 'wrong': '!'}


def as_text(findings: Sequence[Finding]) -> str:
    """A heading for each section, a line for each finding, and what to do at the end."""
    lines = [f'mmlaplacian {__version__}']
    width = max((len(finding.name) for finding in findings), default=0)
    for section, group in groupby(findings, key=lambda finding: finding.section):
        lines += ['', section]
        lines += [f'{_MARKS[f.status]} {f.name:<{width}}  {f.value}' for f in group]
    for status, heading in (('note', 'Could be more:'), ('wrong', 'Wrong here:')):
        if chosen := [finding for finding in findings if finding.status == status]:
            lines += ['', heading]
            lines += [f'{_MARKS[status]} {f.name}: {f.value}\n    {f.fix}' for f in chosen]
    if not any(finding.status == 'wrong' for finding in findings):
        lines += ['', 'Nothing is wrong.']
    return '\n'.join(lines) + '\n'


def as_json(findings: Sequence[Finding]) -> str:
    """An object with ``version``, ``ok`` and the list ``findings``."""
    return json.dumps(dict(
        version=__version__, ok=all(finding.status != 'wrong' for finding in findings),
        findings=[asdict(finding) for finding in findings]), indent=2) + '\n'
