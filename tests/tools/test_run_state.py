"""What a training goes on from after a fault, and who may write into a work dir."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from mmengine.logging import HistoryBuffer
from mmengine.model import BaseModel
from mmengine.runner import Runner

import mmlaplacian  # noqa: F401, registers the hook

REPO = Path(__file__).resolve().parents[2]


def write(folder: Path, name: str, minutes: int, **more: object) -> Path:
    """A checkpoint of a training, this many minutes old or, if negative, broken."""
    path = folder / name
    torch.save(dict(state_dict=dict(w=torch.zeros(2)), meta=dict(epoch=1), optimizer={},
                    message_hub=dict(log=HistoryBuffer([1.], [1])), **more), path)
    if minutes < 0:
        path.write_bytes(path.read_bytes()[:200])
    moment = time.time() - 60 * abs(minutes)
    os.utime(path, (moment, moment))
    return path


@pytest.fixture
def newest(tool, tmp_path):
    """Name of the checkpoint that a training goes on from, and what is said."""

    def find(last: str | None) -> tuple[str | None, list[str]]:
        if last is not None:
            (tmp_path / 'last_checkpoint').write_text(last)
        path, notes = tool('run_state').newest_intact_checkpoint(str(tmp_path), trusted=False)
        return path and Path(path).name, notes

    return find


def test_the_named_one_is_taken(newest, tmp_path):
    write(tmp_path, 'epoch_1.pth', 2)
    write(tmp_path, 'epoch_2.pth', 1)
    assert newest(str(tmp_path / 'epoch_2.pth')) == ('epoch_2.pth', [])


def test_killed_before_last_checkpoint_was_written(newest, tmp_path):
    write(tmp_path, 'epoch_9.pth', 2)
    write(tmp_path, 'epoch_10.pth', 1)
    assert newest(str(tmp_path / 'epoch_9.pth')) == ('epoch_10.pth', [])


def test_leavings_of_an_older_longer_run_do_not_count(newest, tmp_path):
    write(tmp_path, 'epoch_12.pth', 60)
    write(tmp_path, 'epoch_3.pth', 1)
    assert newest(str(tmp_path / 'epoch_3.pth')) == ('epoch_3.pth', [])


@pytest.mark.parametrize('last', ['', '\0\0', '/gone/epoch_7.pth', None])
def test_last_checkpoint_that_says_nothing(newest, tmp_path, last):
    write(tmp_path, 'iter_500.pth', 2)
    write(tmp_path, 'iter_1000.pth', 1)
    write(tmp_path, 'best_coco_bbox_mAP_epoch_3.pth', 0)
    name, notes = newest(last)
    assert name == 'iter_1000.pth'
    assert notes == (['checkpoint /gone/epoch_7.pth does not exist (looked in '
                      f'{Path.cwd()})'] if last == '/gone/epoch_7.pth' else [])


def test_last_checkpoint_of_other_bytes(newest, tmp_path):
    write(tmp_path, 'epoch_1.pth', 1)
    (tmp_path / 'last_checkpoint').write_bytes(b'\xff\xfe')
    assert newest(None) == ('epoch_1.pth', [])


def test_broken_ones_are_passed_by_and_named(newest, tmp_path):
    write(tmp_path, 'epoch_1.pth', 3)
    write(tmp_path, 'epoch_2.pth', -2)
    torch.save(dict(w=torch.zeros(1)), tmp_path / 'epoch_3.pth')
    name, notes = newest(str(tmp_path / 'epoch_3.pth'))
    assert name == 'epoch_1.pth'
    assert len(notes) == 2
    assert 'epoch_3.pth has no state_dict: it is no checkpoint of a training' in notes[0]
    assert 'epoch_2.pth cannot be read' in notes[1]


def test_copies_of_equal_age(newest, tmp_path):
    for number in (2, 10, 9):
        os.utime(write(tmp_path, f'epoch_{number}.pth', 1), (1e9, 1e9))
    assert newest(None)[0] == 'epoch_10.pth'


def test_nothing_intact_is_refused(tool, newest, tmp_path):
    write(tmp_path, 'epoch_2.pth', -2)
    with pytest.raises(tool('cli').UserError, match='nothing to resume in .*epoch_2.pth cannot'):
        newest(None)


def test_nothing_at_all(newest, tmp_path):
    (tmp_path / 'last_checkpoint').touch()
    assert newest(None) == (None, [])


def test_checkpoints_elsewhere(newest, tmp_path):
    """``out_dir`` of the hook leads out of the work dir."""
    other = tmp_path / 'other'
    other.mkdir()
    write(other, 'epoch_1.pth', 2)
    broken = write(other, 'epoch_2.pth', -1)
    name, notes = newest(str(broken))
    assert name == 'epoch_1.pth' and len(notes) == 1


def test_resume_says_what_it_takes(final_config, make_config, data_flags, tmp_path, capsys):
    work_dir = tmp_path / 'run'
    work_dir.mkdir()
    intact, broken = write(work_dir, 'epoch_1.pth', 2), write(work_dir, 'epoch_2.pth', -1)
    (work_dir / 'last_checkpoint').write_text(str(broken))
    cfg = final_config(make_config(), *data_flags, '--work-dir', work_dir, '--resume')
    assert cfg.resume is True and cfg.load_from == str(intact)
    said = capsys.readouterr().out
    assert f'checkpoint {broken} cannot be read' in said
    assert f'resuming from {intact}, the newest intact one' in said


def test_an_empty_last_checkpoint_alone_starts_at_the_beginning(final_config, make_config,
                                                                data_flags, tmp_path, capsys):
    work_dir = tmp_path / 'run'
    work_dir.mkdir()
    (work_dir / 'last_checkpoint').touch()
    cfg = final_config(make_config(), *data_flags, '--work-dir', work_dir, '--resume')
    assert cfg.resume is False and cfg.load_from is None
    assert 'nothing to resume' in capsys.readouterr().out


# ---- Which hook writes


@pytest.mark.parametrize(('setting', 'kind'), [
    ('', 'SafeCheckpointHook'), ("default_hooks['checkpoint'] = None", None),
    ("default_hooks['checkpoint']['type'] = 'Mine'", 'Mine')])
def test_checkpoints_are_written_safely(final_config, make_config, data_flags, setting, kind):
    cfg = final_config(make_config('box', setting), *data_flags)
    hook = cfg.default_hooks.checkpoint
    assert (hook and hook.type) == kind
    assert cfg.custom_imports.imports == ['mmlaplacian']
    assert [hook.type for hook in cfg.custom_hooks] == ['FiniteLossHook']


def test_imports_and_hooks_of_the_config_stay(final_config, make_config, data_flags):
    config = make_config('box', "custom_imports = dict(imports='json', "
                                "allow_failed_imports=False)\ncustom_hooks = ["
                                "dict(type='FiniteLossHook'), dict(type='EMAHook')]")
    cfg = final_config(config, *data_flags)
    assert cfg.custom_imports.imports == ['json', 'mmlaplacian']
    assert [hook.type for hook in cfg.custom_hooks] == ['FiniteLossHook', 'EMAHook']


# ---- Untrusted files


class Line(BaseModel):
    """Learns nothing in particular."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, mode: str) -> dict:
        return dict(loss=self.line(x).square().mean())


