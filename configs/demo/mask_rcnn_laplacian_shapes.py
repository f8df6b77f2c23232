"""The demo: Mask R-CNN with a small LaplacianFormer on generated shapes, for two CPU cores.

``tools/make_shapes_dataset.py`` makes the data. Image size, sampling and channels shrink, since
Mask R-CNN's own heads take most of the time at this size.
"""
_base_ = '../mask_rcnn_laplacian_t.py'

data_root = 'data/shapes/'
metainfo = dict(classes=('circle', 'square', 'triangle'),
                palette=[(220, 60, 60), (60, 160, 60), (60, 90, 220)])
max_epochs = 8
channels = 64
num_classes = 3

model = dict(
    # A size of your own: four values a key, one for each stage.
    backbone=dict(
        arch=dict(
            _delete_=True,
            embed_dims=(32, 64, 128, 256),
            depths=(1, 2, 2, 2),
            num_heads=(1, 2, 4, 8),
            mlp_ratios=(4, 4, 4, 4)),
        drop_path_rate=0.),
    neck=dict(in_channels=[32, 64, 128, 256], out_channels=channels, num_outs=4,
              norm_cfg=dict(type='BN')),
    rpn_head=dict(
        in_channels=channels,
        feat_channels=channels,
        # Squares of 12 to 152 px in thirds of an octave, for objects of 12 to 64 px.
        anchor_generator=dict(
            _delete_=True,
            type='AnchorGenerator',
            octave_base_scale=3,
            scales_per_octave=3,
            ratios=[1.0],
            strides=[4, 8, 16, 32])),
    roi_head=dict(
        bbox_roi_extractor=dict(
            out_channels=channels, finest_scale=28, roi_layer=dict(sampling_ratio=1)),
        bbox_head=dict(in_channels=channels, fc_out_channels=256, num_classes=num_classes),
        mask_roi_extractor=dict(
            out_channels=channels, finest_scale=28, roi_layer=dict(sampling_ratio=1)),
        mask_head=dict(in_channels=channels, conv_out_channels=32, num_convs=2,
                       num_classes=num_classes, norm_cfg=dict(type='BN'))),
    train_cfg=dict(
        rpn=dict(sampler=dict(num=64)),
        rpn_proposal=dict(nms_pre=200, max_per_img=60),
        rcnn=dict(sampler=dict(num=32))),
    test_cfg=dict(
        rpn=dict(nms_pre=200, max_per_img=60),
        rcnn=dict(max_per_img=20)))

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(128, 128), keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor')),
]
train_dataloader = dict(
    batch_size=8,
    num_workers=1,
    dataset=dict(
        data_root=data_root,
        metainfo=metainfo,
        ann_file='annotations/train.json',
        data_prefix=dict(img='train/'),
        pipeline=train_pipeline))
val_dataloader = dict(
    num_workers=1,
    dataset=dict(
        data_root=data_root,
        metainfo=metainfo,
        ann_file='annotations/val.json',
        data_prefix=dict(img='val/'),
        pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/val.json')
test_evaluator = val_evaluator

train_cfg = dict(max_epochs=max_epochs, val_interval=max_epochs)
optim_wrapper = dict(
    optimizer=dict(lr=2e-3, fused=True),
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
