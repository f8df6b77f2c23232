"""Kernel matrices of tokens with the landmarks, a tile of tokens at a time.

Shapes here are ``(G, tokens, channels)`` with G = B * h groups; tiles are in the compute dtype.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..laplacian_kernel.registration import implementation
from ..precision import compute_dtype

# Elements of a kernel matrix's tile: enough that the calls for a tile cost little beside its work
# (measured on a CPU; on a GPU a tile should fill the device), and 8 MB or 256 MB at a time.
_TILE_ELEMENTS = {'cpu': 2**21}
_TILE_ELEMENTS_ELSEWHERE = 2**26
_SHORTEST_TILE = 256


def tile_elements(device: torch.device) -> int:
    """Elements of a tile that a device likes."""
    return _TILE_ELEMENTS.get(device.type, _TILE_ELEMENTS_ELSEWHERE)


def image_slices(tokens: Tensor, m: int) -> list[slice]:
    """Cuts the batch of ``(B, h, N, d)``: as many images as a tile holds, or one.

    So an image is cut the same way whatever its batch mates, and rounds the same way.
    """
    batch, heads, n, _ = tokens.shape
    length = max(1, tile_elements(tokens.device) // (heads * n * m))
    return [slice(first, min(first + length, batch)) for first in range(0, batch, length)]


def empty_tokens(x: Tensor) -> Tensor:
    """Memory for a tensor like ``(B, h, N, d)``, with a token's heads beside each other: as a
    layer's channels, so that merging heads copies nothing."""
    batch, heads, n, d = x.shape
    return x.new_empty(batch, n, heads, d).transpose(1, 2)


def tile_of(x: Tensor, rows: slice) -> Tensor:
    """Tokens ``rows`` of ``(B, h, N, d)`` in the compute dtype, ``(G, rows, d)``."""
    return x[:, :, rows].to(compute_dtype(x)).flatten(0, 1)


def write_tile(x: Tensor, rows: slice, values: Tensor) -> None:
    """Writes ``(G, rows, d)`` to tokens ``rows`` of ``(B, h, N, d)``."""
    x[:, :, rows] = values.unflatten(0, x.shape[:2])


class KernelTiles:
    """C = k(tokens, landmarks) by tiles. Nothing of size N x M exists unless one tile is all.

    Args:
        tokens: ``(B, h, N, d)`` of any strides and floating dtype, as cut by
            :func:`image_slices`.
        landmarks: ``(G, M, d)``, dense, in the compute dtype.
        kernel_scale: lambda.
        kernel: ``'laplacian'`` or ``'gaussian'``.
    """

    def __init__(self, tokens: Tensor, landmarks: Tensor, kernel_scale: float,
                 kernel: str) -> None:
        self.tokens, self.landmarks = tokens, landmarks
        self.kernel_scale, self.kernel = kernel_scale, kernel
        _, heads, n, _ = tokens.shape
        length = max(_SHORTEST_TILE, tile_elements(tokens.device) // (heads * landmarks.shape[1]))
        self.rows = [slice(first, min(first + length, n)) for first in range(0, n, length)]
        self._only_tile: Tensor | None = None

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        """Token range and ``(G, tokens, M)`` of each tile. Not to be written to."""
        for rows in self.rows:
            if self._only_tile is not None:
                yield rows, self._only_tile
                continue
            tokens = tile_of(self.tokens, rows).contiguous()
            c = kernel_matrix(tokens, self.landmarks, self.kernel_scale, self.kernel)
            if len(self.rows) == 1:
                self._only_tile = c
            yield rows, c


class GradientTiles(KernelTiles):
    """The same with gradients, written to ``grad_tokens`` and added to ``grad_landmarks``."""

    def __init__(self, tokens: Tensor, landmarks: Tensor, kernel_scale: float, kernel: str,
                 grad_tokens: Tensor, grad_landmarks: Tensor) -> None:
        super().__init__(tokens, landmarks, kernel_scale, kernel)
        self.grad_tokens, self.grad_landmarks = grad_tokens, grad_landmarks

    def add_gradient(self, rows: slice, c: Tensor, grad_c: Tensor) -> None:
        """Takes the gradient of one tile C to its tokens and the landmarks."""
        tokens = tile_of(self.tokens, rows).contiguous()
        grad_tokens, grad_landmarks = kernel_matrix_backward(
            grad_c, tokens, self.landmarks, c, self.kernel_scale, self.kernel)
        write_tile(self.grad_tokens, rows, grad_tokens)
        self.grad_landmarks += grad_landmarks


def kernel_matrix(x: Tensor, y: Tensor, kernel_scale: float, kernel: str) -> Tensor:
    """k(x, y), ``(G, N, d), (G, M, d) -> (G, N, M)``."""
    x, y = x[None], y[None]
    return implementation(x, kernel).kernel_matrix(x, y, kernel_scale, kernel)[0]


def kernel_matrix_backward(grad_output: Tensor, x: Tensor, y: Tensor, output: Tensor,
                           kernel_scale: float, kernel: str) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`kernel_matrix` for x and y."""
    tensors = (t.contiguous()[None] for t in (grad_output, x, y, output))
    grad_x, grad_y = implementation(x, kernel).kernel_matrix_backward(
        *tensors, kernel_scale, kernel, True, True)
    return grad_x[0], grad_y[0]


def mean_of_tokens(x: Tensor) -> Tensor:
    """Mean over N, ``(B, h, N, d) -> (G, 1, d)`` in the compute dtype."""
    return x.mean(2, keepdim=True, dtype=compute_dtype(x)).flatten(0, 1)