class Evil:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.system, (f'touch {self.path}', )


@pytest.fixture
def evil(tmp_path) -> Path:
    path = write(tmp_path, 'epoch_1.pth', 1, extra=Evil(tmp_path / 'ran'))
    assert not (tmp_path / 'ran').exists()
    return path


@pytest.mark.parametrize('command', [
    ('train', '{flags}', '--resume', '{evil}'), ('train', '{flags}', '--resume'),
    ('train', '{flags}', '--cfg-options', 'load_from={evil}'),
    ('test', '{evil}', '{test_flags}'),
])
def test_code_in_a_checkpoint_never_runs(refused, make_config, data_flags, tmp_path, evil,
                                         command):
    tool_name, *rest = command
    arguments = [make_config('box'), '--work-dir', tmp_path]
    for argument in rest:
        if argument.endswith('flags}'):
            test_flags = [*data_flags[:2], *data_flags[4:]]
            arguments += data_flags if argument == '{flags}' else test_flags
        else:
            arguments.append(argument.format(evil=evil))
    if tool_name == 'test':
        arguments = [arguments[0], evil, *arguments[1:3], *test_flags]
    message = refused(tool_name, *arguments)
    assert 'holds posix.system, which is no weight' in message
    assert not (tmp_path / 'ran').exists()


