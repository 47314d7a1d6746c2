"""Models of transformers in the learner: they equal our decoder if we have the architecture, and transformers' own
results otherwise. Unsupported models raise an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import make, policy, settings
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    MixtralConfig,
    Olmo2Config,
)

from paceline.build.config import load_config
from paceline.build.export import export_policy
from paceline.config import LearnerSection
from paceline.config_io import ConfigError
from paceline.model.hf_decoder import HFDecoder, PaddedBatch, load_hf
from paceline.model.weights import ModelError, load
from paceline.rl.batch import TokenBatch, scored
from paceline.rl.learner import Learner
from paceline.rl.packing import microbatches, padded_microbatches
from paceline.types import Rollout

from ..test_learner import linear_loss, rollout, some_groups

Checkpoint = Callable[..., Path]
COMMON: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": 60,
}  # fmt: skip
FOREIGN = {
    "gpt2": GPT2Config(
        vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=128, resid_pdrop=0.3, bos_token_id=None,
        eos_token_id=60,
    ),
    "olmo2": Olmo2Config(**COMMON, pad_token_id=None),
    "gemma3, a window of 4": Gemma3TextConfig(**COMMON, head_dim=8, sliding_window=4),
}  # fmt: skip


def write(config: Any, directory: Path) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(directory)
    return model


def learner(model: Any, **changes: Any) -> Learner:
    section = LearnerSection(**{"learning_rate": 1e-2, "tokens_per_microbatch": 60, "max_grad_norm": 1e9, **changes})
    return Learner(model, section, num_steps=10, temperature=0.8)


def in_float64(decoder: HFDecoder) -> HFDecoder:
    """Make the norms compute in float64: those of transformers always compute in float32."""
    for module in decoder.modules():
        if type(module).__name__.endswith("RMSNorm"):
            eps = module.variance_epsilon
            module.forward = lambda x, m=module, eps=eps: m.weight * x * (x.square().mean(-1, True) + eps).rsqrt()
    return decoder


@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("family, tie", [("llama", True), ("qwen3", False)])
def test_equals_our_decoder(checkpoint: Checkpoint, family: str, tie: bool, dtype: torch.dtype, atol: float) -> None:
    """Logprobs, and the weights after one update. eps is large: otherwise AdamW's first step depends only on signs."""
    directory, groups = checkpoint(family, tie=tie), some_groups()
    rollouts, batch = scored(groups), TokenBatch.of(groups)
    ours = learner(load(directory, dtype), eps=1.0)
    theirs = learner(in_float64(load_hf(directory, dtype, "cpu")), eps=1.0)
    assert ours.logprobs(rollouts).std() > 0.3
    torch.testing.assert_close(theirs.logprobs(rollouts), ours.logprobs(rollouts), rtol=0, atol=atol)
    before = {name: tensor.clone() for name, tensor in ours.weights()}
    reports = [it.update(rollouts, batch, linear_loss) for it in (ours, theirs)]
    assert reports[1].grad_norm == pytest.approx(reports[0].grad_norm, rel=10 * atol)
    mine, other = dict(ours.weights()), dict(theirs.weights())
    assert mine.keys() == other.keys()
    assert max(float((mine[name] - tensor).abs().max()) for name, tensor in before.items()) > 100 * atol
    for name, tensor in mine.items():
        torch.testing.assert_close(other[name], tensor, rtol=0, atol=atol, msg=name)


def one_by_one(model: Any, rollouts: Sequence[Rollout]) -> Tensor:
    outs = []
    for r in rollouts:
        tokens = torch.tensor([*r.prompt_ids, *r.token_ids.tolist()])
        logprobs = (model(tokens[None]).logits[0].double() / 0.8).log_softmax(-1)
        chosen = logprobs[torch.arange(len(tokens) - 1), tokens[1:]][len(r.prompt_ids) - 1 :]
        outs.append(torch.where(torch.from_numpy(r.mask), chosen, 0.0))
    return torch.cat(outs)


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", FOREIGN)
def test_an_architecture_that_we_do_not_have(name: str, recomputed: bool, tmp_path: Path) -> None:
    model = write(FOREIGN[name], tmp_path)
    it = learner(load_hf(tmp_path, torch.float32, "cpu"), activation_checkpointing=recomputed)
    groups = some_groups()
    rollouts, batch = scored(groups), TokenBatch.of(groups)
    expected = one_by_one(model, rollouts)
    torch.testing.assert_close(it.logprobs(rollouts), expected.detach(), rtol=0, atol=1e-5)
    linear_loss(batch, expected).loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert it.update(rollouts, batch, linear_loss).grad_norm == pytest.approx(float(norm), rel=1e-4)
    assert dict(it.weights()).keys() == dict(model.named_parameters()).keys()


def test_attention_to_other_completions_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write(FOREIGN["olmo2"], tmp_path)
    rollouts = scored(some_groups())

    class OneSequence(PaddedBatch):  # everything concatenated to one sequence
        def __init__(self, lengths: Sequence[int], prefixes: Sequence[int | None], device: torch.device) -> None:
            super().__init__([sum(lengths)], [None], device)

    monkeypatch.setattr("paceline.model.hf_decoder.PaddedBatch", OneSequence)
    found = learner(load_hf(tmp_path, torch.float32, "cpu")).logprobs(rollouts)
    assert (found - one_by_one(model, rollouts)).abs().max() > 1e-2


