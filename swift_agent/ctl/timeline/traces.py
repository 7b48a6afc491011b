"""A timeline as traces of OpenTelemetry: one for each incident, in the JSON of OTLP. Pure.

    recovery ........ from the loss until all train again; the loss as an event, phases and plan as attributes
      agree ......... until the next generation is made
      recover ....... until all train again

Nothing is invented: of other phases only the length is known, the slowest worker's, so that they are attributes. The
same incident gives the same ids, whenever it is exported. Must never send or write anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from swift_agent.ctl.timeline.model import Incident, Timeline

# Of a span, as OTLP numbers them.
_INTERNAL, _OK, _ERROR = 1, 1, 2


def traces(found: Timeline, version: str) -> dict[str, Any]:
    """An `ExportTraceServiceRequest` of OTLP 1, as JSON objects."""
    spans = [span for incident in found.incidents for span in _spans(found.job, incident)]
    resource = {"service.name": "swift-agent", "service.version": version, "swift.job": found.job}
    scope = {"name": "swift_agent.ctl.timeline", "version": version}
    return {
        "resourceSpans": [
            {"resource": {"attributes": _attributes(resource)}, "scopeSpans": [{"scope": scope, "spans": spans}]}
        ]
    }


def _spans(job: str, incident: Incident) -> list[dict[str, Any]]:
    trace = _id(f"{job}/{incident.generation}/{incident.failed_s:.6f}", 32)
    root = _id(f"{trace}/recovery", 16)
    known: dict[str, Any] = {
        "swift.generation": incident.generation, "swift.mode": incident.mode, "swift.why": incident.why,
        "swift.way": incident.way, "swift.plan": incident.plan_why, "swift.iteration": incident.iteration,
        "swift.lost_iterations": incident.lost_iterations, "swift.predicted_s": incident.predicted_s,
        "swift.world_size": incident.world_size or None, "swift.stalled_s": incident.stalled_s,
        **{f"swift.phase.{name}_s": seconds for name, seconds in incident.phases_s.items()},
    }  # fmt: skip
    is_over = incident.resumed_s is not None
    end_s = max(incident.until_s, incident.begin_s, incident.failed_s)
    spans = [
        {
            **_span(trace, root, f"recovery: {incident.title}", incident.failed_s, end_s),
            "attributes": _attributes(known),
            "events": [
                {
                    "name": "lost", "timeUnixNano": _ns(incident.failed_s),
                    "attributes": _attributes({
                        "swift.node": loss.node, "swift.slot": loss.slot, "swift.kind": loss.kind,
                        "swift.ranks": ",".join(map(str, loss.ranks)), "swift.evidence": loss.evidence,
                    }),
                }
                for loss in incident.losses
            ],
            "status": {"code": _OK} if is_over else {"code": _ERROR, "message": "it is not known to be over"},
        }
    ]  # fmt: skip
    parts = [("agree", incident.failed_s, incident.begin_s)]
    if incident.resumed_s is not None:
        parts.append(("recover", incident.begin_s, incident.resumed_s))
    for name, begin_s, until_s in parts:
        if until_s >= begin_s:
            spans.append({**_span(trace, _id(f"{trace}/{name}", 16), name, begin_s, until_s), "parentSpanId": root})
    return spans


def _span(trace: str, span: str, name: str, begin_s: float, end_s: float) -> dict[str, Any]:
    return {
        "traceId": trace, "spanId": span, "name": name, "kind": _INTERNAL, "startTimeUnixNano": _ns(begin_s),
        "endTimeUnixNano": _ns(end_s),
    }  # fmt: skip


def _attributes(known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those that are known."""
    return [{"key": key, "value": _value(value)} for key, value in known.items() if value is not None and value != ""]


def _value(value: str | int | float) -> dict[str, Any]:
    if isinstance(value, int):
        return {"intValue": str(value)}  # as OTLP has it: JSON has no whole numbers of 64 bits
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": value}


def _ns(seconds: float) -> str:
    return str(round(seconds * 1e9))


def _id(of: str, digits: int) -> str:
    return hashlib.sha256(of.encode()).hexdigest()[:digits]
