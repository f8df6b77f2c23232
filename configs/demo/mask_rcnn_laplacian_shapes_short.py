"""The demo's detector after three epochs, to compare starts: from scratch, from a classifier."""
_base_ = './mask_rcnn_laplacian_shapes.py'

max_epochs = 3
train_cfg = dict(max_epochs=max_epochs, val_interval=max_epochs)
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
