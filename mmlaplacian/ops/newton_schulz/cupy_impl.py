"""The solver by this project's CUDA text, ``cuda/newton_schulz.cu``."""

from ctypes import c_float, c_longlong

import torch
from torch import Tensor

from .. import cupy_runtime
from ..backend import UnsupportedError
from .tiling import LARGEST_IN_A_BLOCK, Tiling, row_outputs

_NOTHING, _IDENTITY, _MATRIX = range(3)


def check(w: Tensor) -> None:
    """Raises where the CUDA kernels cannot serve matrices like these.

    Raises:
        UnsupportedError: Device or dtype is not theirs.
        ImportError: CuPy cannot be imported.
    """
    if not w.is_cuda:
        raise UnsupportedError(f'the CUDA kernels need CUDA tensors, got {w.device}')
    if w.dtype != torch.float32:
        raise UnsupportedError(f'the CUDA solver computes in torch.float32, got {w.dtype}')
    cupy_runtime.require_cupy()


class _Launcher:
    """Launches the solver's kernels for one batch of matrices."""

    def __init__(self, w: Tensor) -> None:
        self.tiling = Tiling(w.shape[0], w.shape[1])
        self.device = w.device
        self.sizes = c_longlong(w.shape[0]), c_longlong(w.shape[1])

    def fits(self) -> bool:
        """Whether a block's shared memory holds what a matrix needs."""
        return (self.tiling.m <= LARGEST_IN_A_BLOCK
                and self.tiling.shared_bytes <= cupy_runtime.shared_memory_limit(self.device))

    def _launch(self, function: str, macros: tuple[tuple[str, int], ...],
                *arguments: Tensor | c_float | c_longlong, shared_bytes: int = 0) -> None:
        blocks, threads = getattr(self.tiling, function)()
        kernel = cupy_runtime.Kernel('newton_schulz', f'newton_schulz_{function}', macros)
        cupy_runtime.launch(kernel, blocks, threads, arguments, self.device, shared_bytes)

    def inverse(self, w: Tensor, x: Tensor, solver_iters: int,
                spd_lower_bound: float | None) -> None:
        """All steps of a matrix in one block."""
        macros = (('SIZE', self.tiling.m), ('ROWS', row_outputs(self.tiling.m)),
                  *_start_macro(spd_lower_bound))
        self._launch('inverse', macros, w, x, c_float(spd_lower_bound or 0), self.sizes[0],
                     c_longlong(solver_iters), shared_bytes=self.tiling.shared_bytes)

    def start(self, w: Tensor, x: Tensor, spd_lower_bound: float | None) -> None:
        """The start alone."""
        self._launch('start', _start_macro(spd_lower_bound), w, x, c_float(spd_lower_bound or 0),
                     *self.sizes)

    def product(self, a: Tensor, b: Tensor, out: Tensor, scale: float = 1.0,
                term: int = _NOTHING, c: Tensor | None = None, transpose_a: bool = False,
                transpose_b: bool = False) -> Tensor:
        """out = scale a b + term, each factor as it is or transposed."""
        macros = (('TERM', term), ('TRANSPOSE_A', int(transpose_a)),
                  ('TRANSPOSE_B', int(transpose_b)))
        self._launch('product', macros, a, b, a if c is None else c, out, c_float(scale),
                     *self.sizes)
        return out


def _start_macro(spd_lower_bound: float | None) -> tuple[tuple[str, int], ...]:
    return (('SPD_START', int(spd_lower_bound is not None)), )


def newton_schulz_inverse(w: Tensor, solver_iters: int,
                          spd_lower_bound: float | None) -> Tensor:
    """See :func:`mmlaplacian.ops.newton_schulz.registration.newton_schulz_inverse`."""
    x = torch.empty_like(w)
    if not w.numel():
        return x
    launcher = _Launcher(w)
    if launcher.fits():
        launcher.inverse(w, x, solver_iters, spd_lower_bound)
        return x
    launcher.start(w, x, spd_lower_bound)
    residual, other = torch.empty_like(w), torch.empty_like(w)
    for _ in range(solver_iters):
        launcher.product(w, x, residual, scale=-1, term=_IDENTITY)
        x, other = launcher.product(x, residual, other, term=_MATRIX, c=x), x
    return x


def newton_schulz_inverse_backward(grad_x: Tensor, x: Tensor) -> Tensor:
    """-X^T dX X^T for matrices ``(batch, M, M)``."""
    grad_w = torch.empty_like(x)
    if not x.numel():
        return grad_w
    launcher = _Launcher(x)
    left = launcher.product(x, grad_x, torch.empty_like(x), transpose_a=True)
    return launcher.product(left, x, grad_w, scale=-1, transpose_b=True)


def newton_schulz_residual(w: Tensor, x: Tensor) -> Tensor:
    """max |W X - I| over the entries of each matrix ``(batch, M, M)``."""
    if not w.numel():
        return w.new_empty(w.shape[0])
    residual = _Launcher(w).product(w, x, torch.empty_like(w), scale=-1, term=_IDENTITY)
    return residual.abs().amax((-2, -1))