@pytest.mark.parametrize("max_tokens", [1, 40, 100, 10_000])
def test_prompts_and_padding_count_as_tokens(tmp_path: Path, max_tokens: int) -> None:
    """A forward pass has at most learner.tokens_per_microbatch tokens, unless a single rollout has more."""
    write(FOREIGN["olmo2"], tmp_path)
    rollouts = scored(some_groups())
    it = learner(load_hf(tmp_path, torch.float32, "cpu"), tokens_per_microbatch=max_tokens)
    body, sizes = it.decoder._body, []

    def counted(tokens_SL: Tensor) -> Tensor:
        sizes.append(tuple(tokens_SL.shape))
        return body(tokens_SL)

    it.decoder._body = counted
    logprobs = it.logprobs(rollouts)
    assert all(s * length <= max_tokens or s == 1 for s, length in sizes), sizes
    assert (len(sizes) == 1) == (max_tokens == 10_000)
    shared = list(microbatches(rollouts, max_tokens))
    padded = list(padded_microbatches(rollouts, max_tokens))
    assert len(padded) >= len(shared) and (len(padded) > len(shared) or max_tokens in (1, 10_000))
    whole = learner(load_hf(tmp_path, torch.float32, "cpu"), tokens_per_microbatch=10_000)
    torch.testing.assert_close(logprobs, whole.logprobs(rollouts), rtol=0, atol=1e-5)


def test_copies_of_a_prompt_count() -> None:
    """64 completions of a prompt of 4000 tokens: our decoder computes it once, transformers 64 times."""
    rollouts = [rollout([7] * 4000, [8, 9, 8]) for _ in range(64)]
    spans = list(padded_microbatches(rollouts, 8192))
    assert [end - start for start, end in spans] == [2] * 32


def test_attention_is_fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mask, so that a GPU can use flash attention."""
    write(FOREIGN["olmo2"], tmp_path)
    attend, masks = torch.nn.functional.scaled_dot_product_attention, []

    def recorded(*args: Any, attn_mask: Tensor | None = None, is_causal: bool = False, **rest: Any) -> Tensor:
        masks.append((attn_mask, is_causal))
        return attend(*args, attn_mask=attn_mask, is_causal=is_causal, **rest)

    it = learner(load_hf(tmp_path, torch.float32, "cpu"), tokens_per_microbatch=10_000)
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", recorded)
    it.logprobs(scored(some_groups()))
    assert masks == [(None, True)] * 2, "once per layer"


def test_a_model_without_fused_attention_is_named(tmp_path: Path) -> None:
    write(BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4, eos_token_id=60), tmp_path)
    with pytest.warns(UserWarning, match="no fused attention .* for BloomForCausalLM"):
        load_hf(tmp_path, torch.float32, "cpu")


@pytest.mark.parametrize(
    "config, match",
    [
        (Gemma2Config(**COMMON, head_dim=8), "its logits are not its last hidden states times its LM head"),
        (MixtralConfig(**COMMON, num_local_experts=2), "names that the files do not have"),
    ],
    ids=["a cap on logits", "fused experts"],
)
def test_unsupported_models_raise(config: Any, match: str, tmp_path: Path) -> None:
    write(config, tmp_path)
    with pytest.raises(ModelError, match=match):
        load_hf(tmp_path, torch.float32, "cpu")


def test_pickles_raise(tmp_path: Path) -> None:
    write(FOREIGN["gpt2"], tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="a pickle"):
        load_hf(tmp_path, torch.float32, "cpu")


@pytest.mark.parametrize(
    "setting",
    ["learner.lora_rank=4", "learner.optimizer=muon", "draft.online=every", "model.yarn_factor=2.0"],
)
def test_settings_that_need_our_own_decoder_raise(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting.partition("=")[0]):
        load_config(None, ["learner.model=transformers", "speculation.method=eagle3", setting])


# ---- runs ----


def test_a_run_and_its_export(tmp_path: Path) -> None:
    """Our engine generates. The run equals that with our own decoder, up to rounding to float32 inside of transformers.
    The engine receives the weights by name, with a receipt."""
    trainers = {}
    for name in ("paceline", "transformers"):
        overrides = (f"learner.model={name}", "train.num_steps=2", "model.dtype=float32")
        trainers[name] = make(tmp_path, name, *overrides)
        trainers[name].run()
        trainers[name].close()
    ours, theirs = (policy(trainers[name]) for name in ("paceline", "transformers"))
    assert ours.keys() == theirs.keys()
    rewards = [[m["reward_mean"] for m in trainer.callback.metrics] for trainer in trainers.values()]
    assert rewards[0] == rewards[1]
    assert [m["loss"] for m in trainers["transformers"].callback.metrics] == pytest.approx(
        [m["loss"] for m in trainers["paceline"].callback.metrics], abs=1e-4
    )
    assert not any(m["mismatch_alarm"] for m in trainers["transformers"].callback.metrics)
    resumed = make(tmp_path, "transformers", "learner.model=transformers", "model.dtype=float32", resume=True)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in policy(resumed).items())
    resumed.close()
    export_policy(settings(tmp_path, *overrides), tmp_path / "transformers", tmp_path / "exported", best=False)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in theirs.items())


def test_our_engine_does_not_support_every_architecture(tmp_path: Path) -> None:
    config = settings(tmp_path, "learner.model=transformers", "model.dtype=float32")
    write(FOREIGN["gpt2"], tmp_path / "model")
    with pytest.raises(ValueError, match=r'GPT2LMHeadModel is not supported.*engine.kind = "vllm"'):
        make(tmp_path, "run", config=config)
