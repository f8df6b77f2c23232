"""Image files of every kind through the shipped pipelines and a detector (B38)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from mmcv.transforms import Compose
from mmengine.config import Config
from PIL import Image

CONFIG = Path(__file__).resolve().parents[2] / 'configs' / 'mask_rcnn_laplacian_t.py'
WIDTH, HEIGHT = 100, 40


def pixels(channels: int = 3) -> np.ndarray:
    """Smooth, so that JPEG changes little; the left half is dark."""
    x = np.linspace(20, 230, WIDTH)
    return np.broadcast_to(x[None, :, None], (HEIGHT, WIDTH, channels)).astype(np.uint8).copy()


def rgba() -> Image.Image:
    alpha = np.full((HEIGHT, WIDTH, 1), 128, np.uint8)
    return Image.fromarray(np.concatenate([pixels(), alpha], -1))


def deep(factor: int) -> Image.Image:
    return Image.fromarray(pixels(1)[..., 0].astype(np.uint16) * factor)


KINDS: dict[str, Callable[[], Image.Image]] = {
    'l.png': lambda: Image.fromarray(pixels(1)[..., 0]),
    'la.png': lambda: Image.fromarray(pixels(2), 'LA'),
    'rgba.png': rgba,
    'palette.png': lambda: Image.fromarray(pixels()).quantize(64),
    'palette_transparent.png': lambda: rgba().quantize(64),
    'bilevel.png': lambda: Image.fromarray(pixels(1)[..., 0]).convert('1'),
    'cmyk.jpg': lambda: Image.fromarray(pixels()).convert('CMYK'),
    'l.jpg': lambda: Image.fromarray(pixels(1)[..., 0]),
    'rgb.webp': lambda: Image.fromarray(pixels()),
    'rgb.tif': lambda: Image.fromarray(pixels()),
    '16bit.png': lambda: deep(256),
    '16bit.tif': lambda: deep(256),
}


def write(folder: Path, name: str) -> Path:
    path = folder / name
    KINDS[name]().save(path)
    return path


@pytest.fixture(scope='module')
def pipelines() -> dict[str, Compose]:
    from mmdet.utils import register_all_modules
    from mmengine.registry import DefaultScope

    cfg = Config.fromfile(CONFIG)
    register_all_modules(init_default_scope=False)
    with DefaultScope.overwrite_default_scope('mmdet'):
        return {split: Compose(cfg[f'{split}_dataloader'].dataset.pipeline)
                for split in ('train', 'test')}


def sample(path: Path, box: list[float], width: int = WIDTH, height: int = HEIGHT) -> dict:
    x1, y1, x2, y2 = box
    outline = [x1, y1, x2, y1, x2, y2, x1, y2]
    return dict(img_path=str(path), img_id=0, height=height, width=width, instances=[
        dict(bbox=box, bbox_label=0, ignore_flag=0, mask=[outline])])


@pytest.mark.parametrize('name', KINDS)
@pytest.mark.parametrize('split', ['train', 'test'])
def test_b38_three_channels_of_eight_bits(pipelines, tmp_path, name, split):
    packed = pipelines[split](sample(write(tmp_path, name), [10., 5., 60., 30.]))
    image = packed['inputs']
    assert image.dtype == torch.uint8 and image.shape[0] == 3
    height, width = image.shape[1:]
    assert abs(width / height - WIDTH / HEIGHT) < 0.05
    # Bright on the right or, flipped, on the left, in the whole range.
    halves = sorted(half.float().mean() for half in image.split(-(-width // 2), -1))
    assert halves[0] < 90 and halves[1] > 150, halves
    boxes = torch.as_tensor(packed['data_samples'].gt_instances.bboxes.numpy())
    assert boxes.shape == (1, 4)
    assert (boxes >= 0).all() and boxes[0, 2] <= width and boxes[0, 3] <= height


@pytest.mark.parametrize('factor', [1, 16, 257])
def test_b38_of_16_bits_the_upper_8_are_read(pipelines, tmp_path, factor):
    """A 12-bit camera's image is dark: the rule is stated, not guessed from the values."""
    deep(factor).save(tmp_path / 'deep.png')
    packed = pipelines['test'](sample(tmp_path / 'deep.png', [10., 5., 60., 30.]))
    brightest = int(pixels().max()) * factor // 256
    assert abs(int(packed['inputs'].max()) - brightest) <= 1


