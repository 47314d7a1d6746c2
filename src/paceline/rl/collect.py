"""Collects rollouts: the engine generates, environments answer, the rewarder scores.

Invariants:
  - The result depends on the weights, the problems and the seed, not on the order in which samples finish. Groups are
    in the order of their index; a sample's noise key is made of (seed, group, sample, turn).
  - An environment or a reward that fails or hangs costs only its sample, which gets a `failure`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeVar

from paceline.engine.interface import Engine
from paceline.rl.episode import Episode
from paceline.rl.stage_timer import StageTimer
from paceline.tasks.prompt import continuation, encode
from paceline.tasks.rewards import Rewarder, Score
from paceline.tasks.task import Env, Problem, Prompt, Turn
from paceline.types import Completion, Group, Request, SamplingParams

DETOKENIZE_SHARE = 0.1  # detokenize finished completions for at most this share of an engine step's time


@dataclass(slots=True)
class Collected:
    groups: list[Group]
    requests: list[Request]  # all submitted ones, in order; an audit submits them again
    completions: list[Completion]  # in the order of `requests`


class Collector:
    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        rewarder: Rewarder,
        *,
        sampling: SamplingParams,
        chat: bool = True,
        env_timeout_s: float = 30.0,
    ) -> None:
        self.engine, self.tokenizer, self.rewarder = engine, tokenizer, rewarder
        self.sampling, self.chat, self.env_timeout_s = sampling, chat, env_timeout_s
        self.request_ids = count(1)

    def collect(
        self,
        when: str,
        problems: Sequence[tuple[int, Problem]],
        num_samples: int,
        seed: object,
        *,
        timer: StageTimer | None = None,
        sampling: SamplingParams | None = None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Collected:
        """num_samples rollouts of every (group index, problem). `when`, such as "step 3", begins the messages of
        failures. `on_progress(samples done, samples in total)` is called before every engine step, and regularly while
        waiting for rewards. It may raise to stop."""
        timer = timer or StageTimer()
        run = _Run(self, sampling or self.sampling, seed)
        with timer.stage("data"):
            groups = [self._episodes(index, problem, num_samples) for index, problem in problems]
        scoring = ThreadPoolExecutor(self.rewarder.num_parallel, "reward")
        try:
            with timer.stage("generation"):
                scores = run.generate(groups, lambda group: scoring.submit(self._score, when, group), on_progress)
            with timer.stage("reward"):
                total = len(problems) * num_samples
                while wait(scores.values(), timeout=0.2).not_done:
                    on_progress(total, total)
                scored = [self._group(group, scores[i].result()) for i, group in enumerate(groups)]
        except BaseException:
            run.abort()
            scoring.shutdown(wait=False, cancel_futures=True)
            raise
        scoring.shutdown()
        completions = [run.completions[request.request_id] for request in run.requests]
        return Collected(scored, run.requests, completions)

    def _episodes(self, index: int, problem: Problem, num_samples: int) -> list[Episode]:
        shared = encode(self.tokenizer, problem.prompt, self.chat)
        episodes = [Episode(problem, index, sample, problem.prompt, shared) for sample in range(num_samples)]
        if problem.make_env is not None:
            envs = [run_in_daemon_thread(_open_env, problem.make_env) for _ in episodes]
            wait(envs, timeout=self.env_timeout_s)
            for episode, future in zip(episodes, envs, strict=True):
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

    def _score(self, when: str, group: list[Episode]) -> list[Score]:
        finished = [episode for episode in group if episode.failure is None]
        scores = dict(zip(map(id, finished), self.rewarder.score([e.to_score(when) for e in finished]), strict=True))
        return [scores.get(id(e)) or Score(float("nan"), {}, f"{when}, {e.name}: {e.failure}") for e in group]

    def _group(self, episodes: list[Episode], scores: list[Score]) -> Group:
        rollouts = [
            replace(e.rollout(), reward=s.reward, rewards=s.parts, failure=s.failure)
            for e, s in zip(episodes, scores, strict=True)
        ]
        first = episodes[0]
        prompt = self.tokenizer.decode(list(first.prompt_ids))
        return Group(first.group, first.problem.name, prompt, rollouts)


class _Run:
    """The state of one `collect` call."""

    def __init__(self, collector: Collector, sampling: SamplingParams, seed: object) -> None:
        self.collector, self.engine, self.sampling, self.seed = collector, collector.engine, sampling, seed
        self.requests: list[Request] = []
        self.completions: dict[int, Completion] = {}
        self.running: dict[int, Episode] = {}
        self.waiting: dict[Future[Turn], tuple[Episode, float]] = {}  # for their environment, and the deadline

    def generate(
        self,
        groups: list[list[Episode]],
        score: Callable[[list[Episode]], Future[list[Score]]],
        on_progress: Callable[[int, int], None],
    ) -> dict[int, Future[list[Score]]]:
        """Run all episodes to their end. A group is scored as soon as its last episode ends."""
        scores: dict[int, Future[list[Score]]] = {}
        unfinished = {id(e): i for i, group in enumerate(groups) for e in group}
        num_unfinished = [len(group) for group in groups]
        total = len(unfinished)

        def finish(episode: Episode) -> None:
            i = unfinished.pop(id(episode))
            num_unfinished[i] -= 1
            if not num_unfinished[i]:
                scores[i] = score(groups[i])

        for group in groups:
            for episode in group:
                if episode.failure is not None or not self._submit(episode):
                    finish(episode)
        completed: deque[tuple[Episode, Completion]] = deque()
        has_env = any(episode.env is not None for group in groups for episode in group)
        while self.running or self.waiting or completed:
            on_progress(total - len(unfinished), total)
            started = time.perf_counter()
            if self.running:
                done = self.engine.step()  # may include completions of an aborted run: skip them
                completed.extend(
                    (e, c) for c in done if (e := self.running.pop(c.request.request_id, None)) is not None
                )
            elif not completed:
                time.sleep(0.005)
            # When many samples finish at once, detokenize only some of them before the next engine step, so that the
            # device does not wait for the host.
            until = time.perf_counter() + DETOKENIZE_SHARE * (time.perf_counter() - started)
            while completed:
                if self._end_turn(*completed[0]):
                    finish(completed[0][0])
                completed.popleft()
                if self.running and not has_env and time.perf_counter() >= until:
                    break
            for episode in self._read_environments():
                finish(episode)
        return scores

    def _submit(self, episode: Episode) -> bool:
        """Submit the next turn. False if the engine rejects the prompt, e.g. because it is too long; this costs only
        the sample."""
        sampling = self.sampling
        if episode.turns:
            sampling = replace(sampling, max_tokens=sampling.max_tokens - episode.num_emitted)
        request = episode.request(next(self.collector.request_ids), sampling, self.seed)
        try:
            self.engine.submit(request)
        except ValueError as error:
            episode.failure = str(error)
            return False
        self.requests.append(request)
        self.running[request.request_id] = episode
        return True

    def _end_turn(self, episode: Episode, completion: Completion) -> bool:
        """Whether the episode is finished; otherwise its environment is called."""
        self.completions[completion.request.request_id] = completion
        episode.turns.append(completion)
        # An array is faster than a list, whose elements the tokenizer would check one by one.
        episode.text = self.collector.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        if episode.env is None:
            return True
        deadline = time.monotonic() + self.collector.env_timeout_s
        self.waiting[run_in_daemon_thread(episode.env.step, episode.text)] = episode, deadline
        return False

    def _read_environments(self) -> list[Episode]:
        """Continue the episodes whose environment has answered; returns those that are finished."""
        finished: list[Episode] = []
        for future, (episode, deadline) in list(self.waiting.items()):
            has_answered, continues = future.done(), False
            if not has_answered and time.monotonic() <= deadline:
                continue
            del self.waiting[future]
            if not has_answered:  # a thread can't be killed: it keeps running, the sample fails
                limit = self.collector.env_timeout_s
                episode.failure = f"its environment took more than train.env_timeout_s = {limit:g} s"
            elif (error := future.exception()) is not None:
                episode.failure = f"its environment raised {type(error).__name__}: {error}"
            else:
                try:
                    continues = self._begin_turn(episode, future.result())
                except Exception as error:  # the answer is no Turn, or can't be tokenized
                    episode.failure = f"its environment's answer can't be used: {type(error).__name__}: {error}"
            if not continues:
                finished.append(episode)
        return finished

    def _begin_turn(self, episode: Episode, turn: Turn) -> bool:
        """Submit the next turn after the environment's answer; False if the episode is finished."""
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

    def abort(self) -> None:
        """After an error: abort all requests, without raising another error."""
        for request_id in list(self.running):
            with suppress(ValueError):  # the request is finished, but its completion was not returned yet
                self.engine.abort(request_id)


Result = TypeVar("Result")


def run_in_daemon_thread(function: Callable[..., Result], *args: Any) -> Future[Result]:
    """Unlike the threads of a ThreadPoolExecutor, a daemon thread does not delay the end of the program."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _open_env(make_env: Callable[[], Env]) -> tuple[Env, Prompt]:
    env = make_env()
    return env, env.prompt()
