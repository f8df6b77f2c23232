from .frontend import newton_schulz_inverse
from .schedule import default_iters

__all__ = ['default_iters', 'newton_schulz_inverse']
