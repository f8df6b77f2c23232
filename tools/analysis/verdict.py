"""The verdict on a claim in parts."""

from collections.abc import Sequence


def verdict(held: Sequence[bool]) -> str:
    """``holds``, ``holds in part`` or ``does not hold here``, in bold."""
    if all(held):
        return '**holds**'
    return '**holds in part**' if any(held) else '**does not hold here**'
