"""The sizes of the family, and the checks of a size given as a dict."""

from collections.abc import Mapping, Sequence

from ..ops.validation import integer_at_least

NUM_STAGES = 4
PATCH_SIZES = (7, 3, 3, 3)
STRIDES = (4, 2, 2, 2)

# Depths chosen to meet the published parameters and GMACs (arXiv 2604.20368), heads for d = 32.
ARCHS = {
    name: dict(
        embed_dims=(64, 128, 320, 512),
        depths=depths,
        num_heads=(2, 4, 10, 16),
        mlp_ratios=(8, 8, 4, 4))
    for name, depths in dict(
        tiny=(2, 2, 2, 2),
        small=(3, 3, 10, 3),
        medium=(3, 3, 19, 6),
        large=(3, 3, 35, 5),
        huge=(5, 5, 49, 4)).items()
}
ARCH_KEYS = ('embed_dims', 'depths', 'num_heads', 'mlp_ratios')


def stage_integers(name: str, values: object) -> tuple[int, ...]:
    """Returns ``values`` as a tuple when it is one integer >= 1 for each stage.

    Raises:
        TypeError: An entry is not an integer.
        ValueError: Not one entry for each stage, or an entry below 1.
    """
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != NUM_STAGES:
        raise ValueError(f'{name} must be {NUM_STAGES} integers >= 1, one for each stage, got '
                         f'{values!r}')
    return tuple(integer_at_least(f'{name}[{stage}]', value, 1)
                 for stage, value in enumerate(values))


def resolve_arch(arch: str | Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Returns the four settings of each stage by key.

    Args:
        arch: A name of :data:`ARCHS`, or a dict with exactly the keys ``embed_dims``,
            ``depths``, ``num_heads`` and ``mlp_ratios``, each four integers >= 1. The heads of
            a stage divide its channels.

    Raises:
        TypeError: Neither a name nor a dict, or a value that is not an integer.
        ValueError: An unknown name, missing or unknown keys, or values out of range.
    """
    if isinstance(arch, str):
        if arch not in ARCHS:
            raise ValueError(f'arch must be one of {tuple(ARCHS)} or a dict with the keys '
                             f'{ARCH_KEYS}, got {arch!r}')
        return dict(ARCHS[arch])
    if not isinstance(arch, Mapping):
        raise TypeError(f'arch must be one of {tuple(ARCHS)} or a dict with the keys '
                        f'{ARCH_KEYS}, got {arch!r} of type {type(arch).__name__}')
    if set(arch) != set(ARCH_KEYS):
        raise ValueError(f'arch must have exactly the keys {ARCH_KEYS}, got {tuple(arch)}')
    resolved = {key: stage_integers(f'arch[{key!r}]', arch[key]) for key in ARCH_KEYS}
    for stage, (dims, heads) in enumerate(zip(resolved['embed_dims'], resolved['num_heads'],
                                              strict=True)):
        if dims % heads:
            raise ValueError(f"arch['num_heads'][{stage}] must divide "
                             f"arch['embed_dims'][{stage}]={dims}, got {heads}")
    return resolved
