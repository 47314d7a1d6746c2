"""`LLM`: generate text from Python, with the interface of vLLM's class of this name."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch

from paceline.build.config import make_config
from paceline.build.engine import build_engine
from paceline.chat.messages import Message, Tool, is_unicode
from paceline.chat.template import encode, encode_rendered, render_chat
from paceline.config import Config
from paceline.config_io import ConfigError
from paceline.console import SafeConsole
from paceline.engine.checks import bad_word_ids
from paceline.outputs import RequestOutput, completion_output
from paceline.types import Request, SamplingParams, seeded_noise_key

TokenIds = Sequence[int]
TextOrIds = str | TokenIds
Encoded = tuple[str | None, tuple[int, ...]]  # a prompt's text, if it has one, and its token ids
Params = SamplingParams | Sequence[SamplingParams]


class LLM:
    """A model with a speculative engine. The tokens do not depend on `speculation`.

    model: a name that `paceline pull` knows, a Hugging Face directory, or a hub id.
    speculation: "auto" drafts if it should save time, "none" never drafts; or the name of a drafter, or a dict of the
        config's section [speculation], for example {"method": "eagle3", "head": "DIRECTORY"}.
    device: "cpu" or "cuda"; None: a GPU if there is one.
    settings: other sections of the config as dicts, for example engine={"max_num_seqs": 64}, model={"dtype": …}.
    """

    def __init__(
        self,
        model: str,
        *,
        speculation: str | Mapping[str, Any] = "auto",
        device: str | None = None,
        **settings: Mapping[str, Any],
    ) -> None:
        for name, section in settings.items():
            if not isinstance(section, Mapping):
                raise ConfigError(
                    f"LLM({name}={section!r}): give sections of the config as dicts, for example "
                    'engine={"max_num_seqs": 64}'
                )
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if isinstance(speculation, str):
            speculation = {} if speculation == "auto" else {"method": speculation}
        given = {"device": device, **settings.get("model", {}), "name": str(model)}
        self._build(make_config({**settings, "model": given, "speculation": speculation}))

    @classmethod
    def from_config(cls, config: Config) -> Self:
        llm = cls.__new__(cls)
        llm._build(config)
        return llm

    def _build(self, config: Config) -> None:
        self.config, self.engine = config, build_engine(config)
        self._request_ids = itertools.count()

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    def generate(
        self, prompts: TextOrIds | Sequence[TextOrIds], sampling_params: Params | None = None, progress: bool = True
    ) -> list[RequestOutput]:
        """Generate samples for each prompt: a string, which gets no chat template, or token ids. `sampling_params`: for
        all prompts, or one for each. `progress`: show a progress bar on a terminal."""
        return self._generate([self.encode(prompt) for prompt in _prompts(prompts)], sampling_params, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | None = None,
        progress: bool = True,
        tools: Sequence[Tool] = (),
    ) -> list[RequestOutput]:
        """The same for conversations: lists of messages with `role` and `content`, in the model's chat template.
        `tools`: functions that the model may call, in OpenAI's format."""
        encoded = [self.encode_chat(conversation, tools) for conversation in _conversations(messages)]
        return self._generate(encoded, sampling_params, progress)

    def encode(self, prompt: TextOrIds) -> Encoded:
        """A prompt's text, if it has one, and its token ids."""
        if not isinstance(prompt, str):
            return None, tuple(prompt)
        if not prompt or not is_unicode(prompt):
            raise ValueError(f"prompt {ascii(prompt)[:60]}: must be Unicode text and not empty")
        return prompt, encode(self.tokenizer, prompt, chat=False)

    def encode_chat(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Encoded:
        """A conversation in the chat template."""
        if not self.tokenizer.chat_template:
            raise ValueError(f"{self.config.model.name} has no chat template; use generate")
        if not is_unicode(messages) or not is_unicode(tools):
            raise ValueError("the messages are not valid Unicode text")
        text = render_chat(self.tokenizer, messages, add_generation_prompt=True, tools=tools)
        return text, encode_rendered(self.tokenizer, text)

    def requests(self, token_ids: tuple[int, ...], params: SamplingParams) -> list[Request]:
        """One request for each of the `n` samples of a prompt."""
        # Samples of one prompt have the same history to draft from.
        problem = hashlib.blake2b(np.array(token_ids, np.int64).tobytes(), digest_size=16).hexdigest()
        one = replace(self.with_bad_word_ids(params), n=1)
        keys = [None if params.seed is None else seeded_noise_key(params.seed, i) for i in range(params.n)]
        return [Request(next(self._request_ids), token_ids, one, key, problem) for key in keys]

    def with_bad_word_ids(self, params: SamplingParams) -> SamplingParams:
        """Tokenize bad words once, not for each sample on the engine's thread."""
        return replace(params, bad_words=bad_word_ids(params.bad_words, self.tokenizer)) if params.bad_words else params

    def compile(self, params: SamplingParams) -> None:
        """Compile a structured output once, not on the engine's thread. Raises ValueError."""
        if params.structured_outputs is not None:
            self.engine.grammars.compile(params.structured_outputs)

    def _generate(self, prompts: list[Encoded], params: Params | None, progress: bool) -> list[RequestOutput]:
        requests = [
            self.requests(ids, each) for (_, ids), each in zip(prompts, _params(params, len(prompts)), strict=True)
        ]
        with _bar(progress) as show:
            completions = iter(self.engine.generate([request for group in requests for request in group], show))
        self.engine.drain_trace()
        return [
            RequestOutput(text, list(ids), [
                completion_output(next(completions), index, self.tokenizer) for index in range(len(group))
            ])
            for (text, ids), group in zip(prompts, requests, strict=True)
        ]  # fmt: skip

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _prompts(prompts: Any) -> list[TextOrIds]:
    """One prompt or several. A sequence of integers is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    found = list(prompts)
    is_ids = bool(found) and all(isinstance(item, int | np.integer) for item in found)
    return [found] if is_ids else found


def _conversations(messages: Any) -> list[list[Message]]:
    """One conversation or several."""
    found = list(messages)
    conversations = [found] if found and isinstance(found[0], Mapping) else found
    for conversation in conversations:
        if isinstance(conversation, str) or not all(isinstance(message, Mapping) for message in conversation):
            raise ValueError("chat: messages must be dicts with `role` and `content`; for plain text use generate")
        if not conversation:
            raise ValueError("chat: a conversation has no messages")
    return [list(conversation) for conversation in conversations]


def _params(params: Params | None, num: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num
    if len(params) != num:
        raise ValueError(f"{len(params)} sampling_params for {num} prompts; give one for all, or one for each")
    return list(params)


@contextmanager
def _bar(enabled: bool) -> Iterator[Callable[[int, int], None] | None]:
    console = SafeConsole(stderr=True)
    if not enabled or not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("generating", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