def test_pretrained_and_publishing_refuse_it_too(refused, evil, tmp_path):
    config = REPO / 'configs' / 'retinanet_laplacian_t.py'
    assert 'holds posix.system' in refused('train', config, '--pretrained', evil)
    assert 'holds posix.system' in refused('publish_checkpoint', evil, tmp_path / 'out.pth')
    assert not (tmp_path / 'ran').exists()


def test_trust_is_a_flag_of_resume_alone(tool, final_config, make_config, data_flags, tmp_path,
                                         evil, capsys):
    cfg = final_config(make_config(), *data_flags, '--resume', evil, '--trust-checkpoint')
    assert cfg.load_from == str(evil)
    assert (tmp_path / 'ran').exists()
    with pytest.raises(SystemExit):
        tool('train').main([str(make_config()), *data_flags, '--trust-checkpoint'])
    assert '--trust-checkpoint needs --resume' in capsys.readouterr().err


def test_mmengines_fallback_is_off(tool, evil, tmp_path, monkeypatch):
    from mmengine.runner import CheckpointLoader

    monkeypatch.delenv('TORCH_FORCE_WEIGHTS_ONLY_LOAD', raising=False)
    weights_only = tool('checkpoints').weights_only
    with weights_only(trusted=False), pytest.raises(Exception, match='[Ww]eights.only'):
        CheckpointLoader.load_checkpoint(str(evil), map_location='cpu', logger='silent')
    assert not (tmp_path / 'ran').exists()
    assert 'TORCH_FORCE_WEIGHTS_ONLY_LOAD' not in os.environ
    with weights_only(trusted=True):
        CheckpointLoader.load_checkpoint(str(evil), map_location='cpu', logger='silent')
    assert (tmp_path / 'ran').exists()


def test_own_checkpoints_need_no_trust(tool, trained, classifier):
    for run in (trained, classifier):
        assert 'state_dict' in tool('checkpoints').load_checkpoint(str(run['checkpoint']))


# ---- One training in a work dir


def test_a_second_training_is_refused(tool, make_config, data_flags, tmp_path, capsys):
    work_dir = tmp_path / 'run'
    config = make_config()
    claimed = tool('run_state').claimed
    with claimed(str(work_dir), 'none'):
        before = sorted(work_dir.iterdir())
        # A claim belongs to the open file, so it holds within a process, too.
        assert tool('train').main([str(config), *data_flags, '--work-dir', str(work_dir)]) == 2
        assert f'work dir {work_dir} is in use by another training' in capsys.readouterr().err
        assert sorted(work_dir.iterdir()) == before
    with claimed(str(work_dir), 'none'):
        pass


def test_other_processes_of_one_run_do_not_claim(tool, tmp_path, monkeypatch):
    claimed = tool('run_state').claimed
    with claimed(str(tmp_path), 'none'):
        monkeypatch.setenv('RANK', '1')
        with claimed(str(tmp_path), 'pytorch'):
            pass


