"""The choice of an implementation: who serves, who refuses, and in which words."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from mmlaplacian.ops import backend, get_backend, laplacian_kernel, use_backend
from mmlaplacian.ops.backend import UnsupportedError, choose
from mmlaplacian.ops.laplacian_kernel import cupy_impl

CPU, CUDA = (SimpleNamespace(is_cuda=name == 'cuda', device=torch.device(name))
             for name in ('cpu', 'cuda'))
TORCH = SimpleNamespace(name='torch')


def refuse(tensor):
    raise UnsupportedError('the reason')


def accept(tensor):
    pass


ACCEPTING, REFUSING = SimpleNamespace(check=accept), SimpleNamespace(check=refuse)


def choose_cupy(tensor, cupy):
    return choose('op', tensor, {'torch': TORCH, 'cupy': cupy})


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv(backend.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(backend, '_warned', set())


def test_auto_takes_the_kernels_for_cuda_tensors_only():
    assert choose_cupy(CUDA, ACCEPTING) is ACCEPTING
    assert choose_cupy(CPU, ACCEPTING) is TORCH


def test_auto_says_once_why_a_cuda_tensor_did_not_take_them():
    with pytest.warns(UserWarning, match='op runs in plain torch .*: the reason'):
        assert choose_cupy(CUDA, REFUSING) is TORCH
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        choose_cupy(CUDA, REFUSING)
        choose_cupy(CPU, REFUSING)


def test_forced_backends_insist():
    with use_backend('torch'):
        assert choose_cupy(CUDA, ACCEPTING) is TORCH
    with use_backend('cupy'):
        assert choose_cupy(CPU, ACCEPTING) is ACCEPTING
        with pytest.raises(UnsupportedError, match='the reason'):
            choose_cupy(CUDA, REFUSING)
        assert choose('op', CUDA, {'torch': TORCH}) is TORCH


def test_use_backend_nests_and_is_undone_by_an_error():
    with use_backend('torch'):
        with pytest.raises(KeyError), use_backend('cupy'):
            assert get_backend() == 'cupy'
            raise KeyError
        assert get_backend() == 'torch'
    assert get_backend() == 'auto'


def test_environment_variable(monkeypatch):
    monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, 'torch')
    assert get_backend() == 'torch'
    with use_backend('auto'):
        assert get_backend() == 'auto'
    monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, 'numpy')
    with pytest.raises(ValueError, match=r"MMLAPLACIAN_BACKEND must be one of .*'numpy'"):
        get_backend()


def test_unknown_backend_is_refused():
    with pytest.raises(ValueError, match=r"\('auto', 'torch', 'cpu', 'cupy'\), got 'cuda'"), \
            use_backend('cuda'):
        pass


def test_forced_kernels_refuse_a_cpu_tensor_with_the_reason():
    q = torch.zeros(1, 1, 2, 3)
    with use_backend('cupy'), pytest.raises(UnsupportedError, match='CUDA tensors, got cpu'):
        laplacian_kernel(q, q, 4.0)


def cuda_tensor(d=32, dtype=torch.float32):
    return SimpleNamespace(is_cuda=True, shape=(1, 1, 4, d), dtype=dtype, device='cuda:0')


@pytest.mark.parametrize('tensor, message', [
    (cuda_tensor(d=257), 'head dims up to 256, got 257'),
    (cuda_tensor(dtype=torch.float64), 'got torch.float64'),
])
def test_reasons_of_the_laplacian_kernel(tensor, message):
    with pytest.raises(UnsupportedError, match=message):
        cupy_impl.check(tensor)
