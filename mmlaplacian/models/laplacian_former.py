"""The LaplacianFormer backbone."""

import math
from collections.abc import Mapping, Sequence
from numbers import Integral

import torch
from mmengine.model import BaseModule, ModuleList
from mmengine.model.weight_init import (
    PretrainedInit,
    constant_init,
    normal_init,
    trunc_normal_init,
)
from mmengine.registry import MODELS
from torch import Tensor, nn

from ..ops.validation import check_floating, check_rate, integer_at_least
from .arch import NUM_STAGES, PATCH_SIZES, STRIDES, resolve_arch, stage_integers
from .pretrained import load_pretrained
from .stage import LaplacianStage


def _is_pretrained(init_cfg: Mapping) -> bool:
    return init_cfg['type'] in ('Pretrained', PretrainedInit)


@MODELS.register_module()
class LaplacianFormer(BaseModule):
    """Pyramid backbone of linear attention with a Laplacian kernel (arXiv 2604.20368).

    Four stages at strides 4, 8, 16 and 32, each an overlapping patch embedding and pre-norm
    blocks, as in PVTv2 without its spatial-reduction convolutions. It keeps no state between
    image sizes and has no position table.

    Args:
        arch: ``'tiny'``, ``'small'``, ``'medium'``, ``'large'``, ``'huge'``, or a dict with
            the keys ``embed_dims``, ``depths``, ``num_heads`` and ``mlp_ratios``, four integers
            each. Default ``'tiny'``.
        in_channels: Channels of the image. Default 3.
        landmark_grid: Side of the adaptive landmark grid. Default 7.
        pool_ratio: Four pooling ratios, one for each stage, that replace the grid; the paper's
            are (8, 4, 2, 1). Default None.
        kernel: ``'laplacian'`` (default) or ``'gaussian'``.
        kernel_scale: lambda, in the unit of the kernel's distance. Default 4.0.
        ridge: Added to the diagonal of the landmark matrix. Default 1e-2.
        whiten_eps: Floor of the normalisation. Default 1e-5.
        solver_iters: Newton-Schulz steps. Default None: from the landmarks and ridge.
        normalize: Normalisation of the map, ``'whiten'`` (default), ``'row'`` or ``'none'``.
        out_indices: Increasing stages whose maps are returned. What lies behind the last of
            them is not built. Default (0, 1, 2, 3).
        frozen_stages: -1 trains all (default), 0 freezes the first patch embedding, n also the
            first n stages; output norms always train.
        drop_rate: Dropout in attention and MLP. Default 0.
        drop_path_rate: Stochastic depth of the last block of the arch, rising linearly from 0.
            Default 0.
        with_cp: Recompute blocks in the backward to save memory. Default False.
        init_cfg: None (default) draws new weights; ``dict(type='Pretrained', checkpoint=...)``
            also loads a file unless that is None, see
            :func:`mmlaplacian.models.pretrained.load_pretrained`.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: An argument outside its accepted set.

    Example:
        >>> import torch
        >>> from mmlaplacian import LaplacianFormer
        >>> maps = LaplacianFormer(arch='tiny')(torch.rand(1, 3, 250, 333))
        >>> [tuple(m.shape) for m in maps]
        [(1, 64, 63, 84), (1, 128, 32, 42), (1, 320, 16, 21), (1, 512, 8, 11)]
    """

    def __init__(self,
                 arch: str | Mapping[str, Sequence[int]] = 'tiny',
                 in_channels: int = 3,
                 landmark_grid: int = 7,
                 pool_ratio: Sequence[int] | None = None,
                 kernel: str = 'laplacian',
                 kernel_scale: float = 4.0,
                 ridge: float = 1e-2,
                 whiten_eps: float = 1e-5,
                 solver_iters: int | None = None,
                 normalize: str = 'whiten',
                 out_indices: Sequence[int] = (0, 1, 2, 3),
                 frozen_stages: int = -1,
                 drop_rate: float = 0.,
                 drop_path_rate: float = 0.,
                 with_cp: bool = False,
                 init_cfg: dict | list[dict] | None = None) -> None:
        super().__init__(init_cfg)
        self._check_init_cfg()
        settings = resolve_arch(arch)
        self.in_channels = integer_at_least('in_channels', in_channels, 1)
        self.embed_dims = settings['embed_dims']
        self.depths = settings['depths']
        self.out_indices = self._check_out_indices(out_indices)
        self.frozen_stages = integer_at_least('frozen_stages', frozen_stages, -1)
        if frozen_stages > NUM_STAGES:
            raise ValueError(f'frozen_stages must be from -1 to {NUM_STAGES}, got '
                             f'{frozen_stages}')
        check_rate('drop_rate', drop_rate)
        check_rate('drop_path_rate', drop_path_rate)
        if pool_ratio is None:
            pool_ratio = (None, ) * NUM_STAGES
        else:
            pool_ratio = stage_integers('pool_ratio', pool_ratio)

        attention = dict(
            landmark_grid=landmark_grid, kernel=kernel, kernel_scale=kernel_scale, ridge=ridge,
            whiten_eps=whiten_eps, solver_iters=solver_iters, normalize=normalize)
        # On the CPU whatever the default device is: a model may be built on the meta device.
        drop_path_rates = torch.linspace(0, drop_path_rate, sum(self.depths),
                                         device='cpu').split(self.depths)
        self.stages = ModuleList()
        for stage in range(self.out_indices[-1] + 1):
            self.stages.append(
                LaplacianStage(
                    in_channels=self.embed_dims[stage - 1] if stage else in_channels,
                    embed_dims=self.embed_dims[stage],
                    num_heads=settings['num_heads'][stage],
                    mlp_ratio=settings['mlp_ratios'][stage],
                    patch_size=PATCH_SIZES[stage],
                    stride=STRIDES[stage],
                    drop_path_rates=drop_path_rates[stage].tolist(),
                    attention=dict(pool_ratio=pool_ratio[stage], **attention),
                    drop_rate=drop_rate,
                    with_cp=with_cp))
        for stage in self.out_indices:
            self.add_module(f'norm{stage}', nn.LayerNorm(self.embed_dims[stage]))
        self._freeze()

    @staticmethod
    def _check_out_indices(out_indices: Sequence[int]) -> tuple[int, ...]:
        accepted = (f'out_indices must be increasing stages from 0 to {NUM_STAGES - 1}, at '
                    f'least one, got {out_indices!r}')
        if not isinstance(out_indices, Sequence) or isinstance(out_indices, str) \
                or not all(isinstance(index, Integral) and not isinstance(index, bool)
                           for index in out_indices):
            raise TypeError(accepted)
        if not out_indices or list(out_indices) != sorted(set(out_indices)) \
                or not set(out_indices) <= set(range(NUM_STAGES)):
            raise ValueError(accepted)
        return tuple(map(int, out_indices))

    def _frozen_modules(self) -> list[nn.Module]:
        if self.frozen_stages < 0:
            return []
        return [self.stages[0].patch_embed, *self.stages[:self.frozen_stages]]

    def _freeze(self) -> None:
        for module in self._frozen_modules():
            module.requires_grad_(False)

    def train(self, mode: bool = True) -> 'LaplacianFormer':
        """Sets the mode; frozen parts stay in eval mode, without dropout and drop-path."""
        super().train(mode)
        for module in self._frozen_modules():
            module.eval()
        return self

    def _init_cfgs(self) -> list[dict]:
        if self.init_cfg is None:
            return []
        return self.init_cfg if isinstance(self.init_cfg, list) else [self.init_cfg]

    def _check_init_cfg(self) -> None:
        for cfg in self._init_cfgs():
            if not isinstance(cfg, dict) or 'type' not in cfg:
                raise TypeError('init_cfg must be None, a dict with the key type or a list of '
                                f'such dicts, got {self.init_cfg!r}')
            unknown = set(cfg) - {'type', 'checkpoint', 'prefix', 'map_location'}
            if _is_pretrained(cfg) and ('checkpoint' not in cfg or unknown):
                raise ValueError("init_cfg of type 'Pretrained' must have the key checkpoint and "
                                 f'may have prefix, got {cfg!r}')

    def init_weights(self) -> None:
        """Draws new weights, then loads a pretrained file if ``init_cfg`` names one.

        Linear layers: truncated normal, std 0.02. Convolutions: normal, variance 2 / (fan-out
        of one group). A second call changes nothing.
        """
        if self.is_init:
            super().init_weights()
            return
        pretrained = [cfg for cfg in self._init_cfgs() if _is_pretrained(cfg)]
        drawn = [cfg for cfg in self._init_cfgs() if not _is_pretrained(cfg)]
        if drawn:
            init_cfg, self.init_cfg = self.init_cfg, drawn
            super().init_weights()
            self.init_cfg = init_cfg
        else:
            self._draw_weights()
            self._is_init = True
        for cfg in pretrained:
            if cfg['checkpoint'] is not None:
                load_pretrained(self, cfg['checkpoint'], cfg.get('prefix'))

    def _draw_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_init(module, std=0.02)
            elif isinstance(module, nn.LayerNorm):
                constant_init(module, 1.)
            elif isinstance(module, nn.Conv2d):
                fan_out = math.prod(module.kernel_size) * module.out_channels / module.groups
                normal_init(module, std=math.sqrt(2 / fan_out))

    def get_layer_depth(self, param_name: str, prefix: str = '') -> tuple[int, int]:
        """Layer-wise depth of a parameter, for layer-wise learning-rate decay.

        Args:
            param_name: Name of the parameter.
            prefix: Prefix of the backbone in that name. Default ``''``.

        Returns:
            The depth and the number of layers: 0 is the first patch embedding, then one layer a
            block (a later patch embedding belongs to the block behind it), and the last layer
            is what follows: output norms, neck and heads.
        """
        num_layers = sum(self.depths[:len(self.stages)]) + 2
        parts = param_name.removeprefix(prefix).split('.')
        if not param_name.startswith(prefix) or parts[0] != 'stages':
            return num_layers - 1, num_layers
        stage = int(parts[1])
        if parts[2] == 'patch_embed':
            depth = sum(self.depths[:stage]) + 1 if stage else 0
        else:
            depth = sum(self.depths[:stage]) + int(parts[3]) + 1
        return depth, num_layers

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Feature maps of an image batch.

        Args:
            x: ``(B, in_channels, H, W)``, any H and W from 1 up.

        Returns:
            Maps ``(B, C, ceil(H/s), ceil(W/s))`` of the stages in ``out_indices``.

        Raises:
            TypeError: Not a tensor of floating-point numbers.
            ValueError: Another rank, another number of channels, or an empty map.
        """
        check_floating('x', x)
        if x.dim() != 4 or x.shape[1] != self.in_channels or 0 in x.shape[2:]:
            raise ValueError(f'x must have shape (B, {self.in_channels}, H, W) with H, W >= 1, '
                             f'got {tuple(x.shape)}')
        maps = []
        for index, stage in enumerate(self.stages):
            tokens = stage(x)
            if index in self.out_indices:
                norm = getattr(self, f'norm{index}')
                maps.append(norm(tokens).permute(0, 3, 1, 2).contiguous())
            x = tokens.permute(0, 3, 1, 2)
        return tuple(maps)
