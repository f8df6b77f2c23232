"""The tiny backbone and its peers: images in, maps of all four stages out."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from op_cases import OWN
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

PVT, SWIN = 'timm pvt_v2_b1', 'torchvision swin_t'
# Outputs of torchvision's stages in its list of stages and mergings.
_SWIN_STAGES = (1, 3, 5, 7)


class _SwinStages(nn.Module):
    """Swin-T without its head, as a detector takes it."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models import swin_t
        from torchvision.ops import StochasticDepth

        self.features = swin_t().features
        for layer in self.features.modules():
            if isinstance(layer, StochasticDepth):
                # 0 in the other models.
                layer.p = 0.

    def forward(self, x: Tensor) -> list[Tensor]:
        """``(B, 3, H, W)`` to four maps ``(B, H / s, W / s, C)``."""
        maps = []
        for index, layer in enumerate(self.features):
            x = layer(x)
            if index in _SWIN_STAGES:
                maps.append(x)
        return maps


def _own() -> nn.Module:
    from mmlaplacian import LaplacianFormer

    return LaplacianFormer(arch='tiny')


def _pvt() -> nn.Module:
    import timm

    return timm.create_model('pvt_v2_b1', features_only=True)


BUILDERS: dict[str, Callable[[], nn.Module]] = {OWN: _own, PVT: _pvt, SWIN: _SwinStages}
_PACKAGES = {OWN: ('mmengine', 'mmcv'), PVT: ('timm', ), SWIN: ('torchvision', )}


def missing(name: str) -> str | None:
    """Why a model cannot be built here, None if it can."""
    absent = [package for package in _PACKAGES.get(name, ()) if find_spec(package) is None]
    return f'{" and ".join(absent)} not installed' if absent else None


def available() -> dict[str, nn.Module]:
    """The models that can be built here, untrained, by name."""
    torch.manual_seed(0)
    return {name: build() for name, build in BUILDERS.items() if missing(name) is None}


def gmacs(model: nn.Module, height: int, width: int) -> float:
    """1e9 multiply-adds of an image, attention included; nothing is computed.

    A difference and its sum in a distance count as one. The model goes to the meta device.
    """
    image = torch.empty(1, 3, height, width, device='meta')
    # Only the plain products of softmax attention are counted on every device.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.to('meta').eval()(image)
    return counter.get_total_flops() / 2e9


def inference(model: nn.Module, image: Tensor) -> None:
    """Forward without gradients; the model is in eval mode."""
    with torch.no_grad():
        model(image)


def training_step(model: nn.Module, images: Tensor) -> None:
    """Forward, and backward from all maps."""
    model.zero_grad(set_to_none=True)
    sum(x.square().mean() for x in model(images)).backward()
