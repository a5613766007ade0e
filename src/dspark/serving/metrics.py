"""What Prometheus reads. Names, labels and meanings are vLLM's where it has them, so that its dashboards work."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dspark.decoding.engine import Engine, Step
from dspark.decoding.request import Active, Result

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
ENDS = {"stop": "stop", "length": "length", "cancelled": "abort", "timeout": "abort", "error": "error"}
"""How a request ended here -> vLLM's word for it."""
_LABELS = ("model_name", "engine")


class Metrics:
    """Counters of one engine; written by its thread, read by anyone. n: draft tokens a round at most."""

    def __init__(self, model: str, n: int) -> None:
        self.registry = CollectorRegistry()
        self._values = (model, "0")
        self._running = self._gauge("vllm:num_requests_running", "Requests in the batch.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Requests that wait for a place in it.")
        self._usage = self._gauge("vllm:kv_cache_usage_perc", "Share of the memory that requests hold (0..1).")
        self._prefixes = self._gauge("dspark:prefix_cache_tokens", "Tokens that the prefix cache holds.")
        self._queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found there.")
        self._preemptions = self._counter("vllm:num_preemptions", "Times that a request made room for others.")
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens of requests whose answer has begun.")
        self._generated = self._counter("vllm:generation_tokens", "Answer tokens.")
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Rounds that verified draft tokens.")
        self._drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens that were verified.")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted.")
        name, text = "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by place in the block."
        positions = Counter(name, text, (*_LABELS, "position"), registry=self.registry)
        self._positions = [positions.labels(*self._values, str(position)) for position in range(n)]
        ends = Counter("vllm:request_success", "Ended requests.", (*_LABELS, "finished_reason"), registry=self.registry)
        self._ends = {reason: ends.labels(*self._values, reason) for reason in ENDS.values()}
        self._first = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", SECONDS)
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", SECONDS)
        text = "Accepted draft tokens of a round that verified some (bonus not counted)."
        self._per_round = self._histogram("dspark:accepted_tokens_per_round", text, tuple(range(n + 1)))
        text = "Draft tokens that a round verified, 0 for a plain one."
        self._lengths = self._histogram("dspark:scheduled_tokens_per_round", text, tuple(range(n + 1)))
        self._proposed = self._counter("dspark:proposed_draft_tokens", "Draft tokens that were drafted.")

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, _LABELS, registry=self.registry).labels(*self._values)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _LABELS, registry=self.registry).labels(*self._values)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, _LABELS, registry=self.registry, buckets=buckets).labels(*self._values)

    def passed(self, engine: Engine) -> None:
        """A pass is over: who runs, who waits, what they hold."""
        memory = engine.memory
        self._running.set(len(engine.running))
        self._waiting.set(len(engine.waiting))
        self._prefixes.set(memory.prefixes.tokens)
        if memory.budget:
            self._usage.set((memory.held(engine.running) - memory.prefixes.tokens) / memory.budget)

    def step(self, active: Active, step: Step, first_after: float | None) -> None:
        """What a pass added to a request; first_after: seconds since its arrival when this is its first token."""
        self._generated.inc(len(step.new_ids))
        if first_after is not None:
            self._prompt.inc(len(active.request.prompt_ids))
            self._queries.inc(len(active.request.prompt_ids))
            self._hits.inc(active.result.cached_tokens)
            self._first.observe(first_after)
        if step.round is not None:
            self._lengths.observe(step.round.scheduled)
            self._proposed.inc(step.round.proposed)
        if step.round is not None and step.round.scheduled:
            self._drafts.inc()
            self._drafted.inc(step.round.scheduled)
            self._accepted.inc(step.round.accepted)
            self._per_round.observe(step.round.accepted)
            for counter in self._positions[: step.round.accepted]:
                counter.inc()

    def finished(self, result: Result, seconds: float) -> None:
        """A request ended `seconds` after its arrival."""
        self._ends[ENDS[result.finish_reason or "error"]].inc()
        self._preemptions.inc(result.preemptions)
        self._whole.observe(seconds)

    def render(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)
