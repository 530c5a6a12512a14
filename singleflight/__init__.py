"""Single-flight for KV-cache blocks: requests that need the same cold blocks at once fetch them once."""

__version__ = "0.1.0"
# PyPI has an unrelated `singleflight` with the same import name; this tells ours from it.
__distribution__ = "kv-singleflight"
