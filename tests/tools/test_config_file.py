"""``tools/config_file.py``: configs that cannot be loaded, options that change nothing."""

from __future__ import annotations

import pytest
from mmengine.config import Config


@pytest.mark.parametrize(('text', 'message'), [
    ('x = foo', "name 'foo' is not defined"),
    ('import os\nx = os.foo', "has no attribute 'foo'"),
    ('x = 1 / 0', 'division by zero'),
    ("assert False, 'not today'", 'not today'),
    ('x = [][0]', 'list index out of range'),
    ('x = {}["key"]', 'key'),
    ('x = 1 + "a"', 'unsupported operand'),
    ('x = (', 'was never closed'),
    ("_base_ = 'base.py'\nmodel = dict(arch=dict(depths=(1, 1)))", '_delete_=True'),
    ("_base_ = 'gone.py'", 'gone.py'),
    ("_base_ = 'mmdet::gone.py'", 'package name and relative config path'),
])
def test_mistakes_in_a_config(tool, tmp_path, text, message):
    (tmp_path / 'base.py').write_text("model = dict(arch='tiny')\n")
    config = tmp_path / 'config.py'
    config.write_text(f'{text}\n')
    with pytest.raises(tool('cli').UserError, match='cannot be loaded') as error:
        tool('config_file').load_config(str(config))
    assert str(error.value).startswith(f'config {config} ')
    assert message in str(error.value)
    assert '\n' not in str(error.value)
    assert error.value.__cause__ is not None


@pytest.mark.parametrize(('name', 'text'), [
    ('a.json', '{bad'), ('a.yaml', 'a: [1'), ('a.txt', 'x = 1')])
def test_other_formats(tool, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(tool('cli').UserError, match=f'{name} cannot be loaded'):
        tool('config_file').load_config(str(tmp_path / name))


def test_a_folder_is_called_a_folder(tool, tmp_path):
    with pytest.raises(tool('cli').UserError, match='is a folder, not a config file'):
        tool('config_file').load_config(str(tmp_path))


@pytest.mark.parametrize(('name', 'is_close'), [
    ('retinanet_laplacian_s.py', True), ('retina.py', False), ('nope.py', False)])
def test_only_close_names_are_proposed(tool, tmp_path, name, is_close):
    for other in ('retinanet_laplacian_t.py', 'ops.py'):
        (tmp_path / other).touch()
    with pytest.raises(tool('cli').UserError) as error:
        tool('config_file').load_config(str(tmp_path / name))
    hint = f'did you mean {tmp_path / "retinanet_laplacian_t.py"}?'
    assert str(error.value).endswith(hint) == is_close
    assert ('did you mean' in str(error.value)) == is_close


def test_options_of_no_setting_are_refused(tool):
    merge = tool('config_file').merge_cfg_options
    cfg = Config(dict(train_cfg=dict(max_epochs=12)))
    with pytest.raises(tool('cli').UserError, match='did you mean train_cfg') as error:
        merge(cfg, {'trian_cfg.max_epochs': 1})
    assert "trian_cfg.max_epochs=1: 'trian_cfg' is no setting" in str(error.value)
    assert cfg.train_cfg.max_epochs == 12
    with pytest.raises(tool('cli').UserError) as error:
        merge(cfg, {'qqqq': 1})
    assert 'did you mean' not in str(error.value)


@pytest.mark.parametrize('key', [
    'auto_scale_lr.enable', 'compile', 'custom_hooks', 'env_cfg.cudnn_benchmark',
    'find_unused_parameters', 'launcher', 'load_from', 'model_wrapper_cfg.type',
    'randomness.seed', 'resume', 'train_cfg.max_epochs', 'tta_model.type', 'work_dir'])
def test_known_settings_may_be_added(tool, key):
    cfg = Config(dict(model=dict(type='RetinaNet')))
    tool('config_file').merge_cfg_options(cfg, {key: 'value'})
    node = cfg
    for name in key.split('.'):
        node = node[name]
    assert node == 'value'
