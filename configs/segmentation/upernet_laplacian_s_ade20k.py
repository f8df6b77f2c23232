"""UPerNet with LaplacianFormer-small on ADE20K, 160k iterations (8 GPUs x 2 images)."""
_base_ = './upernet_laplacian_t_ade20k.py'

model = dict(backbone=dict(arch='small', drop_path_rate=0.2))
