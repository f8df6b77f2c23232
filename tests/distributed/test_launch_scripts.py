"""The launch scripts, run with stand-ins for ``srun`` and Python that print their arguments."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / 'tools'


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A folder with ``srun`` and ``python``, each printing its arguments a line."""
    for name in ('srun', 'python'):
        script = tmp_path / name
        script.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        script.chmod(0o755)
    return tmp_path


def launch(stand_in: Path, script: str, *args: str,
           **environment: str) -> subprocess.CompletedProcess:
    inherited = {name: value for name, value in os.environ.items() if name not in (
        'NNODES', 'NODE_RANK', 'MASTER_ADDR', 'PORT', 'GPUS', 'GPUS_PER_NODE', 'CPUS_PER_TASK',
        'SRUN_ARGS')}
    return subprocess.run(
        [str(TOOLS / script), *args], capture_output=True, text=True, cwd=stand_in,
        env={**inherited, 'PATH': f'{stand_in}:{os.environ["PATH"]}',
             'PYTHON': str(stand_in / 'python'), **environment})


def arguments(run: subprocess.CompletedProcess) -> list[str]:
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_slurm(stand_in: Path) -> None:
    given = arguments(launch(stand_in, 'slurm_train.sh', 'part', 'job', 'a config.py', 'a dir',
                             '--resume', '--cfg-options', 'a=b c'))
    command = given.index(str(stand_in / 'python'))
    assert given[:command] == [
        '--partition=part', '--job-name=job', '--nodes=1', '--ntasks=8', '--ntasks-per-node=8',
        '--gres=gpu:8', '--cpus-per-task=5', '--kill-on-bad-exit=1']
    assert given[command + 1:] == [
        '-u', str(TOOLS / 'train.py'), 'a config.py', '--work-dir', 'a dir', '--launcher',
        'slurm', '--resume', '--cfg-options', 'a=b c']


@pytest.mark.parametrize(('environment', 'nodes', 'tasks', 'a_node'), [
    (dict(GPUS='16'), 2, 16, 8), (dict(GPUS='2'), 1, 2, 2),
    (dict(GPUS='12', GPUS_PER_NODE='4'), 3, 12, 4)])
def test_slurm_counts(stand_in: Path, environment: dict[str, str], nodes: int, tasks: int,
                      a_node: int) -> None:
    given = arguments(launch(stand_in, 'slurm_train.sh', 'p', 'j', 'c', 'w', CPUS_PER_TASK='3',
                             SRUN_ARGS='--quotatype=spot --time=1:00', **environment))
    assert {f'--nodes={nodes}', f'--ntasks={tasks}', f'--ntasks-per-node={a_node}',
            f'--gres=gpu:{a_node}', '--cpus-per-task=3', '--quotatype=spot',
            '--time=1:00'} <= set(given)


def test_slurm_uneven_nodes(stand_in: Path) -> None:
    run = launch(stand_in, 'slurm_train.sh', 'p', 'j', 'c', 'w', GPUS='10')
    assert run.returncode == 2 and run.stdout == ''
    assert run.stderr == 'error: GPUS must be a multiple of GPUS_PER_NODE=8, got 10\n'


def test_slurm_usage(stand_in: Path) -> None:
    run = launch(stand_in, 'slurm_train.sh', 'p', 'j', 'c')
    assert run.returncode == 2 and run.stderr.startswith('usage: ')


@pytest.mark.parametrize(('script', 'positional'), [
    ('dist_train.sh', ['a config.py']), ('dist_test.sh', ['a config.py', 'a.pth'])])
@pytest.mark.parametrize(('environment', 'nodes', 'rank', 'address', 'port'), [
    ({}, 1, 0, '127.0.0.1', 29500),
    (dict(NNODES='3', NODE_RANK='2', MASTER_ADDR='10.0.0.1', PORT='29777'),
     3, 2, '10.0.0.1', 29777)])
def test_torchrun(stand_in: Path, script: str, positional: list[str],
                  environment: dict[str, str], nodes: int, rank: int, address: str,
                  port: int) -> None:
    given = arguments(launch(stand_in, script, *positional, '4', '--cfg-options', 'a=b c',
                             **environment))
    tool = str(TOOLS / f'{script.removeprefix("dist_").removesuffix(".sh")}.py')
    assert given == [
        '-m', 'torch.distributed.run', f'--nnodes={nodes}', f'--node_rank={rank}',
        '--nproc_per_node=4', f'--master_addr={address}', f'--master_port={port}', tool,
        *positional, '--launcher', 'pytorch', '--cfg-options', 'a=b c']
