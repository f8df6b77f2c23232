"""Which implementation each op will use here, and why."""

import os
import warnings
from types import ModuleType

import torch

from ..ops.backend import BACKENDS, ENVIRONMENT_VARIABLE, UnsupportedError, choose
from ..ops.laplacian_kernel import cpu_impl as kernel_cpu
from ..ops.laplacian_kernel import cupy_impl as kernel_cupy
from ..ops.laplacian_kernel import torch_impl as kernel_torch
from ..ops.newton_schulz import cupy_impl as solver_cupy
from ..ops.newton_schulz import torch_impl as solver_torch
from ..ops.nystrom_attention import cpu_impl as attention_cpu
from ..ops.nystrom_attention import cupy_impl as attention_cupy
from ..ops.nystrom_attention import torch_impl as attention_torch
from .finding import Finding

SECTION = 'ops'
_KERNELS = {'torch': kernel_torch, 'cpu': kernel_cpu, 'cupy': kernel_cupy}
OPS: dict[str, dict[str, ModuleType]] = {
    'laplacian_kernel': _KERNELS,
    'gaussian_kernel': _KERNELS,
    'newton_schulz_inverse': {'torch': solver_torch, 'cupy': solver_cupy},
    'nystrom_attention': {'torch': attention_torch, 'cpu': attention_cpu, 'cupy': attention_cupy},
}
"""Every op and its implementations by the name of their backend."""

_FAST = {'cpu': 'cpu', 'cuda': 'cupy'}
_WORDS = {'torch': 'plain torch', 'cpu': 'the C text', 'cupy': 'the CUDA kernels'}


def devices() -> list[str]:
    """Devices that the ops are looked at on."""
    return ['cpu', *(['cuda'] if torch.cuda.is_available() else [])]


def refusal(module: ModuleType, device: str) -> str | None:
    """Why an implementation cannot serve float32 tensors of a device, or None."""
    try:
        module.check(torch.zeros(1, 1, 2, 32, device=device))
    except (UnsupportedError, ImportError) as error:
        return str(error)
    return None


def check_backend() -> list[Finding]:
    """The environment variable, if it is set."""
    value = os.environ.get(ENVIRONMENT_VARIABLE)
    if value is None:
        return []
    if value not in BACKENDS:
        return [Finding(SECTION, ENVIRONMENT_VARIABLE, value, 'wrong',
                        f'unset it, or use one of {", ".join(BACKENDS)}')]
    if value == 'auto':
        return [Finding(SECTION, ENVIRONMENT_VARIABLE, value)]
    return [Finding(SECTION, ENVIRONMENT_VARIABLE, value, 'note',
                    f'all ops insist on {_WORDS[value]}; unset it to let them choose')]


def check_choice() -> list[Finding]:
    """The implementation that serves float32 tensors, for every op and device.

    A forced backend that cannot serve is wrong; why a fast form cannot is the matter of
    :mod:`.hardware`.
    """
    if os.environ.get(ENVIRONMENT_VARIABLE, 'auto') not in BACKENDS:
        return []
    found = []
    for device in devices():
        tensor = torch.zeros(1, 1, 2, 32, device=device)
        for op, modules in OPS.items():
            name = f'{op}, {device}'
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter('ignore')
                    module = choose(op, tensor, modules)
            except (UnsupportedError, ImportError) as error:
                found.append(Finding(SECTION, name, f'raises: {error}', 'wrong',
                                     f'unset {ENVIRONMENT_VARIABLE}, or set it to auto'))
                continue
            chosen = next(key for key, value in modules.items() if value is module)
            found.append(Finding(SECTION, name, _WORDS[chosen] + _why_torch(
                chosen, modules, device)))
    return found


def _why_torch(chosen: str, modules: dict[str, ModuleType], device: str) -> str:
    if chosen != 'torch':
        return ''
    forced = os.environ.get(ENVIRONMENT_VARIABLE, 'auto')
    if forced == 'torch':
        return f', because {ENVIRONMENT_VARIABLE} says so'
    fast = _FAST[device] if forced == 'auto' else forced
    if fast not in modules:
        return ', which has no other form on this device'
    return f', because {refusal(modules[fast], device)}'
