"""A GGUF file (llama.cpp): its metadata by key and its tensors by name. Every error names the file and the key."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.model.weights import ModelError

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

SIGNIFICANT_BITS = {"F32": 24, "F16": 11, "BF16": 8}
_MISSING: Any = object()


class GgufFile:
    """The file is mapped: a tensor is read when `values` dequantises it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise ModelError(f"{path}: no such file")
        try:
            reader = _read(path)
        except (ValueError, LookupError, OverflowError, TypeError) as error:
            reason = str(error).strip().split("\n")[0]
            raise ModelError(f"{path}: truncated or not a GGUF file ({reason}); download it again") from None
        self._fields = reader.fields
        self.keys = list(reader.fields)
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
        if (parts := self.get("split.count", 1)) not in (0, 1):
            raise self.error(f"one of {parts} parts (split.count); merge them: llama-gguf-split --merge FIRST OUTPUT")

    def get(self, key: str, default: Any = _MISSING) -> Any:
        if key in self._fields:
            return self._fields[key].contents()
        if default is _MISSING:
            raise self.error(f"{key} is missing; use a complete GGUF file")
        return default

    def get_size(self, key: str, default: Any = _MISSING) -> int:
        """A positive integer."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.error(f"{key} = {str(value)[:60]}: must be a positive integer")
        return value

    def get_float(self, key: str, default: Any = _MISSING) -> float:
        """The file stores float32. The shortest decimal with the same float32 value is the original number."""
        value = self.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.error(f"{key} = {str(value)[:60]}: must be a number")
        return float(str(np.float32(value)))

    def shape(self, name: str) -> tuple[int, ...]:
        """As in numpy: GGUF lists dimensions in the reverse order."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def bits(self, name: str) -> float:
        """Significant bits per weight: those of a float, or all with the scales of quantised blocks."""
        tensor = self.tensors[name]
        return SIGNIFICANT_BITS.get(tensor.tensor_type.name, 8 * tensor.n_bytes / tensor.n_elements)

    def values(self, name: str, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """A tensor, or some of its rows, in float32."""
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        try:
            return dequantize(tensor.data[rows], tensor.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError:
            raise self.error(
                f"tensor {name}: type {tensor.tensor_type.name} is not supported; use a file with another quantisation"
            ) from None

    def error(self, reason: str) -> ModelError:
        return ModelError(f"{self.path}: {reason}")


def _read(path: Path) -> GGUFReader:
    from gguf import GGUFReader

    class Reader(GGUFReader):
        """Raises ValueError at the end of the file. GGUFReader itself would return fewer values, and loop over any
        length that a damaged file states."""

        data: np.ndarray

        def _get(self, offset: int, dtype: Any, count: int = 1, *options: Any, **more: Any) -> np.ndarray:
            self.data = np.asarray(self.data)  # slices of a memmap take three times as long
            values: np.ndarray = super()._get(offset, dtype, count, *options, **more)
            if len(values) != count:
                raise ValueError("the file ends early")
            return values

    return Reader(path)
