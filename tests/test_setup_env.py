"""tools/setup_env.sh with a stand-in for Python: what it refuses, installs, skips and repairs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
INPUTS = ('requirements.txt', 'setup.cfg', 'pyproject.toml', 'tools/setup_env.sh')
# All that the script may need of a machine besides Python, a compiler and CUDA.
COMMANDS = ('bash', 'cat', 'cp', 'cut', 'dirname', 'grep', 'ln', 'mkdir', 'mktemp', 'readlink',
            'rm', 'sed', 'sha256sum')

# Writes down each call. It answers what the script asks of Python; `-m venv` makes a folder with
# itself inside. The file `fail` holds parts of calls that fail, `fail_once` a part of one call and
# the status that it fails with.
FAKE_PYTHON = r"""#!/usr/bin/env bash
call="$*"
printf '%s\n' "$call" >>"$FAKE/calls"
case $call in *onedl-mmcv)
  printf '%s\n' "FORCE_CUDA=$FORCE_CUDA CUDA_HOME=$CUDA_HOME CFLAGS=$CFLAGS" >>"$FAKE/mmcv" ;;
esac
printf '%s\n' "$PIP_FIND_LINKS" >"$FAKE/find_links"
while read -r pattern; do
  [[ -z $pattern || $call != *$pattern* ]] || exit 1
done <"$FAKE/fail"
read -r status pattern <"$FAKE/fail_once"
if [[ -n $pattern && $call == *$pattern* ]]; then
  echo >"$FAKE/fail_once"
  exit "$status"
fi
case $call in
  *version_info*) cat "${0%/*}/version" ;;
  '-m venv --clear '*)
    rm -rf .venv
    mkdir -p .venv/bin
    ln -s "$0" .venv/bin/python
    cp "${0%/*}/version" .venv/bin/version
    echo "VIRTUAL_ENV=$PWD/.venv" >.venv/bin/activate ;;
