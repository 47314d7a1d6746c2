"""Native environments: async or not, with tools and chat-template variables, in threads or in processes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from scripted import Bytes, ScriptedEngine, ScriptedRewarder

from paceline.build.task import check_prompts
from paceline.config import TaskSection
from paceline.rl.collect import Collector
from paceline.tasks.agent import AgentFailed
from paceline.tasks.env_agent import EnvAgent, assistant_message
from paceline.tasks.episodes import EnvTask
from paceline.tasks.isolated_env import IsolatedEnv
from paceline.tasks.task import Problem, Turn
from paceline.types import Group, SamplingParams

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


class Chat(Bytes):
    """Its template shows the names of tools, and whether to think."""

    chat_template = "{{ tools }} <tool_call> {{ enable_thinking }}"
    name_or_path = "chat"

    def apply_chat_template(
        self, messages: list[Any], add_generation_prompt: bool, tokenize: bool, tools: Any = (), **variables: Any
    ) -> str:
        if variables.get("enable_thinking") == "maybe":
            raise ValueError("enable_thinking must be true or false")
        shown = "".join(f"{{{tool['function']['name']}}}" for tool in tools)
        said = "".join(f"{m['role'][0]}:{m['content']};" for m in messages)
        thinks = "" if variables.get("enable_thinking", True) else "(no)"
        return f"{shown}{said}" + (f"a:{thinks}" if add_generation_prompt else "")


def collect(make_env: Any, script: Any = lambda r: "ab;", tokenizer: Any = None, **settings: Any) -> Group:
    def make_agent() -> EnvAgent:
        return EnvAgent(make_env, **settings)

    rewarder = ScriptedRewarder(lambda s: s.env_reward)
    it = Collector(ScriptedEngine(script), tokenizer or Chat(), rewarder, sampling=SamplingParams(max_tokens=160))
    return it.collect("step 1", [(0, Problem("p", "go", {}, make_agent))], 1, 0).groups[0]


class Async:
    """Every method is async; `seen` has what it got."""

    tools = (TOOL,)

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.chat_template_kwargs = {"enable_thinking": False}

    async def reset(self) -> list[dict[str, str]]:
        await asyncio.sleep(0)
        return [{"role": "user", "content": "go"}]

    async def step(self, message: Any) -> Turn:
        self.seen.append(message)
        if len(self.seen) == 1:
            return Turn([{"role": "tool", "content": "2"}], 0.25)
        return Turn(None, 0.5)

    async def close(self) -> None:
        self.seen.append("closed")


def test_an_async_environment_with_tools() -> None:
    env = Async()
    group = collect(lambda: env, lambda r: f"{CALL};" if len(r.prompt_ids) < 30 else "2;")
    (rollout,) = group.rollouts
    assert bytes(rollout.prompt_ids) == b"{add}u:go;a:(no)"
    assert bytes(rollout.token_ids.tolist()).decode() == f"{CALL};t:2;a:(no)2;"
    assert rollout.turn_rewards == (0.25, 0.5) and rollout.reward == 0.75
    first, second, closed = env.seen
    (call,) = first["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'} and len(call["id"]) == 9
    assert first["content"] == ";" and second == {"role": "assistant", "content": "2;"} and closed == "closed"


def test_calls_of_tools_have_ids_that_repeat() -> None:
    one, two = (assistant_message(f"{CALL}{CALL}", "hermes", index) for index in (1, 3))
    assert one == assistant_message(f"{CALL}{CALL}", "hermes", 1)
    assert len({call["id"] for message in (one, two) for call in message["tool_calls"]}) == 4


def test_settings_of_the_task_and_of_the_environment() -> None:
    class Plain:
        def reset(self) -> str:
            return "go"

        def step(self, message: Any) -> Turn:
            assert message == {"role": "assistant", "content": CALL}, "without tools no calls are parsed"
            return Turn(None, 1.0)

    (rollout,) = collect(Plain, lambda r: CALL, chat_template_kwargs={"enable_thinking": False}).rollouts
    assert bytes(rollout.prompt_ids) == b"u:go;a:(no)" and rollout.reward == 1.0
    (rollout,) = collect(Plain, lambda r: CALL, chat_template_kwargs={"enable_thinking": "maybe"}).rollouts
    assert "could not be opened: ValueError: chat: the model's chat template refuses" in str(rollout.failure)
    assert "task.chat_template_kwargs = {'enable_thinking': 'maybe'}: enable_thinking must be" in str(rollout.failure)


def test_an_environment_is_closed_at_every_end() -> None:
    closed = threading.Event()

    class Closes:
        def __init__(self, mode: str) -> None:
            self.mode = mode

        def reset(self) -> str:
            if self.mode == "reset":
                raise RuntimeError("no reset")
            return "go"

        def step(self, message: Any) -> Turn:
            if self.mode == "hang":
                threading.Event().wait()
            if self.mode == "step":
                raise StopIteration("no step")
            return Turn(None, 1.0)

        def close(self) -> None:
            closed.set()
            raise RuntimeError("errors of close do not matter")

    for mode, reason in (
        ("end", None), ("reset", "could not be opened: RuntimeError: no reset"), ("step", "StopIteration: no step"),
        ("hang", "took more than train.env_timeout_s = 0.1 s"),
    ):  # fmt: skip
        (rollout,) = collect(lambda mode=mode: Closes(mode), step_timeout_s=0.1).rollouts
        assert (rollout.failure is None) if reason is None else reason in str(rollout.failure)
        assert closed.wait(5)
        closed.clear()


def test_an_async_environment_that_hangs_is_closed() -> None:
    closed = threading.Event()

    class Hangs(Async):
        async def step(self, message: Any) -> Turn:
            await asyncio.Event().wait()
            raise AssertionError

        async def close(self) -> None:
            closed.set()

    (rollout,) = collect(Hangs, step_timeout_s=0.1).rollouts
    assert "took more than train.env_timeout_s = 0.1 s" in str(rollout.failure) and closed.is_set()


@pytest.mark.parametrize("is_async", [False, True])
def test_an_environment_that_is_made_after_the_end_is_closed(is_async: bool) -> None:
    """A browser or a container that its constructor starts must not stay."""
    may_go_on, closed = threading.Event(), threading.Event()

    class Slow(Async):
        def __init__(self) -> None:
            super().__init__()
            may_go_on.wait(10)

        async def close(self) -> None:
            closed.set()

    class SlowInThread(Slow):
        def close(self) -> None:  # type: ignore[override]
            closed.set()

    (rollout,) = collect(Slow if is_async else SlowInThread, step_timeout_s=0.1).rollouts
    assert "to open" in str(rollout.failure) and not closed.is_set()
    may_go_on.set()
    assert closed.wait(5)


def test_unknown_variables_of_the_template_are_refused() -> None:
    class OneTask:
        name, held_out = "one", list[Problem]()

        def __init__(self, **settings: Any) -> None:
            self.train = [Problem("p", "go", **settings)]

    check_prompts(OneTask(chat_template_kwargs={"enable_thinking": False}), Chat())
    with pytest.raises(
        ValueError, match=r"task\.chat_template_kwargs\.thinking = False: .*no such variable; remove it"
    ):
        check_prompts(OneTask(chat_template_kwargs={"thinking": False}), Chat())
    with pytest.raises(ValueError, match="there is no chat template"):
        check_prompts(OneTask(chat_template_kwargs={"enable_thinking": False}, chat=False), Chat())
    problem = Problem("p", "go", chat_template_kwargs={"enable_thinking": False})
    assert bytes(problem.encode(Chat())) == b"u:go;a:(no)"


# ---- in a process ----


class InProcess:
    """Writes its process id to `path`. The policy's text says how it fails."""

    def __init__(self, path: str) -> None:
        self.path, self.num_turns = Path(path), 0

    @staticmethod
    def problems(seed: int, path: str) -> list[dict[str, str]]:
        return [{"path": path}]

    async def reset(self) -> str:
        self.path.write_text(str(os.getpid()))
        return "go"

    def step(self, message: Any) -> Turn:
        self.num_turns += 1
        match message["content"]:
            case "hang;":
                time.sleep(1000)
            case "exit;":
                os._exit(3)
            case "kill;":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise;":
                raise ValueError("no more")
        if self.num_turns == 2:
            return Turn(None, 1.0)
        return Turn([{"role": "user", "content": f"{self.num_turns}"}], 0.5)


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ("ok;", None), ("hang;", "its environment took more than train.env_timeout_s = 0.5 s"),
        ("exit;", "its environment ended its process (exit code 3)"),
        ("kill;", "its environment killed its process (signal 9)"),
        ("raise;", "its environment raised ValueError: no more (tests/unit/test_env_agent.py, line"),
    ],
)  # fmt: skip
def test_a_process_costs_only_its_sample_and_is_killed(tmp_path: Path, says: str, reason: str | None) -> None:
    path = str(tmp_path / "pid")
    section = TaskSection(
        kind="env", name=f"{__name__}:InProcess", params={"path": path}, held_out=0, isolation="process"
    )
    (problem,) = EnvTask(section, 0.5).train
    assert int(Path(path).read_text()) == os.getpid(), "problems are made here"
    it = Collector(
        ScriptedEngine(lambda r: says), Chat(), ScriptedRewarder(lambda s: s.env_reward), sampling=SamplingParams()
    )
    (rollout,) = it.collect("step 1", [(0, problem)], 1, 0).groups[0].rollouts
    if reason is None:
        assert rollout.reward == 1.5 and bytes(rollout.token_ids.tolist()) == b"ok;u:1;a:ok;"
    else:
        assert reason in str(rollout.failure)
    pid = int(Path(path).read_text())
    assert pid != os.getpid()
    deadline = time.monotonic() + 10
    while is_alive(pid):
        assert time.monotonic() < deadline, "the process was not killed"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_class_that_can_not_be_imported_in_the_process() -> None:
    group = collect(lambda: IsolatedEnv("absent_module:Env", {}, 5.0))
    assert "its environment could not be loaded: ModuleNotFoundError" in str(group.rollouts[0].failure)


def test_a_process_that_starts_while_its_environment_is_closed_is_killed(tmp_path: Path) -> None:
    env = IsolatedEnv(f"{__name__}:InProcess", {"path": str(tmp_path / "pid")}, 5.0)
    env.close()
    with pytest.raises(AgentFailed, match=r"killed its process \(signal 9\)"):
        env.reset()
