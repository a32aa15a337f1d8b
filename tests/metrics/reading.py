"""Reads what is served, with prometheus_client's own parser."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        text: bytes = answer.read()
        return text.decode()


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Values by name and labels."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, f"{key} twice"
            found[key] = float(sample.value)
    return found


def gauge(text: str, name: str, **labels: str) -> float:
    """The value of one."""
    return samples(text)[name, frozenset(labels.items())]
