"""``tools/publish_checkpoint.py``: what it writes is tensors and strings, and still works."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

DEMO = Path(__file__).resolve().parents[2] / 'configs' / 'demo'


def leaves(node: object) -> list:
    if isinstance(node, dict):
        return [leaf for key, value in node.items() for leaf in (key, *leaves(value))]
    if isinstance(node, tuple):
        return [leaf for value in node for leaf in leaves(value)]
    return [node]


@pytest.fixture
def publish(tool, tmp_path, capsys):
    """Publishes a checkpoint; returns what was written and what was said."""

    def run(checkpoint, *flags):
        out = tmp_path / 'public.pth'
        status = tool('publish_checkpoint').main([str(checkpoint), str(out), *flags])
        assert status == 0
        return torch.load(out, weights_only=True), capsys.readouterr().out

    return run


def test_of_a_classifier_with_ema(publish, classifier, tmp_path):
    with pytest.raises(Exception, match='[Ww]eights.only'):
        torch.load(classifier['checkpoint'], weights_only=True)
    source = torch.load(classifier['checkpoint'], weights_only=False)
    content, said = publish(classifier['checkpoint'])
    assert set(content) == {'state_dict', 'meta'}
    assert {type(leaf) for leaf in leaves(content)} <= {str, Tensor}
    assert content['meta'] == dict(
        part='model', weights='averaged',
        dataset_meta=dict(classes=('circle', 'square', 'triangle')))
    assert set(content['state_dict']) == set(source['state_dict'])
    differs = False
    for name, value in content['state_dict'].items():
        assert torch.equal(value, source['state_dict'][name]), name
        differs |= not torch.equal(value, source['ema_state_dict'][f'module.{name}'])
    assert differs
    digest = hashlib.sha256((tmp_path / 'public.pth').read_bytes()).hexdigest()
    assert f'{len(content["state_dict"])} tensors of the model, averaged weights (EMA)' in said
    assert digest in said


def test_the_backbone_alone_starts_a_detector(publish, classifier, refused, tmp_path,
                                              monkeypatch):
    content, _ = publish(classifier['checkpoint'], '--backbone-only')
    assert content['meta'] == dict(part='backbone', weights='averaged')
    assert all(name.startswith(('stages.', 'norm3.')) for name in content['state_dict'])
    monkeypatch.chdir(tmp_path)
    # The data are missing, the file is not what is refused.
    error = refused('train', DEMO / 'mask_rcnn_laplacian_shapes.py', '--pretrained',
                    tmp_path / 'public.pth')
    assert 'tools/make_shapes_dataset.py' in error


def test_a_published_detector_draws_its_classes(tool, publish, trained, tmp_path, capsys):
    content, said = publish(trained['checkpoint'])
    assert content['meta']['weights'] == 'trained' and 'EMA' not in said
    size = (tmp_path / 'public.pth').stat().st_size
    assert size < trained['checkpoint'].stat().st_size
    outputs = []
    for checkpoint in (trained['checkpoint'], tmp_path / 'public.pth'):
        status = tool('image_demo').main([
            str(trained['root'] / 'images' / '0.png'), str(trained['dumped']), str(checkpoint),
            '--out-dir', str(tmp_path / 'pictures'), '--score-thr', '0', '--device', 'cpu'])
        assert status == 0
        outputs.append([line for line in capsys.readouterr().out.splitlines() if '->' in line])
    assert outputs[0] == outputs[1] and 'nut' in ' '.join(outputs[0])


def test_views_do_not_carry_their_storage(publish, tmp_path):
    torch.save(dict(state_dict={'module.a': torch.randn(1000, 1000)[:2, :2], 'epoch': 3}),
               tmp_path / 'in.pth')
    content, _ = publish(tmp_path / 'in.pth')
    assert list(content['state_dict']) == ['a']
    assert (tmp_path / 'public.pth').stat().st_size < 10_000


def test_refusals(tool, classifier, tmp_path, capsys):
    taken = tmp_path / 'taken.pth'
    taken.write_text('mine')
    torch.save({'epoch': 3}, tmp_path / 'empty.pth')
    torch.save({'stages.0': torch.ones(1)}, tmp_path / 'bare.pth')
    checkpoint, out = str(classifier['checkpoint']), str(tmp_path / 'out.pth')
    for args, message in (
        ([checkpoint, str(taken)], f'{taken} exists already'),
        ([checkpoint, str(tmp_path / 'no' / 'out.pth')], 'does not exist'),
        (['gone.pth', out], 'checkpoint gone.pth does not exist'),
        ([str(tmp_path / 'empty.pth'), out], 'holds no tensors'),
        ([str(tmp_path / 'bare.pth'), out, '--backbone-only'], 'starts with backbone.'),
    ):
        assert tool('publish_checkpoint').main(args) == 2
        error = capsys.readouterr().err
        assert message in error and error.count('\n') == 1
    assert taken.read_text() == 'mine'
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        'bare.pth', 'empty.pth', 'taken.pth']
