"""``SafeCheckpointHook``: faults in the middle of a write cost nothing that was complete."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.logging import MessageHub, MMLogger
from mmengine.model import BaseModel
from mmengine.registry import DefaultScope
from mmengine.runner import Runner
from mmengine.visualization import Visualizer

from mmlaplacian.hooks import safe_checkpoint
from mmlaplacian.hooks.safe_checkpoint import AtomicLocalBackend


@pytest.fixture(autouse=True)
def _isolated() -> Iterator[None]:
    """A Runner leaves scope, loggers and visualizers behind, which no other test may inherit."""
    registries = [cls._instance_dict for cls in (DefaultScope, MMLogger, MessageHub, Visualizer)]
    before = [dict(instances) for instances in registries]
    yield
    for instances, kept in zip(registries, before, strict=True):
        instances.clear()
        instances.update(kept)


# ---- The write


def test_a_file_and_its_folder_are_made(tmp_path: Path) -> None:
    AtomicLocalBackend().put(b'content', tmp_path / 'new' / 'file')
    assert (tmp_path / 'new' / 'file').read_bytes() == b'content'
    assert os.listdir(tmp_path / 'new') == ['file']
    assert (tmp_path / 'new' / 'file').stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    """A real limit: the write stops in the middle of the content."""
    file = tmp_path / 'file'
    backend = AtomicLocalBackend()
    backend.put(b'old', file)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(OSError) as error:
            backend.put(bytes(100_000), file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.errno == errno.EFBIG
    assert file.read_bytes() == b'old' and os.listdir(tmp_path) == ['file']


def test_the_disk_has_it_before_the_old_one_goes(tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ('fsync', 'replace'):
        function = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, function=function: (
            calls.append(name), function(*args)))
    AtomicLocalBackend().put(b'content', tmp_path / 'file')
    assert calls == ['fsync', 'replace', 'fsync']


def test_killed_at_any_moment_the_file_is_whole(tmp_path: Path) -> None:
    file = tmp_path / 'file'
    contents = [bytes([number]) * 3_000_000 for number in range(4)]
    digests = {hashlib.sha256(content).digest() for content in contents}
    backend = AtomicLocalBackend()
    backend.put(contents[0], file)
    for number in range(12):
        child = os.fork()
        if not child:
            try:
                while True:
                    for content in contents:
                        backend.put(content, file)
            finally:
                os._exit(1)
        time.sleep(0.02 + 0.0037 * number)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert hashlib.sha256(file.read_bytes()).digest() in digests


# ---- The hook


class Line(BaseModel):
    """Learns nothing in particular."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, mode: str) -> dict | list:
        return dict(loss=self.line(x).square().mean()) if mode == 'loss' else [0]


class Scores(BaseMetric):
    """Gives the next of the scores that are to come."""

    def __init__(self, scores: list[dict]) -> None:
        super().__init__()
        self.scores = iter(scores)

    def process(self, data_batch: object, data_samples: list) -> None:
        self.results.append(0)

    def compute_metrics(self, results: list) -> dict:
        return next(self.scores)


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., None]:
    """Trains one epoch for each score, into ``tmp_path``."""

    def run(scores: list[dict], **hook: object) -> None:
        loader = dict(batch_size=1, dataset=[(torch.ones(1), )] * 2, num_workers=0,
                      sampler=dict(type='DefaultSampler', shuffle=False),
                      collate_fn=dict(type='default_collate'))
        Runner(model=Line(), work_dir=str(tmp_path), train_dataloader=dict(loader),
               val_dataloader=dict(loader), val_evaluator=Evaluator(Scores(scores)), val_cfg={},
               train_cfg=dict(by_epoch=True, max_epochs=len(scores), val_interval=1),
               optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1)),
               data_preprocessor=dict(type='BaseDataPreprocessor'),
               default_hooks=dict(checkpoint=dict(type='SafeCheckpointHook', **hook)),
               experiment_name=f'{tmp_path.name}_{time.monotonic_ns()}').train()

    return run


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob('*.pth'))


SCORES = [dict(a=0.1, b=0.5), dict(a=0.3, b=0.2), dict(a=0.2, b=0.7)]


def test_it_keeps_what_it_is_told(train: Callable, tmp_path: Path) -> None:
    train(SCORES, interval=1, max_keep_ckpts=2, save_best='a', rule='greater')
    assert files(tmp_path) == ['best_a_epoch_2.pth', 'epoch_2.pth', 'epoch_3.pth']
    assert (tmp_path / 'last_checkpoint').read_text() == str(tmp_path / 'epoch_3.pth')
    assert not list(tmp_path.glob('.*.new'))
    hub = torch.load(tmp_path / 'epoch_3.pth', weights_only=False)['message_hub']
    assert list(hub['runtime_info']['keep_ckpt_ids']) == [2, 3]
    assert hub['runtime_info']['best_ckpt'] == str(tmp_path / 'best_a_epoch_2.pth')


def test_the_best_of_several_metrics(train: Callable, tmp_path: Path) -> None:
    train(SCORES, interval=3, save_best=['a', 'b'], rule='greater')
    assert [name for name in files(tmp_path) if name.startswith('best')] == [
        'best_a_epoch_2.pth', 'best_b_epoch_3.pth']


class Full(AtomicLocalBackend):
    """A disk that is full for one file."""

    refused = ''

    def put(self, obj: bytes, filepath: str | Path) -> None:
        if Path(filepath).name == self.refused:
            raise OSError(errno.ENOSPC, 'No space left on device')
        super().put(obj, filepath)


@pytest.mark.parametrize(('refused', 'left'), [
    ('epoch_2.pth', ['best_a_epoch_1.pth', 'epoch_1.pth']),
    ('epoch_3.pth', ['best_a_epoch_2.pth', 'epoch_2.pth']),
    ('best_a_epoch_2.pth', ['best_a_epoch_1.pth', 'epoch_2.pth'])])
def test_a_full_disk_costs_no_checkpoint(train: Callable, tmp_path: Path, refused: str,
                                         left: list[str]) -> None:
    from mmengine.fileio import register_backend

    Full.refused = refused
    register_backend(safe_checkpoint.ATOMIC_BACKEND, Full, force=True)
    try:
        with pytest.raises(OSError, match='No space left'):
            train(SCORES, interval=1, max_keep_ckpts=1, save_best='a', rule='greater')
    finally:
        register_backend(safe_checkpoint.ATOMIC_BACKEND, AtomicLocalBackend, force=True)
    assert files(tmp_path) == left
    for name in left:
        assert 'state_dict' in torch.load(tmp_path / name, weights_only=False)


def test_a_backend_of_the_config_is_kept(train: Callable, tmp_path: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: AtomicLocalBackend, obj: bytes, filepath: str | Path) -> None:
        raise AssertionError(filepath)

    monkeypatch.setattr(AtomicLocalBackend, 'put', refuse)
    train(SCORES[:1], interval=1, backend_args=dict(backend='local'))
    assert files(tmp_path) == ['epoch_1.pth']
