"""Laplacian attention as a layer on a token map."""

from mmengine.model import BaseModule
from torch import Tensor, nn

from ..ops import nystrom_attention
from ..ops.laplacian_kernel import KERNELS
from ..ops.nystrom_attention import NORMALIZATIONS
from ..ops.validation import check_floating, check_rate, integer_at_least, one_of, positive_number
from .landmarks import LandmarkPool
from .layers import DepthwiseConv


class LaplacianAttention(BaseModule):
    """Linear attention with a Laplacian kernel, plus a local context (arXiv 2604.20368).

    x -> q, k, v by one linear layer; landmarks by pooling the key map; the attention branch is
    :func:`mmlaplacian.ops.nystrom_attention`; a 3x3 depth-wise convolution of the value map is
    added to it; then a linear projection.

    Args:
        embed_dims: Channels C.
        num_heads: Heads h, a divisor of C.
        landmark_grid: Side of the adaptive landmark grid. Default 7.
        pool_ratio: Pooling ratio that replaces the grid. Default None.
        kernel: ``'laplacian'`` (default) or ``'gaussian'``.
        kernel_scale: lambda, in the unit of the kernel's distance. Default 4.0.
        ridge: Added to the diagonal of the landmark matrix. Default 1e-2.
        whiten_eps: Floor of the normalisation. Default 1e-5.
        solver_iters: Newton-Schulz steps. Default None: from M and ridge.
        normalize: ``'whiten'`` (default), ``'row'`` or ``'none'``.
        drop_rate: Dropout after the projection. Default 0.
        init_cfg: As in :class:`mmengine.model.BaseModule`. Default None.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: An argument outside its accepted set.
    """

    def __init__(self,
                 embed_dims: int,
                 num_heads: int,
                 landmark_grid: int = 7,
                 pool_ratio: int | None = None,
                 kernel: str = 'laplacian',
                 kernel_scale: float = 4.0,
                 ridge: float = 1e-2,
                 whiten_eps: float = 1e-5,
                 solver_iters: int | None = None,
                 normalize: str = 'whiten',
                 drop_rate: float = 0.,
                 init_cfg: dict | list[dict] | None = None) -> None:
        super().__init__(init_cfg)
        self.embed_dims = integer_at_least('embed_dims', embed_dims, 1)
        self.num_heads = integer_at_least('num_heads', num_heads, 1)
        if embed_dims % num_heads:
            raise ValueError(f'num_heads must divide embed_dims={embed_dims}, got {num_heads}')
        if solver_iters is not None:
            solver_iters = integer_at_least('solver_iters', solver_iters, 1)
        self.kernel = one_of('kernel', kernel, tuple(KERNELS))
        self.kernel_scale = positive_number('kernel_scale', kernel_scale)
        self.ridge = positive_number('ridge', ridge)
        self.whiten_eps = positive_number('whiten_eps', whiten_eps)
        self.solver_iters = solver_iters
        self.normalize = one_of('normalize', normalize, NORMALIZATIONS)
        check_rate('drop_rate', drop_rate)

        self.qkv = nn.Linear(embed_dims, 3 * embed_dims)
        self.landmarks = LandmarkPool(landmark_grid, pool_ratio)
        # Does nothing itself: the place where a hook can watch the attention branch or zero it.
        self.branch = nn.Identity()
        self.local = DepthwiseConv(embed_dims)
        self.proj = nn.Linear(embed_dims, embed_dims)
        self.drop = nn.Dropout(drop_rate)

    def _split_heads(self, tokens: Tensor) -> Tensor:
        """``(B, tokens, C) -> (B, h, tokens, d)``."""
        return tokens.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, H, W, C) -> (B, H, W, C)``.

        Raises:
            TypeError: Not a tensor of floating-point numbers.
            ValueError: Another rank, another number of channels, or an empty map.
        """
        check_floating('x', x)
        if x.dim() != 4 or x.shape[-1] != self.embed_dims or 0 in x.shape[1:3]:
            raise ValueError(f'x must have shape (B, H, W, {self.embed_dims}) with H, W >= 1, '
                             f'got {tuple(x.shape)}')
        q_map, k_map, v_map = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (self._split_heads(t.flatten(1, 2)) for t in (q_map, k_map, v_map))
        out = nystrom_attention(
            q, k, v, self._split_heads(self.landmarks(k_map)), kernel_scale=self.kernel_scale,
            ridge=self.ridge, whiten_eps=self.whiten_eps, solver_iters=self.solver_iters,
            kernel=self.kernel, normalize=self.normalize)
        out = self.branch(out.transpose(1, 2).reshape(x.shape))
        return self.drop(self.proj(out + self.local(v_map)))

    def extra_repr(self) -> str:
        return (f'num_heads={self.num_heads}, kernel={self.kernel!r}, '
                f'kernel_scale={self.kernel_scale}, ridge={self.ridge}, '
                f'whiten_eps={self.whiten_eps}, solver_iters={self.solver_iters}, '
                f'normalize={self.normalize!r}')
