"""Laplacian linear attention for OpenMMLab.

Importing the package registers its models, hooks and optimizer constructor in MMEngine's root
registries where MMEngine is installed. The operators in :mod:`mmlaplacian.ops` need torch alone.
"""

from importlib.util import find_spec

from .version import __version__

__all__ = ['__version__']

if find_spec('mmengine') is not None:
    from .hooks import EpochSeedHook, ZeroAttentionHook
    from .models import LaplacianAttention, LaplacianFormer
    from .optim import LayerDecayOptimWrapperConstructor

    __all__ += ['EpochSeedHook', 'LaplacianAttention', 'LaplacianFormer',
                'LayerDecayOptimWrapperConstructor', 'ZeroAttentionHook']
