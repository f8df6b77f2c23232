"""LaplacianFormer-tiny on ImageNet-1k, 300 epochs (8 GPUs x 128 images).

The usual recipe of pyramid transformers: AdamW, cosine, RandAugment, Mixup, CutMix, random
erasing, label smoothing, an average of the weights.
"""
_base_ = [
    'mmpretrain::_base_/datasets/imagenet_bs64_swin_224.py',
    'mmpretrain::_base_/schedules/imagenet_bs1024_adamw_swin.py',
    'mmpretrain::_base_/default_runtime.py',
]
custom_imports = dict(imports=['mmlaplacian'], allow_failed_imports=False)

# checkpoint: weights to start from, as in mask_rcnn_laplacian_t.py.
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='LaplacianFormer',
        arch='tiny',
        out_indices=(3, ),
        drop_path_rate=0.1,
        init_cfg=dict(type='Pretrained', checkpoint=None)),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(
        type='LinearClsHead',
        num_classes=1000,
        in_channels=512,
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.02),
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original')),
    train_cfg=dict(augments=[
        dict(type='Mixup', alpha=0.8),
        dict(type='CutMix', alpha=1.0),
    ]))

train_dataloader = dict(batch_size=128)
val_dataloader = dict(batch_size=128)
test_dataloader = val_dataloader

optim_wrapper = dict(
    optimizer=dict(lr=1e-3),
    paramwise_cfg=dict(
        _delete_=True, norm_decay_mult=0., bias_decay_mult=0., dwconv_decay_mult=0.))
warmup_epochs = 10
param_scheduler = [
    dict(
        type='LinearLR',
        start_factor=1e-3,
        by_epoch=True,
        end=warmup_epochs,
        convert_to_iter_based=True),
    dict(
        type='CosineAnnealingLR',
        eta_min=1e-5,
        by_epoch=True,
        begin=warmup_epochs,
        convert_to_iter_based=True),
]
custom_hooks = [dict(type='EMAHook', momentum=4e-5, priority='ABOVE_NORMAL')]
default_hooks = dict(checkpoint=dict(max_keep_ckpts=3))
