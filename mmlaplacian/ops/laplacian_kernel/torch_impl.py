"""The kernels in plain torch, on any device. Nothing of size N x M x d is formed."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..precision import compute_dtype


def _l1_gradient(grad_distance: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Gradient of sum(grad_distance * ||x - y||_1) for x; sign(0) = 0 at ties."""
    if x.device.type != 'cpu':
        return _by_channel(torch.sign, grad_distance, x, y)
    # For p = 1 this operator takes the distance as its last argument but never uses it.
    grad_distance = grad_distance.contiguous()
    return torch.ops.aten._cdist_backward(grad_distance, x, y, 1.0, grad_distance)


def _squared_l2_gradient(grad_distance: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Gradient of sum(grad_distance * ||x - y||_2^2 / 2) for x.

    Of differences: with products of whole matrices one far token rounds away the others' part.
    """
    if x.device.type != 'cpu':
        return _by_channel(lambda difference: difference, grad_distance, x, y)
    distance = _l2_distance(x, y)
    # A kernel value of 0 may have an infinite distance.
    weights = (grad_distance * distance).masked_fill_(grad_distance == 0, 0)
    return torch.ops.aten._cdist_backward(weights.contiguous(), x, y, 2.0, distance)


def _by_channel(slope: Callable[[Tensor], Tensor], grad_distance: Tensor, x: Tensor,
                y: Tensor) -> Tensor:
    """The sum over y of grad_distance * slope(x - y), nothing larger than N x M.

    Not on a CPU: elsewhere torch's own operator allocates N x M x d.
    """
    grad_x = torch.empty_like(x)
    for channel in range(x.shape[-1]):
        slopes = slope(x[..., channel, None] - y[..., None, :, channel])
        grad_x[..., channel] = slopes.mul_(grad_distance).sum(-1)
    return grad_x


def _l2_distance(x: Tensor, y: Tensor) -> Tensor:
    """||x - y||_2 of differences.

    The expansion ||x||^2 + ||y||^2 - 2 x.y rounds W of far-off keys to an indefinite matrix.
    """
    return torch.cdist(x, y, compute_mode='donot_use_mm_for_euclid_dist')


_GRADIENTS = {'laplacian': _l1_gradient, 'gaussian': _squared_l2_gradient}


def kernel_matrix(q: Tensor, k: Tensor, kernel_scale: float, kernel: str) -> Tensor:
    """See :func:`mmlaplacian.ops.laplacian_kernel.registration.kernel_matrix`."""
    dtype = compute_dtype(q)
    q_wide, k_wide = q.to(dtype), k.to(dtype)
    if kernel == 'laplacian':
        exponent = torch.cdist(q_wide, k_wide, p=1.0).div_(-kernel_scale)
    else:
        exponent = _l2_distance(q_wide, k_wide).square_().div_(-2 * kernel_scale)
    return exponent.exp_().to(q.dtype)


def kernel_matrix_backward(grad_output: Tensor, q: Tensor, k: Tensor, output: Tensor,
                           kernel_scale: float, kernel: str, needs_q: bool,
                           needs_k: bool) -> tuple[Tensor, Tensor]:
    """See :func:`mmlaplacian.ops.laplacian_kernel.registration.kernel_matrix_backward`."""
    dtype = compute_dtype(q)
    grad_distance = (grad_output.to(dtype) * output).div_(-kernel_scale)
    q_wide, k_wide = q.to(dtype), k.to(dtype)
    gradient = _GRADIENTS[kernel]
    # Distances are symmetric, so one formula serves both sides.
    grad_q = gradient(grad_distance, q_wide, k_wide) if needs_q else q.new_empty(0)
    grad_k = gradient(grad_distance.mT, k_wide, q_wide) if needs_k else k.new_empty(0)
    return grad_q.to(q.dtype), grad_k.to(k.dtype)
