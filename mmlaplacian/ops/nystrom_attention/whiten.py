"""The whitened map, Z = (1 + (G - mu) / sqrt(var + whiten_eps)) / N, by tiles of tokens.

With C_q, C_k the kernel matrices of queries and keys with the landmarks and P = W^-1, the dense
map's statistics over the queries are one mean and one variance for each key j:
mu_j = c_bar . k_j and var_j = k_j^T Cov(C_q) k_j with k_j = P C_k,j. P is on the keys: variance
and context then carry its rounding once, not twice as in P Cov P.

Shapes: ``(G, ...)`` with G = B * h groups; D = 1 / (var + whiten_eps).
"""

import torch
from torch import Tensor

from .tiles import GradientTiles, KernelTiles, mean_of_tokens, tile_of, write_tile


def state_shapes(m: int, d_v: int) -> tuple[tuple[int, int], ...]:
    """Shapes of what :func:`forward` returns, without G."""
    return (m, d_v), (1, m), (m, m)


def _mean_and_covariance(queries: KernelTiles) -> tuple[Tensor, Tensor]:
    """Of C over the queries, biased. Tiles are merged about their own means (Chan et al. 1979):
    the plain sum of squares cancels in float32."""
    groups, m, _ = queries.landmarks.shape
    mean = queries.landmarks.new_zeros(groups, 1, m)
    scatter = queries.landmarks.new_zeros(groups, m, m)
    count = 0
    for _, c in queries:
        length = c.shape[1]
        tile_mean = c.mean(1, keepdim=True)
        centered, shift = c - tile_mean, tile_mean - mean
        scatter.baddbmm_(centered.mT, centered)
        scatter.baddbmm_(shift.mT, shift, alpha=count * length / (count + length))
        count += length
        mean += shift * (length / count)
    return mean, scatter / count


def forward(queries: KernelTiles, keys: KernelTiles, v: Tensor, p: Tensor, whiten_eps: float,
            out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Writes the output ``(B, h, N, d_v)`` to ``out``.

    Args:
        queries: Tiles of C_q.
        keys: Tiles of C_k.
        v: Values ``(B, h, N, d_v)``.
        p: W^-1 ``(G, M, M)``.
        whiten_eps: Floor of the variance.
        out: Output.

    Returns:
        Context K^T sqrt(D) V ``(G, M, d_v)``, mean ``(G, 1, M)`` and covariance ``(G, M, M)`` of
        C_q.
    """
    mean, covariance = _mean_and_covariance(queries)
    context = p.new_zeros(*p.shape[:2], v.shape[-1])
    for rows, c in keys:
        k = c @ p
        variance = ((k @ covariance) * k).sum(-1, keepdim=True).clamp_min_(0)
        context.baddbmm_(k.mT, tile_of(v, rows) * (variance + whiten_eps).rsqrt_())
    mean_value = mean_of_tokens(v)
    for rows, c in queries:
        write_tile(out, rows,
                   torch.baddbmm(mean_value, c - mean, context, alpha=1 / v.shape[2]))
    return context, mean, covariance


def backward(queries: GradientTiles, keys: GradientTiles, v: Tensor, p: Tensor,
             whiten_eps: float, state: tuple[Tensor, Tensor, Tensor], grad_out: Tensor,
             grad_v: Tensor) -> Tensor:
    """Gives the tiles their gradients and writes that of v to ``grad_v``.

    Returns:
        Gradient of ``p``.
    """
    context, mean, covariance = state
    n = v.shape[2]
    mean_grad = mean_of_tokens(grad_out)
    grad_context = torch.zeros_like(context)
    for rows, c in queries:
        grad_context.baddbmm_((c - mean).mT, tile_of(grad_out, rows), alpha=1 / n)

    grad_p, grad_covariance = torch.zeros_like(p), torch.zeros_like(covariance)
    for rows, c in keys:
        k = c @ p
        k_covariance = k @ covariance
        variance = (k_covariance * k).sum(-1, keepdim=True)
        scale = (variance.clamp_min(0) + whiten_eps).rsqrt_()
        values = tile_of(v, rows)
        grad_scaled_v = k @ grad_context
        write_tile(grad_v, rows, torch.addcmul(mean_grad, scale, grad_scaled_v))
        grad_scale = (grad_scaled_v * values).sum(-1, keepdim=True)
        grad_variance = grad_scale * scale**3 * (variance >= 0) * -0.5
        grad_k = torch.baddbmm(k_covariance * (2 * grad_variance), values * scale,
                               grad_context.mT)
        grad_covariance.baddbmm_(k.mT, k * grad_variance)
        grad_p.baddbmm_(c.mT, grad_k)
        keys.add_gradient(rows, c, grad_k @ p.mT)

    # The covariance's gradient is symmetric; sum_i (C_q,i - mean) = 0 leaves the mean of grad_out.
    for rows, c in queries:
        grad_c = (tile_of(grad_out, rows) - mean_grad) @ context.mT
        grad_c.baddbmm_(c - mean, grad_covariance, alpha=2)
        queries.add_gradient(rows, c, grad_c / n)
    return grad_p
