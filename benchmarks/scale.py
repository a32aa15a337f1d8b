"""The lighthouse with 256 simulated replica groups: see `lighthouse_scale.py`."""
