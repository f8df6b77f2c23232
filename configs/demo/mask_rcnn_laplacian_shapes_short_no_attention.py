"""The control of mask_rcnn_laplacian_shapes_short.py: the attention branch set to zero."""
_base_ = './mask_rcnn_laplacian_shapes_short.py'

custom_hooks = [dict(type='ZeroAttentionHook')]
