"""Traces of incidents: as a collector of OpenTelemetry reads them."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from swift_agent.ctl.timeline.assemble import assemble
from swift_agent.ctl.timeline.traces import traces
from tests.support.timelines import T, known


def as_collector(content: dict[str, Any]) -> Any:
    """By OTLP's own types. Its JSON has ids in hexadecimal digits, where protobuf's has base64."""

    def base64_of(found: re.Match[str]) -> str:
        return f'"{found[1]}": "{base64.b64encode(bytes.fromhex(found[2])).decode()}"'

    text = re.sub(r'"(traceId|spanId|parentSpanId)": "([0-9a-f]+)"', base64_of, json.dumps(content))
    return json_format.Parse(text, ExportTraceServiceRequest())


def attributes(of: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in of}


def test_each_incident_is_a_trace() -> None:
    (of_job,) = as_collector(traces(assemble(known()), "1.0")).resource_spans
    assert attributes(of_job.resource.attributes) == {
        "service.name": "swift-agent", "service.version": "1.0", "swift.job": "gpt",
    }  # fmt: skip
    spans = list(of_job.scope_spans[0].spans)
    roots = [span for span in spans if not span.parent_span_id]
    assert [(root.start_time_unix_nano, root.end_time_unix_nano) for root in roots] == [
        (int((T + 100) * 1e9), int((T + 102) * 1e9)), (int((T + 200) * 1e9), int((T + 205) * 1e9)),
    ]  # fmt: skip
    assert len({root.trace_id for root in roots}) == 2 and all(len(root.trace_id) == 16 for root in roots)
    for root in roots:
        children = [span for span in spans if span.parent_span_id == root.span_id]
        assert [child.name for child in children] == ["agree", "recover"]
        assert {child.trace_id for child in children} == {root.trace_id}
        assert children[0].start_time_unix_nano == root.start_time_unix_nano
        assert children[0].end_time_unix_nano == children[1].start_time_unix_nano
        assert children[1].end_time_unix_nano == root.end_time_unix_nano
    first, (lost,) = attributes(roots[0].attributes), roots[0].events
    assert first["swift.generation"] == 2 and first["swift.phase.agree_s"] == 0.5 and first["swift.predicted_s"] == 1.5
    assert first["swift.way"] == "state of a replica" and first["swift.iteration"] == 182
    assert attributes(lost.attributes) == {
        "swift.node": "b", "swift.slot": 1, "swift.kind": "workers", "swift.ranks": "3",
        "swift.evidence": "rank 3 killed by signal 9",
    }  # fmt: skip
    assert roots[0].status.code == 1


def test_the_same_incident_has_the_same_ids() -> None:
    assert traces(assemble(known()), "1") == traces(assemble(known()), "1")


def test_one_that_is_not_over_is_no_success() -> None:
    chapters = known().chapters
    running = assemble(known(chapters=(*chapters[:2], replace(chapters[2], resumed_s=None, phases_s={}, plan=None))))
    spans = as_collector(traces(running, "1")).resource_spans[0].scope_spans[0].spans
    root = [span for span in spans if not span.parent_span_id][-1]
    assert root.status.code == 2 and "recover" not in [span.name for span in spans if span.trace_id == root.trace_id]


def test_a_job_without_incidents_has_none() -> None:
    quiet = as_collector(traces(assemble(known(chapters=known().chapters[:1])), "1"))
    assert list(quiet.resource_spans[0].scope_spans[0].spans) == []
