"""The control of laplacian_shapes_classification.py: the attention branch set to zero."""
_base_ = './laplacian_shapes_classification.py'

custom_hooks = [dict(type='ZeroAttentionHook')]
