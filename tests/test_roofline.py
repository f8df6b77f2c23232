"""The roofline of docs/performance.md: its model by hand, its tables by the script."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / 'docs' / 'performance.md'
META = torch.device('meta')


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Modules of benchmarks/, as its scripts import them, and the compiler of the tests."""
    monkeypatch.syspath_prepend(ROOT / 'tests' / 'cuda_compile')
    monkeypatch.syspath_prepend(ROOT / 'benchmarks')
    return importlib.import_module


@pytest.fixture
def code(load) -> ModuleType:
    """The reader of machine code, where it can be compiled."""
    module = load('kernel_code')
    if reason := module.missing():
        pytest.skip(reason)
    return module


def forward_of_the_kernel(launches: ModuleType, groups: int, n: int, d: int, m: int) -> object:
    """The launch of C = k(q, landmarks)."""
    from mmlaplacian.ops.laplacian_kernel import cupy_impl

    q, k = (torch.empty(groups, 1, tokens, d, device=META) for tokens in (n, m))
    with launches.recorded() as found:
        cupy_impl.kernel_matrix(q, k, 4.0, 'laplacian')
    launch, = found
    return launch


def test_bytes_of_a_kernel(load) -> None:
    launch = forward_of_the_kernel(load('launches'), 3, 200, 32, 49)
    assert launch.function == 'laplacian_kernel_forward' and launch.integers == (3, 200, 49)
    assert launch.bytes == 4 * 3 * (200 * 32 + 49 * 32 + 200 * 49)
    assert (launch.blocks, launch.threads) == (3 * 2, 224)


def test_operators_of_torch(load) -> None:
    """Views launch nothing; memory that is read twice, or by all rows, counts once."""
    launches = load('launches')
    a, b = torch.empty(5, 7, 6, device=META), torch.empty(5, 6, 4, device=META)
    with launches.recorded() as found:
        product = a @ b
        product.flatten(1).mT.unsqueeze(0)
        a.mT @ a
        product.add_(torch.empty(4, device=META).expand(5, 7, 4))
        product.copy_(torch.empty(5, 7, 4, device=META))
    assert found == [launches.TorchOp('bmm', 4 * 5 * (42 + 24 + 28), 5 * 7 * 6 * 4),
                     launches.TorchOp('bmm', 4 * 5 * (42 + 36), 5 * 6 * 7 * 6),
                     launches.TorchOp('add_', 4 * (140 + 4), 0),
                     launches.TorchOp('copy_', 4 * 280, 0)]


def test_launches_of_the_attention(load) -> None:
    launches = load('launches')
    fused, unfused = (launches.attention_launches(form, 'forward', 2, 500, 32, 49)
                      for form in (True, False))
    assert [launch.function for launch in fused] == [
        'nystrom_attention_landmarks', 'newton_schulz_inverse', 'nystrom_attention_statistics',
        'nystrom_attention_merge_statistics', 'nystrom_attention_keys',
        'nystrom_attention_merge_keys', 'nystrom_attention_output']
    # 500 queries and landmarks; 4 chunks of means and of 28 squares of 8 x 8.
    assert fused[2].bytes == 4 * 2 * (500 * 32 + 49 * 32 + 4 * (49 + 64 * 28))
    kernels = Counter(getattr(launch, 'function', None) for launch in unfused)
    assert kernels['laplacian_kernel_forward'] == 3 and kernels['newton_schulz_inverse'] == 1
    products = sum(launch.multiply_adds for launch in unfused if not hasattr(launch, 'function'))
    tokens = 2 * 500 * (3 * 49 * 49 + 2 * 49 * 32)
    assert tokens <= products <= 1.01 * tokens


@pytest.mark.parametrize('items, threads, unroll', [(512, 224, 2), (392, 224, 2), (64, 224, 1),
                                                    (2704, 224, 4), (49, 96, 1), (0, 96, 1)])
