"""Load or compute: TTFT over HTTP of requests that do not share, against stock and against the bound."""
