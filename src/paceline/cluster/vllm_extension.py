"""Methods that are added to vLLM's workers. Each worker runs them in its own process; the engine calls them by name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from paceline.cluster.vllm_history import HistoryProposer
from paceline.cluster.vllm_names import BACKEND
from paceline.cluster.vllm_shared import read_bucket, record_negative_zeros, with_tied_head
from paceline.model.paged import receipt_of
from paceline.types import Receipt

HAS_WEIGHT_TRANSFER = find_spec("vllm.distributed.weight_transfer") is not None
if HAS_WEIGHT_TRANSFER:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, "paceline.cluster.vllm_transfer", "SharedMemoryTransfer")


class WorkerExtension:
    """A mixin of vLLM's worker class. The names have a prefix so that they do not collide with the worker's own."""

    model_runner: Any
    device: torch.device

    def paceline_ignore_signals(self, engine_pid: int) -> None:
        """Ctrl-C in a terminal and the end of a job signal all processes. Only the engine's process reacts: it may
        still need the workers. A worker exits when the engine closes its pipe."""
        if os.getpid() != engine_pid:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)

    def paceline_reload_weights(self, bucket: Mapping[str, Any]) -> None:
        """Load all weights of the policy, for a vLLM without a weight transfer API."""
        weights = read_bucket(bucket["path"], bucket["size"], bucket["tensors"], self.device)
        self.paceline_negative_zeros: dict[str, torch.Tensor] = {}
        weights = record_negative_zeros(weights, self.paceline_negative_zeros)
        hf_config = self.model_runner.model_config.hf_text_config
        self.model_runner.reload_weights(weights_iterator=with_tied_head(weights, hf_config))

    def paceline_receipt(self, version: int, draft: bool) -> Receipt:
        """The receipt for the weights in the policy, or in the drafter."""
        from paceline.cluster.vllm_weights import read_head, read_model, with_negative_zeros

        runner = self.model_runner
        policy = runner.get_model()
        with torch.inference_mode():
            if draft and runner.speculative_config.method == "eagle3":
                weights = read_head(runner.drafter.model, policy)
            else:
                model = runner.drafter.model if draft else policy
                config = runner.speculative_config.draft_model_config if draft else runner.model_config
                weights = read_model(model, bool(getattr(config.hf_text_config, "tie_word_embeddings", False)))
            transfer = getattr(self, "weight_transfer_engine", None)
            if transfer is not None:
                negative_zeros = transfer.negative_zeros[draft]
            else:
                negative_zeros = getattr(self, "paceline_negative_zeros", {})
            held = ((name, with_negative_zeros(tensor, negative_zeros.get(name))) for name, tensor in weights)
            return receipt_of(held, version, time.perf_counter())

    def paceline_check_sampler(self) -> None:
        from paceline.cluster.vllm_sampler import check_sampler

        check_sampler(self.device)

    def paceline_attach_history(self) -> None:
        """Give the history drafter access to the model runner's requests."""
        self._paceline_history().runner = self.model_runner

    def paceline_state_dict(self) -> dict[str, np.ndarray]:
        return self._paceline_history().drafter.state_dict()

    def paceline_load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        self._paceline_history().load_state_dict(state)

    def _paceline_history(self) -> HistoryProposer:
        proposer = self.model_runner.drafter
        assert isinstance(proposer, HistoryProposer)
        return proposer
