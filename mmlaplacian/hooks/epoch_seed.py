"""Random numbers that follow from seed, epoch and rank, so that a resumed run repeats them."""

import random
from functools import partial

from mmengine.dataset import worker_init_fn
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import EpochBasedTrainLoop, Runner, set_random_seed


@HOOKS.register_module()
class EpochSeedHook(Hook):
    """Seeds Python, NumPy, torch and the loader's workers anew at every epoch, per rank.

    MMEngine stores no random state in a checkpoint. With this hook, training resumed at the
    end of an epoch draws the numbers of a run that was never interrupted:

    ``custom_hooks = [dict(type='EpochSeedHook')]``
    ``randomness = dict(seed=0)``
    ``train_dataloader = dict(persistent_workers=False)``

    The seed must be a fixed one, as the order of the images follows it.
    """

    def before_train(self, runner: Runner) -> None:
        """Checks that the epochs can be seeded.

        Raises:
            ValueError: Training goes by iterations, has no fixed seed, or keeps its workers.
        """
        loop = runner.train_loop
        if not isinstance(loop, EpochBasedTrainLoop):
            raise ValueError('EpochSeedHook needs train_cfg.by_epoch=True, got '
                             f'{type(loop).__name__}')
        if runner._randomness_cfg.get('seed') is None:
            raise ValueError('EpochSeedHook needs an integer randomness.seed, got None')
        if loop.dataloader.persistent_workers:
            raise ValueError('EpochSeedHook needs train_dataloader.persistent_workers=False, got '
                             'True: workers that live on cannot be seeded')

    def before_train_epoch(self, runner: Runner) -> None:
        """Seeds the epoch that begins."""
        drawn = random.Random(f'{runner.seed} {runner.epoch} {runner.rank}')
        set_random_seed(drawn.getrandbits(31))
        loader = runner.train_loop.dataloader
        if loader.num_workers:
            # The rank is in the seed already.
            loader.worker_init_fn = partial(worker_init_fn, num_workers=loader.num_workers,
                                            rank=0, seed=drawn.getrandbits(31))
