"""``python -m mmlaplacian.doctor``: here, and in environments that are made up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace

import pytest
import torch

from mmlaplacian.doctor import hardware, implementations, packages, self_test
from mmlaplacian.doctor.__main__ import main
from mmlaplacian.doctor.finding import Finding
from mmlaplacian.doctor.report import as_json, as_text
from mmlaplacian.ops import cupy_runtime
from mmlaplacian.ops.backend import ENVIRONMENT_VARIABLE
from mmlaplacian.ops.laplacian_kernel import cpu_impl, torch_impl


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Puts a distribution, and a package if ``text`` is given, before all others."""
    site = tmp_path / 'site'
    site.mkdir()

    def put(distribution: str, package: str, text: str | None = None) -> None:
        info = site / f'{distribution.replace("-", "_")}-9.9.dist-info'
        info.mkdir()
        (info / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {distribution}\n'
                                       'Version: 9.9\n')
        (info / 'top_level.txt').write_text(f'{package}\n')
        if text is not None:
            (site / package).mkdir()
            (site / package / '__init__.py').write_text(text)
            for name in [name for name in sys.modules if name.split('.')[0] == package]:
                monkeypatch.delitem(sys.modules, name)
        monkeypatch.syspath_prepend(site)
        packages._distributions.cache_clear()

    return put


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that torch sees; nothing can run on it."""
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda index: 'a GPU')
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda index=0: (9, 0))
    monkeypatch.setattr(torch.cuda, 'get_arch_list', lambda: ['sm_75', 'sm_90', 'sm_120'])


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 0)


def named(findings: list[Finding], name: str) -> Finding:
    found, = (finding for finding in findings if finding.name == name)
    return found


def wrong(findings: list[Finding], name: str, value: str, fix: str) -> None:
    finding = named(findings, name)
    assert finding.status == 'wrong'
    assert value in finding.value and fix in finding.fix
    assert '\n' not in finding.value + finding.fix


# ---- Packages


def test_tested_stack_is_right_here() -> None:
    findings = packages.check_base() + packages.check_openmmlab()
    assert named(findings, 'torch').value.startswith(torch.__version__)
    for name in ('mmengine', 'mmcv', 'mmcv.ops', 'checkpoints', 'mmlaplacian'):
        assert named(findings, name).status == 'ok', named(findings, name)
    assert 'onedl-mmcv' in named(findings, 'mmcv').value


def test_two_distributions_of_one_package(install: Callable[..., None]) -> None:
    install('mmcv', 'mmcv')
    wrong(packages.check_openmmlab(), 'mmcv', 'provided by mmcv 9.9 and onedl-mmcv',
          'pip uninstall mmcv onedl-mmcv, then install onedl-mmcv alone')


def test_official_package_that_refuses_its_neighbours(install: Callable[..., None]) -> None:
    install('mmsegmentation', 'mmseg', "assert False, 'MMCV==2.3.6 is used but incompatible'")
    wrong(packages.check_openmmlab(), 'mmseg',
          'mmsegmentation 9.9 does not import (AssertionError: MMCV==2.3.6 is used but',
          'install onedl-mmsegmentation, whose versions fit')


@pytest.mark.parametrize('text', ['raise OSError("libGL.so.1: cannot open")', 'import no_such_one',
                                  'def f(:', '1 / None', 'None.x'])
def test_package_that_does_not_import(install: Callable[..., None], text: str) -> None:
    install('onedl-mmsegmentation', 'mmseg', text)
    wrong(packages.check_openmmlab(), 'mmseg', 'does not import (',
          'pip install --force-reinstall onedl-mmsegmentation')


def test_mmengine_that_cannot_read_its_own_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmengine.runner import CheckpointLoader

    def refuse(*_: object, **__: object) -> None:
        raise UnpicklingError('Weights only load failed.\nmore')

    monkeypatch.setattr(CheckpointLoader, 'load_checkpoint', refuse)
    wrong(packages.check_openmmlab(), 'checkpoints',
          '(UnpicklingError: Weights only load failed.)',
          'install onedl-mmengine in the place of mmengine')


def test_mmcv_without_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, 'mmcv.ops', None)
    wrong(packages.check_openmmlab(), 'mmcv.ops', 'does not import (ModuleNotFoundError',
          'MMCV_WITH_OPS=1 pip install --no-build-isolation')


@pytest.mark.parametrize(('kept', 'value'), [
    ([0, 1, 2], 'NMS on cpu keeps boxes [0, 1, 2] instead of [0, 2]'), (None, 'NMS fails on cpu')])
def test_mmcv_ops_that_do_not_work(monkeypatch: pytest.MonkeyPatch, kept: list[int] | None,
                                   value: str) -> None:
    def nms(*_: object) -> tuple[None, torch.Tensor]:
        if kept is None:
            raise RuntimeError('nms_impl: implementation for device cpu not found.')
        return None, torch.tensor(kept)

    monkeypatch.setitem(sys.modules, 'mmcv.ops', SimpleNamespace(nms=nms))
    finding, = packages._check_ops()
    assert finding.status == 'wrong' and value in finding.value
    assert 'MMCV_WITH_OPS=1 pip' in finding.fix


def test_mmcv_for_the_cpu_where_a_gpu_is(monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    def to(self: torch.Tensor, device: str) -> torch.Tensor:
        if device != 'cpu':
            raise RuntimeError('nms_impl: implementation for device cuda:0 not found.')
        return self

    monkeypatch.setattr(torch.Tensor, 'to', to)
    finding, = packages._check_ops()
    assert finding.status == 'wrong' and 'NMS fails on cuda:0' in finding.value
    assert 'MMCV_WITH_OPS=1 FORCE_CUDA=1 pip' in finding.fix


@pytest.mark.parametrize(('missing', 'name', 'status'), [
    ('mmengine', 'mmengine', 'note'), ('mmcv', 'mmcv', 'wrong'), ('mmdet', 'mmdet', 'ok')])
def test_packages_that_are_not_there(monkeypatch: pytest.MonkeyPatch, missing: str, name: str,
                                     status: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    finding = named(packages.check_openmmlab(), name)
    assert finding.status == status and finding.value.startswith('not installed')


# ---- GPU, CuPy, NVRTC


@pytest.fixture
def no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, 'cupy', None)


def test_no_cupy_matters_with_a_gpu_alone(no_cupy: None, without_gpu: None) -> None:
    finding, = hardware.check_cupy()
    assert finding.status == 'note' and 'mmlaplacian[cuda' in finding.fix


@pytest.mark.parametrize(('cuda', 'extra'), [('12.8', 'cuda12'), ('13.0', 'cuda13')])
def test_no_cupy_with_a_gpu(monkeypatch: pytest.MonkeyPatch, no_cupy: None, gpu: None, cuda: str,
                            extra: str) -> None:
    monkeypatch.setattr(torch.version, 'cuda', cuda)
    wrong(hardware.check_cupy(), 'CuPy', 'plain torch on the GPU',
          f'pip install mmlaplacian[{extra}]')


@pytest.mark.parametrize('text', ["raise ImportError('libcuda.so.1: cannot open shared object')",
                                  "raise RuntimeError('CuPy is not correctly installed')",
                                  "raise AttributeError('_ARRAY_API not found')"])
def test_broken_cupy_shows_its_own_error(monkeypatch: pytest.MonkeyPatch,
                                         install: Callable[..., None], text: str) -> None:
    install('cupy-cuda13x', 'cupy', text)
    monkeypatch.setattr(hardware, 'providers', lambda package: ['cupy-cuda13x'])
    cupy_runtime._import_cupy.cache_clear()
    try:
        wrong(hardware.check_cupy(), 'CuPy', text.split("'")[1], 'pip uninstall cupy-cuda13x')
    finally:
        cupy_runtime._import_cupy.cache_clear()


def test_two_cupys(install: Callable[..., None]) -> None:
    install('cupy-cuda11x', 'cupy', '')
    install('cupy', 'cupy')
    wrong(hardware.check_cupy(), 'CuPy', 'cupy-cuda11x 9.9', 'keep one: pip uninstall cupy ')


def test_cupy_for_another_cuda_than_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip('cupy')
    monkeypatch.setattr(torch.version, 'cuda', '11.8')
    wrong(hardware.check_cupy(), 'CuPy', 'but torch for CUDA 11', 'pip uninstall cupy')


def test_nvrtc_compiles_the_kernels() -> None:
    pytest.importorskip('cupy')
    assert 'compiles the kernels for sm_' in named(hardware.check_cupy(), 'NVRTC').value


def test_nvrtc_that_does_not_know_the_gpu(monkeypatch: pytest.MonkeyPatch,
                                          without_gpu: None) -> None:
    pytest.importorskip('cupy')
    monkeypatch.setattr(hardware, '_TRIED_WITHOUT_GPU', 999)
    wrong(hardware.check_cupy(), 'NVRTC', 'does not compile the kernels for sm_999',
          'pip install --upgrade mmlaplacian[cuda')


def test_no_kernel_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip('cupy')
    cupy_runtime.source_text.cache_clear()
    monkeypatch.setattr(cupy_runtime, '_SOURCE_FOLDERS', (tmp_path, ))
    wrong(hardware.check_cupy(), 'NVRTC', 'laplacian_kernel.cu was not found',
          '--force-reinstall mmlaplacian')


@pytest.mark.parametrize(('visible', 'status'), [(None, 'wrong'), ('0', 'wrong'), ('', 'ok'),
                                                 ('-1', 'ok')])
def test_gpu_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                     without_gpu: None, visible: str | None, status: str) -> None:
    (tmp_path / 'nvidia0').touch()
    monkeypatch.setattr(hardware, '_DEVICE_FILES', tmp_path)
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    if visible is not None:
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
    finding, = hardware.check_gpu()
    assert finding.status == status
    monkeypatch.setattr(torch.version, 'cuda', None)
    finding, = hardware.check_gpu()
    assert ('install a torch that is built for CUDA' in finding.fix) == (status == 'wrong')


def test_gpus_are_listed(monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    assert named(hardware.check_gpu(), 'cuda:0') == Finding(
        'hardware', 'cuda:0', 'a GPU, sm_90')
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda index=0: (6, 1))
    wrong(hardware.check_gpu(), 'cuda:0', 'sm_61', 'torch is built for sm_75')


# ---- Compiler


@pytest.mark.parametrize('variables', [{'PATH': ''}, {'CC': 'false'}, {'CC': 'no-such-cc'}])
def test_no_compiler(monkeypatch: pytest.MonkeyPatch, without_gpu: None,
                     variables: dict[str, str]) -> None:
    monkeypatch.delenv('CC', raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    wrong(hardware.check_compiler(), 'C compiler', 'C compiler', 'install gcc')


def test_no_compiler_matters_little_on_a_gpu(monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    monkeypatch.setenv('CC', 'no-such-cc')
    finding, = hardware.check_compiler()
    assert finding.status == 'note'


def test_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / 'file').touch()
    monkeypatch.setenv('MMLAPLACIAN_CACHE', str(tmp_path / 'file' / 'cache'))
    finding = hardware._check_cache()
    assert finding.status == 'note' and 'MMLAPLACIAN_CACHE' in finding.fix
    monkeypatch.setenv('MMLAPLACIAN_CACHE', str(tmp_path / 'new' / 'cache'))
    assert hardware._check_cache().status == 'ok'
    assert not (tmp_path / 'new').exists()


# ---- The choice


def test_a_refusal_is_the_reason(monkeypatch: pytest.MonkeyPatch, without_gpu: None) -> None:
    from mmlaplacian.ops.backend import UnsupportedError

    def refuse(q: torch.Tensor) -> None:
        raise UnsupportedError('the reason')

    monkeypatch.setattr(cpu_impl, 'check', refuse)
    findings = implementations.check_choice()
    assert named(findings, 'laplacian_kernel, cpu').value == 'plain torch, because the reason'
    assert named(findings, 'newton_schulz_inverse, cpu').value == \
        'plain torch, which has no other form on this device'


@pytest.mark.parametrize(('backend', 'status', 'value'), [
    ('auto', 'ok', None), ('torch', 'note', 'plain torch, because MMLAPLACIAN_BACKEND says so'),
    ('cupy', 'note', 'raises: the CUDA kernels need CUDA tensors, got cpu')])
def test_forced_backend(monkeypatch: pytest.MonkeyPatch, without_gpu: None, backend: str,
                        status: str, value: str | None) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, backend)
    assert named(implementations.check_backend(), ENVIRONMENT_VARIABLE).status == status
    finding = named(implementations.check_choice(), 'nystrom_attention, cpu')
    assert value is None or finding.value == value
    assert finding.status == ('wrong' if backend == 'cupy' else 'ok')


def test_unknown_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'cuda')
    wrong(implementations.check_backend(), ENVIRONMENT_VARIABLE, 'cuda',
          'one of auto, torch, cpu, cupy')
    assert implementations.check_choice() == []


# ---- The self-test


def test_every_implementation_agrees_with_the_reference(without_gpu: None) -> None:
    findings = self_test.check_ops()
    assert [finding.name for finding in findings] == [
        'laplacian_kernel, torch, cpu', 'laplacian_kernel, cpu, cpu',
        'gaussian_kernel, torch, cpu', 'gaussian_kernel, cpu, cpu',
        'newton_schulz_inverse, torch, cpu',
        'nystrom_attention, torch, cpu', 'nystrom_attention, cpu, cpu']
    for finding in findings:
        assert finding.status == 'ok'
        assert finding.value.startswith(('relative error', 'left out: '))


@pytest.mark.parametrize('factor', [1.01, float('nan'), 0.])
def test_a_wrong_forward_is_found(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    right = torch_impl.kernel_matrix
    monkeypatch.setattr(torch_impl, 'kernel_matrix', lambda *args: right(*args) * factor)
    finding = self_test._check('laplacian_kernel', 'torch', 'cpu')
    assert finding.status == 'wrong' and 'more than 1e-03' in finding.value


def test_a_wrong_gradient_of_one_input_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch_impl.kernel_matrix_backward

    def swapped(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
        grad_q, grad_k = right(*args)
        return grad_q, -grad_k

    monkeypatch.setattr(torch_impl, 'kernel_matrix_backward', swapped)
    assert self_test._check('gaussian_kernel', 'torch', 'cpu').status == 'wrong'


def test_an_implementation_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError('illegal memory access\nmore')

    monkeypatch.setattr(torch_impl, 'kernel_matrix', fail)
    finding = self_test._check('laplacian_kernel', 'torch', 'cpu')
    assert finding.status == 'wrong'
    assert finding.value == 'fails (RuntimeError: illegal memory access)'
    assert 'MMLAPLACIAN_BACKEND=torch' in finding.fix


# ---- The report


FINDINGS = [Finding('one', 'a', 'well'), Finding('one', 'long name', 'half', 'note', 'do this'),
            Finding('two', 'b', 'bad', 'wrong', 'do that')]


def test_text() -> None:
    lines = as_text(FINDINGS).splitlines()
    assert lines[1:8] == ['', 'one', '  a          well', '- long name  half', '', 'two',
                          '! b          bad']
    assert lines[-2:] == ['! b: bad', '    do that']
    assert as_text(FINDINGS[:2]).endswith('Nothing is wrong.\n')


def test_json() -> None:
    content = json.loads(as_json(FINDINGS))
    assert content['ok'] is False and json.loads(as_json(FINDINGS[:2]))['ok'] is True
    assert content['findings'][2] == dict(section='two', name='b', value='bad', status='wrong',
                                          fix='do that')


@pytest.mark.parametrize('option', [[], ['--json']])
@pytest.mark.parametrize('count', [2, 3])
def test_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                     option: list[str], count: int) -> None:
    monkeypatch.setattr('mmlaplacian.doctor.__main__.examine', lambda: FINDINGS[:count])
    assert main(option) == (count == 3)
    assert capsys.readouterr().out == (as_json if option else as_text)(FINDINGS[:count])


def test_it_runs_where_the_package_itself_does_not_import(tmp_path: Path) -> None:
    (tmp_path / 'mmcv').mkdir()
    (tmp_path / 'mmcv' / '__init__.py').write_text("raise ImportError('no libraries here')")
    environment = {**os.environ, 'PYTHONPATH': str(tmp_path)}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *command], cwd=tmp_path, env=environment,
                              capture_output=True, text=True, check=False, timeout=120)

    assert 'no libraries here' in run('-c', 'import mmlaplacian').stderr
    result = run('-m', 'mmlaplacian.doctor', '--json')
    assert result.returncode == 1, result.stderr
    findings = [Finding(**entry) for entry in json.loads(result.stdout)['findings']]
    wrong(findings, 'mmcv', 'does not import (ImportError: no libraries here)', 'onedl-mmcv')
    wrong(findings, 'mmlaplacian.models', 'no libraries here', 'mend the packages above')
    assert named(findings, 'nystrom_attention, torch, cpu').status == 'ok'
