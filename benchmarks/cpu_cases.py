"""What is timed on a CPU: the ops and their peers at the sizes of a detector."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import product

import attention_peers
import torch
from op_cases import (
    BROADCAST,
    CDIST,
    KERNEL_SCALE,
    MODES,
    OWN,
    RIDGE,
    SDPA,
    Case,
    attention,
    broadcast,
    cdist,
    inputs,
    run_compiled_broadcast,
    softmax_attention,
)
from torch import Tensor

from mmlaplacian.ops import laplacian_kernel
from mmlaplacian.ops.laplacian_kernel import reference as kernel_reference
from mmlaplacian.ops.nystrom_attention import reference as attention_reference

EAGER, SKLEARN, KEOPS, NYSTROMFORMER = ('broadcast', 'scikit-learn', 'KeOps',
                                        'Nystromformer core')
KERNEL, PRODUCT, ATTENTION = 'laplacian_kernel', 'laplacian_kernel @ V', 'nystrom_attention'
CPU = torch.device('cpu')
# B * h and N of an 800 x 1336 image and of a batch at 224 px, at stride 4.
KERNEL_SIZES = ((2, 66800), (8, 3136))
ATTENTION_SIZES = ((2, 16384), )
HEAD_DIMS = (32, 64)
# The broadcast writes every (query, landmark, channel) triple to memory: 320 MB.
_BROADCAST_ELEMENTS = 8e7
# At most that many queries where the exact result is dense N x N.
ERROR_TOKENS = 1024
# Where a peer says of which package it is.
PACKAGES = {SKLEARN: ('sklearn', 'scikit-learn'), KEOPS: ('pykeops', 'pykeops')}


def missing(name: str) -> str | None:
    """Why a peer cannot run here, None if it can."""
    module, package = PACKAGES.get(name, ('torch', 'torch'))
    return None if find_spec(module) else f'{package} is not installed'


def cases(quick: bool) -> Iterator[Case]:
    """All cases.

    Args:
        quick: Each op and pass at a size for tests, in one head dim.
    """
    kernel_sizes, attention_sizes, dims = KERNEL_SIZES, ATTENTION_SIZES, HEAD_DIMS
    if quick:
        kernel_sizes, attention_sizes, dims = ((2, 96), ), ((2, 96), ), (8, )
    for op, (groups, n), d, mode in product((KERNEL, PRODUCT), kernel_sizes, dims, MODES):
        yield Case(op, mode, groups, n, d, torch.float32)
    for (groups, n), d, mode in product(attention_sizes, dims, MODES):
        yield Case(ATTENTION, mode, groups, n, d, torch.float32)


def built_on(op: str) -> str:
    """The op whose contract tests answer for a case."""
    return KERNEL if op == PRODUCT else op


def case_inputs(case: Case) -> tuple[Tensor, ...]:
    """Arguments of a case; the attention's have B = 1."""
    if case.op == ATTENTION:
        return tuple(x.transpose(0, 1).contiguous() for x in inputs(case, CPU))
    if case.op == PRODUCT:
        q, landmarks = inputs(replace(case, op=KERNEL), CPU)
        return q, landmarks, landmarks.roll(1, -2).contiguous()
    return inputs(case, CPU)


def _own(q: Tensor, k: Tensor) -> Tensor:
    return laplacian_kernel(q, k, KERNEL_SCALE)


def _sklearn(q: Tensor, k: Tensor) -> Tensor:
    from sklearn.metrics.pairwise import laplacian_kernel as sklearn_kernel

    return torch.stack([torch.from_numpy(sklearn_kernel(x, y, gamma=1 / KERNEL_SCALE))
                        for x, y in zip(q.flatten(0, 1).numpy(), k.flatten(0, 1).numpy(),
                                        strict=True)]).view(*q.shape[:-1], k.shape[-2])


def _keops_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from pykeops.torch import LazyTensor

    distance = (LazyTensor(q[..., :, None, :]) - LazyTensor(k[..., None, :, :])).abs().sum(-1)
    return (distance / -KERNEL_SCALE).exp() @ v


def _product(kernel: Callable[[Tensor, Tensor], Tensor], q: Tensor, k: Tensor,
             v: Tensor) -> Tensor:
    return kernel(q, k) @ v


def _nystromformer(q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
    return attention_peers.nystromformer(q, k, v, landmarks.shape[2])


def contestants(case: Case) -> dict[str, Callable[..., Tensor]]:
    """The op first, then its peers; also those whose package is missing."""
    if case.op == ATTENTION:
        return {OWN: attention, SDPA: softmax_attention, NYSTROMFORMER: _nystromformer}
    if case.op == PRODUCT:
        # Last: its own OpenMP runtime may keep a core busy for a moment, and the op comes next.
        return {OWN: partial(_product, _own), CDIST: partial(_product, cdist),
                KEOPS: _keops_product}
    found: dict[str, Callable[..., Tensor]] = {OWN: _own, CDIST: cdist,
                                               BROADCAST: run_compiled_broadcast}
    if case.elements <= _BROADCAST_ELEMENTS:
        found[EAGER] = broadcast
    if case.mode == 'forward':
        found[SKLEARN] = _sklearn
    return found


def _exact_kernel(q: Tensor, k: Tensor) -> Tensor:
    return kernel_reference.laplacian_kernel(q, k, KERNEL_SCALE)


def _exact_attention(q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
    return attention_reference.nystrom_attention(q, k, v, landmarks, KERNEL_SCALE, RIDGE, 1e-5,
                                                 'laplacian', 'whiten')


def exact(op: str, name: str) -> Callable[..., Tensor]:
    """What a contestant is to compute; it gets float64."""
    if op == KERNEL:
        return _exact_kernel
    if op == PRODUCT:
        return partial(_product, _exact_kernel)
    return {OWN: _exact_attention, SDPA: softmax_attention, NYSTROMFORMER: _nystromformer}[name]


def errors(case: Case, chosen: Mapping[str, Callable[..., Tensor]]) -> dict[str, float]:
    """Largest error against float64 over the output and, in that mode, the gradients.

    Each is relative to the largest exact entry of its tensor, at the case's size with at most
    1024 queries.
    """
    tensors = case_inputs(replace(case, n=min(case.n, ERROR_TOKENS)))
    return {name: _error(function, exact(case.op, name), tensors, case.mode != 'forward')
            for name, function in chosen.items()}


def _error(function: Callable[..., Tensor], reference: Callable[..., Tensor],
           tensors: tuple[Tensor, ...], with_gradients: bool) -> float:
    results = []
    for compute, dtype in ((function, torch.float32), (reference, torch.float64)):
        own = [x.detach().to(dtype).requires_grad_(with_gradients) for x in tensors]
        out = compute(*own)
        found = [out.detach()]
        if with_gradients:
            # Not ones: a map whose rows sum to one has no gradient along them.
            weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
            found += torch.autograd.grad(out, own, weight.to(dtype), allow_unused=True)
        results.append(found)
    return max(float((x.double() - y).abs().max() / y.abs().max())
               for x, y in zip(*results, strict=True) if y is not None)
