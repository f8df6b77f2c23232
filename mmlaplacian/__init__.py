"""Laplacian linear attention for OpenMMLab.

Importing the package registers its models, hooks and optimizer constructor in MMEngine's root
registries where MMEngine is installed. The operators in :mod:`mmlaplacian.ops` need torch alone.
"""

import sys
from importlib.util import find_spec

from .version import __version__

__all__ = ['__version__']

# The doctor says what is wrong where the models do not import.
if find_spec('mmengine') is not None and 'mmlaplacian.doctor' not in sys.orig_argv:
    from .hooks import EpochSeedHook, FiniteLossHook, SafeCheckpointHook, ZeroAttentionHook
    from .models import LaplacianAttention, LaplacianFormer
    from .optim import LayerDecayOptimWrapperConstructor

    __all__ += ['EpochSeedHook', 'FiniteLossHook', 'LaplacianAttention', 'LaplacianFormer',
                'LayerDecayOptimWrapperConstructor', 'SafeCheckpointHook', 'ZeroAttentionHook']
