"""Public form of the attention: checks once, then calls the operator."""

import torch
from torch import Tensor

from .. import validation
from ..laplacian_kernel import KERNELS
from ..precision import compute_dtype, result_dtype
from . import registration

NORMALIZATIONS = ('whiten', 'row', 'none')


def nystrom_attention(q: Tensor,
                      k: Tensor,
                      v: Tensor,
                      landmarks: Tensor,
                      kernel_scale: float = 4.0,
                      ridge: float = 1e-2,
                      whiten_eps: float = 1e-5,
                      solver_iters: int | None = None,
                      kernel: str = 'laplacian',
                      normalize: str = 'whiten') -> Tensor:
    """Linear attention by the Nystrom form of a kernel matrix, arXiv 2604.20368.

    With C_q = k(q, landmarks), C_k = k(k, landmarks), W = k(landmarks, landmarks) + ridge I
    the similarity is G = C_q W^-1 C_k^T, ``(N, N)``, never formed. The output is Z V with the
    map Z that ``normalize`` names:

    * ``'whiten'``: (1 + (G_ij - mu_j) / sqrt(var_j + whiten_eps)) / N, mean and biased
      variance of each key j over the queries of its image and head;
    * ``'row'``: G_ij / sum_j G_ij, kernel regression; the row mean is kept above whiten_eps;
    * ``'none'``: G_ij / N.

    Images and heads never mix. Half-precision inputs are computed in float32. Kernel matrices are
    computed a tile of tokens at a time and again in the backward: what is kept for it is the
    inputs and M x M matrices.

    Args:
        q: Queries ``(B, h, N, d)``; B and N may be 0.
        k: Keys ``(B, h, N, d)``.
        v: Values ``(B, h, N, d_v)``.
        landmarks: Landmark keys ``(B, h, M, d)``, M >= 1.
        kernel_scale: lambda > 0, in the unit of the kernel's distance. Default 4.0.
        ridge: Added to the diagonal of the landmark matrix, at least M times the rounding unit
            of the compute dtype: below that, rounding makes the matrix of equal landmarks
            indefinite. Default 1e-2.
        whiten_eps: Floor of the normalisation, > 0. Default 1e-5.
        solver_iters: Newton-Schulz steps. Default None: from M, ridge and dtype.
        kernel: ``'laplacian'`` (default) or ``'gaussian'``.
        normalize: ``'whiten'`` (default), ``'row'`` or ``'none'``.

    Returns:
        ``(B, h, N, d_v)`` in the dtype of the inputs.

    Raises:
        TypeError: Wrong type or dtype, or mixed dtypes outside autocast.
        ValueError: Shapes or devices that do not fit, or a value outside its accepted set.
    """
    validation.check_tensors('(B, h, tokens, d)', q=q, k=k, v=v, landmarks=landmarks)
    validation.check_same('B, h', q=q.shape[:2], k=k.shape[:2], v=v.shape[:2],
                          landmarks=landmarks.shape[:2])
    validation.check_same('tokens', q=q.shape[2:3], k=k.shape[2:3], v=v.shape[2:3])
    validation.check_same('d', q=q.shape[3:], k=k.shape[3:], landmarks=landmarks.shape[3:])
    if q.shape[3] == 0:
        raise ValueError(f'd must be at least 1, got q of shape {tuple(q.shape)}')
    if landmarks.shape[2] == 0:
        raise ValueError('landmarks must hold at least one token, got shape '
                         f'{tuple(landmarks.shape)}')
    if solver_iters is not None:
        solver_iters = validation.integer_at_least('solver_iters', solver_iters, 1)
    ridge = validation.positive_number('ridge', ridge)
    dtype = compute_dtype(q, k, v, landmarks)
    smallest = 2 * landmarks.shape[2] * torch.finfo(dtype).eps
    if ridge < smallest:
        raise ValueError(f'ridge must be at least {smallest:.1e} for {landmarks.shape[2]} '
                         f'landmarks in {dtype}, got {ridge:g}')
    options = (validation.positive_number('kernel_scale', kernel_scale),
               ridge,
               validation.positive_number('whiten_eps', whiten_eps),
               solver_iters,
               validation.one_of('kernel', kernel, tuple(KERNELS)),
               validation.one_of('normalize', normalize, NORMALIZATIONS))
    dtype = result_dtype(q, k, v, landmarks)
    tensors = (tensor.to(dtype) for tensor in (q, k, v, landmarks))
    return registration.nystrom_attention(*tensors, *options)[0]
