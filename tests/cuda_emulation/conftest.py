"""The emulator, one for the session: every macro set is compiled once."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from emulator import MISSING, Emulator  # noqa: E402


@pytest.fixture(scope='session')
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    if MISSING:
        pytest.skip(MISSING)
    return Emulator(tmp_path_factory.mktemp('emulator'))
