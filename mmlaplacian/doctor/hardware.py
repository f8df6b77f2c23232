"""GPU, CuPy and NVRTC; C compiler and processor."""

import os
import re
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

from ..ops import cpu_runtime, cupy_runtime
from ..ops.backend import UnsupportedError
from .finding import Finding
from .packages import first_line, provided_by, providers

SECTION = 'hardware'
_DEVICE_FILES = Path('/dev')
# What the C text is written for, in the compiler's names.
_INSTRUCTION_SETS = {'__AVX512F__': 'AVX-512', '__AVX2__': 'AVX2', '__FMA__': 'FMA',
                     '__ARM_NEON': 'NEON', '__ARM_FEATURE_SVE': 'SVE'}
_TRIED_WITHOUT_GPU = 80


def torch_cuda_major() -> str:
    """The major version of the CUDA that torch is built for, or ''."""
    return (torch.version.cuda or '').partition('.')[0]


def check_gpu() -> list[Finding]:
    """The GPUs that torch sees, and those that it does not."""
    if torch.cuda.is_available():
        built = torch.cuda.get_arch_list()
        found = []
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            value = f'{torch.cuda.get_device_name(index)}, sm_{major}{minor}'
            oldest = min((int(re.sub(r'\D', '', arch)) for arch in built), default=0)
            if 10 * major + minor < oldest:
                found.append(Finding(SECTION, f'cuda:{index}', value, 'wrong',
                                     f'torch is built for {", ".join(built)}: install one for '
                                     'this GPU'))
            else:
                found.append(Finding(SECTION, f'cuda:{index}', value))
        return found
    if any(_DEVICE_FILES.glob('nvidia[0-9]*')) \
            and os.environ.get('CUDA_VISIBLE_DEVICES', 'all') not in ('', '-1'):
        reason = f'its driver must support CUDA {torch.version.cuda}: update the driver' \
            if torch.version.cuda else 'install a torch that is built for CUDA'
        return [Finding(SECTION, 'GPU', 'present, but torch cannot use it', 'wrong', reason)]
    return [Finding(SECTION, 'GPU', 'none that torch can use')]


def check_cupy() -> list[Finding]:
    """CuPy, its CUDA against torch's, and its compiler on this project's text."""
    names = providers('cupy')
    major = torch_cuda_major()
    extra = f'mmlaplacian[cuda{major}]' if major in ('12', '13') else 'mmlaplacian[cuda13]'
    if find_spec('cupy') is None:
        if torch.cuda.is_available():
            return [Finding(SECTION, 'CuPy', 'not installed: the ops run in plain torch on the '
                            'GPU', 'wrong', f'pip install {extra}')]
        return [Finding(SECTION, 'CuPy', 'not installed', 'note',
                        f'CUDA tensors alone need it: pip install {extra}')]
    if len(names) > 1:
        return [Finding(SECTION, 'CuPy', f'provided by {provided_by("cupy")}', 'wrong',
                        f'keep one: pip uninstall {" ".join(names)}, then pip install {extra}')]
    value = provided_by('cupy') or f'from {find_spec("cupy").origin}'
    try:
        cupy = cupy_runtime.require_cupy()
    except ImportError as error:
        return [Finding(SECTION, 'CuPy', f'{value} does not import '
                        f'({first_line(error.__cause__ or error)})', 'wrong',
                        f'pip uninstall {" ".join(names) or "cupy"}, then pip install {extra}')]
    cuda = f'{cupy.cuda.runtime.runtimeGetVersion() // 1000}'
    value = f'{value}, built for CUDA {cuda}'
    if major and cuda != major:
        return [Finding(SECTION, 'CuPy', f'{value}, but torch for CUDA {major}', 'wrong',
                        f'pip uninstall {" ".join(names)}, then pip install {extra}')]
    return [Finding(SECTION, 'CuPy', value), _check_nvrtc(cupy, extra)]


def _check_nvrtc(cupy: ModuleType, extra: str) -> Finding:
    """Compiles a kernel for the GPU, or without one for a common architecture."""
    arch = _TRIED_WITHOUT_GPU
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        arch = 10 * major + minor
    nvrtc = cupy.cuda.nvrtc
    options = ('--std=c++17', f'-arch=sm_{arch}', '-DSCALAR_TYPE=2', '-DKERNEL=0', '-DHEAD_DIM=32',
               '-DM_THREADS=7', '-DM_OUTPUTS=7')
    try:
        version = '.'.join(map(str, nvrtc.getVersion()))
        program = nvrtc.createProgram(cupy_runtime.source_text('laplacian_kernel'), 'kernel.cu',
                                      (), ())
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program).strip().splitlines()
            return Finding(SECTION, 'NVRTC', f'{version} does not compile the kernels for '
                           f'sm_{arch} ({log[0] if log else error})', 'wrong',
                           f'update CuPy and its CUDA wheels: pip install --upgrade {extra}')
        finally:
            nvrtc.destroyProgram(program)
    except FileNotFoundError as error:
        return Finding(SECTION, 'NVRTC', f'has nothing to compile ({error})', 'wrong',
                       'pip install --force-reinstall mmlaplacian')
    except (RuntimeError, ImportError, OSError) as error:
        return Finding(SECTION, 'NVRTC', f'does not load ({first_line(error)})', 'wrong',
                       'install the package nvidia-cuda-nvrtc of the same CUDA as CuPy')
    return Finding(SECTION, 'NVRTC', f'{version} compiles the kernels for sm_{arch}; they need '
                   'no headers')


def check_compiler() -> list[Finding]:
    """The C compiler, what it knows of the processor, and the cache."""
    try:
        compiler = cpu_runtime._find_compiler()
    except UnsupportedError as error:
        # On a GPU the C text serves little.
        return [Finding(SECTION, 'C compiler', str(error),
                        'note' if torch.cuda.is_available() else 'wrong',
                        'install gcc, e.g. apt install gcc, and unset CC: without it the ops run '
                        'in plain torch on a CPU')]
    macros = compiler.macros
    version = re.search(r'#define __VERSION__ "(.*)"', macros)
    sets = [name for macro, name in _INSTRUCTION_SETS.items()
            if re.search(rf'^#define {macro}\b', macros, re.MULTILINE)]
    found = [Finding(SECTION, 'C compiler', f'{" ".join(compiler.command)}, version '
                     f'{version[1] if version else "unknown"}'),
             Finding(SECTION, 'processor', f'{", ".join(sets) or "no vector instructions"}; '
                     f'torch uses {torch.get_num_threads()} threads')]
    if not compiler.openmp:
        found.append(Finding(SECTION, 'OpenMP', 'the compiler does not fit the runtime that torch '
                             'has loaded: one thread', 'note', 'use gcc: CC=gcc'))
    return [*found, _check_cache()]


def _check_cache() -> Finding:
    try:
        folder = cpu_runtime._cache_folder()
    except RuntimeError as error:
        return Finding(SECTION, 'cache', f'none ({error}): every process compiles anew', 'note',
                       f'name a folder in {cpu_runtime.CACHE_VARIABLE}')
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Finding(SECTION, 'cache', f'{folder} cannot be written: every process compiles '
                       'anew', 'note', f'name another folder in {cpu_runtime.CACHE_VARIABLE}')
    return Finding(SECTION, 'cache', str(folder))
