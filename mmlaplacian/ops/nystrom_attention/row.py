"""The row map, Z_ij = G_ij / sum_j G_ij with a floor on the row's mean, by tiles of tokens.

About the mean value and with P on the queries: for nearly uniform maps C_k^T (V - mean) is then
small itself instead of a difference of large terms after P.

Shapes: ``(G, ...)`` with G = B * h groups.
"""

import torch
from torch import Tensor

from .tiles import GradientTiles, KernelTiles, mean_of_tokens, tile_of, write_tile


def state_shapes(m: int, d_v: int) -> tuple[tuple[int, int], ...]:
    """Shapes of what :func:`forward` returns, without G."""
    return (m, d_v), (1, m), (1, d_v)


def forward(queries: KernelTiles, keys: KernelTiles, v: Tensor, p: Tensor, whiten_eps: float,
            out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Writes the output ``(B, h, N, d_v)`` to ``out``; arguments as in ``whiten.forward``.

    Returns:
        Context C_k^T (V - mean) / N ``(G, M, d_v)``, mean of C_k ``(G, 1, M)``, mean value
        ``(G, 1, d_v)``.
    """
    n = v.shape[2]
    mean_value = mean_of_tokens(v)
    mean_key = p.new_zeros(p.shape[0], 1, p.shape[1])
    context = p.new_zeros(*p.shape[:2], v.shape[-1])
    for rows, c in keys:
        mean_key += c.sum(1, keepdim=True) / n
        context.baddbmm_(c.mT, tile_of(v, rows) - mean_value, alpha=1 / n)
    for rows, c in queries:
        q = c @ p
        mass = q @ mean_key.mT
        floored = mass.clamp_min(whiten_eps)
        write_tile(out, rows, q @ context / floored + mean_value * (mass / floored))
    return context, mean_key, mean_value


def backward(queries: GradientTiles, keys: GradientTiles, v: Tensor, p: Tensor,
             whiten_eps: float, state: tuple[Tensor, Tensor, Tensor], grad_out: Tensor,
             grad_v: Tensor) -> Tensor:
    """Gives the tiles their gradients and writes that of v to ``grad_v``.

    Returns:
        Gradient of ``p``.
    """
    context, mean_key, mean_value = state
    n = v.shape[2]
    grad_p, grad_context = torch.zeros_like(p), torch.zeros_like(context)
    grad_mean_key, grad_mean_value = torch.zeros_like(mean_key), torch.zeros_like(mean_value)
    for rows, c in queries:
        q = c @ p
        mass = q @ mean_key.mT
        floored = mass.clamp_min(whiten_eps)
        grad = tile_of(grad_out, rows) / floored
        grad_mass = grad @ mean_value.mT
        out = q @ context / floored + mean_value * (mass / floored)
        grad_mass -= (grad * out).sum(-1, keepdim=True) * (mass >= whiten_eps)
        grad_q = torch.baddbmm(grad_mass * mean_key, grad, context.mT)
        grad_context.baddbmm_(q.mT, grad)
        grad_mean_key.baddbmm_(grad_mass.mT, q)
        grad_mean_value.baddbmm_(mass.mT, grad)
        grad_p.baddbmm_(c.mT, grad_q)
        queries.add_gradient(rows, c, grad_q @ p.mT)

    grad_mean_value -= mean_key @ grad_context
    for rows, c in keys:
        write_tile(grad_v, rows, torch.baddbmm(grad_mean_value, c, grad_context) / n)
        grad_c = torch.baddbmm(grad_mean_key, tile_of(v, rows) - mean_value, grad_context.mT)
        keys.add_gradient(rows, c, grad_c / n)
    return grad_p
