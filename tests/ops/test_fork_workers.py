"""B26: data loaders fork after the ops were used; nothing they import touches CUDA."""

import subprocess
import sys

import torch
from torch.utils.data import DataLoader, Dataset

from mmlaplacian.ops import cupy_runtime, laplacian_kernel, use_backend

IMPORT = """
import sys
import torch

for name in ('mmengine', 'cupy'):  # mmengine itself asks for a device
    sys.modules[name] = None

def asked(*arguments):
    raise AssertionError('the import asks for a device')

torch.cuda.is_available = torch._C._cuda_getDeviceCount = torch.cuda._lazy_init = asked
import mmlaplacian.ops
assert not torch.cuda.is_initialized()
"""


class UsesTheOps(Dataset):
    """Runs an op on CPU tensors in the worker, and says what else that did there."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[torch.Tensor, bool, bool]:
        compiled = cupy_runtime._compiled.cache_info().misses
        q = torch.full((1, 1, 3, 2), float(index))
        with use_backend('auto'):
            kernel = laplacian_kernel(q, torch.zeros_like(q), 4.0)
        return (kernel, torch.cuda.is_initialized(),
                cupy_runtime._compiled.cache_info().misses != compiled)


def test_b26_import_touches_no_device():
    subprocess.run([sys.executable, '-c', IMPORT], check=True, timeout=120)


def test_b26_workers_forked_after_the_ops_were_used(device):
    q = torch.ones(1, 1, 5, 2, device=device)
    laplacian_kernel(q, q, 4.0)
    assert torch.cuda.is_initialized() or device.type == 'cpu'
    loader = DataLoader(UsesTheOps(), batch_size=None, num_workers=2, persistent_workers=True,
                        multiprocessing_context='fork', timeout=60)
    for _ in range(2):
        for index, (kernel, initialized, compiled) in enumerate(loader):
            torch.testing.assert_close(kernel, torch.full_like(kernel, index * -2 / 4).exp())
            assert not initialized and not compiled
    # The parent's context is as it was.
    assert laplacian_kernel(q, q, 4.0).sum().item() == 25
