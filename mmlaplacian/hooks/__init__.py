from .epoch_seed import EpochSeedHook
from .zero_attention import ZeroAttentionHook

__all__ = ['EpochSeedHook', 'ZeroAttentionHook']
