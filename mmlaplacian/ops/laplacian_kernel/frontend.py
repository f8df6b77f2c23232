"""Public form of the kernels: checks once, then calls the operator."""

from torch import Tensor

from .. import validation
from ..precision import result_dtype
from .registration import kernel_matrix


def _checked_kernel_matrix(q: Tensor, k: Tensor, kernel_scale: object, kernel: str) -> Tensor:
    validation.check_tensors('(B, h, tokens, d)', q=q, k=k)
    validation.check_same('B, h', q=q.shape[:2], k=k.shape[:2])
    validation.check_same('d', q=q.shape[3:], k=k.shape[3:])
    if q.shape[-1] == 0:
        raise ValueError(f'd must be at least 1, got q of shape {tuple(q.shape)}')
    if k.shape[-2] == 0:
        raise ValueError(f'k must hold at least one token, got shape {tuple(k.shape)}')
    kernel_scale = validation.positive_number('kernel_scale', kernel_scale)
    dtype = result_dtype(q, k)
    return kernel_matrix(q.to(dtype), k.to(dtype), kernel_scale, kernel)


def laplacian_kernel(q: Tensor, k: Tensor, kernel_scale: float) -> Tensor:
    """Laplacian kernel matrix exp(-||q - k||_1 / lambda), arXiv 2604.20368.

    Half-precision inputs are computed in float32; the gradient at a tie is exactly 0.

    Args:
        q: Queries ``(B, h, N, d)``; N may be 0.
        k: Keys or landmarks ``(B, h, M, d)``, M >= 1.
        kernel_scale: lambda > 0, in the unit of the L1 distance. Gets no gradient.

    Returns:
        ``(B, h, N, M)`` in the dtype of the inputs, float32 under autocast; values in [0, 1].

    Raises:
        TypeError: Wrong type or dtype, or mixed dtypes outside autocast.
        ValueError: Shapes or devices that do not fit, lambda not positive and finite, or the
            backend ``'cupy'`` is forced and cannot take the inputs.
        ImportError: It is forced and CuPy cannot be imported.
    """
    return _checked_kernel_matrix(q, k, kernel_scale, 'laplacian')


def gaussian_kernel(q: Tensor, k: Tensor, kernel_scale: float) -> Tensor:
    """Gaussian kernel matrix exp(-||q - k||_2^2 / (2 lambda)), the paper's comparison.

    Arguments, result and errors as in :func:`laplacian_kernel`; lambda is in the unit of the
    squared distance.
    """
    return _checked_kernel_matrix(q, k, kernel_scale, 'gaussian')


KERNELS = {'laplacian': laplacian_kernel, 'gaussian': gaussian_kernel}
"""The kernels by the name that ``kernel=`` takes in ops, modules and configs."""
