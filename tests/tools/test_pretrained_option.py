"""``tools/train.py --pretrained``: a file that fits, files that do not, and options against it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mmlaplacian import LaplacianFormer

ARCH = dict(embed_dims=(8, 16, 32, 64), depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2),
            mlp_ratios=(2, 2, 2, 2))
NO_COCO = 'https://cocodataset.org'


@pytest.fixture(scope='module')
def weights() -> dict[str, Tensor]:
    """The tensors of a classifier's backbone: the last stage alone has an output norm."""
    torch.manual_seed(5)
    return LaplacianFormer(ARCH, out_indices=(3, )).state_dict()


@pytest.fixture
def config(make_config: Callable[..., Path]) -> Path:
    """A tiny RetinaNet on the backbone of ``weights``."""
    return make_config('box', f'''
custom_imports = dict(imports=['mmlaplacian'], allow_failed_imports=False)
model['backbone'] = dict(type='LaplacianFormer', arch={ARCH},
                         init_cfg=dict(type='Pretrained', checkpoint=None))''')


@pytest.fixture
def save(tmp_path: Path) -> Callable[[object], Path]:
    def save(content: object) -> Path:
        torch.save(content, tmp_path / 'pretrained.pth')
        return tmp_path / 'pretrained.pth'

    return save


def prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in tensors.items()}


def test_training_starts_from_it_and_testing_needs_it_no_more(
        tool, config, save, weights, data_flags, tmp_path):
    head = {'head.fc.weight': torch.ones(3, 64)}
    averaged = {'steps': torch.tensor(9),
                **prefixed('module.backbone.', {k: torch.zeros_like(v)
                                                for k, v in weights.items()})}
    path = save(dict(state_dict={**prefixed('backbone.', weights), **head},
                     ema_state_dict=averaged))
    work_dir = tmp_path / 'run'
    assert tool('train').main([
        str(config), *data_flags, '--pretrained', str(path), '--work-dir', str(work_dir),
        '--cfg-options', 'optim_wrapper.optimizer.lr=0', 'custom_hooks=[]']) == 0
    log = next(work_dir.glob('*/*.log')).read_text()
    assert (f'loaded {len(weights)} of {len(weights) + 6} tensors of LaplacianFormer from {path}, '
            'averaged weights (EMA); not in the file: norm0.weight') in log
    # The averaged weights are in state_dict, where EMAHook puts them; lr 0 leaves them there.
    trained = torch.load(work_dir / 'epoch_1.pth', weights_only=False)['state_dict']
    for name, value in weights.items():
        assert torch.equal(trained[f'backbone.{name}'], value), name
    path.unlink()
    assert tool('test').main([
        str(work_dir / 'tiny_box.py'), str(work_dir / 'epoch_1.pth'), '--work-dir',
        str(tmp_path / 'test')]) == 0


@pytest.mark.parametrize('content', [
    lambda w: w,
    lambda w: dict(model=w),
    lambda w: dict(state_dict=prefixed('backbone.', w)),
    lambda w: dict(state_dict=prefixed('module.backbone.', w)),
    lambda w: prefixed('module.', w),
])
def test_files_that_fit(final_config, config, save, weights, data_flags, content):
    path = save(content(weights))
    backbone = final_config(config, *data_flags, '--pretrained', path).model.backbone
    assert backbone.init_cfg == dict(type='Pretrained', checkpoint=str(path))


def test_the_demo_detector_takes_its_classifier(refused, classifier, tmp_path, monkeypatch):
    """Its data are missing here: what is refused first is not the checkpoint."""
    monkeypatch.chdir(tmp_path)
    demo = Path(__file__).resolve().parents[2] / 'configs' / 'demo'
    error = refused('train', demo / 'mask_rcnn_laplacian_shapes.py', '--pretrained',
                    classifier['checkpoint'])
    assert 'tools/make_shapes_dataset.py' in error


@pytest.mark.parametrize(('content', 'message'), [
    (lambda w: {}, 'no tensor of {path!r} matches LaplacianFormer'),
    (lambda w: dict(state_dict={'layer1.0.conv1.weight': torch.ones(3)}),
     'it has layer1.0.conv1.weight, the model has stages.0.patch_embed.proj.weight'),
    (lambda w: {**w, 'norm3.weight': torch.ones(7)},
     '{path!r} was made for another LaplacianFormer: norm3.weight (7,) in the file, (64,) here'),
    (lambda w: [1, 2], 'checkpoint {path} holds a list, not a dict of weights'),
])
def test_files_that_do_not_fit_stop_before_the_data(refused, config, save, weights, content,
                                                    message):
    """The data are missing too, but the file is looked at first."""
    path = save(content(weights))
    error = refused('train', config, '--pretrained', path)
    assert message.format(path=path if '!r' not in message else str(path)) in error
    assert NO_COCO not in error and error.count('\n') == 1


def test_missing_and_unreadable_files(refused, config, tmp_path):
    for name in ('gone.pth', '', str(tmp_path)):
        assert f'checkpoint {name} does not exist' in refused(
            'train', config, '--pretrained', name)
    (tmp_path / 'text.pth').write_text('no checkpoint')
    error = refused('train', config, '--pretrained', tmp_path / 'text.pth')
    assert 'text.pth cannot be read' in error and error.count('\n') == 1


def test_a_file_named_by_the_config_is_looked_at_too(refused, config, save):
    path = save({})
    assert f'no tensor of {str(path)!r} matches' in refused(
        'train', config, '--cfg-options', f'model.backbone.init_cfg.checkpoint={path}')


def test_options_against_it(refused, config, make_config, save, weights, tmp_path):
    path = save(weights)
    assert '--pretrained and --resume exclude each other' in refused(
        'train', config, '--pretrained', path, '--resume')
    assert f'load_from={path} replaces all weights' in refused(
        'train', config, '--pretrained', path, '--cfg-options', f'load_from={path}')
    assert 'needs a LaplacianFormer as model.backbone of the config, which has ResNet' in refused(
        'train', make_config('box'), '--pretrained', path)


def test_other_rules_of_drawing_are_kept(final_config, config, save, weights, data_flags):
    path = save(weights)
    config.write_text(config.read_text() + '''
model['backbone']['init_cfg'] = [
    dict(type='Constant', layer='Linear', val=0.5), dict(type='Pretrained', checkpoint='old.pth')]
''')
    backbone = final_config(config, *data_flags, '--pretrained', path).model.backbone
    assert backbone.init_cfg == [dict(type='Constant', layer='Linear', val=0.5),
                                 dict(type='Pretrained', checkpoint=str(path))]
