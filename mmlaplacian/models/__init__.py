from .attention import LaplacianAttention
from .complexity import register_handles
from .laplacian_former import LaplacianFormer

__all__ = ['LaplacianAttention', 'LaplacianFormer']

register_handles()
