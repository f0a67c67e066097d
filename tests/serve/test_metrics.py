from __future__ import annotations

from revisit.serve.metrics import Metrics


def test_counters_add_up_per_label() -> None:
    metrics = Metrics()
    for status in (200, 200, 400):
        metrics.answered(status)
    metrics.generated_tokens.inc(123_456_789)
    lines = metrics.text().decode().splitlines()
    assert 'revisit_requests_total{status="200"} 2.0' in lines
    assert 'revisit_requests_total{status="400"} 1.0' in lines
    assert "revisit_generated_tokens_total 1.23456789e+08" in lines


def test_two_servers_in_one_process_count_apart() -> None:
    first, second = Metrics(), Metrics()
    first.answered(200)
    assert "revisit_requests_total{" not in second.text().decode()
