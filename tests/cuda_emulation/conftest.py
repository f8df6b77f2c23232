"""The emulator, one for the session, and launchers that run every launch on it."""

import ctypes
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from emulator import MISSING, Emulator  # noqa: E402
from sanitized import LARGEST_SHARED_MEMORY, Sanitized  # noqa: E402

from mmlaplacian.ops import cupy_runtime, use_backend  # noqa: E402
from mmlaplacian.ops.laplacian_kernel import cupy_impl as laplacian_cupy  # noqa: E402
from mmlaplacian.ops.newton_schulz import cupy_impl as solver_cupy  # noqa: E402
from mmlaplacian.ops.nystrom_attention import cupy_impl as attention_cupy  # noqa: E402

SHARED_MEMORY = 99 * 1024  # of sm_86, 89 and 120


@pytest.fixture(scope='session')
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    """Every macro set is compiled once."""
    if MISSING:
        pytest.skip(MISSING)
    return Emulator(tmp_path_factory.mktemp('emulator'))


@pytest.fixture
def launches(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Forces the CUDA kernels for CPU tensors, without sanitizers; counts launches by function."""
    counted = Counter()

    def launch(kernel: cupy_runtime.Kernel, blocks: int, threads: int, arguments: tuple,
               device: torch.device, shared_bytes: int = 0) -> None:
        assert device.type == 'cpu' and 1 <= blocks < 2**31 and threads <= 1024
        assert shared_bytes <= SHARED_MEMORY
        values = []
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                assert argument.is_contiguous() or kernel.source.startswith('nystrom')
                assert argument.numel()
                values.append(argument.data_ptr())
            else:
                assert isinstance(argument, ctypes._SimpleCData)
                values.append(np.dtype(type(argument)).type(argument.value))
        library = emulator.library([cupy_runtime.source_text(kernel.source)],
                                   dict(kernel.macros))
        library.launch(kernel.function, blocks, threads, values, seed=sum(counted.values()),
                       shared_bytes=shared_bytes)
        counted[kernel.function] += 1

    monkeypatch.setattr(cupy_runtime, 'launch', launch)
    monkeypatch.setattr(cupy_runtime, 'shared_memory_limit', lambda device: SHARED_MEMORY)
    for implementation in (laplacian_cupy, solver_cupy, attention_cupy):
        monkeypatch.setattr(implementation, 'check', lambda tensor: None)
    # Memory that a kernel does not write holds NaN.
    previous = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    with use_backend('cupy'):
        yield counted
    torch.use_deterministic_algorithms(previous)


@pytest.fixture
def sanitized(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sanitized]:
    """Memory that a kernel does not write holds NaN."""
    launcher = Sanitized(emulator)
    monkeypatch.setattr(cupy_runtime, 'launch', launcher.launch)
    monkeypatch.setattr(cupy_runtime, 'shared_memory_limit',
                        lambda device: LARGEST_SHARED_MEMORY)
    previous = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(2).isnan().all()
    yield launcher
    torch.use_deterministic_algorithms(previous)
