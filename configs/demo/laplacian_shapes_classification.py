"""Pretraining of the demo's backbone: image classification of generated shapes, on two CPU cores.

``tools/make_shape_classes.py`` makes the data. ``tools/train.py
configs/demo/mask_rcnn_laplacian_shapes.py --pretrained CHECKPOINT`` goes on from its checkpoint.
"""
_base_ = [
    'mmpretrain::_base_/datasets/imagenet_bs64.py',
    'mmpretrain::_base_/schedules/imagenet_bs1024_adamw_swin.py',
    'mmpretrain::_base_/default_runtime.py',
]
custom_imports = dict(imports=['mmlaplacian'], allow_failed_imports=False)

data_root = 'data/shape_classes'
metainfo = dict(classes=('circle', 'square', 'triangle'))
num_classes = 3
max_epochs = 12

model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='LaplacianFormer',
        # The size of mask_rcnn_laplacian_shapes.py, which takes its weights.
        arch=dict(
            embed_dims=(32, 64, 128, 256),
            depths=(1, 2, 2, 2),
            num_heads=(1, 2, 4, 8),
            mlp_ratios=(4, 4, 4, 4)),
        out_indices=(3, ),
        init_cfg=dict(type='Pretrained', checkpoint=None)),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(
        type='LinearClsHead',
        num_classes=num_classes,
        in_channels=256,
        topk=(1, ),
        loss=dict(type='CrossEntropyLoss', loss_weight=1.0)))
data_preprocessor = dict(num_classes=num_classes)

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='PackInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='PackInputs'),
]
train_dataloader = dict(
    batch_size=16,
    num_workers=1,
    dataset=dict(data_root=data_root, metainfo=metainfo, pipeline=train_pipeline))
val_dataloader = dict(
    num_workers=1,
    dataset=dict(data_root=data_root, metainfo=metainfo, pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(topk=(1, ))
test_evaluator = val_evaluator

train_cfg = dict(max_epochs=max_epochs, val_interval=max_epochs)
optim_wrapper = dict(
    optimizer=dict(lr=5e-4, fused=True),
    paramwise_cfg=dict(dwconv_decay_mult=0.),
    clip_grad=dict(max_norm=5.))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=100),
    dict(
        type='CosineAnnealingLR',
        begin=0,
        end=max_epochs,
        T_max=max_epochs,
        by_epoch=True,
        convert_to_iter_based=True),
]
randomness = dict(seed=0)
default_hooks = dict(logger=dict(interval=25), checkpoint=dict(max_keep_ckpts=2))
