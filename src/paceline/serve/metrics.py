"""What `/metrics` reports, in Prometheus' format."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from paceline.engine.engine import LocalEngine
from paceline.types import StepTrace

LATENCIES_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class ServerMetrics:
    """`add_traces` is called on the engine's thread; a scrape reads numbers that one thread writes."""

    def __init__(self) -> None:
        self.num_requests: dict[str, int] = {}  # by route and status
        self.num_running = 0  # requests of clients
        self.num_prompt_tokens = 0
        self._totals = dict.fromkeys(
            ("num_emitted", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_preempted"), 0
        )
        self._seconds = dict.fromkeys(("draft_s", "forward_s", "sample_s", "total_s"), 0.0)
        self._num_steps = 0
        self.engine: LocalEngine | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.latency_s, self.first_token_s = (
            Histogram(f"paceline_{name}_seconds", text, buckets=LATENCIES_S, registry=self._registry)
            for name, text in (
                ("request_latency", "Time of a request."),
                ("time_to_first_token", "Time to the first token of a stream."),
            )
        )

    def add_traces(self, traces: list[StepTrace]) -> None:
        for trace in traces:
            self._num_steps += 1
            for counts in (self._totals, self._seconds):
                for name in counts:
                    counts[name] += getattr(trace, name)

    def count(self, route: str, status: int) -> None:
        key = f"{route} {status}"
        self.num_requests[key] = self.num_requests.get(key, 0) + 1

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "paceline_requests", "Requests by route and status of the response.", labels=["route", "status"]
        )
        for key, num in self.num_requests.copy().items():
            requests.add_metric(key.split(" "), num)
        yield requests
        totals = self._totals
        for name, text, value in (
            ("prompt_tokens", "Tokens of prompts.", self.num_prompt_tokens),
            ("generation_tokens", "Tokens emitted.", totals["num_emitted"]),
            ("engine_steps", "Engine steps.", self._num_steps),
            ("spec_decode_num_drafts", "Drafts verified.", totals["num_drafts"]),
            ("spec_decode_num_draft_tokens", "Draft tokens verified.", totals["num_draft_tokens"]),
            ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", totals["num_accepted_tokens"]),
            ("num_preemptions", "Preempted sequences.", totals["num_preempted"]),
            ("draft_seconds", "Time of drafting.", self._seconds["draft_s"]),
            ("forward_seconds", "Time of forward passes, which verify drafts.", self._seconds["forward_s"]),
            ("sample_seconds", "Time of sampling.", self._seconds["sample_s"]),
            ("step_seconds", "Time of engine steps.", self._seconds["total_s"]),
        ):
            yield CounterMetricFamily(f"paceline_{name}", text, value=value)
        drafts = totals["num_drafts"]
        acceptance_length = 1 + totals["num_accepted_tokens"] / drafts if drafts else 1.0
        gauges = [
            ("requests_in_progress", "Requests of clients in progress.", self.num_running),
            ("mean_acceptance_length", "Tokens per verified draft, the target's own included.", acceptance_length),
        ]
        if self.engine is not None:
            scheduler, pool = self.engine.scheduler, self.engine.paged.pool
            gauges += [
                ("num_requests_running", "Sequences that run.", len(scheduler.running)),
                ("num_requests_waiting", "Sequences that wait.", len(scheduler.waiting)),
                ("kv_cache_usage", "Share of KV blocks in use.", 1 - pool.num_free / pool.num_blocks),
                ("policy_version", "Version of the weights.", self.engine.version),
            ]
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"paceline_{name}", text, value=value)
