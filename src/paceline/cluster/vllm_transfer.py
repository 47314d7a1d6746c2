"""vLLM's own seam for weights, with shared memory behind it: vLLM's engines need NCCL or CUDA IPC, this one neither.

Registered with vLLM's factory by `vllm_extension.py`. The same session serves the policy and, begun with
`start_draft_weight_update`, the drafter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from paceline.cluster.vllm_shared import noting_zeros, unpack, with_tied_head


@dataclass
class Nothing(WeightTransferInitInfo):
    """There is nothing to agree on beforehand."""


@dataclass
class Parcel(WeightTransferUpdateInfo):
    """As `vllm_shared.parcels` makes them."""

    path: str
    size: int
    tensors: list[Any]


class SharedMemoryTransfer(WeightTransferEngine[Nothing, Parcel]):
    """`negative_zeros`: where -0.0 was sent, of the policy's tensors (False) and the drafter's (True)."""

    init_info_cls = Nothing
    update_info_cls = Parcel

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.negative_zeros: dict[bool, dict[str, Tensor]] = {False: {}, True: {}}

    def init_transfer_engine(self, init_info: Nothing) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Parcel) -> None:
        if self._is_draft:
            self._check_own([name for name, *_ in update_info.tensors])
        weights = unpack(update_info.path, update_info.size, update_info.tensors, self.device)
        weights = noting_zeros(weights, self.negative_zeros[self._is_draft])
        self.model.load_weights(with_tied_head(weights, self.model_config.hf_text_config))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    @property
    def _is_draft(self) -> bool:
        return self.model is not self._default_model

    def _check_own(self, names: list[str]) -> None:
        """Where a head's embedding or LM head equals the policy's when it is loaded, vLLM keeps one of both: an update
        of the head would change the policy."""
        policy = {id(module) for module in self._default_model.modules()}
        for name, path in (("embed_tokens.weight", "model.embed_tokens"), ("lm_head.weight", "lm_head")):
            if name in names and id(self.model.get_submodule(path)) in policy:
                raise ValueError(
                    f"speculation.head: its {name} was the policy's when vLLM loaded it, which has kept one of both; "
                    "leave it out of the head, or train the head a little before (`paceline train-draft`)"
                )

    def shutdown(self) -> None:
        pass
