"""Is the gate's prediction true? Workloads on the real engine, in turns, beside what the twin predicts."""
