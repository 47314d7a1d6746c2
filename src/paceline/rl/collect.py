"""Collects rollouts: agents call the policy, the engine generates, the rewarder scores.

A problem without an agent is one request per sample, which is submitted at once. Agents run in an event loop of their
own (`agent_loop`); their calls (`calls`) come through a queue, so that only the thread that steps uses the engine.

Invariants:
  - The result depends on the weights, the problems and the seed, not on the order in which samples and calls finish.
    Groups are in the order of their index; noise keys are made of (seed, group, sample) and what is called.
  - An agent or a reward that fails or hangs costs only its sample, which gets a `failure`.
  - A sample is scored as soon as it is finished; if a reward function compares a group's samples, when all of them are.
    Slow rewards do not delay those of other samples or groups while a reward worker is free.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

from paceline.chat.messages import prompt_preview
from paceline.engine.interface import Engine
from paceline.rl.agent_loop import BLOCKED_S, AgentLoop, Ended, ended
from paceline.rl.calls import Call, SamplePolicy
from paceline.rl.collection import Collected, Collection
from paceline.rl.episode import Episode
from paceline.rl.stage_timer import StageTimer
from paceline.tasks.agent import PolicyError
from paceline.tasks.rewards import Rewarder, Score
from paceline.tasks.task import Problem
from paceline.types import Completion, Group, SamplingParams

DETOKENIZE_SHARE = 0.1  # detokenize finished completions for at most this share of an engine step's time


WAIT_S = 0.02  # how long a step without requests waits for the calls of agents


@dataclass(frozen=True, slots=True)
class AgentRewards:
    """How the reward of one task's samples depends on their agents."""

    penalties: Mapping[str, float] = field(default_factory=dict)  # reward.penalties
    turn_weight: float = 1.0  # of the agent's own reward: that of the function "env"


