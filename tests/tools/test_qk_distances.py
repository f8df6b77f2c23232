"""``tools/analysis/qk_distances.py``: tails of the distances of queries to keys."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from scipy import stats

ANALYSIS = Path(__file__).resolve().parents[2] / 'tools' / 'analysis'


@pytest.fixture(scope='module')
def distances(tool: Callable[[str], ModuleType]) -> ModuleType:
    if str(ANALYSIS) not in sys.path:
        sys.path.append(str(ANALYSIS))
    return tool('analysis/qk_distances')


@pytest.fixture(scope='module')
def deit_file(distances: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of mmpretrain with a DeiT-tiny."""
    torch.manual_seed(0)
    state = {f'backbone.{key}': value
             for key, value in distances.PEERS['deit'].full().state_dict().items()}
    file = tmp_path_factory.mktemp('weights') / 'deit.pth'
    torch.save({'state_dict': {**state, 'head.layers.head.weight': torch.zeros(1)}}, file)
    return file


@pytest.fixture(scope='module')
def numbers(distances: ModuleType, deit_file: Path,
            tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Rows of a fast run with the weights of one model."""
    out = tmp_path_factory.mktemp('fast')
    assert distances.CLAIM.run(['--fast', '--out', str(out), '--weights',
                                f'deit={deit_file}']) == 0
    text = (out / 'qk_distances.md').read_text(encoding='utf-8')
    assert 'DeiT-tiny, deit.pth, on grace_hopper.jpg' in text
    assert 'a small Swin trained for 2 steps here' in text
    with (out / 'qk_distances.csv').open(encoding='utf-8', newline='') as file:
        rows = list(csv.DictReader(file))
    words = ('model', 'weights', 'layer', 'quantity')
    return [{key: value if key in words else float(value) for key, value in row.items()}
            for row in rows]


def test_fast_run(distances: ModuleType, numbers: list[dict]) -> None:
    layers = {'deit': 12, 'pvt_v2': 4, 'swin': 6, 'laplacian': 4}
    assert len(numbers) == 3 * sum(layers.values())
    for row in numbers:
        assert row['head_dim'] == (64 if row['model'] == 'deit' else 32)
        density = [value for key, value in row.items() if key.startswith('density')]
        assert .9 < sum(density) / 2 <= 1 + 1e-9
        # Each head has variance 1, for which the best Gaussian is known.
        assert row['gaussian_fit'] == pytest.approx(-.5 * math.log(2 * math.pi * math.e))
        if row['quantity'] == distances.L1:
            other = next(r for r in numbers if r['quantity'] == distances.L2
                         and r['layer'] == row['layer'] and r['model'] == row['model'])
            assert other['mean'] <= row['mean'] <= math.sqrt(row['head_dim']) * other['mean']


def small(distances: ModuleType, name: str):
    torch.manual_seed(0)
    model = distances.PEERS[name].small()
    model.eval()
    images, _ = distances.distant_parts.batch(2, torch.Generator().manual_seed(0))
    return model, images


def products(layer) -> torch.Tensor:
    return layer.q @ layer.k.mT / math.sqrt(layer.q.shape[-1])


def test_queries_and_keys_of_deit(distances: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = small(distances, 'deit')
    found, seen = distances.queries_keys(model, images), []
    for layer in model.backbone.layers:
        monkeypatch.setattr(layer.attn, 'scaled_dot_product_attention',
                            lambda q, k, v, **_: seen.append((q, k)) or v)
    with torch.no_grad():
        model(images)
    assert len(found) == len(seen) == 4
    # The first layer alone sees what it saw before.
    torch.testing.assert_close((found[0].q, found[0].k), seen[0])


def test_queries_and_keys_of_pvt(distances: ModuleType) -> None:
    model, images = small(distances, 'pvt_v2')
    weights = []

    def keep(layer, args, kwargs, output):
        forward = type(layer).forward
        weights.append(forward(layer, *args, **kwargs, average_attn_weights=False)[1])

    for module in model.modules():
        if isinstance(module, torch.nn.MultiheadAttention):
            module.register_forward_hook(keep, with_kwargs=True)
    found = distances.queries_keys(model, images)
    assert [len(found), len(weights)] == [4, 4]
    for layer, weight in zip(found, weights, strict=True):
        torch.testing.assert_close(products(layer).softmax(-1), weight)


def test_queries_and_keys_of_swin(distances: ModuleType) -> None:
    model, images = small(distances, 'swin')
    scores, biases = [], []
    for module in model.modules():
        if hasattr(module, 'relative_position_bias_table'):
            biases.append(module.relative_position_bias_table[
                module.relative_position_index.flatten()].unflatten(0, (64, 64)))
            module.softmax.register_forward_pre_hook(lambda _, args: scores.append(args[0]))
    found = distances.queries_keys(model, images)
    assert len(found) == len(scores) == 6
    for layer, score, bias in zip(found, scores, biases, strict=True):
        apart = score - products(layer) - bias.permute(2, 0, 1)
        # Of a shifted layer some scores are masked, by -100.
        masked = apart.abs() > 50
        assert masked.any() == ('blocks.1' in layer.layer or 'blocks.3' in layer.layer)
        assert apart[~masked].abs().max() < 1e-5


def test_queries_and_keys_of_ours(distances: ModuleType) -> None:
    from activations import attention_inputs

    model, images = small(distances, 'laplacian')
    found, expected = distances.queries_keys(model, images), attention_inputs(model, images)
    assert len(found) == 4
    for layer, other in zip(found, expected, strict=True):
        assert layer.layer == other.layer
        torch.testing.assert_close((layer.q, layer.k), (other.q, other.k))


def test_pairs_are_of_one_image_and_head(distances: ModuleType) -> None:
    image, head = torch.arange(3)[:, None, None, None], torch.arange(2)[None, :, None, None]
    place = (100 * image + 10 * head).expand(3, 2, 7, 4).float()
    generator = torch.Generator().manual_seed(0)
    found = distances.sampled(distances.QueriesKeys('', place, place[:, :, :5] + 1), 50, generator)
    assert {name: values.unique().tolist() for name, values in found.items()} == {
        distances.L1: [4], distances.L2: [2], distances.DIFFERENCE: [-1]}
    assert all(values.shape == (2, 50) for values in found.values())
    # All queries, keys and channels take part.
    layer = distances.QueriesKeys('', torch.arange(28.).view(1, 1, 7, 4),
                                  1000 * torch.arange(20.).view(1, 1, 5, 4))
    seen = distances.sampled(layer, 5000, generator)[distances.DIFFERENCE].unique()
    assert len(seen) == 7 * 5 * 4


@pytest.mark.parametrize(('distribution', 'kurtosis'), [(stats.norm, 0), (stats.laplace, 3),
                                                        (stats.uniform, -1.2)])
def test_shape_of_known_distributions(distances: ModuleType, distribution: stats.rv_continuous,
                                      kurtosis: float) -> None:
    quantiles = distribution.ppf((np.arange(20000) + .5) / 20000)
    # Two heads of different place and scale count alike.
    found = distances.shape(torch.from_numpy(np.stack((quantiles, 5 + 3 * quantiles))))
    assert found['excess_kurtosis'] == pytest.approx(kurtosis, abs=.05)
    x = (quantiles - quantiles.mean()) / quantiles.std()
    scale = np.abs(x - np.median(x)).mean()
    assert found['laplace_fit'] == pytest.approx(-math.log(2 * scale) - 1, abs=1e-6)
    assert (found['laplace_fit'] > found['gaussian_fit']) == (distribution is stats.laplace)
    assert found['mean'] == pytest.approx((quantiles.mean() + 5 + 3 * quantiles.mean()) / 2)
    assert found['spread'] == pytest.approx(2 * quantiles.std())
    assert found['density at 0.25'] == pytest.approx(np.mean((x >= 0) & (x < .5)) / .5, abs=2e-4)
    if distribution is not stats.uniform:
        assert found['hill_index'] == pytest.approx(
            distances.expected_hill_index(distribution), rel=.01)


def test_hill_index_of_a_power_law(distances: ModuleType) -> None:
    p = (np.arange(100000) + .5) / 100000
    for index in (1.5, 4):
        values = p**(-1 / index) * np.where(np.arange(100000) % 2, 1, -1)
        assert distances.hill_index(values) == pytest.approx(index, rel=.01)


def test_words_follow_the_numbers(distances: ModuleType, numbers: list[dict]) -> None:
    def verdicts(rows: list[dict]) -> list[str]:
        parts = distances.describe(rows, '').split('**')
        return parts[1:4:2]

    heavy = dict(excess_kurtosis=3., hill_index=3.8, laplace_fit=-1.3, gaussian_fit=-1.4)
    light = dict(excess_kurtosis=-.1, hill_index=7., laplace_fit=-1.5, gaussian_fit=-1.4)
    all_heavy, all_light = ([{**row, **values} for row in numbers] for values in (heavy, light))
    assert verdicts(all_heavy) == ['holds', 'holds']
    assert verdicts(all_light) == ['does not hold here', 'does not hold here']
    assert verdicts(all_heavy[:1] + all_light[1:]) == ['holds in part', 'holds in part']
    # Kurtosis alone does not make a tail, nor does the index alone.
    for key in ('excess_kurtosis', 'hill_index'):
        mixed = [{**row, key: light[key]} for row in all_heavy]
        assert verdicts(mixed) == ['does not hold here', 'holds']
    assert f'12 of {2 * 26} distributions' in distances.describe(
        [{**row, **(heavy if row['model'] == 'deit' and row['quantity'] == distances.L2
                    else light)} for row in numbers], '')


def authors_pvt(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under the names of PVTv2's authors."""
    found = {}
    names = {'ffn.layers.0': 'mlp.fc1', 'ffn.layers.1': 'mlp.dwconv.dwconv',
             'ffn.layers.4': 'mlp.fc2', 'attn.attn.out_proj': 'attn.proj', 'attn.sr': 'attn.sr',
             'attn.norm': 'attn.norm', 'norm1': 'norm1', 'norm2': 'norm2'}
    for key, value in state.items():
        _, stage, part, *rest = key.split('.')
        stage, rest = int(stage) + 1, '.'.join(rest)
        if part == '0':
            found[f'patch_embed{stage}.{rest.replace("projection", "proj")}'] = value
        elif part == '2':
            found[f'norm{stage}.{rest}'] = value
        elif 'in_proj' in rest:
            block, kind = rest.split('.')[0], rest.rpartition('_')[2]
            width = len(value) // 3
            found[f'block{stage}.{block}.attn.q.{kind}'] = value[:width]
            found[f'block{stage}.{block}.attn.kv.{kind}'] = value[width:]
        else:
            block, _, rest = rest.partition('.')
            module, _, kind = rest.rpartition('.')
            if 'fc' in names[module] and kind == 'weight':
                value = value.flatten(1)
            found[f'block{stage}.{block}.{names[module]}.{kind}'] = value
    return found


def test_weights_of_files(distances: ModuleType, deit_file: Path, tmp_path: Path) -> None:
    from peer_backbones import with_weights

    torch.manual_seed(0)
    expected = distances.PEERS['deit'].full().state_dict()
    torch.testing.assert_close(dict(with_weights('deit', deit_file).state_dict()), dict(expected))

    expected = distances.PEERS['pvt_v2'].full().state_dict()
    for state in (expected, authors_pvt(expected)):
        torch.save(state, tmp_path / 'pvt.pth')
        found = with_weights('pvt_v2', tmp_path / 'pvt.pth').state_dict()
        torch.testing.assert_close(dict(found), dict(expected))


def test_wrong_weights_are_refused(distances: ModuleType, deit_file: Path, tmp_path: Path,
                                   capsys: pytest.CaptureFixture) -> None:
    (tmp_path / 'text.pth').write_text('no checkpoint')
    torch.save({'weight': torch.zeros(1)}, tmp_path / 'other.pth')
    torch.save({'cls_token': torch.zeros(1, 1, 7)}, tmp_path / 'size.pth')
    for entries in (['deit'], ['vit=x'], ['deit=none.pth'], [f'deit={deit_file}'] * 2,
                    [f'deit={tmp_path / "text.pth"}'], [f'deit={tmp_path / "other.pth"}'],
                    [f'deit={tmp_path / "size.pth"}'], [f'swin={deit_file}']):
        assert distances.CLAIM.run(['--out', str(tmp_path), '--weights', *entries]) == 2
        error = capsys.readouterr().err
        assert error.startswith('error: --weights') and error.count('\n') == 1
    assert not (tmp_path / 'qk_distances.csv').exists()
