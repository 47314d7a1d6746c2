"""Problems in, scored groups out: the engine decodes, environments answer, rewards judge.

Always: what comes out depends on the weights, the problems and the seed, never on who finished first. Groups keep the
order of their index; a sample's noise is keyed by (seed, group, sample, turn). An environment or a reward that fails
or hangs costs its sample, which is named, and nothing else.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from paceline.engine.interface import Engine
from paceline.rl.episode import Episode
from paceline.rl.stopwatch import Stopwatch
from paceline.tasks.prompt import continuation, encode
from paceline.tasks.rewards import Judge, Score
from paceline.tasks.task import Env, Problem, Prompt, Turn
from paceline.types import Completion, Group, Request, SamplingParams

SHARE = 0.1  # of a step's time, in which what has ended is put into words before the next


@dataclass(slots=True)
class Collected:
    groups: list[Group]
    requests: list[Request]  # all that were submitted, in order; an audit submits them again
    completions: list[Completion]  # in the requests' order
    generation_s: float  # until the last token was put into words


class Collector:
    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        rewarder: Judge,
        *,
        sampling: SamplingParams,
        chat: bool = True,
        env_timeout_s: float = 30.0,
    ) -> None:
        self.engine, self.tokenizer, self.rewarder = engine, tokenizer, rewarder
        self.sampling, self.chat, self.env_timeout_s = sampling, chat, env_timeout_s
        self._num_requests = 0

    def collect(
        self,
        step: int,
        problems: Sequence[tuple[int, Problem]],
        num_samples: int,
        seed: object,
        *,
        watch: Stopwatch | None = None,
        sampling: SamplingParams | None = None,
        between: Callable[[int, int], None] = lambda done, total: None,
    ) -> Collected:
        """num_samples rollouts of every (group index, problem). `between(samples done, samples in all)` is called
        before every engine step, and now and then while rewards are awaited; it may raise to stop."""
        watch = watch or Stopwatch()
        run = _Run(self, sampling or self.sampling, seed)
        with watch.stage("data"):
            members = [self._episodes(index, problem, num_samples) for index, problem in problems]
        scoring = ThreadPoolExecutor(self.rewarder.num_parallel, "reward")
        started = time.perf_counter()
        try:
            with watch.stage("generation"):
                scores = run.finish(members, lambda group: scoring.submit(self._score, step, group), between)
            generation_s = time.perf_counter() - started
            with watch.stage("reward"):
                total = len(problems) * num_samples
                while wait(scores.values(), timeout=0.2).not_done:
                    between(total, total)
                groups = [self._group(group, scores[i].result()) for i, group in enumerate(members)]
        except BaseException:
            run.abandon()
            scoring.shutdown(wait=False, cancel_futures=True)
            raise
        scoring.shutdown()
        completions = [run.completions[request.request_id] for request in run.requests]
        return Collected(groups, run.requests, completions, generation_s)

    def next_request_id(self) -> int:
        self._num_requests += 1
        return self._num_requests

    def _episodes(self, index: int, problem: Problem, num_samples: int) -> list[Episode]:
        shared = encode(self.tokenizer, problem.prompt, self.chat)
        episodes = [Episode(problem, index, sample, problem.prompt, shared) for sample in range(num_samples)]
        if problem.make_env is not None:
            opening = [background(_open, problem.make_env) for _ in episodes]
            wait(opening, timeout=self.env_timeout_s)
            for episode, future in zip(episodes, opening, strict=True):
                if not future.done():
                    limit = self.env_timeout_s
                    episode.failure = f"its environment took more than train.env_timeout_s = {limit:g} s to open"
                    continue
                try:
                    episode.env, episode.prompt = future.result()
                    episode.prompt_ids = encode(self.tokenizer, episode.prompt, self.chat)
                except Exception as error:
                    episode.failure = f"its environment could not be opened: {type(error).__name__}: {error}"
        return episodes

    def _score(self, step: int, group: list[Episode]) -> list[Score]:
        sane = [episode for episode in group if episode.failure is None]
        scores = dict(zip(map(id, sane), self.rewarder.score([e.to_score(step) for e in sane]), strict=True))
        return [scores.get(id(e)) or Score(float("nan"), {}, f"step {step}, {e.name}: {e.failure}") for e in group]

    def _group(self, episodes: list[Episode], scores: list[Score]) -> Group:
        rollouts = [
            replace(e.rollout(), reward=s.reward, rewards=s.parts, failure=s.failure)
            for e, s in zip(episodes, scores, strict=True)
        ]
        first = episodes[0]
        prompt = self.tokenizer.decode(list(first.prompt_ids))
        return Group(first.group, first.problem.name, prompt, rollouts)


class _Run:
    """The episodes of one `collect`, from their first request to their last completion."""

    def __init__(self, collector: Collector, sampling: SamplingParams, seed: object) -> None:
        self.collector, self.engine, self.sampling, self.seed = collector, collector.engine, sampling, seed
        self.requests: list[Request] = []
        self.completions: dict[int, Completion] = {}
        self.running: dict[int, Episode] = {}
        self.thinking: dict[Future[Turn], tuple[Episode, float]] = {}  # environments at work, and their deadline

    def finish(
        self,
        members: list[list[Episode]],
        score: Callable[[list[Episode]], Future[list[Score]]],
        between: Callable[[int, int], None],
    ) -> dict[int, Future[list[Score]]]:
        scores: dict[int, Future[list[Score]]] = {}
        left = {id(e): i for i, group in enumerate(members) for e in group}
        missing = [len(group) for group in members]
        total = len(left)

        def ended(episode: Episode) -> None:
            i = left.pop(id(episode))
            missing[i] -= 1
            if not missing[i]:
                scores[i] = score(members[i])

        for group in members:
            for episode in group:
                if episode.failure is not None or not self._submit(episode):
                    ended(episode)
        over: deque[tuple[Episode, Completion]] = deque()
        has_env = any(episode.env is not None for group in members for episode in group)
        while self.running or self.thinking or over:
            between(total - len(left), total)
            started = time.perf_counter()
            if self.running:
                done = self.engine.step()  # perhaps also of a run that was given up, which nobody asks for
                over.extend((e, c) for c in done if (e := self.running.pop(c.request.request_id, None)) is not None)
            elif not over:
                time.sleep(0.005)
            # When many end at once a fast device waits for the host: what nobody waits for is done bit by bit.
            until = time.perf_counter() + SHARE * (time.perf_counter() - started)
            while over:
                if self._turn_done(*over[0]):
                    ended(over[0][0])
                over.popleft()
                if self.running and not has_env and time.perf_counter() >= until:
                    break
            for episode in self._thought():
                ended(episode)
        return scores

    def _submit(self, episode: Episode) -> bool:
        """Whether its next turn could begin. A prompt that the engine refuses, too long for the model's context say,
        costs its sample."""
        sampling = self.sampling
        if episode.turns:
            sampling = replace(sampling, max_tokens=sampling.max_tokens - episode.num_emitted)
        request = episode.request(self.collector.next_request_id(), sampling, self.seed)
        try:
            self.engine.submit(request)
        except ValueError as error:
            episode.failure = str(error)
            return False
        self.requests.append(request)
        self.running[request.request_id] = episode
        return True

    def _turn_done(self, episode: Episode, completion: Completion) -> bool:
        """Whether that was all; else its environment is thinking."""
        self.completions[completion.request.request_id] = completion
        episode.turns.append(completion)
        # An array: of a list every element would be looked at.
        episode.text = self.collector.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        if episode.env is None:
            return True
        deadline = time.monotonic() + self.collector.env_timeout_s
        self.thinking[background(episode.env.step, episode.text)] = episode, deadline
        return False

    def _thought(self) -> list[Episode]:
        """Episodes whose environment has ended them; those that go on are submitted."""
        over: list[Episode] = []
        for future, (episode, deadline) in list(self.thinking.items()):
            if not future.done():
                if time.monotonic() > deadline:  # the thread can't be killed; it is left behind, and the sample with it
                    del self.thinking[future]
                    limit = self.collector.env_timeout_s
                    episode.failure = f"its environment took more than train.env_timeout_s = {limit:g} s"
                    over.append(episode)
                continue
            del self.thinking[future]
            error = future.exception()
            if error is not None:
                episode.failure = f"its environment raised {type(error).__name__}: {error}"
                over.append(episode)
            else:
                try:
                    goes_on = self._goes_on(episode, future.result())
                except Exception as error:  # an answer that is no Turn, or nothing that can be put into tokens
                    goes_on = False
                    episode.failure = f"its environment's answer can't be used: {type(error).__name__}: {error}"
                if not goes_on:
                    over.append(episode)
        return over

    def _goes_on(self, episode: Episode, turn: Turn) -> bool:
        episode.env_reward = (episode.env_reward or 0.0) + turn.reward
        if turn.observation is None or episode.num_emitted >= self.sampling.max_tokens:
            return False
        collector = self.collector
        ids = continuation(collector.tokenizer, turn.observation, collector.chat, episode.turns[-1].token_ids.tolist())
        episode.observations.append(ids)
        if self._submit(episode):
            return True
        episode.observations.pop()
        return False

    def abandon(self) -> None:
        """After an error, which is not to be hidden by one that comes of giving up."""
        for request_id in list(self.running):
            with suppress(ValueError):  # it had ended, and nobody was told
                self.engine.abort(request_id)


Result = TypeVar("Result")


def background(function: Callable[..., Result], *args: Any) -> Future[Result]:
    """Run it in a thread that nobody has to wait for, not even the end of the program."""
    future: Future[Result] = Future()

    def work() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def _open(make_env: Callable[[], Env]) -> tuple[Env, Prompt]:
    env = make_env()
    return env, env.prompt()
