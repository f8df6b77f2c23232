"""Runs every implementation of every op, forward and backward, against the reference."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from .. import ops
from ..ops import use_backend
from ..ops.cupy_runtime import KernelCompileError
from ..ops.laplacian_kernel import reference as kernels
from ..ops.newton_schulz import reference as solver
from ..ops.nystrom_attention import reference as attention
from .finding import Finding
from .implementations import OPS, devices, refusal
from .packages import first_line

SECTION = 'self-test'
# As in the tests: relative to the largest entry.
TOLERANCE = 1e-3
_BATCH, _HEADS, _TOKENS, _LANDMARKS, _CHANNELS = 2, 2, 300, 49, 32
_SCALE, _RIDGE, _WHITEN_EPS = 4.0, 1e-2, 1e-5
_FORM_OF_DEVICE = {'cpu': ('torch', 'cpu'), 'cuda': ('torch', 'cupy')}


def _inputs(op: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> Tensor:
        return 0.3 * torch.randn(_BATCH, _HEADS, count, _CHANNELS, generator=generator,
                                 dtype=torch.float64)

    if op == 'nystrom_attention':
        return [tokens(_TOKENS), tokens(_TOKENS), tokens(_TOKENS), tokens(_LANDMARKS)]
    if op == 'newton_schulz_inverse':
        marks = tokens(_LANDMARKS)
        identity = torch.eye(_LANDMARKS, dtype=torch.float64)
        return [kernels.laplacian_kernel(marks, marks, _SCALE) + _RIDGE * identity]
    return [tokens(_TOKENS), tokens(_LANDMARKS)]


_CALLS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    'laplacian_kernel': (lambda q, k: ops.laplacian_kernel(q, k, _SCALE),
                         lambda q, k: kernels.laplacian_kernel(q, k, _SCALE)),
    'gaussian_kernel': (lambda q, k: ops.gaussian_kernel(q, k, _SCALE),
                        lambda q, k: kernels.gaussian_kernel(q, k, _SCALE)),
    'newton_schulz_inverse': (
        lambda w: ops.newton_schulz_inverse(w, spd_lower_bound=_RIDGE), solver.inverse),
    'nystrom_attention': (
        lambda *tensors: ops.nystrom_attention(*tensors, _SCALE, _RIDGE, _WHITEN_EPS),
        lambda *tensors: attention.nystrom_attention(*tensors, _SCALE, _RIDGE, _WHITEN_EPS,
                                                     'laplacian', 'whiten')),
}


def _run(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Output and gradients of a weighted sum of it."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape)
    (out * weights.to(out)).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def largest_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Largest difference, relative to the largest entry of each tensor; NaN stays NaN."""
    errors = [((a.double().cpu() - e).abs().max() / e.abs().max()).item()
              for a, e in zip(actual, expected, strict=True)]
    return next((error for error in errors if error != error), max(errors))


def check_ops() -> list[Finding]:
    """One line for each op, implementation and device."""
    return [_check(op, form, device) for op in OPS for device in devices()
            for form in _FORM_OF_DEVICE[device] if form in OPS[op]]


def _check(op: str, form: str, device: str) -> Finding:
    name = f'{op}, {form}, {device}'
    if form != 'torch' and (reason := refusal(OPS[op][form], device)):
        return Finding(SECTION, name, f'left out: {reason}')
    function, reference = _CALLS[op]
    inputs = _inputs(op)
    expected = _run(reference, inputs)
    begin = time.perf_counter()
    try:
        with use_backend(form):
            actual = _run(function, [x.to(device, torch.float32) for x in inputs])
    except (RuntimeError, KernelCompileError, ValueError, ImportError) as error:
        return Finding(SECTION, name, f'fails ({first_line(error)})', 'wrong',
                       'set MMLAPLACIAN_BACKEND=torch to go on without it, and report this')
    error = largest_error(actual, expected)
    value = f'relative error {error:.1e}, {time.perf_counter() - begin:.2f} s'
    if not error <= TOLERANCE:
        return Finding(SECTION, name, f'{value}: more than {TOLERANCE:.0e}', 'wrong',
                       'set MMLAPLACIAN_BACKEND=torch to go on without it, and report this' if
                       form != 'torch' else "torch's own products are wrong here: try another "
                                            'version of torch')
    return Finding(SECTION, name, value)
