"""/metrics is what Prometheus reads, and counts what happened."""

from __future__ import annotations

from collections.abc import Callable

from oracles.toy_server import Running, make_engine, wait_for
from prometheus_client.parser import text_string_to_metric_families

Start = Callable[..., Running]


def read(served: Running) -> dict[str, float]:
    """Samples by name and labels."""
    answer = served.request("GET", "/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    return {
        "/".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_requests_tokens_and_seconds_are_counted(start: Start) -> None:
    served = start()
    before = read(served)
    assert before["specdec_generated_tokens_total"] == 0 and before["specdec_texts_running"] == 0
    for body in ({"n": 2}, {"stream": True}, {"temperature": "hot"}):
        served.post(
            "completions", {"prompt": [1, 2, 3], "max_tokens": 30, "temperature": 0, "ignore_eos": True, **body}
        )
    found, stats = read(served), served.engine.stats
    assert found["specdec_http_requests_total//v1/completions/200"] == 2
    assert found["specdec_http_requests_total//v1/completions/422"] == 1
    assert found["specdec_texts_total/length"] == 3
    assert found["specdec_prompt_tokens_total"] == 6 and found["specdec_generated_tokens_total"] == 90
    assert found["specdec_steps_total"] == stats.steps and found["specdec_tau"] == 90 / stats.steps
    assert found["specdec_draft_tokens_total"] == stats.num_draft_tokens > 0
    assert found["specdec_accepted_draft_tokens_total"] == stats.num_accepted > 0
    assert found["specdec_acceptance_rate"] == stats.alpha
    assert found["specdec_time_to_first_token_seconds_count"] == 3
    assert found["specdec_inter_token_latency_seconds_count"] == stats.steps - 3
    assert found["specdec_text_seconds_sum"] >= found["specdec_time_to_first_token_seconds_sum"] > 0
    assert found["specdec_time_to_first_token_seconds_bucket/+Inf"] == 3
    assert found["specdec_texts_running"] == found["specdec_texts_queued"] == 0


def test_running_and_waiting_texts_are_shown(start: Start) -> None:
    served = start(make_engine(max_rows=1, max_length=4096))
    running = [
        served.client().completions.create(
            model="toy", prompt="one", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        for _ in range(3)
    ]
    wait_for(lambda: served.engine.num_running == 1)
    found = read(served)
    assert (found["specdec_texts_running"], found["specdec_texts_queued"]) == (1, 2)
    for stream in running:
        stream.close()


def test_servers_count_for_themselves(start: Start) -> None:
    first, second = start(), start()
    first.post("completions", {"prompt": "one"})
    assert read(first)["specdec_texts_total/length"] == 1 and "specdec_texts_total/length" not in read(second)
