"""The shapes data set holds what its docstring guarantees, measured on the written files."""
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import cv2
import numpy as np
import pytest
from pycocotools import mask as coco_mask

SCRIPT = Path(__file__).resolve().parents[2] / 'tools' / 'make_shapes_dataset.py'
NUM_TRAIN, NUM_VAL, SIZE = 40, 16, 128
# pycocotools with NumPy 2
pytestmark = pytest.mark.filterwarnings('ignore:__array__ implementation:DeprecationWarning')


@pytest.fixture(scope='module')
def tool(tool: Callable[[str], ModuleType]) -> ModuleType:
    return tool('make_shapes_dataset')


@pytest.fixture(scope='module')
def dataset(tool: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp('shapes') / 'set'
    assert tool.make_dataset(out, NUM_TRAIN, NUM_VAL, SIZE, 0)
    return out


def load(out: Path, split: str) -> dict[str, Any]:
    return json.loads((out / 'annotations' / f'{split}.json').read_text())


def by_image(content: dict[str, Any]) -> list[list[dict[str, Any]]]:
    groups = {image['id']: [] for image in content['images']}
    for annotation in content['annotations']:
        groups[annotation['image_id']].append(annotation)
    return list(groups.values())


def to_mask(annotation: dict[str, Any], size: int = SIZE) -> np.ndarray:
    runs = coco_mask.frPyObjects(annotation['segmentation'], size, size)
    return coco_mask.decode(coco_mask.merge(runs)).astype(bool)


def read_image(out: Path, split: str, index: int) -> np.ndarray:
    return cv2.imread(str(out / split / f'{index + 1:06d}.png'))


def snapshot(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes()
            for path in sorted(out.rglob('*')) if path.is_file()}


def cli(tool: ModuleType, out: Path, **options: Any) -> int:
    arguments = {'num-train': 3, 'num-val': 2, **options}
    return tool.main(['--out', str(out)]
                     + [f'--{name}={value}' for name, value in arguments.items()])


@pytest.mark.parametrize(('split', 'count'), [('train', NUM_TRAIN), ('val', NUM_VAL)])
def test_annotations_follow_coco(dataset: Path, split: str, count: int) -> None:
    content = load(dataset, split)
    assert [(c['id'], c['name']) for c in content['categories']] == [
        (1, 'circle'), (2, 'square'), (3, 'triangle')]
    assert [image['id'] for image in content['images']] == list(range(1, count + 1))
    ids = [annotation['id'] for annotation in content['annotations']]
    assert len(set(ids)) == len(ids)
    assert {a['category_id'] for a in content['annotations']} == {1, 2, 3}
    assert {a['iscrowd'] for a in content['annotations']} == {0}
    files = {path.name for path in (dataset / split).iterdir()}
    assert files == {image['file_name'] for image in content['images']}
    for index, image in enumerate(content['images']):
        pixels = read_image(dataset, split, index)
        assert pixels.shape == (image['height'], image['width'], 3) == (SIZE, SIZE, 3)


@pytest.mark.parametrize('split', ['train', 'val'])
def test_objects_keep_their_number_and_size(dataset: Path, split: str) -> None:
    for annotations in by_image(load(dataset, split)):
        assert 3 <= len(annotations) <= 6
        for annotation in annotations:
            left, top, width, height = annotation['bbox']
            assert 12 <= max(width, height) <= 64
            assert min(width, height) >= 8
            assert min(left, top) >= 0
            assert max(left + width, top + height) <= SIZE


@pytest.mark.parametrize('split', ['train', 'val'])
def test_box_and_area_belong_to_the_mask(dataset: Path, split: str) -> None:
    for annotation in load(dataset, split)['annotations']:
        points = np.concatenate(annotation['segmentation']).reshape(-1, 2)
        left, top, width, height = annotation['bbox']
        np.testing.assert_allclose([left, top], points.min(axis=0), atol=0.011)
        np.testing.assert_allclose([left + width, top + height], points.max(axis=0), atol=0.011)
        # The boundary pixels limit how well pixels can measure an area.
        mask = to_mask(annotation)
        perimeter = 2 * (width + height)
        assert abs(mask.sum() - annotation['area']) <= 0.05 * annotation['area'] + 0.1 * perimeter


def test_polygons_give_back_the_drawn_masks(tool: ModuleType, dataset: Path) -> None:
    ious = []
    for index, annotations in enumerate(by_image(load(dataset, 'train'))):
        sample = tool.make_sample(0, 'train', index, SIZE)
        assert len(annotations) == len(sample.shapes) == sample.labels.max()
        masks = [to_mask(annotation) for annotation in annotations]
        for number, mask in enumerate(masks, start=1):
            drawn = sample.labels == number
            ious.append((mask & drawn).sum() / (mask | drawn).sum())
    assert np.mean(ious) >= 0.98
    assert min(ious) >= 0.85  # a sliver of few pixels may lose some of them


def test_at_least_a_fifth_of_the_objects_is_overlapped(dataset: Path) -> None:
    """Regions of overlapping shapes share a border; the others are 2 px apart."""
    cross = cv2.getStructuringElement(cv2.MORPH_CROSS, (3, 3))
    for split in ('train', 'val'):
        overlapped = total = 0
        for annotations in by_image(load(dataset, split)):
            masks = [to_mask(annotation) for annotation in annotations]
            grown = [cv2.dilate(mask.astype(np.uint8), cross).astype(bool) for mask in masks]
            touched = [any((grown[i] & masks[j]).sum() >= 3
                           for j in range(len(masks)) if j != i) for i in range(len(masks))]
            assert sum(touched) >= 2
            overlapped += sum(touched)
            total += len(masks)
        assert overlapped / total >= 0.2


def test_overlap_is_real_and_leaves_shapes_recognisable(tool: ModuleType) -> None:
    for index in range(20):
        sample = tool.make_sample(5, 'train', index, SIZE)
        full = []
        for shape in sample.shapes:
            points = np.round(np.asarray(shape.outline.exterior.coords) * 16 - 8)
            full.append(cv2.fillPoly(np.zeros((SIZE, SIZE), np.uint8),
                                     [points.astype(np.int32)], 1, shift=4).astype(bool))
        covered = [any((full[i] & full[j]).sum() >= 0.08 * min(full[i].sum(), full[j].sum())
                       for j in range(len(full)) if j != i) for i in range(len(full))]
        assert sum(covered) >= 2
        for number, mask in enumerate(full, start=1):
            assert (sample.labels == number).sum() >= 0.33 * mask.sum()
        assert all(12 <= shape.side <= 64 for shape in sample.shapes)


def test_objects_differ_in_colour_from_the_background(tool: ModuleType) -> None:
    distances = []
    for index in range(20):
        sample = tool.make_sample(1, 'train', index, SIZE)
        background = sample.image[sample.labels == 0].mean(axis=0)
        for number in range(1, len(sample.shapes) + 1):
            colour = sample.image[sample.labels == number].mean(axis=0)
            distances.append(np.linalg.norm(colour - background))
    assert min(distances) >= 60


def test_backgrounds_are_textured(tool: ModuleType) -> None:
    spreads = []
    for index in range(20):
        sample = tool.make_sample(2, 'train', index, SIZE)
        # The blur removes pixel noise, the quartiles leave out distractor lines.
        smooth = cv2.GaussianBlur(sample.image.astype(float), (0, 0), 2)[sample.labels == 0]
        low, high = np.percentile(smooth, [25, 75], axis=0)
        spreads.append((high - low).max())
    assert np.median(spreads) > 8


def test_same_arguments_give_the_same_bytes(tool: ModuleType, dataset: Path,
                                            tmp_path: Path) -> None:
    out = tmp_path / 'again'
    tool.make_dataset(out, NUM_TRAIN, NUM_VAL, SIZE, 0)
    assert snapshot(out) == snapshot(dataset)


def test_an_image_does_not_depend_on_the_number_of_images(tool: ModuleType, dataset: Path,
                                                          tmp_path: Path) -> None:
    tool.make_dataset(tmp_path / 'short', 3, 2, SIZE, 0)
    for split, count in (('train', 3), ('val', 2)):
        few, many = load(tmp_path / 'short', split), load(dataset, split)
        assert by_image(few) == by_image(many)[:count]
        for index in range(count):
            np.testing.assert_array_equal(read_image(tmp_path / 'short', split, index),
                                          read_image(dataset, split, index))


def test_splits_and_seeds_differ(tool: ModuleType) -> None:
    images = [tool.make_sample(seed, split, index, SIZE).image.tobytes()
              for seed in (0, 1) for split in ('train', 'val') for index in range(3)]
    assert len(set(images)) == len(images)


def test_image_size_is_kept(tool: ModuleType, tmp_path: Path) -> None:
    assert cli(tool, tmp_path / 'set', **{'image-size': 200}) == 0
    assert read_image(tmp_path / 'set', 'train', 0).shape == (200, 200, 3)
    assert {image['width'] for image in load(tmp_path / 'set', 'val')['images']} == {200}


def test_complete_set_is_left_alone(tool: ModuleType, tmp_path: Path,
                                    capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(tool, tmp_path) == 0
    output = capsys.readouterr().out
    assert '\r' not in output
    assert 'train: 3/3 images' in output
    assert 'overlapped' in output
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob('*')}
    assert cli(tool, tmp_path) == 0
    assert 'nothing to do' in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob('*')} == times


