"""Cascade Mask R-CNN with LaplacianFormer-tiny on COCO, 1x (8 GPUs x 2 images)."""
_base_ = [
    'mmdet::_base_/models/cascade-mask-rcnn_r50_fpn.py',
    'mmdet::_base_/datasets/coco_instance.py',
    './_base_/adamw_1x.py',
    'mmdet::_base_/default_runtime.py',
]
custom_imports = dict(imports=['mmlaplacian'], allow_failed_imports=False)

# checkpoint as in mask_rcnn_laplacian_t.py.
model = dict(
    backbone=dict(
        _delete_=True,
        type='LaplacianFormer',
        arch='tiny',
        drop_path_rate=0.1,
        init_cfg=dict(type='Pretrained', checkpoint=None)),
    neck=dict(in_channels=[64, 128, 320, 512]))
