from __future__ import annotations

import re

import pytest

from paceline.build.config import load_config
from paceline.config import Config
from paceline.config_io import ConfigError, all_keys, check_key
from paceline.other_names import HINTS, LIBRARIES


def test_empty_file_gives_the_defaults(tmp_path):
    (tmp_path / "c.toml").write_text("")
    assert load_config() == load_config(tmp_path / "c.toml") == Config()


def test_later_values_win(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('[sampling]\ntemperature = 0.5\ntop_k = 7\n[model]\nname = "a"\n')
    config = load_config(path, ["sampling.temperature=0.7", "model.name=b", "sampling.temperature=0.9"])
    assert (config.sampling.temperature, config.sampling.top_k, config.model.name) == (0.9, 7, "b")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("model.name=org/name-1.5", "org/name-1.5"),
        ("model.name=/a folder/with spaces", "/a folder/with spaces"),
        ('model.name="8"', "8"),
        ("sampling.top_k=8", 8),
        ("sampling.temperature=1", 1.0),
        ("engine.native=false", False),
        ('sampling.stop=["a", "b=c"]', ["a", "b=c"]),
        ("speculation.num_speculative_tokens={1=6, 8=3}", {1: 6, 8: 3}),
    ],
)
def test_override_values_are_toml_or_unquoted_strings(text, value):
    section, key = text.partition("=")[0].split(".")
    assert getattr(getattr(load_config(None, [text]), section), key) == value


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("speculation.num_spec_tokens=3", "speculation.num_speculative_tokens"),
        ("sampling.temp=1", "sampling.temperature"),
        ("sampling.suffix_min_match=3", "speculation.suffix_min_match"),
        ("enigne.threads=2", "engine"),
    ],
)
def test_unknown_key_error_names_the_nearest_key(override, suggestion):
    with pytest.raises(ConfigError) as error:
        load_config(None, [override])
    unknown = override.partition("=")[0] if suggestion != "engine" else "enigne"
    assert str(error.value) == f"unknown key {unknown}: did you mean {suggestion}?"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learner.lr=1", "unknown key learner.lr: Paceline's name is learner.learning_rate"),
        ("draft.lr=1", "unknown key draft.lr: did you mean draft.learning_rate?"),
        ("lr=1", "unknown key lr: Paceline's name is learner.learning_rate"),
        ("learning_rate=1", "unknown key learning_rate: Paceline's name is learner.learning_rate"),
        ("temperature=1", "unknown key temperature: Paceline's name is sampling.temperature"),
        ("num_generations=8", "unknown key num_generations: Paceline's name is algorithm.num_generations"),
        ("group_size=8", "unknown key group_size: Paceline's name is algorithm.num_generations"),
        ("n=8", "unknown key n: Paceline's name is algorithm.num_generations; of generate and eval, the option -n"),
        ("sampling.max_new_tokens=9", "unknown key sampling.max_new_tokens: Paceline's name is sampling.max_tokens"),
        ("output_dir=out", "unknown key output_dir: Paceline's name is the option --run DIR"),
        (
            "engine.gpu_memory_utilization=0.5",
            "unknown key engine.gpu_memory_utilization: Paceline's name is engine.vllm.gpu_memory_utilization",
        ),
        (
            "actor_rollout_ref.actor.optim.lr=1",
            "unknown key actor_rollout_ref.actor.optim.lr: Paceline's name is learner.learning_rate",
        ),
        ("trainer.save_freq=1", "unknown key trainer.save_freq: Paceline's name is train.checkpoint_every"),
        ("max_prompt_length=1", "unknown key max_prompt_length: Paceline does not truncate prompts; remove the key"),
        ("audit_every=1", "unknown key audit_every: its section is missing; write speculation.audit_every"),
        ("online=every", "unknown key online: its section is missing; write draft.online"),
    ],
)
def test_names_of_other_libraries_and_keys_without_a_section(override, message):
    with pytest.raises(ConfigError) as error:
        load_config(None, [override])
    assert str(error.value) == message