def test_other_arguments_or_a_lost_file_make_it_anew(tool: ModuleType, tmp_path: Path) -> None:
    cli(tool, tmp_path)
    first = snapshot(tmp_path)
    cli(tool, tmp_path, seed=1, **{'num-train': 2})
    second = snapshot(tmp_path)
    assert 'train/000003.png' in first and 'train/000003.png' not in second
    assert first['train/000001.png'] != second['train/000001.png']
    cli(tool, tmp_path)
    assert snapshot(tmp_path) == first
    (tmp_path / 'val' / '000002.png').unlink()
    cli(tool, tmp_path)
    assert snapshot(tmp_path) == first


def test_interrupted_run_keeps_the_set_before_it(tool: ModuleType, tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    cli(tool, tmp_path)
    before = snapshot(tmp_path)
    write_split = tool.write_split

    def interrupted(folder: Path, split: str, *rest: int) -> Any:
        if split == 'val':
            raise KeyboardInterrupt
        return write_split(folder, split, *rest)

    monkeypatch.setattr(tool, 'write_split', interrupted)
    with pytest.raises(KeyboardInterrupt):
        cli(tool, tmp_path, seed=1)
    assert snapshot(tmp_path) == before


def test_set_interrupted_while_replaced_is_made_anew(tool: ModuleType, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    cli(tool, tmp_path)
    before = snapshot(tmp_path)
    replace = os.replace

    def interrupted(source: Path, target: Path) -> None:
        if Path(target).name == 'val':
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, 'replace', interrupted)
        with pytest.raises(KeyboardInterrupt):
            cli(tool, tmp_path, seed=1)
    assert cli(tool, tmp_path) == 0
    assert snapshot(tmp_path) == before


def test_two_at_once_make_one_set(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), '--out', str(tmp_path / 'set'), '--num-train', '60',
               '--num-val', '4']
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for _ in range(2)]
    said = [run.communicate(timeout=120)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    assert sum('already complete' in text for text in said) == 1
    assert len(list((tmp_path / 'set' / 'train').iterdir())) == 60


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    out = tmp_path / 'set'
    process = subprocess.Popen([sys.executable, str(SCRIPT), '--out', str(out)],
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not list(out.rglob('*.png')) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert 'Traceback' not in errors
    assert list(out.iterdir()) == []


@pytest.mark.parametrize(('option', 'value'), [
    ('image-size', 127), ('image-size', 4096), ('num-train', 0), ('num-val', -1), ('seed', -1)])
def test_bad_numbers_are_refused(tool: ModuleType, tmp_path: Path, option: str, value: int,
                                 capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / 'set'
    assert cli(tool, out, **{option: value}) == 2
    errors = capsys.readouterr().err
    assert f'--{option}' in errors and f'got {value}' in errors and errors.count('\n') == 1
    assert not out.exists()


@pytest.mark.parametrize('name', ['notes.txt', 'train/000001.png', 'annotations/train.json'])
def test_foreign_folder_is_refused(tool: ModuleType, tmp_path: Path, name: str,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('mine')
    assert cli(tool, tmp_path) == 2
    errors = capsys.readouterr().err
    assert name.split('/')[0] in errors and errors.count('\n') == 1
    assert snapshot(tmp_path) == {name: b'mine'}


@pytest.mark.parametrize('name', ['notes.txt', 'train/notes.txt', 'annotations/test.json'])
def test_foreign_file_in_an_own_set_is_refused(tool: ModuleType, tmp_path: Path, name: str,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    cli(tool, tmp_path)
    (tmp_path / name).write_text('mine')
    before = snapshot(tmp_path)
    assert cli(tool, tmp_path, seed=1) == 2
    assert name in capsys.readouterr().err
    assert snapshot(tmp_path) == before


def test_out_that_is_a_file_is_refused(tool: ModuleType, tmp_path: Path,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / 'file').write_text('mine')
    assert cli(tool, tmp_path / 'file') == 2
    assert cli(tool, tmp_path / 'file' / 'below') == 2
    assert capsys.readouterr().err.count('\n') == 2
    assert (tmp_path / 'file').read_text() == 'mine'
