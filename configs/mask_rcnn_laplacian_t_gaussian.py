"""mask_rcnn_laplacian_t.py with the Gaussian kernel, the paper's comparison."""
_base_ = './mask_rcnn_laplacian_t.py'

model = dict(backbone=dict(kernel='gaussian'))
