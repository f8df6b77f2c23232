"""laplacian_kernel.cu through the real compiler: it compiles, does not spill, and adds."""

from collections import Counter
from functools import cache
from pathlib import Path

import nvrtc
import pytest

from mmlaplacian.ops.cupy_runtime import source_text

SOURCES = [source_text('laplacian_kernel')]
KERNELS = {'laplacian_kernel_forward', 'laplacian_kernel_backward_q',
           'laplacian_kernel_backward_k', 'laplacian_kernel_reduce_k'}

pytestmark = pytest.mark.skipif(nvrtc.missing_compiler() is not None,
                                reason=str(nvrtc.missing_compiler()))


@cache
def compiled(arch: int, d: int, tile: tuple[int, int] = (7, 7), dtype: int = 0, kind: int = 0
             ) -> tuple[bytes, str]:
    macros = {'HEAD_DIM': d, 'M_THREADS': tile[0], 'M_OUTPUTS': tile[1], 'SCALAR_TYPE': dtype,
              'KERNEL': kind}
    return nvrtc.compile_text(SOURCES, macros, arch)


def check(arch: int, d: int, tile: tuple[int, int], dtype: int, kind: int) -> None:
    found = nvrtc.resources(compiled(arch, d, tile, dtype, kind)[1])
    assert set(found) == KERNELS
    for kernel, resources in found.items():
        assert resources.shared <= 48 * 1024, (kernel, resources)  # static arrays' limit
        if d in (32, 64):
            assert resources.spills == 0, (kernel, resources)


@pytest.mark.parametrize('arch', nvrtc.ARCHITECTURES)
@pytest.mark.parametrize('d', [32, 64])
def test_no_spill(arch, d):
    check(arch, d, (7, 7), 0, 0)


# Of the macro sets that are executed in tests/cuda_emulation, each once, on alternating devices.
@pytest.mark.parametrize('arch, d, tile, dtype, kind', [
    (80, 64, (8, 8), 0, 0), (75, 1, (8, 1), 0, 0), (90, 20, (8, 2), 1, 0), (75, 31, (8, 7), 2, 0),
    (120, 33, (8, 5), 0, 0), (100, 72, (7, 7), 1, 0), (86, 160, (8, 8), 2, 0),
    (90, 256, (8, 8), 0, 0), (80, 32, (7, 7), 1, 0), (90, 32, (7, 7), 2, 0),
    (90, 32, (7, 7), 0, 1), (75, 33, (8, 7), 1, 1)])
def test_compiles(arch, d, tile, dtype, kind):
    check(arch, d, tile, dtype, kind)


@pytest.mark.soak
@pytest.mark.parametrize('arch', nvrtc.ARCHITECTURES)
@pytest.mark.parametrize('d', [1, 20, 31, 32, 33, 64, 72, 160, 256])
@pytest.mark.parametrize('tile', [(7, 7), *((8, outputs) for outputs in range(1, 9))], ids=str)
@pytest.mark.parametrize('dtype', range(3))
@pytest.mark.parametrize('kind', range(2))
def test_compiles_everywhere(arch, d, tile, dtype, kind):
    check(arch, d, tile, dtype, kind)


def hot_loop(arch: int, d: int, kernel: str, folder: Path, opcode: str) -> Counter[str]:
    """Opcodes of the loop with the most instructions of one kind."""
    code = nvrtc.disassemble(compiled(arch, d)[0], kernel, folder)
    counts = [Counter(i.opcode for i in loop) for loop in nvrtc.loops(code)]
    return max(counts, key=lambda count: count[opcode])


needs_disassembler = pytest.mark.skipif(
    nvrtc.disassembler() is None,
    reason="cuobjdump is not installed: it comes with triton's wheel")


@needs_disassembler
@pytest.mark.parametrize('arch', [80, 90])
@pytest.mark.parametrize('d', [32, 64])
def test_forward_loop_is_additions(arch, d, tmp_path):
    """Two additions for each (query, landmark, channel); the rest is loads and the loop itself."""
    count = hot_loop(arch, d, 'laplacian_kernel_forward', tmp_path, 'FADD.FTZ')
    # 4 queries x 7 landmarks x 4 channels, twice unrolled.
    assert count['FADD.FTZ'] == 2 * (4 * 7 * 4 * 2)
    assert count['LDS.128'] == (4 + 7) * 2
    assert count['FADD.FTZ'] / count.total() >= 0.85
    assert not any(op.startswith(('LDL', 'STL')) for op in count)


@needs_disassembler
@pytest.mark.parametrize('arch', [80, 90])
@pytest.mark.parametrize('kernel', ['laplacian_kernel_backward_q', 'laplacian_kernel_backward_k'])
def test_backward_loops_take_three_instructions(kernel, arch, tmp_path):
    """Difference, step and sum for each element, and a quarter more for the sum of the weights."""
    count = hot_loop(arch, 32, kernel, tmp_path, 'FFMA.FTZ.SAT')
    elements = 4 * 4 * 4
    assert count['FADD.FTZ'] == count['FFMA.FTZ.SAT'] == elements
    assert count['FFMA.FTZ'] == elements + elements // 4
    assert 3 * elements / count.total() >= 0.85


@needs_disassembler
@pytest.mark.parametrize('kernel', sorted(KERNELS - {'laplacian_kernel_reduce_k'}))
def test_global_loads_are_128_bits_wide(kernel, tmp_path):
    code = nvrtc.disassemble(compiled(80, 32)[0], kernel, tmp_path)
    assert any(i.opcode.startswith('LDG.E.128') for i in code)


def test_unknown_macros_are_refused():
    for macros, message in [({'SCALAR_TYPE': 3}, 'SCALAR_TYPE must be'),
                            ({'HEAD_DIM': 257}, 'HEAD_DIM must be 1 to 256')]:
        with pytest.raises(RuntimeError, match=message):
            nvrtc.compile_text(SOURCES, {'HEAD_DIM': 32, 'M_THREADS': 7, 'M_OUTPUTS': 7,
                                         **macros}, 80)
