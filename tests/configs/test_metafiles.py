"""model-index.yml and the metafiles: what they name exists, and what they count is so."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
import yaml
from mmengine.config import Config

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = yaml.safe_load((ROOT / 'model-index.yml').read_text())['Import']
CONTENTS = [yaml.safe_load((ROOT / path).read_text()) for path in IMPORTED]
MODELS = [model for content in CONTENTS for model in content['Models']]
PUBLISHED = 'Published by the Paper'


def test_index_imports_every_metafile() -> None:
    found = [path.relative_to(ROOT).as_posix()
             for path in (ROOT / 'configs').rglob('metafile.yml')]
    assert sorted(IMPORTED) == sorted(found)


def test_collections() -> None:
    collections = [entry for content in CONTENTS for entry in content.get('Collections', [])]
    assert {model['In Collection'] for model in MODELS} == {entry['Name'] for entry in collections}
    for entry in collections:
        assert (ROOT / entry['README']).is_file()
        assert entry['Paper']['URL'].endswith('2604.20368')


def test_every_config_is_a_model_and_every_model_a_config() -> None:
    shipped = {path.relative_to(ROOT).as_posix() for path in (ROOT / 'configs').rglob('*.py')
               if not {'_base_', 'demo'} & set(path.parts)}
    listed = [model['Config'] for model in MODELS]
    assert sorted(listed) == sorted(shipped)
    assert [Path(path).stem for path in listed] == [model['Name'] for model in MODELS]


def test_claims_no_weights_and_no_results_of_its_own() -> None:
    """What is published is the paper's and is called so, with its figures and no others."""
    published = {}
    for model in MODELS:
        assert set(model) == {'Name', 'In Collection', 'Config', 'Metadata'}
        assert set(model['Metadata']) <= {'Parameters', 'FLOPs', 'Training Data', 'Epochs',
                                          'Iterations', PUBLISHED}
        if PUBLISHED in model['Metadata']:
            published[model['Name']] = tuple(model['Metadata'][PUBLISHED].values())
    assert published == {
        'laplacian_t_in1k': (81.4, ), 'laplacian_s_in1k': (83.8, ), 'laplacian_m_in1k': (85.3, ),
        'laplacian_l_in1k': (85.6, ), 'laplacian_h_in1k': (85.8, ),
        'mask_rcnn_laplacian_t': (43.2, 40.3), 'mask_rcnn_laplacian_m': (48.0, 43.5),
        'retinanet_laplacian_t': (42.5, ), 'retinanet_laplacian_m': (47.2, )}


@pytest.mark.parametrize('model', MODELS, ids=lambda model: model['Name'])
def test_counts(model: dict, load: Callable[[str], Config]) -> None:
    config = load(model['Config'].removeprefix('configs/'))
    metadata = model['Metadata']
    assert metadata.get('Epochs') == config.train_cfg.get('max_epochs')
    assert metadata.get('Iterations') == config.train_cfg.get('max_iters')
    # mmsegmentation may be absent: its models are not counted.
    assert ('Parameters' in metadata) == (config.default_scope != 'mmseg')
    if 'Parameters' in metadata:
        registry = import_module(f'{config.default_scope}.registry').MODELS
        with torch.device('meta'):
            built = registry.build(config.model)
        assert metadata['Parameters'] == sum(p.numel() for p in built.parameters())


def test_flops_are_those_of_the_readme() -> None:
    """A test of the backbone counts the README's."""
    rows = re.findall(r'^\| (\w+) \| [\d, ]+ \| ([\d.]+) M \| [\d.]+ M \| ([\d.]+) \|',
                      (ROOT / 'README.md').read_text(), flags=re.MULTILINE)
    sizes = {name[0]: (float(parameters), float(gmacs)) for name, parameters, gmacs in rows}
    assert len(sizes) == 5
    classifiers = [model for model in MODELS if 'FLOPs' in model['Metadata']]
    assert len(classifiers) == 6
    for model in classifiers:
        parameters, gmacs = sizes[model['Name'].split('_')[1]]
        assert model['Metadata']['FLOPs'] == pytest.approx(gmacs * 1e9)
        assert model['Metadata']['Parameters'] == pytest.approx(parameters * 1e6, rel=1e-3)
