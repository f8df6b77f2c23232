"""RetinaNet with LaplacianFormer-huge on COCO, 1x (8 GPUs x 2 images)."""
_base_ = './retinanet_laplacian_t.py'

model = dict(backbone=dict(arch='huge', drop_path_rate=0.5))
