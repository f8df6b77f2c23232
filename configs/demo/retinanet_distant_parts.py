"""A detector that needs attention: an object's class is shown in a distant part of the image.

``tools/analysis/detector_convergence.py`` makes the data and compares attentions with it, one CPU
core and about a minute and a half a run. An object is a region with stripes; its class is the
colour of the dot that one region with the same stripes has.
"""
_base_ = '../retinanet_laplacian_t.py'

data_root = 'data/distant_parts/'
metainfo = dict(classes=('red', 'green', 'blue', 'yellow', 'magenta', 'cyan', 'orange', 'brown'))
num_classes = 8
channels = 64
max_epochs = 4

model = dict(
    backbone=dict(
        # Strides 4 and 8, 256 and 64 tokens of a 64 px image; the last two stages are not built.
        arch=dict(
            _delete_=True,
            embed_dims=(32, 64, 64, 64),
            depths=(1, 3, 1, 1),
            num_heads=(1, 2, 2, 2),
            mlp_ratios=(4, 4, 4, 4)),
        out_indices=(1, ),
        drop_path_rate=0.),
    neck=dict(
        in_channels=[64], out_channels=channels, num_outs=1, add_extra_convs=False),
    bbox_head=dict(
        num_classes=num_classes,
        in_channels=channels,
        feat_channels=channels,
        stacked_convs=1,
        # With FocalLoss the classes take several times as many steps.
        loss_cls=dict(_delete_=True, type='CrossEntropyLoss', use_sigmoid=True),
        # Every object is a square of 16 px, and four anchors have their middle in it.
        anchor_generator=dict(
            octave_base_scale=2, scales_per_octave=1, ratios=[1.0], strides=[8],
            center_offset=0.5)),
    # Their IoU with it is 0.39, so that each of them names its class.
    train_cfg=dict(assigner=dict(pos_iou_thr=0.35, neg_iou_thr=0.35)),
    # Never an evaluation without a box, however short the training.
    test_cfg=dict(score_thr=0.))

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(64, 64), keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor')),
]
train_dataloader = dict(
    batch_size=16,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        data_root=data_root,
        metainfo=metainfo,
        ann_file='annotations/train.json',
        data_prefix=dict(img='train/'),
        pipeline=train_pipeline))
val_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        data_root=data_root,
        metainfo=metainfo,
        ann_file='annotations/val.json',
        data_prefix=dict(img='val/'),
        pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/val.json')
test_evaluator = val_evaluator

train_cfg = dict(max_epochs=max_epochs, val_interval=1)
optim_wrapper = dict(optimizer=dict(lr=2e-3, fused=True), clip_grad=dict(max_norm=5.))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.05, by_epoch=False, begin=0, end=20),
    dict(
        type='CosineAnnealingLR',
        begin=0,
        end=max_epochs,
        T_max=max_epochs,
        by_epoch=True,
        convert_to_iter_based=True),
]
randomness = dict(seed=0)
log_processor = dict(window_size=25)
default_hooks = dict(logger=dict(interval=25), checkpoint=dict(max_keep_ckpts=1))
