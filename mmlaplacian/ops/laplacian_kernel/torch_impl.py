"""The kernels in plain torch, on any device. Nothing of size N x M x d is formed."""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from ..precision import call_in_compute_dtype


def _l1_gradients(grad_distance: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of sum(grad_distance * ||q - k||_1) for q and k; sign(0) = 0 at ties."""
    if q.device.type != 'cpu':
        # There torch's own operator allocates N x M x d.
        return _l1_gradients_by_channel(grad_distance, q, k)
    # For p = 1 this operator takes the distance as its last argument but never uses it.
    backward = torch.ops.aten._cdist_backward
    grad_distance_t = grad_distance.mT.contiguous()
    return (backward(grad_distance, q, k, 1.0, grad_distance),
            backward(grad_distance_t, k, q, 1.0, grad_distance_t))


def _l1_gradients_by_channel(grad_distance: Tensor, q: Tensor,
                             k: Tensor) -> tuple[Tensor, Tensor]:
    """The same, one channel at a time: nothing is larger than N x M."""
    grad_q, grad_k = torch.empty_like(q), torch.empty_like(k)
    for channel in range(q.shape[-1]):
        sign = torch.sign(q[..., channel, None] - k[..., None, :, channel])
        sign.mul_(grad_distance)
        grad_q[..., channel] = sign.sum(-1)
        grad_k[..., channel] = -sign.sum(-2)
    return grad_q, grad_k


def _keep_for_backward(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor, float],
                       output: Tensor) -> None:
    q, k, ctx.kernel_scale = inputs
    ctx.save_for_backward(q, k, output)


class _LaplacianKernel(torch.autograd.Function):
    """K = exp(-||q - k||_1 / lambda); keeps q, k and K for the backward."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, kernel_scale: float) -> Tensor:
        return torch.cdist(q, k, p=1.0).div_(-kernel_scale).exp_()

    setup_context = staticmethod(_keep_for_backward)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_kernel: Tensor) -> tuple[Tensor, Tensor, None]:
        q, k, kernel = ctx.saved_tensors
        # The product is dense whatever the strides of grad_kernel (zeros after a sum()).
        grad_distance = (grad_kernel * kernel).div_(-ctx.kernel_scale).contiguous()
        return *_l1_gradients(grad_distance, q, k), None


class _GaussianKernel(torch.autograd.Function):
    """K = exp(-||q - k||_2^2 / (2 lambda)); keeps q, k and K for the backward.

    The distance is summed over differences: the expansion ||q||^2 + ||k||^2 - 2 q.k rounds W
    of far-off keys to an indefinite matrix.
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor, kernel_scale: float) -> Tensor:
        distance = torch.cdist(q, k, compute_mode='donot_use_mm_for_euclid_dist')
        return distance.square_().div_(-2 * kernel_scale).exp_()

    setup_context = staticmethod(_keep_for_backward)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_kernel: Tensor) -> tuple[Tensor, Tensor, None]:
        q, k, kernel = ctx.saved_tensors
        # d K / d q = -K (q - k) / lambda; about the mean key the two terms cancel less.
        weight = (grad_kernel * kernel).div_(-ctx.kernel_scale)
        center = k.mean(-2, keepdim=True)
        q, k = q - center, k - center
        grad_q = q * weight.sum(-1)[..., None] - weight @ k
        grad_k = k * weight.sum(-2)[..., None] - weight.mT @ q
        return grad_q, grad_k, None


def laplacian_kernel(q: Tensor, k: Tensor, kernel_scale: float) -> Tensor:
    """See :func:`mmlaplacian.ops.laplacian_kernel`."""
    return call_in_compute_dtype(
        lambda q, k: _LaplacianKernel.apply(q, k, kernel_scale), q, k)


def gaussian_kernel(q: Tensor, k: Tensor, kernel_scale: float) -> Tensor:
    """See :func:`mmlaplacian.ops.gaussian_kernel`."""
    return call_in_compute_dtype(
        lambda q, k: _GaussianKernel.apply(q, k, kernel_scale), q, k)