def test_every_key_of_a_section_of_another_library_is_reported(tmp_path):
    path = tmp_path / "verl.toml"
    path.write_text("[actor_rollout_ref.rollout]\nn = 8\ntemperature = 1.0\nunknown = 1\n")
    with pytest.raises(ConfigError) as error:
        load_config(path)
    rollout = "unknown key actor_rollout_ref.rollout"
    assert str(error.value).splitlines() == [
        f"{rollout}.n: Paceline's name is algorithm.num_generations",
        f"{rollout}.temperature: Paceline's name is sampling.temperature",
    ]


def test_names_of_other_libraries_refer_to_keys_that_exist():
    keys, sections = all_keys(Config), "|".join(Config.model_fields)
    for names in LIBRARIES.values():
        for name, text in names.items():
            named = re.findall(rf"\b(?:{sections})\.\w+", text)
            assert named or "option --" in text, name
            assert [key for key in named if key not in keys] == [], name
            # A known key needs no hint: it would never be used.
            assert name not in keys, name


@pytest.mark.parametrize("key", ["model", "model.name", "engine.vllm.max_model_len"])
def test_known_keys(key):
    check_key(Config, key, HINTS)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("modl", r"unknown key modl: did you mean model\?"),
        ("model.nam", r"unknown key model\.nam: did you mean model\.name\?"),
        ("lr", r"unknown key lr: Paceline's name is learner\.learning_rate"),
        ("train.lr", r"unknown key train\.lr: Paceline's name is learner\.learning_rate"),
        ("draft.lr", r"unknown key draft\.lr: did you mean draft\.learning_rate\?"),
        ("learner.deepspeed", r"unknown key learner\.deepspeed: Paceline does not use DeepSpeed; remove the key"),
        ("actor.optim.lr", r"unknown key actor\.optim\.lr: Paceline's name is learner\.learning_rate"),
    ],
)
def test_check_key_says_what_an_unknown_key_should_be(key, message):
    with pytest.raises(ConfigError, match=message):
        check_key(Config, key, HINTS)


def test_unknown_key_error_lists_the_keys_of_the_section():
    with pytest.raises(ConfigError, match=r"unknown key model\.zzzz: the keys of model are name, dtype, device"):
        load_config(None, ["model.zzzz=1"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.max_num_seqs=many", "engine.max_num_seqs = 'many': expected an integer >= 1"),
        ("engine.max_num_seqs=0", "engine.max_num_seqs = 0: expected an integer >= 1"),
        ("engine.threads=1.5", "engine.threads = 1.5: expected an integer >= 1 and <= 4096"),
        ('engine.threads="2"', "engine.threads = '2': expected an integer >= 1 and <= 4096"),
        ("engine.native=1", "engine.native = 1: expected true or false"),
        ("model=x", "model = 'x': expected a section with the keys name, dtype, device, yarn_factor"),
        ("model.dtype=fp8", 'model.dtype = \'fp8\': expected one of "float32", "float64", "bfloat16", "float16"'),
        ("sampling.stop=x", "sampling.stop = 'x': expected a list of strings"),
        ("sampling.temperature=nan", "sampling.temperature = nan: must be 0 (greedy) or a finite number >= 1e-5"),
        ("sampling.temperature=-1", "sampling.temperature = -1.0: must be 0 (greedy) or a finite number >= 1e-5"),
        ("sampling.top_p=0", "sampling.top_p = 0.0: must be in (0, 1] (1 turns it off)"),
        ("speculation.policy=greedy", 'speculation.policy = \'greedy\': expected one of "static", "das", "auto"'),
        (
            "speculation.suffix_max_versions=0",
            "speculation.suffix_max_versions = 0: expected an integer >= 1 and <= 64",
        ),
        (
            "speculation.suffix_max_versions=65",
            "speculation.suffix_max_versions = 65: expected an integer >= 1 and <= 64",
        ),
        ("speculation.suffix_recency=0", "speculation.suffix_recency = 0: expected a number > 0 and <= 1"),
        ("speculation.suffix_recency=1.5", "speculation.suffix_recency = 1.5: expected a number > 0 and <= 1"),
        ("speculation.cost_table=3", "speculation.cost_table = 3: expected a string"),
        ("engine.order=shortest", 'engine.order = \'shortest\': expected one of "arrival", "longest"'),
        ("reward.weights=[nan]", "reward.weights = [nan]: every weight must be a finite number"),
        ("reward.weights=[-inf]", "reward.weights = [-inf]: every weight must be a finite number"),
    ],
)
def test_wrong_value_error_names_key_value_and_expected_type(override, message):
    with pytest.raises(ConfigError) as error:
        load_config(None, [override])
    assert str(error.value) == message


