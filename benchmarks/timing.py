"""Times functions side by side in one process, in turn, so that all meet the same conditions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch

WARM_UPS = 2
LEAST_REPEATS = 3


@dataclass(frozen=True)
class Timing:
    """What one function took.

    Args:
        milliseconds: Median over the repeats.
        fastest: Milliseconds of the fastest call.
        slowest: Of the slowest.
        repeats: How many calls were timed.
        peak_bytes: Most memory held during a call beside what was held before; None on the CPU.
    """

    milliseconds: float
    fastest: float
    slowest: float
    repeats: int
    peak_bytes: int | None


@dataclass(frozen=True)
class NotTimed:
    """Why there is no figure."""

    reason: str


Outcome = Timing | NotTimed


def time_call(function: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call: between CUDA events on a GPU, by the clock on the CPU."""
    if device.type == 'cpu':
        start = time.perf_counter()
        function()
        return (time.perf_counter() - start) * 1e3
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    function()
    last.record()
    last.synchronize()
    return first.elapsed_time(last)


def _warm_up(function: Callable[[], object], device: torch.device) -> tuple[float, int | None]:
    """Milliseconds and peak memory of the last of the first calls."""
    for _ in range(WARM_UPS - 1):
        function()
    if device.type == 'cpu':
        return time_call(function, device), None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    estimate = time_call(function, device)
    return estimate, torch.cuda.max_memory_allocated(device) - held


def _failure(error: RuntimeError) -> NotTimed:
    if isinstance(error, torch.OutOfMemoryError):
        return NotTimed('out of memory')
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), '')
    return NotTimed(f'fails: {line[:100]}' if line else f'fails: {type(error).__name__}')


def time_in_turn(functions: Mapping[str, Callable[[], object]], device: torch.device,
                 seconds_each: float = 0.1, most_repeats: int = 20,
                 least_repeats: int = LEAST_REPEATS) -> dict[str, Outcome]:
    """Times every function, one call of each in turn.

    Args:
        functions: What to time, by name. What they return is dropped.
        device: Where they run.
        seconds_each: Time to spend on one function; slow ones get fewer repeats.
        most_repeats: Repeats of a fast one.
        least_repeats: Repeats of a slow one. Default 3.

    Returns:
        By the same names: a :class:`Timing`, or :class:`NotTimed` where the first call failed.
    """
    outcomes: dict[str, Outcome] = {}
    repeats, peaks = {}, {}
    for name, function in functions.items():
        try:
            milliseconds, peaks[name] = _warm_up(function, device)
        except RuntimeError as error:
            # Memory, a launch beyond the grid, a missing compiler: peers fail at large sizes.
            outcomes[name] = _failure(error)
            torch.cuda.empty_cache()
            continue
        fitting = int(seconds_each * 1e3 / max(milliseconds, 1e-6))
        repeats[name] = min(max(fitting, least_repeats), most_repeats)
    samples: dict[str, list[float]] = {name: [] for name in repeats}
    turns = max(repeats.values(), default=0)
    for turn in range(turns):
        for name, count in repeats.items():
            # Few calls are spread over the whole time as well.
            if (turn + 1) * count // turns > turn * count // turns:
                samples[name].append(time_call(functions[name], device))
    for name, taken in samples.items():
        outcomes[name] = Timing(median(taken), min(taken), max(taken), len(taken), peaks[name])
    return {name: outcomes[name] for name in functions}
