"""``tools/export_onnx.py`` and ``tools/onnx_demo.py``: mmdet's numbers without mmdet."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

onnx = pytest.importorskip('onnx', reason='extra deploy is not installed')
onnxruntime = pytest.importorskip('onnxruntime', reason='extra deploy is not installed')
pytest.importorskip('onnxscript', reason='extra deploy is not installed')

TOOLS = Path(__file__).resolve().parents[2] / 'tools'
BACKBONE = '''
    backbone=dict(
        _delete_=True, type='LaplacianFormer', out_indices=(1, 2, 3),
        arch=dict(embed_dims=(8, 16, 24, 32), depths=(1, 1, 1, 1), num_heads=(1, 2, 3, 4),
                  mlp_ratios=(2, 2, 2, 1))),'''
CONFIGS = {
    'box': ('detection', 'retinanet_r50_fpn', '''
    neck=dict(in_channels=[16, 24, 32], out_channels=16, start_level=0),
    bbox_head=dict(num_classes=2, in_channels=16, feat_channels=16, stacked_convs=1),
    test_cfg=dict(nms_pre=200, score_thr=0.3, max_per_img=20)'''),
    'mask': ('instance', 'mask-rcnn_r50_fpn', '''
    neck=dict(in_channels=[16, 24, 32], out_channels=16, num_outs=4),
    rpn_head=dict(in_channels=16, feat_channels=16,
                  anchor_generator=dict(scales=[4], strides=[8, 16, 32, 64])),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=16, featmap_strides=[8, 16, 32], finest_scale=14),
        bbox_head=dict(num_classes=2, in_channels=16, fc_out_channels=32),
        mask_roi_extractor=dict(out_channels=16, featmap_strides=[8, 16, 32], finest_scale=14),
        mask_head=dict(num_classes=2, in_channels=16, conv_out_channels=16, num_convs=1)),
    test_cfg=dict(rpn=dict(nms_pre=100, max_per_img=40), rcnn=dict(max_per_img=12))'''),
}
NAMES = ('nut', 'fig')


def write_config(folder: Path, kind: str) -> Path:
    data, model, heads = CONFIGS[kind]
    path = folder / f'{kind}.py'
    path.write_text(f'''
_base_ = ['mmdet::_base_/models/{model}.py', 'mmdet::_base_/datasets/coco_{data}.py']
custom_imports = dict(imports=['mmlaplacian'], allow_failed_imports=False)
model = dict({BACKBONE}{heads})
test_dataloader = dict(dataset=dict(pipeline=[
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(96, 64), keep_ratio=True),
    dict(type='PackDetInputs', meta_keys=('img_path', 'ori_shape', 'img_shape',
                                          'scale_factor'))]))
''')
    return path


def write_checkpoint(config: Path) -> Path:
    """Weights that detect: those of a new network find every class nowhere or everywhere."""
    from mmdet.registry import MODELS
    from mmengine.config import Config
    from mmengine.registry import DefaultScope
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmdet'):
        model = MODELS.build(Config.fromfile(config).model)
        model.init_weights()
    for name, parameter in model.named_parameters():
        last = name.split('.')[-2]
        if last in ('retina_cls', 'rpn_cls', 'fc_cls', 'conv_logits'):
            torch.nn.init.normal_(parameter, std=.5)
        elif last in ('retina_reg', 'rpn_reg', 'fc_reg'):
            torch.nn.init.normal_(parameter, std=.05)
    path = config.with_suffix('.pth')
    torch.save(dict(state_dict=model.state_dict(),
                    meta=dict(dataset_meta=dict(classes=NAMES, palette=[(255, 0, 0),
                                                                        (0, 0, 255)]))), path)
    return path


@pytest.fixture(scope='module')
def exported(tool, tmp_path_factory):
    """Exports a kind of detector once: ``exported(kind) -> (file, what the tool printed)``."""
    folder = tmp_path_factory.mktemp('exported')
    done: dict[str, tuple[Path, str]] = {}

    def export(kind: str) -> tuple[Path, str]:
        if kind not in done:
            config = write_config(folder, kind)
            checkpoint = write_checkpoint(config)
            file = folder / f'{kind}.onnx'
            result = subprocess.run(
                [sys.executable, str(TOOLS / 'export_onnx.py'), str(config), str(checkpoint),
                 '--out', str(file), '--check'], capture_output=True, text=True, check=False)
            assert result.returncode == 0, result.stderr
            done[kind] = file, result.stdout
        return done[kind]

    return export


@pytest.fixture
def picture(tmp_path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    path = tmp_path / 'picture.png'
    cv2.imwrite(str(path), cv2.resize(pixels, (96, 64), interpolation=cv2.INTER_CUBIC))
    return path


@pytest.mark.parametrize('kind', CONFIGS)
def test_a_file_gives_the_detections_of_mmdet(exported, kind, picture):
    from mmdet.apis import inference_detector, init_detector
    file, said = exported(kind)
    assert 'detections, boxes (px)' in said
    config = file.with_suffix('.py')
    model = init_detector(str(config), str(file.with_suffix('.pth')), device='cpu')
    expected = inference_detector(model, str(picture)).pred_instances
    assert len(expected) > 4
    image = cv2.imread(str(picture))[..., ::-1].astype(np.float32).transpose(2, 0, 1)[None]
    session = onnxruntime.InferenceSession(str(file), providers=['CPUExecutionProvider'])
    boxes, labels, scores, *masks = session.run(None, {'image': np.ascontiguousarray(image)})
    np.testing.assert_array_equal(labels, expected.labels)
    np.testing.assert_allclose(boxes, expected.bboxes, atol=1e-2)
    np.testing.assert_allclose(scores, expected.scores, atol=1e-4)
    assert bool(masks) == (kind == 'mask')
    if masks:
        assert masks[0].dtype == bool
        assert (masks[0] != expected.masks.numpy()).mean() < 1e-3
        assert masks[0].any()


@pytest.mark.parametrize('kind', CONFIGS)
def test_a_file_holds_standard_operators_and_names(exported, kind):
    model = onnx.load(exported(kind)[0])
    onnx.checker.check_model(model)
    assert {node.domain for node in model.graph.node} == {''}
    assert [x.domain for x in model.opset_import] == ['']
    metadata = json.loads({p.key: p.value for p in model.metadata_props}['mmlaplacian'])
    assert metadata['classes'] == list(NAMES)
    assert metadata['scale'] == [96, 64]


def test_the_demo_needs_neither_torch_nor_openmmlab(exported, picture, tmp_path):
    """The program itself, in a process that cannot import them."""
    file, _ = exported('mask')
    blocked = ('torch', 'torchvision', 'mmengine', 'mmcv', 'mmdet', 'mmlaplacian', 'cv2', 'onnx')
    (tmp_path / 'run.py').write_text(
        'import runpy, sys\n'
        f'sys.modules.update(dict.fromkeys({blocked!r}))\n'
        f'sys.argv[0] = {str(TOOLS / "onnx_demo.py")!r}\n'
        "runpy.run_path(sys.argv[0], run_name='__main__')\n")
    out = tmp_path / 'out'
    result = subprocess.run(
        [sys.executable, str(tmp_path / 'run.py'), str(file), str(picture), '--out-dir', str(out),
         '--score-thr', '0.05'], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert any(name in result.stdout for name in NAMES)
    drawn, source = cv2.imread(str(out / 'picture.png')), cv2.imread(str(picture))
    assert drawn.shape == (9 * 64, 9 * 96, 3)
    enlarged = cv2.resize(source, (9 * 96, 9 * 64), interpolation=cv2.INTER_CUBIC)
    assert (drawn != enlarged).any(-1).mean() > .05


def test_the_demo_resizes_as_mmcv_does(tool):
    demo = tool('onnx_demo')
    pixels = np.random.default_rng(0).integers(0, 256, (30, 47, 3), dtype=np.uint8)
    for height, width in ((64, 100), (13, 20), (30, 47)):
        expected = cv2.resize(pixels, (width, height), interpolation=cv2.INTER_LINEAR)
        difference = np.abs(demo.resize(pixels, height, width).astype(int) - expected)
        assert difference.max() <= 1


def test_the_demo_maps_boxes_and_masks_back(tool, exported, picture, tmp_path):
    """An image of twice the size has the same detections at twice the coordinates."""
    detector = tool('onnx_demo').Detector(str(exported('mask')[0]))
    small = cv2.imread(str(picture))[..., ::-1]
    found = detector(small)
    large = detector(small.repeat(2, 0).repeat(2, 1))
    count = min(4, len(found['boxes']))
    np.testing.assert_allclose(large['boxes'][:count], 2 * found['boxes'][:count], atol=.5)
    assert large['masks'].shape[1:] == (128, 192)
    same = found['masks'][:count].repeat(2, 1).repeat(2, 2) == large['masks'][:count]
    assert same.mean() > .99


def test_a_wrong_file_is_removed(tool, exported, tmp_path, monkeypatch, capsys):
    """The check sees other weights, and the tool keeps no file that fails."""
    file, _ = exported('box')
    config = write_config(tmp_path, 'box')
    good = onnx.load(file)
    weight, = (x for x in good.graph.initializer if x.name.endswith('retina_reg.weight'))
    values = onnx.numpy_helper.to_array(weight)
    weight.CopyFrom(onnx.numpy_helper.from_array(values * np.float32(2), weight.name))
    export = tool('export_onnx')
    monkeypatch.setattr(export, 'write', lambda model, size, out, **_: onnx.save(good, out))
    out = tmp_path / 'wrong.onnx'
    assert export.main([str(config), str(file.with_suffix('.pth')), '--out', str(out),
                        '--check']) == 2
    assert 'was removed, the export is not good' in capsys.readouterr().err
    assert not out.exists()


def test_refusals(tool, make_config, tmp_path, capsys):
    config, out = str(make_config()), str(tmp_path / 'x.onnx')
    for args, message in (
        (['gone.py'], 'config gone.py does not exist'),
        ([config, 'gone.pth'], 'checkpoint gone.pth does not exist'),
        ([config, '--cfg-options', 'model.type=ATSS'], '--features exports backbone and neck'),
        ([config, '--cfg-options', 'model.test_cfg.nms_pre=-1'], 'got nms_pre=-1'),
        ([config, '--cfg-options', 'model.test_cfg.nms.type=soft_nms'], "must be of type 'nms'"),
        ([str(write_config(tmp_path, 'box')), '--features', '--dynamic', '--cfg-options',
          'model.backbone.pool_ratio=[8,4,2,1]'], 'give --size instead of --dynamic'),
    ):
        assert tool('export_onnx').main([*args, '--out', out]) == 2
        assert message in capsys.readouterr().err
    assert not Path(out).exists()


@pytest.mark.parametrize('kind', [pytest.param('box', marks=pytest.mark.soak), 'mask'])
def test_one_file_for_all_sizes(tool, kind, tmp_path, capsys):
    """The tool's own check at three sizes, and the demo within what such a file takes."""
    config = write_config(tmp_path, kind)
    file = config.with_suffix('.onnx')
    assert tool('export_onnx').main([str(config), str(write_checkpoint(config)), '--out',
                                     str(file), '--dynamic', '--check']) == 0
    said = capsys.readouterr().out
    counts = [int(count) for count in re.findall(r'(\d+) detections, boxes', said)]
    assert len(counts) == 3 and min(counts) > 4
    demo = tool('onnx_demo')
    detector = demo.Detector(str(file))
    assert detector.size == (None, None)
    image = np.random.default_rng(0).integers(0, 256, (200, 260, 3), dtype=np.uint8)
    for keep_ratio, size in ((True, r'64 x 83'), (False, r'64 x 96')):
        detector.metadata['keep_ratio'] = keep_ratio
        with pytest.raises(demo.DemoError, match=f'become {size}, and .* from 193 pixels'):
            detector(image)
    detector.metadata['scale'] = None
    found = detector(image)
    assert len(found['boxes']) == len(found['scores']) > 0
    if kind == 'mask':
        assert found['masks'].shape[1:] == (200, 260)


