"""`ft-doctor`: what is wrong with a host, with several hosts before a job, and with a job that has failed.

Collectors read facts (`host`, `probes`, `meeting`); pure checks make findings of them (`host_checks`, `job_checks`,
`aftermath`); `text` prints these.
"""
