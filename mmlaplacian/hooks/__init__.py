from .zero_attention import ZeroAttentionHook

__all__ = ['ZeroAttentionHook']