def test_refusals_of_the_demo(tool, exported, picture, tmp_path, capsys):
    text = tmp_path / 'text.png'
    text.write_text('no image')
    file, out = str(exported('box')[0]), str(tmp_path / 'out')
    for args, message in (
        (['gone.onnx', str(picture)], 'model gone.onnx does not exist'),
        ([str(text), str(picture)], 'cannot be loaded'),
        ([file, 'gone.png'], 'image gone.png does not exist'),
        ([file, str(text)], 'cannot be read as an image'),
        ([file, str(picture), str(picture)], 'is the name of several'),
        ([file, str(picture), '--out-dir', str(tmp_path)], 'would replace an image'),
    ):
        folder = [] if '--out-dir' in args else ['--out-dir', out]
        assert tool('onnx_demo').main([*args, *folder]) == 2
        error = capsys.readouterr().err
        assert error.startswith('error: ')
        assert message in error


GUIDE = (TOOLS.parent / 'docs' / 'deploy.md').read_text()


def test_commands_of_the_guide(tool):
    commands = [shlex.split(line) for line in GUIDE.replace('\\\n', ' ').splitlines()
                if line.startswith('.venv/bin/python tools/')]
    names = [Path(command[1]).stem for command in commands]
    assert names == ['export_onnx', 'onnx_demo']
    for name, command in zip(names, commands, strict=True):
        tool(name).build_parser().parse_args(command[2:])


def test_program_of_the_guide(exported, picture, tool):
    """As printed, with this test's file and image."""
    tool('onnx_demo')
    program = re.search(r'```python\n(from onnx_demo.*?)```', GUIDE, re.DOTALL)[1]
    for path, own in (('work_dirs/demo/shapes.onnx', exported('mask')[0]),
                      ('data/shapes/val/000001.png', picture)):
        assert path in program
        program = program.replace(path, str(own))
    names: dict = {}
    exec(program, names)
    assert names['found']['masks'].shape[1:] == (64, 96)


def test_export_of_the_guide():
    """As printed, but for the size of the model."""
    program = re.search(r'```python\n(import torch\n.*?)```', GUIDE, re.DOTALL)[1]
    assert "arch='tiny'" in program
    small = dict(embed_dims=(8, ) * 4, depths=(1, ) * 4, num_heads=(1, ) * 4, mlp_ratios=(1, ) * 4)
    names: dict = {}
    exec(program.replace("'tiny'", repr(small)), names)
    image = torch.rand(1, 3, 224, 260)
    with torch.no_grad():
        for got, want in zip(names['program'].module()(image), names['model'](image),
                             strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert isinstance(names['compiled'], torch._dynamo.OptimizedModule)