def killed_at(step: int, runner: Runner, folder: Path) -> bool:
    """Trains in a child that dies before its step-th change of a file; False where it has less."""
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL)
        return status != 0
    try:
        changes = iter(range(step))

        def kill(event: str, arguments: tuple) -> None:
            if event in ('os.rename', 'os.remove') or (
                    event == 'open' and arguments[2] & os.O_ACCMODE):
                if str(arguments[0]).startswith(str(folder)) and next(changes, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        runner.train()
        os._exit(0)
    finally:
        os._exit(1)


def test_killed_before_every_change_of_a_file(tool, tmp_path):
    """Checkpoints of 3 epochs, one of them kept: what was complete is there to go on from."""
    run_state, load = tool('run_state'), tool('checkpoints').load_checkpoint
    runner = Runner(
        model=Line(), work_dir=str(tmp_path), train_dataloader=dict(
            batch_size=1, dataset=[(torch.ones(1), )], num_workers=0,
            sampler=dict(type='DefaultSampler', shuffle=False),
            collate_fn=dict(type='default_collate')),
        train_cfg=dict(by_epoch=True, max_epochs=3),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1)), default_hooks=dict(
            checkpoint=dict(type='SafeCheckpointHook', interval=1, max_keep_ckpts=1)))
    resumed = [0]
    died = True
    while died:
        for path in tmp_path.iterdir():
            if path.is_file():
                path.unlink()
        died = killed_at(len(resumed) - 1, runner, tmp_path)
        for path in tmp_path.glob('*.pth'):
            assert load(str(path))['meta']['epoch'] == int(path.stem[6:])
        path, notes = run_state.newest_intact_checkpoint(str(tmp_path), trusted=False)
        assert notes == []
        resumed.append(int(Path(path).stem[6:]) if path else 0)
    assert resumed == sorted(resumed) and set(resumed) == {0, 1, 2, 3}
    assert len(resumed) > 9


TRAINING = """
import sys, torch
from mmengine.model import BaseModel
from mmengine.runner import Runner
import mmlaplacian
sys.path.append(sys.argv[2])
import run_state

class Line(BaseModel):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(1, 200_000)

    def forward(self, x, mode):
        return dict(loss=self.line(x).square().mean())

with run_state.claimed(sys.argv[1], 'none'):
    Runner(model=Line(), work_dir=sys.argv[1], train_dataloader=dict(
               batch_size=2, dataset=[(torch.ones(1), )] * 2,
               sampler=dict(type='DefaultSampler', shuffle=False),
               collate_fn=dict(type='default_collate')),
           train_cfg=dict(by_epoch=True, max_epochs=100_000),
           optim_wrapper=dict(optimizer=dict(type='Adam', lr=0.1)),
           default_hooks=dict(checkpoint=dict(type='SafeCheckpointHook', interval=1,
                                              max_keep_ckpts=2))).train()
"""


def test_a_killed_training_leaves_no_claim_and_every_checkpoint(tool, tmp_path):
    """Kill -9 in the midst of checkpoints, at whatever it does then."""
    run_state, load = tool('run_state'), tool('checkpoints').load_checkpoint
    work_dir = tmp_path / 'run'
    with (tmp_path / 'log').open('w') as log:
        process = subprocess.Popen(
            [sys.executable, '-c', TRAINING, str(work_dir), str(REPO / 'tools')], stdout=log,
            stderr=log, cwd=tmp_path, env={**os.environ, 'CUDA_VISIBLE_DEVICES': ''})
    try:
        give_up = time.monotonic() + 150
        while not list(work_dir.glob('epoch_[4-9].pth')):
            assert process.poll() is None and time.monotonic() < give_up, \
                (tmp_path / 'log').read_text()[-2000:]
            time.sleep(0.01)
        with pytest.raises(tool('cli').UserError, match='in use by another training'), \
                run_state.claimed(str(work_dir), 'none'):
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    kept = sorted(int(path.stem[6:]) for path in work_dir.glob('epoch_*.pth'))
    assert 2 <= len(kept) <= 3 and kept[-1] - kept[0] == len(kept) - 1
    for number in kept:
        assert load(str(work_dir / f'epoch_{number}.pth'))['meta']['epoch'] == number
    path, notes = run_state.newest_intact_checkpoint(str(work_dir), trusted=False)
    assert path == str(work_dir / f'epoch_{kept[-1]}.pth') and notes == []
    with run_state.claimed(str(work_dir), 'none'):
        pass
