"""Convergence, kernel scale and normalisation: what the commands make of their trainings."""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn


@pytest.fixture(scope='module')
def analysis() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of ``tools/analysis`` by the name that the others import it by."""
    folder = str(Path(__file__).resolve().parents[2] / 'tools/analysis')
    sys.path.insert(0, folder)
    yield import_module
    sys.path.remove(folder)


def options(out: Path, **changed: object) -> argparse.Namespace:
    return argparse.Namespace(**{**dict(out=out, seed=0, runs=2, jobs=1, fast=True), **changed})


def runs_of(training_runs: ModuleType, *finals: float, half: float = .3) -> list:
    """Runs that end at these accuracies."""
    curve = training_runs.Curve
    return [training_runs.Run(curve([300, 600], [1., .5], [half, final]), []) for final in finals]


def test_finished_trainings_are_kept_and_others_are_not_mixed_in(analysis, tmp_path, monkeypatch):
    module = analysis('training_runs')
    trained = []

    def run(setting, seed, steps, validation):
        trained.append((setting.label, seed))
        return module.Run(module.Curve([1], [1.], [seed + len(setting.label) / 10]), [])

    monkeypatch.setattr(module, 'run', run)
    settings = [module.Setting('a'), module.Setting('bb', attention='softmax')]
    first = module.all_runs(settings, options(tmp_path))
    assert [r.curve.accuracy for r in first['bb']] == [[.2], [1.2]]
    assert sorted(trained) == [('a', 0), ('a', 1), ('bb', 0), ('bb', 1)]
    trained.clear()
    assert module.all_runs(settings, options(tmp_path, runs=3)).keys() == first.keys()
    assert trained == [('a', 2), ('bb', 2)]
    trained.clear()
    again = module.all_runs([module.Setting('of another command')], options(tmp_path))
    assert trained == [] and again['of another command'] == first['a']
    changed = [module.Setting('a', arguments=dict(normalize='row')), settings[1]]
    module.all_runs(changed, options(tmp_path))
    assert trained == [('a', 0), ('a', 1)]


def test_a_setting_is_what_is_trained(analysis):
    module = analysis('training_runs')
    seen = []

    def change(model: nn.Module) -> None:
        seen.append([module for module in model.modules() if hasattr(module, 'qkv')])

    def watch(model: nn.Module, step: int) -> dict | None:
        grads = [layer.qkv.weight.grad.norm().item() for layer in seen[0]]
        return dict(first=grads[0]) if step == 2 else None

    setting = module.Setting('x', attention='softmax', arguments=dict(depth=1, num_heads=4),
                             change=change, watch=watch)
    threads = torch.get_num_threads()
    result = module.run(setting, 0, 3, validation=1)
    torch.set_num_threads(threads)
    layer, = seen[0]
    assert type(layer).__name__ == 'SoftmaxAttention' and layer.num_heads == 4
    assert [row['step'] for row in result.watched] == [2] and result.watched[0]['first'] > 0


@pytest.mark.parametrize('name', ['runs', 'jobs'])
def test_no_run_and_no_job_are_refused(analysis, tmp_path, name, capsys):
    assert analysis('kernel_scale').CLAIM.run(
        ['--out', str(tmp_path), '--fast', f'--{name}', '0']) == 2
    assert f'--{name}' in capsys.readouterr().err


def test_two_settings_differ_beyond_both_spreads(analysis):
    differ = analysis('training_runs').differ
    assert differ([1, 1.2], [2, 2.2]) and differ([2, 2.2], [1, 1.2])
    assert not differ([1, 1.4], [1.5, 1.9]) and not differ([1.], [1.])


@pytest.mark.parametrize('finals, words', [
    (dict(laplacian=(.9, .92), gaussian=(.7, .72), none=(.2, .2)), 'holds here'),
    (dict(laplacian=(.7, .72), gaussian=(.9, .92), none=(.2, .2)), 'does not hold here'),
    (dict(laplacian=(.7, .9), gaussian=(.75, .9), none=(.2, .2)), 'not shown here'),
    (dict(laplacian=(.9, .92), gaussian=(.2, .2), none=(.9, .91)), 'nothing about attention')])
def test_the_verdict_on_convergence_follows_the_runs(analysis, finals, words):
    module, training_runs = analysis('convergence'), analysis('training_runs')
    runs = {module.NAMES[name]: runs_of(training_runs, *finals.get(name, (.5, .5)))
            for name in module.NAMES}
    text = module.verdict('task', runs)
    assert words in text
    others = {'holds here', 'does not hold here', 'not shown here', 'nothing about attention'}
    assert not any(other in text for other in others - {words})
    assert '0.910 ± 0.014' in text or '0.800 ± 0.141' in text or '0.710 ± 0.014' in text


@pytest.mark.parametrize('scales, words', [
    ({4.: (.9, .91), 2.: (.5, .52), 8.: (.4, .41)}, '**holds here**'),
    ({4.: (.9, .91), 2.: (.88, .92), 8.: (.4, .41)}, '**holds in part**'),
    ({4.: (.88, .91), 2.: (.9, .92), 8.: (.4, .41)}, '**holds in part**'),
    ({4.: (.5, .51), 2.: (.9, .92), 8.: (.4, .41)}, '**does not hold here**')])
def test_the_verdict_on_the_scale_follows_the_runs(analysis, scales, words):
    verdict = analysis('kernel_scale').verdict
    text = verdict(scales, {16: (.1, .1)}, (.2, .2))
    assert words in text and 'd = 16 0.100' in text and 'without attention 0.200' in text
    assert 'is not shown here' in verdict(scales, {16: (.1, .1)}, (.9, .92))


def test_scale_and_head_dim_reach_the_layers(analysis):
    module, training_runs = analysis('kernel_scale'), analysis('training_runs')
    pairs = set()
    for setting in module.settings():
        model = training_runs.TASKS['recall'][0](**setting.arguments)
        attn = model.blocks[0].attn
        pairs.add((attn.kernel_scale, attn.embed_dims // attn.num_heads))
    assert pairs == {(.5, 32), (1., 32), (2., 32), (4., 32), (8., 32), (4., 16), (4., 64)}


def test_a_gain_moves_the_branch_away_from_its_mean(analysis):
    module = analysis('normalization')
    x = torch.randn(2, 3, 4, 6)
    torch.testing.assert_close(module.HeadGain(2, 1)(x), x)
    gain = module.HeadGain(2, 1)
    with torch.no_grad():
        gain.log[1] = math.log(3) / 10
    got, mean = gain(x), x.mean((1, 2), keepdim=True)
    torch.testing.assert_close(got[..., :3], x[..., :3])
    torch.testing.assert_close((got - mean)[..., 3:], 3 * (x - mean)[..., 3:])
    assert module.HeadGain(2, 16).gain.tolist() == [[16.], [16.]]


def test_a_map_of_the_answers_has_the_largest_focus_of_its_normalisation(analysis):
    from mmlaplacian.ops.nystrom_attention.reference import attention_map
    module = analysis('normalization')
    tokens, answers = module._probe()
    assert tokens.shape == (4, 16, 16, 12) and answers.shape == (4, 256, 256)
    # Every query has four keys that show its answer.
    assert answers.sum(-1).eq(4).all()
    g = answers[:, None].double().expand(-1, 2, -1, -1)
    bound = module.whiten_bound(answers)
    whitened = module.focus(attention_map(g, 1e-9, 'whiten'), answers)
    assert whitened.tolist() == pytest.approx([bound] * 2, rel=1e-6)
    share = answers.double().mean(-2)
    by_row = (1 - share.square().sum(-1) / 4).mean()
    assert module.focus(attention_map(g, 1e-9, 'row'), answers).tolist() == pytest.approx(
        [by_row.item()] * 2)
    assert bound < .03 < .7 < by_row
    noise = torch.rand(g.shape, generator=torch.Generator().manual_seed(0)).double()
    assert module.focus(attention_map(noise, 1e-9, 'whiten'), answers).abs().max() < .1 * bound


def test_the_focus_that_is_recorded_has_the_gain(analysis):
    module, task = analysis('normalization'), analysis('recall_task')
    torch.manual_seed(0)
    model = task.RecallModel(depth=1)
    plain = module._best_focus(model)
    module.large_gain(model)
    assert module._best_focus(model) == pytest.approx(4 * plain)


def test_schedules_reach_the_layers_and_end(analysis, monkeypatch):
    module, task = analysis('normalization'), analysis('recall_task')
    monkeypatch.setattr(module, 'EVERY', 10**6)
    model = task.RecallModel(depth=2)
    floors, scales = [], []
    half = analysis('training_runs').TASKS['recall'][2] // 2
    for step in (1, half // 2, half, half + 1):
        module.watch_floor(model, step)
        module.watch_scale(model, step)
        floors.append(model.blocks[1].attn.whiten_eps)
        scales.append(model.blocks[0].attn.kernel_scale)
    assert floors == sorted(floors, reverse=True) and scales == sorted(scales, reverse=True)
    assert floors[1:] == pytest.approx([10**-3.5, 1e-5, 1e-5])
    assert scales[1:] == pytest.approx([8, 4, 4])


def test_spreads_are_those_of_the_tokens(analysis):
    module, task = analysis('normalization'), analysis('recall_task')
    model = task.RecallModel(depth=1)
    module.record_spread(model)
    layer = model.blocks[0].attn
    inputs, target = task.batch(2, torch.Generator().manual_seed(0))
    seen = {}
    layer.branch.register_forward_hook(lambda m, i, o: seen.update(branch=o))
    layer.local.register_forward_hook(lambda m, i, o: seen.update(values=i[0]))
    nn.functional.cross_entropy(model(inputs).flatten(0, -2), target.flatten()).backward()
    spread = {name: x.reshape(2, 256, 64).std(1).mean() for name, x in seen.items()}
    values = module.watch(model, module.EVERY)
    assert tuple(values) == module.WATCHED
    assert values['branch'] == pytest.approx((spread['branch'] / spread['values']).item())
    assert values['gradient_k'] == pytest.approx(
        layer.qkv.weight.grad[64:128].norm().item())
    assert module.watch(model, module.EVERY + 1) is None


@pytest.mark.parametrize('halves, ahead, closing', [((.2, .9), False, False),
                                                    ((.5, .5), True, False),
                                                    ((.8, .8), True, True)])
def test_a_change_helps_with_all_seeds_or_not_at_all(analysis, halves, ahead, closing):
    module, training_runs = analysis('normalization'), analysis('training_runs')
    runs = {setting.label: runs_of(training_runs, .9, .9) for setting in module.SETTINGS}
    runs[module.CONTROL.label] = runs_of(training_runs, .2, .2)
    runs[module.ROW] = runs_of(training_runs, .9, .9, half=.8)
    changed = module.CHANGES[0]
    runs[changed] = [run for half in halves for run in runs_of(training_runs, .9, half=half)]
    text = module.verdict(runs)
    assert 'slower than row: the claim **does not hold here**' in text
    share = {.5: 40, .8: 100}.get(halves[1])
    assert (f'every seed: {changed} ({share}% of the gap)' in text) == ahead
    assert (f'row as well: {changed}.' in text) == closing
    runs[module.ROW] = runs[module.WHITEN]
    text = module.verdict(runs)
    assert '**holds here**' in text and 'nothing about attention' not in text
    runs[module.CONTROL.label] = runs[module.WHITEN]
    assert 'nothing about attention' in module.verdict(runs)


@pytest.mark.parametrize('name, tasks', [('convergence', 2), ('kernel_scale', 1),
                                         ('normalization', 1)])
def test_the_commands_write_what_they_trained(analysis, tmp_path, monkeypatch, name, tasks):
    module, training_runs = analysis(name), analysis('training_runs')

    def run(setting, seed, steps, validation):
        curve = training_runs.Curve([2, 4], [1., .5], [.1, .2 + seed / 10])
        watched = dict.fromkeys(('focus', 'branch', 'gradient_q', 'gradient_k', 'gradient_v'), 1.)
        return training_runs.Run(curve, [dict(step=1, **watched)] if setting.watch else [])

    monkeypatch.setattr(training_runs, 'run', run)
    assert module.CLAIM.run(['--out', str(tmp_path), '--runs', '2', '--jobs', '1']) == 0
    with (tmp_path / f'{name}.csv').open(encoding='utf-8', newline='') as file:
        rows = list(csv.DictReader(file))
    settings = {'convergence': 4, 'kernel_scale': 8, 'normalization': 8}[name]
    assert len(rows) == settings * tasks * 2 * 2
    assert {row['accuracy'] for row in rows if row['seed'] == '1' and row['step'] == '4'} == {
        '0.30000000000000004'}
    assert (tmp_path / f'{name}.png').stat().st_size > 10_000
