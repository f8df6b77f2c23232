"""nystrom_attention.cu through the real compiler: it compiles, does not spill, adds and
multiplies."""

from collections import Counter
from functools import cache
from pathlib import Path

import nvrtc
import pytest

from mmlaplacian.ops.cupy_runtime import source_text
from mmlaplacian.ops.laplacian_kernel.tiling import landmark_tile

KERNELS = {f'nystrom_attention_{name}' for name in (
    'landmarks', 'statistics', 'merge_statistics', 'keys', 'merge_keys', 'output')}

pytestmark = pytest.mark.skipif(nvrtc.missing_compiler() is not None,
                                reason=str(nvrtc.missing_compiler()))


@cache
def compiled(arch: int, m: int = 49, d: int = 32, d_v: int = 32, dtype: int = 0,
             kernel: int = 0) -> tuple[bytes, str]:
    m_threads, m_outputs = landmark_tile(m)
    macros = {'SCALAR_TYPE': dtype, 'KERNEL': kernel, 'HEAD_DIM': d, 'VALUE_DIM': d_v,
              'LANDMARKS': m, 'M_THREADS': m_threads, 'M_OUTPUTS': m_outputs}
    return nvrtc.compile_text([source_text('nystrom_attention')], macros, arch)


def check(arch: int, *sizes: int) -> None:
    found = nvrtc.resources(compiled(arch, *sizes)[1])
    assert set(found) == KERNELS
    for kernel, resources in found.items():
        assert resources.shared <= 48 * 1024, (kernel, resources)  # static arrays' limit
        if sizes[1] in (32, 64):
            assert resources.spills == 0, (kernel, resources)


@pytest.mark.parametrize('arch', nvrtc.ARCHITECTURES)
@pytest.mark.parametrize('d', [32, 64])
def test_no_spill(arch, d):
    check(arch, 49, d, d)
    for kernel in ('statistics', 'keys', 'output'):  # two blocks a multiprocessor
        registers = nvrtc.resources(compiled(arch, 49, d, d)[1])[
            f'nystrom_attention_{kernel}'].registers
        assert 2 * 32 * 7 * -(-registers // 8) * 8 <= 65536


# Of the macro sets that are executed in tests/cuda_emulation, on alternating devices.
@pytest.mark.parametrize('arch, m, d, d_v, dtype, kernel', [
    (75, 1, 1, 1, 0, 0), (90, 16, 20, 20, 1, 0), (120, 50, 72, 20, 2, 1),
    (86, 100, 64, 72, 0, 0), (80, 49, 8, 130, 2, 0), (100, 64, 64, 32, 0, 1)])
def test_compiles(arch, m, d, d_v, dtype, kernel):
    check(arch, m, d, d_v, dtype, kernel)


@pytest.mark.soak
@pytest.mark.parametrize('arch', nvrtc.ARCHITECTURES)
@pytest.mark.parametrize('m', [1, 16, 48, 49, 50, 64, 100, 128])
@pytest.mark.parametrize('d', [8, 20, 32, 33, 64, 72])
@pytest.mark.parametrize('dtype', range(3))
@pytest.mark.parametrize('kernel', range(2))
def test_compiles_everywhere(arch, m, d, dtype, kernel):
    for d_v in (d, 24):
        check(arch, m, d, d_v, dtype, kernel)


def hot_loops(arch: int, d: int, kernel: str, folder: Path) -> list[Counter[str]]:
    """Opcodes of the innermost loops that mostly add or multiply."""
    code = nvrtc.disassemble(compiled(arch, 49, d, d)[0], f'nystrom_attention_{kernel}', folder)
    counts = [Counter(i.opcode for i in loop) for loop in nvrtc.loops(code)]
    return [count for count in counts
            if count['FADD.FTZ'] + count['FFMA.FTZ'] > count.total() / 2]


needs_disassembler = pytest.mark.skipif(
    nvrtc.disassembler() is None,
    reason="cuobjdump is not installed: it comes with triton's wheel")


# Additions of the distances (2 tokens x 7 landmarks x 4 channels, twice unrolled), multiply-adds
# of the scatter (8 x 8, twice), of products (4 x 4 x 4) and of the context (8 x 4, twice), with
# loads of 128 bits; the rest are indices and the loop itself.
@needs_disassembler
@pytest.mark.parametrize('arch', [80, 90])
@pytest.mark.parametrize('d', [32, 64])
@pytest.mark.parametrize('kernel, products', [
    ('statistics', [(128, 8)]), ('keys', [(64, 8), (64, 8), (64, 6)]), ('output', [(64, 8)])])
def test_inner_loops(kernel, products, d, arch, tmp_path):
    loops = hot_loops(arch, d, kernel, tmp_path)
    distances = [count for count in loops if count['FADD.FTZ']]
    assert [(count['FADD.FTZ'], count['LDS.128']) for count in distances] == [(2 * 2 * 7 * 8, 18)]
    others = [count for count in loops if count not in distances]
    assert sorted((count['FFMA.FTZ'], count['LDS.128']) for count in others) == sorted(products)
    for count in loops:
        useful = count['FADD.FTZ'] + count['FFMA.FTZ']
        assert useful / count.total() >= (.85 if count in distances else .8), count
        assert not any(opcode.startswith(('LDL', 'STL')) for opcode in count)


@needs_disassembler
@pytest.mark.parametrize('kernel', ['statistics', 'keys', 'output'])
def test_global_loads_of_tokens_are_128_bits_wide(kernel, tmp_path):
    code = nvrtc.disassemble(compiled(80)[0], f'nystrom_attention_{kernel}', tmp_path)
    assert any(i.opcode.startswith('LDG.E.128') for i in code)


def test_unknown_macros_are_refused():
    good = {'HEAD_DIM': 32, 'VALUE_DIM': 32, 'LANDMARKS': 49, 'M_THREADS': 7, 'M_OUTPUTS': 7}
    for macros, message in [({'HEAD_DIM': 257}, 'HEAD_DIM must be 1 to 256'),
                            ({'VALUE_DIM': 257}, 'VALUE_DIM must be 1 to 256'),
                            ({'LANDMARKS': 129}, 'LANDMARKS must be 1 to 128'),
                            ({'LANDMARKS': 100, 'VALUE_DIM': 256, 'M_THREADS': 8},
                             "more than a block's registers hold")]:
        with pytest.raises(RuntimeError, match=message):
            nvrtc.compile_text([source_text('nystrom_attention')], {**good, **macros}, 80)
