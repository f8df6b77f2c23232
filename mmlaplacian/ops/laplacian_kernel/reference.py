"""The kernels of arXiv 2604.20368 as formulas, the oracle of the tests.

They form N x M x d: never a fast path.
"""

from torch import Tensor


def laplacian_kernel(q: Tensor, k: Tensor, kernel_scale: float) -> Tensor:
    """exp(-||q - k||_1 / lambda). ``(B, h, N, d), (B, h, M, d) -> (B, h, N, M)``."""
    difference = q[..., :, None, :] - k[..., None, :, :]
    return (-difference.abs().sum(-1) / kernel_scale).exp()


def gaussian_kernel(q: Tensor, k: Tensor, kernel_scale: float) -> Tensor:
    """exp(-||q - k||_2^2 / (2 lambda)). ``(B, h, N, d), (B, h, M, d) -> (B, h, N, M)``."""
    difference = q[..., :, None, :] - k[..., None, :, :]
    return (-difference.square().sum(-1) / (2 * kernel_scale)).exp()
