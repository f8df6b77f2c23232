"""Nystrom attention by tiles of tokens, on any device: nothing is N x N, and nothing N x M lives
from the forward to the backward, which computes the tiles again."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..newton_schulz import registration as solver
from . import row, unnormalized, whiten
from .tiles import (
    GradientTiles,
    KernelTiles,
    empty_tokens,
    image_slices,
    kernel_matrix,
    kernel_matrix_backward,
    tile_of,
)

MAPS = {'whiten': whiten, 'row': row, 'none': unnormalized}


def serves(v: Tensor, landmarks: Tensor, normalize: str) -> bool:
    """Any map and any sizes."""
    return True


def nystrom_attention(q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor, kernel_scale: float,
                      ridge: float, whiten_eps: float, solver_iters: int | None, kernel: str,
                      normalize: str) -> tuple[Tensor, list[Tensor]]:
    """Output and what the backward keeps besides the inputs.

    Args: as of :func:`mmlaplacian.ops.nystrom_attention`; at least one token.

    Returns:
        ``(B, h, N, d_v)`` in the dtype of v, and k(landmarks, landmarks), W^-1 and the map's
        state, all ``(G, ...)`` with G = B * h and without N.
    """
    marks = tile_of(landmarks, slice(None)).contiguous()
    w = kernel_matrix(marks, marks, kernel_scale, kernel)
    ridged = w + ridge * torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
    p = solver.newton_schulz_inverse(ridged, solver_iters, ridge)
    out = empty_tokens(v)
    states = []
    for images, groups in _slices(q, landmarks):
        q_part, k_part, v_part = (x[images].contiguous() for x in (q, k, v))
        queries, keys = (KernelTiles(x, marks[groups], kernel_scale, kernel)
                         for x in (q_part, k_part))
        states.append(MAPS[normalize].forward(queries, keys, v_part, p[groups], whiten_eps,
                                              out[images]))
    return out, [w, p, *map(torch.cat, zip(*states, strict=True))]


def nystrom_attention_backward(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor,
                               landmarks: Tensor, kept: list[Tensor], kernel_scale: float,
                               whiten_eps: float, kernel: str,
                               normalize: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and landmarks from the output's and what the forward kept."""
    w, p, *state = kept
    marks = tile_of(landmarks, slice(None)).contiguous()
    grad_q, grad_k, grad_v = map(empty_tokens, (q, k, v))
    grad_p, grad_marks = torch.empty_like(p), torch.zeros_like(marks)
    for images, groups in _slices(q, landmarks):
        q_part, k_part, v_part, grad_part = (x[images].contiguous() for x in (q, k, v, grad_out))
        queries, keys = (GradientTiles(x, marks[groups], kernel_scale, kernel, grad_x[images],
                                       grad_marks[groups])
                         for x, grad_x in ((q_part, grad_q), (k_part, grad_k)))
        grad_p[groups] = MAPS[normalize].backward(
            queries, keys, v_part, p[groups], whiten_eps, [x[groups] for x in state], grad_part,
            grad_v[images])
    grad_w = solver.newton_schulz_inverse_backward(grad_p, p)
    for gradient in kernel_matrix_backward(grad_w, marks, marks, w, kernel_scale, kernel):
        grad_marks += gradient
    grad_landmarks = grad_marks.unflatten(0, landmarks.shape[:2]).to(landmarks.dtype)
    return grad_q, grad_k, grad_v, grad_landmarks


def _slices(q: Tensor, landmarks: Tensor) -> Iterator[tuple[slice, slice]]:
    """Images that are worked on together, and their groups.

    Heads lie beside each other in a token's channels; the callers make them dense once for all
    passes, for these images alone.
    """
    heads = q.shape[1]
    for images in image_slices(q, landmarks.shape[2]):
        yield images, slice(images.start * heads, images.stop * heads)