class Collector:
    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        rewarder: Rewarder,
        *,
        sampling: SamplingParams,
        agent_rewards: Mapping[str | None, AgentRewards] | None = None,
    ) -> None:
        """`agent_rewards`: by label of the task."""
        self.engine, self.tokenizer, self.rewarder, self.sampling = engine, tokenizer, rewarder, sampling
        self.agent_rewards = agent_rewards or {}
        self.request_ids = count(1)
        self._scoring = ThreadPoolExecutor(rewarder.num_parallel, "reward")
        self._running: dict[int, tuple[Collection, Episode, Call]] = {}  # by request id
        self._completed: deque[tuple[Collection, Episode, Call]] = deque()  # without an agent; not detokenized yet
        self._agents: dict[Episode, tuple[Collection, Future[Ended], float]] = {}  # running ones, and their deadlines
        self._waiting: deque[tuple[Collection, Episode]] = deque()  # for a place among `max_parallel` agents
        self._loop: AgentLoop | None = None  # started with the first agent
        self._stepped_at, self._paused_s = math.inf, 0.0  # the end of the last step; seconds between steps
        # From other threads: a call to begin, a call that was cancelled (None), or an agent that has ended.
        self._inbox: SimpleQueue[tuple[Episode, Call, bool] | tuple[Episode, Future[Ended]]] = SimpleQueue()

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
        """Submit num_samples rollouts of every (group index, problem), or start their agents. `step` generates them,
        and has each scored as soon as it, or its group, ends. `when`, such as "step 3", begins the messages of
        failures."""
        with (timer or StageTimer()).stage("data"):
            episodes = [self._episodes(index, problem, num_samples) for index, problem in problems]
        collection = Collection(when, episodes, sampling or self.sampling, seed)
        try:
            for group in episodes:
                for episode in group:
                    if episode.problem.make_agent is not None:
                        self._waiting.append((collection, episode))
                    elif not self._submit(collection, episode):
                        self._finish(collection, episode)
            self._start_waiting()
        except BaseException:
            self.abort(collection)
            raise
        return collection

    def step(self) -> None:
        """One engine step for all collections. If only agents are waited for, a short wait."""
        self._count_pause()
        started = time.perf_counter()
        completed, running = self._completed, self._running
        self._read_inbox(wait_s=0.0 if running or completed else WAIT_S)
        if running:
            for completion in self.engine.step():  # may include completions of an aborted collection: skip them
                if (found := running.pop(completion.request.request_id, None)) is not None:
                    self._complete(*found, completion)
        # When many samples finish at once, detokenize only some of them before the next engine step, so that the device
        # does not wait for the host.
        until = time.perf_counter() + DETOKENIZE_SHARE * (time.perf_counter() - started)
        while completed:
            collection, episode, _ = completed[0]
            self._finish(collection, episode)
            completed.popleft()
            if running and time.perf_counter() >= until:
                break
        self._check_deadlines()
        self._check_loop()
        self._start_waiting()
        self._stepped_at = time.monotonic()

    def close(self) -> None:
        """All collections have ended."""
        self._scoring.shutdown(wait=False, cancel_futures=True)
        if self._loop is not None:
            self._loop.close()

    def collected(self, collection: Collection, num: int | None = None) -> Collected:
        """The first `num` groups, by default all. They must have scores."""
        episodes = collection.episodes[:num]
        groups = [self._group(each, collection.scores(i)) for i, each in enumerate(episodes)]
        own = {call.request.request_id for group in episodes for episode in group for call in episode.calls}
        requests = [request for request in collection.requests if request.request_id in own]
        return Collected(groups, requests, [collection.completions[request.request_id] for request in requests])

    def abort(self, collection: Collection) -> None:
        """Abort what is left of a collection, without raising another error. Its scores that are not computed yet are
        cancelled."""
        self._waiting = deque(each for each in self._waiting if each[0] is not collection)
        for episode in [episode for episode, (owner, *_) in self._agents.items() if owner is collection]:
            self._stop_agent(episode)
        for request_id, (owner, *_) in list(self._running.items()):
            if owner is collection:
                self._abort_request(request_id)
        self._completed = deque(each for each in self._completed if each[0] is not collection)
        for future in collection.futures:
            future.cancel()

    # -- requests ---------------------------------------------------------------------------------------------------

    def _episodes(self, index: int, problem: Problem, num_samples: int) -> list[Episode]:
        try:
            prompt_ids = problem.encode(self.tokenizer)
        except ValueError:
            if problem.make_agent is None:
                raise
            # Only of samples that end before their first call: agents write their own prompts.
            prompt_ids = tuple(self.tokenizer.encode(prompt_preview(problem.prompt)))
        return [Episode(problem, index, sample, prompt_ids) for sample in range(num_samples)]

    def _submit(self, collection: Collection, episode: Episode) -> bool:
        """Submit an episode without an agent. False if the engine rejects the prompt, e.g. because it is too long; this
        costs only the sample."""
        sampling, left = collection.sampling, collection.max_tokens(episode)
        if left != sampling.max_tokens:
            sampling = replace(sampling, max_tokens=left)
        request = episode.request(next(self.request_ids), sampling, collection.seed)
        try:
            self.engine.submit(request)
        except ValueError as error:
            episode.failure = str(error)
            return False
        collection.requests.append(request)
        self._running[request.request_id] = collection, episode, Call(request, 0, 0, "length")
        return True

    def _complete(self, collection: Collection, episode: Episode, call: Call, completion: Completion) -> None:
        collection.completions[completion.request.request_id] = completion
        if episode.policy is not None:
            episode.policy.answer(call, completion)
            return
        call.complete(completion)
        episode.calls, episode.finish_reason = [call], completion.finish_reason
        self._completed.append((collection, episode, call))

    def _abort_request(self, request_id: int) -> None:
        if self._running.pop(request_id, None) is not None:
            with suppress(ValueError):  # it has finished, but its completion was not returned yet
                self.engine.abort(request_id)

    # -- agents -----------------------------------------------------------------------------------------------------

    def _start_waiting(self) -> None:
        """Start the agents that have a place, in order. Their time begins now."""
        if not self._waiting:
            return
        num_running = Counter(episode.problem.task for episode in self._agents)
        waiting, self._waiting = self._waiting, deque()
        for collection, episode in waiting:
            task, most = episode.problem.task, episode.problem.max_parallel
            if most is not None and num_running[task] >= most:
                self._waiting.append((collection, episode))
                continue
            num_running[task] += 1
            self._start_agent(collection, episode)

    def _start_agent(self, collection: Collection, episode: Episode) -> None:
        self._count_pause()
        problem, inbox = episode.problem, self._inbox
        assert problem.make_agent is not None
        self._loop = self._loop or AgentLoop()
        episode.policy = SamplePolicy(
            (collection.seed, episode.group, episode.sample),
            problem.name,
            replace(collection.sampling, max_tokens=collection.max_tokens(episode)),
            problem.max_calls,
            self.engine.max_model_len,
            self.tokenizer,
            self.request_ids,
            submit=lambda call: inbox.put((episode, call, True)),
            cancel=lambda call: inbox.put((episode, call, False)),
        )
        future = self._loop.start(problem.make_agent, episode.policy)
        deadline = math.inf if problem.timeout_s is None else self._now() + problem.timeout_s
        self._agents[episode] = collection, future, deadline
        future.add_done_callback(lambda done: inbox.put((episode, done)))

    def _stop_agent(self, episode: Episode) -> Collection:
        """Its calls are not answered any more, and what it returns does not count."""
        collection, future, _ = self._agents.pop(episode)
        assert episode.policy is not None
        for call in episode.policy.end():
            self._abort_request(call.request.request_id)
        future.cancel()
        return collection

    def _read_inbox(self, wait_s: float) -> None:
        """Begin and abort calls, and finish episodes whose agents have ended."""
        while True:
            try:
                episode, *message = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            except Empty:
                return
            wait_s = 0.0
            if episode not in self._agents:  # it has ended
                continue
            match message:
                case [Call() as call, True]:
                    self._submit_call(episode, call)
                case [Call() as call, False]:
                    self._abort_request(call.request.request_id)
                case [Future() as future] if future is self._agents[episode][1]:  # not of an agent that was restarted
                    collection = self._stop_agent(episode)
                    episode.end_agent(ended(future))
                    self._finish(collection, episode)

    def _submit_call(self, episode: Episode, call: Call) -> None:
        collection, policy = self._agents[episode][0], episode.policy
        assert policy is not None
        if not policy.is_open(call):  # it was cancelled
            return
        try:
            self.engine.submit(call.request)
        except ValueError as error:
            policy.refuse(call, PolicyError(str(error)))
            return
        collection.requests.append(call.request)
        self._running[call.request.request_id] = collection, episode, call

    def _now(self) -> float:
        """Without the time between two steps: calls are not answered during an update, for example."""
        return time.monotonic() - self._paused_s

    def _count_pause(self) -> None:
        now = time.monotonic()
        self._paused_s += max(0.0, now - self._stepped_at)
        self._stepped_at = now

    def _check_deadlines(self) -> None:
        now = self._now()
        for episode in [episode for episode, (*_, deadline) in self._agents.items() if deadline < now]:
            collection = self._stop_agent(episode)
            episode.fail("timeout", f"its agent took more than task.timeout_s = {episode.problem.timeout_s:g} s")
            self._finish(collection, episode)

    def _check_loop(self) -> None:
        """If an agent blocks the event loop, its sample fails, and the others run again in a new one. Their calls are
        answered with the same tokens, because these depend only on the prompts."""
        blocking = self._loop.blocked_by() if self._loop is not None and self._agents else None
        if blocking is None:
            return
        self._loop = None
        for episode in list(self._agents):
            is_blocking, collection = episode.policy is blocking, self._stop_agent(episode)
            if is_blocking:
                episode.fail(
                    "crash", f"its agent has blocked the event loop for {BLOCKED_S:g} s; use asyncio.to_thread"
                )
                self._finish(collection, episode)
            else:
                self._start_agent(collection, episode)

    # -- scores -----------------------------------------------------------------------------------------------------

    def _finish(self, collection: Collection, episode: Episode) -> None:
        episode.make_rollouts(self.tokenizer, self._rewards_of(episode).turn_weight)
        i, has_group_ended = collection.finish(episode)
        if self.rewarder.by_sample or has_group_ended:
            episodes = [episode] if self.rewarder.by_sample else collection.episodes[i]
            future = self._scoring.submit(self._score, collection.when, episodes)
            collection.calls[i].append((episodes, future))

    def _rewards_of(self, episode: Episode) -> AgentRewards:
        return self.agent_rewards.get(episode.problem.task, AgentRewards())

    def _score(self, when: str, group: list[Episode]) -> list[Score]:
        finished = [episode for episode in group if episode.failure is None]
        scores = dict(zip(map(id, finished), self.rewarder.score([e.to_score(when) for e in finished]), strict=True))
        return [self._with_penalty(when, episode, scores.get(id(episode))) for episode in group]

    def _with_penalty(self, when: str, episode: Episode, score: Score | None) -> Score:
        """A failed sample has no reward, unless its failure has a penalty, which is then its reward."""
        penalty = self._rewards_of(episode).penalties.get(episode.finish_reason)
        if score is None:
            failure = f"{when}, {episode.name}: {episode.failure}"
            return Score(math.nan, {}, failure) if penalty is None else Score(penalty, {"penalty": penalty}, failure)
        if penalty is None or math.isnan(score.reward):
            return score
        return Score(score.reward + penalty, {**score.parts, "penalty": penalty}, score.failure)

    def _group(self, episodes: list[Episode], scores: list[Score]) -> Group:
        rollouts = [
            replace(rollout, reward=score.reward, rewards=score.parts, failure=score.failure)
            for episode, score in zip(episodes, scores, strict=True)
            for rollout in episode.rollouts
        ]
        first = episodes[0]
        prompt = self.tokenizer.decode(list(rollouts[0].prompt_ids))
        return Group(first.group, first.problem.name, prompt, rollouts, first.problem.task)
