"""mask_rcnn_laplacian_t.py with layer-wise decay of the learning rate.

For finetuning from a pretrained backbone: the nearer a layer is to the image, the less it moves.
The same two settings suit every config of LaplacianFormer.
"""
_base_ = './mask_rcnn_laplacian_t.py'

optim_wrapper = dict(
    constructor='LayerDecayOptimWrapperConstructor',
    paramwise_cfg=dict(layer_decay_rate=0.9))
