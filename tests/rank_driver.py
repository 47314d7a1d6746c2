"""Runs learners of several ranks, one process each. The processes are forked, because importing torch is slow.

    python tests/rank_driver.py

reads one JSON object per line, {"size": ranks, …fields of `Job`}, and answers each with the result of rank 0, and the
exit status and the output of every process. With `argv` the ranks run this command line of `paceline`, as torchrun
starts it. No thread is started before the fork.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support import tiny_decoder
from torch.distributed.fsdp import FSDPModule
from unit.test_learner import some_groups

import paceline.model.optim as optim_module
import paceline.rl.learner as learner_module
from paceline.cli import app
from paceline.config import AlgorithmSection, LearnerSection
from paceline.model.hf_decoder import load_hf
from paceline.model.optim import Optimizer
from paceline.model.weights import load
from paceline.rl import checkpoint
from paceline.rl.algorithms import make_algorithm
from paceline.rl.batch import TokenBatch, scored
from paceline.rl.learner import Learner, UpdateReport
from paceline.rl.worker_group import WorkerGroup


@dataclass
class Job:
    size: int
    dtype: str = "float32"
    model: dict[str, Any] = field(default_factory=dict)  # settings of a tiny decoder
    directory: str | None = None  # of a model to load instead
    hf: bool = False  # load it with transformers
    learner: dict[str, Any] = field(default_factory=dict)
    algorithm: dict[str, Any] = field(default_factory=dict)
    load: str | None = None  # a state to load first
    updates: tuple[int, int] = (0, 10)
    num_groups: int = 4
    bad: int | None = None  # the update that is not finite
    bad_rank: int | None = None  # the rank with a NaN in its gradient; None: the rewards are infinite
    save: str | None = None
    out: str | None = None  # file for the final weights and logprobs
    broken: str | None = None  # a deliberate mistake
    dies: int | None = None  # rank 1 is killed at this update
    full: bool = False  # the disk of rank 1 is full
    argv: list[str] | None = None


def make(job: Job, worker_group: WorkerGroup) -> Learner:
    torch.set_num_threads(1)
    dtype = getattr(torch, job.dtype)
    if job.directory is None:
        model: Any = tiny_decoder(dtype, **job.model)
    else:
        model = (load_hf if job.hf else load)(Path(job.directory), dtype, "cpu")
    section = LearnerSection(**{"learning_rate": 1e-2, "tokens_per_microbatch": 100, **job.learner})
    keeps = job.algorithm.get("beta", 0) > 0
    return Learner(model, section, num_steps=20, temperature=0.8, keep_reference=keeps, worker_group=worker_group)


def train(job: Job, it: Learner, algorithm: Any) -> dict[str, Any]:
    if job.load is not None:
        it.load(Path(job.load))
    reports: list[UpdateReport] = []
    skipped: list[str] = []
    for seed in range(*job.updates):
        groups = some_groups(seed, job.num_groups)
        rollouts, batch = scored(groups), TokenBatch.of(groups)
        if algorithm.needs_reference:
            batch.ref_logprobs_T = it.reference_logprobs(rollouts)
        if seed == job.bad and job.bad_rank is None:
            batch.reward_S[:] = float("inf")
        algorithm.prepare(batch)
        report = it.update(rollouts, batch, algorithm.loss, algorithm.weights)
        skipped += report.skipped
        if report.num_optimizer_steps:
            reports.append(report)
    files = {}
    if job.save is not None:
        Path(job.save).mkdir()
        files = it.save(Path(job.save))
    if job.out is not None:
        tensors = {name: tensor.detach().clone() for name, tensor in it.weights()}
        if it.section.lora_rank:
            tensors |= {name: tensor.detach().clone() for name, tensor in it.weights(adapters=True)}
        save_file(tensors | {"logprobs": it.logprobs(scored(some_groups(99)))}, job.out)
    return {
        "losses": [r.loss for r in reports],
        "norms": [r.grad_norm for r in reports],
        "entropies": [r.entropy for r in reports],
        "stats": [r.stats for r in reports],
        "logprobs": [float(r.logprobs_T.sum()) for r in reports],
        "skipped": skipped,
        "in_a_row": it.num_skipped_in_a_row,
        "version": it.version,
        "dtype": str(it.decoder.dtype).removeprefix("torch."),
        "files": files,
        "held": sum(p.numel() for p in map(learner_module.local_tensor, it.optimizer.masters.values())),
        "all": sum(p.numel() for p in it.optimizer.masters.values()),
        "listens": listening(),
    }


def listening() -> list[str]:
    """The addresses at which this process listens, as in /proc."""
    if sys.platform != "linux":
        return []
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    mine = {str(link.readlink()).removeprefix("socket:[").rstrip("]") for link in links}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return sorted({row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in mine})


def break_it(job: Job, number: int) -> None:
    """Patch this process: a death, a full disk, or a deliberate mistake."""
    if job.dies is not None and number == 1:
        update, calls = Learner.update, count()

        def dies(*args: Any) -> Any:
            if next(calls) == job.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            return update(*args)

        Learner.update = dies  # type: ignore[method-assign]
    if number == job.bad_rank:
        optimizer_step = Optimizer.step

        def with_nan(it: Optimizer, step: int) -> float:
            if step == job.bad:
                gradients = [p.grad for p in it.masters.values() if p.grad is not None]
                learner_module.local_tensor(gradients[0])[0] = torch.nan
            return optimizer_step(it, step)

        Optimizer.step = with_nan  # type: ignore[method-assign]
    if job.full and number == 1:

        def full(path: Path, parts: Any) -> Any:
            raise OSError(errno.ENOSPC, "No space left on device")

        checkpoint._write_synced = full
    broken = job.broken
    if broken == "averaged":
        plain = FSDPModule.set_gradient_divide_factor
        FSDPModule.set_gradient_divide_factor = lambda self, factor: plain(self, 2.0)  # type: ignore[method-assign]
    elif broken == "rounded":  # gradients to 16 bits after their sum over ranks
        finish = Optimizer.step

        def rounded(it: Optimizer, step: int) -> float:
            for master in it.masters.values():
                if master.grad is not None:
                    master.grad = master.grad.bfloat16().float()
            return finish(it, step)

        Optimizer.step = rounded  # type: ignore[method-assign]
    elif broken == "own norm":  # each rank decides by its own gradients whether to skip
        total_norm = optim_module.get_total_norm
        optim_module.get_total_norm = lambda grads: total_norm([learner_module.local_tensor(grad) for grad in grads])
    elif broken == "dropped":  # rank 1 skips its microbatches
        microbatches_per_rank = learner_module.microbatches_per_rank

        def dropped(*args: Any) -> Any:
            first, *others = microbatches_per_rank(*args)
            return [first, *([(0, 0)] * len(spans) for spans in others)]

        learner_module.microbatches_per_rank = dropped
    else:
        assert broken is None


def rank(job: Job, number: int, port: int) -> dict[str, Any]:
    break_it(job, number)
    if job.argv is not None:
        os.environ |= {"RANK": str(number), "WORLD_SIZE": str(job.size), "LOCAL_RANK": str(number)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        app(job.argv)
    worker_group = WorkerGroup.join(number, job.size, f"127.0.0.1:{port}")
    it = make(job, worker_group)
    algorithm = make_algorithm(AlgorithmSection(**job.algorithm), 24)
    if number == 0:
        try:
            return train(job, it, algorithm)
        finally:
            it.close()
    it.run_worker(algorithm.loss, algorithm.weights)
    return {}


def run(job: Job) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as place:
        found = Path(place) / "found"
        outputs = [Path(place) / str(number) for number in range(job.size)]
        pids = []
        for number in range(job.size):
            if (pid := os.fork()) == 0:
                with outputs[number].open("w") as file:
                    os.dup2(file.fileno(), 1)
                    os.dup2(file.fileno(), 2)
                os._exit(child(job, number, port, found))
            pids.append(pid)
        status = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        answer = json.loads(found.read_text()) if found.exists() else {}
        return {**answer, "status": status, "output": [path.read_text() for path in outputs]}


def child(job: Job, number: int, port: int, found: Path) -> int:
    try:
        answer = rank(job, number, port)
    except SystemExit as end:
        sys.stdout.flush()
        return end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        print(f"{type(error).__name__}: {error}\n{traceback.format_exc()}", flush=True)
        return 1
    if number == 0:
        found.write_text(json.dumps(answer))
    return 0


def warm_up() -> None:
    """Import once what is imported lazily."""
    import transformers

    from paceline.build import run
    from paceline.report import html

    assert run.build_trainer and html.write_report and transformers.LlamaForCausalLM and transformers.AutoTokenizer
    make(Job(1), WorkerGroup())


if __name__ == "__main__":
    warm_up()
    for line in sys.stdin:
        print(json.dumps(run(Job(**json.loads(line)))), flush=True)
