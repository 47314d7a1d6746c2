"""Any causal language model of transformers in the place of our decoder, for the learner alone: `learner.model =
"transformers"`. Slower, for a prompt is computed once for every completion, but of whatever architecture.

What a learner asks of a decoder is here under the same names. The sequences of a forward are laid side by side and
padded at their ends, where causality hides it: no mask is needed, and sliding windows, learned positions or recurrent
layers are as their authors meant them. T tokens laid end to end, S sequences of at most L, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.model.decoder import Output
from paceline.model.hf_shape import check_sizes
from paceline.model.weights import LM_HEAD, Home, ModelError, tensors_in

PROBE = 5  # tokens that show whether logits are the LM head's alone


class SideBySide:
    """Where each of the T tokens stands among S sequences of L: segments as in PackedAttention."""

    def __init__(self, lengths: Sequence[int], prefixes: Sequence[int | None], device: torch.device) -> None:
        ends = np.cumsum(lengths)
        rows = [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        begun = {prefix for prefix in prefixes if prefix is not None}
        whole = [
            rows[i] if prefix is None else np.concatenate([rows[prefix], rows[i]])
            for i, prefix in enumerate(prefixes)
            if i not in begun  # a prompt that is no sequence by itself
        ]
        longest = max(map(len, whole))
        rows_SL, place_T = np.zeros((len(whole), longest), np.int64), np.zeros(sum(lengths), np.int64)
        for s, each in enumerate(whole):
            rows_SL[s, : len(each)] = each
            place_T[each] = s * longest + np.arange(len(each))  # a shared prompt's: in the last that has it
        self.rows_SL = torch.from_numpy(rows_SL).to(device)
        self.place_T = torch.from_numpy(place_T).to(device)


class HFDecoder(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model.eval()  # nothing is dropped: the engine drops nothing either
        self.layers = [module for module in model.modules() if type(module).__name__ in _block_names(model)]

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, attention: SideBySide, taps: tuple[int, ...] = ()
    ) -> Output:
        assert not taps, "a drafter that reads states goes with our own decoder"
        hidden_SLD = self._body(tokens_T[attention.rows_SL])
        return Output(hidden_SLD.flatten(0, 1)[attention.place_T], {})

    def attention(self, lengths: Sequence[int], prefixes: Sequence[int | None]) -> SideBySide:
        return SideBySide(lengths, prefixes, self.device)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)

    @property
    def lm_head(self) -> Any:
        return self.model.get_output_embeddings()

    @property
    def embed(self) -> Any:
        return self.model.get_input_embeddings()

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def checkpointing(self) -> bool:
        """Whether each layer is computed again in the backward pass. Ours, not transformers', which is only for
        models that drop out."""
        return any("forward" in vars(layer) for layer in self.layers)

    @checkpointing.setter
    def checkpointing(self, wanted: bool) -> None:
        for layer in self.layers:
            vars(layer).pop("forward", None)
            if wanted:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)

    def homes(self) -> Iterator[Home]:
        return (Home(parameter, ((name, len(parameter)),)) for name, parameter in self.model.named_parameters())

    def save(self, directory: Path) -> None:
        self.model.save_pretrained(directory)

    def _body(self, tokens_SL: Tensor) -> Tensor:
        return self.model.base_model(input_ids=tokens_SL, use_cache=False).last_hidden_state


def load_hf(directory: Path, dtype: torch.dtype, device: torch.device | str) -> HFDecoder:
    """From a Hugging Face directory with safetensors; code that comes with a model is never run."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    with tensors_in(directory) as (shapes, _):  # refuses pickles
        _check_stored(directory, shapes)
    shows = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, trust_remote_code=False, use_safetensors=True, local_files_only=True
        )
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        raise ModelError(f'{directory}: learner.model = "transformers" can\'t load it: {error}') from None
    finally:
        if shows:
            logging.enable_progress_bar()
    decoder = HFDecoder(model.to(device).requires_grad_(False))
    _check_head(decoder, directory)
    return decoder


def _check_stored(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Before any memory is taken: whether the files hold what transformers makes of config.json, by the same names."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        check_sizes(config)
        num_layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
        numbers = (int(word) for name in shapes for word in name.split(".") if word.isdecimal() and len(word) < 10)
        if num_layers > (stored := 1 + max(numbers, default=-1)):  # to build so many would take long
            raise ValueError(f"config.json: num_hidden_layers = {num_layers}, but {stored} layers are stored")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # transformers and its validators raise all sorts
        raise ModelError(f'{directory}: learner.model = "transformers" can\'t load it: {error}') from None
    needed = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if odd := sorted(needed.keys() - shapes.keys() - {LM_HEAD}):
        raise ModelError(
            f"{directory}: transformers knows {odd[0]} and {len(odd) - 1} more tensors by names that the files do not "
            'have, so no engine would; learner.model = "transformers" can\'t train it'
        )
    for name, shape in needed.items():
        if shapes.get(name, shape) != shape:
            raise ModelError(f"{directory}: {name} is {list(shapes[name])}, the config says {list(shape)}")


@torch.no_grad()
def _check_head(decoder: HFDecoder, directory: Path) -> None:
    """The loss is computed from states and the LM head's matrix: whatever else is done to logits would be missed."""
    tokens = torch.arange(PROBE, device=decoder.device)[None]
    head = decoder.lm_head
    if head is not None and getattr(head, "bias", None) is None:
        mine = head(decoder._body(tokens))
        theirs = decoder.model(input_ids=tokens, use_cache=False).logits.to(mine.dtype)
        if (mine - theirs).abs().max() <= 8 * torch.finfo(mine.dtype).eps * theirs.abs().max():
            return
    raise ModelError(
        f"{directory}: its logits are not its last states times its LM head (a bias, a cap or a scale), which "
        'learner.model = "transformers" can\'t train'
    )


def _block_names(model: Any) -> set[str]:
    """The classes of a model's layers, which are divided among ranks one by one."""
    return set(getattr(model, "_no_split_modules", None) or ())
