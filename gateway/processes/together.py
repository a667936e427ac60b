"""What several processes of a gateway are as one: their metrics, whether they are ready. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from omnicore.metrics import GATEWAY_PROCESS_UP


def metrics(texts: Mapping[int, bytes], count: int) -> bytes:
    """Prometheus' texts of some processes as one, every series with the label ``process``: a counter of a process that
    was restarted begins again by itself, which a sum could not show. Sums are the reader's: ``sum without (process)``.
    Whose series are missing, of ``count`` processes, is a series as well.
    """
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for index, text in sorted(texts.items()):
        label = b'process="%d"' % index
        family = b""
        for line in text.split(b"\n"):
            if line.startswith(b"# "):
                family = line.split(b" ", 3)[2]
                known = heads.setdefault(family, [])
                if line not in known:
                    known.append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, label))
    up = GATEWAY_PROCESS_UP
    heads[up.name.encode()] = [f"# HELP {up.name} {up.help}".encode(), f"# TYPE {up.name} {up.kind}".encode()]
    samples[up.name.encode()] = [
        b'%b{process="%d"} %.1f' % (up.name.encode(), index, index in texts) for index in range(count)
    ]
    lines = [line for family, head in heads.items() for line in (*head, *samples.get(family, ()))]
    return b"\n".join(lines) + b"\n"


def _labelled(line: bytes, label: bytes) -> bytes:
    name, brace, rest = line.partition(b"{")
    if brace:
        return b"%b{%b,%b" % (name, label, rest)
    name, _, value = line.partition(b" ")
    return b"%b{%b} %b" % (name, label, value)


def readiness(
    own: int, answers: Mapping[int, Mapping[str, Any]], count: int, silent: Collection[int] = ()
) -> dict[str, Any]:
    """The bodies of /ready of some processes as one. A process that is not there does not make the others unready: it
    is being restarted, and the kernel sends no connection to it. One of ``silent`` does: it is there, so it gets its
    share of the connections, and does not answer."""
    rows = [answers[index] for index in sorted(answers)]
    names = sorted({name for row in rows for name in row["pipelines"]})
    return {
        **answers[own],
        "ready": all(row["ready"] for row in rows) and not silent,
        "draining": any(row["draining"] for row in rows),
        "control_plane_connected": all(row["control_plane_connected"] for row in rows),
        "stale": any(row["stale"] for row in rows),
        "revision": min(row["revision"] for row in rows),
        "inflight_requests": sum(row["inflight_requests"] for row in rows),
        "pipelines": {name: _pipeline([row["pipelines"].get(name) for row in rows]) for name in names},
        "processes": {
            str(index): bool(answers[index]["ready"]) if index in answers else False if index in silent else None
            for index in range(count)
        },
        "silent_processes": sorted(silent),
    }


def _pipeline(rows: list[Mapping[str, Any] | None]) -> dict[str, Any]:
    known = [row for row in rows if row is not None]
    stages = sorted({stage for row in known for stage in row["routable_replicas"]})
    complete = len(known) == len(rows)  # who has not heard of it cannot serve it
    return {
        "ready": complete and all(row["ready"] for row in known),
        "routable_replicas": {
            stage: min(row["routable_replicas"].get(stage, 0) for row in known) if complete else 0 for stage in stages
        },
    }
