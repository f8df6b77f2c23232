"""nystrom_attention_backward.cu through the real compiler: it compiles, does not spill, adds and
multiplies."""

from collections import Counter
from functools import cache
from pathlib import Path

import nvrtc
import pytest

from mmlaplacian.ops.cupy_runtime import source_text
from mmlaplacian.ops.laplacian_kernel.tiling import landmark_tile

KERNELS = {f'nystrom_attention_{name}' for name in (
    'grad_context', 'grad_factors', 'grad_values', 'merge_grad_covariance', 'grad_keys',
    'grad_queries', 'grad_landmarks', 'merge_landmarks')}

pytestmark = pytest.mark.skipif(nvrtc.missing_compiler() is not None,
                                reason=str(nvrtc.missing_compiler()))


@cache
def compiled(arch: int, m: int = 49, d: int = 32, d_v: int = 32, dtype: int = 0,
             kernel: int = 0) -> tuple[bytes, str]:
    m_threads, m_outputs = landmark_tile(m)
    macros = {'SCALAR_TYPE': dtype, 'KERNEL': kernel, 'HEAD_DIM': d, 'VALUE_DIM': d_v,
              'LANDMARKS': m, 'M_THREADS': m_threads, 'M_OUTPUTS': m_outputs}
    return nvrtc.compile_text([source_text('nystrom_attention_backward')], macros, arch)


@pytest.mark.parametrize('arch', nvrtc.ARCHITECTURES)
@pytest.mark.parametrize('d', [32, 64])
def test_no_spill(arch, d):
    found = nvrtc.resources(compiled(arch, 49, d, d)[1])
    assert set(found) == KERNELS
    for kernel, resources in found.items():
        assert resources.spills == 0, (kernel, resources)
        if d == 32:  # two blocks a multiprocessor
            assert resources.registers <= 128, (kernel, resources)


# Of the macro sets that are executed in tests/cuda_emulation, on alternating devices.
@pytest.mark.parametrize('arch, m, d, d_v, dtype, kernel', [
    (75, 1, 1, 1, 0, 0), (90, 16, 20, 20, 1, 0), (120, 50, 72, 20, 2, 1),
    *(pytest.param(*sizes, marks=pytest.mark.soak) for sizes in (
        (86, 100, 64, 72, 0, 0), (80, 49, 8, 130, 2, 0), (100, 64, 64, 32, 0, 1),
        (90, 128, 64, 64, 0, 0), (75, 8, 4, 33, 0, 0)))])
def test_compiles(arch, m, d, d_v, dtype, kernel):
    assert set(nvrtc.resources(compiled(arch, m, d, d_v, dtype, kernel)[1])) == KERNELS


@pytest.mark.soak
@pytest.mark.parametrize('arch', nvrtc.ARCHITECTURES)
@pytest.mark.parametrize('m', [1, 8, 49, 50, 64, 100, 128])
@pytest.mark.parametrize('d', [4, 32, 33, 64, 256])
@pytest.mark.parametrize('dtype', range(3))
@pytest.mark.parametrize('kernel', range(2))
def test_compiles_everywhere(arch, m, d, dtype, kernel):
    test_compiles(arch, m, d, 24 if d == 256 else d, dtype, kernel)


def hot_loops(arch: int, d: int, kernel: str, folder: Path) -> list[Counter[str]]:
    """Opcodes, without their modifiers, of the innermost loops that mostly add or multiply."""
    code = nvrtc.disassemble(compiled(arch, 49, d, d)[0], f'nystrom_attention_{kernel}', folder)
    counts = [Counter('LDS.128' if i.opcode == 'LDS.128' else i.opcode.partition('.')[0]
                      for i in loop) for loop in nvrtc.loops(code)]
    return [count for count in counts
            if count['FADD'] + count['FFMA'] > count.total() / 2]


DISTANCES, PIECES, PRODUCT = (224, 0), (0, 64), (0, 64)
SQUARES = (0, 128)
# Of the tokens: 4 tokens x 4 landmarks x 4 channels, with a sum of the weights; of the landmarks:
# 4 landmarks x 4 channels, twice unrolled. Three operations each.
TOKENS, LANDMARKS = (64, 144), (32, 72)
GRADIENTS = [DISTANCES, PRODUCT, PRODUCT, TOKENS, LANDMARKS]


@pytest.mark.skipif(nvrtc.disassembler() is None,
                    reason="cuobjdump is not installed: it comes with triton's wheel")
@pytest.mark.parametrize('arch', [80, 90])
@pytest.mark.parametrize('kernel, expected', [
    ('grad_context', [DISTANCES, PIECES]),
    ('grad_values', [DISTANCES, PRODUCT, PRODUCT, PRODUCT, SQUARES]),
    ('grad_keys', GRADIENTS), ('grad_queries', GRADIENTS)])
def test_inner_loops(kernel, expected, arch, tmp_path):
    loops = hot_loops(arch, 32, kernel, tmp_path)
    assert sorted((count['FADD'], count['FFMA']) for count in loops) == sorted(expected)
    for count in loops:
        useful = count['FADD'] + count['FFMA']
        bar = {DISTANCES: .85, TOKENS: .9, LANDMARKS: .85}.get(
            (count['FADD'], count['FFMA']), .75)
        assert useful / count.total() >= bar, count
        assert not count['LDL'] + count['STL'], count


def test_global_loads_of_tokens_are_128_bits_wide(tmp_path):
    if nvrtc.disassembler() is None:
        pytest.skip("cuobjdump is not installed: it comes with triton's wheel")
    for kernel in ('grad_context', 'grad_values', 'grad_keys', 'grad_queries'):
        code = nvrtc.disassemble(compiled(80)[0], f'nystrom_attention_{kernel}', tmp_path)
        assert any(i.opcode.startswith('LDG.E.128') for i in code), kernel
