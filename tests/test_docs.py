"""README and docs: every command and Python block is run, here or by the test that is named."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.logging import MessageHub, MMLogger
from mmengine.registry import MODELS, DefaultScope
from mmengine.visualization import Visualizer
from torch import Tensor, nn

from mmlaplacian import LaplacianFormer

REPO = Path(__file__).resolve().parents[1]
# tests/tools/test_export_onnx.py runs what deploy.md prints.
PAGES = [REPO / 'README.md', REPO / 'docs/claims/README.md',
         *sorted(page for page in (REPO / 'docs').glob('*.md') if page.name != 'deploy.md')]
PYTHON = '.venv/bin/python'
CLASSES = ('nut', 'fig', 'date')

# A command that matches a pattern is run, at reduced size, by the test beside it, or needs what
# is named instead.
HERE = 'tests/test_docs.py::'
TRAIN = 'tests/tools/test_train_tool.py::'
COVERED = {
    r'make (demo|test|bench|claims)$': HERE + 'test_make_knows_its_targets',
    r'.*tools/train\.py configs/(mask_rcnn|classification/)\w+\.py$': 'COCO or ImageNet',
    r'.*tools/train\.py configs/mask_rcnn_laplacian_t\.py --pretrained CHECKPOINT$': 'COCO',
    r'.*tools/train\.py configs/mask_rcnn_laplacian_t\.py --amp .*': 'COCO and a GPU',
    r'.*tools/test\.py configs/.*': 'COCO',
    r'(NNODES=.*)?tools/dist_\w+\.sh configs/.*': 'COCO and several GPUs',
    r'GPUS=.* tools/slurm_train\.sh .*': 'Slurm',
    r'.*tools/train\.py .*--data (ROOT|data/own) .*':
        HERE + 'test_training_commands_reach_the_runner',
    r'.*tools/train\.py work_dirs/own/\S+ --work-dir work_dirs/own --resume$':
        HERE + 'test_training_commands_reach_the_runner',
    r'.*tools/train\.py my_config\.py$': HERE + 'test_training_commands_reach_the_runner',
    r'.*tools/train\.py configs/demo/laplacian_shapes_classification\.py$':
        'tests/tools/test_classification.py::test_it_trains_and_evaluates',
    r'.*tools/train\.py configs/demo/\w+_short\.py --pretrained .*':
        'tests/tools/test_pretrained_option.py::test_the_demo_detector_takes_its_classifier',
    r'.*tools/test\.py my_config\.py .* --tta$': TRAIN + 'test_flips_at_test_time',
    r'.*tools/test\.py work_dirs/own/.*': TRAIN + 'test_the_dumped_config_needs_no_flags',
    r'.*tools/image_demo\.py .*': 'tests/tools/test_image_demo.py::test_pictures_of_own_classes',
    r'.*browse_dataset\.py .*': HERE + 'test_annotations_are_drawn',
    r'.*tools/make_shape_classes\.py$':
        'tests/tools/test_make_shape_classes.py::test_layout_and_pixels',
    r'.*tools/make_shapes_dataset\.py$':
        'tests/tools/test_make_shapes_dataset.py::test_annotations_follow_coco',
    r'.*benchmarks/gpu_check\.sh .*': 'GPU',
    r'.*benchmarks/(cpu_ops|plots)\.py .*':
        'tests/test_benchmarks.py::test_parts_and_plots_at_tiny_sizes',
    r'.*benchmarks/detector_memory\.py .*': HERE + 'test_memory_of_a_training_step',
}
NEEDS = {'COCO', 'COCO and a GPU', 'COCO or ImageNet', 'COCO and several GPUs', 'Slurm', 'GPU'}
# Extends a config that the page names; this test makes and runs the file.
BLOCKS_ELSEWHERE = {'training_options.md':
                    'tests/distributed/test_training_options.py::test_no_block_is_forgotten'}


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    fence = rf'^```{language}\n(.*?)^```'
    return re.findall(fence, page.read_text(encoding='utf-8'), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """The shell commands of a page, continued lines joined, without comments."""
    lines = [line.partition(' #')[0].strip() for text in blocks(page, 'bash')
             for line in re.sub(r'\\\n\s*', '', text).splitlines()]
    return [line for line in lines if line]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r'^```.*?^```', '', page.read_text(encoding='utf-8'),
                  flags=re.MULTILINE | re.DOTALL)


def block(page: str, *words: str) -> str:
    """The one Python block of a page in docs that has all words."""
    found = [text for text in blocks(REPO / 'docs' / page, 'python')
             if all(word in text for word in words)]
    assert len(found) == 1, words
    return found[0]


COMMANDS = [(page.name, command) for page in PAGES for command in commands(page)]
PROGRAMS = [(page, command) for page, command in COMMANDS if command.startswith(PYTHON)]
TRAININGS = [(page, command) for page, command in COMMANDS if any(
    re.fullmatch(pattern, command) for pattern, test in COVERED.items()
    if test.endswith('test_training_commands_reach_the_runner'))]
CONFIGS = [(page.name, text) for page in PAGES if page.name not in BLOCKS_ELSEWHERE
           for text in blocks(page, 'python') if '_base_' in text]
PROGRAM_BLOCKS = [(page.name, text) for page in PAGES if page.name not in BLOCKS_ELSEWHERE
                  for text in blocks(page, 'python') if '_base_' not in text]


@pytest.fixture(autouse=True)
def _isolated() -> Iterator[None]:
    """What builds models and draws leaves scope, loggers and visualizers behind."""
    from mmdet.visualization import DetLocalVisualizer
    registries = [cls._instance_dict for cls in (
        DefaultScope, MMLogger, MessageHub, Visualizer, DetLocalVisualizer)]
    before = [dict(instances) for instances in registries]
    yield
    for instances, kept in zip(registries, before, strict=True):
        instances.clear()
        instances.update(kept)


def load(folder: str, name: str) -> ModuleType:
    """Imports ``FOLDER/NAME.py``, whose imports are its neighbours."""
    if str(REPO / folder) not in sys.path:
        sys.path.append(str(REPO / folder))
    # As in tests/tools: `test` is a standard library package.
    module = 'test_tool' if name == 'test' else name
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, REPO / folder / f'{name}.py')
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    return sys.modules[module]


@pytest.fixture(scope='module')
def backbone_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of the tiny backbone, as ``--pretrained`` takes them."""
    path = tmp_path_factory.mktemp('weights') / 'backbone.pth'
    torch.save(LaplacianFormer('tiny', init_cfg=None).state_dict(), path)
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backbone_file: Path) -> Path:
    """The working folder of the guides: ``configs``, ``data/own``, weights, ``my_config.py``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'configs').symlink_to(REPO / 'configs')
    content = dict(images=[], annotations=[], categories=[
        dict(id=3 + 4 * number, name=name) for number, name in enumerate(CLASSES)])
    for name in ('images', 'train', 'val'):
        (tmp_path / 'data' / 'own' / name).mkdir(parents=True)
    for number in range(10):
        pixels = np.full((48, 64, 3), 40, np.uint8)
        pixels[10:40, 12:50] = 200
        content['images'].append(
            dict(id=number, file_name=f'{number}.png', width=64, height=48))
        content['annotations'].append(dict(
            id=number, image_id=number, category_id=3 + 4 * (number % 3), bbox=[12, 10, 38, 30],
            area=38 * 30, iscrowd=0, segmentation=[[12, 10, 50, 10, 50, 40, 12, 40]]))
        for name in ('images', 'train', 'val'):
            cv2.imwrite(f'data/own/{name}/{number}.png', pixels)
    for name in ('all', 'train', 'val'):
        Path(f'data/own/{name}.json').write_text(json.dumps(content))
    (tmp_path / 'ROOT').symlink_to('data/own')
    for name in ('BACKBONE', 'DETECTOR'):
        (tmp_path / f'{name}.pth').symlink_to(backbone_file)
    (tmp_path / 'my_config.py').write_text(block('own_data.md', 'val_evaluator'))
    return tmp_path


@pytest.mark.parametrize(('page', 'command'), COMMANDS)
def test_every_command_is_covered_once(page: str, command: str) -> None:
    assert sum(re.fullmatch(pattern, command) is not None for pattern in COVERED) == 1


def test_no_stale_entries() -> None:
    for pattern in COVERED:
        assert any(re.fullmatch(pattern, command) for _, command in COMMANDS), pattern
    assert set(BLOCKS_ELSEWHERE) <= {page.name for page in PAGES}


@pytest.mark.parametrize('test', sorted({*COVERED.values(), *BLOCKS_ELSEWHERE.values()} - NEEDS))
def test_named_tests_exist(test: str) -> None:
    path, _, name = test.partition('::')
    tree = ast.parse((REPO / path).read_text(encoding='utf-8'))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_make_knows_its_targets() -> None:
    """Those of the blocks and of the text; make says what it would run, and runs nothing."""
    targets = {target for page in PAGES for target in re.findall(
        r'(?:^|`)make ([\w-]+)', page.read_text(encoding='utf-8'), re.MULTILINE)}
    assert {'demo', 'test', 'bench', 'soak'} <= targets
    made = subprocess.run(['make', '--dry-run', *sorted(targets)], cwd=REPO, capture_output=True,
                          text=True, check=False, timeout=60)
    assert made.returncode == 0, made.stderr


@pytest.mark.parametrize(('page', 'command'), PROGRAMS)
def test_programs_take_these_arguments(page: str, command: str) -> None:
    path, *arguments = shlex.split(command)[1:]
    if '.mim' in path:
        assert len(list(Path(sys.prefix).glob('/'.join(Path(path).parts[1:])))) == 1
        return
    program = load(*path.removesuffix('.py').split('/'))
    build_parser = getattr(program, 'build_parser', None)
    # Parts of make bench share one, which they extend in main.
    if build_parser is not None and build_parser.__module__ == program.__name__:
        build_parser().parse_args(arguments)
    for argument in arguments:
        if argument.startswith('configs/'):
            assert (REPO / argument).is_file()


@pytest.mark.parametrize('command', [c for _, c in COMMANDS if '.sh ' in c])
def test_scripts_and_their_configs_exist(command: str) -> None:
    paths = [word for word in shlex.split(command)
             if word.startswith(('tools/', 'benchmarks/', 'configs/'))]
    assert paths and all((REPO / path).is_file() for path in paths)


class Built(Exception):
    """Raised in place of building the runner; carries the config."""


def final_config(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Config:
    """Runs ``tools/train.py`` through all its checks, up to the runner."""
    train = load('tools', 'train')

    def refuse(cfg: Config, *_: object) -> None:
        raise Built(cfg)

    monkeypatch.setattr(train, 'build_runner', refuse)
    with pytest.raises(Built) as built:
        train.main(arguments)
    return built.value.args[0]


@pytest.mark.parametrize(('page', 'command'), TRAININGS)
def test_training_commands_reach_the_runner(page: str, command: str, folder: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """On ten images, through every check; training itself is what tests/tools do."""
    if page == 'training_options.md':
        # A file of the reader's own, over the config that the page names.
        base, = re.findall("begins\nwith `(_base_ = '[^']+')`", (REPO / 'docs' / page).read_text())
        Path('my_config.py').write_text(base + '\n' + block('own_data.md', 'val_evaluator')
                                        .partition('\n')[2].partition('model =')[0]
                                        + 'model = dict(bbox_head=dict(num_classes=3))\n')
    arguments = shlex.split(command)[2:]
    if arguments[0].startswith('work_dirs/'):
        first = next(c for p, c in TRAININGS if p == page and 'configs/' in c)
        Path('work_dirs/own').mkdir(parents=True)
        final_config(shlex.split(first)[2:], monkeypatch).dump(arguments[0])
        torch.save(dict(state_dict={}, meta={}, message_hub={}), 'work_dirs/own/epoch_1.pth')
        Path('work_dirs/own/last_checkpoint').write_text('work_dirs/own/epoch_1.pth')
    cfg = final_config(arguments, monkeypatch)
    heads = cfg.model.get('roi_head') or cfg.model
    assert heads.bbox_head.num_classes == 3
    assert tuple(cfg.test_dataloader.dataset.metainfo.classes) == CLASSES
    if '--data' in command:
        # Ten images, two an iteration.
        assert cfg.param_scheduler[0].end == 5
    if 'max_epochs=72' in command:
        assert cfg.auto_scale_lr.enable and cfg.train_cfg.max_epochs == 72
        assert cfg.param_scheduler[1].end == 72
        assert list(cfg.param_scheduler[1].milestones) == [54, 66]
    if 'load_from' in command:
        assert cfg.load_from == 'DETECTOR.pth'
    if '--resume' in command:
        assert cfg.resume


def test_annotations_are_drawn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the config that training leaves, on two images."""
    content = json.loads(Path('data/own/train.json').read_text())
    content.update({key: content[key][:2] for key in ('images', 'annotations')})
    Path('data/own/train.json').write_text(json.dumps(content))
    train = next(c for p, c in TRAININGS if p == 'own_data.md' and 'configs/' in c)
    command, = [c for _, c in COMMANDS if 'browse_dataset' in c]
    script, config, *arguments = shlex.split(command)[1:]
    Path(config).parent.mkdir(parents=True)
    final_config(shlex.split(train)[2:], monkeypatch).dump(config)
    path, = Path(sys.prefix).glob('/'.join(Path(script).parts[1:]))
    monkeypatch.setattr(sys, 'argv', [str(path), config, *arguments])
    runpy.run_path(str(path), run_name='__main__')
    drawn = sorted(Path(arguments[arguments.index('--output-dir') + 1]).iterdir())
    assert [image.name for image in drawn] == ['0.png', '1.png']
    plain = [cv2.imread(f'data/own/images/{image.name}') for image in drawn]
    assert all(cv2.imread(str(image)).std() != before.std()
               for image, before in zip(drawn, plain, strict=True))


