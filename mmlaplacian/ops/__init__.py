"""The operators of Laplacian linear attention. They need torch alone."""

from .backend import get_backend, use_backend
from .laplacian_kernel import gaussian_kernel, laplacian_kernel
from .newton_schulz import newton_schulz_inverse
from .nystrom_attention import nystrom_attention

__all__ = [
    'gaussian_kernel', 'get_backend', 'laplacian_kernel', 'newton_schulz_inverse',
    'nystrom_attention', 'use_backend'
]
