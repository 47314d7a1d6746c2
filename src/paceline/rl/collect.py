"""Collects rollouts: the engine generates, environments answer, the rewarder scores.

Invariants:
  - The result depends on the weights, the problems and the seed, not on the order in which samples finish. Groups are
    in the order of their index; a sample's noise key is made of (seed, group, sample, turn).
  - An environment or a reward that fails or hangs costs only its sample, which gets a `failure`.
  - A sample is scored as soon as it is finished; if a reward function compares a group's samples, when all of them are.
    Slow rewards do not delay those of other samples or groups while a reward worker is free.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeVar

from paceline.chat.messages import Prompt
from paceline.chat.template import continuation, encode
from paceline.engine.interface import Engine
from paceline.rl.episode import Episode
from paceline.rl.stage_timer import StageTimer
from paceline.tasks.rewards import Rewarder, Score
from paceline.tasks.task import Env, Problem, Turn
from paceline.types import Completion, Group, Request, SamplingParams

DETOKENIZE_SHARE = 0.1  # detokenize finished completions for at most this share of an engine step's time


@dataclass(slots=True)
class Collected:
    groups: list[Group]
    requests: list[Request]  # all submitted ones, in order; an audit submits them again
    completions: list[Completion]  # in the order of `requests`


class Collection:
    """Groups that are being collected: see `Collector.begin`."""

    def __init__(self, when: str, episodes: list[list[Episode]], sampling: SamplingParams, seed: object) -> None:
        self.when, self.episodes, self.sampling, self.seed = when, episodes, sampling, seed
        self.num_samples = sum(map(len, episodes))
        self.requests: list[Request] = []
        self.completions: dict[int, Completion] = {}
        # By place of the group: the episodes of each call of the rewarder, and their scores.
        self.calls: list[list[tuple[list[Episode], Future[list[Score]]]]] = [[] for _ in episodes]
        self._unfinished = {id(episode): i for i, group in enumerate(episodes) for episode in group}
        self._num_unfinished = [len(group) for group in episodes]

    @property
    def num_generated(self) -> int:
        """Samples."""
        return self.num_samples - len(self._unfinished)

    @property
    def is_generated(self) -> bool:
        return not self._unfinished

    @property
    def futures(self) -> list[Future[list[Score]]]:
        return [future for calls in self.calls for _, future in calls]

    def max_tokens(self, episode: Episode) -> int:
        """Of all its turns."""
        return episode.problem.max_tokens or self.sampling.max_tokens

    def finish(self, episode: Episode) -> tuple[int, bool]:
        """Count an episode that has ended. The place of its group, and whether all of this group's episodes have."""
        i = self._unfinished.pop(id(episode))
        self._num_unfinished[i] -= 1
        return i, not self._num_unfinished[i]

    def scores(self, i: int) -> list[Score]:
        """Of all samples of a group that has ended."""
        found = {id(e): s for episodes, future in self.calls[i] for e, s in zip(episodes, future.result(), strict=True)}
        return [found[id(episode)] for episode in self.episodes[i]]

    def rewards(self, i: int) -> list[float] | None:
        """Of the samples of a group that could be scored; None if the group is not finished."""
        if self._num_unfinished[i] or not all(future.done() for _, future in self.calls[i]):
            return None
        return [score.reward for score in self.scores(i) if not math.isnan(score.reward)]


