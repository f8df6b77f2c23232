"""newton_schulz.cu through the real compiler: it compiles, does not spill, and multiplies."""

from collections import Counter
from pathlib import Path

import nvrtc
import pytest

from mmlaplacian.ops.newton_schulz.tiling import LARGEST_IN_A_BLOCK, row_outputs

CUDA = Path(__file__).parents[2] / 'cuda'
SOURCES = (CUDA / 'common.cuh', CUDA / 'newton_schulz.cu')

pytestmark = pytest.mark.skipif(nvrtc.missing_compiler() is not None,
                                reason=str(nvrtc.missing_compiler()))


def compiled(arch: int, m: int = 49, spd: int = 1, term: int = 0, transpose_a: int = 0,
             transpose_b: int = 0) -> bytes:
    """The cubin of the three kernels, none of which spills a register."""
    macros = {'SIZE': m, 'ROWS': row_outputs(m), 'SPD_START': spd, 'TERM': term,
              'TRANSPOSE_A': transpose_a, 'TRANSPOSE_B': transpose_b}
    cubin, log = nvrtc.compile_text(SOURCES, macros, arch)
    found = nvrtc.resources(log)
    assert set(found) == {f'newton_schulz_{name}' for name in ('inverse', 'start', 'product')}
    assert all(resources.shared <= 48 * 1024 for resources in found.values())
    assert all(resources.spills == 0 for resources in found.values()), found
    return cubin


# The default size, and those with the most outputs a thread and the most threads.
@pytest.mark.parametrize('arch', nvrtc.ARCHITECTURES)
@pytest.mark.parametrize('m, spd', [(49, 1), (49, 0), (35, 1), (48, 0), (91, 1), (112, 0),
                                    (128, 1)])
def test_no_spill(arch, m, spd):
    compiled(arch, m, spd)


# Every term and transposition, each once, and sizes with every ROWS, on alternating devices.
@pytest.mark.parametrize('arch, m, spd, term, transpose_a, transpose_b', [
    (75, 1, 0, 1, 0, 0), (90, 5, 1, 2, 0, 0), (120, 6, 1, 0, 1, 0), (80, 16, 0, 0, 0, 1),
    (100, 128, 1, 1, 1, 0), (86, 100, 0, 2, 0, 1)])
def test_compiles(arch, m, spd, term, transpose_a, transpose_b):
    compiled(arch, m, spd, term, transpose_a, transpose_b)


@pytest.mark.soak
@pytest.mark.parametrize('arch', nvrtc.ARCHITECTURES)
@pytest.mark.parametrize('m', range(1, LARGEST_IN_A_BLOCK + 1))
def test_compiles_every_size(arch, m):
    for spd in (0, 1):
        compiled(arch, m, spd)


@pytest.mark.soak
@pytest.mark.parametrize('arch', nvrtc.ARCHITECTURES)
@pytest.mark.parametrize('term', range(3))
@pytest.mark.parametrize('transpose_a', range(2))
@pytest.mark.parametrize('transpose_b', range(2))
def test_compiles_every_product(arch, term, transpose_a, transpose_b):
    compiled(arch, 49, 1, term, transpose_a, transpose_b)


@pytest.mark.skipif(nvrtc.disassembler() is None,
                    reason="cuobjdump is not installed: it comes with triton's wheel")
@pytest.mark.parametrize('arch', [80, 90])
@pytest.mark.parametrize('kernel, rows', [('inverse', 7), ('product', 8)])
def test_inner_loops_are_multiply_adds(kernel, rows, arch, tmp_path):
    """ROWS x 4 outputs for four inner indices; the rest is ROWS + 4 loads and the loop itself."""
    code = nvrtc.disassemble(compiled(arch), f'newton_schulz_{kernel}', tmp_path)
    count = max((Counter(i.opcode for i in loop) for loop in nvrtc.loops(code)),
                key=lambda opcodes: opcodes['FFMA.FTZ'])
    assert count['FFMA.FTZ'] == rows * 4 * 4
    assert count['LDS.128'] == rows + 4
    assert count['FFMA.FTZ'] / count.total() >= .85
    assert not any(opcode.startswith(('LDL', 'STL')) for opcode in count)


def test_global_loads_of_products_are_128_bits_wide(tmp_path):
    if nvrtc.disassembler() is None:
        pytest.skip("cuobjdump is not installed: it comes with triton's wheel")
    code = nvrtc.disassemble(compiled(80), 'newton_schulz_product', tmp_path)
    assert any(i.opcode.startswith('LDG.E.128') for i in code)


def test_unknown_macros_are_refused():
    for macros, message in [({'SIZE': 129}, 'SIZE must be'), ({'ROWS': 9}, 'ROWS must be'),
                            ({'TERM': 3}, 'TERM must be')]:
        with pytest.raises(RuntimeError, match=message):
            nvrtc.compile_text(SOURCES, macros, 80)
