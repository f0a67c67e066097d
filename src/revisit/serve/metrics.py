"""What `/metrics` shows, by prometheus_client."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
SIZES = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """The counters of one server, in a registry of their own; safe to use from several threads."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)  # memory, descriptors, processor time
        self.requests = Counter("revisit_requests", "Requests by HTTP status.", ["status"], registry=registry)
        self.prompt_tokens = Counter("revisit_prompt_tokens", "Prompt tokens, with vision tokens.", registry=registry)
        self.generated_tokens = Counter("revisit_generated_tokens", "Generated tokens.", registry=registry)
        self.steps = Counter("revisit_steps", "Decoding steps by method.", ["method"], registry=registry)
        self.applied_steps = Counter(
            "revisit_applied_steps", "Steps on which the method acted.", ["method"], registry=registry
        )
        self.changed_steps = Counter(
            "revisit_changed_steps",
            "Steps on which the method's first choice was not the model's.",
            ["method"],
            registry=registry,
        )
        self.seconds = Histogram(
            "revisit_request_seconds", "From arrival to the end of the answer.", buckets=SECONDS, registry=registry
        )
        self.first_token = Histogram(
            "revisit_first_token_seconds", "From arrival to the first token.", buckets=SECONDS, registry=registry
        )
        self.batch = Histogram("revisit_batch_size", "Requests decoded together.", buckets=SIZES, registry=registry)
        self.waiting = Gauge("revisit_queue_length", "Requests waiting for the model.", registry=registry)
        self.running = Gauge("revisit_running", "Requests being decoded.", registry=registry)
        self.connections = Gauge("revisit_connections", "Open connections.", registry=registry)
        self.refused_connections = Counter(
            "revisit_refused_connections",
            "Connections closed for lack of room or time, by reason.",
            ["reason"],
            registry=registry,
        )

    def answered(self, status: int) -> None:
        """Count an answer."""
        self.requests.labels(str(status)).inc()

    def text(self) -> bytes:
        """The page, in the text format of Prometheus."""
        return generate_latest(self.registry)
