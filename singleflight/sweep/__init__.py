"""The trace model over a grid of deployments: tasks, workers, parts on disk, tables and plots."""
