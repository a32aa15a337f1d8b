"""The structured log of a job: what every replica, the lighthouse and ftrun write, and how it is written.

`schema` says what an event is, `event_log` takes events from any thread and never blocks it, `event_file` writes them.
docs/events.md is the description for those who read them. Standard library only: the control plane writes events, too.
"""
