"""The policy in a checkpoint: the tensors of `Learner.weights`, read from disk one by one on the CPU.

There is no learner and no optimizer: memory is needed for the largest tensor, in float32, and for what is computed from
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from paceline.config import LearnerSection
from paceline.model import lora
from paceline.model.decoder import Decoder
from paceline.model.hf_decoder import HFDecoder, parameter_views
from paceline.model.layer import Linear
from paceline.model.weights import ParameterView, tensors_in
from paceline.rl.shards import Shards


class StoredPolicy:
    """`folder`: a learner's state. `source`: the directory of the model that the run started with. `decoder`: that
    model on the device `meta`, for its names and shapes. `dtype`: model.dtype of the run."""

    def __init__(
        self,
        folder: Path,
        source: Path,
        decoder: Decoder | HFDecoder,
        section: LearnerSection,
        dtype: torch.dtype,
    ) -> None:
        self.decoder, self.dtype, self.has_adapters = decoder, dtype, bool(section.lora_rank)
        self._folder, self._files = folder, ExitStack()
        self._state = self._files.enter_context(Shards(folder, mapped=False))
        if section.lora_rank:  # only the adapters are in the checkpoint
            _, self._initial = self._files.enter_context(tensors_in(source, mapped=False))
            assert isinstance(decoder, Decoder)
            lora.attach(decoder, section.lora_rank, section.lora_alpha, section.lora_targets)
        # A tied LM head is one parameter, under its first name.
        self._names = {id(parameter): name for name, parameter in decoder.named_parameters()}

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """In `dtype`, LoRA merged. In the run's own, these are those of its learner, bit for bit. Else float32 weights
        of the optimizer are rounded once, if at all."""
        for view in parameter_views(self.decoder):
            names, sizes = zip(*view.parts, strict=True)
            yield from zip(names, self._read(view, dtype).split(sizes), strict=True)

    def adapters(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """The LoRA adapters under PEFT's names."""
        assert isinstance(self.decoder, Decoder)
        for view in lora.adapter_views(self.decoder):
            assert isinstance(view.parameter, Tensor)
            names, sizes = zip(*view.parts, strict=True)
            yield from zip(names, self._state_of(view.parameter).to(dtype).split(sizes), strict=True)

    def _state_of(self, parameter: Tensor) -> Tensor:
        return self._state[f"parameter.{self._names[id(parameter)]}"]

    def _read(self, view: ParameterView, dtype: torch.dtype) -> Tensor:
        parameter = view.parameter.weight if isinstance(view.parameter, Linear) else view.parameter
        name = f"parameter.{self._names[id(parameter)]}"
        compute_dtype = torch.promote_types(self.dtype, dtype)
        if self.has_adapters and name not in self._state:
            tensor = torch.cat([self._initial(part) for part, _ in view.parts]).to(self.dtype)
        else:
            tensor = self._state[name]
        assert parameter is not None
        if tensor.shape != parameter.shape:
            raise ValueError(
                f"{self._folder}: {name} is {list(tensor.shape)}, but the model has {list(parameter.shape)}; restore "
                "the model that the run started with"
            )
        tensor = tensor.to(compute_dtype)
        adapters = view.parameter.lora if isinstance(view.parameter, Linear) else None
        if adapters is not None:
            tensor = adapters.merged(tensor, self._state_of(adapters.down), self._state_of(adapters.up))
        return tensor.to(dtype)

    def __enter__(self) -> StoredPolicy:
        return self

    def __exit__(self, *failure: object) -> None:
        self._files.close()