def test_passes_of_a_warp(load, items: int, threads: int, unroll: int) -> None:
    """A warp passes as often as its busiest thread."""
    passes = []
    for warp in range(0, threads, 32):
        most = max(len(range(thread, items, threads)) for thread in range(warp, warp + 32))
        passes.append(most // unroll)
    found = load('kernel_loops').warp_passes(items, threads, unroll)
    assert found == pytest.approx(sum(passes) / len(passes))


def test_unrolled_as_often_as_the_compiler_likes(load) -> None:
    loops = load('kernel_loops')
    loop = loops.Loop(0.5, 'LDG', 4, (512, 224))
    assert [loop.passes_of(found) for found in (4, 8)] == [
        pytest.approx(0.5 * loops.warp_passes(512, 224, unroll)) for unroll in (1, 2)]
    assert loop.passes_of(6) is None is loop.passes_of(0)
    fixed = loops.Loop(3, 'FADD', 224)
    assert fixed.passes_of(224) == 3 == loops.Loop(3).passes_of(0)
    assert fixed.passes_of(448) is None


def test_loops_and_shortest_ways(load) -> None:
    """A skipped block, a loop in a loop, a padded end."""
    code = load('kernel_code')
    lines = ['MOV', '@P0 BRA 0x50', 'FADD', 'FADD', 'FADD', 'S2R', 'LDS', 'FFMA',
             '@P1 BRA 0x60', 'STS', '@!P2 BRA 0x50', 'EXIT', 'BRA 0xc0']
    tree = code.loop_tree([code.Instruction(16 * at, text) for at, text in enumerate(lines)])
    assert tree.own == ('MOV', 'BRA', 'FADD', 'FADD', 'FADD', 'EXIT', 'BRA')
    assert tree.least == ('MOV', 'BRA', 'EXIT', 'BRA')
    outer, = tree.inner
    assert outer.own == outer.least == ('S2R', 'STS', 'BRA')
    assert [inner.own for inner in outer.inner] == [('LDS', 'FFMA', 'BRA')]


def test_additions_of_the_distances(load, code) -> None:
    """Two for each landmark and channel, counted from the machine code, and both bounds."""
    launch = forward_of_the_kernel(load('launches'), 1, 12800, 32, 49)
    warps = launch.blocks * launch.threads // 32
    least, most = (code.instructions(launch, 80, least) for least in (True, False))
    additions = sum(count for name, count in least.items() if name.startswith('FADD'))
    assert additions * warps / 12800 == pytest.approx(2 * 49 * 32 / 32)
    assert 0.75 * sum(most.values()) < sum(least.values()) < sum(most.values())


def test_another_machine_code_is_refused(load, code, monkeypatch: pytest.MonkeyPatch) -> None:
    loops = load('kernel_loops')
    launch = forward_of_the_kernel(load('launches'), 1, 128, 32, 49)
    table = loops.KERNELS[launch.function](launch)
    for wrong, message in ([*table, loops.Loop(1)], '1 loops less than its table'), \
            (table[:-1], 'more loops than the table'), \
            ([*table[:-1], loops.Loop(4, 'FADD', 447)], 'a loop holds 448 FADD'):
        monkeypatch.setitem(loops.KERNELS, launch.function,
                            lambda launch, wrong=wrong: list(wrong))
        code.instructions.cache_clear()
        with pytest.raises(ValueError, match=message):
            code.instructions(launch, 80, True)


@pytest.mark.parametrize('registers, threads, shared, blocks, limit', [
    (128, 224, 0, 2, 'registers'),       # 16 warps' registers
    (40, 256, 0, 6, 'registers'),        # 1280 a warp: 51 warps, given by fours
    (32, 1024, 0, 2, 'registers'), (24, 256, 0, 8, 'warps'), (16, 32, 0, 32, 'blocks'),
    (32, 96, 60_000, 2, 'shared memory'), (32, 96, 54_848, 3, 'shared memory')])
def test_occupancy(load, registers: int, threads: int, shared: int, blocks: int,
                   limit: str) -> None:
    launches, model, code = load('launches'), load('gpu_model'), load('kernel_code')
    launch = launches.KernelLaunch('a', 'b', (), 1, threads, shared, (), 0)
    found = model.occupancy(launch, code.Resources(registers, 0, 0), model.DEVICES[0])
    assert (found.blocks, found.limit) == (blocks, limit)
    assert found.warps == blocks * threads // 32


def test_least_times(load) -> None:
    launches, model = load('launches'), load('gpu_model')
    device = model.Device('a', 80, processors=10, lanes=64, flops=10 * 64 * 2 * 1e9,
                          bandwidth=1e12, shared=2**17)
    assert device.clock == pytest.approx(1e9)
    launch = launches.KernelLaunch('a', 'b', (), 25, 64, 0, (), 5000)
    counts = {'FADD.FTZ': 60.0, 'IMAD': 40.0}
    # Three blocks of two warps on the busiest: all four quarters have work.
    full = model.kernel_floor(launch, counts, model.Occupancy(4, 8, ''), device)
    assert full.issue == pytest.approx(6 * 100 / 4 * 1e-9)
    assert full.lanes == pytest.approx(6 * 60 / 2 * 1e-9) and full.limit == 'lanes'
    assert full.memory == pytest.approx(5e-9) and full.seconds == full.lanes
    # One block at a time: two quarters.
    half = model.kernel_floor(launch, counts, model.Occupancy(1, 2, ''), device)
    assert half.lanes == pytest.approx(2 * full.lanes)
    assert half.issue == pytest.approx(2 * full.issue)
    op = model.torch_floor(launches.TorchOp('bmm', 10**6, 64 * 10**4), device)
    assert op.lanes == pytest.approx(1e-6) == op.memory


NUMBER = re.compile(r'\d+(?:\.\d+)?')


def differences(got: str, want: str) -> list[tuple[str, str]]:
    """Lines that differ in words, or in a number by more than 2% and its last digit.

    NVRTC is not the same twice: for sm_90 one compilation in eight had some instructions more.
    """

    def close(x: str, y: str) -> bool:
        step = 10.0**-len(y.partition('.')[2])
        return float(x) == pytest.approx(float(y), rel=0.02, abs=1.01 * step)

    pairs = zip_longest(got.splitlines(), want.splitlines(), fillvalue='')
    return [(x, y) for x, y in pairs
            if NUMBER.split(x) != NUMBER.split(y)
            or not all(map(close, NUMBER.findall(x), NUMBER.findall(y)))]


@pytest.mark.parametrize('other, found', [
    ('| 1010 | 4.57 ms, lanes |', 0), ('| 1030 | 4.56 ms, lanes |', 1),
    ('| 1000 | 4.80 ms, lanes |', 1), ('| 1000 | 4.56 ms, issue |', 1),
    ('| 1000 | 4.56 ms, lanes |\n| 3 |', 1)])
def test_differences_of_pages(other: str, found: int) -> None:
    assert len(differences(other, '| 1000 | 4.56 ms, lanes |')) == found


def test_the_page_is_what_the_script_writes(load, code) -> None:
    """Registers and instructions are those of one compiler's version."""
    page = PAGE.read_text(encoding='utf-8')
    version = re.search(r'^Compiled by NVRTC (\S+)\. Computed, not measured\.$', page,
                        re.MULTILINE)[1]
    if version != code.compiler_version():
        pytest.skip(f'the page is of NVRTC {version}, here is {code.compiler_version()}')
    assert differences(load('roofline').written(page), page) == [], \
        'kernels or tilings changed: run benchmarks/roofline.py docs/performance.md'


def test_a_page_without_its_comments(load, code, tmp_path: Path,
                                     capsys: pytest.CaptureFixture) -> None:
    page = tmp_path / 'page.md'
    page.write_text('no comments\n')
    with pytest.raises(SystemExit) as error:
        load('roofline').main([str(page)])
    assert error.value.code == 2 and 'the page must hold' in capsys.readouterr().err
    assert page.read_text() == 'no comments\n'
