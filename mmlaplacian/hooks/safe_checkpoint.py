"""Checkpoints that a fault in the middle of a write cannot cost."""

import os
from pathlib import Path

from mmengine.fileio import LocalBackend, register_backend
from mmengine.hooks import CheckpointHook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

ATOMIC_BACKEND = 'mmlaplacian_atomic'
"""Name of :class:`AtomicLocalBackend` in ``backend_args``."""


class AtomicLocalBackend(LocalBackend):
    """Local files that are there as a whole or not at all."""

    def put(self, obj: bytes, filepath: str | Path) -> None:
        """Writes a file beside its place, forces it to disk and renames it.

        Args:
            obj: Content.
            filepath: The place; a file that is there stays until the new one is complete.

        Raises:
            OSError: No room or no permission; nothing is left of the new file.
        """
        target = Path(filepath)
        target.parent.mkdir(parents=True, exist_ok=True)
        new = target.with_name(f'.{target.name}.{os.getpid()}.new')
        try:
            with new.open('wb') as stream:
                stream.write(obj)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(new, target)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


register_backend(ATOMIC_BACKEND, AtomicLocalBackend, force=True)


@HOOKS.register_module()
class SafeCheckpointHook(CheckpointHook):
    """MMEngine's ``CheckpointHook`` with its arguments, but nothing complete is lost.

    A checkpoint is written to a temporary file, forced to disk and renamed; what is to be
    removed is removed after that.

    ``default_hooks = dict(checkpoint=dict(type='SafeCheckpointHook', interval=1))``
    """

    def before_train(self, runner: Runner) -> None:
        """Chooses the atomic backend where checkpoints go to a local folder."""
        folder = str(self.out_dir or runner.work_dir)
        if self.backend_args is None and self.file_client_args is None and '://' not in folder:
            self.backend_args = dict(backend=ATOMIC_BACKEND)
        super().before_train(runner)

    def _save_checkpoint_with_step(self, runner: Runner, step: int, meta: dict) -> None:
        outdated = None
        kept = self.keep_ckpt_ids if self.max_keep_ckpts > 0 else ()
        if kept and kept[-1] != step and len(kept) == self.max_keep_ckpts:
            # The base class finds nothing to remove before it writes.
            outdated = kept.popleft()
        super()._save_checkpoint_with_step(runner, step, meta)
        if outdated is not None and runner.rank == 0:
            self._remove(self.file_backend.join_path(self.out_dir,
                                                     self.filename_tmpl.format(outdated)))

    def _save_best_checkpoint(self, runner: Runner, metrics: dict) -> None:
        if not self.save_best:
            return
        if len(self.key_indicators) > 1:
            before = dict(self.best_ckpt_path_dict)
            self.best_ckpt_path_dict = dict.fromkeys(before)
            super()._save_best_checkpoint(runner, metrics)
            after = self.best_ckpt_path_dict
        else:
            before = dict(only=self.best_ckpt_path)
            self.best_ckpt_path = None
            super()._save_best_checkpoint(runner, metrics)
            after = dict(only=self.best_ckpt_path)
        for key, path in before.items():
            if after[key] is None:
                after[key] = path
            elif path not in (None, after[key]) and runner.rank == 0:
                self._remove(path)
        if len(self.key_indicators) == 1:
            self.best_ckpt_path = after['only']

    def _remove(self, path: str) -> None:
        if self.file_backend.isfile(path):
            self.file_backend.remove(path)
        elif self.file_backend.isdir(path):
            # DeepSpeed's checkpoints are folders.
            self.file_backend.rmtree(path)