esac
"""


class Machine:
    """A clone of the set-up and a PATH with nothing but what the test put there."""

    def __init__(self, folder: Path) -> None:
        self.repo = folder / 'repo'
        self.bin = folder / 'bin'
        self.fake = folder / 'fake'
        for directory in (self.repo / 'tools', self.bin, self.fake):
            directory.mkdir(parents=True)
        for name in INPUTS:
            shutil.copy(ROOT / name, self.repo / name)
        for name in COMMANDS:
            (self.bin / name).symlink_to(shutil.which(name))
        self.add_command('c++')
        self.add_python('python3', '3.11')
        self.env = {'PATH': str(self.bin), 'FAKE': str(self.fake), 'CUDA_VISIBLE_DEVICES': '',
                    'TMPDIR': str(folder), 'PIP_FIND_LINKS': 'here there'}
        self.fail()

    def add_command(self, name: str, body: str = '') -> None:
        path = self.bin / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/usr/bin/env bash\n{body}\n')
        path.chmod(0o755)

    def add_python(self, name: str, version: str) -> None:
        # The version lies beside the interpreter, so each has a folder of its own.
        folder = self.fake / name
        folder.mkdir()
        (folder / 'python').write_text(FAKE_PYTHON)
        (folder / 'python').chmod(0o755)
        (folder / 'version').write_text(version + '\n')
        self.add_command(name, f'exec {folder}/python "$@"')

    def add_gpu(self, nvcc_version: str | None) -> None:
        """Shows a GPU, and a toolkit of this version in CUDA_HOME (empty if None)."""
        self.add_command('nvidia-smi', 'echo "GPU 0: stand-in"')
        home = self.fake / 'cuda'
        (home / 'include').mkdir(parents=True)
        self.env.update(CUDA_HOME=str(home))
        del self.env['CUDA_VISIBLE_DEVICES']
        if nvcc_version is not None:
            (home / 'include' / 'cuda_runtime.h').touch()
            self.add_command(f'{home}/bin/nvcc', f'echo "tools, release {nvcc_version}, V1"')

    def fail(self, *patterns: str, once: str = '', status: int = 1) -> None:
        """Lets calls of Python that contain one of the patterns fail."""
        (self.fake / 'fail').write_text(''.join(f'{pattern}\n' for pattern in patterns))
        (self.fake / 'fail_once').write_text(f'{status} {once}\n')

    def run(self) -> subprocess.CompletedProcess[str]:
        for name in ('calls', 'mmcv'):
            (self.fake / name).unlink(missing_ok=True)
        return subprocess.run(['bash', 'tools/setup_env.sh'], cwd=self.repo, env=self.env,
                              capture_output=True, text=True, check=False, timeout=60)

    def run_well(self) -> list[str]:
        """Runs it, expects success, returns its calls of Python."""
        result = self.run()
        assert result.returncode == 0, result.stderr
        assert result.stderr == ''
        return self.calls()

    def calls(self) -> list[str]:
        path = self.fake / 'calls'
        return path.read_text().splitlines() if path.exists() else []

    def installs(self) -> list[str]:
        return [call for call in self.calls() if ' install ' in call]

    def refuses(self, *parts: str) -> None:
        """Expects one line that holds the parts, no download and no trace."""
        result = self.run()
        assert result.returncode == 1
        assert len(result.stderr.splitlines()) == 1, result.stderr
        assert result.stderr.startswith('error: ')
        for part in parts:
            assert part in result.stderr
        assert self.installs() == []
        assert not (self.repo / '.venv').exists()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize('version', ['2.7', '3.9', '3.13'])
def test_unsupported_python_is_refused(machine: Machine, version: str) -> None:
    machine.add_python('other', version)
    machine.env['PYTHON'] = 'other'
    machine.refuses(f'Python {version}', '3.10, 3.11, 3.12', 'PYTHON=')
    assert not any('-m' in call for call in machine.calls())


def test_absent_python_is_refused(machine: Machine) -> None:
    machine.env['PYTHON'] = 'python3.10'
    machine.refuses("'python3.10' was not found", '3.10, 3.11, 3.12', 'PYTHON=')


def test_python_without_ensurepip_is_refused(machine: Machine) -> None:
    machine.fail('import ensurepip')
    machine.refuses('python3', 'ensurepip', 'python3.11-venv')


def test_missing_compiler_is_refused(machine: Machine) -> None:
    (machine.bin / 'c++').unlink()
    machine.fail(' download ')
    machine.refuses('C++ compiler', 'PIP_FIND_LINKS')


def test_missing_python_headers_are_refused(machine: Machine) -> None:
    machine.fail('Python.h', ' download ')
    machine.refuses('Python.h', 'python3-dev')


def test_prebuilt_mmcv_needs_no_compiler(machine: Machine) -> None:
    (machine.bin / 'c++').unlink()
    machine.run_well()
    lookups = [call for call in machine.calls() if ' download ' in call]
    assert len(lookups) == 1
    assert '--no-index' in lookups[0]


@pytest.mark.parametrize('nvcc_version', [None, '12.4'])
def test_gpu_without_its_nvcc_is_refused(machine: Machine, nvcc_version: str | None) -> None:
    machine.add_gpu(nvcc_version)
    machine.refuses('NVIDIA GPU', 'CUDA 13', 'CUDA_HOME')
    assert not any('venv --clear' in call for call in machine.calls())


def test_gpu_without_compiler_is_refused(machine: Machine) -> None:
    machine.add_gpu('13.0')
    (machine.bin / 'c++').unlink()
    machine.refuses('C++ compiler')


def test_gpu_builds_mmcv_with_cuda(machine: Machine) -> None:
    machine.add_gpu('13.1')
    machine.run_well()
    assert (machine.fake / 'mmcv').read_text().splitlines() == [
        f'FORCE_CUDA=1 CUDA_HOME={machine.env["CUDA_HOME"]} CFLAGS=-g0 -O2']


def test_hidden_gpu_builds_mmcv_for_cpu(machine: Machine) -> None:
    machine.add_gpu(None)
    machine.env['CUDA_VISIBLE_DEVICES'] = ''
    machine.run_well()
    assert (machine.fake / 'mmcv').read_text().startswith('FORCE_CUDA=0 ')


def test_torch_without_cuda_stops_before_mmcv(machine: Machine) -> None:
    machine.add_gpu('13.0')
    machine.fail('--torch-cuda 13')
    assert machine.run().returncode == 1
    assert len(machine.installs()) == 1


def test_order_of_the_installation(machine: Machine) -> None:
    machine.run_well()
    torch, mmcv, rest, project = machine.installs()
    assert torch.endswith(' torch torchvision')
    assert mmcv.endswith(' onedl-mmcv')
    assert '--requirement requirements.txt' in rest
    assert project.endswith('--editable .')
    assert all('--no-build-isolation' in call for call in machine.installs())
    assert (machine.fake / 'find_links').read_text() == 'here there\n'


def test_headless_opencv_wins(machine: Machine) -> None:
    machine.fail(once='check_environment.py opencv')
    machine.run_well()
    forced = [call for call in machine.installs() if '--force-reinstall' in call]
    assert [call.rsplit(' ', 1)[1] for call in forced] == ['opencv-python-headless']
    assert machine.installs().index(forced[0]) == 3


def test_complete_environment_is_left_alone(machine: Machine) -> None:
    machine.run_well()
    machine.run_well()
    assert machine.installs() == []
    # Nor does it matter then what python3 has become.
    shutil.rmtree(machine.fake / 'python3')
    machine.add_python('python3', '3.13')
    machine.run_well()
    assert machine.installs() == []


@pytest.mark.parametrize('name', INPUTS)
def test_changed_input_is_installed(machine: Machine, name: str) -> None:
    machine.run_well()
    with (machine.repo / name).open('a') as file:
        file.write('\n')
    calls = machine.run_well()
    assert machine.installs() != []
    assert not any('venv --clear' in call for call in calls)


def test_interrupted_setup_goes_on(machine: Machine) -> None:
    machine.fail('--requirement')
    result = machine.run()
    assert result.returncode != 0
    assert 'run it again' in result.stderr
    machine.fail()
    calls = machine.run_well()
    assert not any('venv --clear' in call for call in calls)
    assert len(machine.installs()) == 4
    machine.run_well()
    assert machine.installs() == []


def test_lost_package_is_installed_again(machine: Machine) -> None:
    machine.run_well()
    machine.fail(once='check_environment.py versions')
    machine.run_well()
    assert machine.installs() != []


def test_broken_interpreter_is_replaced(machine: Machine) -> None:
    machine.run_well()
    (machine.repo / '.venv' / 'bin' / 'python').unlink()
    assert '-m venv --clear .venv' in machine.run_well()


def test_moved_environment_is_remade(machine: Machine) -> None:
    machine.run_well()
    machine.repo = machine.repo.rename(machine.repo.with_name('moved'))
    assert '-m venv --clear .venv' in machine.run_well()


def test_other_python_remakes(machine: Machine) -> None:
    machine.run_well()
    machine.add_python('python3.12', '3.12')
    machine.env['PYTHON'] = 'python3.12'
    assert '-m venv --clear .venv' in machine.run_well()
    machine.run_well()
    assert machine.installs() == []


def test_mmcv_without_ops_is_compiled(machine: Machine) -> None:
    machine.fail(once='check_environment.py ops', status=3)
    machine.run_well()
    recompiled = machine.installs()[-1]
    assert '--no-binary onedl-mmcv' in recompiled
    assert '--force-reinstall' in recompiled
    assert len((machine.fake / 'mmcv').read_text().splitlines()) == 2


def test_fault_outside_mmcv_does_not_compile_it(machine: Machine) -> None:
    machine.fail('check_environment.py ops')
    assert machine.run().returncode == 1
    assert not any('--no-binary' in call for call in machine.installs())


def test_environment_that_stays_broken_is_remade_once(machine: Machine) -> None:
    machine.run_well()
    machine.fail('check_environment.py versions opencv')
    (machine.repo / '.venv' / 'setup_env.stamp').unlink()
    result = machine.run()
    assert result.returncode == 1
    assert machine.calls().count('-m venv --clear .venv') == 1
    assert not (machine.repo / '.venv' / 'setup_env.stamp').exists()


def test_gpu_that_came_later_is_served(machine: Machine) -> None:
    machine.run_well()
    machine.add_gpu('13.0')
    machine.run_well()
    assert (machine.fake / 'mmcv').read_text().startswith('FORCE_CUDA=1 ')
    machine.run_well()
    assert machine.installs() == []
    machine.env['CUDA_VISIBLE_DEVICES'] = ''
    machine.run_well()
    assert machine.installs() == []


@pytest.fixture
def checker() -> ModuleType:
    spec = importlib.util.spec_from_file_location('check_environment',
                                                  ROOT / 'tools' / 'check_environment.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(Path(sys.prefix).resolve() != (ROOT / '.venv').resolve(),
                    reason='only .venv is held to the pins')
def test_this_environment_passes_every_check(capsys: pytest.CaptureFixture[str],
                                             checker: ModuleType) -> None:
    assert checker.main([]) == 0, capsys.readouterr().err
    assert 'NMS works on cpu' in capsys.readouterr().out


def test_mmcv_without_ops_is_told_from_other_faults(monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str],
                                                    checker: ModuleType) -> None:
    monkeypatch.setitem(sys.modules, 'mmcv.ops', None)
    assert checker.main(['ops']) == 3
    monkeypatch.setitem(sys.modules, 'mmcv', None)
    assert checker.main(['ops']) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith('error: mmcv.ops does not import')
    assert second.startswith('error: mmcv does not import')


def test_wrong_version_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                capsys: pytest.CaptureFixture[str], checker: ModuleType) -> None:
    monkeypatch.setattr(checker, 'ROOT', tmp_path)
    requirements = tmp_path / 'requirements.txt'
    requirements.write_text("# none\nabsent==1; python_version < '3'\npytest<1  # old\n")
    assert checker.main(['versions']) == 1
    requirements.write_text('no-such-package==1\n')
    assert checker.main(['versions']) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == f'error: pytest {pytest.__version__} is installed, <1 is needed'
    assert second == 'error: no-such-package is not installed'


def test_opencv_with_libgl_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                      capsys: pytest.CaptureFixture[str],
                                      checker: ModuleType) -> None:
    (tmp_path / 'cv2').mkdir()
    (tmp_path / 'cv2' / '__init__.py').touch()
    (tmp_path / 'cv2' / 'cv2.abi3.so').touch()
    ldd = tmp_path / 'ldd'
    ldd.write_text('#!/bin/sh\necho "libGL.so.1 => not found"\n')
    ldd.chmod(0o755)
    monkeypatch.delitem(sys.modules, 'cv2', raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv('PATH', str(tmp_path), prepend=os.pathsep)
    assert checker.main(['opencv']) == 1
    assert 'libGL' in capsys.readouterr().err


@pytest.mark.parametrize(('before', 'with_wheels', 'after'), [
    (None, True, '{wheels}'), ('one two', True, 'one two {wheels}'), ('one', False, 'one')])
def test_ci_run_extends_find_links(tmp_path: Path, before: str | None, with_wheels: bool,
                                   after: str) -> None:
    clone, wheels = tmp_path / 'main', tmp_path / 'shared' / 'wheels'
    (clone / '.ci').mkdir(parents=True)
    shutil.copy(ROOT / '.ci' / 'run', clone / '.ci' / 'run')
    (clone / 'Makefile').write_text('test:\n\t@echo "$$PIP_FIND_LINKS"; exit 3\n')
    if with_wheels:
        wheels.mkdir(parents=True)
    env = {name: value for name, value in os.environ.items() if name != 'PIP_FIND_LINKS'}
    if before is not None:
        env['PIP_FIND_LINKS'] = before
    result = subprocess.run(['bash', str(clone / '.ci' / 'run')], cwd=tmp_path, env=env,
                            capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode != 0
    assert after.format(wheels=wheels) in result.stdout.splitlines()
