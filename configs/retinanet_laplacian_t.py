"""RetinaNet with LaplacianFormer-tiny on COCO, 1x (8 GPUs x 2 images)."""
_base_ = [
    'mmdet::_base_/models/retinanet_r50_fpn.py',
    'mmdet::_base_/datasets/coco_detection.py',
    './_base_/adamw_1x.py',
    'mmdet::_base_/default_runtime.py',
]
custom_imports = dict(imports=['mmlaplacian'], allow_failed_imports=False)

# RetinaNet reads strides 8 to 128: the first stage gets no output norm, which would be left
# without a gradient. checkpoint as in mask_rcnn_laplacian_t.py.
model = dict(
    backbone=dict(
        _delete_=True,
        type='LaplacianFormer',
        arch='tiny',
        out_indices=(1, 2, 3),
        drop_path_rate=0.1,
        init_cfg=dict(type='Pretrained', checkpoint=None)),
    neck=dict(in_channels=[128, 320, 512], start_level=0))
