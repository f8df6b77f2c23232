"""The map without normalisation, Z = G / N, by tiles of tokens.

Shapes: ``(G, ...)`` with G = B * h groups.
"""

import torch
from torch import Tensor

from .tiles import GradientTiles, KernelTiles, tile_of, write_tile


def state_shapes(m: int, d_v: int) -> tuple[tuple[int, int], ...]:
    """Shapes of what :func:`forward` returns, without G."""
    return ((m, d_v), )


def forward(queries: KernelTiles, keys: KernelTiles, v: Tensor, p: Tensor, whiten_eps: float,
            out: Tensor) -> tuple[Tensor]:
    """Writes the output ``(B, h, N, d_v)`` to ``out``; arguments as in ``whiten.forward``.

    Returns:
        Context C_k^T V / N ``(G, M, d_v)``.
    """
    context = p.new_zeros(*p.shape[:2], v.shape[-1])
    for rows, c in keys:
        context.baddbmm_(c.mT, tile_of(v, rows), alpha=1 / v.shape[2])
    for rows, c in queries:
        write_tile(out, rows, (c @ p) @ context)
    return (context, )


def backward(queries: GradientTiles, keys: GradientTiles, v: Tensor, p: Tensor,
             whiten_eps: float, state: tuple[Tensor], grad_out: Tensor, grad_v: Tensor) -> Tensor:
    """Gives the tiles their gradients and writes that of v to ``grad_v``.

    Returns:
        Gradient of ``p``.
    """
    context, = state
    n = v.shape[2]
    grad_p, grad_context = torch.zeros_like(p), torch.zeros_like(context)
    for rows, c in queries:
        grad = tile_of(grad_out, rows)
        grad_q = grad @ context.mT
        grad_context.baddbmm_((c @ p).mT, grad)
        grad_p.baddbmm_(c.mT, grad_q)
        queries.add_gradient(rows, c, grad_q @ p.mT)
    for rows, c in keys:
        write_tile(grad_v, rows, c @ grad_context / n)
        keys.add_gradient(rows, c, tile_of(v, rows) @ grad_context.mT / n)
    return grad_p