class Collector:
    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        rewarder: Rewarder,
        *,
        sampling: SamplingParams,
        env_timeout_s: float = 30.0,
    ) -> None:
        self.engine, self.tokenizer, self.rewarder = engine, tokenizer, rewarder
        self.sampling, self.env_timeout_s = sampling, env_timeout_s
        self.request_ids = count(1)
        self._scoring = ThreadPoolExecutor(rewarder.num_parallel, "reward")
        self._running: dict[int, tuple[Collection, Episode]] = {}  # by request id
        self._completed: deque[tuple[Collection, Episode, Completion]] = deque()  # not detokenized yet
        # Episodes that wait for their environment, until a deadline.
        self._waiting: dict[Future[Turn], tuple[Collection, Episode, float]] = {}

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
        num_wanted: Callable[[Collection], int | None] | None = None,
    ) -> Collected:
        """Collect these groups to their end; see `begin`. `on_progress(samples done, samples in total)` is called
        before every engine step, and regularly while waiting for rewards. It may raise to stop. `num_wanted` may end
        the collection early: as soon as it returns a number, the groups after so many are discarded."""
        num: int | None = None
        timer = timer or StageTimer()
        collection = self.begin(when, problems, num_samples, seed, timer=timer, sampling=sampling)
        try:
            with timer.stage("generation"):
                while not collection.is_generated:
                    on_progress(collection.num_generated, collection.num_samples)
                    self.step()
                    if num_wanted is not None and (num := num_wanted(collection)) is not None:
                        self.abort(collection)
                        return self.collected(collection, num)
            with timer.stage("reward"):
                while wait(collection.futures, timeout=0.2).not_done:
                    on_progress(collection.num_samples, collection.num_samples)
                return self.collected(collection, num_wanted(collection) if num_wanted is not None else None)
        except BaseException:
            self.abort(collection)
            raise

    def begin(
        self,
        when: str,
        problems: Sequence[tuple[int, Problem]],
        num_samples: int,
        seed: object,
        *,
        timer: StageTimer | None = None,
        sampling: SamplingParams | None = None,
    ) -> Collection:
        """Submit num_samples rollouts of every (group index, problem). `step` generates them, and has each scored as
        soon as it, or its group, ends. `when`, such as "step 3", begins the messages of failures."""
        with (timer or StageTimer()).stage("data"):
            episodes = [self._episodes(index, problem, num_samples) for index, problem in problems]
        collection = Collection(when, episodes, sampling or self.sampling, seed)
        try:
            for group in episodes:
                for episode in group:
                    if episode.failure is not None or not self._submit(collection, episode):
                        self._finish(collection, episode)
        except BaseException:
            self.abort(collection)
            raise
        return collection

    def step(self) -> None:
        """One engine step for all collections. If only environments are waited for, a short wait."""
        started = time.perf_counter()
        completed, running = self._completed, self._running
        if running:
            for completion in self.engine.step():  # may include completions of an aborted collection: skip them
                if (found := running.pop(completion.request.request_id, None)) is not None:
                    completed.append((*found, completion))
        elif not completed:
            time.sleep(0.005)
        # When many samples finish at once, detokenize only some of them before the next engine step, so that the device
        # does not wait for the host.
        until = time.perf_counter() + DETOKENIZE_SHARE * (time.perf_counter() - started)
        while completed:
            collection, episode, completion = completed[0]
            if self._end_turn(collection, episode, completion):
                self._finish(collection, episode)
            completed.popleft()
            if running and episode.env is None and time.perf_counter() >= until:
                break
        for collection, episode in self._read_environments():
            self._finish(collection, episode)

    def collected(self, collection: Collection, num: int | None = None) -> Collected:
        """The first `num` groups, by default all. They must have scores."""
        episodes = collection.episodes[:num]
        groups = [self._group(each, collection.scores(i)) for i, each in enumerate(episodes)]
        own = {turn.request.request_id for group in episodes for episode in group for turn in episode.turns}
        requests = [request for request in collection.requests if request.request_id in own]
        return Collected(groups, requests, [collection.completions[request.request_id] for request in requests])

    def abort(self, collection: Collection) -> None:
        """Abort what is left of a collection, without raising another error. Its scores that are not computed yet are
        cancelled."""
        for request_id, (owner, _) in list(self._running.items()):
            if owner is collection:
                del self._running[request_id]
                with suppress(ValueError):  # the request is finished, but its completion was not returned yet
                    self.engine.abort(request_id)
        self._completed = deque(each for each in self._completed if each[0] is not collection)
        self._waiting = {future: each for future, each in self._waiting.items() if each[0] is not collection}
        for future in collection.futures:
            future.cancel()

    # -- episodes ---------------------------------------------------------------------------------------------------

    def _episodes(self, index: int, problem: Problem, num_samples: int) -> list[Episode]:
        shared = encode(self.tokenizer, problem.prompt, problem.chat)
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
                    episode.prompt_ids = encode(self.tokenizer, episode.prompt, problem.chat)
                except Exception as error:
                    episode.failure = f"its environment could not be opened: {type(error).__name__}: {error}"
        return episodes

    def _submit(self, collection: Collection, episode: Episode) -> bool:
        """Submit the next turn. False if the engine rejects the prompt, e.g. because it is too long; this costs only
        the sample."""
        sampling, left = collection.sampling, collection.max_tokens(episode) - episode.num_emitted
        if left != sampling.max_tokens:
            sampling = replace(sampling, max_tokens=left)
        request = episode.request(next(self.request_ids), sampling, collection.seed)
        try:
            self.engine.submit(request)
        except ValueError as error:
            episode.failure = str(error)
            return False
        collection.requests.append(request)
        self._running[request.request_id] = collection, episode
        return True

    def _end_turn(self, collection: Collection, episode: Episode, completion: Completion) -> bool:
        """Whether the episode is finished; otherwise its environment is called."""
        collection.completions[completion.request.request_id] = completion
        episode.turns.append(completion)
        # An array is faster than a list, whose elements the tokenizer would check one by one.
        episode.text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        if episode.env is None:
            return True
        deadline = time.monotonic() + self.env_timeout_s
        self._waiting[run_in_daemon_thread(episode.env.step, episode.text)] = collection, episode, deadline
        return False

    def _read_environments(self) -> list[tuple[Collection, Episode]]:
        """Continue the episodes whose environment has answered; returns those that are finished."""
        finished: list[tuple[Collection, Episode]] = []
        for future, (collection, episode, deadline) in list(self._waiting.items()):
            has_answered, continues = future.done(), False
            if not has_answered and time.monotonic() <= deadline:
                continue
            del self._waiting[future]
            if not has_answered:  # a thread can't be killed: it keeps running, the sample fails
                limit = self.env_timeout_s
                episode.failure = f"its environment took more than train.env_timeout_s = {limit:g} s"
            elif (error := future.exception()) is not None:
                episode.failure = f"its environment raised {type(error).__name__}: {error}"
            else:
                try:
                    continues = self._begin_turn(collection, episode, future.result())
                except Exception as error:  # the answer is no Turn, or can't be tokenized
                    episode.failure = f"its environment's answer can't be used: {type(error).__name__}: {error}"
            if not continues:
                finished.append((collection, episode))
        return finished

    def _begin_turn(self, collection: Collection, episode: Episode, turn: Turn) -> bool:
        """Submit the next turn after the environment's answer; False if the episode is finished."""
        episode.env_reward = (episode.env_reward or 0.0) + turn.reward
        if turn.observation is None or episode.num_emitted >= collection.max_tokens(episode):
            return False
        last_ids = episode.turns[-1].token_ids.tolist()
        ids = continuation(self.tokenizer, turn.observation, episode.problem.chat, last_ids)
        episode.observations.append(ids)
        if self._submit(collection, episode):
            return True
        episode.observations.pop()
        return False

    def _finish(self, collection: Collection, episode: Episode) -> None:
        i, has_group_ended = collection.finish(episode)
        if self.rewarder.by_sample or has_group_ended:
            episodes = [episode] if self.rewarder.by_sample else collection.episodes[i]
            future = self._scoring.submit(self._score, collection.when, episodes)
            collection.calls[i].append((episodes, future))

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
        return Group(first.group, first.problem.name, prompt, rollouts, first.problem.task)


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