@pytest.mark.parametrize(('orientation', 'displayed'), [(1, (100, 40)), (3, (100, 40)),
                                                        (6, (40, 100)), (8, (40, 100))])
@pytest.mark.parametrize('split', ['train', 'test'])
def test_b38_exif_turns_the_pixels(pipelines, tmp_path, orientation, displayed, split):
    image = Image.fromarray(pixels())
    exif = image.getexif()
    exif[0x0112] = orientation
    image.save(tmp_path / 'turned.jpg', exif=exif)
    width, height = displayed
    packed = pipelines[split](sample(tmp_path / 'turned.jpg', [2., 3., width - 2., height - 3.],
                                     width, height))
    assert packed['data_samples'].ori_shape == (height, width)
    sides = packed['inputs'].shape
    box = packed['data_samples'].gt_instances.bboxes.numpy()[0]
    assert box[2] <= sides[2] and box[3] <= sides[1]


def test_b38_names_say_nothing_about_the_format(pipelines, tmp_path):
    Image.fromarray(pixels()).save(tmp_path / 'a.gif')
    (tmp_path / 'a.gif').rename(tmp_path / 'a.jpg')
    packed = pipelines['test'](sample(tmp_path / 'a.jpg', [10., 5., 60., 30.]))
    assert packed['inputs'].shape[0] == 3


@pytest.mark.parametrize('mode', ['I', 'F'])
def test_b38_32_bit_samples_are_refused_by_name(tool, tmp_path, mode):
    Image.fromarray(pixels(1)[..., 0]).convert(mode).save(tmp_path / 'deep.tif')
    coco_file = tool('coco_file')
    image = coco_file.CocoImage(7, 'deep.tif', WIDTH, HEIGHT, True, True)
    file = coco_file.CocoFile(tmp_path / 'a.json', ('nut', ), (image, ), 0, 0, '')
    with pytest.raises(tool('cli').UserError,
                       match=r'image 7, .*deep\.tif of .*a\.json has 32-bit samples'):
        tool('image_headers').check_image_sizes(file, tmp_path)


@pytest.mark.parametrize(('width', 'height'), [(1, 1), (4000, 30), (30, 4000), (33, 1)])
def test_b38_extreme_sizes_reach_the_backbone(pipelines, tmp_path, width, height):
    from mmlaplacian import LaplacianFormer

    Image.new('RGB', (width, height), (90, 120, 30)).save(tmp_path / 'a.png')
    packed = pipelines['test'](sample(tmp_path / 'a.png', [0., 0., width, height], width, height))
    rows, columns = packed['inputs'].shape[1:]
    model = LaplacianFormer(dict(embed_dims=(8, 8, 8, 8), depths=(1, 1, 1, 1),
                                 num_heads=(1, 1, 1, 1), mlp_ratios=(1, 1, 1, 1))).eval()
    with torch.no_grad():
        maps = model(packed['inputs'][None].float())
    assert [tuple(x.shape[2:]) for x in maps] == [
        (-(-rows // stride), -(-columns // stride)) for stride in (4, 8, 16, 32)]
    assert all(torch.isfinite(x).all() for x in maps)


def test_b38_a_detector_takes_every_kind(trained, tmp_path):
    from mmdet.apis import inference_detector, init_detector

    model = init_detector(str(trained['dumped']), str(trained['checkpoint']), device='cpu')
    for name in KINDS:
        instances = inference_detector(model, str(write(tmp_path, name))).pred_instances
        assert len(instances.scores) > 0, name
        limits = torch.tensor([WIDTH, HEIGHT, WIDTH, HEIGHT])
        assert ((instances.bboxes >= 0) & (instances.bboxes <= limits)).all(), name


@pytest.mark.parametrize('name', ['cut.jpg', 'cut.png'])
def test_b38_a_truncated_image_is_named(pipelines, tmp_path, name):
    path = tmp_path / name
    Image.fromarray(pixels()).save(path)
    path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])
    with pytest.raises(AssertionError, match=name):
        pipelines['train'](sample(path, [10., 5., 60., 30.]))
