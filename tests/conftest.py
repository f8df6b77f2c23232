"""What every test shares: compiled files go to a temporary folder, not to the user's cache."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope='session', autouse=True)
def _compiled_files_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if 'MMLAPLACIAN_CACHE' not in os.environ:
            patch.setenv('MMLAPLACIAN_CACHE', str(tmp_path_factory.mktemp('compiled')))
        yield
