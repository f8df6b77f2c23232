"""The attention's ONNX form, run by onnxruntime, against the operator in float64."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor, nn

from mmlaplacian.ops import nystrom_attention
from mmlaplacian.ops.nystrom_attention import NORMALIZATIONS

onnxruntime = pytest.importorskip('onnxruntime', reason='extra deploy is not installed')
pytest.importorskip('onnxscript', reason='extra deploy is not installed')

M, D, D_V = 6, 5, 3


class Attention(nn.Module):
    """The operator with one map and kernel."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.options = options

    def forward(self, *inputs: Tensor) -> Tensor:
        return nystrom_attention(*inputs, **self.options)


def make_inputs(batch: int, n: int) -> list[Tensor]:
    """q, k, v and landmarks, M of the keys."""
    generator = torch.Generator().manual_seed(n)
    q, k = .7 * torch.randn(2, batch, 2, n, D, generator=generator)
    v = torch.randn(batch, 2, n, D_V, generator=generator) + 1
    places = torch.linspace(0, n - 1, M).long()
    return [q, k, v, k[:, :, places] + .1 * torch.randn(batch, 2, M, D, generator=generator)]


@pytest.mark.parametrize('kernel', ['laplacian', 'gaussian'])
@pytest.mark.parametrize('normalize', NORMALIZATIONS)
def test_one_file_for_all_sizes(normalize: str, kernel: str) -> None:
    """Other options than the defaults, so that one which is ignored shows."""
    from mmlaplacian.export import onnx_translations
    model = Attention(kernel_scale=2., ridge=.03, whiten_eps=.5, kernel=kernel,
                      normalize=normalize)
    size = torch.export.Dim.DYNAMIC
    tokens = {0: size, 2: size}
    # The signature is *inputs: one name, four shapes.
    program = torch.export.export(model, tuple(make_inputs(2, 30)),
                                  dynamic_shapes=((tokens, tokens, tokens, {0: size}), ))
    file = io.BytesIO()
    torch.onnx.export(program, dynamo=True, opset_version=18, verbose=False,
                      custom_translation_table=onnx_translations()).save(file)
    session = onnxruntime.InferenceSession(file.getvalue(), providers=['CPUExecutionProvider'])
    names = [x.name for x in session.get_inputs()]
    for batch, n in ((2, 30), (1, 7), (3, 400), (1, 3000)):
        inputs = make_inputs(batch, n)
        got, = session.run(None, {name: x.numpy() for name, x in zip(names, inputs, strict=True)})
        want = model(*(x.double() for x in inputs))
        torch.testing.assert_close(torch.from_numpy(got).double(), want, rtol=1e-4,
                                   atol=2e-5 * float(want.abs().max()))
