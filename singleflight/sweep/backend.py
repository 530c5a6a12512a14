"""Where tasks run: joblib's loky processes here, or a dask or ray cluster."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, get_args

import joblib

from singleflight.sweep import work
from singleflight.terminal.interrupt import shielded

Backend = Literal["loky", "dask", "ray"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

Submit = Callable[[Iterable[Any]], Iterator[Any]]


class BackendError(RuntimeError):
    """The backend cannot be used; says what to install or to pass."""


@contextmanager
def workers(backend: Backend, address: str | None, jobs: int) -> Iterator[Submit]:
    """Start (or reach) workers.

    Args:
        backend: ``loky``: processes on this machine. ``dask``, ``ray``: the cluster at `address`.
        address: the dask scheduler's (``tcp://host:8786``), or ray's (``auto``, ``ray://host:10001``).
        jobs: loky processes, -1 for one a core; a cluster brings its own.

    Yields:
        A function from joblib delayed calls to an iterator over their results, in the order they finish.

    Raises:
        BackendError: it is not installed, or nothing answers at the address.
    """
    with ExitStack() as stack:
        if backend == "dask":
            stack.enter_context(_dask(address))
            jobs = -1
        elif backend == "ray":
            stack.callback(_ray(address))
            jobs = -1
        elif address is not None:
            raise BackendError("--address goes with --backend dask or ray; loky runs on this machine")
        with joblib.parallel_config(backend=backend, n_jobs=jobs):
            return_as = "list" if backend == "ray" else "generator_unordered"
            pool = joblib.Parallel(return_as=return_as, batch_size=1)
            # A worker needs a second to start and load numba: let it, while this process reads the traces.
            first = [joblib.delayed(work.warm)()] * pool.n_jobs if backend == "loky" else []
            with shielded():
                running: Any = _started(pool, first)

            def submit(calls: Iterable[Any]) -> Iterator[Any]:
                nonlocal running
                for _ in running:
                    pass
                with shielded():
                    running = _started(pool, calls)
                return running  # type: ignore[no-any-return]

            try:
                yield submit
                for _ in running:  # nothing was submitted, everything was on disk
                    pass
            except BaseException:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # joblib: that tasks were cancelled, which is the point
                    running.close()
                if backend == "loky":
                    _stop_loky()
                raise


def _started(pool: joblib.Parallel, calls: Iterable[Any]) -> Iterator[Any]:
    """A generator over results, whether joblib gives one (it starts the calls at once) or a list."""
    results = pool(calls)
    return results if isinstance(results, Generator) else (each for each in results)


def _stop_loky() -> None:
    # Ctrl-C or a fault: whatever still runs in the workers is of no use, and waiting for it is not what was
    # asked.
    from joblib.externals.loky import get_reusable_executor

    get_reusable_executor().shutdown(wait=True, kill_workers=True)


def _dask(address: str | None) -> Any:
    try:
        from dask import distributed
    except ImportError as fault:
        raise BackendError(f"--backend dask: {fault}: pip install 'kv-singleflight[sim-dask]'") from None
    if address is None:
        raise BackendError("--backend dask needs --address, e.g. tcp://127.0.0.1:8786")
    try:
        connect: Any = distributed.Client
        client = connect(address, timeout="10s", set_as_default=True)
    except (OSError, TimeoutError, ValueError) as fault:
        raise BackendError(f"no dask scheduler answers at {address}: {fault}") from None
    return client


def _ray(address: str | None) -> Callable[[], object]:
    try:
        import ray
        from ray.util.joblib import register_ray
    except ImportError as fault:
        raise BackendError(f"--backend ray: {fault}: pip install 'kv-singleflight[sim-ray]'") from None
    try:
        ray.init(address=address, ignore_reinit_error=True)
    except (ConnectionError, RuntimeError, ValueError) as fault:
        raise BackendError(f"no ray cluster answers at {address}: {fault}") from None
    register_ray()
    shutdown: Callable[[], object] = ray.shutdown
    return shutdown
