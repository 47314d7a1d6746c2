"""Attacks on the sandbox. Each function returns what the program achieved. Imports only the standard library and our
sandbox, since the attacks also run as a user without access to other packages (`other_user.py`)."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.tasks import checks
from paceline.tasks.sandbox import Kind, Limits, Outcome, Program, SandboxUnavailable, isolation, run_program


def run(source: str, kind: Kind, **limits: Any) -> Outcome:
    return run_program(source, "", Limits(**{"cpu_s": 5, "memory_mb": 128, "wall_s": 20.0, **limits}), kind)


# The beginning of every program: `attempt` prints the name of an action that succeeded.
ATTEMPT = """
import ctypes, os, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, action):
    try:
        result = action()
    except BaseException as error:
        return None
    print(name, flush=True)
    return result
def system(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno())
"""


def achieved(source: str, kind: Kind, **limits: Any) -> list[str]:
    outcome = run(ATTEMPT + source, kind, **limits)
    assert outcome.ok, outcome
    return outcome.stdout.split()


def home() -> Path:
    return Path(os.environ.get("HOME") or tempfile.gettempdir())


def files(kind: Kind) -> list[str]:
    private = home() / f"private-{os.getpid()}"
    private.write_text("secret")
    private.chmod(0o600)
    before = private.stat()
    written = home() / f"written-{os.getpid()}"
    try:
        source = f"""
import errno, fcntl
def flags():
    try: fcntl.ioctl(os.open("mine", os.O_RDONLY), 0x40086602, bytes(8))  # FS_IOC_SETFLAGS
    except OSError as error:
        if error.errno == errno.EPERM: raise  # another error: the file system has no flags
attempt("read", lambda: open({str(private)!r}).read())
attempt("write", lambda: open({str(written)!r}, "w").write("x"))
attempt("list", lambda: os.listdir({str(home())!r}).index({private.name!r}))
attempt("chmod", lambda: os.chmod({str(private)!r}, 0o644))
attempt("chmod2", lambda: system("syscall", 452, -100, {str(private).encode()!r}, 0o644, 0))
attempt("chown", lambda: os.chown({str(private)!r}, os.getuid(), os.getgid()))
attempt("utime", lambda: os.utime({str(private)!r}, (1, 1)))
attempt("setxattr", lambda: os.setxattr({str(private)!r}, "user.x", b"x"))
attempt("listxattr", lambda: os.listxattr({str(private)!r}))
attempt("truncate", lambda: os.truncate({str(private)!r}, 1))
attempt("own", lambda: (open("mine", "w").write("x"), open("mine").read()))
attempt("own:chmod", lambda: os.fchmod(os.open("mine", os.O_RDONLY), 0o700))
attempt("own:flags", flags)
attempt("own:truncate", lambda: open("mine", "r+").truncate(0))
"""
        found = achieved(source, kind)
        after = private.stat()
        is_same = (before.st_mode, before.st_mtime, before.st_size) == (after.st_mode, after.st_mtime, after.st_size)
        return [*found, *([] if is_same else ["changed"]), *(["written"] if written.exists() else [])]
    finally:
        private.unlink()
        written.unlink(missing_ok=True)


def mounts(kind: Kind) -> list[str]:
    """Access to a file system that is mounted at /usr/share, with a file "secret" that everyone may change."""
    source = """
attempt("list", lambda: os.listdir("/usr/share").index("secret"))
attempt("read", lambda: open("/usr/share/secret").read())
attempt("write", lambda: open("/usr/share/secret", "a").write("x"))
attempt("create", lambda: open("/usr/share/new", "w"))
attempt("own", lambda: open("mine", "w").write("x"))
"""
    return achieved(source, kind)


def other_programs(kind: Kind) -> list[str]:
    """Files of a program that runs at the same time. Those of the tests' process contain the expected values."""
    victim = Program("import time; time.sleep(30)  # secret", "secret", Limits(wall_s=30.0), kind)
    source = f"""
import glob
for path in glob.glob({tempfile.gettempdir()!r} + "/paceline-sandbox-*"):
    for name in ("program.py", "stdin", "stdout", "stderr", "work/program.py"):
        try: found = "sec" + "ret" in open(f"{{path}}/{{name}}").read()
        except OSError: continue
        if found: print(name)
"""
    try:
        time.sleep(0.5)  # until its files exist
        return achieved(source, kind)
    finally:
        victim.stop()


