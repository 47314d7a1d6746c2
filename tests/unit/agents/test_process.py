"""Agents that are processes: what they get, what they return, and that they end with everything they started."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from chat_templates import sampled, tokenizer_of
from scripted_policy import ScriptedPolicy

from paceline.agents import process as process_module
from paceline.agents.endpoint import Endpoint
from paceline.agents.process import ProcessAgent, check_command
from paceline.tasks.agent import AgentFailed, BudgetExhausted, Outcome

# A client in a few lines of the standard library, which starts fast; `openai` is in tests/e2e.
ASK = """
import json, os, sys, urllib.request
problem = json.load(sys.stdin)
def ask(messages, key=os.environ["OPENAI_API_KEY"], url=os.environ["OPENAI_BASE_URL"]):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
said = ask([{"role": "user", "content": problem["prompt"]}])
"""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    yield endpoint
    endpoint.close()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_of("smollm2")


def run(
    endpoint: Endpoint, tokenizer: Any, program: str, env: Mapping[str, str] = {}, timeout_s: float = 30.0
) -> Outcome:
    policy = ScriptedPolicy(tokenizer, lambda ids: sampled(tokenizer, "the name"))
    agent = ProcessAgent(endpoint, [sys.executable, "-c", program], env, {"prompt": "add", "answer": "3"})
    return asyncio.run(asyncio.wait_for(agent.run(policy), timeout_s))


@pytest.mark.parametrize(
    ("end", "reward", "metrics"),
    [
        ("print(0.25)", 0.25, {}),
        ("print('text'); print(1); print()", 1.0, {}),
        ("print(json.dumps({'reward': 2, 'metrics': {'num': 3}}))", 2.0, {"num": 3.0}),
        ("print(json.dumps({'metrics': {'num': 3}}))", None, {"num": 3.0}),
        ("print(said)", None, {}),
        ("print('true')", None, {}),
        ("", None, {}),
    ],
)
def test_rewards(endpoint: Endpoint, tokenizer: Any, end: str, reward: float | None, metrics: Any) -> None:
    outcome = run(endpoint, tokenizer, f"{ASK}\n{end}")
    assert (outcome.reward, outcome.metrics) == (reward, metrics)
    assert outcome.messages == [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "the name"},
    ]


def test_what_it_gets(endpoint: Endpoint, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """The problem, its own variables and those of the settings, and no secrets."""
    for name in ("WANDB_API_KEY", "HF_TOKEN", "OPENAI_ORG_ID", "AWS_SECRET_ACCESS_KEY", "PACELINE_API_KEY"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("OPENAI_API_KEY", "the user's own")
    show = "import json, os, sys; print(json.dumps({'metrics': {k + '=' + v: 1 for k, v in os.environ.items()} | " + (
        "{json.dumps(json.load(sys.stdin), sort_keys=True): 1}}))"
    )
    found = run(endpoint, tokenizer, show, {"MY_VARIABLE": "7"}).metrics
    names = {each.partition("=")[0] for each in found}
    assert '{"answer": "3", "prompt": "add"}' in found and "MY_VARIABLE=7" in found
    assert "OPENAI_MODEL=policy" in found and {"OPENAI_BASE_URL", "OPENAI_API_KEY", "PATH"} <= names
    assert not any("secret" in each or "the user" in each for each in found)


def test_keys_are_in_no_arguments_of_a_process(endpoint: Endpoint, tokenizer: Any) -> None:
    """Every user of the machine can read these."""
    program = """
import os
shown = open(f"/proc/{os.getppid()}/cmdline").read()
assert "supervisor" in shown
print(int(os.environ["OPENAI_API_KEY"] in shown or os.environ["TOOL_KEY"] in shown))
"""
    assert run(endpoint, tokenizer, program, {"TOOL_KEY": "of a tool"}).reward == 0


def test_one_that_ends_by_a_refused_call_keeps_its_conversation(endpoint: Endpoint, tokenizer: Any) -> None:
    answers = [sampled(tokenizer, "the name"), BudgetExhausted("no calls left")]
    program = f"{ASK}\nask([{{'role': 'user', 'content': 'again'}}])"
    agent = ProcessAgent(endpoint, [sys.executable, "-c", program], {}, {"prompt": "add"})
    outcome = asyncio.run(agent.run(ScriptedPolicy(tokenizer, lambda ids: answers.pop(0))))
    assert [message["content"] for message in outcome.messages] == ["add", "the name"] and outcome.reward is None


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit(3)", "ended with exit code 3"),
        ("import sys; sys.exit(255)", "ended with exit code 255"),
        ("raise KeyError('lost')", "ended with exit code 1: KeyError: 'lost'"),
        ("import os; raise KeyError(os.environ['OPENAI_BASE_URL'])", r"KeyError: '\$OPENAI_BASE_URL'"),
        ("import os; os.kill(os.getpid(), 11)", "was ended by signal 11"),
        ("print('NaN')", "returned reward nan"),
        ('print(\'{"reward": "much"}\')', "returned reward 'much'"),
        ('print(\'{"reward": 1, "metrics": [1]}\')', "metrics \\[1\\]"),
        ("import os; os.kill(os.getppid(), 9); import time; time.sleep(60)", "ended with its supervisor by signal 9"),
    ],
)
def test_a_broken_agent_fails(endpoint: Endpoint, tokenizer: Any, program: str, message: str) -> None:
    with pytest.raises(AgentFailed, match=message):
        run(endpoint, tokenizer, program)


def test_a_program_that_does_not_exist(endpoint: Endpoint, tokenizer: Any) -> None:
    policy = ScriptedPolicy(tokenizer, lambda ids: [1])
    with pytest.raises(AgentFailed, match="could not be started: /no/such: No such file"):
        asyncio.run(ProcessAgent(endpoint, ["/no/such"], {}, {}).run(policy))


def test_too_much_output(endpoint: Endpoint, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "MAX_BYTES", 1 << 20)
    with pytest.raises(AgentFailed, match="wrote more than 1 MB"):
        run(endpoint, tokenizer, "while True: print('a' * 1000)")
    assert run(endpoint, tokenizer, "print('a' * 500_000); print(1)").reward == 1


# ---- the end of a process ----

CHILDREN = """
import os, subprocess, sys, time
own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[1] + ".daemon", "w").write(str(os.getpid()))
        time.sleep(300)
    os._exit(0)
