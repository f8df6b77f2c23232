"""The control of the demo: the same run with the attention branch set to zero."""
_base_ = './mask_rcnn_laplacian_shapes.py'

custom_hooks = [dict(type='ZeroAttentionHook')]
