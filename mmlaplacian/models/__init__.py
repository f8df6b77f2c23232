from .attention import LaplacianAttention
from .laplacian_former import LaplacianFormer

__all__ = ['LaplacianAttention', 'LaplacianFormer']
