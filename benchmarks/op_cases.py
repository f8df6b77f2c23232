"""What is timed: the ops and their peers at the sizes of a detector."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from unittest.mock import patch

import torch
import torch.nn.functional as F
from attention_peers import segment_means
from stored_attention import composed
from torch import Tensor

from mmlaplacian.ops import laplacian_kernel, newton_schulz_inverse, nystrom_attention
from mmlaplacian.ops.nystrom_attention import cupy_impl

OWN, UNFUSED = 'mmlaplacian', 'unfused kernels'
CDIST, BROADCAST, INVERSE = 'torch.cdist + exp', 'compiled broadcast', 'torch.linalg.inv'
SDPA, SDPA_LANDMARKS = 'SDPA, N x N', 'SDPA, N x M'
LANDMARKS = 49
KERNEL_SCALE = 4.0
RIDGE, WHITEN_EPS = 1e-2, 1e-5
# 224 px, 448 px and 800 x 1336 px at stride 4.
TOKENS = (3136, 12544, 66800)
GROUPS = (4, 16, 128)
HEAD_DIMS = (32, 64)
ATTENTION_HEAD_DIMS = (32, )  # of every model
DTYPES = (torch.float32, torch.bfloat16)
MODES = ('forward', 'forward + backward')


@dataclass(frozen=True)
class Case:
    """One op at one size.

    Args:
        op: Public name of the op.
        mode: ``'forward'`` without gradients, or ``'forward + backward'``.
        groups: B * h, for the solver the number of matrices.
        n: Queries and keys; 0 for the solver.
        d: Head dim; 0 for the solver.
        dtype: Of the tensors.
        m: Landmarks.
    """

    op: str
    mode: str
    groups: int
    n: int
    d: int
    dtype: torch.dtype
    m: int = LANDMARKS

    def __str__(self) -> str:
        tokens = f'N {self.n}, d {self.d}, ' if self.n else ''
        return (f'{self.op}, {self.mode}: B·h {self.groups}, {tokens}M {self.m}, '
                f'{str(self.dtype).removeprefix("torch.")}')

    @property
    def elements(self) -> int:
        """(query, landmark, channel) triples of the kernel matrix."""
        return self.groups * self.n * self.m * self.d


def cases(quick: bool) -> Iterator[Case]:
    """All cases, small ones first.

    Args:
        quick: Only the smallest size, in each dtype.
    """
    tokens, groups, dims = (x[:1] if quick else x for x in (TOKENS, GROUPS, HEAD_DIMS))
    ops = {'laplacian_kernel': dims, 'nystrom_attention': ATTENTION_HEAD_DIMS}
    for count, mode in product(groups, MODES):
        yield Case('newton_schulz_inverse', mode, count, 0, 0, torch.float32)
    for n, count, dtype, op in product(tokens, groups, DTYPES, ops):
        for d, mode in product(ops[op], MODES):
            yield Case(op, mode, count, n, d, dtype)


def growth(name: str) -> int:
    """The power of N that the time of a contestant grows with."""
    return 2 if name == SDPA else 1


def broadcast(q: Tensor, k: Tensor) -> Tensor:
    """The kernel matrix as one writes it down; float32 inside, like the op."""
    difference = q.float()[..., :, None, :] - k.float()[..., None, :, :]
    return (difference.abs().sum(-1) / -KERNEL_SCALE).exp().to(q.dtype)


def compile_settings() -> AbstractContextManager[None]:
    """One compiled variant for each head dim, dtype and pass, whatever B * h and N are.

    That is more than torch allows by default, and only the marked dimensions may be symbolic.
    """
    return torch._dynamo.config.patch(recompile_limit=64, automatic_dynamic_shapes=False)


@cache
def _compiled_broadcast() -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(broadcast, fullgraph=True)


def run_compiled_broadcast(q: Tensor, k: Tensor) -> Tensor:
    """The broadcast through torch.compile."""
    q = q.view_as(q)  # landmarks with themselves are two tensors, so that k keeps its marks
    torch._dynamo.maybe_mark_dynamic(q, (0, 2))
    torch._dynamo.maybe_mark_dynamic(k, 0)
    return _compiled_broadcast()(q, k)


def cdist(q: Tensor, k: Tensor) -> Tensor:
    """torch.cdist takes no half precision on CUDA."""
    return (torch.cdist(q.float(), k.float(), p=1.0) / -KERNEL_SCALE).exp().to(q.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
    """The op with the defaults of the model."""
    return nystrom_attention(q, k, v, landmarks, KERNEL_SCALE, RIDGE, WHITEN_EPS)


def without_fused_kernels(function: Callable[[], None]) -> Callable[[], None]:
    """A call under which no fused kernel serves, in the backward either."""

    def call() -> None:
        with patch.object(cupy_impl, 'serves', lambda *arguments: False):
            function()

    return call


def attention_by(kernel: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """The attention as one writes it down in torch, in float32, with one of the peers' kernels."""

    def function(q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
        tensors = (x.float() for x in (q, k, v, landmarks))
        return composed(*tensors, RIDGE, WHITEN_EPS, kernel, torch.linalg.inv).to(v.dtype)

    return function


def landmark_softmax(q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
    """Softmax over the landmarks and as many means of values."""
    return F.scaled_dot_product_attention(q, landmarks, segment_means(v, landmarks.shape[2]))


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
    """Over all N x N pairs; the landmarks are not used."""
    return F.scaled_dot_product_attention(q, k, v)


def differentiated(function: Callable[..., Tensor], tensors: tuple[Tensor, ...],
                   weight: Tensor) -> None:
    """Forward and backward."""
    torch.autograd.grad(function(*tensors), tensors, weight, allow_unused=True)


@torch.no_grad()
def without_gradients(function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> None:
    """Forward."""
    function(*tensors)


def inputs(case: Case, device: torch.device) -> tuple[Tensor, ...]:
    """Arguments of a case's op with B = groups and h = 1, the same at every call."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device) * 0.3

    if case.op == 'newton_schulz_inverse':
        x = normal(case.groups, case.m, 32)
        w = cdist(x, x) + RIDGE * torch.eye(case.m, device=device)
        return (w.to(case.dtype), )
    q = normal(case.groups, 1, case.n, case.d).to(case.dtype)
    landmarks = normal(case.groups, 1, case.m, case.d).to(case.dtype)
    if case.op == 'laplacian_kernel':
        return q, landmarks
    k, v = (normal(case.groups, 1, case.n, case.d).to(case.dtype) for _ in range(2))
    return q, k, v, landmarks


def _contestants(op: str) -> dict[str, Callable[..., Tensor]]:
    """The op first, then its peers."""
    if op == 'laplacian_kernel':
        return {OWN: lambda q, k: laplacian_kernel(q, k, KERNEL_SCALE), CDIST: cdist,
                BROADCAST: run_compiled_broadcast}
    if op == 'newton_schulz_inverse':
        return {OWN: lambda w: newton_schulz_inverse(w, spd_lower_bound=RIDGE),
                INVERSE: torch.linalg.inv}
    return {OWN: attention, UNFUSED: attention, CDIST: attention_by(cdist),
            BROADCAST: attention_by(run_compiled_broadcast), SDPA: softmax_attention,
            SDPA_LANDMARKS: landmark_softmax}


def bind(case: Case, contestants: Mapping[str, Callable[..., Tensor]],
         tensors: tuple[Tensor, ...]) -> dict[str, Callable[[], None]]:
    """Calls without arguments, in the mode of a case; all share the tensors."""
    if case.mode == 'forward':
        return {name: partial(without_gradients, function, tensors)
                for name, function in contestants.items()}
    tensors = tuple(x.requires_grad_() for x in tensors)
    last = case.m if case.op == 'laplacian_kernel' else tensors[0].shape[-1]
    weight = tensors[0].new_ones(*tensors[0].shape[:-1], last)
    return {name: partial(differentiated, function, tensors, weight)
            for name, function in contestants.items()}


def functions(case: Case, device: torch.device) -> dict[str, Callable[[], None]]:
    """What to time for a case, by the contestant's name; all share one set of inputs."""
    calls = bind(case, _contestants(case.op), inputs(case, device))
    if UNFUSED in calls:
        calls[UNFUSED] = without_fused_kernels(calls[UNFUSED])
    return calls