while not os.path.exists(sys.argv[1] + ".daemon"):
    time.sleep(0.01)
daemon = open(sys.argv[1] + ".daemon").read()
open(sys.argv[1] + ".new", "w").write(f"{os.getpid()} {own.pid} {other.pid} {daemon}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
"""


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_for(path: Path) -> list[int]:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [int(pid) for pid in path.read_text().split()]


def assert_dead(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_alive, pids)) and len(pids) == 4


@pytest.mark.parametrize("end", ["hangs", "ignores SIGTERM", "returns"])
def test_everything_that_it_started_is_killed(endpoint: Endpoint, tokenizer: Any, tmp_path: Path, end: str) -> None:
    """A child, one in another session, and a daemon; at the deadline, and when the agent returns."""
    path = tmp_path / "pids"
    program = (
        CHILDREN
        + {
            "hangs": "time.sleep(300)",
            "ignores SIGTERM": "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)",
            "returns": "os._exit(0)",
        }[end]
    )
    agent = ProcessAgent(endpoint, [sys.executable, "-c", program, str(path)], {}, {})
    policy = ScriptedPolicy(tokenizer, lambda ids: [1])

    async def main() -> None:
        running = asyncio.create_task(agent.run(policy))
        await asyncio.to_thread(wait_for, path)
        if end != "returns":
            running.cancel()
        await running

    if end == "returns":
        asyncio.run(asyncio.wait_for(main(), 30))
    else:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(main())
    assert_dead(wait_for(path))


def test_it_ends_with_its_supervisor(endpoint: Endpoint, tokenizer: Any, tmp_path: Path) -> None:
    """Also in another session, for example if memory runs out and the kernel kills the supervisor."""
    path = tmp_path / "pid"
    program = f"""
import os, time
os.setsid()
open({str(path)!r}, "w").write(str(os.getpid()))
os.kill(os.getppid(), 9)
time.sleep(300)
"""
    with pytest.raises(AgentFailed, match="ended with its supervisor by signal 9"):
        run(endpoint, tokenizer, program)
    deadline = time.monotonic() + 10
    while is_alive(int(path.read_text())) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(int(path.read_text()))


def test_it_ends_with_the_trainer(tmp_path: Path) -> None:
    """Also if that is killed."""
    path = tmp_path / "pids"
    trainer = f"""
import asyncio, sys
from chat_templates import tokenizer_of
from scripted_policy import ScriptedPolicy
from paceline.agents.endpoint import Endpoint
from paceline.agents.process import ProcessAgent
agent = ProcessAgent(Endpoint(), [sys.executable, "-c", {CHILDREN + "time.sleep(300)"!r}, {str(path)!r}], {{}}, {{}})
asyncio.run(agent.run(ScriptedPolicy(tokenizer_of("smollm2"), lambda ids: [1])))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", trainer], env=environment)
    try:
        pids = wait_for(path)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert_dead(pids)


def test_check_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").touch()
    check_command([sys.executable, "-u", "agent.py", "--n", "other.py"])
    check_command([sys.executable, "-m", "agent"])
    for command, message in (
        ([], "write the program"),
        (["no-such-program"], "no program 'no-such-program'"),
        ([sys.executable, "lost.py"], "lost.py does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            check_command(command)


def test_sixty_four_at_once(endpoint: Endpoint, tokenizer: Any) -> None:
    policies = [ScriptedPolicy(tokenizer, lambda ids: sampled(tokenizer, "the name")) for _ in range(64)]
    agent = ProcessAgent(endpoint, [sys.executable, "-S", "-c", f"{ASK}\nprint(len(said))"], {}, {"prompt": "add"})

    async def main() -> list[Outcome]:
        return await asyncio.gather(*(agent.run(policy) for policy in policies))

    outcomes = asyncio.run(asyncio.wait_for(main(), 120))
    assert [outcome.reward for outcome in outcomes] == [8] * 64
    assert json.dumps([len(policy.calls) for policy in policies]) == json.dumps([1] * 64)
