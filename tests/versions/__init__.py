"""Other releases of vLLM than the installed one, and vLLM's own tests. Not in CI: both download a release.

    make versions VERSIONS="0.31 0.33"      our tests and the simulation, on each of these
    make vllm-tests                         vLLM's own tests: the stock connector, then ours in its place

A release is the sdist from the package index, unpacked and not built: its Python, over the packages (torch
and so on) of the environment that runs this. That is all a scheduler needs; an engine would need the compiled
parts. What is downloaded stays in `.venvs/`.
"""
