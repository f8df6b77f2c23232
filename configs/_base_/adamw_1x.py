"""1x schedule (12 epochs, batch 16) with AdamW, shared by the COCO configs."""
_base_ = 'mmdet::_base_/schedules/schedule_1x.py'

optim_wrapper = dict(
    _delete_=True,
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=1e-4, betas=(0.9, 0.999), weight_decay=0.05),
    paramwise_cfg=dict(norm_decay_mult=0., bias_decay_mult=0., dwconv_decay_mult=0.))