def leaves(outputs: Tensor | tuple | list) -> Iterator[Tensor]:
    """The tensors of a nest of sequences."""
    if isinstance(outputs, Tensor):
        yield outputs
    else:
        for output in outputs:
            yield from leaves(output)


def head(model: nn.Module) -> nn.Module:
    """The head on the neck's maps: the RPN of a two-stage detector."""
    return next(getattr(model, name) for name in ('rpn_head', 'bbox_head', 'head')
                if hasattr(model, name))


@pytest.mark.parametrize(('page', 'text'), CONFIGS)
def test_configs_build_and_use_every_map(page: str, text: str, folder: Path) -> None:
    """On the meta device: shapes and graphs without numbers."""
    (folder / 'block.py').write_text(text)
    config = Config.fromfile(folder / 'block.py')
    assert config.custom_imports['imports'] == ['mmlaplacian']
    scope = config.default_scope
    pixels = torch.empty(2, 3, 96, 128, device='meta')
    if scope == 'mmseg':
        # Absent where the extra is: the decoder is tests/configs/test_segmentation.py's.
        with torch.device('meta'):
            maps = MODELS.build(config.model.backbone)(pixels)
        assert [out.shape[1] for out in maps] == config.model.decode_head.in_channels
        assert config.model.decode_head.num_classes == config.model.auxiliary_head.num_classes
        return
    registry = import_module(f'{scope}.registry').MODELS
    with DefaultScope.overwrite_default_scope(scope), torch.device('meta'):
        model = registry.build(config.model).train()
    assert type(model.backbone) is LaplacianFormer
    outputs = head(model)(model.neck(model.backbone(pixels)))
    sum(out.square().sum() for out in leaves(outputs)).backward()
    for part in (model.backbone, model.neck, head(model)):
        assert [name for name, p in part.named_parameters() if p.grad is None] == []
    if scope == 'mmdet':
        strides = head(model).prior_generator.strides
        with torch.no_grad():
            maps = model.neck(model.backbone(pixels))
        assert [out.shape[-1] for out in maps] == [-(-128 // stride) for stride, _ in strides]


def test_layer_decay_is_this_projects() -> None:
    assert block('custom_configs.md', 'layer_decay_rate').count('LayerDecayOptimWrapper') == 1
    from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
    found = OPTIM_WRAPPER_CONSTRUCTORS.get('LayerDecayOptimWrapperConstructor')
    assert found.__module__.startswith('mmlaplacian.')


@pytest.mark.parametrize(('page', 'text'), PROGRAM_BLOCKS)
def test_programs_of_the_pages_run(page: str, text: str, folder: Path) -> None:
    exec(compile(text, page, 'exec'), {})


def test_split_shares_no_image(folder: Path) -> None:
    exec(compile(block('own_data.md', 'shuffle'), 'own_data.md', 'exec'), {})
    parts = {name: json.loads(Path(f'data/own/{name}.json').read_text())
             for name in ('train', 'val')}
    images = {name: {image['id'] for image in part['images']} for name, part in parts.items()}
    assert {name: len(ids) for name, ids in images.items()} == dict(train=8, val=2)
    assert images['train'] | images['val'] == set(range(10))
    for name, part in parts.items():
        assert {ann['image_id'] for ann in part['annotations']} == images[name]
        assert [entry['name'] for entry in part['categories']] == list(CLASSES)


MISTAKES = re.findall(r'^\| `(.+?)` \| `(.+?)` \|$',
                      (REPO / 'docs' / 'custom_configs.md').read_text(), re.MULTILINE)


def test_there_are_mistakes() -> None:
    assert len(MISTAKES) >= 10


@pytest.mark.parametrize(('arguments', 'message'), MISTAKES)
def test_common_mistakes_have_these_messages(arguments: str, message: str) -> None:
    keywords = eval(f'dict({arguments})')
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        LaplacianFormer(**keywords)


def test_memory_of_a_training_step() -> None:
    """That of the table's script, with the demo's model: recomputed blocks need less."""
    script = load('benchmarks', 'detector_memory')
    figures = {}
    for with_cp in (False, True):
        config = Config.fromfile(REPO / 'configs' / 'demo' / 'mask_rcnn_laplacian_shapes.py')
        config.model.backbone.with_cp = with_cp
        figures[with_cp] = script.measure(config, 2, (128, 192), amp=False)
    with torch.device('meta'):
        weights = 4 * sum(p.numel() for p in MODELS.build(config.model.backbone).parameters())
    # Weights and AdamW's two averages of them, of the heads too.
    assert figures[False][0] == figures[True][0] > 3 * weights
    assert figures[False][1] > 1.2 * figures[True][1] > figures[True][0]


def test_rows_of_the_memory_tables_are_options() -> None:
    page = (REPO / 'docs' / 'small_gpus.md').read_text()
    rows = re.findall(r'^\| `(--.+?)` \|', page, re.MULTILINE)
    assert len(rows) >= 5
    for row in rows:
        options = load('benchmarks', 'detector_memory').build_parser().parse_args(
            ['configs/mask_rcnn_laplacian_t.py', *shlex.split(row)])
        for key in options.cfg_options or {}:
            assert key in ('model.backbone.with_cp', 'model.backbone.frozen_stages',
                           'optim_wrapper.accumulative_counts')


def test_memory_of_proposals_in_bfloat16_is_refused(capsys: pytest.CaptureFixture) -> None:
    script = load('benchmarks', 'detector_memory')
    with pytest.raises(SystemExit):
        script.main([str(REPO / 'configs' / 'mask_rcnn_laplacian_t.py'), '--amp'])
    assert '--amp needs a one-stage detector' in capsys.readouterr().err


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_to_files(page: Path) -> None:
    text = prose(page)
    for target in re.findall(r'\]\(([^)\s]+)\)', text):
        if '://' not in target:
            assert (page.parent / target.partition('#')[0]).exists(), target
    folders = 'benchmarks|configs|cuda|docs|mmlaplacian|tests|tools'
    for path in re.findall(rf'`((?:{folders})/[\w./-]+)', text):
        assert (REPO / path).exists(), path
