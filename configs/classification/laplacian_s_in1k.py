"""LaplacianFormer-small on ImageNet-1k, 300 epochs (8 GPUs x 128 images)."""
_base_ = './laplacian_t_in1k.py'

model = dict(backbone=dict(arch='small', drop_path_rate=0.2))
