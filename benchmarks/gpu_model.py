"""What a GPU can do at the most, from its data sheet: occupancy and the least time of a launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from launches import KernelLaunch, TorchOp
from nvrtc import Resources

from mmlaplacian.ops.laplacian_kernel.tiling import ceil_div

_WARP = 32
_ISSUES = 4
"""Instructions that a multiprocessor starts in a cycle, one of a warp."""
_REGISTERS, _REGISTER_UNIT, _WARP_UNIT = 65536, 256, 4
_MOST_WARPS, _MOST_BLOCKS = 64, 32
_SHARED_UNIT, _SHARED_RESERVED = 128, 1024
_LANE_INSTRUCTIONS = ('FADD', 'FMUL', 'FFMA')


@dataclass(frozen=True)
class Device:
    """A GPU's peak figures.

    Args:
        name: As in the tables.
        arch: 80 for sm_80.
        processors: Streaming multiprocessors.
        lanes: float32 additions or multiply-adds that one of them starts in a cycle.
        flops: float32 operations/s without tensor cores, a multiply-add being two.
        bandwidth: Bytes/s of the memory.
        shared: Bytes of shared memory of a multiprocessor.
    """

    name: str
    arch: int
    processors: int
    lanes: int
    flops: float
    bandwidth: float
    shared: int

    @property
    def clock(self) -> float:
        """Cycles/s that the peak of float32 operations stands for."""
        return self.flops / (2 * self.lanes * self.processors)


# A100: NVIDIA A100 Tensor Core GPU Architecture (whitepaper, 2020) and the data sheet of the 80 GB
# SXM form. H200: its data sheet (SXM), multiprocessors and lanes from NVIDIA H100 Tensor Core GPU
# Architecture (whitepaper, 2022), whose chip it has. Shared memory: CUDA C++ Programming Guide,
# technical specifications by compute capability.
DEVICES = (Device('A100', 80, 108, 64, 19.5e12, 2.039e12, 164 * 1024),
           Device('H200', 90, 132, 128, 67e12, 4.8e12, 228 * 1024))


def lane_instructions(counts: Mapping[str, float]) -> float:
    """Instructions among ``counts`` that take the float32 lanes."""
    return sum(count for opcode, count in counts.items()
               if opcode.partition('.')[0] in _LANE_INSTRUCTIONS)


def cycles(counts: Mapping[str, float], device: Device) -> float:
    """Least cycles of a full multiprocessor for a warp's instructions."""
    return max(sum(counts.values()) / _ISSUES, lane_instructions(counts) * _WARP / device.lanes)


def shared_cycles(counts: Mapping[str, float], wide: int) -> float:
    """Cycles of shared memory for a warp's accesses, ``wide`` for one of 128 bits, else one."""
    return sum(count * (wide if opcode.endswith('.128') else 1)
               for opcode, count in counts.items() if opcode.startswith(('LDS', 'STS')))


@dataclass(frozen=True)
class Occupancy:
    """Blocks that a multiprocessor holds at once, their warps, and what allows no more."""

    blocks: int
    warps: int
    limit: str


def occupancy(launch: KernelLaunch, resources: Resources, device: Device) -> Occupancy:
    """By the rules of the CUDA occupancy calculator for compute capability 8.0 and 9.0.

    Registers are given to warps in units of 256 and to four warps at a time, shared memory in
    units of 128 bytes, 1 KiB of it to the system for each block.
    """
    warps = ceil_div(launch.threads, _WARP)
    of_a_warp = ceil_div(resources.registers * _WARP, _REGISTER_UNIT) * _REGISTER_UNIT
    fitting = _REGISTERS // of_a_warp // _WARP_UNIT * _WARP_UNIT
    shared = resources.shared + launch.shared_bytes + _SHARED_RESERVED
    limits = {'registers': fitting // warps,
              'shared memory': device.shared // (ceil_div(shared, _SHARED_UNIT) * _SHARED_UNIT),
              'warps': _MOST_WARPS // warps, 'blocks': _MOST_BLOCKS}
    limit = min(limits, key=limits.__getitem__)
    return Occupancy(limits[limit], limits[limit] * warps, limit)


@dataclass(frozen=True)
class Floor:
    """Least time of a launch in seconds, by what it would take alone."""

    issue: float
    lanes: float
    memory: float

    @property
    def seconds(self) -> float:
        """The largest."""
        return max(self.issue, self.lanes, self.memory)

    @property
    def limit(self) -> str:
        """Its name."""
        return max(('issue', 'lanes', 'memory'), key=lambda name: getattr(self, name))


def kernel_floor(launch: KernelLaunch, counts: Mapping[str, float], resident: Occupancy,
                 device: Device) -> Floor:
    """Of a kernel: each quarter of the busiest multiprocessor starts at most one instruction a
    cycle and has a quarter of the float32 lanes, and a warp keeps to its quarter; the memory
    moves every tensor once.

    Args:
        launch: The launch.
        counts: Instructions of a warp.
        resident: How many blocks run at once.
        device: Where.
    """
    blocks = ceil_div(launch.blocks, device.processors)
    warps = ceil_div(launch.threads, _WARP)
    rate = min(_ISSUES, min(blocks, resident.blocks) * warps)
    cycle = blocks * warps / device.clock
    return Floor(cycle * sum(counts.values()) / rate,
                 cycle * lane_instructions(counts) * _WARP / device.lanes * _ISSUES / rate,
                 launch.bytes / device.bandwidth)


def torch_floor(op: TorchOp, device: Device) -> Floor:
    """Of an operator of torch: multiply-adds at the float32 peak, every tensor moved once."""
    return Floor(0.0, 2 * op.multiply_adds / device.flops, op.bytes / device.bandwidth)
