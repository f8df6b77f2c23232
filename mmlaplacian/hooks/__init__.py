from .epoch_seed import EpochSeedHook
from .finite_loss import FiniteLossHook
from .safe_checkpoint import SafeCheckpointHook
from .zero_attention import ZeroAttentionHook

__all__ = ['EpochSeedHook', 'FiniteLossHook', 'SafeCheckpointHook', 'ZeroAttentionHook']
