"""Memory of a call on the CPU, as torch's allocator counts it."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(function: Callable[[], object]) -> int:
    """Most memory held at once by the tensors that a call makes, in bytes.

    Exact to the byte and without noise, unlike the resident set, whose pages the C library keeps
    and reuses; what is not a tensor, such as a thread's stack, is not seen.
    """
    # Without accumulation the profiler warns, although one cycle is all there is.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as made:
        function()
    held = peak = 0
    for event in made.profiler.kineto_results.events():
        if event.name() == '[memory]':
            held += event.nbytes()
            peak = max(peak, held)
    return peak
