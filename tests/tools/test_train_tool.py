"""``tools/train.py`` and ``tools/test.py``: real runs, options, and refusals before any work."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPO = Path(__file__).resolve().parents[2]


def metrics(path: Path) -> dict[str, float]:
    """The last COCO metrics that a run wrote below ``path``."""
    files = sorted(path.glob('*/vis_data/scalars.json')) + sorted(path.glob('*/*.json'))
    for file in files:
        for line in reversed(file.read_text().splitlines()):
            found = {key: value for key, value in json.loads(line).items()
                     if key.startswith('coco/')}
            if found:
                return found
    raise AssertionError(f'no COCO metrics in {files}')


def test_training_leaves_a_complete_work_dir(trained):
    assert trained['checkpoint'].is_file()
    assert list(trained['work_dir'].glob('*/*.log'))
    meta = torch.load(trained['checkpoint'], weights_only=False)['meta']
    assert tuple(meta['dataset_meta']['classes']) == ('nut', 'fig', 'date')
    log = next(trained['work_dir'].glob('*/*.log')).read_text()
    assert ('warm-up shortened from 500 to 2 iterations: an epoch of this data is 2 iterations '
            '(4 images, batch size 2, 1 process)') in log


def test_the_dumped_config_needs_no_flags(tool, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = trained['root']
    flags = ['--data', str(root), '--train-ann', 'train.json', '--val-ann', 'val.json',
             '--img-prefix', 'images']
    predictions, results = [], []
    for name, args in (('dumped', [trained['dumped']]), ('flags', [trained['config'], *flags])):
        status = tool('test').main([
            str(args[0]), str(trained['checkpoint']), *args[1:], '--work-dir', name, '--out',
            f'{name}.pkl'])
        assert status == 0
        results.append(metrics(Path(name)))
        predictions.append(pickle.loads(Path(f'{name}.pkl').read_bytes()))
    assert results[0] == results[1] == metrics(trained['work_dir'])
    assert {'coco/bbox_mAP', 'coco/segm_mAP'} <= set(results[0])
    assert len(predictions[0]) == 4
    for one, other in zip(*predictions, strict=True):
        assert len(one['pred_instances']['scores']) > 0
        torch.testing.assert_close(one['pred_instances']['bboxes'],
                                   other['pred_instances']['bboxes'], rtol=0, atol=0)


def test_resume_goes_on(tool, trained, tmp_path, capfd):
    work_dir = tmp_path / 'resumed'
    work_dir.mkdir()
    checkpoint = work_dir / 'epoch_1.pth'
    checkpoint.write_bytes(trained['checkpoint'].read_bytes())
    (work_dir / 'last_checkpoint').write_text(str(checkpoint))
    status = tool('train').main([
        str(trained['dumped']), '--work-dir', str(work_dir), '--resume', '--cfg-options',
        'train_cfg.max_epochs=2'])
    assert status == 0
    log = next(work_dir.glob('*/*.log')).read_text()
    assert 'Epoch(train) [2][2/2]' in log
    assert 'Epoch(train) [1]' not in log
    assert f'checkpoints and the complete config: {work_dir}' in capfd.readouterr().out


def test_two_processes_on_a_cpu(make_config, data_flags, tmp_path):
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    run = subprocess.run(
        [str(REPO / 'tools' / 'dist_train.sh'), str(make_config('box')), '2', *data_flags,
         '--work-dir', str(tmp_path / 'run')],
        cwd=tmp_path, capture_output=True, text=True, timeout=240,
        env={**os.environ, 'PYTHON': sys.executable, 'PORT': str(port), 'OMP_NUM_THREADS': '1',
             'CUDA_VISIBLE_DEVICES': ''})
    assert run.returncode == 0, run.stderr[-2000:]
    assert 'Epoch(train) [1][1/1]' in run.stdout + run.stderr
    assert run.stdout.count('checkpoints and the complete config:') == 1
    assert (tmp_path / 'run' / 'epoch_1.pth').is_file()


def test_without_coco_one_message_from_any_folder(tmp_path):
    run = subprocess.run(
        [sys.executable, str(REPO / 'tools' / 'train.py'),
         str(REPO / 'configs' / 'mask_rcnn_laplacian_t.py')],
        cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 2
    for text in ('data/coco/annotations/instances_train2017.json', 'data/coco/train2017',
                 'data/coco/val2017', str(tmp_path), 'COCO 2017', 'https://cocodataset.org',
                 '--data ROOT', '`make demo` needs no data'):
        assert text in run.stderr
    assert run.stderr.startswith('error: ')
    assert 'Traceback' not in run.stderr
    assert list(tmp_path.iterdir()) == []


def test_without_coco_no_model_is_built(refused, make_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = refused('train', make_config())
    assert '`make demo` needs no data' in error
    assert not Path('work_dirs').exists()


def test_without_demo_data_the_generator_is_named(refused, make_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = make_config('box', "train_dataloader['dataset']['data_root'] = 'data/shapes/'")
    error = refused('train', config)
    assert 'data/shapes/annotations' in error
    assert 'python tools/make_shapes_dataset.py' in error
    assert 'make demo' in error


def test_options_reach_the_config(final_config, make_config, data_flags, tmp_path):
    cfg = final_config(make_config(), *data_flags, '--auto-scale-lr', '--work-dir',
                       tmp_path / 'run', '--cfg-options', 'train_dataloader.batch_size=1',
                       'train_cfg.max_epochs=7')
    assert cfg.work_dir == str(tmp_path / 'run')
    assert cfg.auto_scale_lr.enable is True
    assert cfg.train_cfg.max_epochs == 7
    assert cfg.launcher == 'none'
    # Batch size 1 doubles the iterations of an epoch.
    assert cfg.param_scheduler[0].end == 4


def test_cfg_options_win_over_data(final_config, make_config, data_flags, data_root):
    other = data_root / 'other.json'
    other.write_bytes((data_root / 'train.json').read_bytes())
    cfg = final_config(make_config(), *data_flags, '--cfg-options', 'param_scheduler.0.end=3',
                       f'train_dataloader.dataset.ann_file={other}')
    assert cfg.param_scheduler[0].end == 3
    assert cfg.train_dataloader.dataset.ann_file == str(other)


def test_work_dir_follows_the_config(final_config, make_config, data_flags):
    assert final_config(make_config(), *data_flags).work_dir == 'work_dirs/tiny_box'
    config = make_config('box', "work_dir = 'mine'")
    assert final_config(config, *data_flags).work_dir == 'mine'


def test_resume_options(final_config, make_config, data_flags, tmp_path, capsys):
    checkpoint = tmp_path / 'a.pth'
    torch.save({}, checkpoint)
    cfg = final_config(make_config(), *data_flags, '--resume', checkpoint)
    assert cfg.resume is True
    assert cfg.load_from == str(checkpoint)
    cfg = final_config(make_config(), *data_flags, '--work-dir', tmp_path / 'new', '--resume')
    assert cfg.resume is False
    assert cfg.load_from is None
    assert f'nothing to resume in {tmp_path / "new"}' in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason='a GPU allows mixed precision')
def test_amp_needs_a_gpu(refused, make_config, data_flags):
    error = refused('train', make_config(), *data_flags, '--amp')
    assert '--amp (AmpOptimWrapper) needs a GPU' in error


def test_refusals_of_train(refused, make_config, data_flags, tmp_path, monkeypatch):
    config = make_config()
    assert 'does not exist' in refused('train', tmp_path / 'tiny_bux.py')
    assert f'did you mean {config}?' in refused('train', tmp_path / 'tiny_bux.py')
    assert 'checkpoint gone.pth does not exist' in refused(
        'train', config, *data_flags, '--resume', 'gone.pth')
    work_dir = tmp_path / 'run'
    work_dir.mkdir()
    (work_dir / 'last_checkpoint').write_text('moved.pth')
    assert 'checkpoint moved.pth does not exist' in refused(
        'train', config, *data_flags, '--work-dir', work_dir, '--resume')
    assert 'does not fit the config' in refused(
        'train', config, *data_flags, '--cfg-options', 'param_scheduler.9.end=1')
    assert 'num_classes is 80, but train_dataloader has 3 classes' in refused(
        'train', config, *data_flags, '--cfg-options', 'model.bbox_head.num_classes=80')
    monkeypatch.delenv('RANK', raising=False)
    assert 'start the tool with torchrun' in refused(
        'train', config, *data_flags, '--launcher', 'pytorch')
    config = make_config('box', 'auto_scale_lr = None')
    assert 'auto_scale_lr.base_batch_size' in refused(
        'train', config, *data_flags, '--auto-scale-lr')
    config.write_text('model = dict(')
    assert 'cannot be loaded' in refused('train', config)
    config.write_text("custom_imports = dict(imports=['no_such_module'])")
    assert "needs the Python module 'no_such_module'" in refused('train', config)


def test_refusals_of_test(refused, trained, make_config, data_flags, data_root, content):
    checkpoint = trained['checkpoint']
    assert 'checkpoint gone.pth does not exist' in refused('test', trained['dumped'], 'gone.pth')
    (data_root / 'bad.pth').write_text('no checkpoint')
    assert 'bad.pth cannot be read' in refused(
        'test', trained['dumped'], data_root / 'bad.pth')
    content['categories'][0]['name'] = 'acorn'
    (data_root / 'val.json').write_text(json.dumps(content))
    error = refused('test', trained['config'], checkpoint, '--data', data_root, '--val-ann',
                    'val.json', '--img-prefix', 'images')
    assert 'was trained on the classes nut, fig, date; the data has acorn, fig, date' in error
    assert '--tta merges boxes only' in refused('test', trained['dumped'], checkpoint, '--tta')


def test_a_checkpoint_of_another_model_is_refused(tool, trained, tmp_path, capsys):
    status = tool('test').main([
        str(trained['dumped']), str(trained['checkpoint']), '--work-dir', str(tmp_path),
        '--cfg-options', 'model.neck.out_channels=8', 'model.rpn_head.in_channels=8'])
    assert status == 2
    assert 'does not fit the model of the config' in capsys.readouterr().err


@pytest.mark.parametrize(('name', 'args', 'message'), [
    ('train', ['c.py', '--launcher', 'ssh'], "invalid choice: 'ssh'"),
    ('train', ['c.py', '--cfg-options', 'lr:1'], "expected KEY=VALUE, got 'lr:1'"),
    ('train', ['c.py', '--cfg-options', '=3'], "expected KEY=VALUE, got '=3'"),
    ('train', ['c.py', '--cfg-options', 'a..b=3'], "got 'a..b=3'; KEY is names"),
    ('train', ['c.py', '--cfg-options', 'x=[0,1'], "the brackets of 'x=[0,1' do not match"),
    ('train', ['c.py', '--data', 'own'], '--data needs --train-ann and --val-ann'),
    ('test', ['c.py', 'a.pth', '--data', 'own'], '--data needs --val-ann'),
    ('test', ['c.py', 'a.pth', '--out', 'a.json'], "'a.json' must end in .pkl or .pickle"),
])
def test_usage_errors(tool, capsys, name, args, message):
    with pytest.raises(SystemExit) as exit_info:
        tool(name).main(args)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_flips_at_test_time(tool, make_config, data_flags, no_runner, tmp_path, data_root):
    torch.save(dict(state_dict={}), tmp_path / 'a.pth')
    with pytest.raises(no_runner) as built:
        tool('test').main([str(make_config()), str(tmp_path / 'a.pth'), *data_flags, '--tta'])
    cfg = built.value.args[0]
    assert cfg.model.type == 'DetTTAModel'
    assert cfg.model.module.type == 'RetinaNet'

    from mmdet.registry import DATASETS
    views = DATASETS.build(cfg.test_dataloader.dataset)[0]
    assert [sample.flip for sample in views['data_samples']] == [True, False]
    torch.testing.assert_close(views['inputs'][0], views['inputs'][1].flip(-1))


@pytest.mark.parametrize('name', ['dist_train.sh', 'dist_test.sh'])
def test_launch_scripts_say_how_to_use_them(name):
    run = subprocess.run([str(REPO / 'tools' / name), 'config.py'], capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.startswith('usage: ')


@pytest.fixture
def refused_by_runner(tool, capsys):
    """Like ``refused``, with the runner, which logs before it fails."""

    def run(*args: str | Path) -> str:
        assert tool('train').main([str(arg) for arg in args]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith('error: ')
        return error

    return run


@pytest.mark.parametrize(('option', 'message'), [
    ('model.backbone.depth=19', 'KeyError: invalid depth 19 for resnet (resnet.py, line '),
    ('model.backbone.type=ResNot', 'ResNot is not in the mmdet::model registry'),
    ('train_cfg.max_epoch=1', "unexpected keyword argument 'max_epoch'"),
    ('train_dataloader.batch_size=0', 'batch_size should be a positive integer'),
    ('optim_wrapper.optimizer.lrr=1', "unexpected keyword argument 'lrr'"),
])
def test_constructors_errors_are_one_sentence(refused_by_runner, make_config, data_flags,
                                              tmp_path, option, message):
    config = make_config()
    error = refused_by_runner(config, *data_flags, '--work-dir', tmp_path / 'run',
                              '--cfg-options', option)
    assert error.startswith(f'error: config {config}: ')
    assert message in error


def test_work_dir_that_cannot_be_made(refused_by_runner, make_config, data_flags, tmp_path):
    (tmp_path / 'file').touch()
    error = refused_by_runner(make_config(), *data_flags, '--work-dir', tmp_path / 'file')
    assert error == f'error: work dir {tmp_path / "file"} cannot be made: File exists'


def test_dropped_annotations_stand_in_the_log(tool, make_config, data_flags, data_root, content,
                                              tmp_path):
    content['annotations'][0]['area'] = 0
    (data_root / 'train.json').write_text(json.dumps(content))
    assert tool('train').main([
        str(make_config()), *data_flags, '--work-dir', str(tmp_path / 'run'), '--cfg-options',
        'val_cfg=None', 'val_dataloader=None', 'val_evaluator=None']) == 0
    log = next((tmp_path / 'run').glob('*/*.log')).read_text()
    assert '1 of 8 annotations of' in log
    assert 'first annotation 0: its area is 0' in log


def test_checkpoints_that_cannot_be_read(refused, trained, make_config, data_flags, tmp_path):
    config = make_config()
    cut = tmp_path / 'run' / 'epoch_1.pth'
    cut.parent.mkdir()
    content = trained['checkpoint'].read_bytes()
    cut.write_bytes(content[:len(content) // 2])
    (cut.parent / 'last_checkpoint').write_text(str(cut))
    for args in (['--resume'], ['--resume', cut], ['--cfg-options', f'load_from={cut}']):
        assert f'checkpoint {cut} cannot be read' in refused(
            'train', config, *data_flags, '--work-dir', cut.parent, *args)
    assert 'checkpoint nope.pth does not exist' in refused(
        'train', config, *data_flags, '--cfg-options', 'load_from=nope.pth')
    pretrained = make_config('box', "model['backbone']['init_cfg'] = dict("
                             "type='Pretrained', checkpoint='gone.pth')")
    assert 'checkpoint gone.pth does not exist' in refused('train', pretrained, *data_flags)


@pytest.mark.parametrize('option', ['train_dataloader=None', 'optim_wrapper=None', 'model=None',
                                    'train_dataloader.dataset=None', 'train_cfg=12'])
def test_settings_that_training_needs(refused, make_config, data_flags, option):
    name = option.partition('=')[0]
    assert f'has no {name} (' in refused(
        'train', make_config(), *data_flags, '--amp', '--cfg-options', option)


def test_an_empty_config_is_refused(refused, tmp_path, data_flags):
    config = tmp_path / 'empty.py'
    config.touch()
    checkpoint = tmp_path / 'a.pth'
    torch.save({}, checkpoint)
    for flags in ([], data_flags):
        assert 'has no model' in refused('train', config, *flags)
    assert 'has no model, test_dataloader' in refused('test', config, checkpoint)


@pytest.mark.parametrize(('launcher', 'given', 'message'), [
    ('slurm', {}, 'needs SLURM_PROCID, SLURM_NTASKS, SLURM_NODELIST'),
    ('slurm', dict(SLURM_PROCID='0', SLURM_NTASKS='1'), 'needs SLURM_NODELIST'),
    ('mpi', {}, 'needs OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE'),
])
def test_launchers_need_their_environment(refused, make_config, data_flags, monkeypatch,
                                          launcher, given, message):
    for name in list(os.environ):
        if name.startswith(('SLURM_', 'OMPI_')):
            monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert f'--launcher {launcher} {message}' in refused(
        'train', make_config(), *data_flags, '--launcher', launcher)
