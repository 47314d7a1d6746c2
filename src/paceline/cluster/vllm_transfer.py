"""A weight transfer engine for vLLM's weight transfer API, through shared memory. vLLM's own need NCCL or CUDA IPC.

`vllm_extension.py` registers it with vLLM's factory. It updates the policy or, after `start_draft_weight_update`, the
drafter.
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

from paceline.cluster.vllm_shared import read_bucket, record_negative_zeros, with_tied_head


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Empty: shared memory needs no setup."""


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """One bucket of `vllm_shared.write_buckets`."""

    path: str
    size: int
    tensors: list[Any]


class SharedMemoryTransfer(WeightTransferEngine[InitInfo, BucketInfo]):
    """`negative_zeros` has the indices of -0.0 in the sent tensors, of the policy (False) and the drafter (True)."""

    init_info_cls = InitInfo
    update_info_cls = BucketInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.negative_zeros: dict[bool, dict[str, Tensor]] = {False: {}, True: {}}

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: BucketInfo) -> None:
        if self._is_draft:
            self._check_not_shared([name for name, *_ in update_info.tensors])
        weights = read_bucket(update_info.path, update_info.size, update_info.tensors, self.device)
        weights = record_negative_zeros(weights, self.negative_zeros[self._is_draft])
        self.model.load_weights(with_tied_head(weights, self.model_config.hf_text_config))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    @property
    def _is_draft(self) -> bool:
        return self.model is not self._default_model

    def _check_not_shared(self, names: list[str]) -> None:
        """If a head's embedding or LM head equals the policy's at load time, vLLM makes them share one module. An
        update of the head would then change the policy."""
        policy = {id(module) for module in self._default_model.modules()}
        for name, path in (("embed_tokens.weight", "model.embed_tokens"), ("lm_head.weight", "lm_head")):
            if name in names and id(self.model.get_submodule(path)) in policy:
                raise ValueError(
                    f"speculation.head: its {name} equalled the policy's when vLLM loaded it, so vLLM shares one "
                    "tensor; remove it from the head, or train the head first (`paceline train-draft`)"
                )

    def shutdown(self) -> None:
        pass