def test_all_errors_are_reported_at_once():
    with pytest.raises(ConfigError) as error:
        load_config(None, ["engine.threads=x", "model.dtipe=float32"])
    assert len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize("override", ["model.name", "=3", "model..name=3", "model.name=[1", "model.name.deep.er=1"])
def test_invalid_overrides(override):
    with pytest.raises(ConfigError, match=r"model|form"):
        load_config(None, [override])


def test_invalid_files(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[model\n")
    with pytest.raises(ConfigError, match=r"bad\.toml is not valid TOML.*line 1"):
        load_config(tmp_path / "bad.toml")


def test_draft_model_needs_a_model():
    with pytest.raises(ConfigError, match=r"speculation\.draft_model is not set"):
        load_config(None, ["speculation.method=draft_model"])


def test_config_round_trip_through_json():
    config = load_config(None, ["speculation.num_speculative_tokens={1=6, 8=3}"])
    assert Config.model_validate_json(config.model_dump_json()) == config
    assert Config.model_validate(config.model_dump(mode="json")) == config


def test_config_is_immutable():
    with pytest.raises(ValueError, match="frozen"):
        Config().model.name = "other"


def test_all_keys_are_settable():
    """Overrides can set every key."""
    for key in all_keys(Config):
        with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
            tables = (
                "speculation.num_speculative_tokens",
                "task.params",
                "task.chat_template_kwargs",
            )  # these may have any keys
            load_config(None, [f"{key}.impossible=1"] if key not in tables else [f"{key}=-1"])


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["speculation.audit_every=2", "speculation.rule=block"], "speculation.audit_every"),
        (["speculation.audit_every=2", "train.max_staleness=1"], "speculation.audit_every"),
        (["speculation.audit_every=2", "task.kind=env"], "speculation.audit_every"),
        (["speculation.policy=das", "speculation.num_speculative_tokens={1=6}"], "speculation.num_speculative_tokens"),
        (["speculation.policy=auto", "speculation.num_speculative_tokens={1=6}"], "speculation.num_speculative_tokens"),
        (["speculation.policy=das", "speculation.min_confidence=0.2"], "speculation.min_confidence"),
        (["speculation.policy=auto", "speculation.min_confidence=0.2"], "speculation.min_confidence"),
        (["speculation.policy=auto", "speculation.rule=rejection"], "speculation.policy"),
        (["speculation.policy=auto", "speculation.rule=block"], "speculation.policy"),
        (["algorithm.correction=icepop", "sampling.top_k=5"], "algorithm.correction"),
        (["train.max_staleness=1", "sampling.top_k=5"], "algorithm.correction"),
        (["train.seed=-1"], "train.seed"),
    ],
)
def test_incompatible_settings(overrides, key):
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        load_config(None, overrides)


def test_stale_rollouts_are_corrected_unless_the_user_says_no():
    assert load_config(None, []).algorithm.correction == "none"
    assert load_config(None, ["train.max_staleness=1"]).algorithm.correction == "token_tis"
    uncorrected = load_config(None, ["train.max_staleness=1", "algorithm.correction=none", "sampling.top_k=5"])
    assert uncorrected.algorithm.correction == "none"


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_das_is_compatible_with_every_rule(rule):
    load_config(None, ["speculation.policy=das", f"speculation.rule={rule}"])


def test_a_gpu_has_other_defaults():
    config = load_config(None, ["model.device=cuda:1"])
    assert (config.model.dtype, config.engine.max_num_seqs, config.engine.max_num_batched_tokens) == (
        "bfloat16", 256, 16384,
    )  # fmt: skip
    assert config.speculation.num_speculative_tokens == 7
    config = load_config(None, ["model.device=cuda", "model.dtype=float32", "engine.max_num_seqs=8"])
    assert (config.model.dtype, config.engine.max_num_seqs) == ("float32", 8)
    assert load_config(None, ["engine.max_num_seqs=8"]).model.dtype == "float32"
