"""``tools/image_demo.py`` and ``tools/get_flops.py``."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch


def test_pictures_of_own_classes(tool, trained, tmp_path, capsys):
    images = [trained['root'] / 'images' / f'{i}.png' for i in range(2)]
    copy = tmp_path / 'elsewhere' / '0.png'
    copy.parent.mkdir()
    copy.write_bytes(images[0].read_bytes())
    status = tool('image_demo').main([
        *map(str, images), str(copy.parent), str(trained['dumped']), str(trained['checkpoint']),
        '--out-dir', str(tmp_path / 'pictures'), '--score-thr', '0', '--device', 'cpu'])
    assert status == 0
    assert sorted(p.name for p in (tmp_path / 'pictures').iterdir()) == [
        '0.png', '0_2.png', '1.png']
    for i in range(2):
        source = cv2.imread(str(images[i]))
        picture = cv2.imread(str(tmp_path / 'pictures' / f'{i}.png'))
        assert picture.shape == (832, 832, 3)  # 13 x 64
        enlarged = cv2.resize(source, (832, 832), interpolation=cv2.INTER_CUBIC)
        assert (picture != enlarged).any(-1).mean() > 0.05
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if '->' in line]
    assert len(lines) == 3
    assert any(name in lines[0] for name in ('nut', 'fig', 'date'))


def test_nothing_above_the_threshold(tool, trained, tmp_path, capsys):
    image = trained['root'] / 'images' / '0.png'
    status = tool('image_demo').main([
        str(image), str(trained['dumped']), str(trained['checkpoint']), '--out-dir',
        str(tmp_path), '--score-thr', '1', '--device', 'cpu'])
    assert status == 0
    assert 'nothing above the score threshold (best score 0.' in capsys.readouterr().out
    assert (tmp_path / '0.png').is_file()


def test_refusals(tool, trained, tmp_path, capsys):
    image = str(trained['root'] / 'images' / '0.png')
    text = tmp_path / 'text.png'
    text.write_text('no image')
    (tmp_path / 'empty').mkdir()
    dumped, checkpoint = str(trained['dumped']), str(trained['checkpoint'])
    for args, message in (
        (['gone.png', dumped, checkpoint], 'image gone.png does not exist'),
        ([str(text), dumped, checkpoint], 'text.png cannot be read as an image'),
        ([str(tmp_path / 'empty'), dumped, checkpoint], 'holds no image'),
        ([image, 'gone.py', checkpoint], 'config gone.py does not exist'),
        ([image, dumped, 'gone.pth'], 'checkpoint gone.pth does not exist'),
        ([image, dumped, checkpoint, '--device', 'gpu7'], '--device gpu7 cannot be used'),
        ([image, dumped, checkpoint, '--out-dir', str(text)], 'text.png is a file'),
    ):
        out_dir = [] if '--out-dir' in args else ['--out-dir', str(tmp_path / 'pictures')]
        assert tool('image_demo').main([*args, *out_dir]) == 2
        error = capsys.readouterr().err
        assert error.startswith('error: ')
        assert message in error
    assert not (tmp_path / 'pictures').exists()


def write_image(path: Path, height: int = 64, width: int = 64) -> Path:
    path.parent.mkdir(exist_ok=True)
    cv2.imwrite(str(path), np.full((height, width, 3), 90, np.uint8))
    return path


def test_every_picture_has_its_own_name(tool, tmp_path):
    images = [tmp_path / name for name in ('a.jpg', 'a.png', 'a_2.png', 'A.bmp', 'b.png')]
    for image in images:
        write_image(image)
    names = [target.name for _, target in tool('image_demo')._targets(images, tmp_path / 'out')]
    assert names == ['a.png', 'a_2.png', 'a_2_2.png', 'A_3.png', 'b.png']


@pytest.mark.parametrize('linked', [False, True])
def test_images_are_never_replaced(tool, trained, tmp_path, capsys, linked):
    image = write_image(tmp_path / 'in' / 'a.png')
    before = image.read_bytes()
    out_dir = tmp_path / 'in'
    if linked:
        out_dir = tmp_path / 'out'
        out_dir.symlink_to(image.parent)
    status = tool('image_demo').main([
        str(image.parent), str(trained['dumped']), str(trained['checkpoint']), '--out-dir',
        str(out_dir), '--device', 'cpu'])
    assert status == 2
    assert 'would replace the image' in capsys.readouterr().err
    assert image.read_bytes() == before
    assert list(image.parent.iterdir()) == [image]


def test_one_odd_image_does_not_stop_the_others(tool, trained, tmp_path, capsys):
    write_image(tmp_path / 'in' / 'a_long.png', 2, 3000)  # 64 pixels wide it has no row
    write_image(tmp_path / 'in' / 'b.png')
    status = tool('image_demo').main([
        str(tmp_path / 'in'), str(trained['dumped']), str(trained['checkpoint']), '--out-dir',
        str(tmp_path / 'out'), '--device', 'cpu'])
    assert status == 2
    assert [path.name for path in (tmp_path / 'out').iterdir()] == ['b.png']
    error = capsys.readouterr().err
    assert '1 of 2 images could not be predicted' in error
    assert 'a_long.png' in error


def test_an_out_dir_that_cannot_be_made(tool, trained, tmp_path, capsys):
    (tmp_path / 'file').touch()
    status = tool('image_demo').main([
        str(trained['root'] / 'images' / '0.png'), str(trained['dumped']),
        str(trained['checkpoint']), '--out-dir', str(tmp_path / 'file' / 'out'), '--device',
        'cpu'])
    assert status == 2
    assert 'cannot be made: Not a directory' in capsys.readouterr().err


def test_score_threshold_is_checked(tool, capsys):
    with pytest.raises(SystemExit):
        tool('image_demo').main(['a.png', 'c.py', 'a.pth', '--out-dir', 'o', '--score-thr', '3'])
    assert '3.0 is not between 0 and 1' in capsys.readouterr().err


@pytest.mark.parametrize('masks', [False, True])
def test_objects_are_drawn_where_they_are(tool, masks):
    from mmengine.structures import InstanceData
    instances = InstanceData(bboxes=torch.tensor([[16., 32., 48., 60.]]),
                             labels=torch.tensor([1]), scores=torch.tensor([0.9]))
    if masks:
        mask = torch.zeros(1, 64, 64, dtype=torch.bool)
        mask[0, 36:56, 20:44] = True
        instances.masks = mask
    grey = np.full((64, 64, 3), 128, np.uint8)
    picture = tool('drawing').draw_instances(
        grey, instances, ('nut', 'fig'), [(255, 0, 0), (0, 0, 255)])
    changed = (picture != 128).any(-1)
    scale = picture.shape[0] // 64
    assert picture.shape == (13 * 64, 13 * 64, 3)
    ys, xs = np.nonzero(changed)
    assert abs(xs.min() - 16 * scale) < 6
    assert abs(xs.max() - 48 * scale) < 6
    assert abs(ys.max() - 60 * scale) < 6
    # The label lies above the box and leaves the object free.
    assert 24 * scale < ys.min() < 32 * scale - 6
    inside = picture[38 * scale:54 * scale, 22 * scale:42 * scale].reshape(-1, 3)
    assert (inside == inside[0]).all()
    assert (inside[0] == 128).all() != masks
    if masks:
        assert inside[0, 2] > inside[0, 0]  # tinted by its class's blue


def test_a_short_palette_does_not_stop_the_drawing(tool):
    from mmengine.structures import InstanceData
    instances = InstanceData(bboxes=torch.tensor([[16., 32., 48., 60.]]),
                             labels=torch.tensor([2]), scores=torch.tensor([0.9]))
    picture = tool('drawing').draw_instances(
        np.full((900, 64, 3), 128, np.uint8), instances, ('a', 'b', 'c'), [(255, 0, 0)])
    assert picture.shape == (900, 64, 3)
    assert (picture != 128).any()


def test_get_flops(tool, make_config, capsys):
    assert tool('get_flops').main([str(make_config()), '--shape', '64', '96']) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    from mmdet.registry import MODELS
    from mmengine.config import Config
    model = MODELS.build(Config.fromfile(make_config()).model)
    for name, module in (('backbone', model.backbone), ('detector', model)):
        params = sum(p.numel() for p in module.parameters())
        assert float(rows[name][1]) == pytest.approx(params / 1e6, abs=0.005)


def test_flops_of_a_known_layer(tool):
    layer = torch.nn.Conv2d(3, 8, 3, padding=1)
    params, total, layers = tool('get_flops').count(layer, torch.rand(1, 3, 10, 12))
    assert params == 8 * 27 + 8
    assert total == layers == 8 * 27 * 120


def test_get_flops_needs_a_backbone(tool, tmp_path: Path, capsys):
    config = tmp_path / 'empty.py'
    config.write_text('model = dict()')
    assert tool('get_flops').main([str(config)]) == 2
    assert 'has no model.backbone' in capsys.readouterr().err


def test_get_flops_explains_a_bad_model(tool, make_config, capsys):
    assert tool('get_flops').main([
        str(make_config()), '--cfg-options', 'model.backbone.depth=19']) == 2
    assert 'invalid depth 19 for resnet' in capsys.readouterr().err
