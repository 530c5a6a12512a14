"""Does the suite notice? Mutants of the core and the connector, and the tests that have to kill them.

    python -m tests.mutants                     a sample of every file, killed by the fast suites
    python -m tests.mutants --file table.py --all
    python -m tests.mutants --survivors         the engine's suites against what the last run left alive

Operators are cosmic-ray's, and one of ours that deletes a statement. Results go to `mutants.json`, one line a
mutant, and are complete as far as the run got. Needs `pip install cosmic-ray`.
"""
