from .frontend import NORMALIZATIONS, nystrom_attention

__all__ = ['NORMALIZATIONS', 'nystrom_attention']