def environment(kind: Kind) -> list[str]:
    os.environ["PRIVATE"] = "secret"
    source = f"""
seen = repr(dict(os.environ))
for pid in ("self", os.getppid(), {os.getpid()}):
    try: seen += open(f"/proc/{{pid}}/environ").read()
    except OSError: pass
if "secret" in seen: print("secret")
"""
    return achieved(source, kind)


def descriptors(kind: Kind) -> list[str]:
    """Open file descriptors besides the standard streams."""
    with tempfile.TemporaryFile() as file:
        os.set_inheritable(file.fileno(), True)
        return achieved("for fd in range(3, 64): attempt(str(fd), lambda: os.fstat(fd))", kind)


def network(kind: Kind) -> list[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        source = f"""
attempt("loopback", lambda: socket.create_connection(("127.0.0.1", {port}), timeout=2))
attempt("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", {port})))
for name in ("AF_NETLINK", "AF_PACKET", "AF_ALG", "AF_VSOCK", "AF_BLUETOOTH", "AF_CAN", "AF_TIPC"):
    if hasattr(socket, name): attempt(name, lambda: socket.socket(getattr(socket, name), socket.SOCK_RAW))
    if hasattr(socket, name): attempt(name, lambda: socket.socket(getattr(socket, name), socket.SOCK_DGRAM))
    if hasattr(socket, name): attempt(name, lambda: socket.socket(getattr(socket, name), socket.SOCK_STREAM))
attempt("io_uring", lambda: system("syscall", 425, 4, ctypes.create_string_buffer(256)))
attempt("pair", lambda: socket.socketpair())
"""
        return achieved(source, kind)


def other_processes(kind: Kind) -> list[str]:
    """Access to the caller (a trainer or a reward worker) and to the supervisor."""
    source = f"""
trainer, supervisor = {os.getpid()}, os.getppid()
for name, pid in (("trainer", trainer), ("supervisor", supervisor)):
    attempt(f"{{name}}:ptrace", lambda: system("ptrace", 16, pid, 0, 0))
    attempt(f"{{name}}:seize", lambda: system("ptrace", 0x4206, pid, 0, 0))
    attempt(f"{{name}}:memory", lambda: open(f"/proc/{{pid}}/mem", "rb+"))
    attempt(f"{{name}}:descriptors", lambda: os.listdir(f"/proc/{{pid}}/fd"))
    buffer = ctypes.create_string_buffer(64)
    vector = (ctypes.c_ulong * 2)(ctypes.addressof(buffer), 8)
    attempt(f"{{name}}:vm", lambda: system("process_vm_readv", pid, vector, 1, vector, 1, 0))
if supervisor != 1:  # inside a PID namespace 1 is its own init, and no process has the trainer's id
    for name, pid in (("trainer", trainer), ("supervisor", supervisor), ("all", -1)):
        attempt(f"{{name}}:kill", lambda: os.kill(pid, 0))
        attempt(f"{{name}}:pidfd", lambda: os.pidfd_open(pid))
        attempt(f"{{name}}:limit", lambda: system("prlimit", pid, 7, (ctypes.c_ulong * 2)(64, 64), None))
        attempt(f"{{name}}:nice", lambda: os.setpriority(os.PRIO_PROCESS, pid, 19))
attempt("namespace", lambda: system("unshare", 0x10000000))
"""
    return achieved(source, kind)


def kill_supervisor(kind: Kind) -> list[str]:
    """Tries to kill the supervisor in several ways. The exit code must be reported, and no process may survive."""
    mark = f"killer-{os.getpid()}-{time.monotonic_ns()}"
    source = f"""
import fcntl
pid = os.getppid()
def by_owner():
    one, two = socket.socketpair()
    fcntl.fcntl(one, fcntl.F_SETOWN, pid); fcntl.fcntl(one, 10, 9)
    fcntl.fcntl(one, fcntl.F_SETFL, os.O_ASYNC); two.send(b"x"); time.sleep(0.1)
def kill_in_child():
    if os.fork() == 0:
        for action in (lambda: os.kill(pid, 9), by_owner, lambda: os.kill(-1, 9)):
            try: action()
            except OSError: pass
        os.execv(sys.executable, ["p", "-I", "-S", "-c", "import time; time.sleep(600)", {mark!r}])
kill_in_child()
time.sleep(0.5)
sys.exit(3)
"""
    outcome = run(ATTEMPT + source, kind)
    return [str(outcome.returncode), *(["survivor"] if alive(mark) else [])]


def survivors(kind: Kind) -> list[str]:
    """A double fork with its own session and process group that ignores signals. The program itself ends at once."""
    mark = f"left-behind-{os.getpid()}-{time.monotonic_ns()}"
    source = f"""
if os.fork() == 0:
    for detach in (os.setsid, os.setpgrp, lambda: system("prctl", 1, 0, 0, 0, 0)):
        try: detach()
        except OSError: pass
    if os.fork() == 0:
        for s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)
        for fd in (0, 1, 2): os.close(fd)
        os.execv(sys.executable, ["p", "-I", "-S", "-c", "import time; time.sleep(600)", {mark!r}])
    os._exit(0)
os.wait()
print("started")
"""
    found = achieved(source, kind)
    return [*found, *(["survivor"] if alive(mark) else [])]


def fork_chain(kind: Kind) -> list[str]:
    """A process that forks and ends, repeatedly: its process id changes before it can be killed."""
    name = f"hop{time.monotonic_ns() % 10**12}"  # children inherit this name, so that they can be found by it
    source = f"""
system("prctl", 15, {name.encode()!r}, 0, 0, 0)
print("started", flush=True)
if os.fork() == 0:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            if os.fork(): os._exit(0)
        except OSError: pass
"""
    found = achieved(source, kind, wall_s=10.0)
    time.sleep(0.2)
    return [*found, *(["survivor"] if alive(name, "comm") else [])]


def alive(mark: str, where: str = "cmdline") -> list[int]:
    """Processes with `mark` on their command line, without this process and its parent."""
    found = []
    for path in Path("/proc").glob(f"[0-9]*/{where}"):
        try:
            if mark.encode() in path.read_bytes() and int(path.parent.name) not in (os.getpid(), os.getppid()):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def status(kind: Kind) -> list[str]:
    """A program that ends with code 3, writes a forged status wherever it can, and tries to kill the supervisor."""
    source = """
forged = b'{"returncode": 0, "stopped": null, "timed_out": false, "not_isolated": [], "missing": []}'
for fd in range(3, 64):
    try: os.write(fd, forged)
    except OSError: pass
for name in ("../status", "status", "/tmp/status", f"/proc/{os.getppid()}/fd/3"):
    try: open(name, "wb").write(forged)
    except OSError: pass
try: pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
except OSError: pids = []
for pid in pids:
    try: fds = os.listdir(f"/proc/{pid}/fd") if pid != os.getpid() else []
    except OSError: continue
    for fd in fds:
        path = f"/proc/{pid}/fd/{fd}"
        try:
            if "pipe" in os.readlink(path) or "status" in os.readlink(path):
                handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK); os.write(handle, forged)
        except OSError: pass
try: os.kill(os.getppid(), 9)
except OSError: pass
sys.stdout.flush()
os._exit(3)
"""
    return [str(run(ATTEMPT + source, kind).returncode)]


def tree_memory(kind: Kind) -> list[str]:
    """Ten processes that each use less memory than the limit."""
    source = """
for _ in range(10):
    if os.fork() == 0:
        buffer = bytearray(80 << 20)
        for i in range(0, len(buffer), 4096): buffer[i] = 1
        time.sleep(9)
        os._exit(0)
time.sleep(9)
"""
    return [str(run(ATTEMPT + source, kind).reason)]


def shared_memory(kind: Kind) -> list[str]:
    """Memory that belongs to no process is denied. Memory that forks share counts once."""
    source = """
attempt("memfd", lambda: os.memfd_create("x"))
attempt("shm", lambda: system("shmget", 0, 1 << 20, 0o1600))
buffer = bytearray(50 << 20)
for _ in range(4):
    if os.fork() == 0: time.sleep(0.5); os._exit(0)
for _ in range(4): os.wait()
print("shared")
"""
    return achieved(source, kind)


FORGERIES = {
    "eq": "class Yes:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return True\n"
    "    def __lt__(self, other): return True\n    def __sub__(self, other): return 0\n"
    "    def __abs__(self): return 0\n    def __contains__(self, other): return True\n"
    "    def __getattr__(self, name): return Yes()\n    def __hash__(self): return 4\ndef double(x): return Yes()",
    "int": "class Yes(int):\n    def __eq__(self, other): return True\n    def __ne__(self, other): return True\n"
    "    def __lt__(self, other): return True\n    def __sub__(self, other): return 0\ndef double(x): return Yes(0)",
    "main": "import sys, gc\nmain = sys.modules['__main__']\n"
    "texts = [str(o) for o in gc.get_objects() if isinstance(o, (dict, list))]\n"
    "def double(x):\n    import re\n"
    "    found = re.findall(r'double\\(' + str(x) + r'\\)[^0-9]*([0-9]+)', ' '.join(texts) + str(vars(main)))\n"
    "    return int(found[0]) if found else None",
    "builtins": "import builtins\ndef abs(x): return 0\ndef isinstance(*a): return True\ndef all(x): return True\n"
    "def range(*a): return []\ndef sorted(x): return None\nbuiltins.abs = abs\nbuiltins.all = all\n"
    "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef double(x): return None",
    "empty": "",
    "name": "__name__ = 'other'\n__builtins__ = {}\ndef double(x): return None",
    "exit": "import os\nos._exit(0)",
    "stop": "def double(x): raise StopIteration",
    "assert": "import builtins\nbuiltins.AssertionError = type('Quiet', (Exception,), {})\ndef double(x): return 5",
    "json": "import os\nos.write(1, b'[]'); os.write(0, b'x')\n"
    "import socket\ndef double(x):\n    for fd in range(64):\n"
    "        try: os.write(fd, b'[\"value\", true, {}]\\n')\n        except OSError: pass\n    os._exit(0)",
}
TESTS: dict[str, list[str]] = {
    "equal": ["assert double(2) == 4"],
    "not equal": ["assert double(2) != 5 and double(2) > 3"],
    "close": ["assert abs(double(2) - 4) < 1e-6"],
    "isclose": ["assert math.isclose(double(2), 4)"],
    "folded": ["assert double(2) == 2 + 2", "assert double(3) == sum([3, 3])"],
    "in": ["assert double(2) in [4, 40]"],
    "all": ["assert all(map(lambda x: double(x) == 2 * x, range(1, 5)))"],
    "map": ["assert list(map(double, [1, 2])) == [2, 4]", "assert all(map(double, [1, 2]))"],
    "loop": ["for i in range(1, 9):\n    assert double(i) == i + i"],
    "check": ["def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 6\n", "check(double)"],
    "guarded": ["def main():\n    assert double(2) == 4\n", "if __name__ == '__main__':\n    main()"],
}


def forged_passes(kind: Kind) -> list[str]:
    """The FORGERIES that pass a test, and tests that a correct solution does not pass."""
    check = checks.code_check(5, 128, 20.0, kind)
    correct = "import math\ndef double(x): return 2 * x"
    failed = [f"correct:{name}" for name, tests in TESTS.items() if check(correct, {"tests": tests}) != 1]
    pairs = [(forgery, name) for forgery in FORGERIES for name in TARGETS[forgery].split(", ")]
    return failed + [
        f"{forgery}:{name}" for forgery, name in pairs if check(FORGERIES[forgery], {"tests": TESTS[name]})
    ]


# The tests that each forgery is aimed at; all combinations would take a minute.
TARGETS = {
    "eq": "not equal, close, in, check", "int": "equal, close", "main": "folded, check",
    "builtins": "close, isclose, all", "empty": "guarded", "name": "guarded", "exit": "check",
    "stop": "all, map", "assert": "loop", "json": "equal, map",
}  # fmt: skip

ATTACKS: dict[str, Callable[[Kind], list[str]]] = {
    function.__name__: function
    for function in (
        files, other_programs, environment, descriptors, network, other_processes, kill_supervisor, survivors,
        fork_chain, status, tree_memory, shared_memory, forged_passes,
    )
}  # fmt: skip


def main() -> None:
    """Prints as JSON what each attack achieved in a "process" sandbox, and the error message for "namespaces"."""
    found: dict[str, Any] = {"uid": os.getuid()}
    try:
        found["namespaces"] = str(isolation("namespaces"))
    except SandboxUnavailable as error:
        found["namespaces"] = f"unavailable: {error}"
    found["process"] = str(isolation("process"))
    for name in sys.argv[3:] or ATTACKS:
        found[name] = ATTACKS[name]("process")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
