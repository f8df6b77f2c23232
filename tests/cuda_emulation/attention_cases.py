"""Inputs of the attention, and how far a result is off."""

import torch

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
OPTIONS = dict(kernel_scale=4.0, ridge=1e-2, whiten_eps=1e-5)


def make_inputs(n, m, d, d_v, dtype=F32, batch=1, heads=1, spread=4., seed=0):
    """q, k, v and landmarks ``(B, h, ..)``. The distances stay about 1.1 times the spread."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, landmarks = (
        torch.randn(batch, heads, *shape, generator=generator, dtype=torch.float64)
        for shape in ((n, d), (n, d), (n, d_v), (m, d)))
    return [x.to(dtype) for x in (q * spread / d, k * spread / d, v, landmarks * spread / d)]


def flat_inputs(flat, spread):
    """Queries, keys or all of them alike, but for a part of the spread."""
    q, k, v, landmarks = make_inputs(130, 49, 32, 32)
    if flat in ('all', 'queries'):
        q = q[:, :, :1] + spread / 4 * q
    if flat in ('all', 'keys'):
        k, landmarks = (x * spread / 4 + q[:, :, :1] for x in (k, landmarks))
    return [q, k, v, landmarks]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()
