"""Cascade Mask R-CNN with LaplacianFormer-small on COCO, 1x (8 GPUs x 2 images)."""
_base_ = './cascade_mask_rcnn_laplacian_t.py'

model = dict(backbone=dict(arch='small', drop_path_rate=0.2))
