from .frontend import KERNELS, gaussian_kernel, laplacian_kernel

__all__ = ['KERNELS', 'gaussian_kernel', 'laplacian_kernel']
