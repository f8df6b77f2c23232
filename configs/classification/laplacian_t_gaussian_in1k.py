"""laplacian_t_in1k.py with the Gaussian kernel, the paper's comparison."""
_base_ = './laplacian_t_in1k.py'

model = dict(backbone=dict(kernel='gaussian'))
