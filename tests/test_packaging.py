"""The wheel: what it holds, and that it serves a config outside the repository."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]

CONFIG = """
_base_ = ['mmdet::_base_/models/retinanet_r50_fpn.py', 'mmdet::_base_/default_runtime.py']
custom_imports = dict(imports=['mmlaplacian'], allow_failed_imports=False)
model = dict(
    backbone=dict(
        _delete_=True,
        type='LaplacianFormer',
        arch=dict(embed_dims=(16, 16, 32, 32), depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2),
                  mlp_ratios=(2, 2, 2, 2)),
        out_indices=(1, 2, 3)),
    neck=dict(in_channels=[16, 32, 32], out_channels=16, start_level=0),
    bbox_head=dict(num_classes=1, in_channels=16, feat_channels=16, stacked_convs=1))
train_dataloader = dict(
    batch_size=2, num_workers=0, sampler=dict(type='InfiniteSampler'),
    dataset=dict(
        type='CocoDataset', data_root='.', ann_file='train.json', data_prefix=dict(img=''),
        metainfo=dict(classes=('square', )),
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadAnnotations', with_bbox=True),
            dict(type='PackDetInputs')]))
train_cfg = dict(type='IterBasedTrainLoop', max_iters=1, val_interval=1)
optim_wrapper = dict(optimizer=dict(type='AdamW', lr=1e-4))
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(by_epoch=False, interval=1))
log_processor = dict(by_epoch=False, window_size=1)
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a command with Python's search path as a user has it; returns what it printed."""
    result = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True,
                            check=False, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope='module')
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the repository."""
    folder = tmp_path_factory.mktemp('wheel')
    source = folder / 'source'
    shutil.copytree(ROOT / 'mmlaplacian', source / 'mmlaplacian',
                    ignore=shutil.ignore_patterns('__pycache__'))
    for name in ('cuda', 'tests', 'tools', 'configs'):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns('__pycache__'))
    for name in ('pyproject.toml', 'setup.cfg', 'README.md', 'LICENSE'):
        shutil.copy(ROOT / name, source / name)
    run(sys.executable, '-m', 'pip', 'wheel', '--no-deps', '--no-build-isolation', '--no-index',
        '--wheel-dir', folder, '.', cwd=source)
    wheels = list(folder.glob('*.whl'))
    assert len(wheels) == 1
    return wheels[0]


@pytest.fixture(scope='module')
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith('.dist-info/METADATA'))
        return message_from_bytes(archive.read(name))


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    info = f'{wheel.name.removesuffix("-py3-none-any.whl")}.dist-info'
    assert wheel.name.endswith('-py3-none-any.whl')
    assert {name for name in names if not name.startswith(f'{info}/')} == {
        *(path.relative_to(ROOT).as_posix() for path in (ROOT / 'mmlaplacian').rglob('*.py')),
        *(f'mmlaplacian/cuda_src/{path.name}' for path in (ROOT / 'cuda').glob('*.cu*')),
        *(f'mmlaplacian/cpu_src/{path.name}' for path in (ROOT / 'mmlaplacian/cpu_src').iterdir())}
    assert any(Path(name).name == 'LICENSE' for name in names)


def test_wheel_requires_torch_alone_and_bounds_nothing(metadata: Message) -> None:
    requirements = metadata.get_all('Requires-Dist')
    assert [text for text in requirements if 'extra ==' not in text] == ['torch']
    optional = [text for text in requirements if 'extra == "lint"' not in text]
    assert not any(sign in text.partition(';')[0] for text in optional for sign in '<=~!')
    assert metadata['Requires-Python'] == '>=3.10'
    assert set(metadata.get_all('Provides-Extra')) == {'openmmlab', 'segmentation', 'cuda12',
                                                       'cuda13', 'deploy', 'test', 'bench',
                                                       'lint'}


def test_wheel_has_the_version_of_the_package(metadata: Message) -> None:
    from mmlaplacian import __version__

    assert metadata['Name'] == 'mmlaplacian'
    assert metadata['Version'] == __version__


def test_installed_wheel_trains_a_config_outside_the_repo(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / 'venv'
    venv.create(environment, with_pip=False)
    python = environment / 'bin' / 'python'
    run(sys.executable, '-m', 'pip', '--python', python, 'install', '--no-deps', '--no-index',
        wheel, cwd=tmp_path)
    # A folder named in a .pth file is searched after the venv's own packages, and the .pth files
    # in that folder, the editable install among them, are not read.
    own_packages = Path(run(python, '-c', "import sysconfig; print(sysconfig.get_path('purelib'))",
                            cwd=tmp_path).strip())
    (own_packages / 'shared.pth').write_text(sysconfig.get_path('purelib') + '\n')

    project = tmp_path / 'project'
    project.mkdir()
    (project / 'config.py').write_text(CONFIG)
    rng = np.random.default_rng(0)
    images, annotations = [], []
    for index in (1, 2):
        pixels = rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)
        pixels[16:48, 16:48] = 255
        Image.fromarray(pixels).save(project / f'{index}.png')
        images.append(dict(id=index, file_name=f'{index}.png', width=64, height=64))
        annotations.append(dict(id=index, image_id=index, category_id=1, bbox=[16, 16, 32, 32],
                                area=1024, iscrowd=0))
    (project / 'train.json').write_text(json.dumps(dict(
        images=images, annotations=annotations, categories=[dict(id=1, name='square')])))

    location = run(python, '-c', 'import mmlaplacian; print(mmlaplacian.__file__)', cwd=project)
    assert own_packages in Path(location.strip()).parents
    text = run(python, '-c', 'from mmlaplacian.ops.cupy_runtime import source_text; '
               "print(source_text('laplacian_kernel'))", cwd=project)
    assert 'laplacian_kernel_forward' in text
    train = Path(sysconfig.get_path('purelib')) / 'mmdet' / '.mim' / 'tools' / 'train.py'
    run(python, train, 'config.py', '--work-dir', 'work', cwd=project)
    assert (project / 'work' / 'iter_1.pth').is_file()
    scalars = [json.loads(line) for path in (project / 'work').rglob('scalars.json')
               for line in path.read_text().splitlines()]
    assert len(scalars) == 1
    assert np.isfinite(scalars[0]['loss'])
    assert scalars[0]['loss'] > 0
