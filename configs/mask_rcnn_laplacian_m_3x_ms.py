"""Mask R-CNN with LaplacianFormer-medium on COCO, 3x, multi-scale (8 GPUs x 2 images)."""
_base_ = './mask_rcnn_laplacian_t_3x_ms.py'

model = dict(backbone=dict(arch='medium', drop_path_rate=0.3))
