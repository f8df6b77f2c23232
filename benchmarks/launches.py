"""What a call of the attention launches on a GPU, found without one.

The implementations run on tensors of the meta device, which have sizes and no memory, under a
double of the launcher. So the list is that of the code itself, not a copy of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmlaplacian.ops import cupy_runtime, use_backend
from mmlaplacian.ops.laplacian_kernel import cupy_impl as kernels
from mmlaplacian.ops.newton_schulz import cupy_impl as solver
from mmlaplacian.ops.nystrom_attention import cupy_impl, torch_impl

PASSES = ('forward', 'backward')
# Operators that launch nothing.
_SILENT = {'empty', 'empty_like', 'new_empty', 'empty_strided', 'detach', '_unsafe_view'}
_SHARED_MEMORY = 163 * 1024  # of a block on sm_80, the smaller of the two devices


@dataclass(frozen=True)
class KernelLaunch:
    """A launch of the project's own text.

    Args:
        source: File in ``cuda/`` without its suffix.
        function: The kernel.
        macros: Its definitions.
        blocks: Of the grid.
        threads: Of a block.
        shared_bytes: Dynamic shared memory of a block.
        integers: Its integer arguments in their order.
        bytes: Of its tensors, each once.
    """

    source: str
    function: str
    macros: tuple[tuple[str, int], ...]
    blocks: int
    threads: int
    shared_bytes: int
    integers: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class TorchOp:
    """An operator of torch that launches a kernel.

    Args:
        name: As of ATen.
        bytes: Of its operands and its result, each memory once.
        multiply_adds: Of a product of matrices, else 0.
    """

    name: str
    bytes: int
    multiply_adds: int


Launch = KernelLaunch | TorchOp


def _bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes that lie behind tensors: repeated rows and repeated operands count once."""
    sizes: dict[tuple[object, int], int] = {}
    for x in tensors:
        numel = prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)
        key = x.untyped_storage()._cdata, x.storage_offset()
        sizes[key] = max(sizes.get(key, 0), numel * x.element_size())
    return sum(sizes.values())


class _Record(TorchDispatchMode):
    """Lists the operators of torch that launch something."""

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()
        self.launches = launches

    def __torch_dispatch__(self, func: torch._ops.OpOverload, types: Sequence[type],
                           args: tuple = (), kwargs: dict | None = None) -> object:
        result = func(*args, **(kwargs or {}))
        returned = func._schema.returns
        is_view = any(x.alias_info and not x.alias_info.is_write for x in returned)
        name = func._schema.name.partition('::')[2]
        results = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if is_view or name in _SILENT or not results:
            return result
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if name in ('copy_', 'fill_', 'zero_'):
            operands = operands[1:]  # the first is only written
        products = 0
        if name.rstrip('_') in ('bmm', 'baddbmm', 'mm', 'addmm'):
            left = [x for x in args if isinstance(x, Tensor)][-2]
            products = results[0].numel() * left.shape[-1]
        self.launches.append(TorchOp(name, _bytes([*operands, *results]), products))
        return result


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Lists what is launched inside the block; the project's kernels take any device."""
    launches: list[Launch] = []

    def launch(kernel: cupy_runtime.Kernel, blocks: int, threads: int,
               arguments: Sequence[Tensor | ctypes._SimpleCData], device: torch.device,
               shared_bytes: int = 0) -> None:
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        integers = tuple(x.value for x in arguments if isinstance(x, ctypes.c_longlong))
        launches.append(KernelLaunch(kernel.source, kernel.function, kernel.macros, blocks,
                                     threads, shared_bytes, integers, _bytes(tensors)))

    with ExitStack() as stack:
        for target, name, double in (
                (cupy_runtime, 'launch', launch),
                (cupy_runtime, 'shared_memory_limit', lambda device: _SHARED_MEMORY),
                (kernels, 'check', lambda tensor: None),
                # The registered operator has no launches on the meta device.
                (torch_impl, 'solver', _Solver)):
            stack.enter_context(patch.object(target, name, double))
        stack.enter_context(use_backend('cupy'))
        stack.enter_context(_Record(launches))
        yield launches


class _Solver:
    """The solver's CUDA form under the registered operators' signatures."""

    @staticmethod
    def newton_schulz_inverse(w: Tensor, iters: int | None, bound: float) -> Tensor:
        if iters is None:
            iters = cupy_impl.default_iters(w.shape[-1], bound, w.dtype)
        return solver.newton_schulz_inverse(w, iters, bound)

    newton_schulz_inverse_backward = staticmethod(solver.newton_schulz_inverse_backward)


def attention_launches(fused: bool, which: str, groups: int, n: int, d: int, m: int
                       ) -> list[Launch]:
    """Launches of one pass of the whitened attention in float32 with one head.

    Args:
        fused: The kernels of the attention, or the torch form on the kernels of its parts.
        which: ``'forward'`` or ``'backward'``.
        groups: Images.
        n: Tokens.
        d: Channels of queries, keys and values.
        m: Landmarks.
    """
    form = cupy_impl if fused else torch_impl
    q, k, v = (torch.empty(groups, 1, n, d, device='meta') for _ in range(3))
    landmarks = torch.empty(groups, 1, m, d, device='meta')
    forward: Callable[..., tuple[Tensor, list[Tensor]]] = form.nystrom_attention
    with recorded() as launches:
        out, kept = forward(q, k, v, landmarks, 4.0, 1e-2, 1e-5, None, 'laplacian', 'whiten')
    if which == 'forward':
        return launches
    with recorded() as launches:
        form.nystrom_attention_backward(torch.empty_like(out), q, k, v, landmarks, kept, 4.0, 1e-5,
                                        'laplacian', 'whiten')
    return launches
