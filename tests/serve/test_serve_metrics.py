from __future__ import annotations

from revisit.serve.metrics import Histogram, Metrics


def test_a_histogram_counts_at_or_below_each_bound() -> None:
    h = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 7):
        h.add(value)
    assert h.lines("x") == [
        'x_bucket{le="1"} 2',
        'x_bucket{le="2"} 3',
        'x_bucket{le="+Inf"} 4',
        "x_sum 10.000000",
        "x_count 4",
    ]


def test_counters_add_up_per_label_and_large_ones_keep_every_digit() -> None:
    metrics = Metrics()
    metrics.count("revisit_requests_total", status="200")
    metrics.count("revisit_requests_total", status="200")
    metrics.count("revisit_requests_total", status="400")
    metrics.count("revisit_generated_tokens_total", 123_456_789)
    lines = metrics.text().splitlines()
    assert 'revisit_requests_total{status="200"} 2' in lines
    assert 'revisit_requests_total{status="400"} 1' in lines
    assert "revisit_generated_tokens_total 123456789" in lines
    assert all(line.startswith("#") or len(line.rsplit(" ", 1)) == 2 for line in lines)


def test_label_values_are_escaped() -> None:
    metrics = Metrics()
    metrics.count("revisit_requests_total", status='a"b\\c\n')
    assert r'{status="a\"b\\c\n"} 1' in metrics.text()
