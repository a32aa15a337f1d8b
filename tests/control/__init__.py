"""Tests of the control plane's shells: wire, lighthouse, leases, groups of several ranks."""
