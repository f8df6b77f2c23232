"""Checks the environment that ``setup_env.sh`` makes; each failure is one sentence on stderr.

Exit status: 0, 1 for a failure, or 3 where compiling mmcv here would mend it.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class EnvironmentFault(Exception):
    """Something in the environment is not as it must be; its text says what."""

    exit_status = 1


class OpsFault(EnvironmentFault):
    """The installed mmcv was built without the ops that this machine needs."""

    exit_status = 3


def check_versions() -> None:
    """Checks that every pin of requirements.txt is installed, and this project as editable.

    Raises:
        EnvironmentFault: A package is missing or has another version.
    """
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError as error:
        raise EnvironmentFault('packaging is not installed') from error
    for line in (ROOT / 'requirements.txt').read_text().splitlines():
        text = line.partition('#')[0].strip()
        if not text:
            continue
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate():
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError as error:
            raise EnvironmentFault(f'{requirement.name} is not installed') from error
        if not requirement.specifier.contains(installed, prereleases=True):
            raise EnvironmentFault(
                f'{requirement.name} {installed} is installed, {requirement.specifier} is needed')
    spec = importlib.util.find_spec('mmlaplacian')
    if spec is None or not spec.origin or ROOT not in Path(spec.origin).resolve().parents:
        raise EnvironmentFault(f'mmlaplacian is not installed from {ROOT}')


def check_opencv() -> None:
    """Checks that OpenCV does not need libGL, without importing it.

    Raises:
        EnvironmentFault: OpenCV is missing, or its library is linked to libGL.
    """
    spec = importlib.util.find_spec('cv2')
    libraries = [library for folder in (spec.submodule_search_locations or () if spec else ())
                 for library in Path(folder).glob('cv2*.so')]
    if not libraries:
        raise EnvironmentFault('cv2 is not installed')
    linked = subprocess.run(['ldd', *map(str, libraries)], capture_output=True, text=True,
                            check=True).stdout
    if 'libGL.so' in linked:
        raise EnvironmentFault('cv2 is linked to libGL, which servers lack')


def check_torch_cuda(cuda_major: str) -> None:
    """Checks that torch is built for CUDA ``cuda_major`` and sees a GPU.

    Args:
        cuda_major: Major version of the CUDA toolkit that mmcv is to be compiled with.

    Raises:
        EnvironmentFault: torch is built for something else or sees no GPU.
    """
    import torch

    if (torch.version.cuda or '').partition('.')[0] != cuda_major:
        raise EnvironmentFault(f'torch {torch.__version__} is built for CUDA {torch.version.cuda}'
                               f', the toolkit is CUDA {cuda_major}')
    if not torch.cuda.is_available():
        raise EnvironmentFault(
            f'an NVIDIA GPU is present, but torch cannot use it: its driver must support CUDA '
            f'{torch.version.cuda}; update the driver, or hide the GPU by CUDA_VISIBLE_DEVICES=')


def check_ops() -> None:
    """Imports ``mmcv.ops`` and runs one NMS on the CPU and on every GPU.

    Raises:
        EnvironmentFault: mmcv does not import.
        OpsFault: Its ops do not import, or its NMS is missing or wrong on a device.
    """
    import torch

    try:
        import mmcv  # noqa: F401
    except ImportError as error:
        raise EnvironmentFault(f'mmcv does not import: {error}') from error
    try:
        from mmcv.ops import nms
    except ImportError as error:
        raise OpsFault(f'mmcv.ops does not import: {error}') from error
    devices = ['cpu', *(f'cuda:{index}' for index in range(torch.cuda.device_count()))]
    for device in devices:
        # The second box overlaps the first by an IoU of 0.68, the third none.
        boxes = torch.tensor([[0, 0, 10, 10], [1, 1, 11, 11], [20, 20, 30, 30]],
                             dtype=torch.float32, device=device)
        scores = torch.tensor([0.9, 0.8, 0.7], device=device)
        try:
            kept = nms(boxes, scores, iou_threshold=0.5)[1].tolist()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise OpsFault(f"mmcv's NMS fails on {device}: {reason}") from error
        if kept != [0, 2]:
            raise OpsFault(f"mmcv's NMS on {device} keeps boxes {kept} instead of [0, 2]")
    print(f'mmcv.ops: NMS works on {", ".join(devices)}')


CHECKS = {'versions': check_versions, 'opencv': check_opencv, 'ops': check_ops}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the named checks in turn up to the first that fails; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('checks', nargs='*', metavar='CHECK',
                        help=f'any of {", ".join(CHECKS)} (default: all)')
    parser.add_argument('--torch-cuda', metavar='MAJOR',
                        help='instead check that torch is built for this CUDA major version and '
                             'sees a GPU')
    args = parser.parse_args(argv)
    for name in args.checks:
        if name not in CHECKS:
            parser.error(f'CHECK must be one of {", ".join(CHECKS)}, got {name!r}')
    try:
        if args.torch_cuda:
            check_torch_cuda(args.torch_cuda)
        else:
            for name in args.checks or CHECKS:
                CHECKS[name]()
    except EnvironmentFault as error:
        print(f'error: {error}', file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == '__main__':
    sys.exit(main())
