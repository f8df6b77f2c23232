"""What a training leaves in its work dir and goes on from."""

from __future__ import annotations

import contextlib
import fcntl
import re
from collections.abc import Iterator
from pathlib import Path

from building import make_folder
from checkpoints import load_checkpoint
from cli import UserError, rank
from mmengine.config import Config

LOCK_NAME = '.training.lock'
_NUMBERED = re.compile(r'(?:epoch|iter)_(\d+)\.pth')
_NEEDED = ('state_dict', 'meta', 'message_hub')


def add_safeguards(cfg: Config) -> None:
    """Adds ``FiniteLossHook``, and ``SafeCheckpointHook`` in the place of MMEngine's own.

    Args:
        cfg: Changed in place; a checkpoint hook of another type stays.
    """
    from mmlaplacian.hooks import FiniteLossHook, SafeCheckpointHook  # registers them

    hook = (cfg.get('default_hooks') or {}).get('checkpoint')
    if isinstance(hook, dict) and hook.get('type', 'CheckpointHook') == 'CheckpointHook':
        hook['type'] = SafeCheckpointHook.__name__
    hooks = list(cfg.get('custom_hooks') or [])
    if not any(hook.get('type') == FiniteLossHook.__name__ for hook in hooks
               if isinstance(hook, dict)):
        cfg.custom_hooks = [*hooks, dict(type=FiniteLossHook.__name__)]
    # For other programs that read the dumped config.
    imports = cfg.get('custom_imports') or dict(imports=[], allow_failed_imports=False)
    names = imports['imports']
    names = [names] if isinstance(names, str) else list(names)
    if 'mmlaplacian' not in names:
        names.append('mmlaplacian')
    cfg.custom_imports = dict(imports, imports=names)


@contextlib.contextmanager
def claimed(work_dir: str, launcher: str) -> Iterator[None]:
    """Keeps a second training out of a work dir for the time of the block.

    The system drops the claim with the process, however that ends.

    Args:
        work_dir: Made if it does not exist.
        launcher: ``--launcher``; of a distributed run the first process claims.

    Raises:
        UserError: Another training writes there.
    """
    if rank(launcher) != 0:
        yield
        return
    make_folder(work_dir, 'work dir')
    with (Path(work_dir) / LOCK_NAME).open('a') as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f'work dir {work_dir} is in use by another training: choose another '
                            'one by --work-dir, or wait') from error
        except OSError:
            pass  # a network file system without locks
        yield


def newest_intact_checkpoint(work_dir: str, *,
                             trusted: bool) -> tuple[str | None, list[str]]:
    """The checkpoint that a training in ``work_dir`` goes on from.

    That is the one of ``last_checkpoint``, or one that is later in both number and time, or
    else the newest that can be read.

    Args:
        work_dir: The folder; it may not exist.
        trusted: See :func:`checkpoints.load_checkpoint`.

    Returns:
        Its path, None where the folder holds no checkpoint, and one line for the user for
        each file passed by.

    Raises:
        UserError: There are checkpoints, or ``last_checkpoint`` names one, and none can be read.
    """
    notes = []
    for path in _candidates(Path(work_dir)):
        try:
            checkpoint = load_checkpoint(str(path), trusted=trusted)
            missing = [key for key in _NEEDED if key not in checkpoint]
            if missing:
                raise UserError(f'checkpoint {path} has no {missing[0]}: it is no checkpoint of '
                                'a training')
        except UserError as error:
            notes.append(str(error))
        else:
            return str(path), notes
    if notes:
        raise UserError(f'nothing to resume in {work_dir}: {"; ".join(notes)}')
    return None, notes


def _candidates(work_dir: Path) -> list[Path]:
    named = _named(work_dir / 'last_checkpoint')
    folders = {work_dir, *([named.parent] if named else [])}
    found = [path for folder in folders if folder.is_dir() for path in folder.iterdir()
             if _NUMBERED.fullmatch(path.name)]
    # Where copying made all times equal, the number decides.
    found.sort(key=_age, reverse=True)
    if named is None:
        return found
    later = [path for path in found if named.is_file() and path != named
             and all(a > b for a, b in zip(_age(path), _age(named), strict=True))]
    return list(dict.fromkeys([*later, named, *found]))


def _named(file: Path) -> Path | None:
    """The path in ``last_checkpoint``; a kill or a full disk can leave it empty."""
    try:
        name = file.read_text(encoding='utf-8').strip()
    except (OSError, UnicodeDecodeError):
        return None
    return Path(name) if name and '\0' not in name else None


def _age(path: Path) -> tuple[float, int]:
    number = _NUMBERED.fullmatch(path.name)
    return path.stat().st_mtime, int(number[1]) if number else -1
