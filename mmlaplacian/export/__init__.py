"""Forms of the operators in other languages than torch's. Needs onnxscript."""

from .onnx_attention import onnx_translations

__all__ = ['onnx_translations']
