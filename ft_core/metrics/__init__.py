"""Metrics for Prometheus: what every replica, the lighthouse and ftrun serve at /metrics, and how it is counted.

`table` says which metrics there are, `rules` what an event changes in them, `tally` keeps their values; these are pure.
`metrics` takes events beside the job's log, `exposition` writes what prometheus_client serves, `server` serves it.
docs/metrics.md is the description for those who read them. The control plane serves metrics, too: no torch here.
"""
