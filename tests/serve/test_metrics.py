from __future__ import annotations

from revisit.serve.metrics import Metrics


def test_two_servers_in_one_process_count_apart() -> None:
    first, second = Metrics(), Metrics()
    for status in (200, 200, 400):
        first.answered(status)
    counted = [one.registry.get_sample_value("revisit_requests_total", {"status": "200"}) for one in (first, second)]
    assert counted == [2.0, None]
