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
from paceline.model.decoder import Decoder
from paceline.model.hf_decoder import HFDecoder, parameter_views
from paceline.model.layer import Linear, merge
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
        self.decoder, self.dtype = decoder, dtype
        self.lora_scale = section.lora_alpha / section.lora_rank if section.lora_rank else 0.0
        self._folder, self._files = folder, ExitStack()
        self._state = self._files.enter_context(Shards(folder, mapped=False))
        if section.lora_rank:  # only the adapters are in the checkpoint
            _, self._initial = self._files.enter_context(tensors_in(source, mapped=False))
        # A tied LM head is one parameter, under its first name.
        self._names = {id(parameter): name for name, parameter in decoder.named_parameters()}

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """In `dtype`. In the run's own, these are the weights that its engine has, bit for bit. Else float32 weights of
        the optimizer are rounded once, if at all."""
        for view in parameter_views(self.decoder):
            names, sizes = zip(*view.parts, strict=True)
            yield from zip(names, self._read(view, dtype).split(sizes), strict=True)

    def _read(self, view: ParameterView, dtype: torch.dtype) -> Tensor:
        parameter = view.parameter.weight if isinstance(view.parameter, Linear) else view.parameter
        name = f"parameter.{self._names[id(parameter)]}"
        compute_dtype = torch.promote_types(self.dtype, dtype)
        if self.lora_scale and name not in self._state:
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
        adapter = name.removesuffix("weight") + "lora"
        if f"{adapter}.up" in self._state:
            up, down = (self._state[f"{adapter}.{part}"] for part in ("up", "down"))
            tensor = merge(tensor, up, down, self.lora_scale)
        return tensor.to(dtype)

    def __enter__(self) -> StoredPolicy:
        return self

    def __exit__(self, *failure: object) -> None:
        self._files.close()
