"""`make watch`: the dashboard and the alerts of docs/operate/ against a real Prometheus and real servers."""
