"""The attention in ONNX operators, for ``torch.onnx.export``.

The distance is a scan over landmarks: one step holds N x d differences, nothing is N x M x d.
The formulas are those of :mod:`mmlaplacian.ops.nystrom_attention`, over all tokens at once,
without tiles. Kernel matrices are ``(B, h, M, N)`` here, so that statistics run along memory.
``onnxscript`` reads the source of the scripted functions: their annotations are its types.
"""

from collections.abc import Callable, Sequence

import onnxscript
import torch
from onnxscript import FLOAT, graph, script
from onnxscript import opset18 as op

from ..ops.newton_schulz import default_iters

Value = onnxscript.ir.Value


@script(default_opset=op)
def l1_distances(x: FLOAT[...], landmarks: FLOAT[...]) -> FLOAT[...]:
    """||x - landmark||_1, ``(B, h, N, d), (B, h, M, d) -> (B, h, M, N)``."""

    @graph()
    def to_one(landmark: FLOAT[...]) -> FLOAT[...]:
        distance = op.ReduceL1(x - op.Unsqueeze(landmark, [2]), [3], keepdims=0)
        return distance

    distances = op.Scan(landmarks, body=to_one, num_scan_inputs=1, scan_input_axes=[2],
                        scan_output_axes=[2])
    return distances


@script(default_opset=op)
def squared_l2_distances(x: FLOAT[...], landmarks: FLOAT[...]) -> FLOAT[...]:
    """||x - landmark||_2^2, ``(B, h, N, d), (B, h, M, d) -> (B, h, M, N)``."""

    @graph()
    def to_one(landmark: FLOAT[...]) -> FLOAT[...]:
        distance = op.ReduceSumSquare(x - op.Unsqueeze(landmark, [2]), [3], keepdims=0)
        return distance

    distances = op.Scan(landmarks, body=to_one, num_scan_inputs=1, scan_input_axes=[2],
                        scan_output_axes=[2])
    return distances


def _kernel_matrix(x: Value, landmarks: Value, kernel_scale: float, kernel: str) -> Value:
    """k(landmarks, x), ``(B, h, M, N)``."""
    if kernel == 'laplacian':
        return op.Exp(op.Mul(l1_distances(x, landmarks), -1 / kernel_scale))
    return op.Exp(op.Mul(squared_l2_distances(x, landmarks), -.5 / kernel_scale))


def _inverse(w: Value, ridge: float, m: int, solver_iters: int) -> Value:
    """(W + ridge I)^-1 of symmetric positive definite matrices by Newton-Schulz steps."""
    identity = op.Constant(value=onnxscript.ir.to_proto(onnxscript.ir.tensor(torch.eye(m))))
    w = op.Add(w, op.Mul(identity, ridge))
    norm_inf = op.ReduceMax(op.ReduceSum(op.Abs(w), [3], keepdims=1), [2], keepdims=1)
    x = op.Mul(op.Div(2., op.Add(norm_inf, ridge)), identity)
    for _ in range(solver_iters):
        x = op.Add(x, op.MatMul(x, op.Sub(identity, op.MatMul(w, x))))
    return x


def _transpose(x: Value) -> Value:
    return op.Transpose(x, perm=[0, 1, 3, 2])


def _mean_of_tokens(v: Value) -> Value:
    return op.ReduceMean(v, [2], keepdims=1)


def _whiten(c_q: Value, c_k: Value, v: Value, p: Value, n: Value, whiten_eps: float) -> Value:
    """See :mod:`mmlaplacian.ops.nystrom_attention.whiten`."""
    centered = op.Sub(c_q, op.ReduceMean(c_q, [3], keepdims=1))
    covariance = op.Div(op.MatMul(centered, _transpose(centered)), n)
    k = op.MatMul(p, c_k)
    variance = op.ReduceSum(op.Mul(op.MatMul(covariance, k), k), [2], keepdims=1)
    deviation = op.Sqrt(op.Add(op.Max(variance, 0.), whiten_eps))
    context = op.Div(op.MatMul(op.Div(k, deviation), v), n)
    return op.Add(op.MatMul(_transpose(centered), context), _mean_of_tokens(v))


def _row(c_q: Value, c_k: Value, v: Value, p: Value, n: Value, whiten_eps: float) -> Value:
    """See :mod:`mmlaplacian.ops.nystrom_attention.row`."""
    mean_value = _mean_of_tokens(v)
    context = op.Div(op.MatMul(c_k, op.Sub(v, mean_value)), n)
    q = _transpose(op.MatMul(p, c_q))
    mass = op.MatMul(q, op.ReduceMean(c_k, [3], keepdims=1))
    floored = op.Max(mass, whiten_eps)
    return op.Add(op.Div(op.MatMul(q, context), floored),
                  op.Mul(mean_value, op.Div(mass, floored)))


def _unnormalized(c_q: Value, c_k: Value, v: Value, p: Value, n: Value,
                  whiten_eps: float) -> Value:
    """See :mod:`mmlaplacian.ops.nystrom_attention.unnormalized`."""
    return op.MatMul(_transpose(op.MatMul(p, c_q)), op.Div(op.MatMul(c_k, v), n))


_MAPS = {'whiten': _whiten, 'row': _row, 'none': _unnormalized}


def _nystrom_attention(q: FLOAT, k: FLOAT, v: FLOAT, landmarks: FLOAT, kernel_scale: float,
                       ridge: float, whiten_eps: float, solver_iters: int | None, kernel: str,
                       normalize: str) -> Sequence[FLOAT]:
    """``torch.ops.mmlaplacian.nystrom_attention``, its first output: the others are for the
    backward.

    Raises:
        ValueError: The number of landmarks depends on the image size.
    """
    m = landmarks.shape[2]
    if not isinstance(m, int):
        raise ValueError('the number of landmarks must be a number to be exported to ONNX, got '
                         f'{m}: take landmark_grid instead of pool_ratio, or a fixed image size')
    if solver_iters is None:
        solver_iters = default_iters(m, ridge, torch.float32)
    p = _inverse(_kernel_matrix(landmarks, landmarks, kernel_scale, kernel), ridge, m,
                 solver_iters)
    c_q, c_k = (_kernel_matrix(x, landmarks, kernel_scale, kernel) for x in (q, k))
    n = op.CastLike(op.Shape(v, start=2, end=3), v)
    return [_MAPS[normalize](c_q, c_k, v, p, n, whiten_eps)]


def onnx_translations() -> dict[Callable, Callable]:
    """ONNX forms of this project's operators, for inference in float32.

    Returns:
        ``custom_translation_table`` of ``torch.onnx.export(..., dynamo=True)``, opset 18 or later.
    """
    return {torch.ops.mmlaplacian.nystrom_attention.default: _nystrom_attention}
