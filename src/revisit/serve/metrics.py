"""Counters that `/metrics` exposes, by prometheus_client."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
SIZES = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """The counters of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)  # memory, descriptors, processor time

        def by_method(name: str, help_: str) -> Counter:
            return Counter(name, help_, ["method"], registry=registry)

        self.requests = Counter("revisit_requests", "Requests by HTTP status.", ["status"], registry=registry)
        self.prompt_tokens = Counter("revisit_prompt_tokens", "Prompt tokens, with vision tokens.", registry=registry)
        self.generated_tokens = Counter("revisit_generated_tokens", "Generated tokens.", registry=registry)
        self.steps = by_method("revisit_steps", "Decoding steps by method.")
        self.applied_steps = by_method("revisit_applied_steps", "Steps on which the method acted.")
        self.changed_steps = by_method("revisit_changed_steps", "Steps on which the method changed the first choice.")
        self.seconds = Histogram(
            "revisit_request_seconds", "From arrival to the end of the answer.", buckets=SECONDS, registry=registry
        )
        self.first_token = Histogram(
            "revisit_first_token_seconds", "From arrival to the first token.", buckets=SECONDS, registry=registry
        )
        self.batch = Histogram("revisit_batch_size", "Requests decoded together.", buckets=SIZES, registry=registry)
        self.waiting = Gauge("revisit_queue_length", "Requests waiting for the model.", registry=registry)
        self.running = Gauge("revisit_running", "Requests being decoded.", registry=registry)

    def answered(self, status: int) -> None:
        """Count an answer."""
        self.requests.labels(str(status)).inc()
