"""The probes, which make traces: the only package that touches a running device."""
