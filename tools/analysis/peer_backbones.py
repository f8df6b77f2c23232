"""The backbones that qk_distances.py compares, in full size and small enough to train here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from claim import UserError
from distant_parts import ARCH, CELL, SIDE, DistantPartsModel
from mmdet.models.backbones import PyramidVisionTransformerV2
from mmdet.models.backbones.pvt import pvt_convert
from mmengine.runner import CheckpointLoader
from mmpretrain.models import SwinTransformer, VisionTransformer
from recall_task import COLOURS
from torch import Tensor, nn

from mmlaplacian import LaplacianFormer

_WIDTH, _DEPTHS, _HEADS = ARCH['embed_dims'][:2], ARCH['depths'][:2], ARCH['num_heads'][:2]


@dataclass(frozen=True)
class Peer:
    """A backbone.

    Attributes:
        title: Its name and size in full.
        full: Builds it in full size, for ``--weights``.
        small: Builds it with a linear layer for the images of ``distant_parts.py``.
    """

    title: str
    full: Callable[[], nn.Module]
    small: Callable[[], nn.Module]


class CellClassifier(nn.Module):
    """A backbone whose last map has one place for each cell, and a linear layer."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        # A line of the log for each weight.
        logging.disable(logging.WARNING)
        try:
            self.backbone.init_weights()
        finally:
            logging.disable(logging.NOTSET)
        self.head = nn.Linear(_WIDTH[1], COLOURS)

    def forward(self, images: Tensor) -> Tensor:
        """``(B, 3, 128, 128)`` to logits ``(B, 16, 16, 8)``."""
        return self.head(self.backbone(images)[-1].permute(0, 2, 3, 1))


def _small_deit() -> nn.Module:
    return CellClassifier(VisionTransformer(
        arch=dict(embed_dims=_WIDTH[1], num_layers=sum(_DEPTHS), num_heads=_HEADS[1],
                  feedforward_channels=4 * _WIDTH[1]),
        img_size=SIDE, patch_size=CELL, out_type='featmap'))


def _small_swin() -> nn.Module:
    # Windows of half the side, at both strides whole; two layers a pair, plain and shifted.
    return CellClassifier(SwinTransformer(
        arch=dict(embed_dims=_WIDTH[0], depths=[2, 4], num_heads=list(_HEADS)), img_size=SIDE,
        window_size=8, drop_path_rate=0., out_indices=(1, )))


def _small_pvt() -> nn.Module:
    backbone = PyramidVisionTransformerV2(
        embed_dims=_WIDTH[0], num_layers=list(ARCH['depths']), num_heads=list(ARCH['num_heads']),
        sr_ratios=[4, 2, 1, 1], mlp_ratios=list(ARCH['mlp_ratios']), out_indices=(1, ),
        drop_path_rate=0.)
    # It takes four stages and no fewer.
    backbone.layers = backbone.layers[:2]
    return CellClassifier(backbone)


PEERS = {
    'deit': Peer('DeiT-tiny', lambda: VisionTransformer('deit-tiny'), _small_deit),
    'pvt_v2': Peer('PVTv2-B1', lambda: PyramidVisionTransformerV2(
        embed_dims=64, num_layers=[2, 2, 2, 2]), _small_pvt),
    'swin': Peer('Swin-tiny', lambda: SwinTransformer('tiny'), _small_swin),
    'laplacian': Peer('LaplacianFormer-tiny', lambda: LaplacianFormer('tiny'),
                      DistantPartsModel),
}


def with_weights(name: str, file: Path) -> nn.Module:
    """A backbone of full size with the weights of a file.

    Args:
        name: Key of :data:`PEERS`.
        file: Checkpoint of the backbone, or of a classifier of mmpretrain with it; for PVTv2
            also of its authors.

    Raises:
        UserError: The file cannot be read, or lacks weights of the backbone.
    """
    model = PEERS[name].full()
    try:
        state = CheckpointLoader.load_checkpoint(str(file), map_location='cpu')
    except Exception as error:  # noqa: BLE001  pickle raises whatever a file makes it raise
        raise UserError(f'--weights {name}={file} must be a checkpoint: {error}') from error
    for key in ('state_dict', 'model'):
        state = state.get(key, state)
    if any(key.startswith('backbone.') for key in state):
        state = {key.removeprefix('backbone.'): value for key, value in state.items()
                 if key.startswith('backbone.')}
    if name == 'pvt_v2' and any(key.startswith('patch_embed1.') for key in state):
        state = pvt_convert(state)
    try:
        missing = model.load_state_dict(state, strict=False).missing_keys
    except RuntimeError as error:
        missing = [str(error).splitlines()[-1].strip()]
    # Buffers of indices and norms of the outputs, which no attention layer sees.
    missing = [key for key in missing if 'index' not in key and not key.startswith('norm')]
    if missing:
        raise UserError(f'--weights {name}={file} must hold the weights of '
                        f'{PEERS[name].title}, got none for {missing[0]}')
    model.eval()
    return model
