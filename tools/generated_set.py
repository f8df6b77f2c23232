"""A folder that a generator fills: complete or absent, and never another one's files."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

COUNT_LIMITS = (1, 100_000)
SEED_LIMITS = (0, 2**32 - 1)


class UserError(Exception):
    """A mistake the user can put right; its text is the one sentence to show."""


@dataclass(frozen=True)
class GeneratedSet:
    """The layout of a set and the making of it.

    Attributes:
        generator: Name of the tool, in the marker and in the staging folder's name.
        version: Version of the tool's data.
        marker: File name of the arguments of the run, written last.
        folders: Pattern of the paths of folders below the set, with slashes.
        files: Pattern of the paths of files below the set, but for the marker.
    """

    generator: str
    version: int
    marker: str
    folders: str
    files: str

    @property
    def staging(self) -> str:
        """Name of the folder inside the set that it is built in."""
        return f'.{self.generator}.partial'

    def make(self, out: Path, arguments: dict[str, int], num_files: int,
             write: Callable[[Path], list[str]]) -> bool:
        """Make the set, unless the same one is there already; one process at a time.

        Args:
            out: Folder of the set; made if absent.
            arguments: All that the set depends on, `num_train` and `num_val` among them.
            num_files: Number of files of the complete set, without the marker.
            write: Writes the set below a folder; returns lines for the user.

        Returns:
            Whether a set was made.

        Raises:
            UserError: If `out` holds anything but a set of this generator.
            OSError: If the folder cannot be read or written.
        """
        if out.exists() and not out.is_dir():
            raise UserError(f'--out must be a folder, but {out} is a file.')
        out.mkdir(parents=True, exist_ok=True)
        with _locked(out):
            return self._make(out, arguments, num_files, write)

    def _make(self, out: Path, arguments: dict[str, int], num_files: int,
              write: Callable[[Path], list[str]]) -> bool:
        marker = self._read_marker(out)
        foreign = self._find_foreign(out, marker is not None)
        if foreign is not None:
            raise UserError(f'--out must be a new or empty folder or an earlier set of this '
                            f'tool, but {out} holds {foreign}, which this tool did not make.')
        if marker == self._content(True, arguments) and self._count(out) == num_files:
            print(f'{out} is already complete with these arguments: nothing to do.')
            return False

        staging = out / self.staging
        if staging.exists():
            shutil.rmtree(staging)
        staging.mkdir()
        try:
            print(f'Making {arguments["num_train"]} training and {arguments["num_val"]} '
                  f'validation images in {out}', flush=True)
            lines = write(staging)
            made = sorted(entry.name for entry in staging.iterdir())
            # From here to the last line the folder is marked as incomplete.
            self._write_marker(out, False, arguments)
            for name in made:
                if (out / name).exists():
                    shutil.rmtree(out / name)
                os.replace(staging / name, out / name)
            self._write_marker(out, True, arguments)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        for line in lines:
            print(line)
        print(f'Complete: {out}')
        return True

    def _content(self, complete: bool, arguments: dict[str, int]) -> dict[str, Any]:
        return dict(generator=self.generator, version=self.version, complete=complete,
                    arguments=arguments)

    def _read_marker(self, out: Path) -> dict[str, Any] | None:
        """Content of the marker in `out`, or None where there is none of this generator."""
        try:
            marker = json.loads((out / self.marker).read_text(encoding='utf-8'))
        except (FileNotFoundError, ValueError):
            return None
        is_own = isinstance(marker, dict) and marker.get('generator') == self.generator
        return marker if is_own else None

    def _write_marker(self, out: Path, complete: bool, arguments: dict[str, int]) -> None:
        """Replace the marker in one step."""
        temporary = out / self.staging / self.marker
        temporary.write_text(json.dumps(self._content(complete, arguments), indent=2) + '\n',
                             encoding='utf-8')
        os.replace(temporary, out / self.marker)

    def _entries(self, out: Path) -> Iterator[Path]:
        """All that lies below `out` but the staging folder, a folder before its content."""
        folders = [out]
        while folders:
            for entry in sorted(folders.pop().iterdir()):
                if entry.relative_to(out).as_posix() == self.staging:
                    continue
                yield entry
                if entry.is_dir() and not entry.is_symlink():
                    folders.append(entry)

    def _find_foreign(self, out: Path, is_marked: bool) -> Path | None:
        """First path below `out` that this generator did not make, or None."""
        for entry in self._entries(out):
            path = entry.relative_to(out)
            # Without a marker, folders with the usual names may be somebody's own data.
            if not is_marked:
                return path
            if entry.is_dir():
                is_own = not entry.is_symlink() and re.fullmatch(self.folders, path.as_posix())
            else:
                is_own = path.name == path.as_posix() == self.marker or re.fullmatch(
                    self.files, path.as_posix())
            if not is_own:
                return path
        return None

    def _count(self, out: Path) -> int:
        """Number of the set's files."""
        return sum(bool(re.fullmatch(self.files, entry.relative_to(out).as_posix()))
                   for entry in self._entries(out))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Waits until no other process holds the folder; a killed one holds nothing."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def check_limits(arguments: dict[str, int], limits: dict[str, tuple[int, int]]) -> None:
    """Refuse a number outside its limits.

    Raises:
        UserError: With the option's name and the limits.
    """
    for name, (low, high) in limits.items():
        if not low <= arguments[name] <= high:
            option = '--' + name.replace('_', '-')
            raise UserError(f'{option} must be from {low} to {high}, got {arguments[name]}.')


def exit_status(out: Path, make: Callable[[], object]) -> int:
    """Call `make` and return the exit status: 0, or 2 for a mistake of the user."""
    try:
        make()
    except UserError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    except OSError as error:
        print(f'error: cannot write the data set to {out}: {error}', file=sys.stderr)
        return 2
    return 0


def track(total: int, label: str) -> Iterator[int]:
    """Yield 0 to `total - 1` with a progress bar, or with four lines where output is no terminal.

    Args:
        total: Number of steps.
        label: Text in front of the bar.
    """
    console = Console()
    if console.is_interactive:
        columns = (TextColumn('{task.description}'), BarColumn(), MofNCompleteColumn(),
                   TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            yield from progress.track(range(total), description=label)
        return
    for index in range(total):
        yield index
        done = index + 1
        if done * 4 // total > index * 4 // total:
            print(f'{label}: {done}/{total} images', flush=True)


def stop_on_signals() -> None:
    """Make a termination signal an exit that clears the staging folder."""

    def stop(signum: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
