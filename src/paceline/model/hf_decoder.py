"""Any causal language model of transformers in place of our decoder, for the learner only: `learner.model =
"transformers"`. It supports every architecture but is slower: a prompt is computed once per completion.

HFDecoder has the methods of Decoder that the learner calls. The sequences of a forward pass are padded at the end to
one length. Causal attention hides the padding, so no mask is needed, and sliding windows, learned positions and
recurrent layers work as they are. T concatenated tokens, S sequences of at most L tokens, D hidden.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.model.attention import keys_of
from paceline.model.decoder import Decoder, Output
from paceline.model.hf_shape import load_hf_config
from paceline.model.weights import LM_HEAD, ModelError, ParameterView, decoder_views, tensors_in

NUM_CHECK_TOKENS = 5  # tokens for the check that the logits are the LM head's output


class PaddedBatch:
    """Maps T concatenated tokens to S padded sequences of length L and back. Segments are as in PackedAttention."""

    def __init__(self, lengths: Sequence[int], prefixes: Sequence[int | None], device: torch.device) -> None:
        # A shared prompt is no sequence by itself.
        shared = set(prefixes)
        sequences = [rows for i, rows in enumerate(keys_of(lengths, prefixes)) if i not in shared]
        longest = max(map(len, sequences))
        rows_SL, index_T = np.zeros((len(sequences), longest), np.int64), np.zeros(sum(lengths), np.int64)
        for s, each in enumerate(sequences):
            rows_SL[s, : len(each)] = each
            index_T[each] = s * longest + np.arange(len(each))  # for a shared prompt: in its last sequence
        self.rows_SL = torch.from_numpy(rows_SL).to(device)
        self.index_T = torch.from_numpy(index_T).to(device)


class HFDecoder(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model.eval()  # no dropout: the engine has none either
        self.config: Any = model.config
        self.compute_dtype: torch.dtype | None = None  # None: that of the parameters
        names = set(getattr(model, "_no_split_modules", None) or ())  # the classes of layers, sharded one by one
        self.layers = [module for module in model.modules() if type(module).__name__ in names]

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, attention: PaddedBatch, aux_layers: tuple[int, ...] = ()
    ) -> Output:
        assert not aux_layers, 'auxiliary hidden states need learner.model = "paceline"'
        hidden_SLD = self._body(tokens_T[attention.rows_SL])
        return Output(hidden_SLD.flatten(0, 1)[attention.index_T], {})

    def attention(self, lengths: Sequence[int], prefixes: Sequence[int | None]) -> PaddedBatch:
        return PaddedBatch(lengths, prefixes, self.device)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)

    @property
    def lm_head(self) -> Any:
        return self.model.get_output_embeddings()

    @property
    def embed(self) -> Any:
        return self.model.get_input_embeddings()

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = next(self.model.parameters()).dtype
        return self.compute_dtype or dtype

    @property
    def checkpointing(self) -> bool:
        """Activation checkpointing: whether each layer is recomputed in the backward pass. This is our own:
        transformers' needs training mode, which enables dropout."""
        return any("forward" in vars(layer) for layer in self.layers)

    @checkpointing.setter
    def checkpointing(self, enabled: bool) -> None:
        for layer in self.layers:
            vars(layer).pop("forward", None)
            if enabled:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)

    def parameter_views(self) -> Iterator[ParameterView]:
        return (ParameterView(tensor, ((name, len(tensor)),)) for name, tensor in self.model.named_parameters())

    def _body(self, tokens_SL: Tensor) -> Tensor:
        return self.model.base_model(input_ids=tokens_SL, use_cache=False).last_hidden_state


def parameter_views(decoder: Decoder | HFDecoder) -> Iterator[ParameterView]:
    """The parameters of a trained model, in the order of its Hugging Face tensors."""
    return decoder.parameter_views() if isinstance(decoder, HFDecoder) else decoder_views(decoder)


def empty_hf(directory: Path) -> HFDecoder:
    """The model of a Hugging Face directory without weights, on the device `meta`."""
    from transformers import AutoModelForCausalLM

    try:
        config, _ = load_hf_config(directory)
        with torch.device("meta"):
            return HFDecoder(AutoModelForCausalLM.from_config(config, trust_remote_code=False))
    except Exception as error:  # transformers and its validators raise many types
        raise ModelError(f'{directory}: learner.model = "transformers" can\'t load it: {error}') from None


def load_hf(directory: Path, dtype: torch.dtype, device: torch.device | str) -> HFDecoder:
    """From a Hugging Face directory with safetensors. Code in the directory is never run."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    with tensors_in(directory) as (shapes, _):  # raises for pickles
        _check_stored(directory, shapes)
    had_progress_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, trust_remote_code=False, use_safetensors=True, local_files_only=True
        )
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        raise ModelError(f'{directory}: learner.model = "transformers" can\'t load it: {error}') from None
    finally:
        if had_progress_bar:
            logging.enable_progress_bar()
    decoder = HFDecoder(model.to(device).requires_grad_(False))
    _check_head(decoder, directory)
    if model.config._attn_implementation != "sdpa":
        warnings.warn(
            f"{directory}: transformers has no fused attention (SDPA) for {type(model).__name__}. If it has attention, "
            "the scores of all pairs of tokens are in memory; keep learner.tokens_per_microbatch small.",
            stacklevel=2,
        )
    return decoder


def _check_stored(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check before allocating memory that the files have the tensors of transformers' model, under the same names."""
    from transformers import AutoModelForCausalLM

    try:
        config, text = load_hf_config(directory)
        num_layers = getattr(text, "num_hidden_layers", 0)
        numbers = (int(part) for name in shapes for part in name.split(".") if part.isdecimal() and len(part) < 10)
        if num_layers > (stored := 1 + max(numbers, default=-1)):  # building too many layers would take long
            raise ValueError(f"config.json: num_hidden_layers = {num_layers}, but {stored} layers are stored")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # transformers and its validators raise many types
        raise ModelError(f'{directory}: learner.model = "transformers" can\'t load it: {error}') from None
    needed = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if odd := sorted(needed.keys() - shapes.keys() - {LM_HEAD}):
        raise ModelError(
            f"{directory}: transformers has {odd[0]} and {len(odd) - 1} more tensors under names that the files do not "
            'have, so they can\'t be sent to an engine; learner.model = "transformers" does not support this model'
        )
    for name, shape in needed.items():
        if shapes.get(name, shape) != shape:
            raise ModelError(f"{directory}: {name} is {list(shapes[name])}, the config requires {list(shape)}")


@torch.no_grad()
def _check_head(decoder: HFDecoder, directory: Path) -> None:
    """The loss is computed from hidden states and the LM head's matrix, so no other operation may affect the logits."""
    tokens = torch.arange(NUM_CHECK_TOKENS, device=decoder.device)[None]
    head = decoder.lm_head
    if head is not None and getattr(head, "bias", None) is None:
        ours = head(decoder._body(tokens))
        theirs = decoder.model(input_ids=tokens, use_cache=False).logits.to(ours.dtype)
        if (ours - theirs).abs().max() <= 8 * torch.finfo(ours.dtype).eps * theirs.abs().max():
            return
    raise ModelError(
        f"{directory}: its logits are not its last hidden states times its LM head (it has a bias, a cap or a scale); "
        'learner.model = "transformers" does not support this model'
    )
