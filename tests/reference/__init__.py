"""The second reference: slow, exact, one output at a time; see exact.py."""
