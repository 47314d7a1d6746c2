"""What vLLM's workers learn to do for us, each in its process; the engine calls them by name."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from paceline.cluster.vllm_history import HistoryProposer
from paceline.cluster.vllm_names import BACKEND
from paceline.cluster.vllm_shared import noting_zeros, unpack, with_tied_head
from paceline.model.weights import checksum

HAS_SEAM = find_spec("vllm.distributed.weight_transfer") is not None
if HAS_SEAM:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, "paceline.cluster.vllm_transfer", "SharedMemoryTransfer")


class WorkerExtension:
    """Mixed into vLLM's worker class, hence the long names: they must not be taken there."""

    model_runner: Any
    device: torch.device

    def paceline_leave_signals(self, engine: int) -> None:
        """A Ctrl-C in a terminal, or a job's end, is told to all processes. When to stop is decided by the engine's
        (`engine`), and a worker goes when that closes its pipe: till then it is needed."""
        if os.getpid() != engine:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)

    def paceline_reload(self, parcel: Mapping[str, Any]) -> None:
        """The policy's weights, whole, where vLLM has no seam for them."""
        weights = unpack(parcel["path"], parcel["size"], parcel["tensors"], self.device)
        self.paceline_zeros: dict[str, torch.Tensor] = {}
        weights = noting_zeros(weights, self.paceline_zeros)
        hf_config = self.model_runner.model_config.hf_text_config
        self.model_runner.reload_weights(weights_iterator=with_tied_head(weights, hf_config))

    def paceline_holdings(self, draft: bool) -> tuple[str, int, int]:
        """Checksum, number of tensors and bytes of what the policy, or the drafter, holds."""
        from paceline.cluster.vllm_holdings import head_holdings, policy_holdings, with_negative_zeros

        runner = self.model_runner
        policy = runner.get_model()
        with torch.inference_mode():
            if draft and runner.speculative_config.method == "eagle3":
                held = head_holdings(runner.drafter.model, policy)
            else:
                model = runner.drafter.model if draft else policy
                config = runner.speculative_config.draft_model_config if draft else runner.model_config
                held = policy_holdings(model, bool(getattr(config.hf_text_config, "tie_word_embeddings", False)))
            sizes: list[int] = []
            transfer = getattr(self, "weight_transfer_engine", None)
            zeros = transfer.negative_zeros[draft] if transfer is not None else getattr(self, "paceline_zeros", {})

            def measured() -> Any:
                for name, tensor in held:
                    sizes.append(tensor.nbytes)
                    yield name, with_negative_zeros(tensor, zeros.get(name))

            return checksum(measured()), len(sizes), sum(sizes)

    def paceline_check_sampler(self) -> None:
        from paceline.cluster.vllm_sampler import check_sampler

        check_sampler(self.device)

    def paceline_meet(self) -> None:
        """The history gets to know who is behind the rows."""
        self._paceline_history().meet(self.model_runner)

    def paceline_learned(self) -> dict[str, np.ndarray]:
        return self._paceline_history().drafter.state()

    def paceline_teach(self, state: Mapping[str, np.ndarray]) -> None:
        self._paceline_history().restore(state)

    def _paceline_history(self) -> HistoryProposer:
        proposer = self.model_runner.drafter
        assert isinstance(proposer, HistoryProposer)
        return proposer
